"""Records: against json.loads on each line, pyarrow on the table; each fault alone."""

import builtins
import gzip
import itertools
import json
import random
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mtpjax.data import batches, records
from mtpjax.data.records import Records
from mtpjax.data.sources import Counts, DataError
from mtpjax.data.tokenizer import Bytes, Characters, encode_document

TEXTS = [
  'a',
  'naïve\r\n',
  'У лукоморья\u2028дуб',
  '漢字 🙂\x00',
  'tab\t"quoted"\\',
  '\x85x',
]


def _read(source, split='train'):
  counts = Counts()
  return list(source.documents(split, counts)), counts


def _write(tmp_path, data, name='a.jsonl'):
  data = data if isinstance(data, bytes) else data.encode()
  (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith('.gz') else data)
  return (f'{tmp_path}/{name}',)


def _table(tmp_path, columns, name='a.parquet', **options):
  table = columns if isinstance(columns, pa.Table) else pa.table(columns)
  pq.write_table(table, tmp_path / name, **options)
  return (f'{tmp_path}/{name}',)


def _plain(document):
  """All of a document that equality can compare."""
  lists = [None if a is None else a.tolist() for a in (document.tokens, document.mask)]
  return document.name, document.text, document.parts, *lists


# JSON lines


@pytest.mark.parametrize('name', ['a.jsonl', 'a.json', 'a.ndjson', 'a.jsonl.gz'])
@pytest.mark.parametrize('ascii_only', [True, False])
@pytest.mark.parametrize(
  ('start', 'end', 'last'),
  [('', '\n', '\n'), ('', '\n', ''), ('\ufeff', '\r\n', '\r\n'), ('', '\n', '\r')],
)
def test_lines_are_what_json_reads_between_newlines(
  tmp_path, name, ascii_only, start, end, last
):
  objects = [{'id': n, 'text': text} for n, text in enumerate(TEXTS)]
  data = (
    start + end.join(json.dumps(o, ensure_ascii=ascii_only) for o in objects) + last
  )
  found, counts = _read(Records(_write(tmp_path, data, name)))
  oracle = data.encode().removeprefix(b'\xef\xbb\xbf').split(b'\n')
  texts = [json.loads(line)['text'] for line in oracle if line]
  assert [d.text.decode() for d in found] == texts == TEXTS
  assert [d.name for d in found] == [f'{name}:{n}' for n in range(1, len(TEXTS) + 1)]
  assert counts == Counts(documents=len(TEXTS))


def test_blank_lines_and_empty_texts_are_skipped_and_counted(tmp_path):
  lines = ['', '{"text": "a"}', ' \t', '{"text": ""}', '{"text": []}', '{"text": " "}']
  found, counts = _read(Records(_write(tmp_path, '\n'.join(lines) + '\n')))
  assert [(d.name, d.text) for d in found] == [('a.jsonl:2', b'a'), ('a.jsonl:6', b' ')]
  assert counts == Counts(documents=2, empty=4)


