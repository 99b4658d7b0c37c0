"""Checkpoints: exact, atomic, verified, and never silent about what went wrong."""

import logging
import math
import os
import pathlib
import re
import resource
import shutil
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mtpjax import checkpoint
from mtpjax.checkpoint import CheckpointError, CheckpointMismatchError, Checkpoints
from mtpjax.fields import ConfigError

CONFIG = checkpoint.Config(every=5)
DATA = {'shards': {'0': {'next': 7, 'pack': [1, 2.5, None, 'λ']}}}
METADATA = {'config': {'layers': 2}, 'depths': {'10': 3, '2': None}}


def make_mesh(*shape):
  devices = jax.devices()[: math.prod(shape)]
  return jax.make_mesh(shape, ('data', 'model'), devices=devices)


def make_state(seed=0, layers=2, dtype=jnp.float32):
  def draw(*shape):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype('f4')

  params = {
    'trunk': {'w_LDF': jnp.asarray(draw(layers, 64, 32), dtype)},
    'objectives': {'mtp': {'w_DD': jnp.asarray(draw(8, 8)), 'scale': jnp.float32(3)}},
  }
  # A NaN with a payload, an infinity and a negative zero have to survive bit for bit.
  odd = np.array([0x7FC00123, 0x7F800000, 0x80000000], 'u4').view('f4')
  return {
    'step': jnp.int32(seed),
    'params': params,
    'opt': optax.adamw(1e-3).init(params),
    'half': jnp.asarray(draw(8, 4), jnp.bfloat16),
    'key': jax.random.key_data(jax.random.key(seed)),
    'flags': jnp.array([True, False]),
    'odd': jnp.asarray(odd),
  }


def place(state, mesh):
  """Matrices over both axes of the mesh, the rest on every device."""

  def put(x):
    spec = P(*(None,) * (x.ndim - 2), 'data', 'model') if x.ndim >= 2 else P()
    return jax.device_put(x, NamedSharding(mesh, spec))

  return jax.tree.map(put, state)


def abstract(state):
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
  )


def restore(checkpoints, like, **kwargs):
  """Restores into the shapes and shardings of `like`; something must be there."""
  restored = checkpoints.restore(abstract(like), **kwargs)
  assert restored is not None
  return restored


def assert_same_bits(got, want):
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert (x.dtype, x.shape) == (y.dtype, y.shape)
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def save_steps(directory, steps, config=CONFIG):
  with Checkpoints(directory, config, METADATA) as checkpoints:
    for step in steps:
      checkpoints.save(step, make_state(step), {'at': step})


def names(directory):
  return sorted(path.name for path in pathlib.Path(directory).iterdir())


def test_round_trip_is_exact(tmp_path):
  state = make_state()
  given = METADATA | {'depths': {2: None, 10: 3}}  # JSON has text for keys
  with Checkpoints(tmp_path, CONFIG, given) as checkpoints:
    assert checkpoints.restore(abstract(state)) is None
    assert checkpoints.latest_step() is None
    assert checkpoints.save(5, state, DATA)
    restored = restore(checkpoints, state)
  assert_same_bits(restored.state, state)
  assert type(restored.state['opt'][0]) is type(state['opt'][0])  # ScaleByAdamState
  assert restored[::2] == (5, DATA) and restored.metadata == METADATA
  assert checkpoint.read_metadata(tmp_path) == METADATA


def test_another_mesh_and_back(tmp_path):
  small, large = make_mesh(1, 1), make_mesh(2, 4)
  state = place(make_state(), small)
  with Checkpoints(tmp_path, CONFIG) as checkpoints:
    checkpoints.save(1, state, {})
    spread = restore(checkpoints, place(state, large))
    w = spread.state['params']['trunk']['w_LDF']
    assert w.sharding == NamedSharding(large, P(None, 'data', 'model'))
    assert w.addressable_shards[0].data.shape == (2, 32, 8)
    checkpoints.save(2, spread.state, {})
    back = restore(checkpoints, state)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    alone = restore(checkpoints, shapes)  # without any sharding: on one device
  assert back.step == 2
  assert_same_bits(back.state, state)
  assert_same_bits(alone.state, state)
  assert len(back.state['half'].sharding.device_set) == 1


