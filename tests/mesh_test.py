"""Mesh: its sizes, refusals that name the numbers, and where each parameter lies."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from mtpjax import mesh, model
from mtpjax.drafters import base, sequential
from mtpjax.fields import ConfigError
from mtpjax.models import trunk

# Where the last dimensions of each parameter lie; stacks are whole on the leading one.
TABLE = {
  'embedding': ('tensor', 'fsdp'),
  'unembedding': ('tensor', 'fsdp'),
  'w_query': ('fsdp', 'tensor', None),
  'w_key': ('fsdp', 'KV', None),
  'w_value': ('fsdp', 'KV', None),
  'w_mix': ('tensor', None, 'fsdp'),
  'w_up': ('fsdp', 'tensor'),
  'w_gate': ('fsdp', 'tensor'),
  'w_down': ('tensor', 'fsdp'),
  'w_join': (None, 'fsdp', None),
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
  for count, shape in ((1, mesh.Config()), (8, mesh.Config(fsdp=2, tensor=4))):
    with jax.set_mesh(mesh.make(shape, jax.devices()[:count])):
      _, abstract, init = model.init(sizes, objectives, 7)
      values = init()
      for path, leaf in leaves(values).items():
        assert leaf.sharding.spec == leaves(abstract)[path].sharding.spec
      made.append(jax.device_get(values))
  close = functools.partial(np.testing.assert_allclose, rtol=1e-6)
  jax.tree.map(close, *made)


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
