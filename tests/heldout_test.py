"""Held-out figures against float64 sums over the rows themselves; no model runs."""

import collections
import dataclasses
import math
import types

import jax
import numpy as np
import pytest

from mtpjax import heldout, losses, mesh
from mtpjax.data import pack
from mtpjax.drafters import base
from mtpjax.objectives import bag

V = 11
BYTES = np.random.default_rng(0).integers(1, 5, V)


@pytest.fixture(autouse=True)
def _mesh():
  with jax.set_mesh(mesh.make(mesh.Config(), jax.devices()[:1])):
    yield


@dataclasses.dataclass
class Data:
  batch: int


def settings(batch):
  parts = collections.defaultdict(base.Config)
  return types.SimpleNamespace(data=Data(batch), parts=lambda: parts)


def plan(lengths, length=8, seed=0):
  rng = np.random.default_rng(seed)
  documents = [rng.integers(0, V, n) for n in lengths]
  return pack.pack(pack.concatenate(documents, V), length, 0)


def targets(row, depth):
  """(token before, target) of one packed row at one depth, by definition."""
  seg, tokens, mask = row['segments'], row['tokens'], row['mask']
  ahead = depth + 1
  return [
    (tokens[i], tokens[i + ahead])
    for i in range(len(tokens) - ahead)
    if seg[i] == seg[i + ahead] != 0 and mask[i + ahead]
  ]


def nll(before, target, depth):
  """A made-up loss of a target, irregular and of any size."""
  return 0.3 + (7 * before + 3 * target + depth) % 13


def correct(before, target, depth):
  return (before + target + depth) % 3 == 0


class Compiled:
  """In place of `step.compile_eval`: float32 sums a batch, and what it was given."""

  def __init__(self, parts):
    self.parts, self.batches = parts, []

  def __call__(self, params, arrays):
    arrays = {name: np.asarray(x) for name, x in arrays.items()}
    self.batches.append(arrays)
    rows = [
      {name: x[n] for name, x in arrays.items()} for n in range(len(arrays['mask']))
    ]
    sums, lengths = {}, {}
    for name, (first, depths) in self.parts.items():
      pairs = [
        [p for row in rows for p in targets(row, first + k)] for k in range(depths)
      ]
      sums[name] = losses.Sums(
        nll=np.array([sum(nll(*p, k) for p in x) for k, x in enumerate(pairs)], 'f'),
        correct=np.array([sum(correct(*p, k) for p in x) for k, x in enumerate(pairs)]),
        count=np.array([len(x) for x in pairs], np.int32),
      )
      if name != 'no_tokens':
        lengths[name] = np.array([sum(BYTES[t] for _, t in x) for x in pairs])
    return sums, lengths


def expected(rows, first, depths):
  """Losses, agreements, counts and bits a byte, over all rows at once."""
  figures = {n: [] for n in ('loss', 'agreement', 'counts', 'bits_per_byte')}
  for k in range(depths):
    pairs = [p for n in range(len(rows)) for p in targets(rows.row(n), first + k)]
    total = math.fsum(nll(*p, k) for p in pairs)
    length = sum(int(BYTES[t]) for _, t in pairs)
    figures['loss'].append(total / len(pairs) if pairs else None)
    hits = sum(correct(*p, k) for p in pairs)
    figures['agreement'].append(hits / len(pairs) if pairs else None)
    figures['counts'].append(len(pairs))
    figures['bits_per_byte'].append(total / math.log(2) / length if pairs else None)
  return figures


@pytest.mark.parametrize('batch', [1, 3, 4, 64])
def test_means_divide_once_at_the_end_over_every_row_once(batch):
  # Seven rows, each with another number of targets: a mean of batches' means is wrong.
  rows = plan([8, 8, 7, 5, 3, 4, 1, 6, 2, 8])
  compiled = Compiled({'next': (0, 1), 'drafter': (1, 3), 'more': (2, 2)})
  figures = heldout.evaluate(compiled, {}, settings(batch), rows)
  first, drafter = expected(rows, 0, 1), expected(rows, 1, 3)
  for name in first:
    assert figures[f'{name}_by_depth'] == pytest.approx(
      first[name] + drafter[name], rel=1e-6
    )
  assert figures['loss'] == figures['loss_by_depth'][0]
  assert list(figures['objectives']) == ['more']
  for name, values in expected(rows, 2, 2).items():
    assert figures['objectives']['more'][f'{name}_by_depth'] == pytest.approx(
      values, rel=1e-6
    )
  assert len(compiled.batches) == heldout.count(settings(batch), rows)
  assert {len(b['mask']) for b in compiled.batches} == {batch}
  seen = np.concatenate([b['segments'] for b in compiled.batches])
  assert (seen != 0).sum() == rows.tokens.size


def test_sums_of_many_batches_are_kept_in_float64():
  # In float32 sixteen million and one is sixteen million.
  rows = plan([8] * 40)

  def compiled(params, arrays):
    size = np.float32(2**24) if not compiled.calls else np.float32(1)
    compiled.calls += 1
    one = np.array([size])
    return {'next': losses.Sums(one, one, one.astype(np.int32))}, {'next': one}

  compiled.calls = 0
  figures = heldout.evaluate(compiled, {}, settings(1), rows)
  assert figures['counts_by_depth'] == [2**24 + 39]
  assert figures['loss'] == 1.0