def test_eval_shape_takes_the_mesh_in_use(tmp_path):
  mesh = make_mesh(2, 4)
  state = place({'params': jnp.arange(64.0).reshape(8, 8)}, mesh)
  shapes = jax.eval_shape(lambda x: x, state)
  with Checkpoints(tmp_path, CONFIG) as checkpoints:
    checkpoints.save(1, state, {}, wait=True)
    with pytest.raises(CheckpointError, match=r'params is sharded.*set_mesh'):
      checkpoints.restore(shapes)
    with jax.set_mesh(mesh):
      restored = restore(checkpoints, shapes)
  assert restored.state['params'].sharding == state['params'].sharding


def test_donating_the_saved_state_is_safe(tmp_path):
  state = {'x': jax.random.normal(jax.random.key(0), (512, 512))}
  want = jax.tree.map(np.array, state)
  spoil = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 + 7, s), donate_argnums=0)
  with Checkpoints(tmp_path, CONFIG) as checkpoints:
    checkpoints.save(1, state, {})
    jax.block_until_ready(spoil(spoil(state)))
    restored = restore(checkpoints, {'x': jax.ShapeDtypeStruct((512, 512), 'float32')})
  assert_same_bits(restored.state, want)


def test_a_part_of_a_state(tmp_path):
  save_steps(tmp_path, [1, 2])
  params = make_state(1)['params']
  reader = Checkpoints(tmp_path)  # writes nothing, needs no config
  before = names(tmp_path)
  older = reader.restore({'params': abstract(params)}, step=1, subset=True)
  assert older is not None
  assert_same_bits(older.state['params'], params)
  rest = {k: x for k, x in abstract(make_state(1)).items() if k != 'params'}
  trunk = {**rest, 'params': {'trunk': abstract(params['trunk'])}}
  with pytest.raises(CheckpointMismatchError, match=r'params/objectives/mtp/w_DD'):
    reader.restore(trunk)
  restored = reader.restore(trunk, subset=True)
  assert restored is not None
  assert restored.step == 2 and restored.data_state == {'at': 2}
  assert_same_bits(restored.state['params']['trunk'], make_state(2)['params']['trunk'])
  with pytest.raises(CheckpointError, match='reading only'):
    reader.save(3, params, {})
  assert names(tmp_path) == before


def oracle_checksum(x):
  """The same sum as a loop over Python integers."""
  words = np.asarray(x).reshape(-1)
  if words.dtype == bool:
    words = words.astype('u4')
  words = words.view(f'u{min(4, words.dtype.itemsize)}').reshape(-1)
  total, mask = 0, 0xFFFFFFFF
  for i, word in enumerate(words):
    h = (int(word) + i * 0x9E3779B9) & mask
    h = ((h ^ h >> 16) * 0x85EBCA6B) & mask
    h = ((h ^ h >> 13) * 0xC2B2AE35) & mask
    total += h ^ h >> 16
  return total & mask


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'int8', 'uint32', 'bool'])
def test_checksum_matches_a_loop_on_any_mesh(dtype):
  x = np.random.default_rng(0).normal(size=(2, 4, 8)).astype(jnp.dtype(dtype))
  want = oracle_checksum(x)
  assert int(checkpoint.checksum(jnp.asarray(x))) == want
  spread = place(jnp.asarray(x), make_mesh(2, 4))
  assert int(jax.jit(checkpoint.checksum)(spread)) == want


def test_checksum_sees_swaps_and_single_bits():
  x = np.arange(1, 65, dtype='f4').reshape(8, 8)
  want = int(checkpoint.checksum(jnp.asarray(x)))
  swaps = [x[::-1], x.T, np.roll(x, 1), np.concatenate([x[:, 4:], x[:, :4]], 1)]
  for bit in range(32):
    flipped = x.copy()
    flipped.view('u4')[3, 5] ^= np.uint32(1 << bit)
    swaps.append(flipped)
  for other in swaps:
    assert int(checkpoint.checksum(jnp.asarray(other))) != want


