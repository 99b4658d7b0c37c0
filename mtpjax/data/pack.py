"""Packing: documents of any length into rows of exactly `length` slots.

Documents longer than a row are cut into pieces; the pieces are laid out by first fit
in a seeded order. A plan is a few arrays, and any row of it costs the same, so an
iterator's whole state is an index. Batches need no more than `Rows` of a plan, so rows
may as well be made up from their index.

D documents, N tokens, P pieces, R rows, B rows of a batch, T slots of a row.
"""

import dataclasses
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int64, Integer, Shaped, UInt

from mtpjax.data.sources import DataError


@runtime_checkable
class Rows(Protocol):
  """What batches are made of: at most 2**31 - 1 rows, each found by its index alone.

  Attributes:
    length: slots of a row, T.
    domains: by name, the first row of each domain and the one after its last.
  """

  @property
  def length(self) -> int: ...

  @property
  def domains(self) -> dict[str, tuple[int, int]]: ...

  def __len__(self) -> int: ...

  def fingerprint(self) -> int:
    """31 bits that change with what is in the rows."""
    ...

  def row(self, index: int) -> dict[str, Shaped[np.ndarray, 'T']]:
    """Row `index`, as `rows` gives it. Raises IndexError outside 0..len(self)."""
    ...

  def rows(
    self, indices: Integer[np.ndarray, 'I'], size: int | None = None
  ) -> dict[str, Shaped[np.ndarray, 'B T']]:
    """A batch of rows, then empty ones up to `size`; repeated indices are fine.

    Returns:
      tokens int32; segments int32, counting a row's pieces from 1, 0 being padding;
      positions int32, from 0 in each piece and 0 in padding; mask bool, true where the
      token may be a target, never in padding. Token 0 is a token like any other.

    Raises:
      IndexError: an index outside 0..len(self).
    """
    ...


@runtime_checkable
class Stored(Protocol):
  """A flat array that is read on demand, in the place of one in memory."""

  @property
  def size(self) -> int: ...

  @property
  def dtype(self) -> np.dtype: ...

  @property
  def checksum(self) -> int:
    """zlib.crc32 of all its bytes, known without reading them."""
    ...

  def __getitem__(self, indices: np.ndarray) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
  """Tokenised documents, end to end: d is tokens[offsets[d]:offsets[d + 1]].

  `mask` is false on tokens that may not be targets; None: all may.
  """

  tokens: UInt[np.ndarray, 'N'] | Stored
  offsets: Int64[np.ndarray, 'D_plus_1']
  mask: Bool[np.ndarray, 'N'] | Stored | None = None


def concatenate(
  documents: Iterable[Integer[np.ndarray, '_']],
  vocab_size: int,
  masks: Sequence[Bool[np.ndarray, '_'] | None] = (),
) -> Corpus:
  """One corpus of the documents' ids, in the smallest unsigned dtype that fits.

  Args:
    masks: one a document, or empty; only read once `documents` has ended.
  """
  dtype = np.min_scalar_type(vocab_size - 1)
  parts = [ids.astype(dtype) for ids in documents]
  offsets = np.zeros(len(parts) + 1, np.int64)
  np.cumsum([len(part) for part in parts], out=offsets[1:])
  tokens = np.concatenate(parts) if parts else np.zeros(0, dtype)
  if all(mask is None for mask in masks):
    return Corpus(tokens, offsets)
  mask_N = np.ones(len(tokens), bool)
  for start, end, mask in zip(offsets[:-1], offsets[1:], masks, strict=True):
    if mask is not None:
      mask_N[start:end] = mask
  return Corpus(tokens, offsets, mask_N)


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
  """Rows of `length` slots over a flat array of tokens.

  Row r holds the pieces row_pieces[r] to row_pieces[r + 1]; piece p is the tokens
  piece_starts[p] : piece_starts[p] + piece_lengths[p]. Where orphans[p], the targets
  with which piece p begins are none.
  """

  length: int
  tokens: UInt[np.ndarray, 'N'] | Stored
  piece_starts: Int64[np.ndarray, 'P']
  piece_lengths: Int64[np.ndarray, 'P']
  row_pieces: Int64[np.ndarray, 'R_plus_1']
  mask: Bool[np.ndarray, 'N'] | Stored | None = None
  orphans: Bool[np.ndarray, 'P'] | None = None

  @property
  def domains(self) -> dict[str, tuple[int, int]]:
    return {'': (0, len(self))}

  def __len__(self) -> int:
    return len(self.row_pieces) - 1

  def fingerprint(self) -> int:
    """31 bits that change with the tokens, their mask or their layout."""
    arrays = [self.tokens, self.piece_starts, self.piece_lengths, self.row_pieces]
    arrays += [x for x in (self.mask, self.orphans) if x is not None]
    checks = [self.length, *map(_checksum, arrays)]
    return zlib.crc32(str(checks).encode()) >> 1

  def row(self, index: int) -> dict[str, Shaped[np.ndarray, 'T']]:
    return _only(self, index)

  def rows(
    self, indices: Integer[np.ndarray, 'I'], size: int | None = None
  ) -> dict[str, Shaped[np.ndarray, 'B T']]:
    indices = _inside(indices, len(self))
    batch = _padding(len(indices) if size is None else size, self.length)
    first = self.row_pieces[indices]
    pieces = self.row_pieces[indices + 1] - first
    row_P = np.repeat(np.arange(len(indices)), pieces)
    rank_P = _within(pieces)
    piece_P = first[row_P] + rank_P
    length_P = self.piece_lengths[piece_P]
    before_P = np.cumsum(length_P) - length_P
    # A row's first piece starts at its slot 0, the others where the previous ended.
    slot_P = before_P - before_P[np.cumsum(pieces) - pieces][row_P]
    position_N = _within(length_P)
    at_N = np.repeat(row_P * self.length + slot_P, length_P) + position_N
    source_N = np.repeat(self.piece_starts[piece_P], length_P) + position_N
    batch['tokens'].reshape(-1)[at_N] = self.tokens[source_N]
    batch['segments'].reshape(-1)[at_N] = np.repeat(rank_P + 1, length_P)
    batch['positions'].reshape(-1)[at_N] = position_N
    if self.mask is None:
      batch['mask'].reshape(-1)[at_N] = True
      return batch
    mask_N = self.mask[source_N]
    if self.orphans is not None:
      index_N = np.repeat(np.arange(len(piece_P)), length_P)
      begin_P = np.where(self.orphans[piece_P], length_P, 0)
      none = np.flatnonzero(~mask_N)
      np.minimum.at(begin_P, index_N[none], position_N[none])
      mask_N = mask_N & (position_N >= begin_P[index_N])
    batch['mask'].reshape(-1)[at_N] = mask_N
    return batch


