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

  Not every source has problems, nor every domain of a mixture: without any, `measure`
  returns {}. Answers are decoded plainly, since drafts change no greedy text.

  Args:
    count: problems of each domain, at most.
  """

  def __init__(self, graphdef: Any, rows: pack.Rows, count: int):
    self._graphdef = graphdef
    self._decoder: generate.Decoder | None = None
    parts = rows.parts if isinstance(rows, pack.Join) else {'': rows}
    problems = {
      name: part.problems(count)
      for name, part in parts.items()
      if count and isinstance(part, tasks.TaskRows)
    }
    self._problems = {n: own for n, own in problems.items() if len(own.tokens)}

  def measure(self, params: Any) -> dict[str, Any]:
    """exact_match: share of the problems whose every answer token is right; problems:
    how many there were; of a mixture also exact_match_by_domain."""
    if not self._problems:
      return {}
    if self._decoder is None:
      longest = max(own.tokens.shape[1] for own in self._problems.values())
      self._decoder = generate.Decoder(self._graphdef, params, draft=0, longest=longest)
    else:
      self._decoder.take(params)
    right = {n: self._right(self._decoder, own) for n, own in self._problems.items()}
    counts = {name: len(own.tokens) for name, own in self._problems.items()}
    shares = {name: right[name] / counts[name] for name in counts if name}
    return {
      'exact_match': sum(right.values()) / sum(counts.values()),
      'problems': sum(counts.values()),
      **({'exact_match_by_domain': shares} if shares else {}),
    }

  def _right(self, decoder: generate.Decoder, problems: tasks.Examples) -> int:
    tokens, starts = problems.tokens, problems.answer
    right, count, batch = 0, len(tokens), min(BATCH, len(tokens))
    for first in range(0, count, batch):
      # As many each time, so that one compilation serves them all; some come twice.
      index = np.arange(first, first + batch) % count
      own, start = tokens[index], starts[index]
      settings = [Settings(budget=own.shape[1] - int(n)) for n in start]
      out = decoder.generate(own, start, settings)
      each = zip(start, own, out.tokens, strict=True)
      for n, row, new in itertools.islice(each, count - first):
        right += np.array_equal(new[: len(row) - n], row[n:])
    return right


def table(figures: dict[str, Any]) -> str:
  """The same for people: one line, or none."""
  if 'exact_match' not in figures:
    return ''
  shares = figures.get('exact_match_by_domain', {})
  each = ', '.join(f'{share:.4f} of {name}' for name, share in shares.items())
  return (
    f'exact answers by greedy decoding: {figures["exact_match"]:.4f} of '
    f'{figures["problems"]:,} problems' + (f' ({each})' if len(shares) > 1 else '')
  )
