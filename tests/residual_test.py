"""Residual heads against a loop over positions in NumPy; their own heads' loss and
gradients against the plain sum; and what they start as."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from probes import oracle

from mtpjax import losses, mesh, model, optimizers
from mtpjax.drafters import residual
from mtpjax.drafters.base import Batch
from mtpjax.fields import ConfigError
from mtpjax.models import trunk as trunks
from mtpjax.models.attention import Rows
from mtpjax.models.trunk import TrunkOutput

V, T, D, K = 37, 8, 16, 2
V_LARGE = 16384
SEGMENTS = np.array([[1] * 5 + [2] * 2 + [0], [1] * 8] * 2)
FORMS = {
  'seed': residual.Config(depth=K),
  'seed, own heads': residual.Config(depth=K, expansion=2, own_head=True),
  'medusa': residual.Config(depth=K, form='medusa', layers=2),
  'medusa, one head': residual.Config(depth=K, form='medusa', own_head=False),
}


@pytest.fixture(autouse=True, scope='module')
def one_device():
  with jax.set_mesh(mesh.make(mesh.Config(), jax.devices()[:1])):
    yield


def sizes(**changes):
  config = trunks.Config(
    **{
      'vocab': V,
      'vocab_multiple': 8,
      'width': D,
      'layers': 1,
      'heads': 2,
      'ffn': 16,
      'embed_std': 0.5,
      'logit_softcap': 9.0,
      'remat': 'none',
      **changes,
    }
  )
  config.finalize()
  return config


def build(config, trunk, seed=0):
  graphdef, abstract, _ = model.init(trunk, {'drafter': config}, 0)
  return graphdef, oracle.filled(abstract, seed)


def on_mesh():
  def put(x):
    return jax.device_put(x, jax.NamedSharding(jax.sharding.get_mesh(), mesh.ids_BT))

  tokens = np.random.default_rng(1).integers(0, V, SEGMENTS.shape).astype(np.int32)
  at = np.broadcast_to(np.arange(T, dtype=np.int32), SEGMENTS.shape)
  rows = Rows(put(at), put(SEGMENTS.astype(np.int32)))
  return Batch(put(tokens), put(SEGMENTS != 0), rows)


def hiddens():
  x = np.random.default_rng(2).normal(size=(*SEGMENTS.shape, D)).astype(np.float32)
  return jax.device_put(x, jax.NamedSharding(jax.sharding.get_mesh(), mesh.act_BTD))


def predict(graphdef, params, hidden, key=None):
  whole = nnx.merge(graphdef, params)
  part, out = whole.objectives['drafter'], TrunkOutput(hidden, {}, {})
  return part.predict(whole.trunk, out, None, jnp.int32(0), key)


def silu(x):
  return x / (1 + np.exp(-x))


def one_position(config, params, k, h):
  """What depth k's head gets at a position, of the trunk's hidden [D] there."""
  own, gain = params['objectives']['drafter'], params['trunk']['gain_final']
  if config.form == 'medusa':
    x = oracle.norm(h, gain)
    for w in own['w_map'][k]:
      x = x + silu(x @ w)
    return x
  y = silu(oracle.norm(h, own['gain_in'][k]) @ own['w_up'][k]) @ own['w_down'][k]
  return oracle.norm(h + oracle.norm(y, own['gain_out'][k]), gain)


def table(config, params, k):
  if config.owns_head:
    return params['objectives']['drafter']['unembedding'][f'depth_{k + 1}']
  return params['trunk']['unembedding']


@pytest.mark.parametrize('name', FORMS)
def test_predictions_and_logits_are_those_of_each_position_alone(name):
  config = FORMS[name]
  graphdef, params = build(config, sizes())

  @jax.jit
  def run(params, hidden):
    found = predict(graphdef, params, hidden)
    head = found.head or nnx.merge(graphdef, params).trunk.head()
    return found.hidden, losses.head_logits(found.hidden, head)

  got, logits = jax.device_get(run(params, hiddens()))
  wide, hidden = oracle.widen(params), oracle.widen(hiddens())
  for k, b, i in np.ndindex(K, *SEGMENTS.shape):
    wanted = one_position(config, wide, k, hidden[b, i])
    np.testing.assert_allclose(got[k, b, i], wanted, atol=3e-5)
    z = 9 * np.tanh(wanted @ table(config, wide, k)[:V].T / 9)
    np.testing.assert_allclose(logits[k, b, i, :V], z, atol=5e-5)
  assert (logits[..., V:] < -1e29).all()


def start(config, trunk):
  graphdef, _, make = model.init(trunk, {'drafter': config}, 0)
  return graphdef, make()


@pytest.mark.parametrize('tied', [False, True])
@pytest.mark.parametrize('name', ['seed, own heads', 'medusa', 'medusa, one head'])
def test_every_depth_starts_as_the_next_tokens_head_and_can_leave_it(name, tied):
  graphdef, params = start(FORMS[name], sizes(tied=tied))

  @jax.jit
  def run(params, hidden):
    trunk = nnx.merge(graphdef, params).trunk
    found = predict(graphdef, params, hidden)
    plain = losses.head_logits(trunk.final_norm(hidden), trunk.head())
    return losses.head_logits(found.hidden, found.head or trunk.head()), plain

  logits, plain = run(params, hiddens())
  for k in range(K):
    np.testing.assert_array_equal(logits[k], plain)

  def value(own, hidden):
    found = predict(graphdef, {**params, 'objectives': {'drafter': own}}, hidden)
    return jnp.sum(found.hidden[..., 0])

  own = jax.jit(jax.grad(value))(params['objectives']['drafter'], hiddens())
  for leaf in ('w_map',) if 'medusa' in name else ('gain_out',):
    size = np.abs(own[leaf]).max()
    assert 1e-3 < size < 1e3


def test_a_loaded_trunk_is_adopted_by_fresh_heads():
  graphdef, params = start(FORMS['medusa'], sizes())
  params['trunk']['unembedding'] = params['trunk']['unembedding'] + 1
  whole = nnx.merge(graphdef, params)
  whole.adopt()
  after = nnx.to_pure_dict(nnx.state(whole))
  for found in after['objectives']['drafter']['unembedding'].values():
    np.testing.assert_array_equal(found, params['trunk']['unembedding'])


# ------------------------------------------------------------------------------- loss


def compiling(config, trunk, seed=None):
  """(the whole model's loss and gradients as a train step asks for them, jitted; its
  abstract parameters; its graph)."""
  graphdef, abstract, _ = model.init(trunk, {'drafter': config}, 0)

  def value(params, batch):
    whole = nnx.merge(graphdef, params)
    batch, targets = model.prepare(whole, batch, jax.random.key(0))
    counts = {n: t.counts for n, t in targets.items()}
    weights = model.depth_weights(whole, jnp.float32(0), True, jnp.float32)
    chunks, at = losses.Config(chunk_tokens=4), jnp.int32(0)
    key = None if seed is None else jax.random.key(seed)
    return model.loss(whole, batch, targets, counts, weights, chunks, at, key)

  return jax.jit(jax.value_and_grad(value, has_aux=True)), abstract, graphdef


def plain_loss(config, graphdef, params, batch):
  """Σ over depths of λ w_k · the mean over pairs of one document, of all logits."""
  whole = nnx.merge(graphdef, params)
  out = whole.trunk(batch.tokens, batch.rows, whole.needs)
  part = whole.objectives['drafter']
  found = part.predict(whole.trunk, out, batch, jnp.int32(0), None)
  hidden = [whole.trunk.final_norm(out.hidden), *found.hidden]
  tokens, total = np.asarray(batch.tokens), 0.0
  for d, h in enumerate(hidden):
    w_VD = (
      part.unembedding[f'depth_{d}'][...]
      if d and config.owns_head
      else whole.trunk.unembedding[...]
    )
    log_p = jax.nn.log_softmax(9 * jnp.tanh(h @ w_VD[:V].T / 9))
    pairs = [
      (b, i, tokens[b, i + d + 1])
      for b, i in np.ndindex(*SEGMENTS.shape)
      if i + d + 1 < T and SEGMENTS[b, i] == SEGMENTS[b, i + d + 1] != 0
    ]
    of_pairs = np.zeros(log_p.shape, np.float32)
    of_pairs[tuple(np.transpose(pairs))] = 1 / len(pairs)
    weight = config.weight(jnp.float32(0)) / K if d else 1.0
    total -= weight * jnp.sum(log_p * jax.reshard(of_pairs, mesh.act_BTD))
  return total


def test_loss_and_gradients_of_own_heads_are_those_of_the_plain_sum():
  config = FORMS['medusa']
  run, abstract, graphdef = compiling(config, sizes())
  params = oracle.filled(abstract)
  (total, sums), grads = run(params, on_mesh())
  batch = on_mesh()
  plain = jax.jit(
    jax.value_and_grad(lambda params: plain_loss(config, graphdef, params, batch))
  )
  wanted, expected = plain(params)
  np.testing.assert_allclose(total, wanted, rtol=1e-5)
  assert sums['drafter'].count.shape == sums['drafter'].nll.shape == (K,)

  def check(path, got, wanted):
    path, size = jax.tree_util.keystr(path), np.abs(wanted).max()
    assert size > 1e-5, path
    np.testing.assert_allclose(got, wanted, atol=2e-5 * size, err_msg=path)

  jax.tree_util.tree_map_with_path(check, grads, expected)


@pytest.mark.slow
@pytest.mark.parametrize('dropout', [0.0, 0.4])
def test_eight_devices_and_remat_give_what_one_device_gives(dropout):
  form = 'seed' if dropout else 'medusa'
  config = residual.Config(depth=K, form=form, dropout=dropout, own_head=True)

  def on(layout, devices, remat):
    with jax.set_mesh(mesh.make(layout, jax.devices()[:devices])):
      run, abstract, _ = compiling(config, sizes(remat=remat), seed=5)
      return oracle.widen(run(oracle.filled(abstract), on_mesh()))

  one = on(mesh.Config(), 1, 'none')
  eight = on(mesh.Config(fsdp=2, tensor=2, context=2), 8, 'full')
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5 * np.abs(b).max()),
    eight,
    one,
  )


@pytest.fixture
def optimised():
  """As users compile; the suite leaves most optimisations out."""
  jax.config.update('jax_disable_most_optimizations', False)
  yield
  jax.config.update('jax_disable_most_optimizations', True)


@pytest.mark.slow
def test_own_heads_need_room_for_their_gradients_and_no_more(optimised):
  """What a depth more adds is an output, nothing temporary the size of a table."""

  def temporary(depth):
    config = residual.Config(depth=depth, form='medusa')
    run, abstract, _ = compiling(config, sizes(vocab=V_LARGE, tied=True))
    memory = run.lower(abstract, on_mesh()).compile().memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes

  assert temporary(4) - temporary(1) < 0.5 * 4 * D * V_LARGE


# ---------------------------------------------------------------------------- dropout


def test_dropout_zeroes_its_share_anew_in_each_row_depth_and_step():
  """With identities for matrices and ones for hidden states, a zero is a low value."""
  config, width = residual.Config(depth=K, expansion=1, dropout=0.25), 64
  graphdef, params = build(config, sizes(width=width))
  own = params['objectives']['drafter']
  for name in ('w_up', 'w_down'):
    own[name] = jnp.stack([jnp.eye(width)] * K)
  for name in ('gain_in', 'gain_out'):
    own[name] = jnp.ones((K, width))
  params['trunk']['gain_final'] = jnp.ones(width)
  ones = jax.reshard(jnp.ones((*SEGMENTS.shape, width)), mesh.act_BTD)

  @jax.jit
  def run(key):
    return predict(graphdef, params, ones, key).hidden

  found = np.stack([run(jax.random.key(n)) for n in (0, 1)])
  low = found < (found.min() + found.max()) / 2
  assert abs(low.mean() - 0.25) < 0.02
  masks = {row.tobytes() for row in low.reshape(-1, width)}
  assert len(masks) == low.size / width
  np.testing.assert_array_equal(run(jax.random.key(1)), found[1])


def test_without_a_key_or_a_share_nothing_is_dropped():
  graphdef, params = build(FORMS['seed'], sizes())
  dropping, _ = build(residual.Config(depth=K, dropout=0.5), sizes())
  plain = predict(graphdef, params, hiddens()).hidden
  for found in (
    predict(dropping, params, hiddens()),
    predict(graphdef, params, hiddens(), jax.random.key(0)),
  ):
    np.testing.assert_array_equal(found.hidden, plain)


# ---------------------------------------------------------------------------- options


@pytest.mark.parametrize('detach', [(), ('hidden',), ('hidden', 'head')])
def test_detach_stops_the_gradient_into_the_trunk(detach):
  for form in ('seed', 'medusa'):
    config = residual.Config(depth=K, form=form, own_head=False, detach=detach)
    graphdef, params = build(config, sizes())
    flags = []

    def value(hidden, graphdef=graphdef, params=params, flags=flags):
      found = predict(graphdef, params, hidden)
      flags.append(found.trains_head)
      return jnp.sum(found.hidden[..., 0])

    gradient = np.asarray(jax.jit(jax.grad(value))(hiddens()))
    assert flags == ['head' not in detach]
    assert (np.abs(gradient).max(-1) > 1e-5).all() != ('hidden' in detach)
    assert 'hidden' not in detach or not gradient.any()


@pytest.mark.parametrize(
  'changes, name, value, fix',
  [
    ({'expansion': 0}, 'expansion', 0, 'at least 1'),
    ({'layers': 0, 'form': 'medusa'}, 'layers', 0, 'at least 1'),
    ({'dropout': 1.0}, 'dropout', 1.0, 'use 0'),
    ({'dropout': -0.1}, 'dropout', -0.1, 'use 0'),
    ({'form': 'medusa', 'dropout': 0.1}, 'dropout', 0.1, "form='seed'"),
    ({'form': 'medusa', 'expansion': 2}, 'expansion', 2, "form='seed'"),
    ({'layers': 2}, 'layers', 2, "form='medusa'"),
    ({'detach': ('embedding',)}, 'detach', 'embedding', 'hidden, head'),
    ({'form': 'medusa', 'detach': ('head',)}, 'detach', 'head', 'own_head=False'),
    ({'depth': 0}, 'depth', 0, 'at least 1'),
  ],
)
def test_a_bad_option_names_its_field_value_and_fix(changes, name, value, fix):
  with pytest.raises(ConfigError) as caught:
    residual.Config(**changes).finalize(sizes(), 'drafter')
  assert (caught.value.field, caught.value.value) == (f'drafter.{name}', value)
  assert fix in caught.value.fix


def test_an_inner_width_must_divide_over_its_axis():
  with (
    jax.set_mesh(mesh.make(mesh.Config(tensor=8))),
    pytest.raises(ConfigError, match=r'expansion = 1: .*width=12 .*tensor=8'),
  ):
    residual.Config(expansion=1).finalize(sizes(width=12), 'drafter')


def test_muon_takes_its_matrices_and_leaves_its_tables():
  for config in FORMS.values():
    own = model.init(sizes(), {'drafter': config}, 0)[1]['objectives']['drafter']
    found = jax.tree_util.tree_map_with_path(optimizers.matrix, own)
    for name, way in found.items():
      assert way == (1, 1) if name.startswith('w_') else not jax.tree.leaves(way)


def test_conventions_say_what_is_read_and_hold_every_option():
  for config in FORMS.values():
    config.finalize(sizes(), 'drafter')
    found = config.conventions()
    seed = config.form == 'seed'
    expected = {
      'kind': 'residual',
      'modules': K,
      'form': config.form,
      'hidden_norm': 'pre' if seed else 'post',
      'final_norm_after': seed,
      'own_head': config.owns_head,
      'shared': ['final_norm'] + ['head'] * (not config.owns_head),
    }
    assert expected.items() <= found.items()
    fields = {f.name for f in dataclasses.fields(config)}
    assert fields <= {*found, 'weight', 'rho', 'curriculum'}
