"""Nothing that stops the train command changes what it learns.

The config file can stop its own process at an exact batch, and spoil one, so what is
tested does not depend on how fast the machine is.
"""

import random
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
from runs import (
  EVERY,
  STEPS,
  arrays,
  assert_mistake,
  assert_same_end,
  command_line,
  ended_well,
  environment,
  lines,
  saved_steps,
  summary,
)


def test_the_last_step_is_always_saved(straight):
  assert saved_steps(straight) == [8, 16, 20]


def test_sigterm_saves_exits_143_and_the_run_goes_on_bit_for_bit(
  place, train, straight
):
  # Steps 7 and 13, a line every 4 steps: lines stand for the same steps as in one go.
  workdir, args = place / 'stopped', ['--config.log_every=4']
  stopped = train(workdir, *args, AT=7, SIGNAL=signal.SIGTERM)
  assert stopped.returncode == 143, stopped.stderr[-3000:]
  assert f'SIGTERM: saved step 7 in {workdir}' in stopped.stdout
  assert saved_steps(workdir) == [7]
  assert not (workdir / 'summary.json').exists()
  assert f'resuming {workdir} at step 7' in ended_well(train(workdir, *args)).stdout
  assert_same_end(workdir, straight)
  assert summary(workdir)['resumed_at'] == 7
  *each, heldout = lines(straight)
  *found, same = lines(workdir)
  assert same == heldout
  assert [x['step'] for x in found] == [4, 8, 12, 16, 20]
  for line in found:
    window = each[line['step'] - 4 : line['step']]
    for name in ('loss', 'grad_norm'):
      assert line[name] == sum(x[name] for x in window) / 4
    counts = np.array([x['counts_by_depth'] for x in window])
    losses = np.array([x['loss_by_depth'] for x in window])
    assert line['counts_by_depth'] == counts.sum(0).tolist()
    np.testing.assert_allclose(
      line['loss_by_depth'], (losses * counts).sum(0) / counts.sum(0), rtol=1e-13
    )
    assert line['learning_rate'] == window[-1]['learning_rate']


def test_a_killed_run_goes_on_as_if_nothing_had_happened(place, train, straight):
  workdir = place / 'killed'
  after = workdir / 'checkpoints' / str(EVERY)
  killed = train(workdir, AT=13, SIGNAL=signal.SIGKILL, AFTER=after)
  assert killed.returncode == -signal.SIGKILL
  assert lines(workdir)[-1]['step'] == 11  # written past the checkpoint
  with (workdir / 'metrics.jsonl').open('a') as file:
    file.write('{"step": 12, "lo')
  done = ended_well(train(workdir))
  assert f'resuming {workdir} at step {EVERY}' in done.stdout
  assert lines(workdir) == lines(straight)
  assert_same_end(workdir, straight)


def test_a_damaged_checkpoint_is_said_aloud_and_the_one_before_is_taken(
  place, train, straight
):
  workdir = place / 'damaged'
  shutil.copytree(straight, workdir)
  shutil.rmtree(workdir / 'checkpoints' / '20')
  for path in (workdir / 'checkpoints' / '16').glob('state/**/d/*'):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
  done = ended_well(train(workdir))
  assert 'damaged checkpoint' in done.stderr
  assert 'step 16' in done.stderr
  assert f'resuming {workdir} at step 8' in done.stdout
  assert lines(workdir) == lines(straight)
  assert_same_end(workdir, straight)
  assert saved_steps(workdir) == [8, 16, 20]  # the damaged one was replaced


def test_a_finished_run_may_be_run_again_with_other_logs_and_changes_nothing(
  place, train, straight
):
  workdir = place / 'again'
  shutil.copytree(straight, workdir)
  (workdir / 'summary.json').unlink()
  args = ['--config.log_every=3', '--config.checkpoint.every=5', '--config.name=other']
  ended_well(train(workdir, *args))
  assert lines(workdir) == lines(straight)
  assert_same_end(workdir, straight)
  for name in ('train_loss_by_depth', 'tokens_per_second'):
    assert summary(workdir)[name] == summary(straight)[name]


@pytest.mark.slow
def test_thirteen_steps_saved_every_five_leave_5_10_and_13(place, train):
  workdir = place / 'thirteen'
  ended_well(train(workdir, '--config.steps=13', '--config.checkpoint.every=5'))
  assert saved_steps(workdir) == [5, 10, 13]


