"""Where documents come from: the standard library's code, or UTF-8 text files.

A source is a mutable config dataclass whose `documents(split, counts)` yields one
split, 'train' or 'heldout', in an order that depends on names and contents only, so
that two machines read the same. What is hashed to split is the document's name: a
document never moves because others came or went, and none is in both splits.
"""

import codecs
import dataclasses
import glob
import hashlib
import os
import re
import sysconfig
from collections.abc import Iterator
from typing import Literal, Protocol, runtime_checkable

import numpy as np

Split = Literal['train', 'heldout']


class DataError(ValueError):
  """The data or its configuration is at fault; says which field and what to do."""


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
  """One document: its UTF-8 text, or its token ids where these are what is stored.

  Attributes:
    name: the same on every machine.
    text: empty beside `tokens`.
    parts: consecutive pieces that make up `text`, each with whether its tokens may be
      targets; a token never spans two. None: all may be.
    tokens: ids of the text.
    mask: which of `tokens` may be targets; None: all.
  """

  name: str
  text: bytes = b''
  parts: tuple[tuple[bytes, bool], ...] | None = None
  tokens: np.ndarray | None = None
  mask: np.ndarray | None = None


@dataclasses.dataclass
class Counts:
  """What became of one split's documents; filled in while they are read."""

  documents: int = 0  # delivered
  empty: int = 0  # skipped: no bytes
  bad: int = 0  # skipped: not UTF-8
  duplicate: int = 0  # skipped: the same bytes as an earlier file
  long: int = 0  # delivered, and split because longer than a row


@runtime_checkable
class Source(Protocol):
  """What `batches.Config.source` may be."""

  def documents(
    self, split: Split, counts: Counts | None = None
  ) -> Iterator[Document]: ...


# Folders of the standard library that hold no hand-written library code.
_SKIPPED_FOLDERS = {
  *('site-packages', 'dist-packages', '__pycache__'),
  *('test', 'tests', 'idle_test'),
}
# Tables whose head does not say so, and modules that a distribution adds.
_SKIPPED_FILES = {'html/entities.py', 'sitecustomize.py', 'usercustomize.py'}
_GENERATED = re.compile(
  rb'auto-?generated|automatically generated|file is generated|codec.* generated'
  rb'|do not edit',
  re.IGNORECASE,
)
# Character tables, and the twenty wrappers of C codecs that differ in a name only:
# in both splits they would flatter the held-out loss.
_CODEC = re.compile(rb'^(decoding_(table|map) *=|import _codecs_)', re.MULTILINE)


@dataclasses.dataclass
class Stdlib:
  """The *.py files of the running interpreter's standard library.

  Left out: tests, site-packages, generated tables, files that are not UTF-8, and
  files with the contents of an earlier one. Line ends are made \\n, as some installers
  rewrite them. The same Python version gives the same documents, up to the modules
  that a distribution removes.

  Attributes:
    heldout: fraction of the files held out, in [0, 1), chosen by a hash of their paths.
    files: at most that many training files, a fixed sample of them, and held-out ones
      in proportion, at least one. None: all.
  """

  heldout: float = 0.05
  files: int | None = None

  def documents(self, split: Split, counts: Counts | None = None) -> Iterator[Document]:
    """The split's files by path. Raises DataError on bad fields or an empty split."""
    _check_split(split, self.heldout)
    if self.files is not None and self.files < 1:
      raise DataError(f'files={self.files}: must be at least 1, or None for all')
    counts = Counts() if counts is None else counts
    chosen: dict[Split, list[Document]] = {'train': [], 'heldout': []}
    seen = set()
    for name, text in _stdlib_files():
      own = _split_of(name, self.heldout)
      tally = counts if own == split else Counts()
      if not text:
        tally.empty += 1
      elif not _is_utf8(text):
        tally.bad += 1
      elif text in seen:
        tally.duplicate += 1
      else:
        seen.add(text)
        chosen[own].append(Document(name, text))
    delivered = chosen[split]
    if self.files is not None and self.files < len(chosen['train']):
      share = round(len(chosen['heldout']) * self.files / len(chosen['train']))
      most = self.files if split == 'train' else max(4, share)  # one may be odd
      # By hash, for a sample of the whole library and not of its first letters.
      sample = sorted(delivered, key=lambda document: _fraction(document.name))[:most]
      delivered = sorted(sample, key=lambda document: document.name)
    if not delivered and (split == 'train' or self.heldout > 0):
      raise DataError(
        f'heldout={self.heldout}: no file of {_stdlib_root()!r} is in the {split!r} '
        'split; choose another fraction, or name files with source=Text(...)'
      )
    counts.documents += len(delivered)
    return iter(delivered)


