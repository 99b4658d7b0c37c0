"""Making data: prompts from a queue against batch by batch, the same texts.

  python benchmarks/throughput.py [--drafts=0] [--prompts=64] [--rows=8] [--json=FILE]

A trunk of width 256 with 4 layers, weights at random, prompts of 32 tokens and texts of
22 to 220, spread evenly over 1:10 and drawn at temperature 1. Their ends are known
beforehand (`budgets`: each prompt has its own) or not (`stops`: all have the largest,
and each ends at a token of its text). Batch by batch, the prompts are taken as they
come. Each repeat times both forms, one after the other; medians are printed, compile
time apart.

idle        share of the rounds of all rows in which one had no text to go on with
prefill     of 8 samples of one prompt of 480 tokens, read once and read 8 times

`--tiny` is a small shape, which shows only that everything runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from mtpjax import mesh, metrics, model
from mtpjax.drafters import sequential
from mtpjax.models import trunk
from mtpjax.sampling.filters import Settings
from mtpjax.sampling.generate import Decoder, Generation

SAMPLES = 8


def decoder(args: argparse.Namespace) -> Decoder:
  vocab, width, layers = (64, 32, 1) if args.tiny else (8192, 256, 4)
  sizes = trunk.Config(vocab=vocab, width=width, layers=layers, tied=True)
  sizes.finalize()
  part = sequential.Config(depth=args.drafts, attend='rows') if args.drafts else None
  graphdef, _, make = model.init(sizes, {'drafter': part} if part else {}, 0)
  return Decoder(graphdef, make())


def seconds(repeats: int, *forms: Callable[[], Any]) -> list[float]:
  """Medians of each, after a first time that compiles."""
  times: list[list[float]] = [[] for _ in forms]
  for n in range(repeats + 1):
    for form, own in zip(forms, times, strict=True):
      began = time.perf_counter()
      form()
      if n:
        own.append(time.perf_counter() - began)
  return [statistics.median(own) for own in times]


def uneven(args: argparse.Namespace, model: Decoder, known: bool) -> dict[str, Any]:
  """Both forms on the same texts."""
  Q, rows, P, L = args.prompts, args.rows, args.prompt, args.tokens
  random = np.random.default_rng(0)
  prompts, lengths = random.integers(0, model.vocab, (Q, P)), np.full(Q, P)
  ends = random.permutation(np.linspace(L / 10, L, Q).astype(int))
  settings = [Settings(budget=L, temperature=1.0, seed=q) for q in range(Q)]
  if known:
    settings = [
      dataclasses.replace(own, budget=int(end))
      for own, end in zip(settings, ends, strict=True)
    ]
  else:
    whole = model.throughput(prompts, lengths, settings, rows=rows)
    settings = [
      dataclasses.replace(own, stop=(int(text[end - 1]),))
      for own, text, end in zip(settings, whole.tokens, ends, strict=True)
    ]

  def batches() -> list[Generation]:
    parts = [slice(n, n + rows) for n in range(0, Q, rows)]
    return [model.generate(prompts[p], lengths[p], settings[p]) for p in parts]

  def queue() -> Generation:
    return model.throughput(prompts, lengths, settings, rows=rows)

  apart, together = batches(), queue()
  texts = [
    t[:n].tolist() for b in apart for t, n in zip(b.tokens, b.lengths, strict=True)
  ]
  assert texts == [
    t[:n].tolist() for t, n in zip(together.tokens, together.lengths, strict=True)
  ]
  batch_seconds, queue_seconds = seconds(args.repeats, batches, queue)
  return {
    'tokens': int(together.lengths.sum()),
    'shortest': int(together.lengths.min()),
    'longest': int(together.lengths.max()),
    'batch_seconds': batch_seconds,
    'queue_seconds': queue_seconds,
    'ratio': batch_seconds / queue_seconds,
    'batch_idle': statistics.mean(b.idle for b in apart),
    'queue_idle': together.idle,
  }


def shared(args: argparse.Namespace, model: Decoder) -> dict[str, Any]:
  """Samples that end with their first token: a prefill alone."""
  P = 16 if args.tiny else 480
  prompts = np.random.default_rng(1).integers(0, model.vocab, (1, P))
  own = Settings(budget=1, temperature=1.0)
  each = [own.sample(n) for n in range(SAMPLES)]
  many, lengths = np.repeat(prompts, SAMPLES, 0), np.full(SAMPLES, P)
  once, apart = seconds(
    args.repeats,
    lambda: model.generate(prompts, lengths[:1], own, samples=SAMPLES),
    lambda: model.generate(many, lengths, each),
  )
  return {'shared_seconds': once, 'apart_seconds': apart, 'ratio': apart / once}


def table(found: dict[str, Any]) -> str:
  lines = [f'{"":20}{"batches":>12}{"queue":>12}{"ratio":>8}   idle']
  for name in ('budgets', 'stops'):
    own = found[name]
    rates = (own['tokens'] / own[f'{form}_seconds'] for form in ('batch', 'queue'))
    lines.append(
      f'{name + ", tokens/s":20}'
      + ''.join(f'{rate:12,.0f}' for rate in rates)
      + f'{own["ratio"]:8.2f}   {own["batch_idle"]:.2f}, {own["queue_idle"]:.2f}'
    )
  own = found['prefill']
  times = (own[f'{form}_seconds'] * 1e3 for form in ('apart', 'shared'))
  lines.append(
    f'{f"{SAMPLES} samples, prefill ms":20}'
    + ''.join(f'{ms:12,.0f}' for ms in times)
    + f'{own["ratio"]:8.2f}'
  )
  return '\n'.join(lines)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--drafts', type=int, default=0)
  parser.add_argument('--prompts', type=int, default=64)
  parser.add_argument('--rows', type=int, default=8, help='side by side')
  parser.add_argument('--prompt', type=int, default=32, help='tokens of a prompt')
  parser.add_argument('--tokens', type=int, default=220, help='of the longest text')
  parser.add_argument('--repeats', type=int, default=5)
  parser.add_argument('--json', type=pathlib.Path, help='a file for the figures')
  parser.add_argument('--tiny', action='store_true')
  args = parser.parse_args()
  if args.tiny:
    args.prompts, args.rows, args.tokens, args.repeats = 12, 4, 20, 1
  with jax.set_mesh(mesh.make(mesh.Config())):
    model = decoder(args)
    found = {
      'budgets': uneven(args, model, known=True),
      'stops': uneven(args, model, known=False),
      'prefill': shared(args, model),
      'compile_seconds': sum(model.compilations.values()),
      'conditions': metrics.conditions() | {**vars(args), 'json': None},
    }
  print(table(found), flush=True)
  if args.json:
    metrics.write_summary(args.json, found)


if __name__ == '__main__':
  main()
