"""Tokenizers: bytes, and the characters that occur. Both are exact and need no file;
`subwords` has others.

A config's `build(documents, heldout)` gives the tokenizer; `to_json` and `from_json`
carry it in a checkpoint, and `fingerprint` tells whether two are the same.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int32
from numpy.typing import ArrayLike

from mtpjax.data.sources import DataError, Document

VOCABULARY = 'vocabulary.json'  # of a run's directory: what `to_json` writes
# Texts are joined to about this many bytes before each vectorised pass.
_CHUNK_BYTES = 1 << 22


@runtime_checkable
class Tokenizer(Protocol):
  """What the rest of the package knows of a tokenizer."""

  @property
  def vocab_size(self) -> int: ...

  @property
  def fingerprint(self) -> str: ...

  @property
  def bytes_per_token(self) -> Int32[np.ndarray, 'V']:
    """UTF-8 bytes of each token, for bits per byte."""
    ...

  @property
  def token_bytes(self) -> tuple[bytes, ...]:
    """What each token adds to the UTF-8 of a decoded text, after other tokens."""
    ...

  @property
  def special(self) -> dict[str, int]:
    """Ids of the tokens that stand for no text, by role: 'begin', 'end', 'pad', …"""
    ...

  @property
  def end(self) -> int | None:
    """Id of the token that ends a document; None: documents just end."""
    ...

  def encode(
    self, text: str | bytes, where: str = 'the text'
  ) -> Int32[np.ndarray, 'T']: ...

  def decode(self, ids: ArrayLike) -> str: ...

  def to_json(self) -> str: ...


@runtime_checkable
class TokenizerConfig(Protocol):
  """What `batches.Config.tokenizer` may be."""

  def build(
    self, documents: Iterable[Document], heldout: Iterable[Document] = ()
  ) -> Tokenizer:
    """Of the training documents; held-out ones may say which characters there are, so
    that none of them ends the run, and nothing else."""
    ...


@dataclasses.dataclass(frozen=True)
class Bytes:
  """One token a byte: any text in any language, 256 tokens.

  Attributes:
    ends: whether there is one more, at the end of each document, so that a model
      learns where to stop.
  """

  ends: bool = False

  @dataclasses.dataclass
  class Config:
    ends: bool = False

    def build(
      self, documents: Iterable[Document], heldout: Iterable[Document] = ()
    ) -> 'Bytes':
      """The documents are not looked at."""
      del documents, heldout
      return Bytes(self.ends)

  @property
  def vocab_size(self) -> int:
    return 256 + self.ends

  @property
  def end(self) -> int | None:
    return 256 if self.ends else None

  @property
  def special(self) -> dict[str, int]:
    return {'end': 256} if self.ends else {}

  @property
  def fingerprint(self) -> str:
    return digest(self.to_json())

  @property
  def bytes_per_token(self) -> Int32[np.ndarray, 'V']:
    return (np.arange(self.vocab_size) < 256).astype(np.int32)

  @property
  def token_bytes(self) -> tuple[bytes, ...]:
    return tuple(bytes([n]) if n < 256 else b'' for n in range(self.vocab_size))

  def encode(
    self, text: str | bytes, where: str = 'the text'
  ) -> Int32[np.ndarray, 'T']:
    """Ids of the text's bytes. Raises DataError on a str with lone surrogates."""
    if isinstance(text, str):
      text = as_text(text, where).encode()
    return np.frombuffer(text, np.uint8).astype(np.int32)

  def decode(self, ids: ArrayLike) -> str:
    """Text of ids [T]; non-UTF-8 becomes U+FFFD. Raises DataError on a bad id."""
    found = check_ids(ids, self.vocab_size)
    return found[found < 256].astype(np.uint8).tobytes().decode('utf-8', 'replace')

  def to_json(self) -> str:
    return json.dumps({'kind': 'bytes', **({'ends': True} if self.ends else {})})


