"""Mixtures: exact proportions, epochs by domain, one order for any processes."""

import collections
import dataclasses
import json
import zlib
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest

from mtpjax import fields
from mtpjax import flags as command
from mtpjax.data import batches, mixture, pack
from mtpjax.data.batches import Config, TrainBatches, heldout_batches
from mtpjax.data.mixture import Mixture
from mtpjax.data.sources import DataError, Stdlib, Text
from mtpjax.data.tokenizer import Bytes, Characters

FIELDS = ('tokens', 'segments', 'positions', 'mask')
SIZES = {'a': 5, 'b': 40, 'c': 3}
WEIGHTS = {'a': 0.5, 'b': 0.3, 'c': 0.2}
BATCH, SHARDS = 8, 4


def _plan(first, rows, length=4):
  """A plan whose row i is full of token first + i."""
  documents = [np.full(length, first + i) for i in range(rows)]
  return pack.pack(pack.concatenate(documents, 100), length, 0)


def _join():
  """Tokens 0 … 4 are domain a's rows, 5 … 44 b's and 45 … 47 c's."""
  starts = np.cumsum([0, *SIZES.values()])
  return pack.Join(
    {n: _plan(int(s), k) for (n, k), s in zip(SIZES.items(), starts, strict=False)}
  )


def _train(rows=None, weights=WEIGHTS, index=0, count=1, seed=1):
  return TrainBatches(
    _join() if rows is None else rows,
    batch=BATCH,
    shards=SHARDS,
    seed=seed,
    weights=weights,
    own=np.split(np.arange(BATCH), count)[index],
  )


def _take(iterator, n):
  return [next(iterator) for _ in range(n)]


def _same(left, right):
  assert len(left) == len(right)
  for a, b in zip(left, right, strict=True):
    assert tuple(a) == tuple(b) == FIELDS
    for name in FIELDS:
      np.testing.assert_array_equal(a[name], b[name])


