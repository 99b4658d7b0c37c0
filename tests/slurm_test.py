"""launch/slurm.sbatch on a real SLURM of one node: two tasks train, are stopped, go on.

Every task waits at its ninth step for a file, so that what stops it finds it there.
"""

import os
import signal
import sys
import time

import numpy as np
import pytest
from runs import ROOT, environment, lines, saved_steps, summary
from slurm import Slurm

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def slurm(tmp_path_factory):
  cluster = Slurm(tmp_path_factory.mktemp('slurm'))
  yield cluster
  cluster.close()


@pytest.fixture
def submit(slurm, place):
  """Queues launch/slurm.sbatch as two tasks on CPUs."""

  def run(workdir, *args, **env):
    found = environment(place, PYTHONPATH=ROOT, **env)
    said = slurm(
      *('sbatch', '--parsable', '--nodes=1', '--ntasks-per-node=2'),
      *('--cpus-per-task=1', '--gpus-per-node=0', ROOT / 'launch' / 'slurm.sbatch'),
      *(f'--config={place}/small.py', f'--workdir={workdir}', *args),
      env={k: v for k, v in found.items() if os.environ.get(k) != v},
    )
    assert said.strip().isdigit(), said
    return said.strip()

  return run


def tasks(workdir):
  """The processes that train there, by id."""
  found = []
  for entry in os.listdir('/proc'):
    try:
      with open(f'/proc/{entry}/cmdline', 'rb') as file:
        words = file.read().decode().split('\0')
    except (OSError, UnicodeDecodeError):
      continue
    if words[1:3] == ['-m', 'mtpjax.train'] and f'--workdir={workdir}' in words:
      found.append(int(entry))
  return found


def test_a_job_is_stopped_killed_and_goes_on_by_itself(slurm, submit, place, straight):
  workdir, go = place / 'slurm', place / 'go'
  job = submit(workdir, AT=9, SIGNAL=0, AFTER=go, PYTHON=sys.executable)
  log = slurm.folder / f'slurm-{job}.out'
  metrics = workdir / 'metrics.jsonl'

  def at_step(count):
    return metrics.exists() and len(metrics.read_text().splitlines()) >= count

  slurm.until(lambda: at_step(7), 240)  # a step's line is written during the next
  slurm('scancel', '--signal=TERM', job)  # as SLURM itself does before the time is up
  time.sleep(1)
  go.touch()
  slurm.until(lambda: slurm.job(job)['Restarts'] == '1', 240)
  # Processes agree on what they heard with the step after it.
  assert 'SIGTERM: saved step 10' in log.read_text(), log.read_text()
  assert saved_steps(workdir) == [8, 10]
  assert not (workdir / 'summary.json').exists()
  go.unlink()  # so the second run waits at its ninth step, step 19

  slurm.until(lambda: at_step(17), 240)
  os.kill(tasks(workdir)[-1], signal.SIGKILL)
  slurm.until(lambda: slurm.job(job)['Restarts'] == '2', 240)
  go.touch()

  slurm.until(lambda: slurm.job(job)['JobState'] == 'COMPLETED', 240)
  said = log.read_text()
  for step in (10, 16):
    assert f'resuming {workdir} at step {step}' in said
  assert summary(workdir)['conditions']['process_count'] == 2
  found, expected = lines(workdir), lines(straight)
  assert [x['step'] for x in found] == [x['step'] for x in expected]
  for one, other in zip(found, expected, strict=True):
    assert one['counts_by_depth'] == other['counts_by_depth']
    np.testing.assert_allclose(one['loss_by_depth'], other['loss_by_depth'], rtol=1e-5)


def test_a_mistake_is_not_tried_again(slurm, submit, place):
  job = submit(place / 'mistake', '--config.trunk.width=17', PYTHON=sys.executable)
  ended = ('FAILED', 'COMPLETED', 'PENDING')
  slurm.until(lambda: slurm.job(job)['JobState'] == 'RUNNING', 60)
  slurm.until(lambda: slurm.job(job)['JobState'] in ended, 240)
  found = slurm.job(job)
  assert (found['JobState'], found['ExitCode'], found['Restarts']) == (
    'FAILED',
    '2:0',
    '0',
  )
  said = (slurm.folder / f'slurm-{job}.out').read_text()
  assert 'error: trunk.heads = 2: does not divide trunk.width=17' in said
