"""Prepared data: what `python -m mtpjax.data.prepare` wrote, as a source.

A directory has the shards of both splits (`tokenfile`) and index.json: the config they
follow from, the tokenizer, and what was counted.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from mtpjax.data import pack, tokenfile, tokenizer
from mtpjax.data.sources import Counts, DataError, Split
from mtpjax.data.tokenizer import Tokenizer

FORMAT = 1
INDEX = 'index.json'


@dataclasses.dataclass
class Prepared:
  """Documents tokenised before, with their tokenizer; read from disk as rows need them.

  The rows are those of the source that was prepared.

  Attributes:
    directory: the command's --output; of a mixture, its folder of one domain.
  """

  directory: str

  def tokenizer(self) -> Tokenizer:
    """The one of the ids. Raises DataError."""
    return tokenizer.from_json(self._index()['tokenizer'])

  def rows(
    self, split: Split, length: int, seed: int, together: bool, counts: Counts
  ) -> pack.Plan:
    """One split.

    Raises:
      DataError: it was not finished; a shard is not what was written; an id is outside
        the vocabulary.
    """
    index = self._index()
    own = index['splits'][split]
    vocab_size = tokenizer.from_json(index['tokenizer']).vocab_size
    headers = [tokenfile.Header(**shard['header']) for shard in own['shards']]
    for header in headers:
      if header.max_id >= vocab_size:
        raise DataError(
          f'{self.directory}: id {header.max_id} in shard {header.number} of {split} '
          f'is outside the vocabulary of {vocab_size}; prepare the data again'
        )
    dtype = np.min_scalar_type(vocab_size - 1)
    stream = tokenfile.Stream(
      Path(self.directory).expanduser(),
      headers,
      [shard['bytes'] for shard in own['shards']],
      dtype,
      index['shard_tokens'],
    )
    size = sum(header.tokens for header in headers)
    last = headers[-1] if headers else None
    corpus = pack.Corpus(
      tokenfile.Tokens(stream, size, dtype, last.checksum if last else 0),
      stream.offsets(),
      tokenfile.Tokens(stream, size, np.dtype(bool), last.mask_checksum, mask=True)
      if last and last.masked
      else None,
    )
    for name, number in own['counts'].items():
      setattr(counts, name, getattr(counts, name) + number)
    counts.long += int((np.diff(corpus.offsets) > length).sum())
    return pack.pack(corpus, length, seed, together)

  def _index(self) -> dict[str, Any]:
    path = Path(self.directory).expanduser() / INDEX
    command = f'python -m mtpjax.data.prepare --config=… --output={self.directory}'
    try:
      index = json.loads(path.read_text())
      known = index['format'], index['block']
    except FileNotFoundError:
      raise DataError(
        f'directory={self.directory!r}: no {INDEX} there, so it is not whole; finish '
        f'it with {command}'
      ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
      raise DataError(
        f'{path} cannot be read ({error}): copy it again, or repeat {command}'
      ) from error
    if known != (FORMAT, tokenfile.BLOCK):
      raise DataError(
        f'{path}: format and block {known}, where this version reads '
        f'{(FORMAT, tokenfile.BLOCK)}; prepare the data again'
      )
    return index
