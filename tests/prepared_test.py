"""Prepared data: the same rows as its source's, read from disk, and its damages."""

import dataclasses
import json
import shutil
from typing import Any

import numpy as np
import pytest
from stored import SHARD, Docs, make

from mtpjax import fields
from mtpjax.data import batches, pack, prepare, prepared, tokenfile
from mtpjax.data.batches import Config, TrainBatches, heldout_batches
from mtpjax.data.mixture import Mixture
from mtpjax.data.prepared import Prepared
from mtpjax.data.sources import Counts, DataError, Text
from mtpjax.data.subwords import Bpe
from mtpjax.data.tokenizer import Bytes, Characters

FIELDS = ('tokens', 'segments', 'positions', 'mask')


def _same(left, right):
  assert len(left) == len(right)
  for a, b in zip(left, right, strict=True):
    assert tuple(a) == tuple(b) == FIELDS
    for name in FIELDS:
      np.testing.assert_array_equal(a[name], b[name])
      assert a[name].dtype == b[name].dtype


def _train(data, index=0, count=1):
  return TrainBatches(
    data.train,
    batch=8,
    shards=4,
    seed=1,
    weights=data.weights,
    own=np.split(np.arange(8), count)[index],
  )


def _take(iterator, n):
  return [next(iterator) for _ in range(n)]


@pytest.mark.parametrize('together', [True, False])
@pytest.mark.parametrize(
  ('source', 'tokens'),
  [
    (Docs(), None),
    (Docs(), Characters.Config()),
    (Docs(masked=True), Bytes.Config()),
    (Docs(masked=True, heldout=False), Characters.Config()),
    (Docs(masked=True, strict=False), None),
    (Docs(masked=True), Bpe.Config(vocab=300)),
    (Docs(count=0), None),
  ],
  ids=['bytes', 'characters', 'masks', 'no-heldout', 'all-true', 'subwords', 'nothing'],
)
def test_rows_are_those_of_the_source(tmp_path, source, tokens, together):
  own = make(tmp_path / 'out', source, tokens)
  if not source.count:
    with pytest.raises(DataError, match=r'Prepared\(.*no training document'):
      batches.open_data(Config(own), 0)
    return
  config = Config(source, tokens, length=300, pack=together)
  expected = batches.open_data(config, seed=7)
  actual = batches.open_data(dataclasses.replace(config, source=own, tokenizer=None), 7)
  assert actual.tokenizer == expected.tokenizer
  assert actual.counts == expected.counts
  assert str(actual) == str(expected)
  for split in ('train', 'heldout'):
    a, b = getattr(actual, split), getattr(expected, split)
    assert (a.mask is None) == (b.mask is None) == (not source.masked or not len(b))
    assert a.fingerprint() == b.fingerprint()
    assert isinstance(a.tokens, pack.Stored)
    assert not isinstance(a.tokens, np.ndarray)
    assert (a.tokens.size, a.tokens.dtype) == (b.tokens.size, b.tokens.dtype)
    everything = np.arange(len(b))
    _same([a.rows(everything, size=len(b) + 2)], [b.rows(everything, size=len(b) + 2)])
  # Two epochs and more, and a state that moves between them.
  n = 2 * len(expected.train) // 8 + 3
  iterators = _train(actual), _train(expected)
  _same(_take(iterators[0], n), _take(iterators[1], n))
  iterators[0].set_state(_train(expected).get_state())
  _same(_take(iterators[0], 2), _take(_train(expected), 2))
  assert (
    batches.open_rows(
      Config(own, length=300, pack=together), actual.tokenizer, 'heldout'
    ).fingerprint()
    == expected.heldout.fingerprint()
  )


def test_blocks_are_gathered_as_from_memory(whole, monkeypatch):
  monkeypatch.setattr(tokenfile, '_OPEN', 2)
  source = Docs(masked=True)
  plan = batches.open_data(Config(source), 0).train
  rows = Prepared(str(whole)).rows('train', 256, 0, True, Counts())
  assert isinstance(plan, pack.Plan)
  assert plan.mask is not None
  assert rows.mask is not None
  size = plan.tokens.size
  assert size > 5 * SHARD
  rng = np.random.default_rng(0)
  for indices in (
    np.arange(size),
    np.arange(size)[::-1],
    rng.integers(0, size, 3000),
    np.array([size - 1, 0, SHARD - 1, SHARD, SHARD]),
    np.arange(0),
  ):
    for _ in range(2):
      np.testing.assert_array_equal(rows.mask[indices], plan.mask[indices])
      np.testing.assert_array_equal(rows.tokens[indices], plan.tokens[indices])
  # Layout: all shards but the last of equal size, their documents counted once.
  index = json.loads((whole / 'index.json').read_text())
  headers = [s['header'] for s in index['splits']['train']['shards']]
  assert [h['tokens'] for h in headers[:-1]] == [SHARD] * (len(headers) - 1)
  assert sum(h['documents'] for h in headers) == source.count
  assert 0 in [h['documents'] for h in headers]  # one is inside a document
  assert {h['bits'] for h in headers} == {True, False}


def _open(folder):
  return batches.open_data(Config(Prepared(str(folder)), length=300), 0)


