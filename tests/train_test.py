"""The train command in processes of its own: what it writes, and that nothing which
stops it changes what it learns.

The config file can stop its own process at an exact batch, and spoil one, so what is
tested does not depend on how fast the machine is.
"""

import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp
from tensorboardX.proto import event_pb2

from mtpjax import fields

ROOT = Path(__file__).parents[1]
EVERY, STEPS = 8, 20

CONFIG = """
import os
import time
from typing import Any, Literal

import jax

from mtpjax import checkpoint, config, schedules, step
from mtpjax.data import batches, sources
from mtpjax.drafters import sequential
from mtpjax.models import trunk

# AT=n SIGNAL=s: this process gets signal s as it asks for its n-th batch, once the
# file AFTER is there. NAN_AT=n: its n-th step starts from parameters that are not
# numbers.
draw, compile_train = batches.TrainBatches.__next__, step.compile_train
drawn = 0


def draw_counted(self):
  global drawn
  drawn += 1
  if os.environ.get('AT') == str(drawn):
    while not os.path.exists(os.environ.get('AFTER', '/')):
      time.sleep(0.01)
    os.kill(os.getpid(), int(os.environ['SIGNAL']))
  return draw(self)


def compile_spoilt(*args):
  run = compile_train(*args)

  def one(state, arrays):
    if os.environ.get('NAN_AT') == str(drawn):
      state['params'] = jax.tree.map(lambda x: x * float('nan'), state['params'])
    return run(state, arrays)

  return one


batches.TrainBatches.__next__, step.compile_train = draw_counted, compile_spoilt


def get_config(arg: Literal['', 'plain', 'frozen'] = ''):
  c = config.Config(
    name='small',
    steps=STEPS,
    log_every=1,
    data=batches.Config(
      source=sources.Text(files=('TEXT/*.txt',), heldout=0.3), length=16, batch=8
    ),
    trunk=trunk.Config(width=16, layers=1, heads=2, ffn=32, remat='none'),
    drafter=sequential.Config(depth=2),
    optimizer=step.OptimizerConfig(
      rate=schedules.WarmupCosine(peak=1e-2, warmup=5), accumulate=2
    ),
    checkpoint=checkpoint.Config(every=EVERY),
  )
  if arg:
    c.steps, c.optimizer.accumulate = 4, 1
  if arg == 'plain':
    c.drafter, c.data.source.heldout = None, 0.0
  if arg == 'frozen':
    c.freeze_trunk, c.checkpoint.every = True, 1
  return c
"""

WORDS = ('one', 'module', 'predicts', 'the', 'token', 'after', 'next', 'another')


@pytest.fixture(scope='module')
def place(tmp_path_factory):
  """A folder with texts and the config file; compiled programs are kept there too."""
  folder = tmp_path_factory.mktemp('train')
  (folder / 'text').mkdir()
  rng = random.Random(0)
  for n in range(60):  # shorter and longer than a row
    text = ' '.join(rng.choices(WORDS, k=rng.randint(1, 7)))
    (folder / 'text' / f'{n}.txt').write_text(text)
  config = CONFIG.replace('TEXT', str(folder / 'text'))
  config = config.replace('STEPS', str(STEPS)).replace('EVERY', str(EVERY))
  (folder / 'small.py').write_text(config)
  return folder


@pytest.fixture(scope='module')
def train(place):
  """Runs the command to its end."""

  def run(workdir, *args, variant='', devices=1, command='train', **env):
    return subprocess.run(
      command_line(place, workdir, *args, variant=variant, command=command),
      env=environment(place, devices, **env),
      cwd=place,
      capture_output=True,
      text=True,
      timeout=300,
    )

  return run


def command_line(place, workdir, *args, variant='', command='train'):
  config = f'{place}/small.py' + (f':{variant}' if variant else '')
  start = [sys.executable, '-m', f'mtpjax.{command}']
  if command == 'train':
    start += [f'--config={config}', f'--workdir={workdir}']
  return [*start, *args]


def environment(place, devices=1, **env):
  return {
    **os.environ,
    'JAX_PLATFORMS': 'cpu',
    # Little is run, so most of the time would go into optimising it.
    'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices} '
    '--xla_backend_optimization_level=0',
    'JAX_COMPILATION_CACHE_DIR': str(place / f'cache-{devices}'),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
    **{name: str(value) for name, value in env.items()},
  }


