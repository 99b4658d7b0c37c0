"""Packing against a loop: every token once, documents apart, rows as told."""

import dataclasses
import time

import numpy as np
import pytest

from mtpjax.data import pack
from mtpjax.data.sources import DataError


def _corpus(sizes, seed=0, vocab_size=256):
  rng = np.random.default_rng(seed)
  return [rng.integers(0, vocab_size, n).astype(np.int32) for n in sizes]


def _loop(documents, length, seed):
  """Rows as lists of pieces, each a list of tokens."""
  rows, rests = [], []
  for document in documents:
    pieces = [document[i : i + length] for i in range(0, len(document), length)]
    for piece in pieces:
      (rows if len(piece) == length else rests).append([piece.tolist()])
  full = len(rows)
  for i in np.random.RandomState(seed).permutation(len(rests)):
    (piece,) = rests[i]
    for row in rows[full:]:
      if sum(map(len, row)) + len(piece) <= length:
        row.append(piece)
        break
    else:
      rows.append([piece])
  return rows


def _slots(row, length):
  """One row of pieces slot by slot."""
  slots = [
    (token, segment, position, True)
    for segment, piece in enumerate(row, 1)
    for position, token in enumerate(piece)
  ]
  slots += [(0, 0, 0, False)] * (length - len(slots))
  names = ('tokens', 'segments', 'positions', 'mask')
  return dict(zip(names, map(list, zip(*slots, strict=True)), strict=True))


CASES = {
  'mixed': [3, 0, 8, 1, 17, 5, 5, 2, 16, 0, 7, 1, 4],
  'long': [100],
  'full': [8, 16, 24],
  'short': [1] * 30,
  'one': [2],
  'empty': [0, 0],
  'none': [],
  'many': np.random.default_rng(1).integers(0, 20, 300).tolist(),
}


@pytest.mark.parametrize('sizes', CASES.values(), ids=CASES)
@pytest.mark.parametrize('length', [1, 2, 8, 13])
def test_equals_the_loop(sizes, length):
  documents = _corpus(sizes)
  plan = pack.pack(pack.concatenate(documents, 256), length, seed=5)
  expected = _loop(documents, length, seed=5)
  assert len(plan) == len(expected)
  for i, row in enumerate(expected):
    actual = plan.row(i)
    assert {k: v.tolist() for k, v in actual.items()} == _slots(row, length)
    assert [v.dtype for v in actual.values()] == [*[np.int32] * 3, bool]
    assert all(v.shape == (length,) for v in actual.values())


@pytest.mark.parametrize('length', [1, 8, 13])
def test_masks_follow_their_tokens(length):
  sizes = CASES['mixed']
  rng = np.random.default_rng(3)
  documents = [np.full(n, i, np.int32) for i, n in enumerate(sizes)]
  masks = [rng.random(n) < 0.5 if i % 3 else None for i, n in enumerate(sizes)]
  for mask in masks:
    if mask is not None:
      mask[:1] = True  # nothing in them is an answer
  plan = pack.pack(pack.concatenate(documents, 256, masks), length, seed=5)
  # The loop again, with the mask for the tokens.
  flags = [
    np.ones(n, int) if m is None else m for n, m in zip(sizes, masks, strict=True)
  ]
  for i, row in enumerate(_loop(flags, length, seed=5)):
    expected = [bool(flag) for piece in row for flag in piece]
    actual = plan.row(i)
    assert actual['mask'].tolist() == expected + [False] * (length - len(expected))
    assert actual['mask'].dtype == bool
  plain = pack.pack(pack.concatenate(documents, 256, [None] * len(sizes)), length, 5)
  assert plain.mask is None
  assert plain.fingerprint() != plan.fingerprint()
  for name in ('tokens', 'segments', 'positions'):
    whole = np.arange(len(plan))
    np.testing.assert_array_equal(plain.rows(whole)[name], plan.rows(whole)[name])


def _answered(documents, masks, length):
  """(token, target) of every slot that is to be, piece by piece, with every token told
  by itself; tokens are all different."""
  pieces = []
  for document, mask in zip(documents, masks, strict=True):
    for start in range(0, len(document), length):
      piece, orphans = [], 0
      for i in range(start, min(start + length, len(document))):
        begin = i  # of the answer that token i is in
        while begin > 0 and mask[i] and mask[begin - 1]:
          begin -= 1
        orphan = mask[i] and begin < start and not mask[0]
        orphans += orphan
        piece.append((int(document[i]), bool(mask[i] and not orphan)))
      if orphans < len(piece):
        pieces.append(piece)
  return pieces