@pytest.mark.slow
def test_a_run_goes_on_on_eight_devices_and_back_on_one(place, train, straight):
  workdir = place / 'moved'
  mesh = ['--config.mesh.fsdp=4', '--config.mesh.tensor=2']
  stop = {'AT': 7, 'SIGNAL': signal.SIGTERM}
  train(workdir, **stop)
  done = train(workdir, *mesh, devices=8, **stop)
  assert f'resuming {workdir} at step 7' in done.stdout
  assert saved_steps(workdir) == [7, 8, 14]
  ended_well(train(workdir))
  found, expected = lines(workdir), lines(straight)
  assert [x['step'] for x in found] == [x['step'] for x in expected]
  for a, b in zip(found, expected, strict=True):
    assert a['counts_by_depth'] == b['counts_by_depth']
    np.testing.assert_allclose(a['loss_by_depth'], b['loss_by_depth'], rtol=1e-5)
  params, wanted = arrays(workdir, STEPS), arrays(straight, STEPS)
  for name, x in wanted.items():
    if name.startswith('/params'):
      np.testing.assert_allclose(params[name], x, atol=2e-4, err_msg=name)


@pytest.mark.slow
def test_whenever_a_run_is_killed_it_ends_as_if_it_had_not_been(place, train, straight):
  workdir, rng, kills = place / 'loop', random.Random(1), 0
  env = environment(place)
  command = command_line(place, workdir, '--config.checkpoint.every=1')
  begun = time.monotonic()
  ended_well(train(place / 'timed', '--config.checkpoint.every=1'))
  seconds = time.monotonic() - begun
  for _ in range(8):
    process = subprocess.Popen(
      command, env=env, cwd=place, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
      process.wait(rng.uniform(0, seconds))
    except subprocess.TimeoutExpired:
      process.kill()
      kills += 1
    _, errors = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), errors[-3000:].decode()
  assert kills
  ended_well(train(workdir, '--config.checkpoint.every=1'))
  assert lines(workdir) == lines(straight)
  assert_same_end(workdir, straight)


@pytest.mark.slow
def test_sigterm_while_compiling_saves_the_first_step(place, train, straight):
  workdir = place / 'early'
  process = subprocess.Popen(
    command_line(place, workdir),
    env=environment(place),
    cwd=place,
    stdout=subprocess.PIPE,
    text=True,
  )
  assert process.stdout is not None
  for line in process.stdout:
    if 'compiling' in line:
      process.terminate()
      break
  rest, _ = process.communicate()
  assert process.returncode == 143
  assert 'SIGTERM: saved step 1' in rest
  assert saved_steps(workdir) == [1]
  ended_well(train(workdir))
  assert lines(workdir) == lines(straight)


@pytest.mark.slow
def test_a_place_that_fails_on_the_way_is_no_mistake(place):
  """A launcher tries again after code 1, not after 2."""
  workdir, go = place / 'fails', place / 'fails-go'
  process = subprocess.Popen(
    command_line(place, workdir),
    env=environment(place, AT=3, SIGNAL=0, AFTER=go),
    cwd=place,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  end = time.monotonic() + 120
  while not (workdir / 'metrics.jsonl').exists() and time.monotonic() < end:
    time.sleep(0.05)
  (workdir / 'checkpoints').rmdir()
  (workdir / 'checkpoints').write_text('in the way')
  go.touch()
  _, errors = process.communicate(timeout=120)
  assert process.returncode == 1, errors
  assert f'error: saving step 8 in {workdir}/checkpoints failed' in errors
  assert 'Traceback' not in errors


@pytest.mark.slow
def test_changed_texts_are_refused_when_a_run_goes_on(place, train, tmp_path):
  shutil.copytree(place / 'text', tmp_path / 'text')
  args = [f'--config.data.source.files={tmp_path}/text/*.txt']
  train(tmp_path / 'run', *args, AT=2, SIGNAL=signal.SIGTERM)
  for path in (tmp_path / 'text').iterdir():
    path.write_text(path.read_text() + '!')
  done = train(tmp_path / 'run', *args)
  assert_mistake(done, 'other documents')
  assert 'compiling' not in done.stdout
