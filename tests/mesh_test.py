"""Mesh: its sizes, refusals that name the numbers, and where each parameter lies."""

import itertools
import math
import types
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import PartitionSpec as P

from mtpjax import mesh, model
from mtpjax.drafters import base, sequential
from mtpjax.fields import ConfigError
from mtpjax.models import trunk

# Where the last dimensions of each parameter lie; stacks are whole on the leading one.
STORED = ('fsdp', 'context', 'expert')
TABLE = {
  'embedding': ('tensor', STORED),
  'unembedding': ('tensor', STORED),
  'w_query': (STORED, 'tensor', None),
  'w_key': (STORED, 'KV', None),
  'w_value': (STORED, 'KV', None),
  'w_mix': ('tensor', None, STORED),
  'w_up': (STORED, 'tensor'),
  'w_gate': (STORED, 'tensor'),
  'w_down': ('tensor', STORED),
  'w_join': (None, STORED, 'tensor'),
  'bias_query': ('tensor', None),
  'bias_key': ('KV', None),
  'bias_value': ('KV', None),
}


def sizes_of(devices=8, **sizes):
  return dict(mesh.make(mesh.Config(**sizes), jax.devices()[:devices]).shape)


def configs(kv_heads=4) -> tuple[trunk.Config, dict[str, base.Config]]:
  sizes = trunk.Config(
    vocab=30, vocab_multiple=8, width=16, layers=3, heads=4, kv_heads=kv_heads, ffn=32
  )
  sizes.qkv_bias = sizes.qk_norm = True
  sizes.finalize()
  return sizes, {'drafter': sequential.Config(depth=2, share=False)}


def leaves(tree):
  """Arrays, or their shapes, by the names on their paths."""
  flat = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {tuple(key.key for key in path): leaf for path, leaf in flat}


def test_the_free_axis_takes_the_devices_that_are_left():
  whole = {'replica': 1, 'fsdp': 8, 'tensor': 1, 'context': 1, 'expert': 1}
  assert sizes_of() == whole
  assert sizes_of(devices=1) == {**whole, 'fsdp': 1}
  assert sizes_of(tensor=4) == {**whole, 'fsdp': 2, 'tensor': 4}
  assert sizes_of(replica=2, fsdp=2, context=-1) == {
    'replica': 2,
    'fsdp': 2,
    'tensor': 1,
    'context': 2,
    'expert': 1,
  }
  assert sizes_of(fsdp=2, tensor=2, expert=2)['expert'] == 2
  assert sizes_of(fsdp=-1, tensor=8)['fsdp'] == 1


def test_the_mesh_is_explicit_and_has_all_axes_in_order():
  made = mesh.make(mesh.Config(), jax.devices())
  assert made.axis_names == mesh.AXES
  assert set(made.axis_types) == {jax.sharding.AxisType.Explicit}


@pytest.mark.parametrize(
  ('sizes', 'said'),
  [
    ({'fsdp': 3}, ('fsdp 3', '8 devices', 'product 8')),
    ({'fsdp': 2, 'tensor': 2}, ('fsdp 2', 'tensor 2', '8 devices')),
    ({'tensor': 3}, ('fsdp -1', 'tensor 3', '8 devices')),
    ({'tensor': 16}, ('tensor 16', '8 devices')),
    ({'tensor': -1}, ('fsdp -1', 'tensor -1', 'more than one')),
    ({'context': 0}, ('mesh.context', '0', 'no size')),
    ({'expert': -2}, ('mesh.expert', '-2', 'no size')),
  ],
)
def test_sizes_that_do_not_fit_are_refused_by_their_numbers(sizes, said):
  with pytest.raises(ConfigError) as error:
    sizes_of(**sizes)
  for words in said:
    assert words in str(error.value)


# ------------------------------------------------------------------------- placement


def slices(kind, count, topology):
  """Devices of `count` slices, in an order that says nothing: TPUs with coordinates,
  GPUs with a process each, or CPUs, which know of processes only."""
  found: list[Any] = []
  for n in range(count):
    for x, y in itertools.product(*map(range, topology)):
      index = len(found)
      one = types.SimpleNamespace(
        id=index, platform=kind, device_kind=kind, process_index=n
      )
      if kind == 'tpu':
        one.coords, one.core_on_chip, one.slice_index = (x, y, 0), 0, n
        one.device_kind, one.process_index = 'TPU v4', index // 4
      elif kind == 'gpu':
        one.slice_index, one.process_index = n, index
      one.slice = n
      found.append(one)
  np.random.default_rng(0).shuffle(found)
  return found


