"""Updates against NumPy: AdamW, Muon, the average, and steps that are skipped."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from updates import CONSTANT, bfloat16, drawn, named, on, tensors

from mtpjax import checkpoint, schedules, step
from mtpjax import config as configs
from mtpjax.fields import ConfigError
from mtpjax.optimizers import AdamW, Muon, Spike

# -------------------------------------------------------------------------------- AdamW


def test_only_matrices_decay_and_a_gradient_of_zero_moves_nothing_else(given_gradients):
  params = tensors('float32')
  zeros = jax.tree.map(jnp.zeros_like, params)
  state, metrics = given_gradients(params, AdamW(weight_decay=0.1), [zeros])[-1]
  before, after = named(params), named(state['params'])
  rate = 3e-3 / 100  # the first of 100 steps of warm-up
  want = before.pop('trunk/w_up') * (1 - 0.1 * rate)
  np.testing.assert_allclose(after.pop('trunk/w_up'), want, rtol=1e-6)
  jax.tree.map(np.testing.assert_array_equal, after, before)
  assert metrics['grad_norm'] == 0


def exact_norm(tree):
  wide = [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]
  return math.sqrt(sum(np.sum(x**2) for x in wide))


def test_norm_and_clipping_of_bfloat16_are_exact(given_gradients, monkeypatch):
  grads = tensors('bfloat16')
  norm = exact_norm(grads)
  assert float(step.global_norm(grads)) == pytest.approx(norm, rel=1e-6)
  monkeypatch.setattr(AdamW, 'build', lambda self: optax.identity())
  clip = norm / 4 * (1 + 47.49 / 128)  # bfloat16 would round the scale by 0.3 %
  zeros = jax.tree.map(jnp.zeros_like, grads)
  constant = schedules.WarmupConstant(peak=1.0, warmup=0)
  state, metrics = given_gradients(zeros, AdamW(rate=constant, clip=clip), [grads])[-1]
  assert float(metrics['grad_norm']) == pytest.approx(norm, rel=1e-6)
  assert exact_norm(state['params']) == pytest.approx(clip, rel=1e-3)
  assert all(x.dtype == 'bfloat16' for x in jax.tree.leaves(state['params']))


def test_a_norm_below_the_clip_changes_no_gradient(given_gradients):
  grads = tensors('float32')
  clips = (2 * exact_norm(grads), None)
  runs = [given_gradients(grads, AdamW(clip=c), [grads])[-1][0] for c in clips]
  mus = [state['opt'][0].mu for state in runs]
  jax.tree.map(np.testing.assert_array_equal, *jax.device_get(mus))


@pytest.mark.parametrize('moment', ['float32', 'bfloat16'])
def test_bfloat16_parameters_have_moments_in_float32_unless_asked(
  moment, given_gradients
):
  config = AdamW(rate=CONSTANT, clip=None, moment_dtype=moment)
  each = [tensors('bfloat16', seed) for seed in range(4)]
  params = tensors('bfloat16')
  state, _ = given_gradients(params, config, each)[-1]
  adam = state['opt'][0]
  assert {x.dtype.name for x in jax.tree.leaves(adam.mu)} == {moment}
  assert {x.dtype.name for x in jax.tree.leaves(adam.nu)} == {'float32'}
  got = [named(x) for x in (state['params'], adam.mu, adam.nu)]
  for name, p in named(params).items():
    p = p.astype(np.float64)
    m = v = np.zeros_like(p)
    for n, grads in enumerate(each, 1):
      g = named(grads)[name].astype(np.float64)
      m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
      way = m / (1 - 0.9**n) / (np.sqrt(v / (1 - 0.95**n)) + 1e-8)
      p = bfloat16(p - 0.01 * (way + 0.1 * p * name.endswith('w_up')))
      m = m if moment == 'float32' else bfloat16(m)
    found = [x[name].astype(np.float64) for x in got]
    # Of what is rounded, a few may fall to the other side; by one unit at most.
    for a, b, rounded in (
      (found[0], p, True),
      (found[1], m, moment == 'bfloat16'),
      (found[2], v, False),
    ):
      if not rounded:
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)
      else:
        np.testing.assert_allclose(a, b, rtol=2**-7, atol=2**-9)
        assert np.mean(a != b) < 0.01


# ------------------------------------------------------------------------------ average


def weighted_mean(values, decay):
  weights = [decay ** (len(values) - 1 - n) for n in range(len(values))]
  total = sum(w * v.astype(np.float64) for w, v in zip(weights, values, strict=True))
  return total / sum(weights)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_the_average_is_the_weighted_mean_of_what_updates_left(dtype, given_gradients):
  config = AdamW(rate=CONSTANT, ema=0.7)
  each = [tensors(dtype, seed) for seed in range(5)]
  states = [s for s, _ in given_gradients(tensors(dtype), config, each)]
  for n in (1, 2, 5):
    got = named(states[n]['ema'])
    past = [named(s['params']) for s in states[1 : n + 1]]
    for name in got:
      assert got[name].dtype == np.float32
      want = weighted_mean([p[name] for p in past], 0.7)
      np.testing.assert_allclose(got[name], want, rtol=1e-5, atol=1e-6)
  used = step.evaluated(states[5])
  chex.assert_trees_all_equal_shapes_and_dtypes(used, states[5]['params'])
  jax.tree.map(
    lambda e, u: np.testing.assert_array_equal(e.astype(u.dtype), u),
    states[5]['ema'],
    used,
  )
  plain = {k: v for k, v in states[5].items() if k != 'ema'}
  assert step.evaluated(plain) is plain['params']


def test_the_average_shares_no_memory_with_the_parameters():
  """Both are donated to the step."""
  params = tensors('float32')
  init = functools.partial(
    step.init_state, config=configs.Config(optimizer=AdamW(ema=0.9))
  )
  for made in (init, jax.jit(init)):
    state = made(jax.tree.map(jnp.copy, params))
    places = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)]
    assert len(set(places)) == len(places)


def test_an_average_of_a_long_memory_starts_at_the_first_update():
  with jax.enable_x64(False):
    p = {'w': jnp.asarray([3.0, -2.0])}
    old = {'w': jnp.asarray([100.0, 7.0])}
    got = step.averaged(old, p, 0.99999, jnp.int32(1))
    np.testing.assert_allclose(got['w'], p['w'], rtol=1e-4)


def test_what_is_frozen_has_no_average_and_is_evaluated_as_it_is(
  given_gradients, tmp_path
):
  """Also from a checkpoint, which is read only where it is needed."""
  config = AdamW(rate=CONSTANT, ema=0.5)
  whole = configs.Config(optimizer=config, tune=('trunk/blocks/1/*', 'objectives/h*'))
  with on(fsdp=2, tensor=4):
    params, *each = [drawn(seed, 'float32') for seed in range(4)]
    state, _ = given_gradients(params, config, each, tune=whole.tune)[-1]
    assert 'embedding' not in state['ema']['trunk']
    used = step.evaluated(state)
    before, after, average = named(params), named(state['params']), named(used)
    with checkpoint.Checkpoints(tmp_path, checkpoint.Config(every=1)) as saved:
      saved.save(3, state, {}, wait=True)
    abstract = jax.eval_shape(lambda x: x, params)
    wanted = step.to_evaluate(abstract, whole)
    restored = checkpoint.Checkpoints(tmp_path).restore(wanted, subset=True)
    assert restored is not None
    again = step.evaluated(restored.state, abstract)
    chex.assert_trees_all_equal(again, used)
    moments, spec = state['ema'], params['trunk']['blocks']['w_up'].sharding
    assert moments['trunk']['blocks']['w_up'].sharding == spec
  for name, value in average.items():
    if name.startswith('trunk/blocks'):
      np.testing.assert_array_equal(value[[0, 2]], before[name][[0, 2]])
      assert np.all(value[1] != before[name][1])
    elif name.startswith('objectives/heads'):
      assert not np.array_equal(value, after[name])
    else:
      np.testing.assert_array_equal(value, before[name])


# -------------------------------------------------------------------------------- skips


def by_hand(values, config):
  """Which values are skipped: a list of what was accepted, in weights of West 1979."""
  taken, mean, variance, row, out = 0, 0.0, 0.0, 0, []
  for x in values:
    high = taken >= config.warmup and x > mean + config.sigmas * math.sqrt(variance)
    anew = high and row >= config.patience
    if not math.isfinite(x) or (high and not anew):
      row += 1
      out.append(1)
      continue
    taken = 0 if anew else taken
    taken, row = taken + 1, 0
    if taken == 1:
      mean, variance = x, 0.0
    else:
      part = max(1 / taken, 1 / config.window)
      variance = (1 - part) * (variance + part * (x - mean) ** 2)
      mean += part * (x - mean)
    out.append(0)
  return out, mean, math.sqrt(variance)


def judged(values, config, name='loss'):
  state, out = config.init(), []
  once = jax.jit(lambda s, x: config(s, **{'loss': x, 'grad_norm': x, name: x}))
  for x in values:
    skip, state = once(state, jnp.float32(x))
    out.append(int(skip))
  return out, state


def test_spikes_are_skipped_and_a_lasting_new_level_is_not():
  rng = np.random.default_rng(0)
  config = Spike(sigmas=4.0, window=16, warmup=8, patience=3, watch=('loss',))
  usual = rng.normal(2, 0.1, 40)
  usual[5], usual[20], usual[30], usual[31] = 9, 9, math.nan, math.inf  # 5: warm-up
  values = [*usual, *rng.normal(6, 0.1, 20)]
  got, state = judged(values, config)
  want, mean, deviation = by_hand(values, config)
  assert got == want
  assert [n for n, x in enumerate(got) if x] == [20, 30, 31, 40, 41, 42]
  assert float(state['loss']) == pytest.approx(mean, rel=1e-4)
  assert float(state['loss_variance']) ** 0.5 == pytest.approx(deviation, rel=1e-3)
  assert int(state['skipped']) == 6 and int(state['in_a_row']) == 0


def test_the_first_values_have_the_plain_mean_and_deviation():
  values = np.random.default_rng(1).normal(3, 1, 10)
  _, state = judged(values, Spike(window=16, warmup=64, watch=('grad_norm',)))
  assert float(state['grad_norm']) == pytest.approx(values.mean(), rel=1e-5)
  assert float(state['grad_norm_variance']) == pytest.approx(values.var(), rel=1e-4)


def test_what_is_not_finite_is_never_accepted_and_only_what_is_watched_is_judged():
  config = Spike(sigmas=1.0, window=4, warmup=2, patience=1, watch=('loss',))
  assert judged([1, 2] + [math.nan] * 5, config)[0] == [0, 0, 1, 1, 1, 1, 1]
  state, skips = config.init(), []
  for norm in (1, 1.1, 1, 50, math.inf):
    skip, state = config(state, loss=jnp.float32(1), grad_norm=jnp.float32(norm))
    skips.append(int(skip))
  assert skips == [0, 0, 0, 0, 1]


@pytest.mark.parametrize('kind', [AdamW, Muon])
def test_a_skipped_update_leaves_all_as_it_was_and_counts(kind, given_gradients):
  spike = Spike(sigmas=3.0, window=8, warmup=2, patience=2)
  config = kind(rate=CONSTANT, clip=1.0, ema=0.9, skip=spike)
  with on():
    grads = tensors('float32', 1)
    nan = jax.tree.map(lambda g: g * math.nan, grads)
    each = [grads, grads, grads, nan, grads]
    seen = given_gradients(
      tensors('float32'), config, each, losses=(2, 2.1, 9, 2, 2.05)
    )
    assert [int(m['skipped']) for _, m in seen[1:]] == [0, 0, 1, 1, 0]
    states = [jax.device_get(s) for s, _ in seen]
    # As if the two had never been, but for the count of steps.
    short = given_gradients(
      tensors('float32'), config, [grads] * 3, losses=(2, 2.1, 2.05)
    )
  for part in ('params', 'opt', 'ema'):
    for n in (3, 4):
      chex.assert_trees_all_equal(states[n][part], states[2][part])
    chex.assert_trees_all_equal(states[5][part], jax.device_get(short[-1][0][part]))
  assert [int(s['step']) for s in states] == [0, 1, 2, 3, 4, 5]
  assert int(states[5]['spike']['skipped']) == 2


def test_a_run_that_goes_on_skips_what_the_straight_one_does(given_gradients, tmp_path):
  spike = Spike(sigmas=3.0, window=8, warmup=2, patience=2)
  config = Muon(rate=CONSTANT, ema=0.9, skip=spike, moment_dtype='bfloat16')
  losses = (2, 2.1, 2.05, 9, 9, 9, 2)
  with on(fsdp=2):
    each = [drawn(seed, 'float32') for seed in range(1, 8)]
    straight = given_gradients(drawn(0, 'float32'), config, each, losses)
    init = functools.partial(step.init_state, config=configs.Config(optimizer=config))
    abstract = jax.eval_shape(init, straight[0][0]['params'])
    with checkpoint.Checkpoints(tmp_path, checkpoint.Config(every=1)) as saved:
      saved.save(4, straight[4][0], {}, wait=True)
      restored = saved.restore(abstract)
    assert restored is not None
    rest = given_gradients(None, config, each[4:], losses[4:], state=restored.state)
    chex.assert_trees_all_equal(rest[-1][0], straight[-1][0])
  skipped = [int(m['skipped']) for _, m in straight[1:]]
  assert skipped == [0, 0, 0, 1, 1, 0, 0]  # the third of a new level is accepted
  assert [int(m['skipped']) for _, m in rest[1:]] == skipped[4:]


def test_without_skips_or_average_the_state_has_neither(given_gradients):
  params = tensors('float32')
  state, metrics = given_gradients(params, AdamW(), [params])[-1]
  assert set(state) == {'step', 'params', 'opt'} and 'skipped' not in metrics


# ----------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
  ('config', 'field'),
  [
    (AdamW(b1=1.0), 'b1'),
    (AdamW(b2=-0.1), 'b2'),
    (AdamW(epsilon=0.0), 'epsilon'),
    (AdamW(clip=0.0), 'clip'),
    (AdamW(weight_decay=-0.1), 'weight_decay'),
    (AdamW(accumulate=0), 'accumulate'),
    (AdamW(ema=1.0), 'ema'),
    (AdamW(ema=0.0), 'ema'),
    (AdamW(rate=schedules.Wsd(decay=0.0)), 'rate.decay'),
    (AdamW(skip=Spike(sigmas=0.0)), 'skip.sigmas'),
    (AdamW(skip=Spike(window=1)), 'skip.window'),
    (AdamW(skip=Spike(warmup=0)), 'skip.warmup'),
    (AdamW(skip=Spike(patience=0)), 'skip.patience'),
    (AdamW(skip=Spike(watch=())), 'skip.watch'),
    (Muon(momentum=1.0), 'momentum'),
    (Muon(iterations=0), 'iterations'),
    (Muon(adam_rate=-1.0), 'adam_rate'),
    (Muon(b1=1.0), 'b1'),
  ],
)
def test_a_senseless_optimizer_is_refused_by_its_field(config, field):
  with pytest.raises(ConfigError) as error:
    config.finalize()
  assert error.value.field == f'optimizer.{field}'


def test_sensible_optimizers_are_not_refused():
  AdamW(clip=None, ema=0.999, skip=Spike()).finalize()
  Muon(rate=schedules.Wsd()).finalize()
