"""Train steps of given gradients; rows and sharded parameters of every kind."""

import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mtpjax import config as configs
from mtpjax import mesh, schedules, step, tuning

CONSTANT = schedules.WarmupConstant(peak=0.01, warmup=0)


def on(**sizes):
  config = mesh.Config(**{'fsdp': 1, **sizes})
  count = math.prod(getattr(config, axis) for axis in mesh.AXES)
  return jax.set_mesh(mesh.make(config, jax.devices()[:count]))


def random_like(shapes):
  """Gains around one, all else around zero; the same on every mesh."""
  rng = np.random.default_rng(1)

  def one(path, shape):
    value = rng.normal(size=shape.shape) * 0.3 + path[-1].key.startswith('gain')
    sharding = jax.NamedSharding(jax.sharding.get_mesh(), shape.sharding.spec)
    return jax.device_put(value.astype(shape.dtype), sharding)

  return jax.tree_util.tree_map_with_path(one, shapes)


def packed(documents, length, vocab, share):
  """Rows as the loader gives them, of documents of these lengths; that share of the
  tokens may be targets."""
  rng = np.random.default_rng(0)
  shape = len(documents), length
  arrays: dict[str, Any] = {
    name: np.zeros(shape, np.int32) for name in ('positions', 'segments')
  }
  for b, lengths in enumerate(documents):
    for n, end in enumerate(np.cumsum(lengths)):
      s = slice(end - lengths[n], end)
      arrays['positions'][b, s] = np.arange(lengths[n])
      arrays['segments'][b, s] = n + 1
  arrays['tokens'] = rng.integers(0, vocab, shape, dtype=np.int32)
  arrays['mask'] = rng.random(shape) < share
  return arrays


def named(tree):
  return {'/'.join(path): np.asarray(x) for path, x in tuning.flat(tree).items()}


@pytest.fixture
def given_gradients(monkeypatch):
  """Train steps whose losses and gradients are what their `arrays` hold."""

  def gradients(graphdef, params, arrays, config, n):
    selection = tuning.select(params, config.freeze_trunk, config.tune)
    own, _ = tuning.split(arrays['grads'], selection)
    return arrays['loss'], {}, tuning.only(selection, own)

  monkeypatch.setattr(step, 'to_batch', lambda arrays, *_: arrays)
  monkeypatch.setattr(step, 'gradients', gradients)
  monkeypatch.setattr(step.nnx, 'merge', lambda *x: None)
  monkeypatch.setattr(step.model, 'lambdas', lambda *x: {})

  def run(params, optimizer, each, losses=(), state=None, **changes):
    """[(state, metrics)], the start first: `state`, or a new one of the parameters."""
    config = configs.Config(optimizer=optimizer, **changes)
    if state is None:
      state = step.init_state(params, config)
    chex.clear_trace_counter()

    def update(state, arrays):
      return step.train_step(None, config, state, arrays)

    once, seen = jax.jit(chex.assert_max_traces(update, n=1)), [(state, {})]
    for n, grads in enumerate(each):
      loss = jnp.float32(losses[n] if losses else 0)
      arrays = {'grads': grads, 'loss': loss, 'segments': jnp.ones((1, 1), jnp.int32)}
      state, metrics = once(state, arrays)
      seen.append((state, metrics))
    return seen

  return run


def tensors(dtype, seed=4):
  rng = np.random.default_rng(seed)
  shapes = {
    'w_up': (64, 64),
    'gain_ffn': (64,),
    'bias_key': (8,),
    'embedding': (80, 64),
  }
  normal = {name: rng.normal(size=shape) for name, shape in shapes.items()}
  return {'trunk': jax.tree.map(lambda x: jnp.asarray(x, dtype), normal)}


# Name: shape, sharding, dimensions of (stack, inputs).
SHAPES = {
  'trunk/blocks/w_query': ((3, 16, 4, 6), P(None, *mesh.w_DHC), (1, 1)),
  'trunk/blocks/w_mix': ((3, 4, 6, 16), P(None, *mesh.w_HCD), (1, 2)),
  'trunk/blocks/w_up': ((3, 16, 40), P(None, *mesh.w_DF), (1, 1)),
  'trunk/blocks/gain_ffn': ((3, 16), P(None, None), None),
  'trunk/embedding': ((24, 16), mesh.w_VD, None),
  'trunk/experts/w_down': ((3, 2, 40, 16), P(None, 'expert', 'tensor', 'fsdp'), (2, 1)),
  'objectives/drafter/w_join': ((1, 2, 16, 16), P(None, None, *mesh.w_DD), (2, 1)),
  'objectives/heads/w_map': ((8, 16, 16), P(None, *mesh.w_DD), (1, 1)),
  'objectives/one/w_alone': ((24, 16), mesh.w_DF, (0, 1)),
}
MESHES = {
  'one': {},
  'fsdp': {'fsdp': 8},
  'fsdp, tensor': {'fsdp': 2, 'tensor': 4},
  'all': {'replica': 2, 'tensor': 2, 'expert': 2},
}


def nested(values):
  return tuning.traverse_util.unflatten_dict(values, sep='/')


def drawn(seed, dtype='float64'):
  rng = np.random.default_rng(seed)
  found = {}
  for name, (shape, spec, _) in SHAPES.items():
    value = rng.normal(size=shape).astype(dtype)
    where = jax.NamedSharding(jax.sharding.get_mesh(), spec)
    found[name] = jax.device_put(value, where)
  return nested(found)


def bfloat16(x):
  return x.astype(ml_dtypes.bfloat16).astype(x.dtype)
