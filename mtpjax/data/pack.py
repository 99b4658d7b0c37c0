"""Packing: documents of any length into rows of exactly `length` slots.

Documents longer than a row are cut into pieces; the pieces are laid out by first fit
in a seeded order. A plan is four arrays, and any row of it costs the same, so an
iterator's whole state is an index.

D documents, N tokens, P pieces, R rows, B rows of a batch, T slots of a row.
"""

import dataclasses
import zlib
from collections.abc import Iterable

import numpy as np
from jaxtyping import Int64, Integer, Shaped, UInt

from mtpjax.data.sources import DataError


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
  """Tokenised documents, end to end: d is tokens[offsets[d]:offsets[d + 1]]."""

  tokens: UInt[np.ndarray, 'N']
  offsets: Int64[np.ndarray, 'D_plus_1']


def concatenate(
  documents: Iterable[Integer[np.ndarray, '_']], vocab_size: int
) -> Corpus:
  """One corpus of the documents' ids, in the smallest unsigned dtype that fits."""
  dtype = np.min_scalar_type(vocab_size - 1)
  parts = [ids.astype(dtype) for ids in documents]
  offsets = np.zeros(len(parts) + 1, np.int64)
  np.cumsum([len(part) for part in parts], out=offsets[1:])
  tokens = np.concatenate(parts) if parts else np.zeros(0, dtype)
  return Corpus(tokens, offsets)


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
  """Rows of `length` slots over a flat array of tokens.

  Row r holds the pieces row_pieces[r] to row_pieces[r + 1]; piece p is the tokens
  piece_starts[p] : piece_starts[p] + piece_lengths[p].
  """

  length: int
  tokens: UInt[np.ndarray, 'N']
  piece_starts: Int64[np.ndarray, 'P']
  piece_lengths: Int64[np.ndarray, 'P']
  row_pieces: Int64[np.ndarray, 'R_plus_1']

  def __len__(self) -> int:
    return len(self.row_pieces) - 1

  def fingerprint(self) -> int:
    """31 bits that change with the tokens or their layout."""
    check = self.length
    for array in (self.tokens, self.piece_starts, self.piece_lengths, self.row_pieces):
      check = zlib.crc32(np.ascontiguousarray(array).data, check)
    return check & 0x7FFFFFFF

  def row(self, index: int) -> dict[str, Shaped[np.ndarray, 'T']]:
    """Row `index`, as `rows` gives it. Raises IndexError outside 0..len(self)."""
    batch = self.rows(np.array([index]))
    return {name: array[0] for name, array in batch.items()}

  def rows(
    self, indices: Integer[np.ndarray, 'I'], size: int | None = None
  ) -> dict[str, Shaped[np.ndarray, 'B T']]:
    """A batch of rows, then empty ones up to `size`; repeated indices are fine.

    Returns:
      tokens int32; segments int32, counting a row's pieces from 1, 0 being padding;
      positions int32, from 0 in each piece and 0 in padding; mask bool, true where the
      token may be a target: on every real one. Token 0 is a token like any other.

    Raises:
      IndexError: an index outside 0..len(self).
    """
    indices = np.asarray(indices, np.int64)
    if indices.size and not 0 <= indices.min() <= indices.max() < len(self):
      raise IndexError(f'rows {indices} of a plan of {len(self)} rows')
    shape = (len(indices) if size is None else size, self.length)
    batch = {
      'tokens': np.zeros(shape, np.int32),
      'segments': np.zeros(shape, np.int32),
      'positions': np.zeros(shape, np.int32),
      'mask': np.zeros(shape, bool),
    }
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
    batch['mask'].reshape(-1)[at_N] = True
    return batch


def pack(corpus: Corpus, length: int, seed: int) -> Plan:
  """Lays the corpus out in rows; every token is in exactly one slot.

  A document of n tokens gives n // length pieces that fill a row each and a rest. Rests
  go, in an order drawn from the seed, to the first row with room. A row's pieces never
  see each other, so the first token of a piece is nobody's target.

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
  # RandomState's stream is frozen; default_rng's may change with NumPy, and a resumed
  # run would read other rows.
  order = np.random.RandomState(seed).permutation(len(rest))
  rest_starts, rest = rest_starts[order], rest[order]
  row = first_fit(rest, length)
  by_row = np.argsort(row, kind='stable')
  rest_rows = np.bincount(row) if len(row) else np.zeros(0, np.int64)
  pieces = np.concatenate([np.ones(len(full_starts), np.int64), rest_rows])
  return Plan(
    length=length,
    tokens=corpus.tokens,
    piece_starts=np.concatenate([full_starts, rest_starts[by_row]]),
    piece_lengths=np.concatenate(
      [np.full(len(full_starts), length, np.int64), rest[by_row]]
    ),
    row_pieces=np.concatenate([np.zeros(1, np.int64), np.cumsum(pieces)]),
  )


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