@pytest.mark.parametrize(
  'other, line',
  [
    ({'layers': 3}, r'w_LDF: float32\[2, 64, 32\] in .* float32\[3, 64, 32\] here'),
    ({'dtype': jnp.bfloat16}, r'w_LDF: float32\[2, .* bfloat16\[2, 64, 32\] here'),
  ],
)
def test_mismatch_names_the_leaves(tmp_path, other, line, caplog):
  save_steps(tmp_path, [5, 10])
  with Checkpoints(tmp_path, CONFIG) as checkpoints:
    with pytest.raises(CheckpointMismatchError, match=rf'params/trunk/{line}'):
      restore(checkpoints, make_state(**other))
    with pytest.raises(CheckpointMismatchError) as error:
      restore(checkpoints, {'params': {'new': jnp.zeros(2)}})
    error.match(r'params/new: absent in the checkpoint, float32\[2\] here')
    error.match(r'odd: float32\[3\] in the checkpoint, absent here')
    assert not caplog.records and checkpoints.steps() == [5, 10]  # no fallback


def data_files(step):
  """The files with the arrays' bytes, the largest first."""
  return sorted(step.glob('state/**/d/*'), key=lambda file: -file.stat().st_size)


def truncate(file):
  os.truncate(file, file.stat().st_size // 2)


def flip(file):
  raw = bytearray(file.read_bytes())
  raw[len(raw) // 2] ^= 4
  file.write_bytes(raw)


def empty(step):
  shutil.rmtree(step)
  step.mkdir()


def other_data_state(step):
  text = (step / RECORD).read_text()
  assert '"at": 10' in text
  (step / RECORD).write_text(text.replace('"at": 10', '"at": 11'))


RECORD = '_CHECKPOINT_METADATA'
DAMAGE = {
  'truncated': (lambda step: truncate(data_files(step)[0]), 'arrays cannot be read'),
  'flipped': (lambda step: flip(data_files(step)[0]), 'saved: params/trunk/w_LDF'),
  'no data': (lambda step: [f.unlink() for f in data_files(step)], 'cannot be read'),
  'no manifest': (lambda step: (step / 'state/manifest.ocdbt').unlink(), 'be read'),
  'no tree': (lambda step: (step / 'state/_METADATA').unlink(), 'cannot be read'),
  'no record': (lambda step: (step / RECORD).unlink(), f'{RECORD} cannot be read'),
  'half a record': (lambda step: truncate(step / RECORD), f'{RECORD} cannot be read'),
  'other data state': (other_data_state, 'changed since it was saved'),
  'empty': (empty, f'{RECORD} cannot be read'),
  'junk': (lambda step: [empty(step), (step / 'notes').touch()], 'cannot be read'),
}


@pytest.mark.parametrize('kind', DAMAGE)
def test_damage_falls_back_loudly(tmp_path, kind, caplog):
  damage, reason = DAMAGE[kind]
  save_steps(tmp_path, [5, 10])
  damage(tmp_path / '10')
  with Checkpoints(tmp_path, CONFIG, METADATA) as checkpoints:
    restored = restore(checkpoints, make_state())
    assert_same_bits(restored.state, make_state(5))
    [line] = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert 'step 10' in line and str(tmp_path) in line and reason in line
    assert checkpoints.latest_step() == restored.step == 5
    with pytest.raises(CheckpointError, match='step 10'):  # asked for, so no fallback
      restore(checkpoints, make_state(), step=10)
    # The run goes on over the damaged step, whose directory is kept aside.
    assert not checkpoints.save(5, make_state(6), {})
    assert checkpoints.save(10, make_state(10), {'at': 10}, wait=True)
    assert_same_bits(restore(checkpoints, make_state()).state, make_state(10))
  assert names(tmp_path)[::2] == ['10', '5']
  assert re.fullmatch(r'10\.damaged-\d+', names(tmp_path)[1])


def test_all_damaged_is_an_error(tmp_path):
  save_steps(tmp_path, [5, 10])
  flip(data_files(tmp_path / '10')[0])
  empty(tmp_path / '5')
  with pytest.raises(CheckpointError, match=r'step 10: .*step 5: ') as error:
    restore(Checkpoints(tmp_path), make_state())
  assert not isinstance(error.value, CheckpointMismatchError)


def test_names_that_are_no_steps_are_ignored(tmp_path):
  save_steps(tmp_path, [5])
  for name in ('0099', '-3', '1e3', '²', '7.tmp', '12.orbax-checkpoint-tmp'):
    (tmp_path / name).mkdir()
  (tmp_path / '77').write_text('a file')
  assert restore(Checkpoints(tmp_path), make_state()).step == 5
  before = set(names(tmp_path))
  save_steps(tmp_path, [6])  # a run deletes what a killed one left, and nothing else
  assert set(names(tmp_path)) == before - {'12.orbax-checkpoint-tmp'} | {'6'}


def test_keep_policy(tmp_path):
  save_steps(tmp_path, range(1, 10), checkpoint.Config(every=1, keep=2, keep_every=3))
  assert names(tmp_path) == ['3', '6', '8', '9']
  (tmp_path / '11').mkdir()  # junk takes no place among the newest
  save_steps(tmp_path, [10], checkpoint.Config(every=1, keep=2))
  assert names(tmp_path) == ['10', '11', '9']
  save_steps(tmp_path / 'all', range(4), checkpoint.Config(every=1, keep=9))
  assert names(tmp_path / 'all') == ['0', '1', '2', '3']  # none skipped as too early


def test_what_a_run_may_go_back_to_stays(tmp_path):
  state = {'x': jnp.arange(4.0)}
  every = checkpoint.Config(every=1, keep=1)
  saved = Checkpoints(tmp_path / 'saved', every)
  best = Checkpoints(tmp_path / 'best', every, behind=saved)
  for step in (3, 6):
    best.save(step, state, {}, wait=True)
  assert best.steps() == [6]
  saved.save(8, state, {}, wait=True)
  for step in (9, 10):
    best.save(step, state, {}, wait=True)
  assert best.steps() == [6, 10]
  best.forget_after(8)
  assert best.steps() == [6]
  best.save(11, state, {}, wait=True)
  saved.save(12, state, {}, wait=True)
  best.prune()
  assert best.steps() == [11]


def test_a_step_that_is_there_stays_and_older_ones_are_refused(tmp_path):
  save_steps(tmp_path, [5, 10])
  with Checkpoints(tmp_path, CONFIG, METADATA) as checkpoints:
    assert not checkpoints.save(10, make_state(1), {})
    with pytest.raises(CheckpointError, match=r'saving step 7 .* step 10 is there'):
      checkpoints.save(7, make_state(1), {})
    assert_same_bits(restore(checkpoints, make_state()).state, make_state(10))


@pytest.mark.parametrize('field', ['every', 'keep', 'keep_every'])
def test_config_is_checked(tmp_path, field):
  config = checkpoint.Config(every=1)
  setattr(config, field, 0)
  with pytest.raises(ConfigError, match=rf'checkpoint\.{field} = 0: .*at least 1'):
    Checkpoints(tmp_path, config)


def test_unwritable_directory_is_named(tmp_path):
  (tmp_path / 'file').write_text('')
  directory = tmp_path / 'file' / 'checkpoints'
  with pytest.raises(CheckpointError, match=f'cannot write .* in {directory}: '):
    Checkpoints(directory, CONFIG)


@pytest.fixture
def break_writes():
  """Makes the system refuse files of more than 4 KiB, as a full disk does."""
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)

  def switch(on):
    soft = 1 << 12 if on else limits[0]
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, limits[1]))

  yield switch
  switch(False)


