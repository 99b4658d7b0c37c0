"""Parallel heads against one document at a time in NumPy, the trunk included."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from probes import oracle

from mtpjax import mesh, model
from mtpjax.drafters import parallel
from mtpjax.drafters.base import Batch
from mtpjax.fields import ConfigError
from mtpjax.models import trunk as trunks
from mtpjax.models.attention import Rows
from mtpjax.models.trunk import TrunkOutput

V, T, D = 37, 12, 16
LENGTHS = ((5, 1, 4), (2, 9))
WINDOWS = (0, 3, 2)


@pytest.fixture(autouse=True, scope='module')
def one_device():
  with jax.set_mesh(mesh.make(mesh.Config(), jax.devices()[:1])):
    yield


def sizes(**changes):
  config = trunks.Config(
    vocab=V,
    width=D,
    layers=3,
    heads=4,
    kv_heads=2,
    ffn=24,
    qk_norm=True,
    windows=WINDOWS,
    embed_std=0.5,
    remat='none',
  )
  config = dataclasses.replace(config, **changes)
  config.finalize()
  return config


def packed():
  rng = np.random.default_rng(1)
  tokens = rng.integers(0, V, (2, T)).astype(np.int32)
  segments, positions = np.zeros((2, 2, T), np.int32)
  for b, row in enumerate(LENGTHS):
    for n, length in enumerate(row):
      start = sum(row[:n])
      segments[b, start : start + length] = n + 1
      positions[b, start : start + length] = np.arange(length)
  return tokens, positions, segments


def on_mesh(tokens, positions, segments):
  def put(x):
    return jax.device_put(x, jax.NamedSharding(jax.sharding.get_mesh(), mesh.ids_BT))

  rows = Rows(put(positions), put(segments))
  return Batch(put(tokens), put(segments != 0), rows)


def build(config, trunk):
  graphdef, abstract, _ = model.init(trunk, {'drafter': config}, 0)
  return graphdef, oracle.filled(abstract)


def run(graphdef, params, batch):
  """(predictions, the trunk's output), the trunk run as the model runs it."""
  whole = nnx.merge(graphdef, params)
  out = whole.trunk(batch.tokens, batch.rows, whole.needs)
  part = whole.objectives['drafter']
  hidden = part.predict(whole.trunk, out, batch, jnp.int32(0), None).hidden
  return hidden, out.hidden


def one_document(trunk, layers, params, config, tokens_N):
  """([K][N] predictions, [N] trunk hidden) of a document alone."""
  shared = params['trunk']
  after = [[shared['embedding'][t] for t in tokens_N]]
  for n in range(layers):
    w, window = oracle.at(shared['blocks'], n), WINDOWS[n % len(WINDOWS)]
    after.append(oracle.block(w, after[-1], trunk, window))
  # The heads stand beside the last layer and have its window.
  window = WINDOWS[(layers - 1) % len(WINDOWS)]
  heads, ys = [], after[-1]
  for k in range(config.depth):
    if config.form == 'anticausal':
      ys = after[layers - 1 - k]
    else:
      w = oracle.at(params['objectives']['drafter']['block'], k)
      xs = ys if config.form == 'causal' else after[-2]
      ys = oracle.block(w, xs, trunk, window)
    heads.append([oracle.norm(y, shared['gain_final']) for y in ys])
  return heads, after[-1]


@pytest.mark.parametrize(
  'form, match',
  [
    ('block', False),
    ('block', True),
    ('causal', False),
    ('causal', True),
    ('anticausal', False),
  ],
)
def test_heads_are_those_of_each_document_alone(form, match):
  """They read the layer before the last, of what is left where layers are given up, or
  the head before them, or each an earlier layer."""
  config = parallel.Config(depth=2, form=form, match_parameters=match)
  trunk = sizes(layers=5 if match else 3)
  graphdef, params = build(config, trunk)
  tokens, positions, segments = packed()
  batch = on_mesh(tokens, positions, segments)
  got, hidden = jax.jit(functools.partial(run, graphdef))(params, batch)
  got, hidden, wide = np.asarray(got), np.asarray(hidden), oracle.widen(params)
  assert got.shape == (2, 2, T, D)
  for b in range(2):
    for where in oracle.documents(segments[b]):
      heads, xs = one_document(trunk, 3, wide, config, tokens[b, where])
      np.testing.assert_allclose(got[:, b, where], heads, atol=5e-5)
      np.testing.assert_allclose(hidden[b, where], xs, atol=5e-4)


@pytest.mark.parametrize('form', ['causal', 'anticausal'])
def test_gradients_are_finite_differences_of_documents_alone(form):
  """Of a random projection, along one random direction in each parameter, in float64
  and NumPy."""
  config, trunk = parallel.Config(depth=2, form=form), sizes()
  graphdef, params = build(config, trunk)
  tokens, positions, segments = packed()
  batch, rng = on_mesh(tokens, positions, segments), np.random.default_rng(3)
  real = segments != 0
  toward = rng.normal(size=(2, 2, T, D)) * real[None, ..., None]

  def value(params):
    hidden = run(graphdef, params, batch)[0]
    return jnp.sum(hidden * jax.reshard(toward.astype(np.float32), mesh.act_KBTD))

  def plain(params):
    total = 0.0
    for b in range(2):
      for where in oracle.documents(segments[b]):
        heads = one_document(trunk, 3, params, config, tokens[b, where])[0]
        total += np.sum(np.array(heads) * toward[:, b, where])
    return total

  got, wide = oracle.widen(jax.jit(jax.grad(value))(params)), oracle.widen(params)
  found, tree = jax.tree.flatten(wide)
  for n, (path, gradient) in enumerate(jax.tree_util.tree_leaves_with_path(got)):
    if path[-1].key == 'unembedding':
      continue  # the loss's own
    way, both = rng.normal(size=found[n].shape), []
    for sign in (1e-5, -1e-5):
      moved = [x + sign * way if m == n else x for m, x in enumerate(found)]
      both.append(plain(jax.tree.unflatten(tree, moved)))
    wanted, name = (both[0] - both[1]) / 2e-5, jax.tree_util.keystr(path)
    scale = np.linalg.norm(gradient) * np.sqrt(gradient.size)
    assert scale > 1e-3, name
    np.testing.assert_allclose(
      np.sum(gradient * way), wanted, atol=1e-5 * scale, err_msg=name
    )


@pytest.mark.parametrize('form', ['causal', 'anticausal'])
def test_eight_devices_and_remat_give_the_gradients_of_one_device(form):
  def gradients(layout, devices, remat):
    with jax.set_mesh(mesh.make(layout, jax.devices()[:devices])):
      trunk = sizes(layers=3, windows=(0,), remat=remat)
      graphdef, params = build(parallel.Config(depth=2, form=form), trunk)
      batch = on_mesh(*packed())

      def value(params):
        hidden = run(graphdef, params, batch)[0]
        return jnp.sum(
          jnp.where((batch.rows.segments != 0)[None, ..., None], hidden, 0) ** 3
        )

      return oracle.widen(jax.jit(jax.grad(value))(params))

  one = gradients(mesh.Config(), 1, 'none')
  eight = gradients(mesh.Config(fsdp=2, tensor=2, context=2), 8, 'full')
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max()),
    eight,
    one,
  )


