"""Sequential modules against one document at a time, one token at a time, in NumPy."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from probes import oracle

from mtpjax import mesh, model
from mtpjax.drafters import sequential
from mtpjax.drafters.base import Batch
from mtpjax.fields import ConfigError
from mtpjax.models import trunk as trunks
from mtpjax.models.attention import Rows
from mtpjax.models.trunk import TrunkOutput

V, T, D = 37, 16, 16
WINDOW = 2  # of the last layer
# Documents of each packed row; what is left of the row is padding.
LENGTHS = ((6, 1, 7), (2, 4, 10))
CONFIGS = {
  'defaults': {},
  'one module a depth': {'share': False},
  'before the trunk norm': {'hidden_norm': 'pre'},
  'chained before the norm': {'chain_norm': 'pre'},
  'the trunk at every depth': {'hidden_source': 'trunk', 'share': False},
  'hidden first': {'concat': 'hidden_embed'},
  'rows': {'attend': 'rows'},
  'rows, dense': {'attend': 'rows', 'block': 'dense'},
  'dense': {'block': 'dense', 'share': False},
  'no first embedding': {'zero_first_embedding': True},
  'rows, all at once': {
    'attend': 'rows',
    'zero_first_embedding': True,
    'hidden_norm': 'pre',
    'chain_norm': 'pre',
    'concat': 'hidden_embed',
    'depth': 4,
  },
  'rows, the trunk at every depth': {'attend': 'rows', 'hidden_source': 'trunk'},
}


def sizes(**changes):
  config = trunks.Config(
    vocab=V,
    width=D,
    layers=2,
    heads=4,
    kv_heads=2,
    ffn=24,
    qk_norm=True,
    qkv_bias=True,
    windows=(0, WINDOW),
    attention_softcap=5.0,
    embed_std=0.5,
    remat='none',
  )
  config = dataclasses.replace(config, **changes)
  config.finalize()
  return config


def packed(rng, lengths=LENGTHS, tokens=None):
  segments, positions = np.zeros((2, len(lengths), T), np.int32)
  for b, row in enumerate(lengths):
    start = 0
    for n, length in enumerate(row):
      segments[b, start : start + length] = n + 1
      positions[b, start : start + length] = np.arange(length)
      start += length
  if tokens is None:
    tokens = rng.integers(0, V, segments.shape).astype(np.int32)
  return tokens, positions, segments


def on_mesh(tokens, positions, segments):
  def put(x):
    return jax.device_put(x, jax.NamedSharding(jax.sharding.get_mesh(), mesh.ids_BT))

  rows = Rows(put(positions), put(segments))
  return Batch(put(tokens), put(segments != 0), rows)


def hiddens(rng):
  """Hidden states that need be no trunk's."""
  return rng.normal(size=(2, T, D)).astype(np.float32) * 2


@pytest.fixture
def rng():
  return np.random.default_rng(1)


@pytest.fixture(autouse=True, scope='module')
def one_device():
  with jax.set_mesh(mesh.make(mesh.Config(), jax.devices()[:1])):
    yield


def build(config, trunk=None):
  """(graphdef, parameters) of a trunk with this one drafter."""
  graphdef, abstract, _ = model.init(trunk or sizes(), {'drafter': config}, 0)
  return graphdef, oracle.filled(abstract)


def predict(graphdef, params, hidden, batch):
  """The drafter alone."""
  whole = nnx.merge(graphdef, params)
  out = TrunkOutput(jax.reshard(hidden, mesh.act_BTD), {}, {})
  drafter = whole.objectives['drafter']
  return drafter.predict(whole.trunk, out, batch, jnp.int32(0), None).hidden


def with_trunk(graphdef, params, batch):
  """The drafter on what the trunk computes of the tokens."""
  hidden = nnx.merge(graphdef, params).trunk(batch.tokens, batch.rows).hidden
  return predict(graphdef, params, hidden, batch)


@functools.cache
def compiled(name, whole=False, **changes):
  """(parameters, the function), once for all tests that want it."""
  config = sequential.Config(**{'depth': 3, **CONFIGS[name], **changes})
  graphdef, params = build(config)
  return params, jax.jit(functools.partial(with_trunk if whole else predict, graphdef))


def valid_inputs(segments, depth):
  """Which (depth, row, position) read a token of their own document, [K, B, T]."""
  valid = np.zeros((depth, *segments.shape), bool)
  for k, b, i in np.ndindex(*valid.shape):
    j = i + k + 1
    valid[k, b, i] = j < T and segments[b, i] == segments[b, j] != 0
  return valid


# ------------------------------------------------------------------------------ oracle


