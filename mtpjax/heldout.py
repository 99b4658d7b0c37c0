"""The loss on held-out rows, every row once: what training ends with and
`python -m mtpjax.evaluate` repeats."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from mtpjax import step
from mtpjax.data import batches, pack
from mtpjax.drafters import base
from mtpjax.fields import ConfigError
from mtpjax.model import NEXT


@dataclasses.dataclass
class Config:
  """Evaluation while training; at the end all held-out rows are read in any case."""

  every: int | None = None  # steps; None: at the end only
  batches: int | None = None  # of each domain, while training; None: all
  problems: int = 1024  # of a task, answered by greedy decoding; 0: none
  keep_best: bool = True  # the checkpoint of the lowest next-token loss, in best/

  def finalize(self, field: str = 'evaluation') -> None:
    for name in ('every', 'batches', 'problems'):
      value, least = getattr(self, name), int(name != 'problems')
      if value is not None and value < least:
        fix = f'use at least {least}' + (', or None' if least else '')
        raise ConfigError(f'{field}.{name}', value, 'is too small', fix)


def evaluate(
  compiled: Callable,
  params: dict,
  config: Any,
  rows: pack.Rows,
  watch=iter,
  limit: int | None = None,
) -> dict[str, Any]:
  """Losses, agreements and counts by depth over all rows; each mean divides once.

  Args:
    compiled: from `step.compile_eval`.
    watch: wraps the iterator over batches, to show progress.
    limit: batches of each domain, at most.

  Returns:
    loss: nats a token, of the next token.
    loss_by_depth, bits_per_byte_by_depth, agreement_by_depth, counts_by_depth: of the
      next token and then each depth of the drafter; None where nothing was counted.
    objectives: the same of every other objective, by name, with the `unit` of its loss
      and what its `agreement` is.
    domains: all of this of each domain by name, where there are several.
  """
  totals: dict[str, Any] = {}
  batch = config.data.batch
  for name, arrays in watch(_batches(config, rows, limit)):
    out = jax.device_get(compiled(params, step.put(arrays, batch)))
    # float64 on the host: a long evaluation must not lose its last batches.
    out = jax.tree.map(lambda x: np.asarray(x, np.float64), out)
    totals[name] = jax.tree.map(np.add, totals[name], out) if name in totals else out
  if not totals:
    names = ('loss', 'agreement', 'counts', 'bits_per_byte')
    return {'loss': None, **{f'{n}_by_depth': [] for n in names}, 'objectives': {}}
  whole = functools.reduce(lambda a, b: jax.tree.map(np.add, a, b), totals.values())
  figures = _figures(config, whole)
  if len(rows.domains) > 1:
    figures['domains'] = {name: _figures(config, own) for name, own in totals.items()}
  return figures


def _figures(config: Any, total: Any) -> dict[str, Any]:
  sums, lengths = total
  tables = {name: _means(sums[name], lengths.get(name)) for name in sums}
  first, drafter = tables.pop(NEXT), tables.pop('drafter', {})
  figures = {name: first[name] + drafter.get(name, []) for name in first}
  parts = config.parts()
  for name, table in tables.items():
    table |= {'unit': parts[name].unit, 'agreement': parts[name].agreement}
  return {'loss': figures['loss_by_depth'][0], **figures, 'objectives': tables}


def table(figures: dict[str, Any], title: str = 'held out') -> str:
  """The same for people: a row a depth, and a heading wherever the units change."""
  if figures['loss'] is None:
    return f'{title}: nothing; set data.source.heldout, a fraction, to hold out some'
  usual = base.Config
  rows, said = [], None
  parts = {'': figures, **figures['objectives']}
  units = {name: part.get('unit', usual.unit) for name, part in parts.items()}
  for name in sorted(parts, key=lambda name: units[name] != usual.unit):  # it is stable
    part, unit = parts[name], units[name]
    heading = ('depth', unit, 'bits/byte', part.get('agreement', usual.agreement))
    if heading != said:
      rows.append((*heading, 'targets'))
      said = heading
    bits = part.get('bits_per_byte_by_depth') or [None] * len(part['loss_by_depth'])
    columns = (
      part['loss_by_depth'],
      bits,
      part['agreement_by_depth'],
      part['counts_by_depth'],
    )
    for depth, (loss, bit, agreement, count) in enumerate(zip(*columns, strict=True)):
      label = f'{name} {depth + 1}' if name else str(depth) if depth else 'next'
      rows.append(
        (label, _number(loss), _number(bit), _number(agreement, 3), f'{count:,}')
      )
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = [
    '  '.join(x.rjust(w) for x, w in zip(row, widths, strict=True)) for row in rows
  ]
  for name, own in figures.get('domains', {}).items():
    lines.append(table(own, name))
  return '\n'.join([f'{title}:', *lines])


def brief(figures: dict[str, Any]) -> str:
  """The same in a line: losses by depth, of each domain, and exact answers."""
  if figures['loss'] is None:
    return 'nothing'
  parts = {'': figures, **figures.get('domains', {})}
  said = [
    ' '.join([name, *(_number(x) for x in own['loss_by_depth'])]).strip()
    for name, own in parts.items()
  ]
  if 'exact_match' in figures:
    said.append(f'exact answers {figures["exact_match"]:.4f}')
  return ', '.join(said)


def _number(value: float | None, digits: int = 4) -> str:
  return '-' if value is None else f'{value:.{digits}f}'


def count(config: Any, rows: pack.Rows, limit: int | None = None) -> int:
  """How many batches an evaluation takes."""
  each = (
    -(-(end - first) // config.data.batch) for first, end in rows.domains.values()
  )
  return sum(n if limit is None else min(n, limit) for n in each)


def _batches(
  config: Any, rows: pack.Rows, limit: int | None
) -> Iterator[tuple[str, dict]]:
  """(domain, batch), no batch of two domains."""
  for name in rows.domains:
    batch = config.data.batch
    own = batches.heldout_batches(pack.domain(rows, name), batch, step.rows_held(batch))
    yield from ((name, arrays) for arrays in itertools.islice(own, limit))


def _means(sums: Any, lengths: np.ndarray | None) -> dict[str, Any]:
  counts = [int(n) for n in sums.count]
  figures: dict[str, Any] = {
    'loss_by_depth': _divide(sums.nll, counts),
    'agreement_by_depth': _divide(sums.correct, counts),
    'counts_by_depth': counts,
  }
  if lengths is not None:
    figures['bits_per_byte_by_depth'] = _divide(sums.nll / math.log(2), lengths)
  return figures


def _divide(sums, counts) -> list[float | None]:
  return [float(s / n) if n else None for s, n in zip(sums, counts, strict=True)]
