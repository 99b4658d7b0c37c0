"""Muon against NumPy, matrix by matrix, on every mesh."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from updates import CONSTANT, MESHES, SHAPES, bfloat16, drawn, named, on

from mtpjax import mesh, model, optimizers, tuning
from mtpjax.drafters import base, parallel, residual, sequential
from mtpjax.fields import ConfigError
from mtpjax.models import trunk
from mtpjax.optimizers import AdamW, Muon


def jordan(g_MN, iterations=5):
  """One matrix, rows and columns as they come (github.com/KellerJordan/Muon)."""
  x = g_MN / (np.linalg.norm(g_MN) + 1e-7)
  for _ in range(iterations):
    a = x.T @ x
    x = 3.4445 * x + x @ (-4.7750 * a + 2.0315 * a @ a)
  return x


def muon(params, each, config, rate):
  """Parameters after the steps, matrix by matrix."""
  after = {}
  for name, (shape, _, kind) in SHAPES.items():
    p, m, v = params[name].copy(), np.zeros(shape), np.zeros(shape)
    for n, grads in enumerate(each, 1):
      g = grads[name]
      if kind is None:
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
        way = m / (1 - 0.9**n) / (np.sqrt(v / (1 - 0.95**n)) + 1e-8)
        p = p - rate * config.adam_rate * way
        continue
      m = config.momentum * m + (1 - config.momentum) * g
      way = (1 - config.momentum) * g + config.momentum * m
      stack, inputs = kind
      p = p.copy()
      for index in np.ndindex(shape[:stack]):
        rows = math.prod(shape[stack : stack + inputs])
        u = jordan(way[index].reshape(rows, -1))
        scale = {
          'rms': 0.2 * math.sqrt(max(u.shape)),
          'fan': math.sqrt(max(1, u.shape[1] / u.shape[0])),
        }[config.scale]
        moved = rate * (scale * u.reshape(p[index].shape) + 0.1 * p[index])
        p[index] = p[index] - moved
    after[name] = p
  return after


@pytest.fixture(scope='module')
def by_numpy():
  with jax.enable_x64(True), on():
    params, *each = [named(drawn(seed)) for seed in range(4)]
  configs = {scale: Muon(scale=scale, adam_rate=0.5) for scale in ('rms', 'fan')}
  rate = float(np.float32(0.01))
  return {scale: muon(params, each, c, rate) for scale, c in configs.items()}


@pytest.mark.parametrize(
  ('sizes', 'scale'),
  [('one', 'rms'), ('one', 'fan')] + [(name, 'rms') for name in list(MESHES)[1:]],
)
def test_three_steps_are_those_of_muon_on_every_mesh(
  sizes, scale, by_numpy, given_gradients
):
  config = Muon(rate=CONSTANT, clip=None, scale=scale, adam_rate=0.5)
  with jax.enable_x64(True), on(**MESHES[sizes]):
    params, *each = [drawn(seed) for seed in range(4)]
    state, _ = given_gradients(params, config, each)[-1]
  got = named(state['params'])
  for name, want in by_numpy[scale].items():
    np.testing.assert_allclose(got[name], want, atol=1e-10, err_msg=name)
    for tree in (state['params'], state['opt'][0].inner_states['muon'].inner_state.mu):
      x = tuning.flat(tree).get(tuple(name.split('/')))
      if isinstance(x, jax.Array):
        whole = (*SHAPES[name][1], *[None] * x.ndim)[: x.ndim]
        assert jax.typeof(x).sharding.spec == P(*whole), name


def test_a_devices_share_of_the_matrices_is_all_it_multiplies():
  spec = P(None, *mesh.w_DF)
  with on(fsdp=2, tensor=4):
    x = jax.ShapeDtypeStruct(
      (12, 16, 40), 'float32', sharding=jax.NamedSharding(jax.sharding.get_mesh(), spec)
    )
    lowered = jax.jit(lambda x: optimizers.per_matrix(x, 1, 1, 1)).lower(x)
    text = (lowered.compile().as_text() or '').splitlines()
  products = [line for line in text if ' dot(' in line]
  # 12 are padded to 16: two for each of eight devices.
  assert len(products) == 3 and all('= f32[2,16,' in line for line in products)
  assert not [line for line in text if 'all-gather' in line and '[16,16,40]' in line]


def test_an_update_has_singular_values_near_one_and_the_gradients_directions():
  rng = np.random.default_rng(0)
  with on():
    x = rng.normal(size=(2, 48, 4, 6)).astype(np.float32)
    y = np.asarray(optimizers.per_matrix(jnp.asarray(x), 1, 2, 5))
  for g, u in zip(x.reshape(2, 48, 24), y.reshape(2, 48, 24), strict=True):
    left, _, right = np.linalg.svd(g, full_matrices=False)
    s = left.T @ u @ right.T
    np.testing.assert_allclose(s - np.diag(np.diag(s)), 0, atol=1e-4)
    assert 0.6 < np.diag(s).min() <= np.diag(s).max() < 1.25


def test_the_first_update_is_that_of_optax():
  """Later ones differ: its momentum corrects for the bias, Jordan's does not."""
  rng = np.random.default_rng(1)
  w = {'w_map': jnp.asarray(rng.normal(size=(40, 16)), 'float32')}
  for ours, consistent in ((Muon(scale='rms'), 0.2), (Muon(scale='fan'), None)):
    theirs = optax.contrib.muon(-1.0, consistent_rms=consistent, weight_decay=0.1)
    want, _ = theirs.update(w, theirs.init(w), w)
    with on():
      way = ours.build()
      got, _ = way.update(w, way.init(w), w)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(
  'drafter', [sequential.Config(), parallel.Config(form='linear')]
)
def test_every_matrix_of_the_model_is_read_the_way_it_is_used(drafter):
  """Weights start with the variance 1 / inputs, by the modules' own account."""
  with on():
    config = trunk.Config(vocab=64, width=64, layers=8, heads=4, kv_heads=2, ffn=96)
    config.finalize()
    _, _, make = model.init(config, {'drafter': drafter}, 0)
    params = make()
  seen = set()
  for path, x in jax.tree_util.tree_leaves_with_path(params):
    kind, name = optimizers.matrix(path, x), path[-1].key
    assert (kind is None) == (not name.startswith('w_'))
    if kind is not None:
      seen.add(name)
      inputs, _ = (math.prod(n) for n in optimizers.matrix_shape(x, *kind))
      started = 1 / np.var(np.asarray(x))
      started /= {'w_mix': 16, 'w_down': 16, 'w_join': 2}.get(name, 1)
      assert started == pytest.approx(inputs, rel=0.15), name
  assert len(seen) == 8


