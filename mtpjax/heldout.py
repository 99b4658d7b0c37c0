"""The loss on held-out rows, every row once: what training ends with and
`python -m mtpjax.evaluate` repeats."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from mtpjax import step
from mtpjax.data import batches, pack
from mtpjax.drafters import base
from mtpjax.model import NEXT


def evaluate(
  compiled: Callable, params: dict, config: Any, rows: pack.Rows, watch=iter
) -> dict[str, Any]:
  """Losses, agreements and counts by depth over all rows; each mean divides once.

  Args:
    compiled: from `step.compile_eval`.
    watch: wraps the iterator over batches, to show progress.

  Returns:
    loss: nats a token, of the next token.
    loss_by_depth, bits_per_byte_by_depth, agreement_by_depth, counts_by_depth: of the
      next token and then each depth of the drafter; None where nothing was counted.
    objectives: the same of every other objective, by name, with the `unit` of its loss
      and what its `agreement` is.
  """
  total: Any = None
  for arrays in watch(_batches(config, rows)):
    out = jax.device_get(compiled(params, step.put(arrays)))
    # float64 on the host: a long evaluation must not lose its last batches.
    out = jax.tree.map(lambda x: np.asarray(x, np.float64), out)
    total = out if total is None else jax.tree.map(np.add, total, out)
  if total is None:
    names = ('loss', 'agreement', 'counts', 'bits_per_byte')
    return {'loss': None, **{f'{n}_by_depth': [] for n in names}, 'objectives': {}}
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
    return f'{title}: nothing'
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
  return '\n'.join([f'{title}:', *lines])


def _number(value: float | None, digits: int = 4) -> str:
  return '-' if value is None else f'{value:.{digits}f}'


def count(config: Any, rows: pack.Rows) -> int:
  """How many batches an evaluation takes."""
  return -(-len(rows) // config.data.batch)


def _batches(config: Any, rows: pack.Rows) -> Iterator[dict]:
  return batches.heldout_batches(
    rows, config.data.batch, jax.process_index(), jax.process_count()
  )


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
