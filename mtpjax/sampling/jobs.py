"""A batch or a queue of prompts on the devices, and what it was continued with.

Rows and lengths are rounded up to powers of two, so that few shapes are compiled.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from mtpjax import mesh
from mtpjax.sampling import filters
from mtpjax.sampling.filters import Sampling, Settings
from mtpjax.sampling.rows import shards
from mtpjax.sampling.state import FAILED, LENGTH, STOP, State
from mtpjax.sampling.stats import Stats
from mtpjax.sampling.stops import Strings

REASONS = {STOP: 'stop', LENGTH: 'length', FAILED: 'failed'}
SHORTEST = 64  # slots of the smallest bucket
Padding = Literal['right', 'left']


@dataclasses.dataclass
class Generation:
  """What a batch of prompts was continued with; N is the most new tokens of a row.

  Attributes:
    tokens: new tokens, int [B, N]; past a row's length they are 0.
    lengths: how many each row has, int [B].
    finish_reason: 'stop', 'length' (of the budget) or 'failed' (the model gave no
      distribution; what came before is sound); None while it is not done.
    logprobs: of each token under the model itself, before temperature and filters, in
      nats, float [B, N].
    drafted: which are accepted drafts, bool [B, N].
    rows: what was counted, by row.
    idle: share of the rounds of all rows side by side in which one had no text to go on
      with, those that fill up a bucket among them.
  """

  tokens: Int[np.ndarray, 'B N']
  lengths: Int[np.ndarray, ' B']
  finish_reason: list[str | None]
  logprobs: Float[np.ndarray, 'B N']
  drafted: Bool[np.ndarray, 'B N']
  rows: list[Stats]
  idle: float

  @property
  def stats(self) -> Stats:
    """Of the batch."""
    return functools.reduce(Stats.__add__, self.rows)


@dataclasses.dataclass
class Job:
  """A call's arguments on the devices.

  Attributes:
    sizes: rows side by side, and their slots.
    samples: of each prompt.
    place: where on the devices each text comes out.
    counts: how many prompts each device has.
  """

  sizes: tuple[int, int]
  samples: int
  place: Int[np.ndarray, ' B']
  prompts: Array
  lengths: Array
  sampling: Sampling
  counts: Array

  @classmethod
  def of(
    cls,
    prompts: Int[np.ndarray, 'B P'],
    lengths: Int[np.ndarray, ' B'],
    each: list[Settings],
    draft: int,
    key: Key[Array, ''] | None,
    *,
    padding: Padding,
    samples: int,
    rows: int | None,
    strings: Callable[[list[Settings]], Strings | None],
  ) -> Job:
    """Puts checked prompts on the devices of the mesh that is set.

    Args:
      rows: texts side by side, at most; None: all of them.
      strings: compiles the stop strings of so many rows.
    """
    B, P = prompts.shape
    needed = max(int(n) + own.budget for n, own in zip(lengths, each, strict=True))
    slots = _power(max(needed, SHORTEST))
    devices = shards()
    size = _power(-(-B // devices))  # prompts of each device
    place = np.arange(B)
    if rows is not None:
      # Dealt out in turn, so that devices have as much to do.
      first = np.argsort([-own.budget for own in each], kind='stable')
      place[first] = np.arange(B) % devices * size + np.arange(B) // devices
    ids = np.zeros((devices * size, slots), np.int32)
    # Rows that fill up the bucket are done before they start.
    full = np.ones(devices * size, np.int32)
    full[place] = lengths
    own = [[Settings(budget=0)] * samples] * (devices * size)
    for row, at in enumerate(place):
      length = lengths[row]
      start = P - length if padding == 'left' else 0
      ids[at, :length] = prompts[row, start : start + length]
      own[at] = [each[row].sample(n) for n in range(samples)]
    counts = (B + np.arange(devices)[::-1]) // devices
    side = size if rows is None else min(size, max(1, rows // (devices * samples)))
    every = [one for some in own for one in some]
    return cls(
      (devices * side * samples, slots),
      samples,
      (place[:, None] * samples + np.arange(samples)).reshape(-1),
      jax.device_put(ids, mesh.whole_BT),
      jax.device_put(full, mesh.ids_B),
      filters.arrays(every, draft, key, strings(every)),
      jax.device_put(counts.astype(np.int32), mesh.ids_B),
    )

  def generation(self, state: State) -> Generation:
    """What an engine's state on the host says of the texts."""
    length = np.asarray(state.length)[self.place]
    prompt = np.asarray(state.prompt)[self.place]
    lengths = length - prompt
    at = prompt[:, None] + np.arange(int(lengths.max()))[None]
    there = at < length[:, None]

    def new(table):
      rows = np.asarray(table)[self.place]
      found = np.take_along_axis(rows, np.minimum(at, rows.shape[1] - 1), 1)
      return np.where(there, found, np.zeros((), rows.dtype))

    stats = [Stats.of(state, slice(n, n + 1)) for n in self.place]
    rounds = self.sizes[0] * (int(state.passes) - 1)
    busy = sum(own.rounds for own in stats)
    return Generation(
      new(state.tokens),
      lengths,
      [REASONS.get(int(r)) for r in np.asarray(state.reason)[self.place]],
      new(state.logprobs),
      new(state.drafted),
      stats,
      1 - busy / rounds if rounds else 0.0,
    )


def _power(number: int) -> int:
  return 1 << max(0, number - 1).bit_length()
