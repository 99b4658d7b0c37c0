"""Objectives as unlike as can be, most of them written against the contract alone.

They train side by side in one model, compiled once on one device and once on eight, and
each is checked there; alone, too, where time allows.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import oracle
from probes.training import (
  LENGTHS,
  OWN,
  PROBES,
  B,
  T,
  V,
  arrays,
  look,
  on_one_device,
  settings,
  train,
)

from mtpjax import mesh, model, step
from mtpjax.models import attention


@pytest.fixture(scope='module')
def together():
  return on_one_device()


# ------------------------------------------------------------------------------ oracle


def next_tokens(b, i, first, last):
  """[(d, token)] for the tokens d = first..last after i that may be predicted."""
  row = {name: x[b] for name, x in arrays().items()}
  return [
    (d, row['tokens'][i + d])
    for d in range(first, last + 1)
    if i + d < T
    and row['segments'][i] == row['segments'][i + d] != 0
    and row['mask'][i + d]
  ]


def values_next(seen, log_p):
  for b, i in np.ndindex(B, T):
    for _, token in next_tokens(b, i, 1, 1):
      yield 0, -log_p[0, b, i, token]


def values_depths(seen, log_p):
  """Of most: depth k at i predicts t[i+k+1]."""
  for b, i in np.ndindex(B, T):
    for d, token in next_tokens(b, i, 2, 3):
      yield d - 2, -log_p[d - 2, b, i, token]


def values_block_diffusion(seen, log_p):
  """Slot j of an anchor predicts t[anchor + j]."""
  for b, a in np.ndindex(*seen['drawn'].shape):
    for d, token in next_tokens(b, seen['drawn'][b, a], 1, 3):
      yield d - 1, -log_p[d - 1, b, a, token]


def values_token_order(seen, log_p):
  window = PROBES['token_order'].window
  for b, i in np.ndindex(B, T):
    nearest = {}
    for d, token in next_tokens(b, i, 1, window):
      nearest.setdefault(token, d)
    if nearest:
      raw = {token: np.exp(window - d) for token, d in nearest.items()}
      total = sum(raw.values())
      yield 0, -sum(p / total * log_p[0, b, i, t] for t, p in raw.items())


def values_bag(seen, log_p):
  """Each vocabulary entry on its own, from scores instead of log-probabilities."""
  window = PROBES['bag'].window
  rate = (window - 1) / V
  for b, i in np.ndindex(B, T):
    tokens = {int(token) for _, token in next_tokens(b, i, 2, window)}
    if tokens:
      total = 0.0
      for v in range(V):
        score = seen['w_KVD'][0, v] @ seen['hidden'][0, b, i] + np.log(
          rate / (1 - rate)
        )
        p = 1 / (1 + np.exp(-score))
        total -= np.log(p if v in tokens else 1 - p)
      yield 0, total


def values_registers(seen, log_p):
  """The register of i stands T further on, at the position before its target's."""
  for b, i in np.ndindex(B, T):
    distance = seen['positions'][b, T + i] - seen['positions'][b, i] + 1
    for _, token in next_tokens(b, i, distance, distance):
      yield 0, -log_p[0, b, T + i, token]


VALUES = {
  'next': values_next,
  'sequential': values_depths,
  'kv_sharing': values_depths,
  'parallel': values_depths,
  'residual': values_depths,
  'block_diffusion': values_block_diffusion,
  'token_order': values_token_order,
  'bag': values_bag,
  'registers': values_registers,
}


def means(run, name):
  """(mean, count) of each depth, from the first step's hidden states alone."""
  seen = oracle.widen(run.seen[name])
  if name == 'block_diffusion':
    seen['drawn'] = run.seen[name]['drawn']
  seen['positions'] = run.seen['batch'].rows.positions
  unembedding = run.states[0]['params']['trunk']['unembedding']
  shared = [np.asarray(unembedding, np.float64)] * len(seen['hidden'])
  pairs = zip(seen['hidden'], seen.get('w_KVD', shared), strict=True)
  log_p = np.stack([oracle.log_softmax(h, w_VD, V) for h, w_VD in pairs])
  depth = PROBES[name].depth if name in PROBES else 1
  found = [[] for _ in range(depth)]
  for k, value in VALUES[name](seen, log_p):
    found[k].append(value)
  return [np.mean(x) for x in found], [len(x) for x in found]


# ------------------------------------------------------------------- side by side, once