def test_linear_heads_are_matrices_on_the_last_layer():
  graphdef, params = build(parallel.Config(depth=2, form='linear'), sizes())
  batch = on_mesh(*packed())
  got, hidden = jax.jit(functools.partial(run, graphdef))(params, batch)
  wide = oracle.widen(params)
  real = packed()[2] != 0
  for k, w_DD in enumerate(wide['objectives']['drafter']['w_map']):
    heads = [
      oracle.norm(x @ w_DD, wide['trunk']['gain_final'])
      for x in np.asarray(hidden, np.float64)[real]
    ]
    np.testing.assert_allclose(np.asarray(got)[k][real], heads, atol=5e-5)


@pytest.mark.parametrize('form', ['block', 'causal'])
@pytest.mark.parametrize('depth', [1, 3])
def test_matched_heads_leave_the_parameter_count_exactly_as_it_was(depth, form):
  def count(objectives, trunk):
    abstract = model.init(trunk, objectives, 0)[1]
    return sum(x.size for x in jax.tree.leaves(abstract)), abstract

  plain, _ = count({}, sizes(layers=4))
  config = parallel.Config(depth=depth, form=form, match_parameters=True)
  matched, abstract = count({'drafter': config}, sizes(layers=4))
  assert matched == plain
  assert abstract['trunk']['blocks']['w_up'].shape[0] == 4 - depth
  config = parallel.Config(depth=depth, form=form)
  extra, abstract = count({'drafter': config}, sizes(layers=4))
  assert extra > plain
  assert abstract['trunk']['blocks']['w_up'].shape[0] == 4
  config = parallel.Config(depth=depth, form='anticausal')
  assert count({'drafter': config}, sizes(layers=4))[0] == plain


