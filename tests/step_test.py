"""The train step: gradients however they are dealt, and updates, against formulas."""

import functools
import math
from typing import Literal

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from updates import on, packed, random_like

from mtpjax import config as configs
from mtpjax import losses, mesh, model, optimizers, schedules, step
from mtpjax.drafters import sequential
from mtpjax.models import trunk

B, T, V = 8, 16, 83
# Lengths of the documents by row. Depth 1 has 6 targets, all in rows 0 and 2: none in
# the second half of the batch (a shard of two), none in odd rows (a microbatch of two).
DOCUMENTS = [
  (6, 2, 2, 2, 1),
  (2, 2, 1),
  (4, 1, 2),
  (2,),
  (2, 2),
  (1, 2, 2, 2),
  (),
  (2,),
]


def settings(dtype: Literal['float32', 'float64'] = 'float64', **changes):
  """A small run; finalized, so a mesh must be set."""
  sizes = trunk.Config(
    vocab=V, vocab_multiple=8, width=16, layers=2, heads=4, kv_heads=2, ffn=32
  )
  sizes.dtype = sizes.param_dtype = dtype
  sizes.remat = 'none'
  weight = schedules.Piecewise((0.3, 0.1), (0.15,))
  fields = {
    'steps': 10,
    'trunk': sizes,
    'drafter': sequential.Config(depth=2, rho=0.5, weight=weight),
    'loss': losses.Config(chunk_tokens=24),
    'optimizer': optimizers.AdamW(rate=schedules.WarmupCosine(0.01, 2, 0.1), clip=0.5),
  }
  config = configs.Config(**{**fields, **changes})
  config.data.length, config.data.batch = T, B
  return configs.finalize(config)


def rows():
  arrays = packed(DOCUMENTS, T, V, 0.6)
  arrays['mask'][[0, 2]] = True
  return arrays


def prepared(config):
  """(graphdef, random parameters)."""
  graphdef, shapes, _ = model.init(config.trunk, config.parts(), 0)
  return graphdef, random_like(shapes)


def gradient_function(config, graphdef):
  def run(params, arrays, now):
    batch = step.to_batch(arrays, config.freeze_trunk)
    return step.gradients(graphdef, params, batch, config, now)

  return jax.jit(run)


def all_at_once(**changes):
  """(total, sums, gradients) of the first step."""
  config = settings(**changes)
  graphdef, params = prepared(config)
  run = gradient_function(config, graphdef)
  return jax.device_get(run(params, step.put(rows()), jnp.int32(0)))


def named(tree):
  """Leaves by the names on their paths."""
  flat = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {'.'.join(key.key for key in path): leaf for path, leaf in flat}


def assert_same(got, want, tolerance=1e-10):
  """Errors in units of each tensor's largest entry."""

  def one(got, want):
    scale = max(np.abs(want).max(), 1e-30)
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * scale)

  jax.tree.map(one, got, want)


# ---------------------------------------------------------------------------- gradients


@pytest.fixture(scope='module')
def alone():
  """One device, one batch, float64: (run, parameters, (total, sums, gradients))."""
  with jax.enable_x64(True), on():
    config = settings()
    graphdef, params = prepared(config)
    run = gradient_function(config, graphdef)
    out = jax.device_get(run(params, step.put(rows()), jnp.int32(0)))
    return run, params, out


def test_the_total_is_made_of_the_depths_means(alone):
  _, _, (total, sums, _) = alone
  nll, count = sums['drafter'].nll, sums['drafter'].count
  assert count.tolist() == [6, 4]
  mean = sums['next'].nll[0] / sums['next'].count[0]
  weighted = 0.3 * (2 / 3 * nll[0] / 6 + 1 / 3 * nll[1] / 4)
  assert total == pytest.approx(mean + weighted, rel=1e-12)


def test_the_gradient_is_the_slope_in_random_directions(alone):
  run, params, (_, _, grads) = alone
  rng, size = np.random.default_rng(2), 1e-6
  for part in ('trunk', 'objectives', 'trunk'):  # parts, lest one hide the other
    way = jax.tree.map(lambda p: rng.normal(size=p.shape), params[part])
    with jax.enable_x64(True), on():
      arrays = step.put(rows())

      def total(by, part=part, way=way, arrays=arrays):
        moved = jax.tree.map(lambda p, d: p + by * d, params[part], way)
        return float(run({**params, part: moved}, arrays, jnp.int32(0))[0])

      slope = (total(size) - total(-size)) / (2 * size)
    along = sum(
      jax.tree.leaves(jax.tree.map(lambda g, d: np.sum(g * d), grads[part], way))
    )
    assert along == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize('count', [pytest.param(2, marks=pytest.mark.slow), 4])