@pytest.mark.parametrize('name', ['next', *PROBES])
def test_each_loss_is_that_of_a_loop_over_its_hidden_states(name, together):
  mean, count = means(together, name)
  assert min(count) >= 3
  np.testing.assert_array_equal(together.metrics[0]['sums'][name].count, count)
  np.testing.assert_allclose(together.mean(name, 0), mean, rtol=2e-5)


def test_the_total_weighs_each_depth_by_its_own_mean(together):
  total = means(together, 'next')[0][0]
  for name, config in PROBES.items():
    raw = config.rho ** np.arange(config.depth)
    total += 0.5 * np.dot(raw / raw.sum(), means(together, name)[0])
  np.testing.assert_allclose(together.metrics[0]['loss'], total, rtol=2e-5)


@pytest.mark.parametrize('name', ['trunk', *OWN])
def test_gradients_are_finite_and_reach_every_parameter(name, together):
  parts = together.gradients
  tree = parts['trunk'] if name == 'trunk' else parts['objectives'][name]
  for path, gradient in jax.tree_util.tree_leaves_with_path(tree):
    assert np.isfinite(gradient).all(), path
    assert np.abs(gradient).max() > 1e-6, path


def test_the_register_token_learns_in_a_row_that_is_never_scored(together):
  table = together.gradients['trunk']['embedding']
  assert np.abs(table[V]).max() > 1e-4
  assert not table[V + 1 :].any()
  assert not together.gradients['trunk']['unembedding'][V:].any()


@pytest.mark.parametrize('name', ['next', *PROBES])
def test_training_lowers_each_loss(name, together):
  assert together.overall(name, -1) < together.overall(name, 0) - 0.1


def test_registers_change_nothing_for_ordinary_tokens(together):
  with jax.set_mesh(mesh.make(mesh.Config(), jax.devices()[:1])):
    graphdef, abstract, _ = model.init(together.config.trunk, {}, 0)
    trunk = oracle.filled(abstract, plain=True)  # as it is among the objectives
    run = jax.jit(functools.partial(look, graphdef, together.config))
    plain = run(trunk, step.put(arrays()), jnp.int32(0))['next']['hidden']
  got = together.seen['next']['hidden']
  assert got.shape[2] == 2 * T
  np.testing.assert_allclose(got[:, :, :T], plain, atol=3e-6)


def test_anchors_are_distinct_tokens_of_documents(together):
  anchors = together.seen['block_diffusion']['drawn']
  for b, row in enumerate(LENGTHS):
    assert len(set(anchors[b])) == 4
    assert max(anchors[b]) < sum(row)


def test_blocks_and_registers_see_nothing_after_what_they_stand_for(together):
  tokens, segments = arrays()['tokens'], arrays()['segments']
  b, middle = 1, 5
  tokens[b, middle] = (tokens[b, middle] + 1) % V
  got = together.again(tokens)

  def changed(name):
    gap = got[name]['hidden'] - together.seen[name]['hidden']
    return np.abs(gap).max(-1)[:, b] > 1e-5

  blocks, ordinary = changed('block_diffusion'), changed('registers')
  assert (segments[b] == 1).all()
  for a, anchor in enumerate(together.seen['block_diffusion']['drawn'][b]):
    np.testing.assert_array_equal(blocks[:, a], anchor >= middle)
  np.testing.assert_array_equal(ordinary[0, T:], np.arange(T) >= middle)
  np.testing.assert_array_equal(ordinary[0, :T], np.arange(T) >= middle)


def test_queries_from_elsewhere_see_no_register(together):
  """By its index alone a query is no register's own row."""
  with jax.set_mesh(mesh.make(mesh.Config(), jax.devices()[:1])):
    rows = jax.tree.map(jnp.asarray, together.seen['batch'].rows)
    seen = np.asarray(attention.visibility(rows, rows))
    others = dataclasses.replace(rows, visible=None)
    from_elsewhere = np.asarray(attention.visibility(others, rows))
  itself = np.eye(2 * T, dtype=bool)
  assert seen[:, itself].all()
  hidden = np.arange(2 * T) >= T
  assert not (seen & ~itself)[:, :, hidden].any()
  assert not from_elsewhere[:, :, hidden].any()
  np.testing.assert_array_equal(from_elsewhere[:, :, ~hidden], seen[:, :, ~hidden])


def on_eight_devices(**changes):
  with jax.set_mesh(mesh.make(mesh.Config(fsdp=2, tensor=2, context=2))):
    return train(steps=1, watch=False, **changes)


def test_eight_devices_give_what_one_device_gives(together):
  same(on_eight_devices(), together)