def test_an_unmatched_objective_beside_a_matched_one_reads_the_layers_that_are_left():
  both = {
    'drafter': parallel.Config(depth=2, match_parameters=True),
    'parallel': parallel.Config(depth=1),
    'causal': parallel.Config(depth=1, form='causal'),
    'anticausal': parallel.Config(depth=2, form='anticausal'),
  }
  graphdef, abstract, _ = model.init(sizes(layers=4), both, 0)  # 2 are left

  def taps(params, batch):
    whole = nnx.merge(graphdef, params)
    out = whole.trunk(batch.tokens, batch.rows, whole.needs)
    for part in whole.objectives.values():
      part.predict(whole.trunk, out, batch, jnp.int32(0), None)
    found.append((whole.needs.taps, whole.needs.layers_given_up))

  found = []
  jax.eval_shape(taps, abstract, on_mesh(*packed()))
  assert found == [((0, 1, 2), 2)]


@pytest.mark.parametrize('detach', [(), ('hidden',), ('hidden', 'head')])
def test_detach_stops_the_gradient_into_the_trunk(detach):
  trunk = sizes(layers=2)
  graphdef, params = build(parallel.Config(depth=2, detach=detach), trunk)
  batch, flags = on_mesh(*packed()), []

  def value(x_BTD):
    whole = nnx.merge(graphdef, params)
    x_BTD = jax.reshard(x_BTD, mesh.act_BTD)
    out = TrunkOutput(x_BTD, {1: x_BTD}, {})
    part = whole.objectives['drafter']
    predicted = part.predict(whole.trunk, out, batch, jnp.int32(0), None)
    flags.append(predicted.trains_head)
    return jnp.sum(predicted.hidden[..., 0])

  x_BTD = np.random.default_rng(2).normal(size=(2, T, D)).astype(np.float32)
  gradient = np.asarray(jax.jit(jax.grad(value))(x_BTD))
  assert flags == ['head' not in detach]
  real = packed()[2] != 0
  assert (np.abs(gradient).max(-1)[real] > 1e-4).all() != ('hidden' in detach)
  assert 'hidden' not in detach or not gradient.any()


@pytest.mark.parametrize(
  'changes, field, value, fix',
  [
    ({'depth': 3, 'match_parameters': True}, 'drafter.depth', 3, 'smaller depth'),
    (
      {'form': 'linear', 'match_parameters': True},
      'drafter.match_parameters',
      True,
      "form='block'",
    ),
    (
      {'form': 'anticausal', 'match_parameters': True},
      'drafter.match_parameters',
      True,
      "'causal', or False",
    ),
    ({'form': 'anticausal', 'depth': 3}, 'drafter.depth', 3, 'at most 2'),
    ({'detach': ('embedding',)}, 'drafter.detach', 'embedding', 'hidden, head'),
    ({'depth': 0}, 'drafter.depth', 0, 'at least 1'),
  ],
)
def test_a_bad_option_names_its_field_value_and_fix(changes, field, value, fix):
  with pytest.raises(ConfigError) as caught:
    parallel.Config(**changes).finalize(sizes(), 'drafter')
  assert (caught.value.field, caught.value.value) == (field, value)
  assert fix in caught.value.fix


def test_a_shallow_anticausal_head_fits():
  parallel.Config(depth=2, form='anticausal').finalize(sizes(), 'drafter')


def test_conventions_hold_every_option():
  found = parallel.Config(depth=2, match_parameters=True).conventions()
  expected = {'kind': 'parallel', 'modules': 2, 'depth': 2, 'match_parameters': True}
  assert expected.items() <= found.items()
  assert found['reads'] == 'the layer before the last'
  found = parallel.Config(depth=2, form='anticausal').conventions()
  assert found['modules'] == 0 and found['form'] == 'anticausal'
  assert {f.name for f in dataclasses.fields(parallel.Config)} <= {
    *found,
    'weight',
    'rho',
    'curriculum',
  }