def ended_well(done):
  assert done.returncode == 0, done.stderr[-3000:]
  return done


def lines(workdir):
  """The lines of metrics, without what depends on the clock."""
  found = [json.loads(x) for x in (workdir / 'metrics.jsonl').read_text().splitlines()]
  return [{k: v for k, v in x.items() if k != 'tokens_per_second'} for x in found]


def summary(workdir):
  return json.loads((workdir / 'summary.json').read_text())


def saved_steps(workdir):
  names = [p.name for p in (workdir / 'checkpoints').iterdir()]
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


@pytest.fixture(scope='module')
def straight(place, train):
  """A run of 20 steps that nothing stopped."""
  ended_well(train(place / 'straight'))
  return place / 'straight'


# ------------------------------------------------------------------------------ output


def events(workdir):
  """{(tag, step): value} of the TensorBoard files: length, CRC, record, CRC."""
  found = {}
  for path in sorted((workdir / 'tensorboard').iterdir()):
    data, at = path.read_bytes(), 0
    while at < len(data):
      (length,) = struct.unpack_from('<Q', data, at)
      record = data[at + 12 : at + 12 + length]
      event: Any = event_pb2
      event = event.Event.FromString(record)  # the class is made at run time
      at += 12 + length + 4
      for value in event.summary.value:
        found[value.tag, event.step] = value.simple_value
  return found


def test_a_run_writes_everything_that_people_and_programs_read(straight):
  names = {p.name for p in straight.iterdir()}
  assert names == {
    *('config.json', 'metrics.jsonl', 'tensorboard', 'checkpoints'),
    *('loss.png', 'summary.json'),
  }
  config = fields.from_json(json.loads((straight / 'config.json').read_text()))
  assert config.trunk.vocab == 256
  assert config.steps == STEPS
  *trained, heldout = lines(straight)
  assert [x['step'] for x in trained] == list(range(1, STEPS + 1))
  assert heldout['step'] == STEPS
  assert heldout['split'] == 'heldout'
  for line in trained:
    assert len(line['loss_by_depth']) == 3
    assert line['loss_by_depth'][0] > 0
  assert trained[-1]['loss'] < trained[0]['loss'] - 0.5  # it learns
  image = matplotlib.image.imread(straight / 'loss.png')
  assert image.std() > 0.01


def test_events_are_the_lines_of_metrics(straight):
  found = events(straight)
  for line in lines(straight):
    split = line.get('split', 'train')
    for depth, loss in enumerate(line['loss_by_depth']):
      assert found[f'{split}/loss_by_depth/{depth}', line['step']] == np.float32(loss)


def test_a_step_total_is_the_next_token_and_weighted_depths(straight):
  for line in lines(straight)[:-1]:
    main, *depths = line['loss_by_depth']
    total = main + line['lambda']['drafter'] * np.mean(depths)
    np.testing.assert_allclose(line['loss'], total, rtol=1e-5)


def test_the_rate_warms_up_over_five_steps_and_falls_to_a_tenth(straight):
  rates = [x['learning_rate'] for x in lines(straight)[:-1]]
  np.testing.assert_allclose(rates[:5], 1e-2 * np.arange(1, 6) / 5, rtol=1e-6)
  done = (np.arange(5, STEPS) - 5) / (STEPS - 5)
  fall = 0.1 + 0.9 * (1 + np.cos(np.pi * done)) / 2
  np.testing.assert_allclose(rates[5:], 1e-2 * fall, rtol=1e-5)


