"""Every axis of the mesh above one, alone and with each other one, against one device:
losses, gradients, an update, and decodes."""

import functools

import jax
import numpy as np
import pytest
from decoding import SIZES, V, build, row
from updates import on, packed, random_like

from mtpjax import config as configs
from mtpjax import losses, mesh, model, optimizers, schedules, step
from mtpjax.drafters import parallel, residual, sequential
from mtpjax.models import trunk
from mtpjax.objectives import bag, registers, token_order
from mtpjax.sampling import engine, filters, generate
from mtpjax.sampling.filters import Settings

B, T = 8, 16
# Wherever 'context' cuts, at 8, at 4 and 12, at every other token, it cuts documents.
DOCUMENTS = [
  (7, 6, 3),
  (16,),
  (3, 10, 2),
  (1, 1, 14),
  (9, 7),
  (2, 5, 5),
  (),
  (5, 11),
]
# Four of three axes each, so that every two axes meet, then each by itself.
THREES = [
  ('fsdp', 'tensor', 'context'),
  ('replica', 'tensor', 'expert'),
  ('replica', 'fsdp', 'expert'),
  ('replica', 'context', 'expert'),
]
MESHES = [
  *({axis: 2 for axis in three} for three in THREES),
  *({axis: 8} for axis in mesh.AXES),
  {'context': 4, 'tensor': 2},
]
# Objectives, and changes of the trunk. Each sees time in a way of its own.
KINDS: dict[str, tuple[tuple, dict]] = {
  'chain': ((sequential.Config(depth=4),), {}),
  'drafters': (
    (
      sequential.Config(depth=2, share=False, hidden_source='trunk', rho=0.5),
      sequential.Config(depth=3, attend='rows', zero_first_embedding=True),
      parallel.Config(depth=2),
      parallel.Config(depth=2, form='linear'),
      parallel.Config(depth=2, form='causal'),
      parallel.Config(depth=2, form='anticausal'),
      residual.Config(depth=2, dropout=0.1),
      residual.Config(depth=2, form='medusa'),
    ),
    {'layers': 3, 'windows': (0,)},
  ),
  # Registers double the rows, for all that is beside them.
  'auxiliary': (
    (
      sequential.Config(depth=1),
      registers.Config(),
      token_order.Config(window=4),
      bag.Config(window=4),
    ),
    {'learned_positions': 80, 'remat': 'full', 'tied': True, 'windows': (0,)},
  ),
}


def abstract(drafter):
  """(graphdef, shapes of parameters) of a small model to decode with."""
  sizes = trunk.Config(**{**SIZES, 'kv_heads': 4})
  sizes.finalize()
  return model.init(sizes, {'drafter': drafter}, 0)[:2]


def settings(objectives, changes):
  sizes = trunk.Config(
    vocab=V, vocab_multiple=8, width=16, layers=2, heads=8, kv_heads=2, ffn=32
  )
  sizes.windows, sizes.qk_norm, sizes.qkv_bias, sizes.remat = (0, 5), True, True, 'none'
  for field, value in changes.items():
    setattr(sizes, field, value)
  config = configs.Config(
    steps=10,
    trunk=sizes,
    objectives=objectives,
    loss=losses.Config(chunk_tokens=24, z_loss=1e-3),
    optimizer=optimizers.AdamW(
      rate=schedules.WarmupConstant(0.01, 0), epsilon=1e-3, ema=0.9
    ),
  )
  config.data.length, config.data.batch = T, B
  return configs.finalize(config)


def update(sizes, kind):
  """(state, metrics) after a step."""
  with on(**sizes):
    config = settings(*KINDS[kind])
    graphdef, shapes, _ = model.init(config.trunk, config.parts(), 0)
    start = functools.partial(step.init_state, config=config)
    state = jax.jit(start)(random_like(shapes))
    run = step.compile_train(graphdef, config, state)
    return run(state, step.put(packed(DOCUMENTS, T, V, 0.8)))


@pytest.fixture(scope='module')
def alone():
  return functools.cache(lambda kind: jax.device_get(update({'fsdp': 1}, kind)))