@dataclasses.dataclass(frozen=True, eq=False)
class Join:
  """Rows of several domains, one domain after the other. All have the same length."""

  parts: Mapping[str, Rows]

  def __post_init__(self):
    if len({part.length for part in self.parts.values()}) != 1:
      raise DataError(f'rows of {sorted(self.parts)}: give parts of one length')

  @property
  def length(self) -> int:
    return next(iter(self.parts.values())).length

  @property
  def domains(self) -> dict[str, tuple[int, int]]:
    ends = np.cumsum([len(part) for part in self.parts.values()]).tolist()
    return dict(zip(self.parts, zip([0, *ends[:-1]], ends, strict=True), strict=True))

  def __len__(self) -> int:
    return sum(map(len, self.parts.values()))

  def fingerprint(self) -> int:
    checks = [(name, part.fingerprint()) for name, part in self.parts.items()]
    return zlib.crc32(str(checks).encode()) >> 1

  def row(self, index: int) -> dict[str, Shaped[np.ndarray, 'T']]:
    return _only(self, index)

  def rows(
    self, indices: Integer[np.ndarray, 'I'], size: int | None = None
  ) -> dict[str, Shaped[np.ndarray, 'B T']]:
    indices = _inside(indices, len(self))
    batch = _padding(len(indices) if size is None else size, self.length)
    for name, (first, end) in self.domains.items():
      own = np.flatnonzero((first <= indices) & (indices < end))
      if own.size:
        for field, array in self.parts[name].rows(indices[own] - first).items():
          batch[field][own] = array
    return batch


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
  """The rows `first` to `end` of others, counted from 0."""

  whole: Rows
  first: int
  end: int

  @property
  def length(self) -> int:
    return self.whole.length

  @property
  def domains(self) -> dict[str, tuple[int, int]]:
    return {'': (0, len(self))}

  def __len__(self) -> int:
    return self.end - self.first

  def fingerprint(self) -> int:
    checks = self.whole.fingerprint(), self.first, self.end
    return zlib.crc32(str(checks).encode()) >> 1

  def row(self, index: int) -> dict[str, Shaped[np.ndarray, 'T']]:
    return _only(self, index)

  def rows(
    self, indices: Integer[np.ndarray, 'I'], size: int | None = None
  ) -> dict[str, Shaped[np.ndarray, 'B T']]:
    return self.whole.rows(_inside(indices, len(self)) + self.first, size)


def domain(rows: Rows, name: str) -> Rows:
  """The rows of one domain. Raises KeyError if there is no such domain."""
  return Part(rows, *rows.domains[name])


