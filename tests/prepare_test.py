"""Prepared data: the same rows as its source's, whatever interrupted its writing."""

import contextlib
import dataclasses
import os
import resource
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
from stored import SHARD, Docs, files, make

from mtpjax.data import prepare
from mtpjax.data.prepared import Prepared
from mtpjax.data.sources import DataError, Document, Text
from mtpjax.data.tokenizer import Bytes, Characters
from mtpjax.data.workers import Workers


@pytest.mark.parametrize('workers', [1, 2])
def test_any_number_of_workers_writes_the_same(whole, tmp_path, workers):
  make(tmp_path / 'out', Docs(masked=True), workers=workers)
  assert files(tmp_path / 'out') == files(whole)


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
  expected = files(whole)
  stops = 0
  for call in range(100):
    folder = tmp_path / str(call)
    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
      _stop_at(patch, call)
      make(folder, Docs(masked=True))
      break
    stops += 1
    # Only whole files count: what else there is is rubbish.
    for path in folder.glob('*.part'):
      path.write_bytes(b'rubbish')
    written = {n: b for n, b in files(folder).items() if not n.endswith('.part')}
    assert written.items() <= expected.items()
    assert len(written) == call
    times = {p: p.stat().st_mtime_ns for p in folder.glob('*.arrayrecord')}
    make(folder, Docs(masked=True))
    assert files(folder) == expected
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


def _args(folder, *args):
  own = f'--config={folder}/c.py', f'--output={folder}/out', f'--shard_tokens={SHARD}'
  return [*own, *args]


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
    [sys.executable, '-m', 'mtpjax.data.prepare', *_args(tmp_path, '--workers=2')],
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
  before = set(files(out))
  assert 'index.json' not in before
  # The same again, here, with another number of workers.
  make(out, source)
  make(tmp_path / 'straight', source)
  for path in out.glob('*.part'):
    path.unlink()
  assert files(out) == files(tmp_path / 'straight')


def test_the_command_ends_in_one_line(tmp_path, start):
  make(tmp_path / 'out', _texts(tmp_path))
  args = _args(tmp_path, '--config.data.source.heldout=0.3')
  done = start('data.prepare', *args, cwd=tmp_path)
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
      make(out, Docs(masked=True))
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert list(files(out)) == ['config.json']
  make(out, Docs(masked=True))
  assert files(out) == files(whole)
  (tmp_path / 'file').write_text('x')
  with pytest.raises(OSError, match=r'file/out'):
    make(tmp_path / 'file' / 'out', Docs())


def test_only_its_own_directory(whole, tmp_path, capsys):
  out = tmp_path / 'out'
  shutil.copytree(whole, out)
  make(out, Docs(masked=True))
  assert capsys.readouterr().out == f'{out} is finished: nothing to do\n'
  with pytest.raises(DataError, match=r'another config \(source.seed: 0 → 1\)'):
    make(out, Docs(masked=True, seed=1))
  with pytest.raises(DataError, match=r'another config .*tokenizer_config'):
    make(out, Docs(masked=True), Characters.Config())
  with pytest.raises(DataError, match=r'another config .shard_tokens: 4096 → 8192'):
    make(out, Docs(masked=True), shard=2 * SHARD)
  with pytest.raises(DataError, match=r'shard_tokens=5000: must be a multiple of 4096'):
    make(out, Docs(masked=True), shard=5000)
  assert files(out) == files(whole)
  (tmp_path / 'mine').mkdir()
  (tmp_path / 'mine' / 'thesis.tex').write_text('x')
  with pytest.raises(DataError, match=r'holds thesis.tex but no config.json'):
    make(tmp_path / 'mine', Docs())
  (tmp_path / 'mine' / 'config.json').write_text('{"model": 1}')
  with pytest.raises(DataError, match=r'is of something else'):
    make(tmp_path / 'mine', Docs())
  with pytest.raises(DataError, match=r'data.source=Prepared.*makes its rows itself'):
    make(tmp_path / 'again', Prepared(str(whole)))
  with prepare._locked(out), pytest.raises(DataError, match=r'another process is prep'):
    make(out, Docs(masked=True))


def test_other_documents_do_not_go_on(tmp_path, monkeypatch):
  out = tmp_path / 'out'
  with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
    _stop_at(patch, 4)
    make(out, Docs())
  before = files(out)
  documents = Docs.documents

  def changed(self, *args):
    for document in documents(self, *args):
      text = document.text.replace(b'a', b'b') if document.name == 'd1' else None
      yield document if text is None else dataclasses.replace(document, text=text)

  monkeypatch.setattr(Docs, 'documents', changed)
  with pytest.raises(DataError, match=r'not those of the shards .* new directory'):
    make(out, Docs())
  assert files(out) == before
