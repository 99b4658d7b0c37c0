"""Prepared data: the same rows as its source's, whatever interrupted its writing."""

import contextlib
import dataclasses
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtpjax import fields
from mtpjax.data import batches, pack, prepare, prepared, tokenfile
from mtpjax.data.batches import Config, TrainBatches, heldout_batches
from mtpjax.data.mixture import Mixture
from mtpjax.data.prepared import Prepared
from mtpjax.data.sources import Counts, DataError, Document, Text
from mtpjax.data.tokenizer import Bytes, Characters
from mtpjax.data.workers import Workers

FIELDS = ('tokens', 'segments', 'positions', 'mask')
SHARD = tokenfile.BLOCK


@dataclasses.dataclass
class Docs:
  """Documents of all sizes and kinds; the longest span several shards."""

  count: int = 40
  masked: bool = False
  alphabet: str = 'abcdef'
  heldout: bool = True
  seed: int = 0

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
      if self.masked and i > 20 and i % 3 == 0:
        cut = int(rng.integers(size + 1))
        yield Document(f'd{i}', text, parts=((text[:cut], False), (text[cut:], True)))
      elif self.masked and i % 3 == 1:
        ids = rng.integers(0, len(self.alphabet), size)
        yield Document(f'd{i}', tokens=ids, mask=rng.random(size) < 0.5)
      else:
        yield Document(f'd{i}', text)


def _make(folder, source, tokens=None, workers=1, shard=SHARD):
  prepare.prepare(Config(source, tokens), folder, workers, shard)
  return Prepared(str(folder))


def _files(folder):
  found = sorted(p for p in Path(folder).rglob('*') if p.is_file())
  return {p.relative_to(folder).as_posix(): p.read_bytes() for p in found}


def _same(left, right):
  assert len(left) == len(right)
  for a, b in zip(left, right, strict=True):
    assert tuple(a) == tuple(b) == FIELDS
    for name in FIELDS:
      np.testing.assert_array_equal(a[name], b[name])
      assert a[name].dtype == b[name].dtype


def _train(data, index=0, count=1):
  return TrainBatches(
    data.train,
    batch=8,
    shards=4,
    seed=1,
    weights=data.weights,
    process_index=index,
    process_count=count,
  )


def _take(iterator, n):
  return [next(iterator) for _ in range(n)]


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """What an uninterrupted run writes."""
  folder = tmp_path_factory.mktemp('whole') / 'out'
  _make(folder, Docs(masked=True))
  return folder


@pytest.mark.parametrize('together', [True, False])
@pytest.mark.parametrize(
  ('source', 'tokens'),
  [
    (Docs(), None),
    (Docs(), Characters.Config()),
    (Docs(masked=True), Bytes.Config()),
    (Docs(masked=True, heldout=False), Characters.Config()),
    (Docs(count=0), None),
  ],
  ids=['bytes', 'characters', 'masks', 'no-heldout', 'nothing'],
)
def test_rows_are_those_of_the_source(tmp_path, source, tokens, together):
  own = _make(tmp_path / 'out', source, tokens)
  if not source.count:
    with pytest.raises(DataError, match=r'Prepared\(.*no training document'):
      batches.open_data(Config(own), 0)
    return
  config = Config(source, tokens, length=300, pack=together)
  expected = batches.open_data(config, seed=7)
  actual = batches.open_data(dataclasses.replace(config, source=own, tokenizer=None), 7)
  assert actual.tokenizer == expected.tokenizer
  assert actual.counts == expected.counts
  assert str(actual) == str(expected)
  for split in ('train', 'heldout'):
    a, b = getattr(actual, split), getattr(expected, split)
    assert (a.mask is None) == (b.mask is None) == (not source.masked or not len(b))
    assert a.fingerprint() == b.fingerprint()
    assert isinstance(a.tokens, pack.Stored)
    assert not isinstance(a.tokens, np.ndarray)
    assert (a.tokens.size, a.tokens.dtype) == (b.tokens.size, b.tokens.dtype)
    everything = np.arange(len(b))
    _same([a.rows(everything, size=len(b) + 2)], [b.rows(everything, size=len(b) + 2)])
  # Two epochs and more, and a state that moves between them.
  n = 2 * len(expected.train) // 8 + 3
  iterators = _train(actual), _train(expected)
  _same(_take(iterators[0], n), _take(iterators[1], n))
  iterators[0].set_state(_train(expected).get_state())
  _same(_take(iterators[0], 2), _take(_train(expected), 2))
  assert (
    batches.open_rows(
      Config(own, length=300, pack=together), actual.tokenizer, 'heldout'
    ).fingerprint()
    == expected.heldout.fingerprint()
  )


