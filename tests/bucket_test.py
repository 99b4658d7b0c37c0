"""Runs in a bucket: gcsfs and TensorStore as they are, over HTTP to a bucket that lives
on this machine. What it holds is read without either."""

import importlib.util
import json
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bucket import Bucket
from runs import (
  assert_mistake,
  assert_same_end,
  ended_well,
  lines,
  saved_steps,
  summary,
)
from workdir_test import settings

from mtpjax import checkpoint, mesh, metrics, paths, workdir
from mtpjax.checkpoint import CheckpointError, Checkpoints
from mtpjax.fields import ConfigError


@pytest.fixture(scope='module')
def bucket(tmp_path_factory):
  with (tmp_path_factory.mktemp('bucket') / 'log').open('w') as log:
    found = Bucket(log)
    with pytest.MonkeyPatch.context() as patch:
      for name, value in found.env.items():
        patch.setenv(name, value)
      yield found
    found.close()


STATE = {'params': jnp.arange(6.0).reshape(2, 3), 'step': jnp.int32(1)}
EVERY = checkpoint.Config(every=1, keep=2)


def save(where, *steps):
  with Checkpoints(where, EVERY) as saved:
    for step in steps:
      saved.save(step, STATE, {'at': step}, wait=True)


def test_checkpoints_are_kept_and_deleted_whole(bucket):
  save('gs://bucket/kept', 1, 2, 3)
  found = {name.split('/')[1] for name in bucket.names('kept/')}
  assert found - {''} == {'2', '3'}
  restored = Checkpoints('gs://bucket/kept').restore(STATE)
  assert restored is not None and (restored.step, restored.data_state) == (3, {'at': 3})
  np.testing.assert_array_equal(restored.state['params'], STATE['params'])


def test_a_save_that_was_never_finished_is_none_and_goes_with_the_next(bucket, caplog):
  where = paths.at('gs://bucket/cut')
  save(where, 1, 2)
  (where / '2' / 'commit_success.txt').unlink()  # written last, and deleted first
  assert Checkpoints(where).steps() == [1]
  restored = Checkpoints(where).restore(STATE)
  assert restored is not None and restored.step == 1
  assert checkpoint.read_record(where)['step'] == 1
  with pytest.raises(CheckpointError, match='no checkpoint'):
    checkpoint.read_record(where, 2)
  save(where, 3)
  found = {name.split('/')[1] for name in bucket.names('cut/')}
  assert found - {''} == {'1', '3'} and not caplog.records


def test_one_that_is_being_deleted_is_none(bucket, monkeypatch):
  where = paths.at('gs://bucket/half')
  with monkeypatch.context() as patch:
    patch.setattr(type(where), 'rmtree', lambda self: 1 / 0)  # killed before the rest
    save(where, 1, 2, 3)
  assert 'half/1/_CHECKPOINT_METADATA' in bucket.names('half/')
  assert Checkpoints(where).steps() == [2, 3]


def test_what_others_wrote_since_is_seen(bucket, tmp_path):
  """gcsfs keeps lists of what it saw, which TensorStore or another process outdates."""
  where = paths.at('gs://bucket/seen')
  (where / 'a').write_text('')
  assert [p.name for p in where.iterdir()] == ['a']
  bucket.write('seen/b', b'b')
  assert sorted(p.name for p in where.iterdir()) == ['a', 'b']
  assert (where / 'b').exists()


def test_a_mirror_copies_what_has_changed(bucket, tmp_path):
  remote = paths.at('gs://bucket/mirror')
  mirror = paths.Mirror(tmp_path, remote, seconds=600.0)
  (tmp_path / 'deep').mkdir()
  (tmp_path / 'deep' / 'one').write_bytes(b'\x00\xff')
  (tmp_path / 'two').write_text('two')
  (tmp_path / 'two.part-7').write_text('half')
  mirror.sync()
  assert bucket.names('mirror/') == ['mirror/deep/one', 'mirror/two']
  assert bucket.read('mirror/deep/one') == b'\x00\xff'
  bucket.write('mirror/two', b'spoilt')
  mirror.sync()
  assert bucket.read('mirror/two') == b'spoilt'  # it has not changed here
  with (tmp_path / 'two').open('a') as file:
    file.write('!')
  mirror.close()
  assert bucket.read('mirror/two') == b'two!'


def test_a_mirror_copies_by_itself_and_again_after_a_failure(
  bucket, tmp_path, monkeypatch, caplog
):
  write, failures = type(paths.at('gs://bucket')).write_bytes, [1, 1]

  def fails_at_first(self, data):
    if failures:
      failures.pop()
      raise RuntimeError('no network')
    return write(self, data)

  monkeypatch.setattr(type(paths.at('gs://bucket')), 'write_bytes', fails_at_first)
  (tmp_path / 'file').write_text('text')
  mirror = paths.Mirror(tmp_path, paths.at('gs://bucket/again'), seconds=0.05)
  end = time.monotonic() + 20
  while not bucket.names('again/') and time.monotonic() < end:
    time.sleep(0.05)
  assert bucket.read('again/file') == b'text'
  said = [r.getMessage() for r in caplog.records]
  assert len(said) == 2 and 'gs://bucket/again failed, for now: no network' in said[0]
  caplog.clear()
  mirror.close()