def test_microbatches_of_very_uneven_counts_change_nothing(count, alone):
  with jax.enable_x64(True), on():
    got = all_at_once(optimizer=optimizers.AdamW(accumulate=count))
  assert_same(got, alone[2])


MESHES = {
  'fsdp, tensor': {'fsdp': 2, 'tensor': 4},
  'fsdp, context, tensor': {'fsdp': 2, 'context': 2, 'tensor': 2},
  'replica, expert, tensor': {'replica': 2, 'expert': 2, 'tensor': 2},
}


@pytest.mark.parametrize(
  ('sizes', 'accumulate'),
  [
    ('fsdp, tensor', 1),
    pytest.param('fsdp, tensor', 4, marks=pytest.mark.slow),
    pytest.param('fsdp, context, tensor', 1, marks=pytest.mark.slow),
    pytest.param('replica, expert, tensor', 2, marks=pytest.mark.slow),
  ],
)
def test_eight_devices_agree_though_a_shard_has_no_target(sizes, accumulate, alone):
  with jax.enable_x64(True), on(**MESHES[sizes]):
    got = all_at_once(optimizer=optimizers.AdamW(accumulate=accumulate))
  assert_same(got, alone[2])


def test_a_row_goes_to_the_microbatch_of_its_number():
  with on(fsdp=2):
    spec = jax.NamedSharding(jax.sharding.get_mesh(), mesh.ids_BT)
    x = jax.device_put(np.arange(16, dtype=np.int32).reshape(8, 2), spec)
    parts = jax.jit(lambda x: step.microbatches({'x': x}, 2, 0))(x)['x']
    assert parts.sharding.spec[1] == mesh.BATCH
  assert np.asarray(parts)[:, :, 0].tolist() == [[0, 4, 8, 12], [2, 6, 10, 14]]


# ------------------------------------------------------------------------------- detach


def drafter_gradient(detach):
  """Gradients of the drafter's part of the loss alone."""
  config = settings(dtype='float32')
  config.drafter = sequential.Config(depth=1, detach=detach)
  config.trunk.layers = 1
  graphdef, params = prepared(config)

  def total(params, arrays):
    made = nnx.merge(graphdef, params)
    batch = step.to_batch(arrays, False)
    batch, targets = model.prepare(made, batch, jax.random.key(0))
    counts = {name: t.counts for name, t in targets.items()}
    weights = {'next': jnp.zeros(1), 'drafter': jnp.ones(1)}
    now = jnp.int32(0)
    loss = model.loss(made, batch, targets, counts, weights, config.loss, now, None)
    return loss[0]

  return jax.device_get(jax.jit(jax.grad(total))(params, step.put(rows())))


@pytest.fixture(scope='module')
def attached():
  with on():
    return named(drafter_gradient(()))


def test_without_detaching_every_parameter_learns(attached):
  assert all(np.any(g) for g in attached.values())


@pytest.mark.parametrize(
  'detach',
  [
    ('hidden',),
    ('embedding', 'head'),
    pytest.param(('embedding',), marks=pytest.mark.slow),
    pytest.param(('head',), marks=pytest.mark.slow),
  ],
)
def test_a_detached_tensor_gets_no_gradient_and_the_others_theirs(detach, attached):
  with on():
    got = named(drafter_gradient(detach))
  none = {'trunk.unembedding'} if 'head' in detach else set()
  if 'hidden' in detach:  # nothing else reaches the trunk's layers
    none |= {name for name in got if name.startswith('trunk.blocks')}
    none |= {'trunk.gain_final'}
  assert {name for name, g in got.items() if not np.any(g)} == none
  # The embedding is read twice, at the trunk's start and by the drafter.
  before, after = attached['trunk.embedding'], got.pop('trunk.embedding')
  changes = 'hidden' in detach or 'embedding' in detach
  assert np.allclose(after, before, rtol=1e-2, atol=1e-6) != changes
  for name in got.keys() - none:
    np.testing.assert_allclose(got[name], attached[name], rtol=1e-4, atol=1e-6)


# --------------------------------------------------------------------------- the update


def adamw(p, m, v, g, n, rate, decay, config):
  """Update n (from 1) of one tensor (Loshchilov & Hutter 2019, algorithm 2)."""
  m = config.b1 * m + (1 - config.b1) * g
  v = config.b2 * v + (1 - config.b2) * g**2
  ratio = m / (1 - config.b1**n) / (np.sqrt(v / (1 - config.b2**n)) + config.epsilon)
  return p - rate * (ratio + decay * p), m, v