@dataclasses.dataclass
class Text:
  """UTF-8 text in any language, a document a file or a line.

  Lines end at \\n only; one \\r before it is dropped, and so is a byte order mark.
  Empty documents are skipped and counted. Repeated ones are kept, in either split.

  Attributes:
    files: glob patterns, ** meaning any depth; a lone string is one pattern. A
      document's name is its path relative to the pattern's fixed part, with ':line'
      appended for lines.
    heldout_files: the same, for the held-out split. Empty: hold out by `heldout`.
    heldout: fraction of the documents held out, in [0, 1), by a hash of their names.
    document: 'file' or 'line', what a document is.
    bad_bytes: on a document that is not UTF-8, stop with an 'error', or 'skip' and
      count it.
  """

  files: tuple[str, ...]
  heldout_files: tuple[str, ...] = ()
  heldout: float = 0.0
  document: str = 'file'
  bad_bytes: str = 'error'

  def documents(self, split: Split, counts: Counts | None = None) -> Iterator[Document]:
    """The split's documents by pattern, name and line.

    Raises:
      DataError: a bad field or no file matched, at once; a file that cannot be read,
        a bad byte, or a split without a document, while iterating.
    """
    _check_split(split, self.heldout)
    _check_choice('document', self.document, ('file', 'line'))
    _check_choice('bad_bytes', self.bad_bytes, ('error', 'skip'))
    train = _listing('files', self.files)
    if not self.heldout_files:
      if split == 'heldout' and self.heldout == 0:
        return iter(())
      listing = train
    else:
      if self.heldout:
        raise DataError(
          f'heldout={self.heldout} beside heldout_files={self.heldout_files!r}: '
          'the held-out set is given twice; set heldout=0 or heldout_files=()'
        )
      held = _listing('heldout_files', self.heldout_files)
      if both := set(train) & set(held):
        raise DataError(
          f'heldout_files={self.heldout_files!r} and files={self.files!r} both match '
          f'{min(both)!r}: narrow one of the patterns'
        )
      listing = held if split == 'heldout' else train
    field = 'files' if listing is train else 'heldout_files'
    return self._read(split, field, listing, Counts() if counts is None else counts)

  def _read(
    self, split: Split, field: str, listing: dict[str, str], counts: Counts
  ) -> Iterator[Document]:
    hashed = not self.heldout_files and self.heldout > 0
    lines = self.document == 'line'
    before = counts.documents
    for path, name in listing.items():
      if hashed and not lines and _split_of(name, self.heldout) != split:
        continue
      text = _read_file(field, path).removeprefix(codecs.BOM_UTF8)
      valid = _is_utf8(text)
      if not valid and self.bad_bytes == 'error':
        raise _bad_byte(field, path, text)
      for own, body in _lines(name, text) if lines else ((name, text),):
        if hashed and lines and _split_of(own, self.heldout) != split:
          continue
        if not body:
          counts.empty += 1
        elif not valid and not _is_utf8(body):
          counts.bad += 1
        else:
          counts.documents += 1
          yield Document(own, body)
    if counts.documents == before:
      fix = (
        "document='line' to split within files, another heldout, or heldout_files"
        if hashed
        else 'a pattern whose files hold text'
      )
      raise DataError(
        f'{field}={getattr(self, field)!r} with heldout={self.heldout}: no document '
        f'in the {split!r} split ({counts.empty} empty, {counts.bad} not UTF-8); '
        f'give {fix}'
      )