@pytest.mark.parametrize(
  ('count', 'topology', 'sizes', 'crossing'),
  [
    (2, (2, 2), {'replica': 2, 'fsdp': 4}, {'replica': 2}),
    (2, (2, 2), {'replica': 2, 'tensor': 2, 'context': 2}, {'replica': 2}),
    (2, (2, 2), {'replica': 4, 'fsdp': 2}, {'replica': 2}),
    (2, (2, 4), {'replica': 1, 'fsdp': 16}, {'fsdp': 2}),
    (2, (2, 4), {'replica': 1, 'fsdp': 4, 'tensor': 4}, {'fsdp': 2}),
    (2, (2, 4), {'tensor': 8, 'expert': 2}, {'expert': 2}),
    (2, (2, 4), {'tensor': 8, 'context': 2}, {'context': 2}),
    (2, (2, 2), {'tensor': 8}, {'tensor': 2}),
    (4, (2, 2), {'replica': 2, 'fsdp': 8}, {'replica': 2, 'fsdp': 2}),
    (6, (2, 2), {'replica': 3, 'fsdp': 4, 'tensor': 2}, {'replica': 3, 'fsdp': 2}),
    (3, (2, 2), {'replica': 4, 'fsdp': 3}, {'fsdp': 3}),
    (6, (1, 1), {'replica': 2, 'tensor': 3}, {'replica': 2, 'tensor': 3}),
  ],
)
@pytest.mark.parametrize('kind', ['tpu', 'gpu', 'cpu'])
def test_the_slow_network_carries_the_axes_with_the_least_to_send(
  kind, count, topology, sizes, crossing
):
  devices = slices(kind, count, topology)
  sizes = {axis: sizes.get(axis, 1) for axis in mesh.AXES}
  placed = mesh.place(sizes, devices)
  assert placed.shape == tuple(sizes.values())
  assert sorted(d.id for d in placed.flat) == list(range(len(devices)))
  of = np.vectorize(lambda device: device.slice)(placed)
  for n, axis in enumerate(mesh.AXES):
    lines = np.moveaxis(of, n, -1).reshape(-1, sizes[axis])
    each = {len(set(line)) for line in lines}
    assert each == {crossing.get(axis, 1)}, axis
    # What goes over it changes slices as seldom as can be.
    assert {np.count_nonzero(np.diff(line)) for line in lines} == {max(each) - 1}
  if kind == 'cpu' and math.prod(sizes[a] for a in mesh.BATCH) % count == 0:
    # The rows of a process are neighbours, as far as replicas need not be.
    rows = np.moveaxis(of, mesh.AXES.index('expert'), 2).reshape(-1, *placed.shape[2:4])
    assert crossing.get('fsdp', 1) == count or (np.diff(rows[:, 0, 0]) >= 0).all()


def test_one_slice_is_laid_out_as_its_network_is():
  devices = slices('tpu', 1, (4, 4))
  assert len({d.process_index for d in devices}) == 4  # joined by the fast network
  sizes = {axis: 1 for axis in mesh.AXES} | {'fsdp': 4, 'tensor': 4}
  placed = mesh.place(sizes, devices)
  wanted = mesh_utils.create_device_mesh((1, 4, 4, 1, 1), devices)
  assert (placed == wanted).all()
  for row in placed[0, :, :, 0, 0]:  # each a straight line
    assert 1 in [len({d.coords[n] for d in row}) for n in (0, 1)]
  # No axis of the network is 8 long: one is split.
  placed = mesh.place(sizes | {'fsdp': 2, 'tensor': 8}, devices)
  assert len({d.id for d in placed.flat}) == 16


def test_one_process_keeps_the_order_of_its_devices():
  for sizes in ({'fsdp': 8}, {'replica': 2, 'tensor': 2, 'context': 2}):
    made = mesh.make(mesh.Config(**{'fsdp': 1, **sizes}))
    assert list(made.devices.flat) == jax.devices()


@pytest.mark.parametrize('kind', ['tpu', 'cpu'])
def test_slices_of_different_sizes_are_refused_by_their_numbers(kind):
  devices = [d for d in slices(kind, 2, (2, 3)) if d.slice or d.id < 4]
  sizes = {axis: 1 for axis in mesh.AXES} | {'fsdp': 10}
  with pytest.raises(ConfigError) as error:
    mesh.place(sizes, devices)
  what = {'tpu': 'slices', 'cpu': 'processes'}[kind]
  for said in ('fsdp 10', f'{what} of 4, 6 devices', f'{what} of equally many'):
    assert said in str(error.value)