def module(config, trunk, w, h, token, position, table, keys, values):
  """One row of one depth: (hidden for the head, hidden to chain).

  `keys` and `values` hold the rows it sees besides itself; its own are added.
  """
  e = table[token]
  if config.zero_first_embedding and position == 0:
    e = np.zeros_like(e)
  e = oracle.norm(e, w['gain_embedding'])
  h = oracle.norm(h, w['gain_hidden'])
  pair = [e, h] if config.concat == 'embed_hidden' else [h, e]
  x = np.concatenate(pair) @ w['w_join'].reshape(2 * D, D)
  q, k, v = oracle.project(w['block'], x, position, trunk)
  keys.append(k)
  values.append(v)
  o = oracle.look(q, keys, values, trunk.attention_softcap)
  x = oracle.finish(w['block'], x, o)
  out = oracle.norm(x, w['gain_out'])
  return out, (out if config.chain_norm == 'post' else x)


def one_document(config, trunk, params, hidden_ND, tokens_N):
  """{(k, i): prediction}, k from 0, of a document alone, token by token."""
  w, shared = params['objectives']['drafter'], params['trunk']
  window = WINDOW if config.block == 'trunk' else 0
  h0 = hidden_ND
  if config.hidden_norm == 'post':
    h0 = [oracle.norm(h, shared['gain_final']) for h in hidden_ND]
  table, found, chained, cache = shared['embedding'], {}, {}, {}
  for i in range(len(tokens_N)):
    for k in range(config.depth):
      if i + k + 1 >= len(tokens_N):
        break
      own = oracle.at(w, 0 if config.share else k)
      h = h0[i] if k == 0 or config.hidden_source == 'trunk' else chained[k - 1, i]
      if config.attend == 'depth':
        position = i
        seen = [(k, j) for j in range(i) if not window or i - j < window]
      else:
        position = i + k
        # Row (0, j) stands at j, row (step, i) at i + step.
        seen = [(0, j) for j in range(i + (k > 0))] + [(s, i) for s in range(1, k)]
        seen = [(s, j) for s, j in seen if not window or position - (j + s) < window]
      keys = [cache[at][0] for at in seen]
      values = [cache[at][1] for at in seen]
      found[k, i], chained[k, i] = module(
        config, trunk, own, h, tokens_N[i + k + 1], position, table, keys, values
      )
      cache[k, i] = keys[-1], values[-1]
  return found


@pytest.mark.parametrize('name', CONFIGS)
def test_predictions_are_those_of_each_document_alone_token_by_token(name, rng):
  config = sequential.Config(**{'depth': 3, **CONFIGS[name]})
  trunk = sizes()
  params, run = compiled(name)
  tokens, positions, segments = packed(rng)
  hidden = hiddens(rng)
  got = np.asarray(run(params, hidden, on_mesh(tokens, positions, segments)))
  assert np.isfinite(got).all()
  wide, checked = oracle.widen(params), np.zeros(got.shape[:3], bool)
  for b in range(2):
    for where in oracle.documents(segments[b]):
      found = one_document(
        config, trunk, wide, hidden[b, where].astype(np.float64), tokens[b, where]
      )
      for (k, i), expected in found.items():
        at = k, b, where[i]
        np.testing.assert_allclose(got[at], expected, atol=3e-5, err_msg=str(at))
        checked[at] = True
  np.testing.assert_array_equal(checked, valid_inputs(segments, config.depth))


# --------------------------------------------------------------------------- influence


@pytest.mark.parametrize('name', ['defaults', 'rows'])
def test_tokens_change_nothing_in_another_document_at_any_depth(name, rng):
  params, run = compiled(name, whole=True, depth=4)
  tokens, positions, segments = packed(rng)
  valid = valid_inputs(segments, 4)
  plain = np.asarray(run(params, on_mesh(tokens, positions, segments)))
  for segment in (0, 1, 3):  # 0 is the padding
    changed = np.where(segments == segment, (tokens + 1) % V, tokens)
    got = np.asarray(run(params, on_mesh(changed, positions, segments)))
    others = valid & (segments != segment)
    np.testing.assert_array_equal(got[others], plain[others])
    own = valid & (segments == segment)
    assert (np.abs(got - plain).max(-1)[own] > 1e-4).all()


@pytest.mark.parametrize('name', ['defaults', 'rows'])
def test_depth_k_reads_the_document_up_to_token_i_plus_k_and_no_further(name, rng):
  params, run = compiled(name, whole=True, depth=4)
  tokens, positions, segments = packed(rng)
  valid = valid_inputs(segments, 4)[:, 1]
  plain = np.asarray(run(params, on_mesh(tokens, positions, segments)))[:, 1]
  start, middle = 6, 11  # the third document of row 1
  changed = tokens.copy()
  changed[1, middle] = (changed[1, middle] + 1) % V
  got = np.asarray(run(params, on_mesh(changed, positions, segments)))[:, 1]
  differ = np.abs(got - plain).max(-1) > 1e-4
  same = (got == plain).all(-1)
  for k, i in zip(*np.nonzero(valid), strict=True):
    reads_to = i + k + 1
    if i >= start and reads_to == middle:
      assert differ[k, i], f'depth {k + 1} at {i} ignores its input'
    elif i < start or reads_to < middle:
      assert same[k, i], f'depth {k + 1} at {i} sees ahead'
  # Beyond the last layer's window the trunk's hidden states still carry it.
  assert differ[0, middle:][valid[0, middle:]].all()


