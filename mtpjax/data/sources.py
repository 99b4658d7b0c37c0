"""Where documents come from: the standard library's code, or UTF-8 text files.

A source is a mutable config dataclass whose `documents(split, counts)` yields one
split, 'train' or 'heldout', in an order that depends on names and contents only, so
that two machines read the same. What is hashed to split is the document's name: a
document never moves because others came or went, and none is in both splits.
"""

import codecs
import dataclasses
import io
import os
import re
import sysconfig
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import numpy as np

from mtpjax.data import splits
from mtpjax.data.splits import DataError, Split


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
  bad: int = 0  # skipped: not UTF-8, or no record with the fields asked for
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
    splits.check_split(split, self.heldout)
    if self.files is not None and self.files < 1:
      raise DataError(f'files={self.files}: must be at least 1, or None for all')
    counts = Counts() if counts is None else counts
    chosen: dict[Split, list[Document]] = {'train': [], 'heldout': []}
    seen = set()
    for name, text in _stdlib_files():
      own = splits.split_of(name, self.heldout)
      tally = counts if own == split else Counts()
      if not text:
        tally.empty += 1
      elif not splits.is_utf8(text):
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
      sample = sorted(delivered, key=lambda one: splits.fraction(one.name))[:most]
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
    splits.check_choice('document', self.document, ('file', 'line'))
    splits.check_choice('bad_bytes', self.bad_bytes, ('error', 'skip'))
    chosen = splits.choose(split, self.files, self.heldout_files, self.heldout)
    return self._read(chosen, Counts() if counts is None else counts)

  def _read(self, chosen: splits.Chosen, counts: Counts) -> Iterator[Document]:
    lines = self.document == 'line'
    before = counts.documents
    for path, name in chosen.names.items():
      if not lines and not chosen.keeps(name):
        continue
      text = splits.read(chosen.field, path).removeprefix(codecs.BOM_UTF8)
      valid = splits.is_utf8(text)
      if not valid and self.bad_bytes == 'error':
        raise _bad_byte(chosen.field, path, text)
      for own, body in (
        splits.lines(name, io.BytesIO(text)) if lines else ((name, text),)
      ):
        if lines and not chosen.keeps(own):
          continue
        if not body:
          counts.empty += 1
        elif not valid and not splits.is_utf8(body):
          counts.bad += 1
        else:
          counts.documents += 1
          yield Document(own, body)
    if chosen.names and counts.documents == before:
      fix = 'a pattern whose files hold text'
      if chosen.heldout:
        fix = "document='line' to split within files, another heldout, or heldout_files"
      raise chosen.nothing(f'{counts.empty} empty, {counts.bad} not UTF-8', fix)


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
    text = splits.read('source', os.path.join(root, name)).replace(b'\r\n', b'\n')
    head = b'\n'.join(text.split(b'\n', 3)[:3])
    codec = name.startswith('encodings/') and _CODEC.search(text)
    if not codec and not _GENERATED.search(head):
      yield name, text