def test_blocks_are_gathered_as_from_memory(whole, monkeypatch):
  monkeypatch.setattr(tokenfile, '_OPEN', 2)
  source = Docs(masked=True)
  plan = batches.open_data(Config(source), 0).train
  rows = Prepared(str(whole)).rows('train', 256, 0, True, Counts())
  assert isinstance(plan, pack.Plan)
  assert plan.mask is not None
  assert rows.mask is not None
  size = plan.tokens.size
  assert size > 5 * SHARD
  rng = np.random.default_rng(0)
  for indices in (
    np.arange(size),
    np.arange(size)[::-1],
    rng.integers(0, size, 3000),
    np.array([size - 1, 0, SHARD - 1, SHARD, SHARD]),
    np.arange(0),
  ):
    for _ in range(2):
      np.testing.assert_array_equal(rows.mask[indices], plan.mask[indices])
      np.testing.assert_array_equal(rows.tokens[indices], plan.tokens[indices])
  # Layout: all shards but the last of equal size, their documents counted once.
  index = json.loads((whole / 'index.json').read_text())
  headers = [s['header'] for s in index['splits']['train']['shards']]
  assert [h['tokens'] for h in headers[:-1]] == [SHARD] * (len(headers) - 1)
  assert sum(h['documents'] for h in headers) == source.count
  assert 0 in [h['documents'] for h in headers]  # one is inside a document
  assert {h['bits'] for h in headers} == {True, False}


@pytest.mark.parametrize('workers', [1, 2])
def test_any_number_of_workers_writes_the_same(whole, tmp_path, workers):
  _make(tmp_path / 'out', Docs(masked=True), workers=workers)
  assert _files(tmp_path / 'out') == _files(whole)


def test_workers_read_a_little_ahead():
  read = []

  def documents():
    for i in range(60):
      read.append(i)
      yield Document(str(i), b'x' * 2**18)

  with Workers(Bytes(), 2) as pool:
    for done, (ids, mask) in enumerate(pool.encode(documents())):
      assert (len(ids), mask) == (2**18, None)
      assert len(read) <= done + 6
  bad = [Document('good', b'ab'), Document('bad', tokens=np.array([256]))]
  with Workers(Bytes(), 2) as pool, pytest.raises(DataError, match=r'bad: id 256'):
    list(pool.encode(bad))


def _stop_at(monkeypatch, call):
  """Ends the process, as it were, at the call-th moment at which a file is whole."""
  left, replace = [call], os.replace

  def dying(*args):
    left[0] -= 1
    if left[0] < 0:
      raise KeyboardInterrupt
    replace(*args)

  monkeypatch.setattr(os, 'replace', dying)


def test_goes_on_wherever_it_was_stopped(whole, tmp_path, monkeypatch):
  expected = _files(whole)
  stops = 0
  for call in range(100):
    folder = tmp_path / str(call)
    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
      _stop_at(patch, call)
      _make(folder, Docs(masked=True))
      break
    stops += 1
    # Only whole files count: what else there is is rubbish.
    for path in folder.glob('*.part'):
      path.write_bytes(b'rubbish')
    written = {n: b for n, b in _files(folder).items() if not n.endswith('.part')}
    assert written.items() <= expected.items()
    assert len(written) == call
    times = {p: p.stat().st_mtime_ns for p in folder.glob('*.arrayrecord')}
    _make(folder, Docs(masked=True))
    assert _files(folder) == expected
    assert times == {p: p.stat().st_mtime_ns for p in times}  # none written again
  assert stops == len(expected) > 12