@pytest.mark.parametrize('together', [True, False])
@pytest.mark.parametrize('length', [2, 3, 7, 16])
def test_an_answer_is_learnt_as_far_as_the_row_of_its_question(length, together):
  rng = np.random.default_rng(length)
  masks = [np.repeat(rng.random(n) < 0.6, rng.integers(1, 9, n)) for n in range(40)]
  masks += [np.ones(30, bool), np.arange(40) >= 4, np.arange(40) >= 20]
  ends = np.cumsum([len(m) for m in masks])
  documents = [np.arange(end - len(m), end) for end, m in zip(ends, masks, strict=True)]
  corpus = pack.concatenate(documents, int(ends[-1]), masks)
  plan = pack.pack(corpus, length, 5, together)
  batch, found = plan.rows(np.arange(len(plan))), []
  for tokens, segments, mask in zip(
    *(batch[k] for k in ('tokens', 'segments', 'mask')), strict=True
  ):
    for n in range(1, segments.max() + 1):
      own = segments == n
      found.append(list(zip(tokens[own].tolist(), mask[own].tolist(), strict=True)))
  wanted = _answered(documents, masks, length)
  assert sum(len(x) for x in wanted) < ends[-1]  # something is left out
  assert sorted(found) == sorted(wanted)
  # In another layout it is other data, and so it is with other orphans.
  assert plan.orphans is not None and plan.orphans.any()
  bare = dataclasses.replace(plan, orphans=None)
  assert bare.fingerprint() != plan.fingerprint()


def test_where_no_answer_is_cut_nothing_changes():
  sizes = CASES['mixed']
  documents, masks = _corpus(sizes), [np.arange(n) >= 2 for n in sizes]
  plan = pack.pack(pack.concatenate(documents, 256, masks), 17, seed=5)
  plain = pack.pack(pack.concatenate(documents, 256), 17, seed=5)
  assert plan.orphans is None
  for name in ('piece_starts', 'piece_lengths', 'row_pieces'):
    np.testing.assert_array_equal(getattr(plan, name), getattr(plain, name))


@pytest.mark.parametrize('length', [1, 8, 13])
def test_one_piece_a_row(length):
  documents = _corpus(CASES['mixed'])
  plan = pack.pack(pack.concatenate(documents, 256), length, seed=5, together=False)
  pieces = [
    d[i : i + length].tolist() for d in documents for i in range(0, len(d), length)
  ]
  rows = [plan.row(i) for i in range(len(plan))]
  assert all(row['segments'].max() == 1 for row in rows)
  actual = [row['tokens'][row['segments'] == 1].tolist() for row in rows]
  assert sorted(actual) == sorted(pieces)


def _three(length=8):
  return {
    'a': pack.pack(pack.concatenate(_corpus([20, 3, 5], 1), 256), length, 0),
    'none': pack.pack(pack.concatenate([], 256), length, 0),
    'b': pack.pack(pack.concatenate(_corpus([9, 9, 30], 2), 256), length, 0),
  }


def test_joined_domains_are_their_rows_in_turn():
  parts = _three()
  join = pack.Join(parts)
  rows = [(part, i) for part in parts.values() for i in range(len(part))]
  assert len(join) == len(rows)
  a = len(parts['a'])
  assert join.domains == {'a': (0, a), 'none': (a, a), 'b': (a, len(rows))}
  indices = np.array([3, len(rows) - 1, 0, a, 3, a - 1])
  batch = join.rows(indices, size=8)
  for k, index in enumerate(indices.tolist()):
    part, own = rows[index]
    for name, array in part.row(own).items():
      np.testing.assert_array_equal(batch[name][k], array)
      np.testing.assert_array_equal(join.row(index)[name], array)
      assert batch[name].dtype == array.dtype
      assert not batch[name][6:].any()
  for index in (-1, len(rows)):
    with pytest.raises(IndexError):
      join.row(index)
  other = pack.Join({**parts, 'b': parts['a']})
  renamed = pack.Join({'c' if k == 'b' else k: v for k, v in parts.items()})
  assert len({x.fingerprint() for x in (join, other, renamed)}) == 3
  assert pack.Join(_three()).fingerprint() == join.fingerprint()
  with pytest.raises(DataError, match='parts of one length'):
    pack.Join({**parts, 'b': _three(9)['b']})


