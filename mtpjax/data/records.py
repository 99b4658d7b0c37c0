"""Documents from records: JSON lines and Parquet, their text or ids in named fields.

A record's name is its file's, with ':line' or ':row' appended, counted from 1.
"""

import codecs
import dataclasses
import gzip
import json
import zlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

from mtpjax import fields
from mtpjax.data import splits
from mtpjax.data.sources import Counts, Document
from mtpjax.data.splits import DataError, Split

_JSON = ('.jsonl', '.json', '.ndjson')
_SUFFIXES = (*_JSON, *(f'{suffix}.gz' for suffix in _JSON), '.parquet')
_BATCH_ROWS = 1024  # of a Parquet file in memory at once

Record = dict[str, Any]


class _UnfitError(Exception):
  """What is wrong with one record."""


@dataclasses.dataclass
class Records:
  """A document a record of JSON lines (.jsonl, .json, .ndjson, and .gz) or .parquet.

  Lines end at \\n only; one \\r before it is dropped, and so is a byte order mark.
  Blank lines, empty texts and empty responses are skipped and counted. A field may be
  nested: 'meta.text' is the field of that very name, or else `text` inside `meta`.

  Attributes:
    files, heldout_files, heldout: as of `Text`; what is hashed is the record's name.
    text: field with the text, or with a list of token ids.
    mask: field with a list of 0 and 1, one a character (code point) of the text or one
      an id: which may be targets. None: all may be.
    prompt, response: instead of `text`, two fields that make it up; only the tokens of
      the response are targets.
    bad: on a record that is not UTF-8, not JSON, or lacks a field or has it of another
      type, stop with an 'error', or 'skip' and count it.
  """

  files: tuple[str, ...]
  heldout_files: tuple[str, ...] = ()
  heldout: float = 0.0
  text: str = 'text'
  mask: str | None = None
  prompt: str | None = None
  response: str | None = None
  bad: str = 'error'

  def documents(self, split: Split, counts: Counts | None = None) -> Iterator[Document]:
    """The split's documents by pattern, name and line.

    Raises:
      DataError: a bad field, no file matched or one of an unknown kind, at once; a file
        that cannot be read, a bad record, or a split without a document, while
        iterating.
    """
    splits.check_choice('bad', self.bad, ('error', 'skip'))
    if (self.prompt is None) != (self.response is None):
      raise DataError(
        f'prompt={self.prompt!r}, response={self.response!r}: give both or neither'
      )
    if self.prompt is not None and (self.mask is not None or self.text != 'text'):
      raise DataError(
        f'prompt={self.prompt!r} beside text={self.text!r}, mask={self.mask!r}: '
        'prompt and response are the text and say its mask; leave the others out'
      )
    chosen = splits.choose(split, self.files, self.heldout_files, self.heldout)
    for name in chosen.names.values():
      if not name.endswith(_SUFFIXES):
        raise DataError(
          f'{chosen.field}: {name!r} is none of {", ".join(_SUFFIXES)}; narrow the '
          'pattern, or read plain text with source=Text(...)'
        )
      if name.endswith('.parquet'):
        _pyarrow(name)
    return self._read(chosen, Counts() if counts is None else counts)

  def _read(self, chosen: splits.Chosen, counts: Counts) -> Iterator[Document]:
    asked = (self.text,) if self.prompt is None else (self.prompt, self.response)
    wanted = [name for name in (*asked, self.mask) if name is not None]
    before = counts.documents
    for path, name in chosen.names.items():
      parquet = name.endswith('.parquet')
      found = (
        _rows(chosen.field, path, name, wanted)
        if parquet
        else _lines(chosen.field, path, name)
      )
      for own, record in found:
        if not chosen.keeps(own):
          continue
        try:
          document = self._document(own, record)
        except _UnfitError as error:
          if self.bad == 'error':
            place = f'{path!r}, {"row" if parquet else "line"} {own.rsplit(":", 1)[1]}'
            raise DataError(
              f"{chosen.field}: {place}: {error}; repair it, or set bad='skip'"
            ) from None
          counts.bad += 1
          continue
        if document is None:
          counts.empty += 1
        else:
          counts.documents += 1
          yield document
    if chosen.names and counts.documents == before:
      fix = 'files whose records hold text'
      if chosen.heldout:
        fix = 'another heldout, or heldout_files'
      raise chosen.nothing(f'{counts.empty} empty, {counts.bad} bad', fix)

  def _document(self, name: str, record: Record | bytes) -> Document | None:
    """None if it is empty. Raises _UnfitError."""
    if isinstance(record, bytes):
      if not record.strip():
        return None
      record = _parsed(record)
    if self.prompt is not None and self.response is not None:
      prompt = _content(self.prompt, _get(record, self.prompt))
      response = _content(self.response, _get(record, self.response))
      if type(prompt) is not type(response):
        raise _UnfitError(f'{self.prompt!r} and {self.response!r} are not of one kind')
      if not len(response):
        return None
      if isinstance(prompt, bytes) and isinstance(response, bytes):
        return Document(name, prompt + response, ((prompt, False), (response, True)))
      flags = np.arange(len(prompt) + len(response)) >= len(prompt)
      return Document(name, tokens=np.concatenate([prompt, response]), mask=flags)
    content = _content(self.text, _get(record, self.text))
    flags = None
    if self.mask is not None:
      flags = _flags(self.mask, _get(record, self.mask))
      units = len(content.decode() if isinstance(content, bytes) else content)
      if len(flags) != units:
        unit = 'character' if isinstance(content, bytes) else 'id'
        raise _UnfitError(
          f'{self.mask!r} has {len(flags)} entries for {units} {unit}s of {self.text!r}'
        )
    if not len(content):
      return None
    if not isinstance(content, bytes):
      return Document(name, tokens=content, mask=flags)
    return Document(name, content, None if flags is None else _parts(content, flags))