def test_the_summary_says_what_was_learnt_how_fast_and_on_what(straight):
  found = summary(straight)
  heldout = lines(straight)[-1]
  for name in ('loss', 'loss_by_depth', 'agreement_by_depth', 'counts_by_depth'):
    assert found[name] == heldout[name]
  assert found['train_loss_by_depth'] == lines(straight)[-2]['loss_by_depth']
  assert 0 < found['compile_seconds'] < found['seconds']
  params = {n: x for n, x in arrays(straight, STEPS).items() if n.startswith('/params')}
  assert found['parameters'] == sum(x.size for x in params.values())
  # Its steps took less time than everything, so they were faster than that.
  trained = sum(x['counts_by_depth'][0] for x in lines(straight)[:-1])
  assert found['tokens_per_second'] > trained / found['seconds']
  mtp = found['mtp']
  assert mtp['kind'] == 'sequential'
  assert mtp['modules'] == 1
  assert mtp['shared'] == ['embedding', 'head', 'module']
  assert 't[i+k]' in mtp['teacher_forcing_inputs']
  for name in (
    *('depth', 'share', 'hidden_norm', 'chain_norm', 'hidden_source', 'concat'),
    *('attend', 'detach', 'zero_first_embedding', 'block'),
  ):
    assert name in mtp
  conditions = found['conditions']
  assert conditions['device_count'] == 1
  assert conditions['mesh'] == dict.fromkeys(
    ('replica', 'fsdp', 'tensor', 'context', 'expert'), 1
  )
  assert {'jax', 'flax', 'python', 'device', 'date'} <= set(conditions)


def test_the_last_step_is_always_saved(straight):
  assert saved_steps(straight) == [8, 16, 20]


# -------------------------------------------------------------------- stop and go on


def test_sigterm_saves_exits_0_and_the_run_goes_on_bit_for_bit(place, train, straight):
  # Steps 7 and 13, a line every 4 steps: lines stand for the same steps as in one go.
  workdir, args = place / 'stopped', ['--config.log_every=4']
  stopped = ended_well(train(workdir, *args, AT=7, SIGNAL=signal.SIGTERM))
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
  name = 'train_loss_by_depth'
  assert summary(workdir)[name] == summary(straight)[name]


def test_a_loss_that_is_no_number_ends_the_run_and_is_never_saved(
  place, train, straight
):
  workdir = place / 'spoilt'
  done = train(workdir, NAN_AT=16)  # a step at which a checkpoint is due
  assert_mistake(done, 'step 16: loss is nan', 'optimizer.rate.peak')
  assert saved_steps(workdir) == [8]
  assert lines(workdir) == lines(straight)[:15]
  good, expected = arrays(workdir, 8), arrays(straight, 8)
  for name, x in good.items():
    np.testing.assert_array_equal(x, expected[name])


# ---------------------------------------------------------------------------- mistakes


def assert_mistake(done, *said):
  """One line on stderr, code 2, and no traceback."""
  assert done.returncode == 2, (done.returncode, done.stderr[-3000:])
  errors = [x for x in done.stderr.splitlines() if x.startswith('error: ')]
  assert len(errors) == 1, done.stderr
  assert 'Traceback' not in done.stderr
  for text in said:
    assert text in done.stderr, done.stderr


@pytest.mark.parametrize(
  ('args', 'said'),
  [
    (['--config.stpes=5'], ('stpes', "did you mean 'steps'?")),
    (['--config.steps=many'], ('steps', "'many'", 'a whole number')),
    (['--config.optimizer.accumulate=16'], ('data.batch = 8', 'such as 16')),
    (['--config.trunk.vocab=100'], ('trunk.vocab = 100', 'at least 256')),
    (['--config.data.source.files=nowhere/*'], ("'nowhere/*'", 'matches no file')),
  ],
)
def test_a_mistake_ends_the_run_before_anything_is_compiled_or_written(
  place, train, tmp_path, args, said
):
  done = train(tmp_path / 'run', *args)
  assert_mistake(done, *said)
  assert 'compiling' not in done.stdout
  assert not (tmp_path / 'run').exists()


def test_a_directory_that_cannot_be_written_is_named_before_anything_is_compiled(
  place, train, straight, tmp_path
):
  (tmp_path / 'file').write_text('')
  done = train(tmp_path / 'file' / 'run')
  assert_mistake(done, f'{tmp_path}/file/run', 'choose another directory')
  assert 'compiling' not in done.stdout
  shutil.copy(straight / 'config.json', tmp_path)
  (tmp_path / 'file').rename(tmp_path / 'checkpoints')
  done = train(tmp_path)
  assert_mistake(done, f'{tmp_path}/checkpoints', 'choose another directory')
  assert 'compiling' not in done.stdout