@pytest.mark.parametrize('name', ['one module a depth', 'the trunk at every depth'])
def test_a_module_changes_its_own_depth_and_those_chained_on_it(name, rng):
  params, run = compiled(name)
  where = on_mesh(*packed(rng))
  valid = valid_inputs(np.asarray(where.rows.segments), 3)
  hidden = hiddens(rng)
  plain = np.asarray(run(params, hidden, where))
  for zeroed in range(3):
    mine = jax.tree.map(lambda x, n=zeroed: x.at[n].set(0), params['objectives'])
    got = np.asarray(run({**params, 'objectives': mine}, hidden, where))
    for k in range(3):
      later = k > zeroed and name == 'one module a depth'
      if k == zeroed or later:
        assert (np.abs(got - plain).max(-1)[k][valid[k]] > 1e-4).all()
      else:
        np.testing.assert_array_equal(got[k], plain[k])


# --------------------------------------------------------------- gradients and devices


def pulled_back(config, trunk, seed=0):
  """(value, gradients of parameters and trunk hidden) of a random projection."""
  rng = np.random.default_rng(seed)
  graphdef, params = build(config, trunk)
  tokens, positions, segments = packed(rng)
  valid = valid_inputs(segments, config.depth)
  toward = rng.normal(size=(*valid.shape, D)).astype(np.float32) * valid[..., None]

  def value(params, hidden, batch):
    out = predict(graphdef, params, hidden, batch)
    return jnp.sum(out * jax.reshard(toward, mesh.act_KBTD)), out

  run = jax.jit(jax.value_and_grad(value, (0, 1), has_aux=True))
  hidden = jax.device_put(
    hiddens(rng), jax.NamedSharding(jax.sharding.get_mesh(), mesh.act_BTD)
  )
  (_, out), grads = run(params, hidden, on_mesh(tokens, positions, segments))
  return oracle.widen((out * valid[..., None], grads))


@functools.cache
def on_one_device(attend, kv_heads=2):
  config = sequential.Config(depth=3, attend=attend)
  return pulled_back(config, sizes(kv_heads=kv_heads))


EIGHT = mesh.Config(fsdp=2, tensor=2, context=2)


@pytest.mark.parametrize('name', ['defaults', 'rows'])
def test_eight_devices_predict_what_one_device_predicts(name, rng):
  packed_rows, hidden = packed(rng), hiddens(rng)
  params, run = compiled(name)
  expected = np.asarray(run(params, hidden, on_mesh(*packed_rows)))
  with jax.set_mesh(mesh.make(EIGHT)):
    graphdef, params = build(sequential.Config(**{'depth': 3, **CONFIGS[name]}))
    run = jax.jit(functools.partial(predict, graphdef))
    got = np.asarray(run(params, hidden, on_mesh(*packed_rows)))
  valid = valid_inputs(packed_rows[2], 3)
  np.testing.assert_allclose(got[valid], expected[valid], atol=1e-5)


# By default contract_test compares the gradients of 'rows', among others.
@pytest.mark.slow
@pytest.mark.parametrize('attend, kv_heads', [('depth', 2), ('rows', 2), ('rows', 1)])
def test_eight_devices_and_remat_give_the_gradients_of_one_device(attend, kv_heads):
  expected = on_one_device(attend, kv_heads)
  with jax.set_mesh(mesh.make(EIGHT)):
    config = sequential.Config(depth=3, attend=attend)
    got = pulled_back(config, sizes(kv_heads=kv_heads, remat='full'))

  def check(path, a, b):
    np.testing.assert_allclose(a, b, atol=2e-5 * max(np.abs(b).max(), 1), err_msg=path)

  jax.tree_util.tree_map_with_path(
    lambda path, a, b: check(jax.tree_util.keystr(path), a, b), got, expected
  )
  used = jax.tree.leaves(expected[1][0]['objectives'])
  assert all((np.abs(g).max((*range(1, g.ndim),)) > 0).all() for g in used)


def into_shared(grads):
  params, hidden = grads
  trunk = params['trunk']
  return {'hidden': hidden, 'norm': trunk['gain_final'], 'table': trunk['embedding']}