def _lines(field: str, path: str, name: str) -> Iterator[tuple[str, bytes]]:
  """Name and contents of each line. Raises DataError on a file that cannot be read."""
  try:
    with gzip.open(path) if name.endswith('.gz') else open(path, 'rb') as file:
      if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
        file.seek(0)
      yield from splits.lines(name, file)
  except OSError as error:
    raise splits.unreadable(field, path, error.strerror or error) from error
  except (EOFError, zlib.error) as error:
    raise splits.unreadable(field, path, error) from error


def _parsed(line: bytes) -> Record:
  try:
    # Decoded first: of bytes, json would guess UTF-16 and UTF-32 too.
    record = json.loads(line.decode())
  except UnicodeDecodeError as error:
    byte = line[error.start]
    raise _UnfitError(f'byte 0x{byte:02x} is not UTF-8 ({error.reason})') from None
  except json.JSONDecodeError as error:
    raise _UnfitError(
      f'not JSON ({error.msg}, column {error.colno}); a line is one whole object'
    ) from None
  except (ValueError, RecursionError) as error:  # a number or a depth without end
    raise _UnfitError(f'not JSON that can be read ({error})') from None
  if not isinstance(record, dict):
    raise _UnfitError(f'{_kind(record)}, not an object with fields')
  return record


def _rows(
  field: str, path: str, name: str, wanted: list[str]
) -> Iterator[tuple[str, Record]]:
  """Name and wanted fields of each row; what a column lacks, its rows lack.

  Raises DataError on a file that cannot be read.
  """
  pa = _pyarrow(name)
  row = 0
  try:
    with pa.parquet.ParquetFile(path) as file:
      there = _columns(pa, file.schema_arrow)
      found = [name for name in wanted if name in there]
      # A column that is not there is missing from every row, as other columns are not.
      others = {} if len(found) == len(wanted) else dict.fromkeys(there)
      dotted = ['.'.join(there[name]) for name in found]
      for batch in file.iter_batches(_BATCH_ROWS, columns=dotted):
        columns = [_values(pa, batch, there[name]) for name in found]
        for n in range(batch.num_rows):
          row += 1
          values = {f: column[n] for f, column in zip(found, columns, strict=True)}
          yield f'{name}:{row}', {**others, **values}
  except (OSError, pa.ArrowException) as error:
    raise splits.unreadable(field, path, error) from error


def _pyarrow(name: str) -> ModuleType:
  try:
    import pyarrow.compute
    import pyarrow.parquet
  except ImportError as error:
    raise DataError(
      f"{name!r} needs pyarrow, which is not there: pip install 'mtpjax[parquet]'"
    ) from error
  return pyarrow


def _columns(
  pa: ModuleType, columns: Any, above: tuple[str, ...] = ()
) -> dict[str, tuple[str, ...]]:
  """Dotted names of the columns, outer ones first, each with its path."""
  found = {
    '.'.join(path): path for column in columns for path in [(*above, column.name)]
  }
  for column in columns:
    if pa.types.is_struct(column.type):
      inside = _columns(pa, column.type.fields, (*above, column.name))
      found = {**found, **{n: path for n, path in inside.items() if n not in found}}
  return found