def near(got, wanted, tolerance, what):
  """Errors in units of each tensor's largest entry."""

  def one(path, got, wanted):
    place = what + jax.tree_util.keystr(path)
    atol = tolerance * max(np.abs(wanted).max(), 1e-30)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=atol, err_msg=place)

  jax.tree_util.tree_map_with_path(one, got, wanted)


@pytest.mark.parametrize(
  ('sizes', 'kind'),
  [
    *((sizes, 'chain') for sizes in MESHES),
    *((sizes, 'drafters') for sizes in MESHES[:4]),
    (MESHES[0], 'auxiliary'),
    ({'context': 8}, 'auxiliary'),
  ],
  ids=str,
)
@pytest.mark.slow
def test_a_step_is_that_of_one_device(sizes, kind, alone):
  (state, metrics), (wanted, measured) = update(sizes, kind), alone(kind)
  if 'context' in sizes:
    assert is_cut(sizes['context'])
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5)
  for name in ('loss', 'grad_norm'):
    close(metrics[name], measured[name], err_msg=name)
  assert measured['sums'].keys() == metrics['sums'].keys() > {'next'}
  for name, sums in metrics['sums'].items():
    assert (measured['sums'][name].count > 3).all(), name
    np.testing.assert_array_equal(sums.count, measured['sums'][name].count)
    np.testing.assert_array_equal(sums.correct, measured['sums'][name].correct)
    close(sums.nll, measured['sums'][name].nll, err_msg=name)
  # After one step the moment is the gradient, times a number.
  near(state['opt'][0].mu, wanted['opt'][0].mu, 1e-4, 'gradient of ')
  for name in ('params', 'ema'):
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, atol=1e-5),
      state[name],
      wanted[name],
    )
  for name in ('params', 'ema'):
    own = jax.tree.map(lambda x: x.sharding.spec, state[name])
    for tree in (state['opt'][0].mu, state['opt'][0].nu):
      assert jax.tree.map(lambda x: x.sharding.spec, tree) == own