@pytest.mark.parametrize('where', ['next save', 'close', 'wait'])
def test_background_failure_surfaces(tmp_path, break_writes, where):
  checkpoints = Checkpoints(tmp_path, CONFIG, METADATA)
  checkpoints.save(5, make_state(5), {'at': 5}, wait=True)
  break_writes(True)
  message = rf'step 10 in {tmp_path} .*File too large.* there: \[5\]'
  with pytest.raises(CheckpointError, match=message):
    checkpoints.save(10, make_state(), {}, wait=where == 'wait')
    if where == 'next save':
      checkpoints.save(15, make_state(15), {})
    checkpoints.close()
  break_writes(False)
  assert restore(checkpoints, make_state()).step == 5
  checkpoints.save(15, make_state(15), {})
  checkpoints.close()
  assert names(tmp_path) == ['15', '5']  # the failed save left nothing


def test_an_error_under_way_is_not_hidden(tmp_path, break_writes, caplog):
  break_writes(True)
  with pytest.raises(ZeroDivisionError), Checkpoints(tmp_path, CONFIG) as checkpoints:
    checkpoints.save(1, make_state(), {})
    raise ZeroDivisionError
  assert any('saving step 1' in r.getMessage() for r in caplog.records)


def test_what_cannot_be_saved_is_named(tmp_path):
  with Checkpoints(tmp_path, CONFIG) as checkpoints:
    with pytest.raises(CheckpointError, match='leaf a/1 is a float'):
      checkpoints.save(1, {'a': (jnp.ones(2), 3.0)}, {})
    with pytest.raises(CheckpointError, match=r'leaf k is a key<fry>.*key_data'):
      checkpoints.save(1, {'k': jax.random.key(0)}, {})
    for wrong in ({'x': {1, 2}}, {'x': float('nan')}):
      with pytest.raises(CheckpointError, match='not JSON'):
        checkpoints.save(1, {'a': jnp.ones(2)}, wrong)
    assert checkpoints.steps() == []


