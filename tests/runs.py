"""Commands in processes of their own: a small config, texts, and what a run wrote."""

import json
import os
import random
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from forks import FLAGS, Forks
from orbax.checkpoint import v1 as ocp

ROOT = Path(__file__).parents[1]
EVERY, STEPS = 8, 20

CONFIG = """
import importlib.util
import os
import time
from typing import Any, Literal

import jax

from mtpjax import checkpoint, config, init_from, optimizers, schedules, step
from mtpjax.data import batches, sources
from mtpjax.drafters import sequential
from mtpjax.models import trunk

# AT=n SIGNAL=s: this process gets signal s as it asks for its n-th batch, once the
# file AFTER is there. NAN_AT=n: its n-th step starts from parameters that are not
# numbers. HANG_AT=n: its n-th batch never comes. FAIL_AT=n: its n-th is an error.
# MISSING: a package that is not there, installed or not.
find = importlib.util.find_spec
importlib.util.find_spec = lambda n: None if n == os.environ.get('MISSING') else find(n)
draw, compile_train = batches.TrainBatches.__next__, step.compile_train
drawn = 0


def draw_counted(self):
  global drawn
  drawn += 1
  if os.environ.get('AT') == str(drawn):
    while not os.path.exists(os.environ.get('AFTER', '/')):
      time.sleep(0.01)
    os.kill(os.getpid(), int(os.environ['SIGNAL']))
  if os.environ.get('HANG_AT') == str(drawn):
    time.sleep(600)
  if os.environ.get('FAIL_AT') == str(drawn):
    raise sources.DataError('a bad row')
  return draw(self)


def compile_spoilt(*args):
  run = compile_train(*args)

  def one(state, arrays):
    if os.environ.get('NAN_AT') == str(drawn):
      state['params'] = jax.tree.map(lambda x: x * float('nan'), state['params'])
    return run(state, arrays)

  return one


batches.TrainBatches.__next__, step.compile_train = draw_counted, compile_spoilt


def get_config(arg: Literal['', 'plain', 'frozen', 'begun', 'skips'] = ''):
  c = config.Config(
    name='small',
    steps=STEPS,
    log_every=1,
    data=batches.Config(
      source=sources.Text(files=('TEXT/*.txt',), heldout=0.3), length=16, batch=8
    ),
    trunk=trunk.Config(width=16, layers=1, heads=2, ffn=32, remat='none'),
    drafter=sequential.Config(depth=2),
    optimizer=optimizers.AdamW(
      rate=schedules.WarmupCosine(peak=1e-2, warmup=5), accumulate=2
    ),
    checkpoint=checkpoint.Config(every=EVERY),
  )
  if arg:
    c.steps, c.optimizer.accumulate = 4, 1
  if arg == 'begun':
    c.init_from = init_from.Config('BEGIN', fresh=('objectives/*',))
  if arg == 'plain':
    c.drafter, c.data.source.heldout = None, 0.0
  if arg == 'skips':
    c.optimizer.skip = optimizers.Spike()
  if arg == 'frozen':
    c.freeze_trunk, c.checkpoint.every = True, 1
  return c
"""

WORDS = ('one', 'module', 'predicts', 'the', 'token', 'after', 'next', 'another')


@pytest.fixture(scope='session')
def start(tmp_path_factory):
  """Runs a command, `train` or another, to its end, on so many devices."""
  folder = tmp_path_factory.mktemp('said')
  forks = Forks(environment(folder), folder)

  def run(command, *args, cwd, devices=1, **env):
    return forks.run(
      f'mtpjax.{command}', args, environment(folder, devices, **env), cwd
    )

  yield run
  forks.close()


@pytest.fixture(scope='session')
def first_place(tmp_path_factory):
  """A folder with texts and the config file."""
  folder = tmp_path_factory.mktemp('first')
  (folder / 'text').mkdir()
  rng = random.Random(0)
  for n in range(60):  # shorter and longer than a row
    text = ' '.join(rng.choices(WORDS, k=rng.randint(1, 7)))
    (folder / 'text' / f'{n}.txt').write_text(text)
  config = CONFIG.replace('TEXT', str(folder / 'text'))
  config = (
    config.replace('STEPS', str(STEPS))
    .replace('EVERY', str(EVERY))
    .replace('BEGIN', str(folder / 'straight'))
  )
  (folder / 'small.py').write_text(config)
  return folder


