"""Batches: each row once an epoch, exact resumption, one order for any processes."""

import collections
import dataclasses
import json
import time

import grain
import numpy as np
import pytest

from mtpjax.data import batches, pack, records
from mtpjax.data.batches import Config, TrainBatches, heldout_batches
from mtpjax.data.sources import DataError, Document, Text
from mtpjax.data.tokenizer import Bytes, Characters

FIELDS = ('tokens', 'segments', 'positions', 'mask')


def _plan(rows, length=4):
  """A plan whose row i is full of token i."""
  documents = [np.full(length, i) for i in range(rows)]
  return pack.pack(pack.concatenate(documents, max(rows, 1)), length, 0)


def _train(plan, batch=8, shards=4, seed=1, index=0, count=1):
  return TrainBatches(
    plan,
    batch=batch,
    shards=shards,
    seed=seed,
    own=np.split(np.arange(batch), count)[index],
  )


def _take(iterator, n):
  return [next(iterator) for _ in range(n)]


def _same(left, right):
  assert len(left) == len(right)
  for a, b in zip(left, right, strict=True):
    assert tuple(a) == tuple(b) == FIELDS
    for name in FIELDS:
      np.testing.assert_array_equal(a[name], b[name])


def _ids(taken):
  return [batch['tokens'][:, 0].tolist() for batch in taken]


@pytest.mark.parametrize(('rows', 'seed'), [(24, 0), (21, 3), (5, 7), (1, 0)])
def test_rows_follow_the_global_order_shard_by_shard(rows, seed):
  plan, batch, shards = _plan(rows), 8, 4
  order = grain.MapDataset.range(rows).seed(seed).shuffle().repeat()
  expected = []
  for j in range(12):
    elements = [order[j * batch + i] for i in range(batch)]
    expected.append([e for s in range(shards) for e in elements[s::shards]])
  assert _ids(_take(_train(plan, batch, shards, seed), 12)) == expected