@pytest.fixture
def one_device():
  with jax.set_mesh(mesh.make(mesh.Config(), jax.devices()[:1])):
    yield


def test_a_directory_in_a_bucket_is_claimed_and_found_again(bucket, one_device):
  name = 'gs://bucket/a/run'
  with workdir.claim(name, settings()) as run:
    assert str(run) == name and json.loads(bucket.read('a/run/config.json'))
    with metrics.Writer(run.files) as writer:
      writer.write(1, {'loss': 2.0})
      run.sync()
      assert json.loads(bucket.read('a/run/metrics.jsonl'))['loss'] == 2.0
      writer.write(2, {'loss': 1.0})
  assert len(bucket.read('a/run/metrics.jsonl').splitlines()) == 2
  with (
    workdir.claim(name, settings(log_every=3)) as run,
    metrics.Writer(run.files, resume_step=1) as writer,
  ):
    writer.write(2, {'loss': 0.5})
  rows = [json.loads(x) for x in bucket.read('a/run/metrics.jsonl').splitlines()]
  assert [x['loss'] for x in rows] == [2.0, 0.5]
  assert json.loads(bucket.read('a/run/config.json'))['log_every'] == 3
  with pytest.raises(workdir.WorkdirError, match=r'another config .*steps'):
    workdir.claim(name, settings(steps=7))
  bucket.write('b/notes', b'mine')
  with pytest.raises(
    workdir.WorkdirError, match='gs://bucket/b holds files but no run'
  ):
    workdir.claim('gs://bucket/b', settings())
  with pytest.raises(
    workdir.WorkdirError, match='--workdir=gs://none/x cannot be used'
  ):
    workdir.claim('gs://none/x', settings())


def test_a_last_copy_that_fails_is_an_error(bucket, one_device, monkeypatch):
  def fails(self):
    raise RuntimeError('no network')

  with (
    pytest.raises(workdir.WorkdirError, match=r'gs://bucket/last .* no network'),
    workdir.claim('gs://bucket/last', settings()),
  ):
    monkeypatch.setattr(paths.Mirror, 'sync', fails)


def test_a_missing_package_and_other_places_are_named(one_device, monkeypatch):
  for call in (
    paths.at,
    Checkpoints,
    checkpoint.find,
    lambda name: workdir.claim(name, settings()),
    lambda name: metrics.write_summary(name, {}),
  ):
    with pytest.raises(ConfigError, match=r's3:// is not supported.* gs://BUCKET'):
      call('s3://bucket/run')
    with monkeypatch.context() as patch:
      patch.setattr(importlib.util, 'find_spec', lambda name: None)
      with pytest.raises(ConfigError, match=r"pip install 'mtpjax\[gcs\]'"):
        call('gs://bucket/run')


@pytest.mark.slow
def test_a_run_in_a_bucket_is_stopped_goes_on_and_is_used(
  bucket, place, train, straight, tmp_path
):
  name = 'gs://bucket/runs/small'
  stopped = train(name, AT=7, SIGNAL=signal.SIGTERM)
  assert 'SIGTERM: saved step 7 in gs://bucket/runs/small' in stopped.stdout
  killed = train(name, AT=6, SIGNAL=signal.SIGKILL)  # of its own, so step 13
  assert killed.returncode == -signal.SIGKILL
  done = ended_well(train(name))
  assert f'resuming {name} at step ' in done.stdout
  bucket.copy('runs/small', tmp_path)
  assert lines(tmp_path) == lines(straight)
  assert_same_end(tmp_path, straight)
  assert saved_steps(tmp_path) == [8, 16, 20]
  there = {path.name for path in tmp_path.iterdir()}
  assert there == {path.name for path in straight.iterdir()} - {'.lock'}
  assert (tmp_path / 'loss.png').stat().st_size > 10_000
  assert [*(tmp_path / 'tensorboard').iterdir()]
  assert not [x for x in bucket.names() if '.part-' in x or 'writable' in x]

  for command, args in (('evaluate', ()), ('sample', ('--prompt=one', '--tokens=5'))):
    given = [f'--checkpoint={name}', f'--json={name}/{command}.json', *args]
    ended_well(train('', *given, command=command))
  found = json.loads(bucket.read('runs/small/evaluate.json'))
  assert found['loss_by_depth'] == summary(straight)['loss_by_depth']
  [text] = json.loads(bucket.read('runs/small/sample.json'))['completions']
  assert len(text['tokens']) > 0
  args = [f'--config.init_from.checkpoint={name}']
  begun = ended_well(train(tmp_path / 'begun', *args, variant='begun'))
  assert f'init_from {name}/checkpoints, step 20' in begun.stdout

  assert_mistake(train('gs://none/run'), '--workdir=gs://none/run')