@dataclasses.dataclass
class Windows:
  """Every window of small texts, overlapping, so that each offset is learnt.

  A document of n characters gives n - size + 1 of them, and a shorter one itself.

  Attributes:
    text: where the documents come from.
    size: characters of a window.
  """

  text: Text
  size: int = 64

  def documents(self, split: Split, counts: Counts | None = None) -> Iterator[Document]:
    """The windows by document and offset. Raises as `Text.documents` does."""
    if self.size < 2:
      raise DataError(f'size={self.size}: a window needs at least 2 characters')
    counts = Counts() if counts is None else counts
    for document in self.text.documents(split, counts):
      whole = document.text.decode()
      for start in range(max(1, len(whole) - self.size + 1)):
        window = whole[start : start + self.size].encode()
        yield Document(f'{document.name}+{start}', window)


def _check_split(split: str, heldout: float) -> None:
  _check_choice('split', split, ('train', 'heldout'))
  if not 0 <= heldout < 1:
    raise DataError(f'heldout={heldout}: a fraction of the documents, in [0, 1)')


def _check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
  if value not in choices:
    raise DataError(f'{field}={value!r}: must be one of {choices}')


def _fraction(name: str) -> float:
  """A number in [0, 1) that depends on the name only."""
  digest = hashlib.sha256(name.encode('utf-8', 'surrogateescape')).digest()
  return int.from_bytes(digest[:6], 'big') / 2**48


def _split_of(name: str, heldout: float) -> Split:
  return 'heldout' if _fraction(name) < heldout else 'train'


def _is_utf8(text: bytes) -> bool:
  try:
    text.decode()
  except UnicodeDecodeError:
    return False
  return True


def _read_file(field: str, path: str) -> bytes:
  try:
    with open(path, 'rb') as file:
      return file.read()
  except OSError as error:
    raise DataError(
      f'{field}: cannot read {path!r}: {error.strerror}; repair it or leave it out'
    ) from error


def _bad_byte(field: str, path: str, text: bytes) -> DataError:
  try:
    text.decode()
  except UnicodeDecodeError as error:
    line = text.count(b'\n', 0, error.start) + 1
    return DataError(
      f'{field}: {path!r}, line {line}: byte 0x{text[error.start]:02x} is not UTF-8 '
      f"({error.reason}); re-encode the file, or set bad_bytes='skip'"
    )
  raise AssertionError(f'{path} is UTF-8')


def _lines(name: str, text: bytes) -> Iterator[tuple[str, bytes]]:
  """Names and contents of a file's lines, counted from 1."""
  # str.splitlines would also end them at \x0b, \x0c, \x85, U+2028 and others.
  lines = text.split(b'\n')
  if not lines[-1]:
    lines.pop()  # what follows the last line's end is not a line
  for number, line in enumerate(lines, 1):
    yield f'{name}:{number}', line[:-1] if line.endswith(b'\r') else line


def _listing(field: str, patterns: str | tuple[str, ...]) -> dict[str, str]:
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


def _stdlib_root() -> str:
  return sysconfig.get_path('stdlib')


def _stdlib_files() -> Iterator[tuple[str, bytes]]:
  """Path relative to the library, posix, and text of its hand-written files."""
  root = _stdlib_root()
  names = []
  for folder, folders, files in os.walk(root):
    folders[:] = [f for f in folders if f not in _SKIPPED_FOLDERS]
    # config-* is named after the machine.
    folders[:] = [f for f in folders if not f.startswith(('test_', 'config-'))]
    inside = os.path.relpath(folder, root).replace(os.sep, '/')
    for file in files:
      if file.endswith('.py') and not file.startswith(('test_', '_sysconfig')):
        names.append(file if inside == '.' else f'{inside}/{file}')
  for name in sorted(set(names) - _SKIPPED_FILES):
    text = _read_file('source', os.path.join(root, name)).replace(b'\r\n', b'\n')
    head = b'\n'.join(text.split(b'\n', 3)[:3])
    codec = name.startswith('encodings/') and _CODEC.search(text)
    if not codec and not _GENERATED.search(head):
      yield name, text