def test_three_steps_are_those_of_adamw_and_one_compilation(alone):
  """Clipped, with decay of the matrices only, while λ changes."""
  gradients, start, _ = alone
  with jax.enable_x64(True), on():
    config = settings()
    graphdef, _ = prepared(config)
    state = step.init_state(start, config)

    def update(state, arrays):
      return step.train_step(graphdef, config, state, arrays)

    once = jax.jit(chex.assert_max_traces(update, n=1))
    arrays, want = step.put(rows()), named(jax.device_get(start))
    m = v = {name: np.zeros_like(p) for name, p in want.items()}
    for n in range(3):
      grads = named(jax.device_get(gradients(state['params'], arrays, jnp.int32(n))[2]))
      state, metrics = once(state, arrays)
      norm = math.sqrt(sum(np.sum(g**2) for g in grads.values()))
      assert metrics['grad_norm'] == pytest.approx(norm, rel=1e-9) and norm > 0.5
      rate = float(config.optimizer.rate(jnp.int32(n), 10))
      for name, g in grads.items():
        decay = 0.1 if name.rpartition('.')[2].startswith('w_') else 0.0
        moved = adamw(
          want[name],
          m[name],
          v[name],
          g * 0.5 / norm,
          n + 1,
          rate,
          decay,
          config.optimizer,
        )
        want[name], m, v = moved[0], {**m, name: moved[1]}, {**v, name: moved[2]}
      assert_same(named(jax.device_get(state['params'])), want)
      assert float(metrics['lambda']['drafter']) == pytest.approx((0.3, 0.3, 0.1)[n])
      assert float(metrics['rate']) == pytest.approx(rate)
    assert int(state['step']) == 3


def test_a_frozen_trunk_stays_bit_identical_and_has_no_optimizer_state():
  with on():
    config = settings(dtype='float32', freeze_trunk=True)
    assert config.optimizer.weight_decay == 0.1
    graphdef, params = prepared(config)
    state = step.init_state(params, config)
    kept = sum(x.size for x in jax.tree.leaves(state['opt']))
    assert kept == 2 * sum(x.size for x in jax.tree.leaves(params['objectives'])) + 1
    once = jax.jit(functools.partial(step.train_step, graphdef, config))
    arrays, seen = step.put(rows()), []
    for _ in range(10):
      state, metrics = once(state, arrays)
      seen.append(float(metrics['loss']))
  before, after = jax.device_get((params, state['params']))
  jax.tree.map(np.testing.assert_array_equal, after['trunk'], before['trunk'])
  for name, p in named(after['objectives']).items():
    assert np.any(p != named(before['objectives'])[name]), name
  assert seen[-1] < seen[0]


OPTIMIZERS = {
  'adamw': optimizers.AdamW(),
  'muon': optimizers.Muon(
    rate=schedules.Wsd(0.01, 1), accumulate=2, ema=0.9, skip=optimizers.Spike()
  ),
}


@pytest.mark.slow
@pytest.mark.parametrize('kind', OPTIMIZERS)
def test_the_compiled_step_of_eight_devices_takes_its_own_state_again(kind):
  made = []
  for sizes in ({}, MESHES['fsdp, tensor']):
    with jax.enable_x64(True), on(**sizes):
      config = settings(optimizer=OPTIMIZERS[kind])
      graphdef, params = prepared(config)
      state = step.init_state(params, config)
      compiled = step.compile_train(graphdef, config, state)
      for _ in range(3):
        state, metrics = compiled(state, step.put(rows()))
      made.append(jax.device_get((state, metrics)))
  assert_same(made[1], made[0], 1e-8)


def test_evaluation_has_the_sums_of_training_and_counts_bytes(alone):
  _, params, (_, want, _) = alone
  with jax.enable_x64(True), on():
    config = settings()
    graphdef, _ = prepared(config)
    run = functools.partial(step.eval_step, graphdef, config, jnp.arange(V))
    sums, lengths = jax.device_get(jax.jit(run)(params, step.put(rows())))
  assert_same(sums, want)
  tokens, segments = rows()['tokens'], rows()['segments']
  for name, depth, k in (('next', 0, 0), ('drafter', 0, 1), ('drafter', 1, 2)):
    same = (segments[:, : -k - 1] == segments[:, k + 1 :]) & (segments[:, k + 1 :] > 0)
    valid = same & rows()['mask'][:, k + 1 :]
    assert lengths[name][depth] == tokens[:, k + 1 :][valid].sum()