def test_detached_tensors_get_no_gradient():
  config = sequential.Config(depth=2, detach=('hidden', 'embedding'))
  graphdef, params = build(config)
  batch = on_mesh(*packed(np.random.default_rng(1)))

  def value(trunk, hidden):
    out = predict(graphdef, {**params, 'trunk': trunk}, hidden, batch)
    return jnp.sum(out[..., 0])

  hidden = hiddens(np.random.default_rng(2))
  trunk, hidden = jax.jit(jax.grad(value, (0, 1)))(params['trunk'], hidden)
  for name, gradient in into_shared(({'trunk': trunk}, hidden)).items():
    assert not np.asarray(gradient).any(), name


@pytest.mark.slow
@pytest.mark.parametrize('name', ['hidden', 'embedding'])
def test_detach_stops_the_gradient_into_one_shared_tensor_and_nothing_else(name):
  out, grads = on_one_device('depth')
  config = sequential.Config(depth=3, detach=(name,))
  got_out, got_grads = pulled_back(config, sizes())
  np.testing.assert_allclose(got_out, out, atol=1e-6)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4),
    got_grads[0]['objectives'],
    grads[0]['objectives'],
  )
  cut = ('hidden', 'norm') if name == 'hidden' else ('table',)
  got = into_shared(got_grads)
  for part, gradient in into_shared(grads).items():
    assert np.abs(gradient).max() > 0.01
    np.testing.assert_allclose(got[part], 0 if part in cut else gradient, atol=1e-4)


@pytest.mark.parametrize('detach', [(), ('head',)])
def test_detaching_the_head_is_left_to_the_loss(detach, rng):
  graphdef, params = build(sequential.Config(detach=detach))

  def flag(params, batch):
    whole = nnx.merge(graphdef, params)
    out = TrunkOutput(whole.trunk.embed(batch.tokens), {}, {})
    part = whole.objectives['drafter']
    found.append(part.predict(whole.trunk, out, batch, jnp.int32(0), None).trains_head)

  found = []
  jax.eval_shape(flag, params, on_mesh(*packed(rng)))
  assert found == [detach == ()]


@pytest.mark.parametrize('name', CONFIGS)
def test_every_option_computes_in_bfloat16_if_the_trunk_does(name, rng):
  config = sequential.Config(**{'depth': 3, **CONFIGS[name]})
  graphdef, params = build(config, sizes(dtype='bfloat16'))
  run = functools.partial(with_trunk, graphdef)
  out = jax.eval_shape(run, params, on_mesh(*packed(rng)))
  assert (out.dtype, out.shape) == (jnp.bfloat16, (config.depth, 2, T, D))


# ----------------------------------------------------------------------------- options


@pytest.mark.parametrize(
  'changes, field, value, fix',
  [
    ({'depth': 0}, 'drafter.depth', 0, 'at least 1'),
    ({'rho': 0.0}, 'drafter.rho', 0.0, 'use 1'),
    ({'detach': ('logits',)}, 'drafter.detach', 'logits', 'hidden, embedding, head'),
    (
      {'attend': 'rows', 'share': False, 'depth': 2},
      'drafter.attend',
      'rows',
      "drafter.share=True or drafter.attend='depth'",
    ),
  ],
)
def test_a_bad_option_names_its_field_value_and_fix(changes, field, value, fix):
  with pytest.raises(ConfigError) as caught:
    sequential.Config(**changes).finalize(sizes(), 'drafter')
  assert (caught.value.field, caught.value.value) == (field, value)
  assert fix in caught.value.fix


def test_unshared_rows_are_fine_where_there_is_only_one_row():
  config = sequential.Config(attend='rows', share=False, depth=1)
  config.finalize(sizes(), 'drafter')


def test_conventions_hold_every_option_and_say_what_each_is():
  plain = sequential.Config(depth=2).conventions()
  changes = {
    'share': False,
    'hidden_norm': 'pre',
    'chain_norm': 'pre',
    'hidden_source': 'trunk',
    'concat': 'hidden_embed',
    'attend': 'rows',
    'detach': ('hidden',),
    'zero_first_embedding': True,
    'block': 'dense',
  }
  options = {f.name for f in dataclasses.fields(sequential.Config)}
  assert options == {*changes, 'depth', 'weight', 'rho', 'curriculum'}
  for name, value in changes.items():
    found = sequential.Config(**{'depth': 2, name: value}).conventions()
    assert found[name] == value != plain[name]
    json.dumps(found)
  assert (plain['kind'], plain['modules'], plain['depth']) == ('sequential', 1, 2)
  assert plain['shared'] == ['embedding', 'head', 'module']
  apart = sequential.Config(depth=2, share=False).conventions()
  assert (apart['modules'], apart['shared']) == (2, ['embedding', 'head'])


def test_modules_are_as_many_as_are_trained():
  for share, count in ((True, 1), (False, 3)):
    _, params = build(sequential.Config(depth=3, share=share))
    arrays = jax.tree.leaves(params['objectives'])
    assert {x.shape[0] for x in arrays} == {count}
