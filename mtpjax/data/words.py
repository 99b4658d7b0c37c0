"""A tokenizer of given words, separated by blanks: the vocabulary of a task."""

import dataclasses
import functools
import json
import re

import numpy as np
from jaxtyping import Int32
from numpy.typing import ArrayLike

from mtpjax.data.sources import DataError
from mtpjax.data.tokenizer import as_text, digest


@dataclasses.dataclass(frozen=True)
class Words:
  """One token a word; what is not in the vocabulary is refused."""

  words: tuple[str, ...]

  end = None

  def __post_init__(self):
    bad = [w for w in self.words if not w or w.split() != [w]]
    if not self.words or bad or len(set(self.words)) < len(self.words):
      raise DataError(
        f'words={self.words[:8]!r}: give distinct words without blanks in them'
      )

  @property
  def special(self) -> dict[str, int]:
    return {}

  @property
  def vocab_size(self) -> int:
    return len(self.words)

  @property
  def fingerprint(self) -> str:
    return digest(self.to_json())

  @property
  def bytes_per_token(self) -> Int32[np.ndarray, ' V']:
    """A word's UTF-8 bytes and the blank after it."""
    return np.array([len(w.encode()) + 1 for w in self.words], np.int32)

  @property
  def token_bytes(self) -> tuple[bytes, ...]:
    """The blank before a word, and the word."""
    return tuple(f' {w}'.encode() for w in self.words)

  @functools.cached_property
  def _ids(self) -> dict[str, int]:
    return {word: n for n, word in enumerate(self.words)}

  def encode(
    self, text: str | bytes, where: str = 'the text'
  ) -> Int32[np.ndarray, ' T']:
    """Ids of the text's words. Raises DataError on a word outside the vocabulary."""
    ids = []
    for match in re.finditer(r'\S+', as_text(text, where)):
      if match[0] not in self._ids:
        raise DataError(
          f'{where}: the word {match[0]!r} at index {match.start()} is not in the '
          f'vocabulary; use {" ".join(self.words[:12])} …'
        )
      ids.append(self._ids[match[0]])
    return np.array(ids, np.int32)

  def decode(self, ids: ArrayLike) -> str:
    """Words with blanks between. Raises DataError on an id outside the vocabulary."""
    found = np.asarray(ids, np.int64)
    if found.size and not 0 <= found.min() <= found.max() < len(self.words):
      raise DataError(f'an id of {found.tolist()[:8]} is no word of {len(self.words)}')
    return ' '.join(self.words[n] for n in found)

  def to_json(self) -> str:
    return json.dumps({'kind': 'words', 'words': self.words})
