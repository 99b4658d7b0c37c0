"""Depth curricula: which depth weighs how much when, and what is not trained then."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from probes import oracle

from mtpjax import config as configs
from mtpjax import fields, mesh, model, schedules, step
from mtpjax.data import batches
from mtpjax.drafters import parallel
from mtpjax.fields import ConfigError
from mtpjax.models import trunk

STEPS, K = 40, 3
FORWARD, REVERSE = schedules.Forward, schedules.Reverse


@pytest.fixture(autouse=True, scope='module')
def one_device():
  with jax.set_mesh(mesh.make(mesh.Config(), jax.devices()[:1])):
    yield


def settings(curriculum, rho=0.5, depth=K):
  return configs.finalize(
    configs.Config(
      steps=STEPS,
      data=batches.Config(length=12, batch=2, shards=2),
      trunk=trunk.Config(vocab=17, width=8, layers=1, heads=2, ffn=16, remat='none'),
      drafter=parallel.Config(
        depth=depth,
        form='linear',
        rho=rho,
        weight=schedules.Linear(0.8, 0.4),
        curriculum=curriculum,
      ),
    )
  )


def on(curriculum, number, depth):
  """How many depths are trained at step `number` of STEPS, in whole numbers."""
  forward = isinstance(curriculum, FORWARD)
  end = curriculum.full if forward else curriculum.alone
  done = 0
  for k in range(1, depth + 1):
    # The k-th change is at k / (K + 1), or at k / K of the given end (in percent).
    left = number * (depth + 1) if end is None else number * depth * 100
    right = k * STEPS if end is None else k * STEPS * round(100 * end)
    done += left >= right
  return done if forward else depth - done


CASES = [
  (FORWARD(), K, 0.5),
  (REVERSE(), K, 0.5),
  (FORWARD(0.75), K, 1.0),
  (REVERSE(0.5), K, 2.0),
  (FORWARD(1.0), 1, 1.0),
  (REVERSE(), 1, 0.3),
  (FORWARD(0.6), 5, 0.9),
]


@pytest.mark.parametrize(('curriculum', 'depth', 'rho'), CASES)
def test_weights_of_every_step_are_those_of_a_loop(curriculum, depth, rho):
  config = settings(curriculum, rho, depth)
  graphdef, abstract, _ = model.init(config.trunk, config.parts(), 0)
  whole = nnx.merge(graphdef, abstract)

  @jax.jit
  @functools.partial(chex.assert_max_traces, n=1)
  def weights(number):
    fraction = number / STEPS  # as the train step has it
    return model.depth_weights(whole, fraction, True, jnp.dtype('float32'))

  chex.clear_trace_counter()
  stages = []
  for number in range(STEPS + 1):
    got = weights(jnp.int32(number))
    count = on(curriculum, number, depth)
    raw = [rho**k if k < count else 0.0 for k in range(depth)]
    scale = (0.8 - 0.4 * number / STEPS) / sum(raw) if count else 0.0
    np.testing.assert_allclose(got['drafter'], [scale * w for w in raw], rtol=1e-6)
    assert np.count_nonzero(got['drafter']) == count
    assert got['next'] == 1
    stages.append(count)
  order = 1 if isinstance(curriculum, FORWARD) else -1
  assert sorted(set(stages), key=lambda n: order * n) == list(dict.fromkeys(stages))
  assert set(stages) == set(range(depth + 1))


def test_the_papers_stages_are_equal():
  """40 steps of a model of depth 3: 10 of each stage."""
  for curriculum, want in ((FORWARD(), [0, 1, 2, 3]), (REVERSE(), [3, 2, 1, 0])):
    run = jax.jit(functools.partial(curriculum, depth=K))
    found = [run(jnp.float32(n / STEPS)) for n in range(STEPS)]
    assert [int(x.sum()) for x in found] == [n for n in want for _ in range(10)]
    assert all(sorted(x, reverse=True) == list(x) for x in found)  # the nearest first


def test_without_a_curriculum_all_depths_train_all_the_time():
  config = settings(None)
  graphdef, abstract, _ = model.init(config.trunk, config.parts(), 0)
  whole = nnx.merge(graphdef, abstract)
  for fraction in (0.0, 0.4, 1.0):
    found = model.depth_weights(
      whole, jnp.float32(fraction), True, jnp.dtype('float32')
    )
    want = (0.8 - 0.4 * fraction) * np.array([4, 2, 1]) / 7
    np.testing.assert_allclose(found['drafter'], want, rtol=1e-6)


@pytest.fixture(
  scope='module', params=[FORWARD(), REVERSE()], ids=['forward', 'reverse']
)
def training(request):
  """(curriculum, {step: (total, sums, gradients)}, sums of evaluation, traces)."""
  config = settings(request.param)
  graphdef, abstract, _ = model.init(config.trunk, config.parts(), 0)
  params = oracle.filled(abstract)
  rng = np.random.default_rng(0)
  shape = (2, 12)
  arrays = step.put(
    {
      'tokens': rng.integers(0, 17, shape).astype(np.int32),
      'positions': np.broadcast_to(np.arange(12, dtype=np.int32), shape),
      'segments': np.ones(shape, np.int32),
      'mask': np.ones(shape, bool),
    }
  )
  chex.clear_trace_counter()

  @jax.jit
  @functools.partial(chex.assert_max_traces, n=1)
  def run(params, arrays, number):
    batch = step.to_batch(arrays, False)
    return step.gradients(graphdef, params, batch, config, number)

  found = {
    number: jax.device_get(run(params, arrays, jnp.int32(number)))
    for number in (0, 9, 10, 25, 39)
  }
  sums, _ = jax.jit(
    functools.partial(step.eval_step, graphdef, config, jnp.ones(17, jnp.int32))
  )(params, arrays)
  return request.param, found, jax.device_get(sums)


def test_a_depth_that_is_off_gets_exactly_no_gradient(training):
  curriculum, found, _ = training
  for number, (_, _, gradients) in found.items():
    count = on(curriculum, number, K)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients['objectives']):
      assert len(leaf) == K
      for k in range(K):
        assert leaf[k].any() == (k < count), (number, k, path)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))


def test_the_total_holds_the_depths_that_are_on_and_figures_hold_all(training):
  curriculum, found, evaluated = training
  for number, (total, sums, _) in found.items():
    mean = sums['drafter'].nll / sums['drafter'].count
    assert (mean > 0.5).all() and sums['drafter'].count.tolist() == [20, 18, 16]
    raw = [0.5**k * (k < on(curriculum, number, K)) for k in range(K)]
    want = sums['next'].nll[0] / sums['next'].count[0]
    if any(raw):
      want += (0.8 - 0.4 * number / STEPS) * np.dot(raw, mean) / sum(raw)
    assert total == pytest.approx(want, rel=1e-5)
  first = found[0][1]
  np.testing.assert_allclose(evaluated['drafter'].nll, first['drafter'].nll, rtol=1e-5)
  np.testing.assert_array_equal(evaluated['drafter'].count, [20, 18, 16])


@pytest.mark.parametrize(
  ('curriculum', 'field'),
  [
    (FORWARD(0.0), 'drafter.curriculum.full'),
    (FORWARD(1.5), 'drafter.curriculum.full'),
    (REVERSE(-0.1), 'drafter.curriculum.alone'),
    (REVERSE(float('nan')), 'drafter.curriculum.alone'),
  ],
)
def test_a_senseless_curriculum_is_refused_by_its_field(curriculum, field):
  with pytest.raises(ConfigError) as error:
    settings(curriculum)
  assert error.value.field == field


def test_a_curriculum_is_saved_and_is_no_convention():
  config = settings(FORWARD(0.5))
  assert fields.from_json(fields.to_json(config)) == config
  plain = settings(None)
  assert configs.conventions(config) == configs.conventions(plain)