def is_cut(parts):
  """Whether a document goes on across every border of time."""
  segments = packed(DOCUMENTS, T, V, 0.8)['segments']
  borders = range(T // parts, T, T // parts)
  on = (segments[:, n - 1] == segments[:, n] for n in borders)
  return all((same & (segments[:, 0] > 0)).any() for same in on)


# ------------------------------------------------------------------------- shardings


def spread(tree):
  """{name: axes that hold a part of it}"""
  found = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    spec = jax.typeof(leaf).sharding.spec
    axes = [(a,) if isinstance(a, str) else a or () for a in spec]
    found[jax.tree_util.keystr(path)] = {axis for some in axes for axis in some}
  return found


def test_only_replicas_and_vectors_hold_copies():
  """Of the state: parameters, both moments and the average."""
  with on(fsdp=2, tensor=2, context=2):
    objectives, changes = KINDS['drafters']
    config = settings(objectives, {**changes, 'kv_heads': 4})
    _, shapes, _ = model.init(config.trunk, config.parts(), 0)
    start = functools.partial(step.init_state, config=config)
    state = jax.eval_shape(start, shapes)
  found = spread(state)
  assert len(found) > 4 * 60
  for where, axes in found.items():
    last = where.rpartition("['")[2]
    if last.startswith(('gain', 'bias', 'step')) or where.endswith('.count'):
      assert axes <= {'tensor'}, where
    else:
      assert axes == {'fsdp', 'tensor', 'context', 'expert'}, where


ALONE = {'context': 8}
DRAFTERS = {
  'depth': sequential.Config(depth=2, share=False),
  'rows': sequential.Config(depth=2, attend='rows'),
  'parallel': parallel.Config(depth=2),
  'residual': residual.Config(depth=2, form='medusa'),
}


@pytest.mark.parametrize('drafter', DRAFTERS)
def test_a_decode_holds_a_share_of_rows_and_heads(drafter):
  with on(replica=2, fsdp=2, tensor=2):
    graphdef, shapes = abstract(DRAFTERS[drafter])
    plan = engine.Plan(draft=2, slots=64, chunk=4)
    args = (
      jax.ShapeDtypeStruct((8, 64), 'int32', sharding=here(mesh.whole_BT)),
      jax.ShapeDtypeStruct((8,), 'int32', sharding=here(mesh.ids_B)),
      jax.eval_shape(lambda: filters.arrays([Settings(budget=8)] * 8, 2)),
    )

    def run(params, *args):
      weights = engine.lay_out(graphdef, params)
      return weights, engine.prefill(graphdef, plan, weights, *args)

    weights, state = jax.eval_shape(run, shapes, *args)
  caches = jax.tree.leaves(state.caches)
  assert len(caches) == 4
  for x in caches:
    assert x.sharding.spec[:2] == (mesh.BATCH, 'tensor')
  if drafter in ('depth', 'rows', 'parallel'):
    own = jax.tree.leaves(state.drafter.caches)
    assert len(own) == (2 if drafter == 'rows' else 4)
    assert all(x.sharding.spec[:2] == (mesh.BATCH, 'tensor') for x in own)
  for where, x in jax.tree_util.tree_leaves_with_path(state):
    if x.ndim:
      assert x.sharding.spec[0] == mesh.BATCH, jax.tree_util.keystr(where)
  for where, x in jax.tree_util.tree_leaves_with_path(weights):
    axes = {a for some in x.sharding.spec for a in (some or ()) if some}
    if x.ndim > 1 and 'bias' not in jax.tree_util.keystr(where):
      assert axes >= {'fsdp'} and 'tensor' in x.sharding.spec, where


def here(spec):
  return jax.NamedSharding(jax.sharding.get_mesh(), spec)


# --------------------------------------------------------------------------- decoding

PROMPTS = np.random.default_rng(3).integers(0, V, (5, 9)).astype(np.int32)
LENGTHS = np.array([9, 1, 4, 8, 9], np.int32)
SETTINGS = [
  Settings(budget=20),
  Settings(budget=24, temperature=1.0, seed=5),
  Settings(budget=3, temperature=0.8, top_p=0.9, seed=6),
  Settings(budget=24, stop=(3, 4, 5)),
  Settings(budget=24, temperature=1.0, top_k=7, seed=5, draft=1),
]


def decode(sizes, drafter, values=None, streams=False):
  """(all that is said of each row, parameters)."""
  with on(**sizes):
    graphdef, params = build(DRAFTERS[drafter], windows=(6, 0))
    if values is not None:  # its own may differ in their last bits
      params = jax.tree.map(lambda x, p: jax.device_put(x, p.sharding), values, params)
    decoder = generate.Decoder(graphdef, params, chunk=4)
    if streams:
      *_, out = decoder.stream(PROMPTS, LENGTHS, SETTINGS)
    else:
      out = decoder.generate(PROMPTS, LENGTHS, SETTINGS)
    assert mesh.axis_size('context') == sizes.get('context', 1)
  return [row(out, b) for b in range(5)], jax.device_get(params)


@pytest.fixture(scope='module')
def one_decode():
  return functools.cache(lambda drafter: decode({'fsdp': 1}, drafter))


@pytest.mark.parametrize(
  ('sizes', 'drafter'),
  [
    *((sizes, 'depth') for sizes in [*MESHES[:4], ALONE]),
    *((MESHES[0], name) for name in ('rows', 'parallel', 'residual')),
  ],
  ids=str,
)
@pytest.mark.slow
def test_a_decode_is_that_of_one_device(sizes, drafter, one_decode):
  wanted, values = one_decode(drafter)
  assert sum(sum(drafted) for _, drafted, *_ in wanted) > 5
  assert decode(sizes, drafter, values)[0] == wanted


@pytest.mark.slow
def test_a_stream_goes_on_where_time_is_split(one_decode):
  wanted, values = one_decode('depth')
  assert decode(ALONE, 'depth', values, streams=True)[0] == wanted