def test_damage_is_named(whole, tmp_path):
  make(tmp_path / 'other', Docs(masked=True, alphabet='ghijkl'))

  def fails(match, change, read=_open):
    folder = tmp_path / 'out'
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    change(folder)
    with pytest.raises(DataError, match=match):
      read(folder)

  name = 'train-00002.arrayrecord'

  def truncate(folder):
    (folder / name).write_bytes((whole / name).read_bytes()[:5000])

  def alter(folder):
    data = bytearray((whole / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(data)

  def swap(folder):
    shutil.copy(folder / 'train-00003.arrayrecord', folder / name)

  def foreign(folder):
    assert (tmp_path / 'other' / name).stat().st_size == (folder / name).stat().st_size
    shutil.copy(tmp_path / 'other' / name, folder / name)

  def high(folder):
    index = json.loads((folder / 'index.json').read_text())
    index['splits']['train']['shards'][2]['header']['max_id'] = 256
    (folder / 'index.json').write_text(json.dumps(index))

  def everything(folder):
    rows = _open(folder).train
    rows.rows(np.arange(len(rows)))

  fails(rf'{name} is missing: copy it again', lambda f: (f / name).unlink())
  fails(rf'{name} has 5000 bytes of \d+: copy', truncate)
  fails(rf'{name} (is not the shard|has)', swap)
  fails(rf'{name} is not the shard that was written here', foreign)
  fails(rf'{name} cannot be read', alter, everything)
  fails('id 256 in shard 2 of train is outside the vocabulary of 256', high)
  fails('no index.json there.*finish', lambda f: (f / 'index.json').unlink())
  fails('index.json cannot be read', lambda f: (f / 'index.json').write_text('{'))
  fails(
    'format and block .9, 4096.',
    lambda f: (f / 'index.json').write_text('{"format": 9, "block": 4096}'),
  )
  with pytest.raises(DataError, match=r'nowhere.*no index.json there'):
    _open(tmp_path / 'nowhere')


def test_another_tokenizer_is_refused(whole):
  config = Config(Prepared(str(whole)), length=300)
  batches.open_data(dataclasses.replace(config, tokenizer=Bytes.Config()), 0)
  other = dataclasses.replace(config, tokenizer=Characters.Config())
  with pytest.raises(DataError, match=r'data.tokenizer=.*Characters.*another one alre'):
    batches.open_data(other, 0)
  with pytest.raises(DataError, match=r'data.source: its ids are of another tokenizer'):
    batches.open_rows(config, Characters('ab'), 'train')


@pytest.fixture(scope='module')
def mixed(tmp_path_factory):
  """A mixture, prepared, and itself."""
  folder = tmp_path_factory.mktemp('mixed') / 'out'
  # Letters of one part only: the tokenizer must have seen both.
  parts: Any = {'a': Docs(12, alphabet='abc'), 'b': Docs(30, alphabet='cxyz', seed=1)}
  weights = {'a': 2.0, 'b': 1.0}
  source = Mixture(parts, weights)
  prepare.prepare(Config(source, Characters.Config()), folder, 1, SHARD)
  stored: Any = {name: Prepared(f'{folder}/{name}') for name in parts}
  config = Config(source, Characters.Config(), length=300, batch=8, shards=4)
  return config, dataclasses.replace(
    config, source=Mixture(stored, weights), tokenizer=None
  )


def test_a_mixture_is_prepared_part_by_part(mixed, tmp_path):
  expected, actual = (batches.open_data(config, 5) for config in mixed)
  assert actual.tokenizer == expected.tokenizer == Characters('abcxyz')
  assert str(actual) == str(expected)
  for split in ('train', 'heldout'):
    a, b = getattr(actual, split), getattr(expected, split)
    assert a.domains == b.domains
    assert a.fingerprint() == b.fingerprint()
  _same(_take(_train(actual), 20), _take(_train(expected), 20))
  # Text beside it is in the same ids.
  (tmp_path / 't.txt').write_text('abc xyz')
  text = Text((f'{tmp_path}/t.txt',))
  parts = {**mixed[1].source.parts, 'text': text}
  both = Config(Mixture(parts, dict.fromkeys(parts, 1.0)), length=300)
  with pytest.raises(DataError, match="character ' '"):
    batches.open_data(both, 0)
  (tmp_path / 't.txt').write_text('abcxyz')
  row = pack.domain(batches.open_data(both, 0).train, 'text').row(0)
  assert actual.tokenizer.decode(row['tokens'][row['segments'] > 0]) == 'abcxyz'


@pytest.mark.parametrize('count', [1, 2, 4])
@pytest.mark.parametrize('which', ['prepared', 'mixed'])
def test_process_counts_give_the_same_batches(whole, mixed, count, which):
  config = Config(Prepared(str(whole)), length=300) if which == 'prepared' else mixed[1]
  data = batches.open_data(config, 0)
  straight = _take(_train(data), 12)
  parts = [_train(data, i, count) for i in range(count)]
  for expected in straight[:6]:
    local = [next(part) for part in parts]
    _same([{n: np.concatenate([p[n] for p in local]) for n in FIELDS}], [expected])
  resumed = [_train(data, i, 4 // count) for i in range(4 // count)]
  for part in resumed:
    part.set_state(parts[-1].get_state())
  for expected in straight[6:]:
    local = [next(part) for part in resumed]
    _same([{n: np.concatenate([p[n] for p in local]) for n in FIELDS}], [expected])
  # Held out: equally many batches each, every row once.
  rows = data.heldout
  shares = np.split(np.arange(8), count)
  each = [list(heldout_batches(rows, 8, own)) for own in shares]
  assert {len(own) for own in each} == {-(-len(rows) // 8)}
  joined = {
    n: np.concatenate([p[n] for local in zip(*each, strict=True) for p in local])
    for n in FIELDS
  }
  padded = len(joined['mask'])
  _same([joined], [rows.rows(np.arange(len(rows)), size=padded)])


def test_a_config_of_prepared_data_is_saved(whole):
  config = Config(Prepared(str(whole)))
  assert fields.from_json(fields.to_json(config)) == config
  assert json.loads((whole / 'index.json').read_text())['format'] == prepared.FORMAT