@dataclasses.dataclass(frozen=True)
class Characters:
  """One token a character (code point), the vocabulary being those that occur.

  Attributes:
    characters: the vocabulary, ascending and distinct; a token is an index into it.

  Raises:
    DataError: characters are empty, repeated or out of order.
  """

  characters: str

  end = None

  @dataclasses.dataclass
  class Config:
    def build(
      self, documents: Iterable[Document], heldout: Iterable[Document] = ()
    ) -> 'Characters':
      """All characters of the documents. Raises DataError if there are none."""
      seen = np.zeros(0x110000, bool)
      for text in _chunks(itertools.chain(documents, heldout)):
        seen[_code_points(text.decode())] = True
      points = np.flatnonzero(seen).astype('<u4')
      return Characters(points.tobytes().decode('utf-32-le'))

  def __post_init__(self):
    if not self.characters or (np.diff(self._points.astype(np.int64)) <= 0).any():
      raise DataError(
        f'characters={self.characters[:20]!r}: a vocabulary is non-empty, ascending '
        'and distinct; build it from documents that hold text'
      )

  @property
  def special(self) -> dict[str, int]:
    return {}

  @property
  def vocab_size(self) -> int:
    return len(self.characters)

  @property
  def fingerprint(self) -> str:
    return digest(self.to_json())

  @property
  def bytes_per_token(self) -> Int32[np.ndarray, 'V']:
    return self._sizes

  @property
  def token_bytes(self) -> tuple[bytes, ...]:
    return tuple(c.encode() for c in self.characters)

  def encode(
    self, text: str | bytes, where: str = 'the text'
  ) -> Int32[np.ndarray, 'T']:
    """Ids of the text's characters.

    Raises:
      DataError: bytes that are not UTF-8, or a character outside the vocabulary; the
        message has the character, its code point, its index and `where`.
    """
    text = as_text(text, where)
    # The last entry stands for every code point above the vocabulary's largest.
    ids = self._table[np.minimum(_code_points(text), len(self._table) - 1)]
    if ids.size and ids.min() < 0:
      index = int(np.argmin(ids))
      raise _unknown(text[index], index, where)
    return ids

  def decode(self, ids: ArrayLike) -> str:
    """Text of ids [T]. Raises DataError on an id outside the vocabulary."""
    points = self._points[check_ids(ids, self.vocab_size)]
    return points.tobytes().decode('utf-32-le')

  def to_json(self) -> str:
    return json.dumps({'kind': 'characters', 'characters': self.characters})

  @functools.cached_property
  def _sizes(self) -> np.ndarray:
    return np.array([len(c.encode()) for c in self.characters], np.int32)

  @functools.cached_property
  def _points(self) -> np.ndarray:
    return _code_points(self.characters)

  @functools.cached_property
  def _table(self) -> np.ndarray:
    table = np.full(int(self._points[-1]) + 2, -1, np.int32)
    table[self._points] = np.arange(self.vocab_size, dtype=np.int32)
    return table


@dataclasses.dataclass
class Saved:
  """A config: the tokenizer that another run's directory holds, trained or not."""

  directory: str

  def build(
    self, documents: Iterable[Document], heldout: Iterable[Document] = ()
  ) -> Tokenizer:
    """The documents are not looked at. Raises DataError if there is none."""
    del documents, heldout
    path = Path(self.directory).expanduser() / VOCABULARY
    try:
      return from_json(path.read_text('utf-8'))
    except (OSError, UnicodeDecodeError) as error:
      raise DataError(
        f'data.tokenizer: {path} cannot be read ({error}); name the directory of a run'
      ) from error


def from_json(text: str) -> Tokenizer:
  """The tokenizer that `to_json` wrote. Raises DataError on anything else."""
  try:
    fields = json.loads(text)
    kind = fields.pop('kind')
    # Only here: they are built upon this module.
    if kind == 'words':
      from mtpjax.data import words

      return words.Words(tuple(fields['words']))
    if kind == 'huggingface':
      from mtpjax.data import subwords

      return subwords.HuggingFace(**fields)
    return {'bytes': Bytes, 'characters': Characters}[kind](**fields)
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    if isinstance(error, DataError):
      raise
    raise DataError(
      f'tokenizer={text[:80]!r}: not what to_json of a tokenizer writes'
    ) from error