FILE = """
from mtpjax.config import Config
from mtpjax.data import batches
from mtpjax.data.sources import Text

def get_config(arg: str = ''):
  source = Text(files=('{folder}/*.txt',), heldout=0.2, document='line')
  return Config(data=batches.Config(source))
"""


def _command(folder, *args):
  return [
    *(sys.executable, '-m', 'mtpjax.data.prepare', f'--config={folder}/c.py'),
    *(f'--output={folder}/out', f'--shard_tokens={SHARD}', *args),
  ]


def _texts(folder):
  rng = np.random.default_rng(0)
  lines = [''.join(rng.choice(list('xyz '), n)) for n in rng.integers(1, 3000, 800)]
  (folder / 'a.txt').write_text('\n'.join(lines))
  (folder / 'c.py').write_text(FILE.format(folder=folder))
  return Text((f'{folder}/*.txt',), heldout=0.2, document='line')


@pytest.mark.slow
def test_killed_and_repeated(tmp_path):
  source = _texts(tmp_path)
  out = tmp_path / 'out'
  with subprocess.Popen(
    _command(tmp_path, '--workers=2'),
    stderr=subprocess.PIPE,
    stdout=subprocess.DEVNULL,
    text=True,
  ) as process:
    until = time.monotonic() + 120
    while not (out / 'train-00003.arrayrecord').exists():
      assert process.poll() is None and time.monotonic() < until
      time.sleep(0.002)
    process.kill()
    # The workers hold the other end of it, which closes once they have gone as well.
    assert process.stderr is not None
    process.stderr.read()
  before = set(_files(out))
  assert 'index.json' not in before
  # The same again, here, with another number of workers.
  _make(out, source)
  _make(tmp_path / 'straight', source)
  for path in out.glob('*.part'):
    path.unlink()
  assert _files(out) == _files(tmp_path / 'straight')


def test_the_command_ends_in_one_line(tmp_path):
  _make(tmp_path / 'out', _texts(tmp_path))
  done = subprocess.run(
    _command(tmp_path, '--config.data.source.heldout=0.3'),
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )
  assert (done.returncode, done.stdout) == (2, '')
  assert done.stderr == (
    f'error: {tmp_path}/out is of another config (source.heldout: 0.2 → 0.3): choose '
    'a new --output, or go on with that config\n'
  )


def test_a_full_disk_keeps_what_is_whole(whole, tmp_path):
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  out = tmp_path / 'out'
  # The first shard is large, as one of large tokens would be on a small disk.
  resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
  try:
    with pytest.raises(OSError, match=r'train-00000.*File too large.*are whole'):
      _make(out, Docs(masked=True))
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert list(_files(out)) == ['config.json']
  _make(out, Docs(masked=True))
  assert _files(out) == _files(whole)
  (tmp_path / 'file').write_text('x')
  with pytest.raises(OSError, match=r'file/out'):
    _make(tmp_path / 'file' / 'out', Docs())