def test_a_line_of_50_megabytes(tmp_path):
  body = 'wörd ' * (50_000_000 // 6)
  files = _write(tmp_path, json.dumps({'text': body}, ensure_ascii=False) + '\n')
  start = time.perf_counter()
  assert [d.text for d in _read(Records(files))[0]] == [body.encode()]
  assert time.perf_counter() - start < 5


BAD = {
  b'{"text": "a\xff"}': r'byte 0xff is not UTF-8 \(invalid start byte\)',
  '{"text": "a"}'.encode('utf-16-le'): r'not JSON',
  '{"text": "a"}'.encode('utf-16'): r'byte 0xff is not UTF-8',
  b'{"text": "a"': r"not JSON \(Expecting ',' delimiter, column 13\)",
  b'{"text": "a"} {"text": "b"}': r'not JSON \(Extra data, column 15\)',
  b"{'text': 'a'}": r'not JSON',
  b'[': r'not JSON .*a line is one whole object',
  b'[' * 200_000: r'not JSON',
  b'{"text": "a", "n": %s}' % (b'1' * 5000): r'not JSON that can be read',
  b'["text"]': r'a list, not an object with fields',
  b'null': r'null, not an object',
  b'"text"': r'text, not an object',
  b'{"txet": "a", "id": 5}': r"'text'; there are txet, id: did you mean 'txet'\?",
  b'{"body": 1, "meta": {"id": 2}}': r'choose from: body, meta, meta.id',
  b'{}': r"no field 'text'; choose from: nothing is there",
  b'{"text": null}': r"'text' is null, neither text nor a list of token ids",
  b'{"text": 5}': r"'text' is a number",
  b'{"text": true}': r"'text' is a truth value",
  b'{"text": {"a": 1}}': r"'text' is an object",
  b'{"text": [1, 2.0]}': r"'text' is a list, neither",
  b'{"text": [true]}': r"'text' is a list, neither",
  b'{"text": [[1], [2]]}': r"'text' is a list, neither",
  b'{"text": [1, "a"]}': r"'text' is a list, neither",
  b'{"text": [3, -1]}': r"'text' holds -1 to 3, not token ids",
  b'{"text": [2147483648]}': r"'text' holds 2147483648",
  b'{"text": [1%s]}' % (b'0' * 30): r"'text' is a list, neither",
  rb'{"text": "\ud800"}': r"'text' holds U\+D800, half a character",
}


@pytest.mark.parametrize('bad', BAD, ids=range(len(BAD)))
def test_a_bad_line_is_named_or_skipped_and_counted(tmp_path, bad):
  files = _write(tmp_path, b'{"text": "a"}\n\n' + bad + b'\n{"text": "b"}\n')
  place = (
    rf"^files: '.*/a\.jsonl', line 3: .*{BAD[bad]}.*; repair it, or set bad='skip'"
  )
  with pytest.raises(DataError, match=place):
    _read(Records(files))
  found, counts = _read(Records(files, bad='skip'))
  assert [(d.name, d.text) for d in found] == [
    ('a.jsonl:1', b'a'),
    ('a.jsonl:4', b'b'),
  ]
  assert counts == Counts(documents=2, empty=1, bad=1)


def test_a_file_that_cannot_be_read(tmp_path):
  def fails(match, files):
    for bad in ('error', 'skip'):  # what is after the fault is lost: never skipped
      with pytest.raises(DataError, match=match):
        _read(Records(files, bad=bad))

  rng = random.Random(0)
  text = ''.join(json.dumps({'text': rng.random()}) + '\n' for _ in range(999))
  whole = gzip.compress(text.replace('0.', '"0.').replace('}', '"}').encode())
  for name, data in (
    ('plain.jsonl.gz', b'{"text": "a"}\n'),
    ('cut.jsonl.gz', whole[: len(whole) // 2]),
    ('torn.jsonl.gz', whole[:99] + b'\0\0\0\0' + whole[103:]),
    ('plain.parquet', b'{"text": "a"}\n'),
    ('nothing.parquet', b''),
  ):
    (tmp_path / name).write_bytes(data)
    fails(rf"files: cannot read '.*{name}': .+; repair it", (f'{tmp_path}/{name}',))
  (cut,) = _table(tmp_path, {'text': ['a' * 999] * 9}, 'cut.parquet')
  with open(cut, 'r+b') as file:
    file.truncate(200)
  fails('files: cannot read', (cut,))
  (tmp_path / 'b.jsonl').symlink_to('nowhere')
  fails("cannot read '.*nowhere': No such file", (f'{tmp_path}/b.jsonl',))


def test_errors_name_the_field_the_value_and_the_fix(tmp_path):
  (file,) = _write(tmp_path, '{"text": ""}\n{"text": 5}\n')
  (tmp_path / 'a.txt').write_text('a')

  def fails(match, **changes):
    with pytest.raises(DataError, match=match):  # before anything is read
      Records(**{'files': (file,), **changes}).documents('train')

  fails("bad='ignore': must be one of", bad='ignore')
  fails("prompt='p', response=None: give both", prompt='p')
  fails("prompt=None, response='r': give both", response='r')
  fails("mask='m'.*leave the others", prompt='p', response='r', mask='m')
  fails("text='t'.*leave the others", prompt='p', response='r', text='t')
  fails(r"files: 'a.txt' is none of .jsonl, .*Text", files=(f'{tmp_path}/a.txt',))
  fails('matches no file', files=(f'{tmp_path}/b*',))
  fails(r'heldout=1.5: a fraction', heldout=1.5)
  fails('both match', heldout_files=(f'{tmp_path}/a.j*',))
  fails('given twice', heldout=0.1, heldout_files=(f'{tmp_path}/a.j*',))
  message = r"no document in the 'train' split \(1 empty, 1 bad\); give files whose"
  with pytest.raises(DataError, match=message):
    _read(Records((file,), bad='skip'))
  with pytest.raises(DataError, match=r'with heldout=1e-09.*give another heldout'):
    _read(Records((file,), bad='skip', heldout=1e-9), 'heldout')


# Splits


@pytest.mark.parametrize('suffix', ['jsonl', 'parquet'])
def test_no_record_is_in_both_splits(tmp_path, suffix):
  for part in 'ab':
    texts = [f'{part}{n}' for n in range(60)]
    if suffix == 'jsonl':
      lines = (json.dumps({'text': text}) for text in texts)
      _write(tmp_path, '\n'.join(lines), f'{part}.jsonl')
    else:
      _table(tmp_path, {'text': texts}, f'{part}.parquet')
  source = Records((f'{tmp_path}/*.{suffix}',), heldout=0.3)
  found = {split: _read(source, split) for split in ('train', 'heldout')}
  names = {split: [d.name for d in part] for split, (part, _) in found.items()}
  every = [f'{part}.{suffix}:{n}' for part in 'ab' for n in range(1, 61)]
  assert 20 < len(names['heldout']) < 60
  held = set(names['heldout'])
  assert names['train'] == [name for name in every if name not in held]
  assert names['heldout'] == [name for name in every if name in held]
  for split, (part, counts) in found.items():
    assert counts == Counts(documents=len(names[split]))
    for document in part:  # the text is that of its line
      file, line = document.name.split(f'.{suffix}:')
      assert document.text.decode() == f'{file}{int(line) - 1}'
  source = Records((f'{tmp_path}/a*',), heldout_files=(f'{tmp_path}/b*',))
  for split, part in (('train', 'a'), ('heldout', 'b')):
    assert {d.text[:1].decode() for d in _read(source, split)[0]} == {part}
  assert _read(Records((f'{tmp_path}/a*',)), 'heldout') == ([], Counts())


def test_a_bad_line_of_the_other_split_is_not_counted_here(tmp_path):
  files = _write(tmp_path, '{"text": "a"}\n{\n' * 40)
  source = Records(files, heldout=0.3, bad='skip')
  counts = [_read(source, split)[1] for split in ('train', 'heldout')]
  assert sum(c.documents for c in counts) == sum(c.bad for c in counts) == 40
  assert all(c.bad for c in counts)


def test_files_of_all_kinds_in_one_pattern_by_name(tmp_path):
  _table(tmp_path, {'text': ['p']}, 'b.parquet')
  _write(tmp_path, '{"text": "z"}', 'c.json.gz')
  _write(tmp_path, '{"text": "j"}', 'a.jsonl')
  # As in a hub's cache, where links have names and files do not.
  (tmp_path / 'blobs').mkdir()
  (tmp_path / 'a.jsonl').rename(tmp_path / 'blobs' / '0f3')
  (tmp_path / 'a.jsonl').symlink_to(tmp_path / 'blobs' / '0f3')
  found, _ = _read(Records((f'{tmp_path}/?.*',)))
  assert [d.text for d in found] == [b'j', b'p', b'z']


# Masks


def _records_with_masks():
  rng = random.Random(1)
  for text in (*TEXTS, 'один', 'aé漢🙂' * 5):
    yield {'text': text, 'loss': [rng.randint(0, 1) for _ in text]}
  yield {'text': 'ab', 'loss': [True, False]}


@pytest.mark.parametrize('suffix', ['jsonl', 'parquet'])
def test_a_mask_is_of_characters(tmp_path, suffix):
  rows = list(_records_with_masks())
  if suffix == 'jsonl':
    files = _write(tmp_path, '\n'.join(map(json.dumps, rows)))
  else:
    rows = [{**row, 'loss': list(map(int, row['loss']))} for row in rows]
    files = _table(tmp_path, pa.Table.from_pylist(rows))
  found, _ = _read(Records(files, mask='loss'))
  characters = Characters.Config().build(found)
  for document, row in zip(found, rows, strict=True):
    assert document.parts is not None
    assert b''.join(part for part, _ in document.parts) == row['text'].encode()
    flags = [flag for _, flag in document.parts]
    assert all(a != b for a, b in itertools.pairwise(flags))
    ids, mask = encode_document(characters, document)
    assert characters.decode(ids) == row['text']
    assert mask is not None and mask.tolist() == [bool(flag) for flag in row['loss']]
    _, mask = encode_document(Bytes(), document)
    byte_flags = []
    for character, flag in zip(row['text'], row['loss'], strict=True):
      byte_flags += [bool(flag)] * len(character.encode())
    assert mask is not None and mask.tolist() == byte_flags


@pytest.mark.parametrize(
  ('row', 'match'),
  [
    ({'text': 'яд', 'loss': [1]}, "'loss' has 1 entries for 2 characters of 'text'"),
    ({'text': [5, 6], 'loss': [1]}, "'loss' has 1 entries for 2 ids of 'text'"),
    ({'text': 'ab', 'loss': [1, 2]}, "'loss' is a list, not a list of 0 and 1"),
    ({'text': 'ab', 'loss': [1, 1.0]}, "'loss' is a list, not a list of 0"),
    ({'text': 'ab', 'loss': '11'}, "'loss' is text, not a list"),
    ({'text': 'ab', 'loss': None}, "'loss' is null, not a list"),
    ({'text': 'ab', 'los': [1, 1]}, "no field 'loss'; there are text, los: .*'los'"),
  ],
)
def test_a_mask_that_does_not_fit(tmp_path, row, match):
  files = _write(tmp_path, json.dumps(row))
  with pytest.raises(DataError, match=f'line 1: .*{match}'):
    _read(Records(files, mask='loss'))


def test_stored_ids_and_their_mask(tmp_path):
  rows = [{'ids': [5, 0, 255], 'm': [0, 1, 1]}, {'ids': [7], 'm': [0]}]
  files = _write(tmp_path, '\n'.join(map(json.dumps, rows)))
  found, _ = _read(Records(files, text='ids', mask='m'))
  assert [_plain(d) for d in found] == [
    ('a.jsonl:1', b'', None, [5, 0, 255], [False, True, True]),
    ('a.jsonl:2', b'', None, [7], [False]),
  ]
  assert all(d.tokens is not None and d.tokens.dtype == np.int32 for d in found)
  for kind in (pa.uint16(), pa.int64()):
    for of in (pa.list_, pa.large_list):
      ids = pa.array([row['ids'] for row in rows], of(kind))
      flags = pa.array([list(map(bool, row['m'])) for row in rows], of(pa.bool_()))
      files = _table(tmp_path, {'ids': ids, 'm': flags})
      again, _ = _read(Records(files, text='ids', mask='m'))
      assert [_plain(d)[1:] for d in again] == [_plain(d)[1:] for d in found]
  source = Records(_write(tmp_path, '{"text": [1, 256]}'))
  with pytest.raises(DataError, match=r'a\.jsonl:1: id 256 is outside'):
    batches.open_data(batches.Config(source=source), 0)


@pytest.mark.parametrize('suffix', ['jsonl', 'parquet'])
def test_only_the_response_is_a_target(tmp_path, suffix):
  rows = [('да? ', 'нет'), ('', 'b'), ('c', ''), ('🙂', 'd\n')]
  rows = [{'q': prompt, 'chat': {'a': response}} for prompt, response in rows]
  if suffix == 'jsonl':
    files = _write(tmp_path, '\n'.join(map(json.dumps, rows)))
  else:
    files = _table(tmp_path, pa.Table.from_pylist(rows))
  found, counts = _read(Records(files, prompt='q', response='chat.a'))
  assert counts == Counts(documents=3, empty=1)
  for document, row in zip(found, [rows[0], rows[1], rows[3]], strict=True):
    ids, mask = encode_document(Bytes(), document)
    prompt, response = row['q'].encode(), row['chat']['a'].encode()
    assert bytes(ids.tolist()) == document.text == prompt + response
    assert mask is not None
    assert mask.tolist() == [False] * len(prompt) + [True] * len(response)
  files = _write(tmp_path, '{"q": [1, 2], "a": [3]}\n{"q": [1], "a": "b"}')
  source = Records(files, prompt='q', response='a', bad='skip')
  found, counts = _read(source)
  assert [_plain(d)[2:] for d in found] == [(None, [1, 2, 3], [False, False, True])]
  assert counts == Counts(documents=1, bad=1)
  with pytest.raises(DataError, match="line 2: 'q' and 'a' are not of one kind"):
    _read(Records(files, prompt='q', response='a'))


# Fields


def test_a_name_with_dots_is_a_field_or_a_way_into_one(tmp_path):
  rows = [
    {'a': {'b': {'c': 'deep'}}},
    {'a.b': {'c': 'half'}, 'a': 5},
    {'a': {'b.c': 'end'}},
    {'a.b.c': 'whole', 'a': {'b': {'c': 'deep'}}},
    {'a': {'b': {'d': 'no'}}},
    {'a': {'b': 'no'}},
  ]
  files = _write(tmp_path, '\n'.join(map(json.dumps, rows)))
  found, counts = _read(Records(files, text='a.b.c', bad='skip'))
  assert [d.text for d in found] == [b'deep', b'half', b'end', b'whole']
  assert counts.bad == 2
  with pytest.raises(DataError, match=r"no field 'a.b.c'; .*a.b.d.* mean 'a.b.d'"):
    _read(Records(files, text='a.b.c'))
  for number, row in enumerate(rows[:4]):
    files = _table(tmp_path, pa.Table.from_pylist([row]))
    assert _read(Records(files, text='a.b.c'))[0][0].text == found[number].text


def test_only_the_names_of_fields_limit_what_a_record_may_hold(tmp_path):
  row = {f'f{n}': {'x': [n]} for n in range(50)}
  files = _write(tmp_path, json.dumps({**row, 'text ': 'a'}))
  with pytest.raises(DataError, match=r'there are f0, f0.x, .*f9.x: .*text ') as error:
    _read(Records(files))
  assert 'f10' not in str(error.value)  # a list that can be read


# Parquet


COLUMNS = {
  'string': lambda texts: pa.array(texts, pa.string()),
  'large': lambda texts: pa.array(texts, pa.large_string()),
  'binary': lambda texts: pa.array([t and t.encode() for t in texts], pa.binary()),
  'dictionary': lambda texts: pa.array(texts, pa.string()).dictionary_encode(),
}


@pytest.mark.parametrize('kind', COLUMNS)
def test_parquet_is_what_pyarrow_reads(tmp_path, monkeypatch, kind):
  column = COLUMNS[kind]([*TEXTS, '', None, 'x' * 3000] * 400)
  table = pa.table({'n': list(range(len(column))), 'text': column})
  files = _table(tmp_path, table, row_group_size=1000, compression='zstd')
  monkeypatch.setattr(records, '_BATCH_ROWS', 77)
  found, counts = _read(Records(files, bad='skip'))
  oracle = pq.read_table(files[0])['text'].to_pylist()
  texts = [t if t is None or isinstance(t, bytes) else t.encode() for t in oracle]
  expected = [(f'a.parquet:{n}', text) for n, text in enumerate(texts, 1) if text]
  assert [(d.name, d.text) for d in found] == expected
  assert counts == Counts(documents=len(expected), empty=400, bad=400)
  with pytest.raises(DataError, match=r"a.parquet', row 8: 'text' is null"):
    _read(Records(files))


def test_a_bad_row_of_parquet_is_named_or_skipped_and_counted(tmp_path):
  text = pa.array([b'a', b'\xff', b'c'], pa.binary())
  string = text.view(pa.string())
  for column in (text, string, string.dictionary_encode()):
    files = _table(tmp_path, {'text': column})
    with pytest.raises(DataError, match="row 2: 'text' is not UTF-8; repair it"):
      _read(Records(files))
    found, counts = _read(Records(files, bad='skip'))
    assert ([d.text for d in found], counts.bad) == ([b'a', b'c'], 1)
  ids = pa.array([[1], [2, None], None, [3]], pa.list_(pa.int32()))
  files = _table(tmp_path, {'text': ids})
  found, counts = _read(Records(files, bad='skip'))
  assert [d.tokens.tolist() for d in found if d.tokens is not None] == [[1], [3]]
  assert counts == Counts(documents=2, bad=2)


def test_a_column_that_is_not_there(tmp_path):
  rows = [{'txt': 'a', 'meta': {'text': 'b', 'n': None}}, {'txt': 'b', 'meta': None}]
  files = _table(tmp_path, pa.Table.from_pylist(rows))
  match = r"row 1: no field 'text'; there are txt, meta, meta.text, meta.n: .* 'txt'"
  with pytest.raises(DataError, match=match):
    _read(Records(files))
  other = _table(tmp_path, {'text': ['c']}, 'b.parquet')
  found, counts = _read(Records((*files, *other), bad='skip'))
  assert ([d.text for d in found], counts) == ([b'c'], Counts(documents=1, bad=2))
  found, counts = _read(Records(files, text='meta.text', bad='skip'))
  assert ([d.text for d in found], counts) == ([b'b'], Counts(documents=1, bad=1))
  twice = pa.Table.from_arrays([pa.array(['x']), pa.array(['y'])], ['text', 'text'])
  assert _read(Records(_table(tmp_path, twice)))[0][0].text == b'x'


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
  files = _table(tmp_path, {'text': ['a']})
  lines = _write(tmp_path, '{"text": "a"}')
  real = builtins.__import__

  def refuse(name, *args, **kwargs):
    if name.startswith('pyarrow'):
      raise ImportError(name)
    return real(name, *args, **kwargs)

  for name in [name for name in sys.modules if name.startswith('pyarrow')]:
    monkeypatch.delitem(sys.modules, name)
  monkeypatch.setattr(builtins, '__import__', refuse)
  with pytest.raises(DataError, match=r"pip install 'mtpjax\[parquet\]'"):
    Records(files).documents('train')
  assert _read(Records(lines))[0][0].text == b'a'
