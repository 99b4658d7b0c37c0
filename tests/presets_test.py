"""Presets: parameters as published, meshes over which everything divides, and states
that leave room. Everything is abstract: no device, no array."""

import functools
import importlib.util
import math
import typing
from pathlib import Path

import jax
import pytest

from mtpjax import config as configs
from mtpjax import dry_run, mesh, model, step
from mtpjax.models import trunk as trunks

FILE = Path(__file__).parents[1] / 'configs' / 'presets.py'
spec = importlib.util.spec_from_file_location('presets', FILE)
assert spec is not None and spec.loader is not None
presets = importlib.util.module_from_spec(spec)
spec.loader.exec_module(presets)

# Of the models whose shapes they are: the files' own tensors, counted by their authors.
PUBLISHED = {
  '135m': 134_515_008,
  '360m': 361_821_120,
  '1b': 1_235_814_400,
  '3b': 3_212_749_824,
  '7b': 6_738_415_616,
  '8b': 8_030_261_248,
  '14b': 14_768_307_200,
  '32b': 32_762_123_264,
  '70b': 70_553_706_496,
}
GIB = 2**30
# Of a chip, GiB, as the vendors give them in GB or a little less.
MEMORY = {'v5p': 95, 'v6e': 31.25, 'h100': 79, 'h200': 139}
VARIANTS = typing.get_args(typing.get_type_hints(presets.get_config)['arg'])
SPLIT = [arg for arg in VARIANTS if '-' in arg]


def on(sizes: mesh.Config):
  """A mesh of that many chips, none of which is here."""
  axes = tuple(getattr(sizes, axis) for axis in mesh.AXES)
  kinds = (jax.sharding.AxisType.Explicit,) * len(axes)
  return jax.sharding.use_abstract_mesh(
    jax.sharding.AbstractMesh(axes, mesh.AXES, kinds)
  )


def size(tree):
  return sum(x.size for x in jax.tree.leaves(tree))


@functools.cache
def counts(arg):
  """Of the trunk and of its drafter."""
  config = presets.get_config(arg)
  with on(mesh.Config(fsdp=1)):
    configs.finalize(config)
    _, params, _ = model.init(config.trunk, config.parts(), 0)
  return size(params['trunk']), size(params['objectives']['drafter'])


@pytest.mark.parametrize(('arg', 'published'), PUBLISHED.items())
def test_a_trunk_has_the_parameters_of_the_model_it_is_shaped_as(arg, published):
  trunk, drafter = counts(arg)
  assert trunk == published
  c = presets.get_config(arg).trunk
  with on(mesh.Config(fsdp=1)):
    c.finalize()
  D, C = c.width, c.head_width
  attention = D * C * (2 * c.heads + 2 * c.kv_heads) + (2 * C if c.qk_norm else 0)
  block = attention + 3 * D * c.ffn + 2 * D
  # DeepSeek-V3's module: two norms, a pair projection, a block, a norm.
  assert drafter == 2 * D + 2 * D * D + block + D


def test_four_parallel_heads_have_the_parameters_of_one():
  trunk, heads = counts('7b_n4')
  assert trunk + heads == PUBLISHED['7b']
  assert heads == 3 * (4 * 4096**2 + 3 * 4096 * 11_008 + 2 * 4096)
  config = presets.get_config('7b_n4')
  assert config.drafter.needs(config.trunk).layers_given_up == 3


def test_every_size_has_a_mesh_of_every_kind_of_chip():
  sizes = typing.get_args(presets.Size)
  every = {f'{s}-{chips}' for s in sizes for chips in presets.MESHES[s]}
  assert set(VARIANTS) == {'', 'tiny', *sizes, *every}
  for s in sizes:
    assert {chips.partition('-')[0] for chips in presets.MESHES[s]} == set(MEMORY)
    # 20 tokens a parameter.
    run = presets.RUNS[s]
    tokens = run.steps * run.batch * run.length
    assert tokens == pytest.approx(20 * PUBLISHED[s.partition('_')[0]], rel=0.05)


@pytest.mark.parametrize('arg', SPLIT)
def test_a_mesh_has_the_chips_of_its_name_and_everything_divides_over_it(arg):
  config = presets.get_config(arg)
  axes = [getattr(config.mesh, axis) for axis in mesh.AXES]
  assert math.prod(axes) == int(arg.rpartition('-')[2])
  with on(config.mesh):
    configs.finalize(config)
  chip = arg.split('-')[1]
  if chip.startswith('h'):  # nodes of eight
    assert config.mesh.tensor in (1, 2, 4, 8)
    assert config.mesh.fsdp * config.mesh.tensor % 8 == 0
  else:  # slices
    assert config.mesh.fsdp * config.mesh.tensor <= {'v5p': 4096, 'v6e': 256}[chip]
    assert config.mesh.tensor <= 4


@pytest.mark.parametrize('arg', SPLIT)
def test_states_and_activations_leave_room_in_a_chip(arg):
  config = presets.get_config(arg)
  with on(config.mesh):
    configs.finalize(config)
    _, params, _ = model.init(config.trunk, config.parts(), 0)
    state = jax.eval_shape(lambda params: step.init_state(params, config), params)
    held = dry_run.bytes_per_device(state)
    parameters = dry_run.bytes_per_device(params)
    assert held == pytest.approx(3 * parameters, rel=1e-3)  # with two moments
    c, data = config.trunk, config.data
    assert isinstance(c, trunks.Config) and c.ffn is not None and c.vocab is not None
    share = mesh.axis_size(*mesh.BATCH) * config.optimizer.accumulate
    tokens = data.batch * data.length // share  # of a microbatch, a chip
    tensor = mesh.axis_size('tensor')
  # Kept of every layer: its input. Of one layer at a time: what its backward pass
  # needs, and its weights gathered. The head: gathered, and its gradient whole.
  wide = 2
  kept = (c.layers + 2) * tokens * c.width * wide
  one = tokens * (8 * c.width + 8 * c.ffn // tensor) * wide
  weights = (4 * c.width**2 + 3 * c.width * c.ffn) // tensor * wide * 2
  head = c.vocab * c.width // tensor * (wide + 4)
  logits = 3 * 4 * config.loss.chunk_tokens * c.vocab // tensor
  # Gradients of the microbatches are added up.
  gradients = parameters * (1 + (config.optimizer.accumulate > 1))
  total = held + gradients + kept + one + weights + head + logits
  limit = MEMORY[arg.split('-')[1]] * GIB
  assert held < 0.5 * limit
  assert total < 0.85 * limit, f'{total / GIB:.1f} of {limit / GIB:.1f} GiB'


def test_presets_compute_in_the_backends_dtype_and_recompute_layers():
  for arg in typing.get_args(presets.Size):
    config = presets.get_config(arg)
    assert (config.trunk.dtype, config.trunk.remat) == (None, 'full')
