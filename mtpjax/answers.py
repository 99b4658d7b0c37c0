"""Exact answers: what share of a task's problems a greedy decode solves whole."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from mtpjax.data import pack, tasks
from mtpjax.sampling import generate
from mtpjax.sampling.filters import Settings

BATCH = 256  # problems decoded at a time


class Answers:
  """The problems of held-out rows, and the one decode that answers them.

  Not every source has problems: then `measure` returns {}. Answers are decoded
  plainly, since drafts change no greedy text.
  """

  def __init__(self, graphdef: Any, rows: pack.Rows, count: int):
    self._graphdef = graphdef
    self._decoder: generate.Decoder | None = None
    self._problems: tasks.Examples | None = None
    if count and isinstance(rows, tasks.TaskRows):
      self._problems = rows.problems(count)

  def measure(self, params: Any) -> dict[str, Any]:
    """exact_match: share of the problems whose every answer token is right; problems:
    how many there were."""
    if self._problems is None or not len(self._problems.tokens):
      return {}
    tokens, starts = self._problems.tokens, self._problems.answer
    if self._decoder is None:
      longest = tokens.shape[1]
      self._decoder = generate.Decoder(self._graphdef, params, draft=0, longest=longest)
    else:
      self._decoder.take(params)
    right = 0
    count, batch = len(tokens), min(BATCH, len(tokens))
    for first in range(0, count, batch):
      # As many each time, so that one compilation serves them all; some come twice.
      index = np.arange(first, first + batch) % count
      own, start = tokens[index], starts[index]
      settings = [Settings(budget=own.shape[1] - int(n)) for n in start]
      out = self._decoder.generate(own, start, settings)
      each = zip(start, own, out.tokens, strict=True)
      for n, row, new in itertools.islice(each, count - first):
        right += np.array_equal(new[: len(row) - n], row[n:])
    return {'exact_match': right / len(tokens), 'problems': len(tokens)}


def table(figures: dict[str, Any]) -> str:
  """The same for people: one line, or none."""
  if 'exact_match' not in figures:
    return ''
  return (
    f'exact answers by greedy decoding: {figures["exact_match"]:.4f} of '
    f'{figures["problems"]:,} problems'
  )