def test_no_checkpoint_says_what_was_looked_for(tmp_path):
  with pytest.raises(CheckpointError, match='not a directory'):
    checkpoint.read_metadata(tmp_path / 'nowhere')
  (tmp_path / 'config.json').write_text('{}')
  with pytest.raises(CheckpointError, match=r'such as 1000/.*found: config\.json'):
    checkpoint.read_metadata(tmp_path)
  assert Checkpoints(tmp_path).restore({}) is None
  save_steps(tmp_path, [5])
  with pytest.raises(CheckpointError, match=r'directory 6/ .*found: 5, config\.json'):
    Checkpoints(tmp_path).restore({}, step=6)


KILLED = """
  import sys
  import jax, jax.numpy as jnp
  from mtpjax import checkpoint
  state = {'params': jnp.zeros((256, 256)), 'step': jnp.int32(0)}
  with checkpoint.Checkpoints(sys.argv[1], checkpoint.Config(every=1, keep=2)) as saved:
    restored = saved.restore(state)
    state = restored.state if restored else state
    for step in range(int(state['step']) + 1, 1000):
      state = {'params': state['params'] + 1, 'step': jnp.int32(step)}
      saved.save(step, state, {'step': step})
      print(step, flush=True)
"""


def run_until_killed(directory, delay):
  """Kills a run `delay` s after its third save began; returns the steps it began."""
  command = [sys.executable, '-c', textwrap.dedent(KILLED), str(directory)]
  pipe = subprocess.PIPE
  with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
    assert process.stdout is not None and process.stderr is not None
    lines = [process.stdout.readline() for _ in range(3)]
    time.sleep(delay)
    process.kill()
    lines += process.stdout.readlines()
    assert process.stderr.read() == ''  # no noise, whatever the last run left behind
  return [int(line) for line in lines if line.endswith('\n')]


@pytest.mark.parametrize(
  'delays', [[0.001], pytest.param(np.linspace(0, 0.06, 16), marks=pytest.mark.slow)]
)
def test_killed_while_saving(tmp_path, delays):
  like = {'params': jnp.zeros((256, 256)), 'step': jnp.int32(0)}
  at = 0
  for delay in delays:
    begun = run_until_killed(tmp_path, delay)
    assert begun[0] == at + 1  # the next run went on from what was restored
    restored = restore(Checkpoints(tmp_path), like)
    at = restored.step
    # The save that was under way may be lost, none before it; a save may be whole that
    # the killed process could not speak of any more.
    assert begun[-1] - 1 <= at <= begun[-1] + 1
    assert restored.data_state == {'step': at} and int(restored.state['step']) == at
    assert np.all(np.asarray(restored.state['params']) == at)