def test_only_its_own_directory(whole, tmp_path, capsys):
  out = tmp_path / 'out'
  shutil.copytree(whole, out)
  _make(out, Docs(masked=True))
  assert capsys.readouterr().out == f'{out} is finished: nothing to do\n'
  with pytest.raises(DataError, match=r'another config \(source.seed: 0 → 1\)'):
    _make(out, Docs(masked=True, seed=1))
  with pytest.raises(DataError, match=r'another config .*tokenizer_config'):
    _make(out, Docs(masked=True), Characters.Config())
  with pytest.raises(DataError, match=r'another config .shard_tokens: 4096 → 8192'):
    _make(out, Docs(masked=True), shard=2 * SHARD)
  with pytest.raises(DataError, match=r'shard_tokens=5000: must be a multiple of 4096'):
    _make(out, Docs(masked=True), shard=5000)
  assert _files(out) == _files(whole)
  (tmp_path / 'mine').mkdir()
  (tmp_path / 'mine' / 'thesis.tex').write_text('x')
  with pytest.raises(DataError, match=r'holds thesis.tex but no config.json'):
    _make(tmp_path / 'mine', Docs())
  (tmp_path / 'mine' / 'config.json').write_text('{"model": 1}')
  with pytest.raises(DataError, match=r'is of something else'):
    _make(tmp_path / 'mine', Docs())
  with pytest.raises(DataError, match=r'data.source=Prepared.*makes its rows itself'):
    _make(tmp_path / 'again', Prepared(str(whole)))
  with prepare._locked(out), pytest.raises(DataError, match=r'another process is prep'):
    _make(out, Docs(masked=True))


def test_other_documents_do_not_go_on(tmp_path, monkeypatch):
  out = tmp_path / 'out'
  with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
    _stop_at(patch, 4)
    _make(out, Docs())
  before = _files(out)
  documents = Docs.documents

  def changed(self, *args):
    for document in documents(self, *args):
      text = document.text.replace(b'a', b'b') if document.name == 'd1' else None
      yield document if text is None else dataclasses.replace(document, text=text)

  monkeypatch.setattr(Docs, 'documents', changed)
  with pytest.raises(DataError, match=r'not those of the shards .* new directory'):
    _make(out, Docs())
  assert _files(out) == before


def _open(folder):
  return batches.open_data(Config(Prepared(str(folder)), length=300), 0)


