"""Which files a source reads, and to which split what is in them belongs.

A name is what a file or a line is called on every machine: its path below the
pattern's fixed part, with ':line' appended. Its hash decides its split, so that it
never moves because others came or went, and is never in both.
"""

import dataclasses
import glob
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from typing import Literal

Split = Literal['train', 'heldout']


class DataError(ValueError):
  """The data or its configuration is at fault; says which field and what to do."""


@dataclasses.dataclass(frozen=True)
class Chosen:
  """The files that hold a split.

  Attributes:
    field, patterns: the source's field that named them, and its value.
    names: real path to name, by pattern and then by name.
    heldout: the fraction held out of what is in them; None: all of it is the split's.
  """

  field: str
  patterns: str | tuple[str, ...]
  names: dict[str, str]
  split: Split
  heldout: float | None

  def keeps(self, name: str) -> bool:
    """Whether what has that name is the split's."""
    return self.heldout is None or split_of(name, self.heldout) == self.split

  def nothing(self, left_out: str, fix: str) -> DataError:
    """That the files hold no document of the split."""
    hashed = '' if self.heldout is None else f' with heldout={self.heldout}'
    return DataError(
      f'{self.field}={self.patterns!r}{hashed}: no document in the {self.split!r} '
      f'split ({left_out}); give {fix}'
    )


def choose(
  split: Split,
  files: str | tuple[str, ...],
  heldout_files: str | tuple[str, ...],
  heldout: float,
) -> Chosen:
  """The files of a split: none if nothing is held out, neither by name nor by hash.

  Raises:
    DataError: a field that cannot be, no file for a pattern, or one for both splits.
  """
  check_split(split, heldout)
  train = _matched('files', files)
  if not heldout_files:
    if split == 'heldout' and heldout == 0:
      return Chosen('files', files, {}, split, None)
    return Chosen('files', files, train, split, heldout or None)
  if heldout:
    raise DataError(
      f'heldout={heldout} beside heldout_files={heldout_files!r}: '
      'the held-out set is given twice; set heldout=0 or heldout_files=()'
    )
  held = _matched('heldout_files', heldout_files)
  if both := set(train) & set(held):
    raise DataError(
      f'heldout_files={heldout_files!r} and files={files!r} both match '
      f'{min(both)!r}: narrow one of the patterns'
    )
  if split == 'heldout':
    return Chosen('heldout_files', heldout_files, held, split, None)
  return Chosen('files', files, train, split, None)


def check_split(split: str, heldout: float) -> None:
  check_choice('split', split, ('train', 'heldout'))
  if not 0 <= heldout < 1:
    raise DataError(f'heldout={heldout}: a fraction of the documents, in [0, 1)')


def check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
  if value not in choices:
    raise DataError(f'{field}={value!r}: must be one of {choices}')


def fraction(name: str) -> float:
  """A number in [0, 1) that depends on the name only."""
  digest = hashlib.sha256(name.encode('utf-8', 'surrogateescape')).digest()
  return int.from_bytes(digest[:6], 'big') / 2**48


def split_of(name: str, heldout: float) -> Split:
  return 'heldout' if fraction(name) < heldout else 'train'


def is_utf8(text: bytes) -> bool:
  try:
    text.decode()
  except UnicodeDecodeError:
    return False
  return True


def lines(name: str, file: Iterable[bytes]) -> Iterator[tuple[str, bytes]]:
  """Names and contents of a binary file's lines, counted from 1."""
  # A binary file's end at \n only; str.splitlines would also end them at \x0b, \x0c,
  # \x85, U+2028 and others.
  for number, line in enumerate(file, 1):
    yield f'{name}:{number}', line.removesuffix(b'\n').removesuffix(b'\r')


def read(field: str, path: str) -> bytes:
  """All of a file. Raises DataError if it cannot be read."""
  try:
    with open(path, 'rb') as file:
      return file.read()
  except OSError as error:
    raise unreadable(field, path, error.strerror) from error


def unreadable(field: str, path: str, problem: object) -> DataError:
  return DataError(
    f'{field}: cannot read {path!r}: {problem}; repair it or leave it out'
  )


def _matched(field: str, patterns: str | tuple[str, ...]) -> dict[str, str]:
  """Real path to name of the files matched, by pattern and then by name."""
  found: dict[str, str] = {}
  for pattern in (patterns,) if isinstance(patterns, str) else patterns:
    expanded = os.path.expanduser(pattern)
    prefix = _fixed_prefix(expanded)
    names = {
      os.path.relpath(path, prefix).replace(os.sep, '/'): os.path.realpath(path)
      for path in glob.glob(expanded, recursive=True)
      if not os.path.isdir(path)
    }
    if not names:
      raise DataError(
        f'{field}={pattern!r} matches no file from {os.getcwd()!r}; give an absolute '
        "path, and for a folder 'FOLDER/**/*.txt'"
      )
    for name in sorted(names):
      found.setdefault(names[name], name)
  if not found:
    raise DataError(f'{field}={patterns!r}: give at least one pattern')
  return found


def _fixed_prefix(pattern: str) -> str:
  """The folder above the first wildcard: what differs between machines."""
  head = re.split(r'[*?\[]', pattern, maxsplit=1)[0]
  return os.path.dirname(head) or '.'
