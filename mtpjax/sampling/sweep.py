"""A sweep over ways to decode: decoders over the same weights, and everything that is
measured of them, in turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from mtpjax.drafters import base
from mtpjax.sampling import simulated
from mtpjax.sampling.filters import Settings
from mtpjax.sampling.generate import Decoder
from mtpjax.sampling.jobs import Generation
from mtpjax.sampling.timing import (
  Batch,
  Request,
  Rounds,
  Variant,
  as_stream,
  in_the_loop,
  in_the_middle,
)

GREEDY = 'greedy'  # the rule's name where text is not drawn: none matters then


@dataclasses.dataclass
class Sweep:
  """What is compared.

  Attributes:
    draft: every K.
    rules: how drafts of drawn text are judged.
    batches: prompts side by side.
    concurrency: requests that arrive together; none is as many as a batch.
    temperature: 0 is greedy.
    stop: tokens that end a text.
    tokens: new ones of a prompt, at most.
    repeats: of everything, a first one to warm up not counted.
    accept: how often a simulated draft is right; None is the drafter's own.
  """

  draft: list[int]
  rules: list[str]
  batches: list[int]
  concurrency: list[int]
  temperature: float = 0.0
  stop: tuple[int, ...] = ()
  tokens: int = 64
  repeats: int = 5
  accept: float | None = None

  def settings(self, count: int, seed: int = 0) -> list[Settings]:
    """Of so many prompts, with seeds of their own."""
    return [
      Settings(self.tokens, self.temperature, seed=seed + n, stop=self.stop)
      for n in range(count)
    ]

  def requests(self, prompts: Sequence[Any]) -> list[Any]:
    """The prompts, again and again, until they fill the batches and may all be in
    flight."""
    widest = max(self.batches)
    count = max(len(prompts), *self.concurrency, 1)
    return [prompts[n % len(prompts)] for n in range(-(-count // widest) * widest)]

  def decoders(
    self, plain: Decoder, prompts: Sequence[Any]
  ) -> dict[Variant, tuple[Decoder, Decoder | None]]:
    """Every variant's, plain ones among them, and one over the same weights whose
    drafts cost nothing."""
    drafter = None if self.accept is None else self._simulated(plain, prompts)
    found = {}
    for rule in self.rules if self.temperature else [GREEDY]:
      own = {}
      for K in self.draft:
        judged = 'rejection' if rule == GREEDY else rule
        own[K] = (
          plain.over(K, judged, drafter),
          plain.over(K, judged, simulated.Free),
        )
      for batch in self.batches:
        found[Variant(0, rule, batch)] = plain, None
        found |= {Variant(K, rule, batch): pair for K, pair in own.items()}
    return found

  def _simulated(
    self, plain: Decoder, prompts: Sequence[Any]
  ) -> Callable[[base.Drafter], base.Drafter]:
    """A drafter whose drafts are right as often as `accept` says, of greedy text."""
    endless = [Settings(self.tokens, stop=())] * len(prompts)  # of its end, drafts too
    variant = Variant(0, GREEDY, max(self.batches))
    outs = [out for _, out in in_the_loop(plain, variant, prompts, endless, 0)]
    new = [row for out in outs for row in out.tokens[:, : self.tokens]]
    K = max(self.draft)
    size = max(map(len, prompts)) + self.tokens + K + 1
    texts = np.zeros((len(prompts), size), np.int32)
    for row, prompt, tokens in zip(texts, prompts, new, strict=True):
      row[: len(prompt)] = prompt
      row[len(prompt) : len(prompt) + len(tokens)] = tokens
    assert self.accept is not None
    right = simulated.right_drafts(self.accept, texts.shape, K)
    return lambda own: simulated.Simulated(own, texts, right)


def greedy_texts(
  decoder: Decoder, variant: Variant, ids: Sequence[Any], sweep: Sweep
) -> list[Generation]:
  """Of all prompts, a batch each."""
  settings = [Settings(sweep.tokens, stop=sweep.stop)] * len(ids)
  return [out for _, out in in_the_loop(decoder, variant, ids, settings, 0)]


def draws(
  decoder: Decoder,
  variant: Variant,
  prompts: Sequence[Any],
  settings: Settings,
  count: int,
) -> list[Int[np.ndarray, 'N L']]:
  """At least so many short texts drawn, by prompt, each with a seed of its own; -1 is
  behind their ends."""
  unit = variant.batch * len(prompts)
  count = -(-count // unit) * unit
  ids = [prompts[n % len(prompts)] for n in range(count)]
  each = [dataclasses.replace(settings, seed=settings.seed + n) for n in range(count)]
  rows = []
  for _, out in in_the_loop(decoder, variant, ids, each, 0):
    for tokens, length in zip(out.tokens, out.lengths, strict=True):
      row = np.full(settings.budget, -1)
      row[:length] = tokens[:length]
      rows.append(row)
  return [np.stack(rows[n :: len(prompts)]) for n in range(len(prompts))]


def measured(
  decoders: dict[Variant, tuple[Decoder, Decoder | None]],
  ids: Sequence[Any],
  sweep: Sweep,
) -> Iterator[list[Request] | list[Batch] | list[Rounds]]:
  """Everything once a repeat, each repeat beginning with another variant, so that a
  busy machine is busy for all of them. The first, number 0, is to warm up."""
  variants = list(decoders)
  # So few that no row ends within them.
  count = (sweep.tokens - 1) // (max(sweep.draft) + 1)
  for repeat in range(sweep.repeats + 1):
    own = sweep.settings(len(ids), repeat * len(ids))
    endless = [dataclasses.replace(s, stop=()) for s in own]
    turn = repeat % len(variants)
    for variant in variants[turn:] + variants[:turn]:
      decoder, free = decoders[variant]
      yield [b for b, _ in in_the_loop(decoder, variant, ids, own, repeat)]
      yield [
        request
        for c in sweep.concurrency or [variant.batch]
        for request in as_stream(decoder, variant, ids, own, c, repeat)
      ]
      for part, one in (('round', decoder), ('verify', free)):
        if one is not None:
          yield list(in_the_middle(one, variant, ids, endless, repeat, part, count))