def test_where_time_is_whole_its_devices_have_rows_and_no_weight_moves():
  with jax.set_mesh(mesh.make(mesh.Config(fsdp=2, tensor=2, context=2))):
    w = np.arange(128.0, dtype=np.float32).reshape(8, 16)
    there = jax.device_put(w, jax.NamedSharding(jax.sharding.get_mesh(), mesh.w_DF))
    before = {s.device: s.data for s in there.addressable_shards}
    with jax.set_mesh(mesh.whole_in_time()):
      assert mesh.axis_sizes() == {
        'replica': 1,
        'fsdp': 4,
        'tensor': 2,
        'context': 1,
        'expert': 1,
      }
      got = mesh.moved({'w': there})['w']
      assert jax.typeof(got).sharding.mesh == jax.sharding.get_abstract_mesh()
    assert len(before) == len(got.addressable_shards) == 8
    for shard in got.addressable_shards:
      np.testing.assert_array_equal(shard.data, before[shard.device])
    np.testing.assert_array_equal(got, w)


# ------------------------------------------------------------------------- the table


def test_axis_sizes_multiply():
  with jax.set_mesh(mesh.make(mesh.Config(fsdp=2, tensor=2, expert=2))):
    assert mesh.axis_size() == 1
    assert mesh.axis_size('tensor') == 2
    assert mesh.axis_size(*mesh.BATCH) == 4
    assert mesh.heads_axis(6) == 'tensor'
    assert mesh.heads_axis(3) is None


def test_gathering_keeps_every_axis_but_fsdp():
  with jax.set_mesh(mesh.make(mesh.Config(fsdp=2, tensor=4))):
    w = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    there = jax.device_put(w, jax.NamedSharding(jax.sharding.get_mesh(), mesh.w_VD))
    whole = mesh.gathered(there)
    assert there.addressable_shards[0].data.shape == (2, 4)
    assert whole.addressable_shards[0].data.shape == (2, 8)
    np.testing.assert_array_equal(whole, w)


@pytest.mark.parametrize(('kv_heads', 'axis'), [(4, 'tensor'), (2, None)])
def test_every_parameter_lies_where_the_table_says(kv_heads, axis):
  sizes, objectives = configs(kv_heads)
  with jax.set_mesh(mesh.make(mesh.Config(fsdp=2, tensor=4))):
    found = leaves(model.init(sizes, objectives, 0)[1])
  assert {path[-1] for path in found if 'gain' not in path[-1]} == set(TABLE)
  for path, leaf in found.items():
    last = TABLE.get(path[-1], (None,))  # gains are whole everywhere
    last = tuple(axis if name == 'KV' else name for name in last)
    stack = (None,) * (leaf.ndim - len(last))
    assert tuple(leaf.sharding.spec) == (*stack, *last), path
    assert len(stack) == (path[:2] == ('trunk', 'blocks') or path[0] == 'objectives')


def test_rows_are_spread_over_the_axes_that_hold_no_part_of_one():
  assert P(('replica', 'fsdp', 'expert'), 'context') == mesh.ids_BT
  with jax.set_mesh(mesh.make(mesh.Config(replica=2, fsdp=2, context=2))):
    here = jax.NamedSharding(jax.sharding.get_mesh(), mesh.ids_BT)
    assert here.shard_shape((8, 16)) == (2, 8)


@pytest.mark.slow
def test_initial_values_do_not_depend_on_the_mesh():
  sizes, objectives = configs()
  made = []
  layouts = mesh.Config(), mesh.Config(fsdp=2, tensor=4), mesh.Config(fsdp=4, context=2)
  for count, shape in zip((1, 8, 8), layouts, strict=True):
    with jax.set_mesh(mesh.make(shape, jax.devices()[:count])):
      _, abstract, init = model.init(sizes, objectives, 7)
      values = init()
      for path, leaf in leaves(values).items():
        assert leaf.sharding.spec == leaves(abstract)[path].sharding.spec
      made.append(jax.device_get(values))
  for other in made[1:]:
    jax.tree.map(np.testing.assert_array_equal, other, made[0])


@pytest.mark.slow
def test_initial_values_have_the_variance_of_their_fan_in():
  sizes = trunk.Config(vocab=512, width=128, layers=2, heads=4, ffn=256)
  sizes.finalize()
  with jax.set_mesh(mesh.make(mesh.Config(), jax.devices()[:1])):
    made = jax.jit(lambda key: nnx.to_pure_dict(nnx.state(sizes.build(nnx.Rngs(key)))))
    found = leaves(made(jax.random.key(0)))
  residual = 4**-0.5
  want = {
    'w_query': 128**-0.5,
    'w_key': 128**-0.5,
    'w_value': 128**-0.5,
    'w_mix': 128**-0.5 * residual,
    'w_up': 128**-0.5,
    'w_gate': 128**-0.5,
    'w_down': 256**-0.5 * residual,
    'embedding': 0.02,
    'unembedding': 0.02,
  }
  for path, leaf in found.items():
    if path[-1].startswith('gain'):
      assert np.all(leaf == 1)
    else:
      assert np.std(leaf) == pytest.approx(want[path[-1]], rel=0.03), path