def test_a_depth_without_targets_has_no_figures_and_the_others_keep_theirs():
  rows = plan([3, 2])  # no target three tokens ahead
  compiled = Compiled({'next': (0, 1), 'drafter': (1, 2)})
  figures = heldout.evaluate(compiled, {}, settings(2), rows)
  assert figures['counts_by_depth'] == [3, 1, 0]
  for name in ('loss', 'agreement', 'bits_per_byte'):
    *others, last = figures[f'{name}_by_depth']
    assert last is None
    assert None not in others
  assert figures['loss_by_depth'][2] is None
  assert '-' in heldout.table(figures).splitlines()[-1].split()


def test_without_rows_all_figures_are_there_and_empty():
  rows = plan([])
  compiled = Compiled({'next': (0, 1), 'drafter': (1, 2)})
  empty = heldout.evaluate(compiled, {}, settings(2), rows)
  assert not compiled.batches
  full = heldout.evaluate(compiled, {}, settings(2), plan([8, 5]))
  assert set(empty) == set(full)
  assert empty['loss'] is None
  assert empty['counts_by_depth'] == empty['agreement_by_depth'] == []
  assert heldout.table(empty).startswith('held out: nothing; set data.source.heldout')


def test_an_objective_that_predicts_no_tokens_has_no_bits_per_byte():
  compiled = Compiled({'next': (0, 1), 'no_tokens': (1, 2)})
  figures = heldout.evaluate(compiled, {}, settings(2), plan([8, 5]))
  assert 'bits_per_byte_by_depth' not in figures['objectives']['no_tokens']
  lines = heldout.table(figures).splitlines()
  assert [line.split()[:2] for line in lines[-2:]] == [
    ['no_tokens', '1'],
    ['no_tokens', '2'],
  ]
  assert len({len(line) for line in lines[1:]}) == 1  # columns are aligned


def test_other_units_are_recorded_and_have_a_heading_of_their_own():
  parts = {'next': (0, 1), 'drafter': (1, 1), 'more': (2, 1), 'bag': (1, 1)}
  config = settings(2)
  config.parts()['bag'] = bag.Config()
  figures = heldout.evaluate(Compiled(parts), {}, config, plan([8, 5]))
  assert 'unit' not in figures
  more, words = (figures['objectives'][name] for name in ('more', 'bag'))
  assert (more['unit'], more['agreement']) == ('nats/token', 'top-1')
  assert (words['unit'], words['agreement']) == ('nats/bag', 'whole bag')
  lines = [x.split('  ') for x in heldout.table(figures).splitlines()[1:]]
  cells = [[word.strip() for word in line if word.strip()] for line in lines]
  names = [line[0] for line in cells]
  assert names == ['depth', 'next', '1', 'more 1', 'depth', 'bag 1']
  assert cells[0] == ['depth', 'nats/token', 'bits/byte', 'top-1', 'targets']
  assert cells[4] == ['depth', 'nats/bag', 'bits/byte', 'whole bag', 'targets']


@pytest.mark.parametrize('limit', [None, 1, 2])
def test_domains_are_evaluated_apart_and_together(limit):
  own = {
    'code': plan([8, 8, 7, 5, 3, 8]),
    'none': plan([]),
    'prose': plan([4, 1, 6, 2], seed=1),
  }
  parts, config = {'next': (0, 1), 'drafter': (1, 2)}, settings(2)
  rows, compiled = pack.Join(own), Compiled(parts)
  figures = heldout.evaluate(compiled, {}, config, rows, limit=limit)
  alone = {
    name: heldout.evaluate(Compiled(parts), {}, config, part, limit=limit)
    for name, part in own.items()
    if len(part)
  }
  assert figures['domains'] == alone
  assert 'domains' not in alone['code']
  assert heldout.count(config, rows, limit) == len(compiled.batches)
  if limit is None:
    everything = [rows.row(n) for n in range(len(rows))]
  else:
    everything = [p.row(n) for p in own.values() for n in range(min(len(p), 2 * limit))]
  counts = [sum(len(targets(row, depth)) for row in everything) for depth in range(3)]
  assert figures['counts_by_depth'] == counts
  total = sum(
    x['loss_by_depth'][0] * x['counts_by_depth'][0] for x in alone.values()
  ) / sum(x['counts_by_depth'][0] for x in alone.values())
  assert figures['loss'] == pytest.approx(total, rel=1e-12)
  said = heldout.table(figures)
  assert [x for x in said.splitlines() if x.endswith(':')] == [
    'held out:',
    'code:',
    'prose:',
  ]
  line = heldout.brief({**figures, 'exact_match': 0.5})
  assert line.startswith(f'{figures["loss"]:.4f} ') and ', prose ' in line
  assert line.endswith('exact answers 0.5000')
  assert heldout.brief(heldout.evaluate(compiled, {}, config, plan([]))) == 'nothing'