def test_damage_is_named(whole, tmp_path):
  _make(tmp_path / 'other', Docs(masked=True, seed=1))

  def fails(match, change, read=_open):
    folder = tmp_path / 'out'
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    change(folder)
    with pytest.raises(DataError, match=match):
      read(folder)

  name = 'train-00002.arrayrecord'

  def truncate(folder):
    (folder / name).write_bytes((whole / name).read_bytes()[:5000])

  def alter(folder):
    data = bytearray((whole / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(data)

  def swap(folder):
    shutil.copy(folder / 'train-00003.arrayrecord', folder / name)

  def foreign(folder):
    shutil.copy(tmp_path / 'other' / name, folder / name)
    index = json.loads((folder / 'index.json').read_text())
    shard = index['splits']['train']['shards'][2]
    shard['bytes'] = (folder / name).stat().st_size
    (folder / 'index.json').write_text(json.dumps(index))

  def high(folder):
    index = json.loads((folder / 'index.json').read_text())
    index['splits']['train']['shards'][2]['header']['max_id'] = 256
    (folder / 'index.json').write_text(json.dumps(index))

  def everything(folder):
    rows = _open(folder).train
    rows.rows(np.arange(len(rows)))

  fails(rf'{name} is missing: copy it again', lambda f: (f / name).unlink())
  fails(rf'{name} has 5000 bytes of \d+: copy', truncate)
  fails(rf'{name} (is not the shard|has)', swap)
  fails(rf'{name} is not the shard that was written here', foreign)
  fails(rf'{name} cannot be read', alter, everything)
  fails('id 256 in shard 2 of train is outside the vocabulary of 256', high)
  fails('no index.json there.*finish', lambda f: (f / 'index.json').unlink())
  fails('index.json cannot be read', lambda f: (f / 'index.json').write_text('{'))
  fails(
    'format and block .9, 4096.',
    lambda f: (f / 'index.json').write_text('{"format": 9, "block": 4096}'),
  )
  with pytest.raises(DataError, match=r'nowhere.*no index.json there'):
    _open(tmp_path / 'nowhere')


def test_another_tokenizer_is_refused(whole):
  config = Config(Prepared(str(whole)), length=300)
  batches.open_data(dataclasses.replace(config, tokenizer=Bytes.Config()), 0)
  other = dataclasses.replace(config, tokenizer=Characters.Config())
  with pytest.raises(DataError, match=r'data.tokenizer=.*Characters.*another one alre'):
    batches.open_data(other, 0)
  with pytest.raises(DataError, match=r'data.source: its ids are of another tokenizer'):
    batches.open_rows(config, Characters('ab'), 'train')


@pytest.fixture(scope='module')
def mixed(tmp_path_factory):
  """A mixture, prepared, and itself."""
  folder = tmp_path_factory.mktemp('mixed') / 'out'
  # Letters of one part only: the tokenizer must have seen both.
  parts: Any = {'a': Docs(12, alphabet='abc'), 'b': Docs(30, alphabet='cxyz', seed=1)}
  weights = {'a': 2.0, 'b': 1.0}
  source = Mixture(parts, weights)
  prepare.prepare(Config(source, Characters.Config()), folder, 1, SHARD)
  stored: Any = {name: Prepared(f'{folder}/{name}') for name in parts}
  config = Config(source, Characters.Config(), length=300, batch=8, shards=4)
  return config, dataclasses.replace(
    config, source=Mixture(stored, weights), tokenizer=None
  )


def test_a_mixture_is_prepared_part_by_part(mixed, tmp_path):
  expected, actual = (batches.open_data(config, 5) for config in mixed)
  assert actual.tokenizer == expected.tokenizer == Characters('abcxyz')
  assert str(actual) == str(expected)
  for split in ('train', 'heldout'):
    a, b = getattr(actual, split), getattr(expected, split)
    assert a.domains == b.domains
    assert a.fingerprint() == b.fingerprint()
  _same(_take(_train(actual), 20), _take(_train(expected), 20))
  # Text beside it is in the same ids.
  (tmp_path / 't.txt').write_text('abc xyz')
  text = Text((f'{tmp_path}/t.txt',))
  parts = {**mixed[1].source.parts, 'text': text}
  both = Config(Mixture(parts, dict.fromkeys(parts, 1.0)), length=300)
  with pytest.raises(DataError, match="character ' '"):
    batches.open_data(both, 0)
  (tmp_path / 't.txt').write_text('abcxyz')
  row = pack.domain(batches.open_data(both, 0).train, 'text').row(0)
  assert actual.tokenizer.decode(row['tokens'][row['segments'] > 0]) == 'abcxyz'


@pytest.mark.parametrize('count', [1, 2, 4])
@pytest.mark.parametrize('which', ['prepared', 'mixed'])
def test_process_counts_give_the_same_batches(whole, mixed, count, which):
  config = Config(Prepared(str(whole)), length=300) if which == 'prepared' else mixed[1]
  data = batches.open_data(config, 0)
  straight = _take(_train(data), 12)
  parts = [_train(data, i, count) for i in range(count)]
  for expected in straight[:6]:
    local = [next(part) for part in parts]
    _same([{n: np.concatenate([p[n] for p in local]) for n in FIELDS}], [expected])
  union = {k: v for part in parts for k, v in part.get_state().items()}
  resumed = [_train(data, i, 4 // count) for i in range(4 // count)]
  for part in resumed:
    part.set_state(union)
  for expected in straight[6:]:
    local = [next(part) for part in resumed]
    _same([{n: np.concatenate([p[n] for p in local]) for n in FIELDS}], [expected])
  # Held out: equally many batches each, every row once.
  rows = data.heldout
  each = [list(heldout_batches(rows, 8, i, count)) for i in range(count)]
  assert {len(own) for own in each} == {-(-len(rows) // 8)}
  joined = {
    n: np.concatenate([p[n] for local in zip(*each, strict=True) for p in local])
    for n in FIELDS
  }
  padded = len(joined['mask'])
  _same([joined], [rows.rows(np.arange(len(rows)), size=padded)])


def test_a_config_of_prepared_data_is_saved(whole):
  config = Config(Prepared(str(whole)))
  assert fields.from_json(fields.to_json(config)) == config
  assert json.loads((whole / 'index.json').read_text())['format'] == prepared.FORMAT
