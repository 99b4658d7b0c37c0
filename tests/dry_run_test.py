"""--dry_run: what it counts, against arrays that are really there, and what it leaves
alone."""

import json
import subprocess
import sys
from typing import Any

import jax
import pytest
from runs import ROOT, assert_mistake, ended_well, environment

from mtpjax import config as configs
from mtpjax import dry_run, mesh, model, step
from mtpjax.drafters import sequential
from mtpjax.fields import ConfigError
from mtpjax.models import trunk

SHAPE: Any = {'width': 32, 'layers': 2, 'heads': 4, 'kv_heads': 2, 'ffn': 64}


@pytest.fixture(scope='module')
def measured():
  """On 8 devices: what is found, and the state and the batch themselves."""
  with jax.set_mesh(mesh.make(mesh.Config(fsdp=4, tensor=2))):
    config = configs.Config(drafter=sequential.Config(depth=2))
    config.trunk = trunk.Config(vocab=64, **SHAPE)
    config.data.length, config.data.batch = 16, 8
    configs.finalize(config)
    found = dry_run.measure(config)
    _, _, make = model.init(config.trunk, config.parts(), 0)
    state = jax.jit(lambda p: step.init_state(p, config))(make())
    return found, state


def on_one_device(tree):
  return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.slow
def test_memory_by_kind_is_what_arrays_take_on_a_device(measured):
  found, state = measured
  memory = found['memory']
  assert memory['parameters'] == on_one_device(state['params'])
  assert memory['optimizer'] == on_one_device((state['opt'], state['step']))
  assert memory['batch'] == 8 // 4 * 16 * (3 * 4 + 1)
  # All of the state is updated in place, and XLA holds no other argument.
  assert memory['donated'] == on_one_device(state)
  kinds = ('parameters', 'optimizer', 'batch', 'temporaries', 'outputs', 'code')
  assert memory['total'] == sum(memory[kind] for kind in kinds)
  assert memory['temporaries'] > 0
  assert memory['limit'] is None  # a CPU has none of its own


@pytest.mark.slow
def test_parameters_by_part(measured):
  found, state = measured
  count = found['parameters']
  sizes = {
    name: sum(x.size for x in jax.tree.leaves(tree))
    for name, tree in state['params'].items()
  }
  assert count['trunk'] == sizes['trunk']
  assert count['objectives'] == {'drafter': sizes['objectives']}
  assert count['total'] == count['trainable'] == sum(sizes.values())


@pytest.mark.slow
def test_what_devices_repeat_counts_as_often(measured):
  per_token = measured[0]['flops_per_token']
  assert per_token['compiled'] > per_token['model']  # full remat
  assert measured[0]['not_counted'] == {}


@pytest.fixture
def dry(place):
  """The command on a preset whose data is nowhere, in a directory of its own."""

  def run(*args, devices=1):
    command = [sys.executable, '-m', 'mtpjax.train', '--dry_run']
    command += [f'--config={ROOT}/configs/presets.py:135m', '--workdir=dry', *args]
    done = subprocess.run(
      command,
      env=environment(place, devices),
      cwd=place,
      capture_output=True,
      text=True,
      timeout=300,
    )
    assert not (place / 'dry').exists()
    return done

  return run


@pytest.mark.slow
def test_the_command_says_what_a_step_takes_and_leaves_everything_alone(dry, place):
  done = ended_well(dry('--json=dry.json', devices=2))
  found = json.loads((place / 'dry.json').read_text())
  assert found['conditions']['mesh']['fsdp'] == 2
  assert found['parameters']['trunk'] == 134_515_008
  plain, more = found['depth_0'], found['mtp_overhead']
  assert plain['parameters']['total'] == found['parameters']['trunk']
  for name, (kind, key) in {
    'parameters': ('parameters', 'total'),
    'model_flops': ('flops_per_token', 'model'),
    'compiled_flops': ('flops_per_token', 'compiled'),
    'memory': ('memory', 'total'),
  }.items():
    assert more[name] == pytest.approx(found[kind][key] / plain[kind][key] - 1)
  # A module beside 30 layers: a block, a pair projection, the head once more.
  block = 576 * 64 * (2 * 9 + 2 * 3) + 3 * 576 * 1536 + 2 * 2048 * 9 * 64
  head, join = 576 * 49_152, 2 * 576 * 576
  assert more['model_flops'] == pytest.approx(
    (block + join + head) / (30 * block + head), rel=1e-3
  )
  for word in ('parameters', 'GiB a device', 'FLOPs a token', 'over depth 0'):
    assert word in done.stdout
  assert 'on 2 × cpu, fsdp 2' in done.stdout


@pytest.mark.slow
def test_a_frozen_trunk_has_no_depth_0_to_compare_with(dry):
  done = ended_well(dry('--config.freeze_trunk=true', '--topology=cpu:4'))
  assert 'over depth 0' not in done.stdout
  assert ' train\n' in done.stdout
  assert 'on 4 × cpu, fsdp 4' in done.stdout


@pytest.mark.slow
def test_what_cannot_run_ends_as_in_training(dry):
  assert_mistake(dry('--config.data.batch=500'), 'data.batch=500')
  assert_mistake(dry('--topology=cpu:3'), 'data.batch = 512', 'mesh.fsdp')


def test_what_does_not_fit_into_a_device_is_said_without_a_traceback(monkeypatch):
  def compile_train(*_):
    said = 'Ran out of memory on HBM: 521G exceed 15.75G.'
    raise jax.errors.JaxRuntimeError(f'RESOURCE_EXHAUSTED: {said}')

  monkeypatch.setattr(step, 'compile_train', compile_train)
  config = configs.Config(trunk=trunk.Config(vocab=64, **SHAPE))
  with jax.set_mesh(mesh.make(mesh.Config(fsdp=4, tensor=2))):
    configs.finalize(config)
    with pytest.raises(ConfigError, match=r"mesh = '.*fsdp 4.*521G.*accumulate"):
      dry_run.measure(config)


def test_tpus_that_are_not_here_take_libtpu(monkeypatch):
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
  with pytest.raises(ConfigError, match=r'--topology = .*libtpu.*jax\[tpu\]'):
    dry_run.topology('v5e:2x2')


@pytest.mark.parametrize('name', ['v5e:2x3', 'v9:2x2'])
def test_a_slice_that_is_none_is_refused(name):
  with pytest.raises(ConfigError, match=r'--topology = '):
    dry_run.topology(name)


@pytest.mark.parametrize(
  'name',
  ['', 'cpu', 'cpu:many', 'cpu:0', 'cpu:²', 'cpu:2x2', 'cpu:99999', 'v5p:3x', 'v5p:0'],
)
def test_so_is_what_is_not_written_as_one_and_needs_nothing_to_be_seen(
  name, monkeypatch
):
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
  with pytest.raises(ConfigError, match=r'--topology = .* is no .*cpu:64'):
    dry_run.topology(name)