def _values(pa: ModuleType, batch: Any, path: tuple[str, ...]) -> list[Any]:
  """A column's values by row: bytes where it is text, arrays where it is lists."""
  column = batch.column(batch.schema.names.index(path[0]))
  for name in path[1:]:
    column = pa.compute.struct_field(column, name)
  if pa.types.is_dictionary(column.type):
    column = column.dictionary_decode()
  kind = column.type
  if pa.types.is_string(kind) or pa.types.is_large_string(kind):
    # As bytes: text that is not UTF-8 is then one row's fault.
    return column.cast(pa.large_binary()).to_pylist()
  if pa.types.is_list(kind) or pa.types.is_large_list(kind):
    lists = (scalar.values for scalar in column)
    return [v if v is None else v.to_numpy(zero_copy_only=False) for v in lists]
  return column.to_pylist()


def _get(record: Record, name: str) -> Any:
  """The field of that name, or the one inside others. Raises _UnfitError."""
  if found := _find(record, name):
    return found[0]
  there = _names(record)
  fix = fields.suggest(name, there)
  if not fix.startswith('choose'):  # then it lists them
    fix = f'there are {", ".join(there[:20])}: {fix}'
  raise _UnfitError(f'no field {name!r}; {fix}')


def _find(record: Record, name: str) -> list[Any]:
  """The field's value, or nothing."""
  if name in record:
    return [record[name]]
  for dot in (at for at, character in enumerate(name) if character == '.'):
    inside = record.get(name[:dot])
    if isinstance(inside, dict) and (found := _find(inside, name[dot + 1 :])):
      return found
  return []


def _names(record: Record, above: tuple[str, ...] = ()) -> list[str]:
  """Dotted names of the fields, as deep as anyone would ask for."""
  found = []
  for name, value in record.items():
    found.append('.'.join((*above, name)))
    if isinstance(value, dict) and len(above) < 4:
      found += _names(value, (*above, name))
  return found


def _content(name: str, value: Any) -> bytes | np.ndarray:
  """UTF-8 text or int32 ids. Raises _UnfitError."""
  if isinstance(value, str):
    try:
      return value.encode()
    except UnicodeEncodeError as error:
      point = ord(value[error.start])
      raise _UnfitError(f'{name!r} holds U+{point:04X}, half a character') from None
  if isinstance(value, bytes):
    if not splits.is_utf8(value):
      raise _UnfitError(f'{name!r} is not UTF-8')
    return value
  ids = _integers(value, (int,))
  if ids is None:
    raise _UnfitError(
      f'{name!r} is {_kind(value)}, neither text nor a list of token ids'
    )
  if ids.size and not 0 <= ids.min() <= ids.max() < 2**31:
    raise _UnfitError(f'{name!r} holds {ids.min()} to {ids.max()}, not token ids')
  return ids.astype(np.int32)


def _flags(name: str, value: Any) -> np.ndarray:
  """Whether each entry is 1. Raises _UnfitError."""
  flags = _integers(value, (int, bool))
  if flags is None or not np.isin(flags, (0, 1)).all():
    raise _UnfitError(f'{name!r} is {_kind(value)}, not a list of 0 and 1')
  return flags.astype(bool)


def _integers(value: Any, types: tuple[type, ...]) -> np.ndarray | None:
  """A list as an array; None if it is none, or something else is in it."""
  if isinstance(value, np.ndarray):
    good = value.dtype.kind in ('iub' if bool in types else 'iu')
    return value if good else None
  if not isinstance(value, list) or not set(map(type, value)) <= set(types):
    return None
  try:
    return np.array(value, np.int64)
  except OverflowError:
    return None


def _parts(text: bytes, flags: np.ndarray) -> tuple[tuple[bytes, bool], ...]:
  """The text cut where the flags of its characters change."""
  characters = text.decode()
  starts = [0, *(np.flatnonzero(np.diff(flags)) + 1).tolist()]
  ends = [*starts[1:], len(characters)]
  return tuple(
    (characters[start:end].encode(), bool(flags[start]))
    for start, end in zip(starts, ends, strict=True)
  )


def _kind(value: Any) -> str:
  """What a value of JSON is, in words."""
  if value is None:
    return 'null'
  names = {bool: 'a truth value', int: 'a number', float: 'a number', str: 'text'}
  others = {dict: 'an object', list: 'a list', np.ndarray: 'a list', bytes: 'text'}
  return {**names, **others}.get(type(value), f'a {type(value).__name__}')