@pytest.mark.parametrize('rows', [24, 21, 5, 3])
def test_every_row_once_an_epoch_and_reshuffled(rows):
  batch, shards, epochs = 8, 4, 8
  # Undo the dealing: the global order again, from the batches only.
  flat = []
  for ids in _ids(_take(_train(_plan(rows)), -(-rows * epochs // batch))):
    dealt = np.array(ids).reshape(shards, batch // shards)
    flat += dealt.T.reshape(-1).tolist()
  seen = [flat[e * rows : (e + 1) * rows] for e in range(epochs)]
  assert all(sorted(epoch) == list(range(rows)) for epoch in seen)
  assert len({tuple(epoch) for epoch in seen}) > 2


def test_seeds_differ_and_repeat():
  runs = [_ids(_take(_train(_plan(64), seed=s), 8)) for s in (0, 1, 2, 0)]
  assert runs[0] == runs[3]
  assert runs[0] != runs[1] != runs[2] != runs[0]
  # An epoch of one seed is no other epoch of the next seed.
  epochs = [tuple(map(tuple, run)) for run in runs[:3]]
  later = _ids(_take(_train(_plan(64), seed=0), 16))[8:]
  assert tuple(map(tuple, later)) not in epochs


def test_a_batch_is_fixed_in_shape_and_type():
  batch = next(_train(_plan(9, length=6)))
  assert tuple(batch) == FIELDS
  assert [a.dtype for a in batch.values()] == [*[np.int32] * 3, np.dtype(bool)]
  assert all(a.shape == (8, 6) and a.flags.c_contiguous for a in batch.values())


@pytest.mark.parametrize('rows', [21, 5])
def test_resumes_at_every_step_and_across_epochs(rows):
  # Rows of several documents, so that a step is in the middle of a pack.
  sizes = np.random.default_rng(0).integers(1, 9, rows * 3)
  corpus = pack.concatenate([np.arange(n) for n in sizes], 16)
  plan = pack.pack(corpus, 13, 0)
  straight = _take(_train(plan), 10)
  first = _train(plan)
  for k in range(8):
    state = json.loads(json.dumps(first.get_state()))
    again = _train(plan)
    _take(again, 3)  # wherever it stood
    again.set_state(state)
    assert again.get_state() == state
    _same(_take(again, 10 - k), straight[k:])
    _same([next(first)], [straight[k]])


@pytest.mark.parametrize('count', [1, 2, 4])
def test_process_counts_give_the_same_batches(count):
  plan = _plan(21)
  whole = _take(_train(plan, 16, 8), 6)
  parts = [_train(plan, 16, 8, index=i, count=count) for i in range(count)]
  for j in range(6):
    local = [next(part) for part in parts]
    assert all(p['tokens'].shape == (16 // count, 4) for p in local)
    _same([{n: np.concatenate([p[n] for p in local]) for n in FIELDS}], [whole[j]])
  # The state of any moves to any other number of processes.
  states = [part.get_state() for part in parts]
  assert list(states[0]) == [str(s) for s in range(8)]
  assert all(state == states[0] for state in states)
  after = _take(_train(plan, 16, 8), 9)[6:]
  for other in (1, 2, 4, 8):
    resumed = [_train(plan, 16, 8, index=i, count=other) for i in range(other)]
    for part in resumed:
      part.set_state(states[-1])
    for batch in after:
      local = [next(part) for part in resumed]
      _same([{n: np.concatenate([p[n] for p in local]) for n in FIELDS}], [batch])


def test_a_larger_batch_goes_on_at_the_same_row():
  plan = _plan(64)
  small = _train(plan, 8, 4)
  _take(small, 3)
  large = _train(plan, 16, 4)
  large.set_state(small.get_state())
  assert sorted(_ids(_take(large, 1))[0]) == sorted(
    i for ids in _ids(_take(small, 2)) for i in ids
  )


def test_states_that_do_not_fit_are_refused():
  plan = _plan(21)
  good = _train(plan)
  state = good.get_state()
  next(good)

  def fails(match, iterator, state):
    before = iterator.get_state()
    with pytest.raises(DataError, match=match):
      iterator.set_state(state)
    assert iterator.get_state() == before

  fails('no shard 1, 3 among', good, {k: state[k] for k in ('0', '2')})
  for other in (_train(plan, seed=2), _train(_plan(22)), _train(plan, shards=2)):
    fails('saved with other documents', other, state)
  fails('different rows', good, {**state, '2': good.get_state()['2']})
  # As a checkpoint returns it.
  good.set_state(
    {
      k: {'iterator': {'next_index': np.int64(0)}, 'data': np.int64(v['data'])}
      for k, v in state.items()
    }
  )
  assert json.dumps(good.get_state()) == json.dumps(state)


@pytest.mark.parametrize(
  ('fields', 'match'),
  [
    ({'batch': 10}, 'data.batch=10 over data.shards=4: .* such as 12'),
    ({'batch': 0}, 'data.batch=0 over data.shards=4: .* such as 4'),
    ({'shards': 0}, 'data.shards=0: must be at least 1'),
    ({'seed': -1}, 'seed=-1'),
    ({'seed': 2**32}, 'seed=4294967296'),
  ],
)
def test_fields_that_do_not_fit(fields, match):
  with pytest.raises(DataError, match=match):
    _train(_plan(21), **fields)
  with pytest.raises(DataError, match='no rows to train on'):
    _train(_plan(0))


class Numbers:
  """As many rows as there may be, made up from their index."""

  length = 4

  def __init__(self, count):
    self.domains = {'': (0, count)}

  def __len__(self):
    return self.domains[''][1]

  def fingerprint(self):
    return len(self)

  def row(self, index):
    return {name: array[0] for name, array in self.rows(np.array([index])).items()}

  def rows(self, indices, size=None) -> dict[str, np.ndarray]:
    tokens = np.zeros((len(indices) if size is None else size, self.length), np.int32)
    tokens[: len(indices)] = indices[:, None]
    real = np.zeros(tokens.shape, bool)
    real[: len(indices)] = True
    positions = np.arange(self.length, dtype=np.int32) * real
    arrays = tokens, real.astype(np.int32), positions.astype(np.int32), real
    return dict(zip(FIELDS, arrays, strict=True))


def test_rows_made_up_from_their_index():
  rows = Numbers(2**31 - 1)
  assert isinstance(rows, pack.Rows)
  before = time.perf_counter()
  # The rest are far apart: a shuffle, not a walk.
  iterator = _train(rows)
  seen = np.array(_ids(_take(iterator, 20))).reshape(-1)
  assert len(set(seen.tolist())) == len(seen)
  assert 0.3 < seen.mean() / 2**31 < 0.7
  state = iterator.get_state()
  straight = _take(iterator, 3)
  again = _train(rows)
  again.set_state(state)
  _same(_take(again, 3), straight)
  assert time.perf_counter() - before < 2
  # Few rows give what a plan of the same rows gives, epoch after epoch.
  _same(_take(_train(Numbers(21)), 9), _take(_train(_plan(21)), 9))
  _same(list(heldout_batches(Numbers(21), 8)), list(heldout_batches(_plan(21), 8)))


@pytest.mark.parametrize(
  ('rows', 'batch', 'count', 'expected'),
  [
    (10, 4, 4, 3),
    (10, 16, 4, 1),
    (8, 4, 1, 2),
    (9, 4, 2, 3),
    (0, 4, 4, 0),
    (1, 4, 4, 1),
  ],
)
def test_heldout_counts_each_row_once(rows, batch, count, expected):
  plan = _plan(rows)
  shares = np.split(np.arange(batch), count)
  parts = [list(heldout_batches(plan, batch, own)) for own in shares]
  assert [len(part) for part in parts] == [expected] * count
  seen = collections.Counter()
  for local in (b for part in parts for b in part):
    assert tuple(local) == FIELDS
    assert all(a.shape == (batch // count, 4) for a in local.values())
    assert [a.dtype for a in local.values()] == [*[np.int32] * 3, np.dtype(bool)]
    real = local['segments'][:, 0] > 0
    np.testing.assert_array_equal(local['mask'], np.tile(real[:, None], 4))
    assert not any(a[~real].any() for a in local.values())
    seen.update(local['tokens'][real, 0].tolist())
  assert seen == collections.Counter(range(rows))
  # In order, and alike for any number of processes.
  joined = [
    {n: np.concatenate([p[n] for p in local]) for n in FIELDS}
    for local in zip(*parts, strict=True)
  ]
  _same(joined, list(heldout_batches(plan, batch)))
  flat = [i for ids in _ids(joined) for i in ids]
  assert flat[:rows] == list(range(rows))


def test_heldout_fields_that_do_not_fit():
  with pytest.raises(DataError, match='batch=0: must be at least 1'):
    heldout_batches(_plan(10), 0)


def _tiny(tmp_path, text, **fields):
  (tmp_path / 'a.txt').write_bytes(text)
  return Config(Text((f'{tmp_path}/a.txt',), document='line'), **fields)


LINES = b''.join(b'line %d\n' % i for i in range(18))


@pytest.mark.parametrize('tokens', [Bytes.Config(), Characters.Config()])
def test_eighteen_short_lines_train(tmp_path, tokens):
  config = _tiny(tmp_path, LINES + b'\n', tokenizer=tokens, length=64)
  data = batches.open_data(config, seed=0)
  assert 1 < len(data.train) < config.batch
  assert (data.counts['train'].documents, data.counts['train'].empty) == (18, 1)
  assert list(heldout_batches(data.heldout, 16)) == []
  iterator = _train(data.train, config.batch, config.shards)
  for batch in _take(iterator, 5):
    assert batch['tokens'].shape == (16, 64)
    assert batch['mask'].any(1).all()
  # The documents again, from the rows.
  texts = collections.Counter()
  rows = data.train.rows(np.arange(len(data.train)))
  for row, segments in zip(rows['tokens'], rows['segments'], strict=True):
    for segment in range(1, segments.max() + 1):
      texts[data.tokenizer.decode(row[segments == segment])] += 1
  assert texts == collections.Counter(LINES.decode().split('\n')[:-1])


def test_open_data_reads_both_splits(tmp_path):
  text = LINES + b'x' * 70 + b'\n'
  config = _tiny(tmp_path, text, tokenizer=Characters.Config(), length=64)
  assert isinstance(config.source, Text)
  config.source.heldout = 0.4
  data = batches.open_data(config, seed=0)
  counts = data.counts
  assert counts['train'].documents + counts['heldout'].documents == 19
  assert counts['train'].long + counts['heldout'].long == 1
  assert isinstance(data.train, pack.Plan)
  assert isinstance(data.heldout, pack.Plan)
  sizes = data.train.tokens.size + data.heldout.tokens.size
  assert sizes == len(LINES) - 18 + 70
  assert isinstance(data.tokenizer, Characters)
  assert data.tokenizer.characters == ''.join(sorted({*LINES.decode(), 'x'} - {'\n'}))
  # The seed moves the training rows only.
  other = batches.open_data(config, seed=1)
  assert other.heldout.fingerprint() == data.heldout.fingerprint()
  assert other.train.fingerprint() != data.train.fingerprint()


def test_rows_of_one_document(tmp_path):
  config = _tiny(tmp_path, LINES + b'x' * 70 + b'\n', length=32, pack=False)
  rows = batches.open_data(config, seed=0).train
  batch = rows.rows(np.arange(len(rows)))
  assert batch['segments'].max() == 1
  texts = [
    bytes(t[s > 0])
    for t, s in zip(batch['tokens'].astype('u1'), batch['segments'], strict=True)
  ]
  pieces = [b'x' * 32, b'x' * 32, b'x' * 6]
  assert sorted(texts) == sorted([*LINES.split(b'\n')[:-1], *pieces])


def test_masks_of_documents_reach_the_batches():
  """As a loop over documents in the rows, told apart by their first byte."""
  spoken = {
    bytes([65 + i]): [(bytes([65 + i]) * (i + 1), i % 2 == 0), (b'.' * i, i % 3 == 0)]
    for i in range(12)
  }

  @dataclasses.dataclass
  class Chats:
    def documents(self, split, counts=None):
      for name, parts in spoken.items() if split == 'train' else ():
        text = b''.join(part for part, _ in parts)
        yield Document(name.decode(), text, parts=tuple(parts))

  rows = batches.open_data(Config(Chats(), length=40), seed=0).train
  seen = 0
  for row in map(rows.row, range(len(rows))):
    for segment in range(1, row['segments'].max() + 1):
      own = row['segments'] == segment
      parts = spoken[bytes([row['tokens'][own][0]])]
      expected = [flag for part, flag in parts for _ in part]
      assert row['mask'][own].tolist() == expected
      seen += 1
    assert not row['mask'][row['segments'] == 0].any()
  assert seen == len(spoken)
  # Without a target there is nothing to learn.
  spoken = {b'a': [(b'abc', False)], b'd': [(b'd', True), (b'e', False)]}
  with pytest.raises(DataError, match='no training document has two tokens'):
    batches.open_data(Config(Chats(), length=40), seed=0)


def test_the_default_tokenizer_is_bytes(tmp_path):
  default, given = (
    batches.open_data(_tiny(tmp_path, LINES, tokenizer=tokens), seed=0)
    for tokens in (None, Bytes.Config())
  )
  assert default.tokenizer == given.tokenizer == Bytes()
  assert default.train.fingerprint() == given.train.fingerprint()


def test_open_data_refuses_what_cannot_be_learnt(tmp_path):
  with pytest.raises(DataError, match='no training document has two tokens'):
    batches.open_data(_tiny(tmp_path, b'a\nb\n'), seed=0)
  for fields, match in (
    ({'length': 1}, 'length=1'),
    ({'batch': 12}, 'data.batch=12 over data.shards=8: .* such as 16'),
  ):
    with pytest.raises(DataError, match=match):
      batches.open_data(_tiny(tmp_path, LINES, **fields), seed=0)
  with pytest.raises(DataError, match='seed=-1'):
    batches.open_data(_tiny(tmp_path, LINES), seed=-1)


def test_answers_cut_off_from_their_questions_are_counted_aloud(tmp_path):
  rows = [{'q': 'x' * n, 'a': 'y' * 4} for n in (3, 3, 30)]
  path = tmp_path / 'd.jsonl'
  path.write_text('\n'.join(map(json.dumps, rows)))
  source = records.Records(files=(str(path),), prompt='q', response='a')
  said = str(batches.open_data(Config(source=source, length=16), 0))
  assert said.startswith('train 48 tokens of 3 documents, 1 of them cut')
  (tmp_path / 'd.txt').write_text('x' * 40)
  plain = Text(files=(str(tmp_path / '*.txt'),))
  assert 'cut' not in str(batches.open_data(Config(source=plain, length=16), 0))
