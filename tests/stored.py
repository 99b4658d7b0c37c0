"""Documents of all kinds, prepared: what tests of prepared data have in common."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from mtpjax.data import prepare, tokenfile
from mtpjax.data.batches import Config
from mtpjax.data.prepared import Prepared
from mtpjax.data.sources import Counts, Document

SHARD = tokenfile.BLOCK


@dataclasses.dataclass
class Docs:
  """Documents of all sizes and kinds; the longest span several shards."""

  count: int = 40
  masked: bool = False
  alphabet: str = 'abcdef'
  heldout: bool = True
  seed: int = 0
  strict: bool = True  # a mask is really one

  def documents(self, split, counts=None):
    if split == 'heldout' and not self.heldout:
      return
    counts = Counts() if counts is None else counts
    rng = np.random.default_rng([self.seed, split == 'train'])
    for i in range(self.count if split == 'train' else self.count // 4):
      size = 10_000 if i % 17 == 3 else int(rng.integers(1, 900))
      letters = np.frombuffer(self.alphabet.encode(), np.uint8)
      text = rng.choice(letters, size).tobytes()
      counts.documents += 1
      counts.empty += i % 5 == 0
      if self.masked and self.strict and i > 20 and i % 3 == 0:
        cut = int(rng.integers(size + 1))
        yield Document(f'd{i}', text, parts=((text[:cut], False), (text[cut:], True)))
      elif self.masked and i % 3 == 1:
        ids = rng.integers(0, len(self.alphabet), size)
        yield Document(
          f'd{i}', tokens=ids, mask=(rng.random(size) < 0.5) | (not self.strict)
        )
      else:
        yield Document(f'd{i}', text)


def make(folder, source, tokens=None, workers=1, shard=SHARD):
  prepare.prepare(Config(source, tokens), folder, workers, shard)
  return Prepared(str(folder))


def files(folder):
  found = sorted(p for p in Path(folder).rglob('*') if p.is_file())
  return {p.relative_to(folder).as_posix(): p.read_bytes() for p in found}


@pytest.fixture(scope='session')
def whole(tmp_path_factory):
  """What an uninterrupted run writes."""
  folder = tmp_path_factory.mktemp('whole') / 'out'
  make(folder, Docs(masked=True))
  return folder