def pack(corpus: Corpus, length: int, seed: int, together: bool = True) -> Plan:
  """Lays the corpus out in rows; every token is in one slot at most.

  A document of n tokens gives n // length pieces that fill a row each and a rest. Rests
  go, in an order drawn from the seed, to the first row with room. A row's pieces never
  see each other, so the first token of a piece is nobody's target.

  An answer that a row's end cuts is learnt up to there: in a document that begins with
  what is no target, targets that go on from the piece before are none, and a piece of
  nothing else is left out, for what they answer is in another row.

  Args:
    together: False gives each rest a row of its own.

  Raises:
    DataError: length < 1.
  """
  if length < 1:
    raise DataError(f'length={length}: a row has at least one slot')
  sizes = np.diff(corpus.offsets)
  full, rest = sizes // length, sizes % length
  full_starts = np.repeat(corpus.offsets[:-1], full) + length * _within(full)
  rest_starts = (corpus.offsets[1:] - rest)[rest > 0]
  rest = rest[rest > 0]
  orphans = np.zeros(len(full_starts) + len(rest), bool)
  if corpus.mask is not None:
    starts = np.concatenate([full_starts, rest_starts])
    lengths = np.concatenate([np.full(len(full_starts), length), rest])
    orphans, only = _orphans(corpus.offsets, corpus.mask, starts, lengths)
    orphans = orphans[~only]
    kept = ~only[len(full_starts) :]
    full_starts = full_starts[~only[: len(full_starts)]]
    rest_starts, rest = rest_starts[kept], rest[kept]
  # RandomState's stream is frozen; default_rng's may change with NumPy, and a resumed
  # run would read other rows.
  order = np.random.RandomState(seed).permutation(len(rest))
  rest_starts, rest = rest_starts[order], rest[order]
  row = first_fit(rest, length) if together else np.arange(len(rest))
  by_row = np.argsort(row, kind='stable')
  rest_rows = np.bincount(row) if len(row) else np.zeros(0, np.int64)
  pieces = np.concatenate([np.ones(len(full_starts), np.int64), rest_rows])
  orphans[len(full_starts) :] = orphans[len(full_starts) :][order][by_row]
  return Plan(
    length=length,
    tokens=corpus.tokens,
    piece_starts=np.concatenate([full_starts, rest_starts[by_row]]),
    piece_lengths=np.concatenate(
      [np.full(len(full_starts), length, np.int64), rest[by_row]]
    ),
    row_pieces=np.concatenate([np.zeros(1, np.int64), np.cumsum(pieces)]),
    mask=corpus.mask,
    orphans=orphans if orphans.any() else None,
  )


def _orphans(
  offsets: Int64[np.ndarray, 'D_plus_1'],
  mask: Bool[np.ndarray, 'N'] | Stored,
  starts: Int64[np.ndarray, 'P'],
  lengths: Int64[np.ndarray, 'P'],
) -> tuple[Bool[np.ndarray, 'P'], Bool[np.ndarray, 'P']]:
  """Which pieces begin with targets whose question is in another piece, and which of
  those have nothing else."""
  first = offsets[np.searchsorted(offsets, starts, 'right') - 1]
  found = np.flatnonzero(starts > first)
  for at, wanted in ((first, False), (starts - 1, True), (starts, True)):
    found = found[mask[at[found]] == wanted]
  orphans, only = np.zeros((2, len(starts)), bool)
  orphans[found] = True
  for start in range(0, len(found), 1024):
    some = found[start : start + 1024]
    length = lengths[some]
    flags = mask[np.repeat(starts[some], length) + _within(length)]
    only[some] = np.logical_and.reduceat(flags, np.cumsum(length) - length)
  return orphans, only


def first_fit(
  lengths: Integer[np.ndarray, 'P'], capacity: int
) -> Int64[np.ndarray, 'P']:
  """Row of each piece: the first with room, or else a new one. Lengths ≤ capacity."""
  # Rows only fill up, so where the search for n slots ended last time it can start
  # again: at most capacity · rows steps in all, about the number of tokens.
  start = [0] * (capacity + 1)
  free: list[int] = []
  rows = []
  for n in lengths.tolist():
    row = start[n]
    while row < len(free) and free[row] < n:
      row += 1
    if row == len(free):
      free.append(capacity)
    free[row] -= n
    start[n] = row
    rows.append(row)
  return np.array(rows, np.int64)


def _within(counts: Int64[np.ndarray, 'P']) -> Int64[np.ndarray, 'N']:
  """0..n-1 for each n of counts, end to end."""
  return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _checksum(array: np.ndarray | Stored) -> int:
  if not isinstance(array, np.ndarray):
    return array.checksum
  return zlib.crc32(np.ascontiguousarray(array).data)


def _only(rows: Rows, index: int) -> dict[str, Shaped[np.ndarray, 'T']]:
  return {name: array[0] for name, array in rows.rows(np.array([index])).items()}


def _inside(indices: np.ndarray, count: int) -> Int64[np.ndarray, 'I']:
  indices = np.asarray(indices, np.int64)
  if indices.size and not 0 <= indices.min() <= indices.max() < count:
    raise IndexError(f'rows {indices} of a plan of {count} rows')
  return indices


def _padding(size: int, length: int) -> dict[str, Shaped[np.ndarray, 'B T']]:
  dtypes = {'tokens': np.int32, 'segments': np.int32, 'positions': np.int32}
  return {k: np.zeros((size, length), v) for k, v in {**dtypes, 'mask': bool}.items()}