def _sequence(taken):
  """The global order of rows, undoing the dealing to shards."""
  flat = []
  for batch in taken:
    dealt = batch['tokens'][:, 0].reshape(SHARDS, BATCH // SHARDS)
    flat += dealt.T.reshape(-1).tolist()
  return flat


def _domain(row):
  return 'a' if row < 5 else 'b' if row < 45 else 'c'


@pytest.mark.parametrize(
  ('weights', 'expected'),
  [
    ({'a': 0.7, 'b': 0.3}, {'a': 7, 'b': 3}),
    ({'a': 3.0, 'b': 1.0}, {'a': 3, 'b': 1}),
    ({'a': 0.1, 'b': 0.2, 'c': 0.7}, {'a': 1, 'b': 2, 'c': 7}),
    ({'a': 1e-3, 'b': 1.0}, {'a': 1, 'b': 1000}),
    ({'a': 2.5}, {'a': 1}),
  ],
)
def test_weights_are_decimals(weights, expected):
  assert mixture.whole_shares(weights) == expected


@pytest.mark.parametrize(
  'shares', [(7, 3), (1,), (1, 1, 1), (5, 3, 2), (1, 999), (9, 4)]
)
def test_draws_in_exact_proportion_and_evenly(shares):
  whole = sum(shares)
  counts = collections.Counter()
  for k in range(3 * whole):
    domain, index = mixture.draw(k, shares)
    assert index == counts[domain]  # each domain's elements in their order
    counts[domain] += 1
    for d, share in enumerate(shares):
      assert abs(counts[d] - (k + 1) * share / whole) < len(shares)
    if (k + 1) % whole == 0:
      assert counts == {d: s * (k + 1) // whole for d, s in enumerate(shares)}
  # Far out, without walking there.
  far = 10**15 * whole
  assert mixture.draw(far + 1, shares)[0] == mixture.draw(1, shares)[0]
  assert mixture.draw(far, shares)[1] == 10**15 * shares[mixture.draw(far, shares)[0]]


def test_batches_have_the_proportions_and_the_epochs_of_each_domain():
  # 30 batches are 240 rows: 120 of a, 72 of b, 48 of c.
  seen = _sequence(_take(_train(), 30))
  by_domain = collections.defaultdict(list)
  for row in seen:
    by_domain[_domain(row)].append(row)
  assert {k: len(v) for k, v in by_domain.items()} == {'a': 120, 'b': 72, 'c': 48}
  for ten in range(0, 240, 10):
    own = collections.Counter(map(_domain, seen[ten : ten + 10]))
    assert own == {'a': 5, 'b': 3, 'c': 2}
  first = {'a': 0, 'b': 5, 'c': 45}
  for name, rows in by_domain.items():
    size = SIZES[name]
    epochs = [rows[i : i + size] for i in range(0, len(rows) - size + 1, size)]
    whole = list(range(first[name], first[name] + size))
    assert all(sorted(epoch) == whole for epoch in epochs)
    assert len(epochs) == 1 or len(set(map(tuple, epochs))) > 1
  # A domain's own sequence is what it would be alone, under another seed.
  seed = 1 ^ zlib.crc32(b'b')
  order: Any = grain.MapDataset.range(40).seed(seed).shuffle().repeat()
  assert by_domain['b'] == [5 + order[i] for i in range(72)]


def test_one_domain_is_no_mixture():
  plan = _plan(0, 21)
  _same(
    _take(_train(pack.Join({'': plan}), {'': 3.0}), 9), _take(_train(plan, None), 9)
  )


def test_resumes_at_every_step_and_across_epochs():
  straight = _take(_train(), 12)
  first = _train()
  for k in range(10):
    state = json.loads(json.dumps(first.get_state()))
    again = _train()
    _take(again, 3)
    again.set_state(state)
    _same(_take(again, 12 - k), straight[k:])
    next(first)
  # Weights in another unit or order are the same, others are not.
  _train(weights={'c': 2.0, 'a': 5.0, 'b': 3.0}).set_state(state)
  for other in (
    _train(weights={**WEIGHTS, 'a': 0.6}),
    _train(weights=None),
    _train(seed=2),
  ):
    with pytest.raises(DataError, match='weights, shards'):
      other.set_state(state)


@pytest.mark.parametrize('count', [1, 2, 4])
def test_process_counts_give_the_same_batches(count):
  whole = _take(_train(), 9)
  parts = [_train(index=i, count=count) for i in range(count)]
  for j in range(6):
    local = [next(part) for part in parts]
    assert all(p['tokens'].shape == (BATCH // count, 4) for p in local)
    _same([{n: np.concatenate([p[n] for p in local]) for n in FIELDS}], [whole[j]])
  for other in (1, 2, 4):
    resumed = [_train(index=i, count=other) for i in range(other)]
    for part in resumed:
      part.set_state(parts[-1].get_state())
    for expected in whole[6:]:
      local = [next(part) for part in resumed]
      _same([{n: np.concatenate([p[n] for p in local]) for n in FIELDS}], [expected])


@pytest.mark.parametrize('count', [1, 2, 4])
def test_heldout_rows_count_once_and_by_domain(count):
  rows = _join()
  for name in [None, *SIZES]:
    own = rows if name is None else pack.domain(rows, name)
    shares = np.split(np.arange(8), count)
    parts = [list(heldout_batches(own, 8, share)) for share in shares]
    assert {len(part) for part in parts} == {-(-len(own) // 8)}
    seen = [
      int(token)
      for part in parts
      for batch in part
      for token in batch['tokens'][batch['segments'][:, 0] > 0, 0]
    ]
    expected = [r for r in range(48) if name in (None, _domain(r))]
    assert sorted(seen) == expected


def _folder(folder, name, lines, heldout=0.4):
  path = folder / f'{name}.txt'
  path.write_text(''.join(f'{name} {i}\n' for i in range(lines)))
  return Text((str(path),), document='line', heldout=heldout)


@pytest.mark.parametrize('tokens', [None, Characters.Config()])
def test_open_data_keeps_domains_apart(tmp_path, tokens):
  parts: Any = {'code': _folder(tmp_path, 'k', 30), 'prose': _folder(tmp_path, 'p', 12)}
  source = Mixture(parts, {'prose': 1.0, 'code': 2.0})
  config = Config(source, tokens, length=24, shards=2, batch=6)
  data = batches.open_data(config, seed=3)
  assert data.weights == source.weights
  assert isinstance(data.tokenizer, Bytes if tokens is None else Characters)
  documents = sum(data.counts[split].documents for split in ('train', 'heldout'))
  assert documents == 42
  assert f'{data.counts["train"].documents} documents' in str(data)
  assert str(data).endswith('mixed 1 prose : 2 code')
  found: Any = (('train', data.train, 3), ('heldout', data.heldout, 0))
  for split, rows, seed in found:
    assert list(rows.domains) == ['code', 'prose']
    for name, part in parts.items():
      # By itself a domain has the same rows, with the same tokenizer.
      ids = [data.tokenizer.encode(d.text) for d in part.documents(split)]
      alone = pack.pack(pack.concatenate(ids, data.tokenizer.vocab_size), 24, seed)
      own = pack.domain(rows, name)
      everything = np.arange(len(alone))
      _same([own.rows(everything)], [alone.rows(everything)])
  again = batches.open_rows(config, data.tokenizer, 'heldout')
  assert again.fingerprint() == data.heldout.fingerprint()
  iterator = TrainBatches(data.train, batch=6, shards=2, seed=3, weights=data.weights)
  letters = collections.Counter()
  for batch in _take(iterator, 10):
    letters.update(data.tokenizer.decode(batch['tokens'][:, 0]))
  assert letters == {'k': 40, 'p': 20}


def test_a_domain_without_targets_is_named(tmp_path):
  lone = tmp_path / 'lone.txt'
  lone.write_text('x\ny\n')
  parts: Any = {
    'k': _folder(tmp_path, 'k', 9),
    'lone': Text((str(lone),), document='line'),
  }
  with pytest.raises(DataError, match=r'data.source.parts\[lone\]=.*two tokens'):
    batches.open_data(Config(Mixture(parts, {'k': 1.0, 'lone': 1.0})), 0)


@pytest.mark.parametrize(
  ('parts', 'weights', 'match'),
  [
    ({}, {}, r'parts=\{\}: name at least one'),
    ({'a b': 1}, {'a b': 1.0}, "has the name 'a b': use letters"),
    ({'a': 1, 'b': 1}, {'a': 1.0}, "no weight for b; add 'b': 1.0"),
    ({'a': 1}, {'a': 1.0, 'x': 1.0}, 'no part is called x; there are a'),
    ({'a': 1}, {'a': 0.0}, r'weights\[a\]=0.0: must be positive; .* take it from'),
    ({'a': 1}, {'a': -1.0}, 'must be positive'),
    ({'a': 1}, {'a': float('inf')}, 'must be positive'),
    ({'a': 2}, {'a': 1.0}, r'parts\[a\] is a mixture'),
  ],
)
def test_fields_that_do_not_fit(parts, weights, match):
  source = Mixture({k: Stdlib() for k in parts}, weights)
  if 2 in parts.values():
    source.parts['a'] = Mixture()  # pyright: ignore
  with pytest.raises(DataError, match=f'data.source.*{match}'):
    Config(source).validate()


FILE = """
from mtpjax.config import Config
from mtpjax.data import batches
from mtpjax.data.mixture import Mixture
from mtpjax.data.sources import Stdlib, Text

def get_config(arg: str = ''):
  parts = {'code': Stdlib(), 'prose': Text(files=('x.txt',))}
  return Config(data=batches.Config(Mixture(parts, {'code': 3.0, 'prose': 1.0})))
"""


def test_a_config_file_its_overrides_and_its_json(tmp_path: Path):
  (tmp_path / 'c.py').write_text(FILE)
  config = command.load(str(tmp_path / 'c.py'))
  fields.check_types(config)
  fields.override(config, 'data.source.weights.prose', '0.5')
  fields.override(config, 'data.source.parts.code.heldout', '0.2')
  source = config.data.source
  assert source.weights == {'code': 3.0, 'prose': 0.5}
  assert type(source.weights['code']) is float
  assert source.parts['code'].heldout == 0.2
  again = fields.from_json(json.loads(json.dumps(fields.to_json(config))))
  assert again == config
  assert list(again.data.source.parts) == ['code', 'prose']
  with pytest.raises(fields.ConfigError, match="did you mean 'prose'"):
    fields.override(config, 'data.source.weights.pros', '2')


@dataclasses.dataclass
class Ids:
  """A source of rows of its own, in ids of its own tokenizer."""

  own: Characters | None = None

  def tokenizer(self):
    return self.own

  def rows(self, split, length, seed, together, counts):
    counts.documents += 3
    return pack.pack(pack.concatenate([np.arange(3)] * 3, 4), length, seed, together)


def test_sources_that_bring_rows_and_a_tokenizer(tmp_path):
  abcd, wxyz = Characters('abcd'), Characters('wxyz')
  text = tmp_path / 't.txt'
  text.write_text('abba\ncab\n')
  prose = Text((str(text),), document='line')

  def make(*own, tokens=None):
    parts = {f'p{i}': part for i, part in enumerate(own)}
    source = Mixture(parts, dict.fromkeys(parts, 1.0))
    return Config(source, tokens, length=8)

  data = batches.open_data(make(Ids(abcd), prose, Ids()), 0)
  assert data.tokenizer == abcd
  assert data.train.row(0)['tokens'][:6].tolist() == [0, 1, 2] * 2
  assert data.counts['train'].documents == 8
  own = pack.domain(data.train, 'p1').row(0)
  assert sorted(abcd.decode(own['tokens'][own['segments'] > 0])) == sorted('abbacab')
  with pytest.raises(DataError, match=r'parts\[p1\] has another .*parts\[p0\]: prep'):
    batches.open_data(make(Ids(abcd), Ids(wxyz)), 0)
  with pytest.raises(DataError, match=r'data.tokenizer=.*Bytes.*set data.tokenizer=No'):
    batches.open_data(make(Ids(abcd), prose, tokens=Bytes.Config()), 0)
  with pytest.raises(DataError, match=r'data.tokenizer=.*Characters'):
    batches.open_data(make(Ids(abcd), tokens=Characters.Config()), 0)
  with pytest.raises(DataError, match=r'parts\[p0\]: its ids are of another'):
    batches.open_rows(make(Ids(abcd), prose), wxyz, 'train')
  assert batches.open_data(make(Ids(), prose), 0).tokenizer == Bytes()