@pytest.fixture(scope='module')
def place(tmp_path_factory, first_place):
  """The same for a module's own runs: of the very same texts and config."""
  folder = tmp_path_factory.mktemp('train')
  for name in ('text', 'small.py'):
    (folder / name).symlink_to(first_place / name)
  return folder


@pytest.fixture(scope='module')
def train(place, start):
  """Runs the command with that config to its end."""

  def run(workdir, *args, variant='', command='train', **env):
    args = command_line(place, workdir, *args, variant=variant, command=command)[3:]
    return start(command, *args, cwd=place, **env)

  return run


def command_line(place, workdir, *args, variant='', command='train'):
  config = f'{place}/small.py' + (f':{variant}' if variant else '')
  start = [sys.executable, '-m', f'mtpjax.{command}']
  if command == 'train':
    start += [f'--config={config}', f'--workdir={workdir}']
  return [*start, *args]


def environment(place, devices=1, **env):
  """Little is run, so most of the time would go into optimising it. What is compiled is
  kept for all the test files that a worker runs."""
  return {
    **os.environ,
    'JAX_PLATFORMS': 'cpu',
    'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices} '
    f'--xla_backend_optimization_level=0 {FLAGS}',
    'JAX_COMPILATION_CACHE_DIR': str(place.parent / 'cache'),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
    **{name: str(value) for name, value in env.items()},
  }


def free_port():
  with socket.create_server(('', 0)) as server:
    return server.getsockname()[1]


def joined(index, count, port):
  """The flags of one process."""
  return [
    f'--coordinator=127.0.0.1:{port}',
    f'--processes={count}',
    f'--process={index}',
  ]


def finished(started, timeout=60):
  """Each process's exit code, output and errors."""
  done = []
  try:
    for process in started:
      out, errors = process.communicate(timeout=timeout)
      done.append(
        subprocess.CompletedProcess(process.args, process.returncode, out, errors)
      )
  finally:
    for process in started:  # what hangs must not outlive its test
      process.kill()
  return done


def ended_well(done):
  assert done.returncode == 0, done.stderr[-3000:]
  return done


def lines(workdir):
  """The lines of metrics, without what depends on the clock."""
  text = (workdir / 'metrics.jsonl').read_text()
  found = [json.loads(x) for x in text.splitlines()]
  return [{k: v for k, v in x.items() if k != 'tokens_per_second'} for x in found]


def summary(workdir):
  return json.loads((workdir / 'summary.json').read_text())


def saved_steps(workdir, folder='checkpoints'):
  names = [p.name for p in (workdir / folder).iterdir()]
  return sorted(int(name) for name in names if name.isdigit())


def arrays(workdir, step):
  """Every array of a checkpoint by name, as orbax alone reads it."""
  with warnings.catch_warnings():
    warnings.filterwarnings('ignore', 'Sharding info not provided')
    state = ocp.load_checkpointables(workdir / 'checkpoints' / str(step))['state']
  found = {}

  def walk(node, name):
    if isinstance(node, dict):
      for key, child in node.items():
        walk(child, f'{name}/{key}')
    else:
      found[name] = np.asarray(node)

  walk(state, '')
  return found


def assert_same_end(workdir, straight):
  """Bit for bit: parameters, optimiser state and figures."""
  a, b = arrays(workdir, STEPS), arrays(straight, STEPS)
  assert a.keys() == b.keys()
  for name in a:
    assert a[name].dtype == b[name].dtype
    np.testing.assert_array_equal(a[name], b[name], err_msg=name)
  for name in ('loss', 'loss_by_depth', 'agreement_by_depth', 'counts_by_depth'):
    assert summary(workdir)[name] == summary(straight)[name]


@pytest.fixture(scope='session')
def straight(first_place, start):
  """A run of 20 steps that nothing stopped."""
  workdir = first_place / 'straight'
  args = command_line(first_place, workdir)[3:]
  ended_well(start('train', *args, cwd=first_place))
  return workdir


def assert_mistake(done, *said):
  """One line on stderr, code 2, and no traceback."""
  assert done.returncode == 2, (done.returncode, done.stderr[-3000:])
  errors = [x for x in done.stderr.splitlines() if x.startswith('error: ')]
  assert len(errors) == 1, done.stderr
  assert 'Traceback' not in done.stderr
  for text in said:
    assert text in done.stderr, done.stderr
