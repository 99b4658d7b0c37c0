"""Token files: documents' ids end to end in ArrayRecord shards, read block by block.

All shards of a stream hold the same number of tokens, the last one fewer, so that a
document may span them. Record 0 is a `Header` as JSON, record 1 the lengths of the
documents that start in the shard, and each further record a block of tokens, followed
by the bits of its mask if any token of the shard may not be a target.
"""

import collections
import contextlib
import dataclasses
import itertools
import json
import os
import resource
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python import array_record_module  # pyright: ignore
from jaxtyping import Bool, Int64, Integer, Shaped

from mtpjax.data.sources import DataError

BLOCK = 4096  # tokens of a record; few enough to read a short document by itself
# Shards open at a time. To open one takes as long as reading a hundred blocks.
_OPEN = min(1024, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


@dataclasses.dataclass(frozen=True)
class Header:
  """What a shard says of itself and of its stream up to its end.

  Attributes:
    run: fingerprint of all that the stream follows from.
    stream, number: which shard of which stream.
    tokens, documents, max_id: of the shard; documents count where they start.
    bits: whether the shard stores a mask; without, all its tokens may be targets.
    masked: whether any document so far came with a mask.
    carry: tokens that its last document still has in the next shards.
    checksum, mask_checksum: zlib.crc32 of the stream's tokens and of its mask so far.
    origin: a checksum of the documents so far, before they were tokenised.
  """

  run: str
  stream: str
  number: int
  tokens: int
  documents: int
  max_id: int
  bits: bool
  masked: bool
  carry: int
  checksum: int
  mask_checksum: int
  origin: int


def shard_path(directory: Path, stream: str, number: int) -> Path:
  return directory / f'{stream}-{number:05}.arrayrecord'


class Writer:
  """Writes a stream's shards, each whole or not at all, after those already there.

  Args:
    shard_tokens: a multiple of BLOCK.

  Raises:
    DataError: a shard that is there is of something else.
  """

  def __init__(
    self, directory: Path, stream: str, run: str, dtype: np.dtype, shard_tokens: int
  ):
    self._directory, self._stream, self._run = directory, stream, run
    self._dtype, self._shard_tokens = dtype, shard_tokens
    self.headers: list[Header] = []
    for number in itertools.count():
      path = shard_path(directory, stream, number)
      if not path.exists():
        break
      header = Header(**json.loads(_read(_open(path), path, [0])[0]))
      if (header.run, header.stream, header.number) != (run, stream, number):
        raise _foreign(path)
      self.headers.append(header)
    last = self.headers[-1] if self.headers else None
    self.documents = sum(header.documents for header in self.headers)
    self.carry = last.carry if last else 0
    self.origin = last.origin if last else 0
    self._masked = last is not None and last.masked
    self._parts: list[tuple[np.ndarray, np.ndarray]] = []
    self._size, self._lengths = 0, []

  def add_rest(self, ids: np.ndarray, mask: np.ndarray | None) -> None:
    """The document that the last whole shard ends in, again."""
    mask = np.ones(len(ids), bool) if mask is None else mask
    rest = len(ids) - self.carry
    self._append(ids[rest:], mask[rest:])

  def add(
    self,
    ids: Integer[np.ndarray, '_'],
    mask: Bool[np.ndarray, '_'] | None,
    origin: int,
  ) -> None:
    """The next document. Raises OSError where a shard cannot be written."""
    self.documents, self.origin = self.documents + 1, origin
    self._masked |= mask is not None
    self._lengths.append(len(ids))
    self._append(ids, np.ones(len(ids), bool) if mask is None else mask)

  def close(self) -> None:
    """Writes the last shard."""
    if self._size or self._lengths:
      self._write()

  def _append(self, ids, mask):
    self._parts.append((ids.astype(self._dtype), mask))
    self._size += len(ids)
    while self._size >= self._shard_tokens:
      self._write()

  def _write(self) -> None:
    tokens, mask = (np.concatenate(arrays) for arrays in zip(*self._parts, strict=True))
    split, last = self._shard_tokens, self.headers[-1] if self.headers else None
    self._parts = [(tokens[split:], mask[split:])]
    tokens, mask = tokens[:split], mask[:split]
    self._size -= len(tokens)
    header = Header(
      run=self._run,
      stream=self._stream,
      number=len(self.headers),
      tokens=len(tokens),
      documents=len(self._lengths),
      max_id=int(tokens.max(initial=0)),
      bits=not mask.all(),
      masked=self._masked,
      carry=self._size,
      checksum=zlib.crc32(tokens.data, last.checksum if last else 0),
      mask_checksum=zlib.crc32(mask.data, last.mask_checksum if last else 0),
      origin=self.origin,
    )
    head = (
      json.dumps(dataclasses.asdict(header)).encode(),
      np.array(self._lengths, '<u4').tobytes(),
    )
    blocks = (
      tokens[i : i + BLOCK].tobytes()
      + (np.packbits(mask[i : i + BLOCK]).tobytes() if header.bits else b'')
      for i in range(0, len(tokens), BLOCK)
    )
    path = shard_path(self._directory, self._stream, header.number)
    _write_whole(path, itertools.chain(head, blocks))
    self.headers.append(header)
    self._lengths = []


def _write_whole(path: Path, records: Iterable[bytes]) -> None:
  part = path.with_name(path.name + '.part')
  try:
    writer = array_record_module.ArrayRecordWriter(
      str(part), 'group_size:1,uncompressed'
    )
    for record in records:
      writer.write(record)
    writer.close()
  except RuntimeError as error:
    with contextlib.suppress(OSError):
      part.unlink()
    reason = str(error).split(';')[0]
    raise OSError(
      f'cannot write {path}: {reason}; shards before it are whole'
    ) from None
  replace(part, path)


def replace(part: Path, path: Path) -> None:
  """The last moment of writing a file: from here on it is there, and whole."""
  with open(part, 'rb') as file:
    os.fsync(file.fileno())
  os.replace(part, path)


class Stream:
  """The shards of a stream, of which blocks are read as they are needed.

  Args:
    sizes: bytes of each shard.

  Raises:
    DataError: a shard is missing, truncated or of something else; names the file.
  """

  def __init__(
    self,
    directory: Path,
    headers: Sequence[Header],
    sizes: Sequence[int],
    dtype: np.dtype,
    shard_tokens: int,
  ):
    self._headers, self._dtype = headers, dtype
    self._blocks_per_shard = shard_tokens // BLOCK
    self._paths = [shard_path(directory, h.stream, h.number) for h in headers]
    self._readers: collections.OrderedDict[int, Any] = collections.OrderedDict()
    self._latest: tuple[Any, Any] = None, None
    for path, size in zip(self._paths, sizes, strict=True):
      found = path.stat().st_size if path.exists() else None
      if found != size:
        problem = 'is missing' if found is None else f'has {found} bytes of {size}'
        raise DataError(f'{path} {problem}: copy it again, or prepare the data again')

  def offsets(self) -> Int64[np.ndarray, 'D_plus_1']:
    """Where documents start, and where the last one ends."""
    lengths = [np.zeros(1, np.int64)]
    for shard, header in enumerate(self._headers):
      own = np.frombuffer(self._records(shard, [1])[0], '<u4').astype(np.int64)
      if len(own) != header.documents:
        raise _foreign(self._paths[shard])
      lengths.append(own)
    return np.cumsum(np.concatenate(lengths))

  def blocks(
    self, numbers: Int64[np.ndarray, 'U']
  ) -> tuple[Shaped[np.ndarray, 'U S'], Bool[np.ndarray, 'U S']]:
    """Tokens and mask of blocks in ascending order; one read by the same call again."""
    key, found = self._latest
    if key is not None and np.array_equal(key, numbers):
      return found
    tokens = np.zeros((len(numbers), BLOCK), self._dtype)
    mask = np.ones((len(numbers), BLOCK), bool)
    shard_U = numbers // self._blocks_per_shard
    for shard in np.unique(shard_U).tolist():
      own = np.flatnonzero(shard_U == shard)
      inside = (numbers[own] - shard * self._blocks_per_shard).tolist()
      records = self._records(shard, [2 + n for n in inside])
      header = self._headers[shard]
      for row, n, record in zip(own.tolist(), inside, records, strict=True):
        size = min(BLOCK, header.tokens - n * BLOCK)
        tokens[row, :size] = np.frombuffer(record, self._dtype, size)
        if header.bits:
          bits = np.frombuffer(record, np.uint8, offset=size * self._dtype.itemsize)
          mask[row, :size] = np.unpackbits(bits, count=size).astype(bool)
    self._latest = numbers, (tokens, mask)
    return tokens, mask

  def _records(self, shard: int, numbers: list[int]) -> list[bytes]:
    path = self._paths[shard]
    reader = self._readers.pop(shard, None)
    if reader is None:
      if len(self._readers) == _OPEN:
        self._readers.popitem(last=False)[1].close()
      reader = _open(path)
      expected = json.dumps(dataclasses.asdict(self._headers[shard])).encode()
      if _read(reader, path, [0])[0] != expected:
        raise _foreign(path)
    self._readers[shard] = reader
    return _read(reader, path, numbers)


@dataclasses.dataclass(frozen=True, eq=False)
class Tokens:
  """The tokens of a stream as a flat array, or its mask: `pack.Stored`."""

  stream: Stream
  size: int
  dtype: np.dtype
  checksum: int
  mask: bool = False

  def __getitem__(self, indices: Integer[np.ndarray, 'N']) -> Shaped[np.ndarray, 'N']:
    indices = np.asarray(indices, np.int64)
    if not indices.size:
      return np.zeros(0, self.dtype)
    block_N = indices // BLOCK
    # Indices come in runs, so that few numbers need sorting.
    starts = np.concatenate([[0], np.flatnonzero(np.diff(block_N)) + 1])
    numbers, inverse = np.unique(block_N[starts], return_inverse=True)
    array = self.stream.blocks(numbers)[self.mask]
    row_N = np.repeat(inverse, np.diff(np.append(starts, len(indices))))
    return array[row_N, indices - block_N * BLOCK]


def _open(path: Path) -> Any:
  try:
    return array_record_module.ArrayRecordReader(
      str(path), 'readahead_buffer_size:0,max_parallelism:0'
    )
  except RuntimeError as error:
    raise _damaged(path, error) from None


def _read(reader: Any, path: Path, numbers: list[int]) -> list[bytes]:
  try:
    return reader.read(numbers)
  except (RuntimeError, IndexError) as error:
    raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> DataError:
  return DataError(
    f'{path} cannot be read ({str(error).split(";")[0]}): copy it again, or prepare '
    'the data again'
  )


def _foreign(path: Path) -> DataError:
  return DataError(
    f'{path} is not the shard that was written here: copy the right one, or prepare '
    'the data in a new directory'
  )
