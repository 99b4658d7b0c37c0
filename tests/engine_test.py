"""The loop delivers what plain decoding delivers, whatever the drafter proposes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mtpjax import losses, mesh, model
from mtpjax.drafters import base, parallel, sequential
from mtpjax.models import cache, trunk
from mtpjax.models.attention import Rows
from mtpjax.sampling import engine, filters, stats

V, K = 41, 4
SIZES: dict[str, Any] = {
  'vocab': V,
  'width': 16,
  'layers': 2,
  'heads': 4,
  'kv_heads': 2,
  'ffn': 32,
}
LENGTHS = np.array([1, 3, 8, 8], np.int32)
PLAN = engine.Plan(draft=K, slots=40, chunk=5)


@dataclasses.dataclass
class Scripted(base.Config):
  """Proposes what the test wrote down: right drafts, up to a forced number of them."""

  def build(self, trunk, rngs):
    return Script(self)


class Script(base.Drafter):
  def __init__(self, config):
    super().__init__(config)
    self.text = nnx.Param(jnp.zeros((4, 64), jnp.int32))  # the continuation, by row
    self.right = nnx.Param(jnp.zeros((4, 64), jnp.int32))  # right drafts, by position

  def init_state(self, room):
    return jax.reshard(jnp.zeros((room.batch,), jnp.int32), mesh.ids_B)

  def absorb(self, trunk, caches, state, block):
    return block.start + block.count

  def propose(self, trunk, caches, state, draft, choose):
    text, right = (cache.whole(x[...]) for x in (self.text, self.right))
    true = cache.take(text, state + 1, draft)
    wrong = jnp.arange(draft)[None] >= cache.take(right, state, 1)
    tokens = jnp.where(wrong, (true + 1) % V, true)
    return base.chain([tokens[:, k] for k in range(draft)], [None] * draft), state


def on_mesh(**sizes):
  count = int(np.prod(list(sizes.values())))
  return jax.set_mesh(mesh.make(mesh.Config(**sizes), jax.devices()[:count]))


def build(drafter, **sizes):
  config = trunk.Config(**SIZES, **sizes)
  config.finalize()
  graphdef, _, make = model.init(config, {'drafter': drafter}, 0)
  params = make()
  spread = jax.tree.map(lambda p: p * 4.0, params['trunk']['unembedding'])
  params['trunk']['unembedding'] = spread  # so that greedy text is not one token
  return graphdef, params


def settings(rows=4, **values):
  defaults = {
    'temperature': 0.0,
    'top_k': 0,
    'top_p': 1.0,
    'min_p': 0.0,
    'budget': 20,
    'seed': np.arange(rows),
    'draft': 99,
  }
  stop = np.full((rows, 2), -1, np.int32)
  if 'stop' in values:
    stop[:, 0] = values.pop('stop')
  whole = ('top_k', 'budget', 'seed', 'draft')
  arrays = {
    name: jax.device_put(
      np.broadcast_to(value, rows).astype(np.int32 if name in whole else np.float32),
      mesh.ids_B,
    )
    for name, value in {**defaults, **values}.items()
  }
  return filters.Sampling(**arrays, stop=jax.device_put(stop, mesh.whole_BT))


def prompts():
  return np.random.default_rng(0).integers(0, V, (4, 8)).astype(np.int32)


def plainly(graphdef, params, count):
  """Greedy text without a cache or a loop: whole rows again for every token."""

  @jax.jit
  def following(params, tokens, lengths):
    m = nnx.merge(graphdef, params)
    shape = tokens.shape
    at = jnp.broadcast_to(jnp.arange(shape[1])[None], shape, out_sharding=mesh.ids_BT)
    hidden = m.trunk(tokens, Rows(at, jnp.ones_like(tokens))).hidden
    logits = losses.head_logits(m.trunk.final_norm(hidden), m.trunk.head())
    row = cache.take(logits, lengths - 1, 1)[:, 0]
    return jnp.argmax(row, -1), jax.nn.log_softmax(row).max(-1)

  tokens = np.zeros((4, 40), np.int32)
  scores = np.zeros((4, 40), np.float32)
  tokens[:, :8] = np.where(np.arange(8) < LENGTHS[:, None], prompts(), 0)
  for n in range(count):
    ids = jax.device_put(tokens, mesh.ids_BT)
    lengths = jax.device_put(LENGTHS + n, mesh.ids_B)
    token, score = following(params, ids, lengths)
    tokens[np.arange(4), LENGTHS + n] = token
    scores[np.arange(4), LENGTHS + n] = score
  return tokens, scores


def decoder(graphdef, plan=PLAN):
  run: Any = jax.jit(functools.partial(engine.decode, graphdef, plan))

  def decode(params, sampling, rows: Any = slice(None)):
    ids = jax.device_put(prompts()[rows], mesh.whole_BT)
    lengths = jax.device_put(LENGTHS[rows], mesh.ids_B)
    weights = engine.lay_out(graphdef, params)
    return jax.device_get(run(weights, ids, lengths, sampling))

  decode.compiled = run._cache_size
  return decode


def texts(state):
  return [row[:n].tolist() for row, n in zip(state.tokens, state.length, strict=True)]


@pytest.fixture(scope='module')
def scripted():
  """(parameters with the true text in the script, the text, its scores, decode)."""
  with on_mesh(fsdp=1):
    graphdef, params = build(Scripted(depth=K))
    text, scores = plainly(graphdef, params, 24)
    script = params['objectives']['drafter']
    script['text'] = jnp.asarray(np.pad(text, ((0, 0), (0, 24))))
    return params, text, scores, decoder(graphdef)


def with_right(params, right):
  """The same with so many right drafts by position, [64] or [4, 64]."""
  script = {**params['objectives']['drafter']}
  script['right'] = jnp.asarray(np.broadcast_to(right, (4, 64)), jnp.int32)
  return {**params, 'objectives': {'drafter': script}}


PATTERNS = {
  'none': np.zeros(64),
  'all': np.full(64, K),
  'mixed': np.random.default_rng(2).integers(0, K + 1, (4, 64)),
  'in turn': np.array([0, K, 1, K, 0, 2] * 11)[:64],
}


@pytest.mark.parametrize('name', PATTERNS)
def test_any_acceptance_gives_the_plain_text(name, scripted):
  params, text, scores, decode = scripted
  with on_mesh(fsdp=1):
    state = decode(with_right(params, PATTERNS[name]), settings())
  for b, n in enumerate(LENGTHS):
    np.testing.assert_array_equal(state.tokens[b, : n + 20], text[b, : n + 20])
    np.testing.assert_allclose(
      state.logprobs[b, n : n + 20], scores[b, n : n + 20], atol=2e-5
    )
  assert (state.length == LENGTHS + 20).all() and (state.reason == engine.LENGTH).all()
  if name == 'none':
    assert (state.rounds == 19).all() and state.passes == 20
  if name == 'all':
    assert (state.rounds == 4).all()  # 1 + 5 + 5 + 5 + 4


def test_every_row_equals_its_batch_of_one(scripted):
  params, _, _, decode = scripted
  with on_mesh(fsdp=1):
    mixed = settings(
      temperature=[0, 1, 0.7, 0], top_k=[0, 5, 0, 0], top_p=[1, 1, 0.9, 1]
    )
    params = with_right(params, PATTERNS['mixed'])
    together = texts(decode(params, mixed))
    for b in range(4):
      rows = slice(b, b + 1)
      alone = jax.tree.map(lambda x, rows=rows: x[rows], jax.device_get(mixed))
      alone = jax.tree.map(
        lambda x: jax.device_put(x, mesh.ids_B if x.ndim == 1 else mesh.whole_BT), alone
      )
      script = params['objectives']['drafter']
      cut = {'drafter': {n: jnp.roll(x, -b, 0)[:1] for n, x in script.items()}}
      assert texts(decode({**params, 'objectives': cut}, alone, rows=rows)) == [
        together[b]
      ]


def test_budgets_are_met_exactly_and_drafts_shrink(scripted):
  params, text, _, decode = scripted
  with on_mesh(fsdp=1):
    params = with_right(params, PATTERNS['all'])
    for budget in ([0, 1, 2, 3], [4, 5, 9, 1], [7, 0, 0, 0]):
      state = decode(params, settings(budget=budget))
      np.testing.assert_array_equal(state.length - LENGTHS, budget)
      for b, n in enumerate(state.length):
        np.testing.assert_array_equal(state.tokens[b, :n], text[b, :n])
      # A draft that could not be kept was never proposed.
      assert (state.proposed.sum(1) <= np.maximum(np.array(budget) - 2, 0)).all()
  assert decode.compiled() <= 2  # one for four rows, one for a single row


def test_a_stop_ends_its_row_at_its_first_occurrence(scripted):
  params, text, _, decode = scripted
  with on_mesh(fsdp=1):
    params = with_right(params, PATTERNS['in turn'])
    for index in range(10):
      stop = text[np.arange(4), LENGTHS + index]
      state = decode(params, settings(stop=stop))
      for b, n in enumerate(LENGTHS):
        new = text[b, n : n + 20].tolist()
        length = new.index(stop[b]) + 1
        assert state.tokens[b, n : state.length[b]].tolist() == new[:length]
        assert state.reason[b] == engine.STOP


def test_fewer_drafts_are_data(scripted):
  params, text, _, decode = scripted
  with on_mesh(fsdp=1):
    for drafts in range(K + 1):
      state = decode(with_right(params, PATTERNS['all']), settings(draft=drafts))
      np.testing.assert_array_equal(state.tokens[2, :28], text[2, :28])
      assert state.rounds[0] == -(-19 // (drafts + 1))
  assert decode.compiled() <= 2


def test_counts_agree_with_the_script(scripted):
  params, _, _, decode = scripted
  with on_mesh(fsdp=1):
    state = decode(with_right(params, PATTERNS['mixed']), settings())
  found = stats.Stats.of(state)
  rounds, accepted, proposed = 0, np.zeros(K, int), np.zeros(K, int)
  reached = np.zeros(K, int)
  for b, n in enumerate(LENGTHS):
    at, end = n + 1, n + 20
    while at < end:
      count = min(K, end - at - 1)
      # The features of the last token are not there yet: the script is read one before.
      right = min(PATTERNS['mixed'][b, at - 1], count)
      rounds += 1
      accepted += np.arange(1, K + 1) <= right
      proposed += np.arange(1, K + 1) <= count
      reached += np.arange(1, K + 1) <= min(right + 1, count)
      at += right + 1
  assert found.rounds == rounds and found.delivered == 80
  np.testing.assert_array_equal(found.accepted, accepted)
  np.testing.assert_array_equal(found.proposed, proposed)
  np.testing.assert_array_equal(found.reached, reached)
  assert found.tau == pytest.approx((accepted.sum() + rounds) / rounds)
  assert found.passes == rounds + 4


def test_measures_on_the_worked_example():
  depth = np.array([3, 0, 1, 3])[:, None]
  reach = np.arange(1, 4)[None]
  accepted, full = (reach <= depth).sum(0), np.full(3, 4)
  reached = (reach <= np.minimum(depth + 1, 3)).sum(0)
  found = stats.Stats(4, accepted, accepted, full, reached, 11, 1)
  assert found.acceptance_rate == pytest.approx(7 / 12) and found.tau == 2.75
  assert found.acceptance_by_position == [0.75, 0.5, 0.5]
  assert found.conditional_acceptance == pytest.approx([0.75, 2 / 3, 1.0])


REAL = {
  'depth': sequential.Config(depth=3),
  'rows': sequential.Config(depth=3, attend='rows'),
  'parallel': parallel.Config(depth=3),
}


@pytest.mark.slow
@pytest.mark.parametrize('name', REAL)
@pytest.mark.parametrize('axes', [{'fsdp': 1}, {'fsdp': 4, 'tensor': 2}])
def test_greedy_parity_with_every_drafter(name, axes):
  with on_mesh(**axes):
    graphdef, params = build(REAL[name], windows=(6, 0))
    text, _ = plainly(graphdef, params, 20)
    decode = decoder(graphdef, dataclasses.replace(PLAN, draft=3))
    state = decode(params, settings())
  for b, n in enumerate(LENGTHS):
    np.testing.assert_array_equal(state.tokens[b, : n + 20], text[b, : n + 20])


@pytest.mark.slow
def test_a_broken_parameter_fails_every_row_and_ends():
  with on_mesh(fsdp=1):
    graphdef, params = build(sequential.Config(depth=2))
    params['trunk']['gain_final'] = params['trunk']['gain_final'] * jnp.nan
    state = decoder(graphdef, dataclasses.replace(PLAN, draft=2))(params, settings())
  assert (state.reason == engine.FAILED).all() and (state.length == LENGTHS).all()


@pytest.mark.parametrize('name', ['rows', 'parallel'])
def test_real_drafts_do_not_depend_on_longer_prompts_beside_them(name):
  plan = dataclasses.replace(PLAN, draft=2, chunk=3)  # prompts end in chunks 1 to 3
  with on_mesh(fsdp=1):
    graphdef, params = build(dataclasses.replace(REAL[name], depth=2))
    decode = decoder(graphdef, plan)
    warm = settings(temperature=1.0, budget=6)
    together = decode(params, warm)
    for b in range(3):
      rows = [b] * 4  # the same prompt four times, so that nothing compiles again
      seeds = settings(temperature=1.0, budget=6, seed=np.full(4, b))
      alone = decode(params, seeds, rows=rows)
      assert texts(alone)[0] == texts(together)[b]
      assert alone.accepted[0].tolist() == together.accepted[b].tolist()


def test_a_row_ends_where_its_buffer_does(scripted):
  params, text, _, _ = scripted
  with on_mesh(fsdp=1):
    graphdef, _ = build(Scripted(depth=K))
    decode = decoder(graphdef, dataclasses.replace(PLAN, slots=12))
    state = decode(with_right(params, PATTERNS['all']), settings())
  assert (state.length == 12).all() and (state.reason == engine.LENGTH).all()
  for b in range(4):
    np.testing.assert_array_equal(state.tokens[b, :12], text[b, :12])
