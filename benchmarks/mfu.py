"""What an accelerator makes of the 1B preset: the share of its peak that training
reaches, what a step costs more with an MTP module of depth 1, and what drafting gains.

  python benchmarks/mfu.py [--rows=8] [--length=4096] [--remat=dots] [--json=FILE]

Training runs on all devices, rows of a batch over them; random tokens, one document a
row, bfloat16 and the platform's attention kernel on an accelerator. Each repeat times
both depths, one after the other; medians are printed, compile time apart. MFU is model
FLOPs over the time and the devices' bfloat16 peak: nothing computed twice, attention
whole as if it were not causal (Chowdhery et al. 2022). Goal: 45% on an H200.

Decoding is on one device, batch 1, greedy, weights at random; drafts are computed and
then replaced by right ones in a fixed pattern (benchmarks/decoding.py). `--tiny` is a
small shape, for a CPU: it shows only that everything runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import pathlib
import statistics
import time
from typing import Any

import decoding
import jax
import numpy as np

from mtpjax import config as configs
from mtpjax import flops, mesh, metrics, model, step
from mtpjax.models import trunk

PRESETS = pathlib.Path(__file__).parents[1] / 'configs' / 'presets.py'


def preset(args: argparse.Namespace) -> configs.Config:
  """The 1B preset with the batch of a few devices, or a small one."""
  spec = importlib.util.spec_from_file_location('presets', PRESETS)
  assert spec is not None and spec.loader is not None
  presets = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(presets)
  config = presets.get_config('1b')
  if args.tiny:
    config.trunk = trunk.Config(vocab=1024, width=64, layers=1, heads=2, tied=True)
  rows = args.rows * jax.device_count()
  config.data.batch, config.data.shards = rows, 1
  config.data.length, config.trunk.remat = args.length, args.remat
  config.data.pack = False  # one document a row: no mask but the causal one
  return config


class Training:
  """A compiled step, its state, and the times of its steps."""

  def __init__(self, config: configs.Config):
    configs.finalize(config)
    self.config = config
    graphdef, _, make = model.init(config.trunk, config.parts(), config.seed)
    self.state = jax.jit(lambda p: step.init_state(p, config))(make())
    began = time.perf_counter()
    self.step = step.compile_train(graphdef, config, self.state)
    self.compile_seconds = time.perf_counter() - began
    self.memory: Any = self.step.memory_analysis()
    self.flops = flops.of_model(config).flops
    self.compiled = flops.of_compiled(self.step)
    shape = config.data.batch // jax.process_count(), config.data.length
    ids = np.random.default_rng(0).integers(0, config.trunk.vocab or 0, shape)
    at = np.broadcast_to(np.arange(shape[1]), shape)
    self.arrays = step.put(
      {
        'tokens': ids.astype(np.int32),
        'positions': at.astype(np.int32),
        'segments': np.ones(shape, np.int32),
        'mask': np.ones(shape, bool),
      }
    )
    self.seconds: list[float] = []  # of a step, once for each repeat

  def run(self, count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
      self.state, out = self.step(self.state, self.arrays)
    jax.block_until_ready(out['loss'])
    return (time.perf_counter() - began) / count

  def figures(self) -> dict[str, Any]:
    seconds = statistics.median(self.seconds)
    peak = flops.peak(jax.devices()[0].device_kind)
    tokens = self.config.data.batch * self.config.data.length
    devices = jax.device_count()
    return {
      'step_seconds': seconds,
      'tokens_per_second': tokens / seconds,
      'model_flops_per_token': self.flops / tokens,
      'compiled_flops_per_token': self.compiled.flops * devices / tokens,
      'not_counted': self.compiled.unknown,
      'mfu': self.flops / seconds / (peak * devices) if peak else None,
      'temporary_bytes': self.memory.temp_size_in_bytes,
      'compile_seconds': self.compile_seconds,
    }


def train(args: argparse.Namespace) -> dict[str, Any]:
  """Depth 0 and depth 1, one after the other in every repeat."""
  with jax.set_mesh(mesh.make(mesh.Config())):
    one = preset(args)
    both = [Training(dataclasses.replace(preset(args), drafter=None)), Training(one)]
    for own in both:
      own.run(1)
    for _ in range(args.repeats):
      for own in both:
        own.seconds.append(own.run(args.steps))
  ratios = [b / a for a, b in zip(both[0].seconds, both[1].seconds, strict=True)]
  return {
    'depth_0': both[0].figures(),
    'depth_1': both[1].figures(),
    'time_ratio': statistics.median(ratios),
    'flops_ratio': both[1].flops / both[0].flops,
  }


def decode(args: argparse.Namespace) -> dict[str, Any]:
  """Plain and speculative, one after the other in every repeat."""
  K, shape = args.drafts, preset(args).trunk
  with jax.set_mesh(mesh.make(mesh.Config(fsdp=1), jax.local_devices()[:1])):
    shape.finalize()
    plain = decoding.rounds(None, 0, args.slots, shape=shape)
    tokens = np.asarray(plain.out.tokens)[:, : args.slots + K + 1]
    text = decoding.script(tokens, K)
    real = decoding.Forced(depth=K, attend='rows')
    drafted = decoding.rounds(real, K, args.slots, text, shape)
    for _ in range(args.repeats):
      plain.measure()
      drafted.measure()
  rounds = int(drafted.out.rounds.sum())
  new = int(plain.out.rounds.sum())
  ratios = [a / b for a, b in zip(plain.times, drafted.times, strict=True)]
  return {
    'plain_tokens_per_second': new / plain.median,
    'speculative_tokens_per_second': new / drafted.median,
    'speed_up': statistics.median(ratios),
    'tau': 1 + int(np.sum(drafted.out.accepted)) / rounds,
    'drafts': K,
    'compile_seconds': [plain.compile_seconds, drafted.compile_seconds],
  }


def table(found: dict[str, Any]) -> str:
  conditions, decoded = found['conditions'], found['decoding']
  lines = [
    f'{conditions["device_count"]} × {conditions["device"]}, {found["parameters"]:,} '
    f'parameters, {found["rows"]} × {found["length"]} tokens, remat {found["remat"]}',
    'training      s/step  tokens/s  FLOPs/token  compiled    MFU  temporary  compile',
  ]
  for depth in ('depth_0', 'depth_1'):
    own = found['training'][depth]
    mfu = '      –' if own['mfu'] is None else f'{own["mfu"]:7.1%}'
    lines.append(
      f'{depth.replace("_", " "):12} {own["step_seconds"]:7.3f} '
      f'{own["tokens_per_second"]:9,.0f} {own["model_flops_per_token"]:12.3g} '
      f'{own["compiled_flops_per_token"]:9.3g}{mfu} '
      f'{own["temporary_bytes"] / 2**30:8.2f} GiB {own["compile_seconds"]:6.1f} s'
    )
    if own['not_counted']:
      lines.append(f'  compiled without {own["not_counted"]}')
  trained = found['training']
  first, second = decoded['compile_seconds']
  return '\n'.join(
    [
      *lines,
      f'depth 1 / 0  {trained["time_ratio"]:7.3f} of the time, '
      f'{trained["flops_ratio"]:.3f} of the FLOPs',
      f'decoding     {decoded["plain_tokens_per_second"]:.1f} tokens/s plain, '
      f'{decoded["speculative_tokens_per_second"]:.1f} with {decoded["drafts"]} '
      f'drafts: {decoded["speed_up"]:.3f} ×, τ {decoded["tau"]:.3f} as told; '
      f'compiled in {first:.1f}, {second:.1f} s',
    ]
  )


def main(argv: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--rows', type=int, default=8, help='of a batch, a device')
  parser.add_argument('--length', type=int, default=4096)
  parser.add_argument('--remat', default='dots', help='none, dots, offload or full')
  parser.add_argument('--steps', type=int, default=10, help='a repeat')
  parser.add_argument('--repeats', type=int, default=5)
  parser.add_argument('--drafts', type=int, default=3)
  parser.add_argument('--slots', type=int, default=256, help='of the cache')
  parser.add_argument('--json', type=pathlib.Path, help='a file for the figures')
  parser.add_argument('--tiny', action='store_true')
  args = parser.parse_args(argv)
  if args.tiny:
    args.rows, args.length, args.steps, args.repeats, args.slots = 2, 64, 2, 3, 64
  trained = train(args)
  config = preset(args)
  with jax.set_mesh(mesh.make(mesh.Config())):
    configs.finalize(config)
    _, params, _ = model.init(config.trunk, {}, 0)
  found = {
    'parameters': sum(x.size for x in jax.tree.leaves(params)),
    'rows': config.data.batch,
    'length': args.length,
    'remat': args.remat,
    'training': trained,
    'decoding': decode(args),
    'conditions': metrics.conditions(),
  }
  print(table(found), flush=True)
  if args.json:
    metrics.write_summary(args.json, found)


if __name__ == '__main__':
  main()