@pytest.mark.slow
def test_two_microbatches_on_eight_devices_give_what_one_device_gives(together):
  """Random choices are drawn for the whole batch, before it is split."""
  same(on_eight_devices(accumulate=2), together)


def same(got, expected, names=('next', *PROBES)):
  np.testing.assert_allclose(
    got.metrics[0]['loss'], expected.metrics[0]['loss'], rtol=1e-5
  )
  for name in names:
    np.testing.assert_allclose(got.mean(name, 0), expected.mean(name, 0), rtol=1e-5)

  def check(path, a, b):
    name = jax.tree_util.keystr(path)
    np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max(), err_msg=name)

  jax.tree_util.tree_map_with_path(check, got.gradients, expected.gradients)


def test_a_frozen_trunk_stays_bit_identical_while_the_objectives_learn():
  frozen = on_one_device(freeze_trunk=True, watch=False, steps=12)
  first, last = frozen.states[0]['params'], frozen.states[-1]['params']
  jax.tree.map(np.testing.assert_array_equal, last['trunk'], first['trunk'])
  assert 'trunk' not in frozen.states[0]['opt'][0].mu
  for name in OWN:
    assert frozen.overall(name, -1) < frozen.overall(name, 0) - 0.05
    changed = jax.tree.map(
      lambda a, b: bool((a != b).any()),
      last['objectives'][name],
      first['objectives'][name],
    )
    assert all(jax.tree.leaves(changed)), name
  # Nothing that registers learn from is their own.
  np.testing.assert_allclose(frozen.mean('next', -1), frozen.mean('next', 0))


@pytest.mark.parametrize('name', PROBES)
def test_evaluation_traces_without_a_key_and_trusts_ids_only_where_they_are_tokens(
  name,
):
  with jax.set_mesh(mesh.make(mesh.Config(), jax.devices()[:1])):
    config = settings(names=(name,))
    graphdef, abstract, _ = model.init(config.trunk, config.parts(), config.seed)
    lengths = jnp.ones(V, jnp.int32)
    run = functools.partial(step.eval_step, graphdef, config, lengths)
    sums, sizes = jax.eval_shape(run, abstract, step.abstract_arrays(config))
  assert sums[name].nll.shape == (PROBES[name].depth,)
  assert set(sizes) == {'next', name} - {'token_order', 'bag'}


def test_random_choices_are_split_into_microbatches_with_their_rows():
  """Their values are compared where time allows."""
  layout = mesh.Config(fsdp=2, tensor=2, context=2)
  with jax.set_mesh(mesh.make(layout)):
    config = settings(accumulate=2)
    graphdef, abstract, _ = model.init(config.trunk, config.parts(), config.seed)
    run = functools.partial(step.gradients, graphdef)
    batch = jax.eval_shape(
      lambda x: step.to_batch(x, False), step.abstract_arrays(config)
    )
    _, sums, grads = jax.eval_shape(
      lambda params, batch: run(params, batch, config, jnp.int32(0)), abstract, batch
    )
  assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, abstract)
  assert sums['block_diffusion'].count.shape == (3,)


# ------------------------------------------------------------------------ one at a time


@pytest.mark.slow
@pytest.mark.parametrize('name', PROBES)
def test_each_probe_alone_trains_and_gives_the_loss_it_gives_among_others(
  name, together
):
  alone = on_one_device(names=(name,), steps=8)
  mean, _ = means(alone, name)
  np.testing.assert_allclose(alone.mean(name, 0), mean, rtol=2e-5)
  if name not in ('block_diffusion', 'registers'):  # these draw from another key
    np.testing.assert_allclose(alone.mean(name, 0), together.mean(name, 0), rtol=1e-5)
  assert alone.overall(name, -1) < alone.overall(name, 0) - 0.1
  own = alone.gradients.get('objectives', {})
  assert set(own) == {name} - {'registers'}
  for path, gradient in jax.tree_util.tree_leaves_with_path(own):
    assert np.isfinite(gradient).all() and gradient.any(), path


@pytest.mark.slow
def test_initialisation_makes_every_parameter_in_its_sharded_place():
  with jax.set_mesh(mesh.make(mesh.Config(fsdp=2, tensor=2, context=2))):
    config = settings()
    _, abstract, make = model.init(config.trunk, config.parts(), config.seed)
    params = make()
  for (path, x), a in zip(
    jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(abstract), strict=True
  ):
    assert (x.shape, x.dtype) == (a.shape, a.dtype), path
    assert x.sharding.spec == a.sharding.spec, path
    assert np.isfinite(x).all(), path
