"""Plain and speculative decoding by the clock: raw records of requests, batches and
rounds, and the figures that follow from them and from nothing else.

A request is timed as it streams, a batch in the loop that decodes it in one call. Times
are seconds of one process; whatever compiles has compiled before.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from mtpjax.sampling.filters import Settings
from mtpjax.sampling.generate import Decoder, pad
from mtpjax.sampling.jobs import Generation
from mtpjax.sampling.stats import Stats


@dataclasses.dataclass(frozen=True)
class Variant:
  """One way to decode: drafts a round (0 is plain), rule, prompts side by side."""

  draft: int
  rule: str
  batch: int


@dataclasses.dataclass
class Request:
  """One request as it streamed.

  Attributes:
    concurrency: requests that arrived together; they are served in batches, in turn.
    repeat, prompt: which time, and which of the prompts.
    arrival: when it came.
    times: when each of its tokens was there; those of a round come together.
  """

  variant: Variant
  concurrency: int
  repeat: int
  prompt: int
  arrival: float
  times: list[float]

  @property
  def ttft(self) -> float:
    """To the first token, waiting for earlier batches included."""
    return self.times[0] - self.arrival

  @property
  def tpot(self) -> float | None:
    """A token after the first; None where there is none."""
    count = len(self.times) - 1
    return (self.times[-1] - self.times[0]) / count if count > 0 else None


@dataclasses.dataclass
class Batch:
  """One batch in the loop.

  Attributes:
    rows, slots: of the buffers, fill included.
    rounds: of the loop, those of its longest row.
    prefill, decode: seconds of reading the prompts, and of all rounds until the tokens
      are on the host.
    stats: what was counted.
  """

  variant: Variant
  repeat: int
  rows: int
  slots: int
  rounds: int
  prefill: float
  decode: float
  stats: Stats

  @property
  def positions(self) -> dict[str, int]:
    """What became of all positions that the loop's rounds computed.

    last: a live row's last token, which yields the token after the accepted drafts.
    accepted, refused: proposed drafts that were delivered, and that were not.
    padded: of no use: rows that were done or only fill the buffers up, drafts that a
      row did not ask for.
    """
    proposed, accepted = int(self.stats.proposed.sum()), int(self.stats.kept.sum())
    found = {
      'last': self.stats.rounds,
      'accepted': accepted,
      'refused': proposed - accepted,
    }
    total = self.rows * self.rounds * (self.variant.draft + 1)
    return {**found, 'padded': total - sum(found.values())}


@dataclasses.dataclass
class Rounds:
  """The first `count` rounds of a batch, in one call.

  Attributes:
    part: 'round' is a whole one, 'verify' one whose drafts cost nothing.
  """

  variant: Variant
  repeat: int
  part: str
  count: int
  seconds: float

  @property
  def each(self) -> float:
    return self.seconds / self.count


def to_json(record: Request | Batch | Rounds) -> dict[str, Any]:
  """A record as it is stored; a request's times count from its arrival."""
  found = {**vars(record.variant), **vars(record)}
  del found['variant']
  if isinstance(record, Request):
    del found['arrival']
    found['times'] = [round(t - record.arrival, 7) for t in record.times]
  if isinstance(record, Batch):
    found['stats'] = vars(record.stats)
  return found


def as_stream(
  decoder: Decoder,
  variant: Variant,
  ids: Sequence[Any],
  settings: Sequence[Settings],
  concurrency: int,
  repeat: int,
) -> list[Request]:
  """All prompts, `concurrency` of them arriving together once those before are done."""
  found = []
  for first in range(0, len(ids), concurrency):
    arrival = time.perf_counter()
    for rows in _batches(range(first, min(first + concurrency, len(ids))), variant):
      requests = [
        Request(variant, concurrency, repeat, row, arrival, []) for row in rows
      ]
      rounds = decoder.stream(*pad([ids[r] for r in rows]), [settings[r] for r in rows])
      for out in rounds:
        now = time.perf_counter()
        for own, length in zip(requests, out.lengths, strict=True):
          own.times += [now] * (int(length) - len(own.times))
      found += requests
  return found


def in_the_loop(
  decoder: Decoder,
  variant: Variant,
  ids: Sequence[Any],
  settings: Sequence[Settings],
  repeat: int,
) -> Iterator[tuple[Batch, Generation]]:
  """All prompts, batch after batch."""
  for rows in _batches(range(len(ids)), variant):
    own = [settings[r] for r in rows]
    prompts, lengths = pad([ids[r] for r in rows])
    began = time.perf_counter()
    run = decoder.start(prompts, lengths, own)
    run.wait()
    read = time.perf_counter()
    run.go_on()
    out = run.fetch()
    ended = time.perf_counter()
    # A row is live from the first round until it is done.
    rounds = max(row.rounds for row in out.rows)
    found = Batch(
      variant,
      repeat,
      run.rows,
      run.slots,
      rounds,
      read - began,
      ended - read,
      out.stats,
    )
    yield found, out


def in_the_middle(
  decoder: Decoder,
  variant: Variant,
  ids: Sequence[Any],
  settings: Sequence[Settings],
  repeat: int,
  part: str,
  count: int,
) -> Iterator[Rounds]:
  """The first rounds of every batch; no row may end within them."""
  for rows in _batches(range(len(ids)), variant):
    prompts, lengths = pad([ids[r] for r in rows])
    run = decoder.start(prompts, lengths, [settings[r] for r in rows])
    run.wait()
    began = time.perf_counter()
    run.go_on(count)
    run.wait()
    yield Rounds(variant, repeat, part, count, time.perf_counter() - began)


def _batches(rows: range, variant: Variant) -> Iterator[range]:
  for start in range(0, len(rows), variant.batch):
    yield rows[start : start + variant.batch]


def percentile(values: Iterable[float], percent: int) -> float:
  """By nearest rank: the least value that so many percent do not exceed."""
  ranked = sorted(values)
  return ranked[max(0, -(-percent * len(ranked) // 100) - 1)]


def spread(values: Iterable[float | None]) -> dict[str, Any]:
  """n, mean, p50, p95, p99 and max of those that are there; None without any."""
  there = [x for x in values if x is not None]
  found: dict[str, Any] = {'n': len(there), 'mean': None}
  if there:
    found['mean'] = float(np.mean(there))
  for p in (50, 95, 99, 100):
    name = 'max' if p == 100 else f'p{p}'
    found[name] = percentile(there, p) if there else None
  return found


def tokens_per_second(batches: Sequence[Batch]) -> float:
  """Delivered ones alone, prompts' time included."""
  seconds = sum(b.prefill + b.decode for b in batches)
  return sum(b.stats.delivered for b in batches) / seconds