def test_a_used_directory_is_refused_for_another_run(place, train, straight):
  before = {p: p.stat().st_mtime_ns for p in straight.rglob('*')}
  done = train(straight, '--config.steps=21', '--config.drafter.depth=3')
  assert_mistake(done, 'steps: 20 → 21', 'drafter.depth: 2 → 3', 'another directory')
  assert 'compiling' not in done.stdout
  assert {p: p.stat().st_mtime_ns for p in straight.rglob('*')} == before


# -------------------------------------------------------------------- other objectives


def test_plain_pretraining_without_held_out_data_ends_well(place, train):
  workdir = place / 'plain'
  done = ended_well(train(workdir, variant='plain'))
  assert 'held out: nothing' in done.stdout
  found = summary(workdir)
  assert found['loss'] is None
  assert found['counts_by_depth'] == found['agreement_by_depth'] == []
  assert found['mtp']['modules'] == 0
  assert [x['step'] for x in lines(workdir)] == [1, 2, 3, 4]
  assert all(len(x['loss_by_depth']) == 1 for x in lines(workdir))
  assert found['train_loss_by_depth'] == lines(workdir)[-1]['loss_by_depth']
  assert (workdir / 'loss.png').stat().st_size > 1000


@pytest.mark.slow
def test_a_frozen_trunk_stays_bit_for_bit_and_has_no_optimiser_state(place, train):
  workdir = place / 'frozen'
  ended_well(train(workdir, variant='frozen'))
  first, last = arrays(workdir, 2), arrays(workdir, 4)
  moved = {n for n in first if not np.array_equal(first[n], last[n])}
  assert not [n for n in moved if n.startswith('/params/trunk')]
  drafter = {n for n in first if n.startswith('/params/objectives')}
  assert drafter <= moved
  assert not [n for n in first if n.startswith('/opt') and '/trunk/' in n]
  assert [n for n in first if n.startswith('/opt') and '/objectives/' in n]


# -------------------------------------------------------------------------------- slow


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
  ended_well(train(workdir, **stop))
  done = ended_well(train(workdir, *mesh, devices=8, **stop))
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
  assert process.returncode == 0
  assert 'SIGTERM: saved step 1' in rest
  assert saved_steps(workdir) == [1]
  ended_well(train(workdir))
  assert lines(workdir) == lines(straight)


@pytest.mark.slow
def test_too_high_a_rate_ends_the_run_naming_the_step(place, train):
  workdir = place / 'rate'
  args = ['--config.optimizer.rate.peak=1e30', '--config.checkpoint.every=1']
  done = train(workdir, *args)
  assert_mistake(done, ': loss is nan', 'lower optimizer.rate.peak')
  step = int(done.stderr.partition('error: step ')[2].partition(':')[0])
  assert saved_steps(workdir) == list(range(1, step))
  assert all(np.isfinite(x).all() for x in arrays(workdir, step - 1).values())


@pytest.mark.slow
def test_changed_texts_are_refused_when_a_run_goes_on(place, train, tmp_path):
  shutil.copytree(place / 'text', tmp_path / 'text')
  args = [f'--config.data.source.files={tmp_path}/text/*.txt']
  ended_well(train(tmp_path / 'run', *args, AT=2, SIGNAL=signal.SIGTERM))
  for path in (tmp_path / 'text').iterdir():
    path.write_text(path.read_text() + '!')
  done = train(tmp_path / 'run', *args)
  assert_mistake(done, 'other documents')
  assert 'compiling' not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
  'path', sorted(p.stem for p in (ROOT / 'configs').glob('*.py'))
)
def test_every_tiny_config_runs_from_its_command_to_its_summary(place, path, tmp_path):
  done = subprocess.run(
    [sys.executable, '-m', 'mtpjax.train', f'--config={ROOT}/configs/{path}.py:tiny'],
    env=environment(place),
    cwd=tmp_path,
    capture_output=True,
    text=True,
  )
  ended_well(done)
  workdir = tmp_path / 'runs' / f'{path}-tiny'
  losses = [x['loss'] for x in lines(workdir) if 'split' not in x]
  assert losses[-1] < losses[0]
  assert f'python -m mtpjax.evaluate --checkpoint=runs/{path}-tiny' in done.stdout