def test_a_domain_is_seen_by_itself():
  parts = _three()
  join = pack.Join(parts)
  for name, part in parts.items():
    own = pack.domain(join, name)
    assert len(own) == len(part)
    assert own.length == 8
    assert own.domains == {'': (0, len(part))}
    expected = part.rows(np.arange(len(part)), size=30)
    actual = own.rows(np.arange(len(part)), size=30)
    for field, array in expected.items():
      np.testing.assert_array_equal(actual[field], array)
    for index in (-1, len(part)):
      with pytest.raises(IndexError):
        own.row(index)
  whole = pack.domain(parts['a'], '')
  np.testing.assert_array_equal(whole.row(1)['tokens'], parts['a'].row(1)['tokens'])
  assert all(isinstance(x, pack.Rows) for x in (join, own, whole, parts['a']))


def test_every_token_is_in_one_slot():
  documents = [np.arange(100, 131), np.arange(0), np.arange(7), np.arange(50, 52)]
  plan = pack.pack(pack.concatenate(documents, 200), 10, seed=0)
  batch = plan.rows(np.arange(len(plan)))
  assert sorted(batch['tokens'][batch['mask']].tolist()) == sorted(
    np.concatenate(documents).tolist()
  )


def test_padding_is_known_by_segment():
  plan = pack.pack(pack.concatenate([np.zeros(3, int), np.zeros(2, int)], 1), 8, 0)
  row = plan.row(0)
  assert not row['tokens'].any()
  assert sorted(row['segments'].tolist()) in (
    [0, 0, 0, 1, 1, 1, 2, 2],
    [0, 0, 0, 1, 1, 2, 2, 2],
  )
  assert row['mask'].tolist() == [True] * 5 + [False] * 3


def test_a_batch_is_its_rows_filled_up():
  plan = pack.pack(pack.concatenate(_corpus(CASES['many']), 256), 13, 0)
  indices = np.array([5, 0, 5, len(plan) - 1])
  batch = plan.rows(indices, size=6)
  for name, array in batch.items():
    assert array.shape == (6, 13)
    assert array.flags.c_contiguous
    assert not array[4:].any()
    for k, index in enumerate(indices.tolist()):
      np.testing.assert_array_equal(array[k], plan.row(index)[name])
  assert not any(v.any() for v in plan.rows(np.arange(0), size=2).values())


def test_indices_outside_are_refused():
  plan = pack.pack(pack.concatenate([np.arange(5)], 256), 4, 0)
  for index in (-1, 2):
    with pytest.raises(IndexError, match='of a plan of 2 rows'):
      plan.row(index)
  with pytest.raises(DataError, match='length=0'):
    pack.pack(pack.concatenate([np.arange(5)], 256), 0, 0)


@pytest.mark.parametrize(
  ('vocab_size', 'dtype'),
  [(1, 'u1'), (256, 'u1'), (257, 'u2'), (65536, 'u2'), (65537, 'u4')],
)
def test_the_corpus_is_small(vocab_size, dtype):
  ids = np.array([0, vocab_size - 1], np.int32)
  corpus = pack.concatenate([ids, ids[:1]], vocab_size)
  assert corpus.tokens.dtype == dtype
  assert isinstance(corpus.tokens, np.ndarray)
  assert corpus.tokens.tolist() == [0, vocab_size - 1, 0]
  assert corpus.offsets.tolist() == [0, 2, 3]
  assert pack.concatenate([], vocab_size).tokens.size == 0


def test_the_seed_and_the_contents_are_in_the_fingerprint():
  documents = _corpus(CASES['many'])

  def make(parts=documents, length=13, seed=0):
    return pack.pack(pack.concatenate(parts, 256), length, seed).fingerprint()

  changed = [documents[0] + 1, *documents[1:]]
  prints = [make(), make(seed=1), make(length=12), make(changed), make([])]
  assert len(set(prints)) == len(prints)
  assert make() == prints[0]
  assert all(0 <= p < 2**31 for p in prints)


def test_a_million_short_documents_pack_in_seconds():
  sizes = np.random.default_rng(0).integers(1, 60, 10**6)
  offsets = np.concatenate([[0], np.cumsum(sizes)])
  corpus = pack.Corpus(np.zeros(offsets[-1], np.uint8), offsets)
  start = time.perf_counter()
  plan = pack.pack(corpus, 256, seed=0)
  assert time.perf_counter() - start < 10
  assert len(plan) * 256 < 1.01 * offsets[-1]