def test_every_kind_of_objective_has_weights_that_are_known():
  def kinds(kind: Any) -> list[Any]:
    below = [leaf for one in kind.__subclasses__() for leaf in kinds(one)] or [kind]
    return [leaf for leaf in below if leaf.__module__.startswith('mtpjax.')]

  parts = [kind() for kind in kinds(base.Config)] + [residual.Config(form='medusa')]
  known = 0
  with on():
    sizes = trunk.Config(vocab=63, width=16, layers=4, heads=2, ffn=32)
    sizes.finalize()
    for part in parts:
      try:
        part.finalize(sizes, 'objective')
      except ConfigError:  # of another trunk
        continue
      _, params, _ = model.init(sizes, {'objective': part}, 0)
      jax.eval_shape(Muon().build().init, params)
      known += 1
  assert known > 3


def test_a_weight_that_could_be_read_in_several_ways_is_refused():
  new = {'objectives': {'mine': {'w_odd': jnp.zeros((2, 3, 4, 5))}}}
  with pytest.raises(ConfigError, match=r"MATRICES\['w_odd'\]"):
    Muon().build().init(new)
  AdamW().build().init(new)


def test_muons_momentum_is_rounded_only_where_asked(given_gradients):
  with on():
    each = [drawn(seed, 'float32') for seed in (1, 2)]
    params = jax.tree.map(lambda x: x.astype('bfloat16'), drawn(0, 'float32'))
    for dtype in ('float32', 'bfloat16'):
      config = Muon(rate=CONSTANT, clip=None, moment_dtype=dtype)
      state, _ = given_gradients(params, config, each)[-1]
      kept = state['opt'][0].inner_states
      kept = [kept['muon'].inner_state.mu, kept['adam'].inner_state[0].mu]
      assert {x.dtype.name for x in jax.tree.leaves(kept)} == {dtype}
      assert {x.dtype.name for x in jax.tree.leaves(state['params'])} == {'bfloat16'}
      got = kept[0]['trunk']['blocks']['w_up']
      first, second = (np.asarray(x['trunk']['blocks']['w_up']) for x in each)
      m = 0.05 * first
      m = 0.95 * (bfloat16(m) if dtype == 'bfloat16' else m) + 0.05 * second
      near = 2**-8 if dtype == 'bfloat16' else 1e-5
      np.testing.assert_allclose(np.asarray(got, np.float32), m, rtol=near, atol=1e-6)
