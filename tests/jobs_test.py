"""The train command as several processes, really killed, hung and moved, against one
process that nothing stopped. 2 × 4 means two processes of four devices each.
"""

import random
import re
import signal
import subprocess
import time

import numpy as np
import pytest
from runs import (
  EVERY,
  assert_mistake,
  command_line,
  environment,
  finished,
  free_port,
  joined,
  lines,
  saved_steps,
)

# In float64, in which nothing but a fault makes a difference of 1e-6: in float32 the
# order of sums alone makes one of 2e-7 of the loss in 20 steps.
ARGS = (
  *('--config.data.batch=16', '--config.decode.prompts=0'),
  *('--config.trunk.dtype=float64', '--config.trunk.param_dtype=float64'),
)


@pytest.fixture(scope='module')
def job(place):
  """Runs `count` processes of `devices` each to their end; `each` has more of the
  environment for some."""

  def run(workdir, count, devices, *args, each=None, timeout=240):
    return finished(start(workdir, count, devices, *args, each=each), timeout)

  def start(workdir, count, devices, *args, each=None):
    port = free_port()
    return [
      subprocess.Popen(
        command_line(place, workdir, *ARGS, *args, *joined(i, count, port)),
        env=environment(place, devices, JAX_ENABLE_X64=1, **(each or {}).get(i, {})),
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
      )
      for i in range(count)
    ]

  run.start = start
  return run


def all_ended_well(done):
  for one in done:
    assert one.returncode == 0, one.stderr[-3000:]
  return done[0]


def assert_same_losses(workdir, straight):
  """Every line, within 1e-6."""
  found, wanted = lines(workdir), lines(straight)
  assert [x['step'] for x in found] == [x['step'] for x in wanted]
  for a, b in zip(found, wanted, strict=True):
    assert a['counts_by_depth'] == b['counts_by_depth']
    for name in ('loss', 'loss_by_depth'):
      np.testing.assert_allclose(a[name], b[name], rtol=0, atol=1e-6)


@pytest.fixture(scope='module')
def on_eight(place, job):
  """20 steps over fsdp of 8, in one process."""
  all_ended_well(job(place / 'eight', 1, 8))
  return place / 'eight'


@pytest.mark.slow
def test_stopped_killed_and_moved_a_job_learns_the_same(place, job, on_eight):
  workdir = place / 'moved'
  # SIGTERM to one: all save the same step, the next that all know of it at.
  stopped = job(workdir, 2, 4, each={1: {'AT': 5, 'SIGNAL': signal.SIGTERM}})
  assert [one.returncode for one in stopped] == [143, 143]
  assert 'SIGTERM: saved step 6' in stopped[0].stdout
  assert 'SIGTERM' not in stopped[1].stdout  # process 0 speaks
  assert saved_steps(workdir) == [6]
  # kill -9 of one, at step 12, the checkpoint of step 8 being there.
  after = workdir / 'checkpoints' / str(EVERY)
  kill = {'AT': 7, 'SIGNAL': signal.SIGKILL, 'AFTER': after}
  started = job.start(workdir, 2, 4, each={0: kill})
  started[0].wait(240)
  killed = time.monotonic()
  done = finished(started)
  assert time.monotonic() - killed < 15
  assert done[0].returncode == -signal.SIGKILL
  assert done[1].returncode not in (0, None)
  assert re.search(r'another task died|is gone', done[1].stderr)
  # On as 4 × 2, where one fails.
  failed = job(workdir, 4, 2, each={2: {'FAIL_AT': 3}})
  assert f'resuming {workdir} at step {EVERY}' in failed[0].stdout
  for i, one in enumerate(failed):
    assert one.returncode == 2
    assert 'a bad row' in one.stderr
    assert ('process 2 of 4 ended' in one.stderr) == (i != 2)
  # To the end as 1 × 8.
  all_ended_well(job(workdir, 1, 8))
  assert_same_losses(workdir, on_eight)


@pytest.mark.slow
def test_whenever_all_are_killed_they_end_as_if_they_had_not_been(place, job, on_eight):
  workdir, rng = place / 'loop', random.Random(2)
  every = '--config.checkpoint.every=1'
  for count, devices in ((2, 4), (4, 2)):
    started = job.start(workdir, count, devices, every)
    seconds = rng.uniform(5, 25)
    time.sleep(seconds)
    for process in rng.sample(started, count):
      process.kill()
    finished(started)
  all_ended_well(job(workdir, 2, 4, every))
  assert_same_losses(workdir, on_eight)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('sizes', 'count', 'devices'),
  [
    # 'tensor' spans two processes, and so does each row; 'context' spans all.
    (('replica=2', 'fsdp=1', 'tensor=4'), 4, 2),
    (('fsdp=1', 'context=8'), 2, 4),
  ],
)
def test_rows_that_several_processes_share(place, job, sizes, count, devices):
  name = '-'.join(sizes)
  args = [f'--config.mesh.{size}' for size in sizes]
  args += ['--config.steps=4', '--config.trunk.heads=4']
  all_ended_well(job(place / f'{name}-one', 1, 8, *args))
  all_ended_well(job(place / name, count, devices, *args))
  assert_same_losses(place / name, place / f'{name}-one')


@pytest.mark.slow
def test_a_step_that_hangs_ends_the_job(place, job):
  stuck = '--config.guard.stuck=3'
  done = job(place / 'hangs', 1, 1, stuck, each={0: {'HANG_AT': 3}})
  [one] = done
  assert one.returncode == 1
  assert 'reading the data of step 3 has taken more than guard.stuck=3 s' in one.stderr
  assert 'in draw_counted' in one.stderr


@pytest.mark.slow
def test_another_command_of_one_process_is_refused(place, job):
  workdir, port = place / 'differs', free_port()
  started = [
    subprocess.Popen(
      command_line(
        place, workdir, *ARGS, *joined(i, 2, port), f'--config.checkpoint.every={3 + i}'
      ),
      env=environment(place, 4, JAX_ENABLE_X64=1),
      cwd=place,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for i in range(2)
  ]
  done = finished(started)
  said = "--config.checkpoint.every = '4': is '3' in process 0"
  assert_mistake(done[1], said)
  assert_mistake(done[0], f'process 1 of 2 ended: {said}')
  assert not workdir.exists()


@pytest.mark.slow
def test_other_data_of_one_process_is_refused(place, job):
  homes = [place / name for name in ('home', 'other')]
  for number, home in enumerate(homes):
    (home / 'text').mkdir(parents=True)
    for n in range(9 + number):
      (home / 'text' / f'{n}.txt').write_text(f'module {n}')
  args = ['--config.data.source.files=~/text/*.txt', '--config.data.source.heldout=0']
  each = {i: {'HOME': home} for i, home in enumerate(homes)}
  done = job(place / 'apart', 2, 4, *args, each=each)
  said = r'data.source = .* of 10 documents.* is .* of 9 documents.* in process 0'
  assert re.search(said, done[1].stderr), done[1].stderr
  assert_mistake(done[1], 'let all of them read the same')
  assert_mistake(done[0], 'process 1 of 2 ended: data.source')