def encode_document(
  tokenizer: Tokenizer, document: Document
) -> tuple[Int32[np.ndarray, 'N'], Bool[np.ndarray, 'N'] | None]:
  """Ids of a document, and which of them may be targets (None: all).

  Its parts are encoded one by one, so that none of the ids spans two. The tokenizer's
  `end` follows, a target if the id before it is one, unless the ids end with it.

  Raises:
    DataError: what the tokenizer refuses; stored ids outside its vocabulary, or a mask
      of another length.
  """
  name, mask = document.name, None
  if document.tokens is not None:
    try:
      fix = 'set data.tokenizer to the one that made them'
      ids = check_ids(document.tokens, tokenizer.vocab_size, fix).astype(np.int32)
    except DataError as error:
      raise DataError(f'{name}: {error}') from None
    if document.mask is not None:
      mask = np.asarray(document.mask, bool)
      if mask.shape != ids.shape:
        raise DataError(
          f'{name}: a mask of {mask.size} for {ids.size} ids; give one for each'
        )
  elif document.parts is not None:
    parts = [tokenizer.encode(part, where=name) for part, _ in document.parts]
    flags = [flag for _, flag in document.parts]
    ids = np.concatenate([np.zeros(0, np.int32), *parts])
    mask = np.repeat(np.array(flags, bool), [len(part) for part in parts])
  else:
    ids = tokenizer.encode(document.text, where=name)
  if tokenizer.end is not None and not (ids.size and ids[-1] == tokenizer.end):
    ids = np.append(ids, np.int32(tokenizer.end))
    if mask is not None:
      mask = np.append(mask, bool(mask.size and mask[-1]))
  return ids, mask


def num_bytes(tokenizer: Tokenizer, ids: ArrayLike) -> Int32[np.ndarray, '...']:
  """UTF-8 bytes of each token, in the shape of ids. Raises DataError on a bad id."""
  return tokenizer.bytes_per_token[check_ids(ids, tokenizer.vocab_size)]


def as_text(text: str | bytes, where: str) -> str:
  """The text as characters. Raises DataError on what UTF-8 has no bytes for."""
  try:
    if isinstance(text, bytes):
      return text.decode()
    text.encode()
  except UnicodeDecodeError as error:
    raise DataError(
      f'{where}: byte 0x{error.object[error.start]:02x} at {error.start} is not UTF-8; '
      'characters need valid UTF-8, Bytes does not'
    ) from error
  except UnicodeEncodeError as error:
    raise _unknown(error.object[error.start], error.start, where) from error
  return text


def check_ids(
  ids: ArrayLike,
  vocab_size: int,
  fix: str = 'mask padded logits, and decode with the tokenizer of the checkpoint',
) -> np.ndarray:
  """Ids as an array of integers. Raises DataError on one outside the vocabulary."""
  array = np.asarray(ids)
  if not array.size:
    return array.astype(np.int32)  # np.asarray([]) is float64
  if array.dtype.kind not in 'iu':
    raise DataError(f'ids have dtype {array.dtype}: give integers')
  low, high = int(array.min()), int(array.max())
  if low < 0 or high >= vocab_size:
    bad = low if low < 0 else high
    raise DataError(f'id {bad} is outside the vocabulary of {vocab_size}: {fix}')
  return array


def _chunks(documents: Iterable[Document]) -> Iterable[bytes]:
  parts, size = [], 0
  for document in documents:
    parts.append(document.text)
    size += len(document.text)
    if size >= _CHUNK_BYTES:
      yield b''.join(parts)
      parts, size = [], 0
  yield b''.join(parts)


def _code_points(text: str) -> np.ndarray:
  return np.frombuffer(text.encode('utf-32-le', 'surrogatepass'), '<u4')


def digest(text: str) -> str:
  """A fingerprint of what to_json wrote."""
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def _unknown(character: str, index: int, where: str) -> DataError:
  return DataError(
    f'{where}: character {character!r} (U+{ord(character):04X}) at index {index} is '
    'not in the vocabulary; build it from documents that hold it, or use Bytes'
  )
