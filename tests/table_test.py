"""The whole decode on models whose every continuation has a known probability.

The trunk's logits are a table of the last token: nothing is written into the residual
stream, embeddings are one-hot, and the unembedding holds the logarithms.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from scipy import special

from mtpjax import losses, mesh, model
from mtpjax.drafters import base
from mtpjax.models import cache, trunk
from mtpjax.sampling import drafting, engine, generate, verify
from mtpjax.sampling.filters import Settings

WIDTH = 8


@pytest.fixture(autouse=True)
def one_device():
  with jax.set_mesh(mesh.make(mesh.Config(fsdp=1), jax.devices()[:1])):
    yield


@dataclasses.dataclass
class Banked(base.Config):
  """Drafts by tables of its own; row b of the batch by table b mod `tables`."""

  tables: int = 1
  vocab: int = 4
  one_hot: bool = False  # the most likely token, and q is not given
  broken: int = -1  # this table's q is NaN
  teacher: int = -1  # this table is the trunk itself

  def build(self, trunk, rngs):
    return Bank(self)


class Bank(base.Drafter):
  config: Banked

  def __init__(self, config: Banked):
    super().__init__(config)
    shape = (config.tables, config.vocab, config.vocab)
    self.logits = nnx.Param(jnp.zeros(shape, out_sharding=P(None, None, None)))

  def init_state(self, room):
    return jax.reshard(jnp.zeros((room.batch,), jnp.int32), mesh.ids_B)

  def absorb(self, trunk, caches, state, block):
    last = cache.take(block.tokens, jnp.maximum(block.count - 1, 0), 1)
    return cache.keep(state, last[:, 0], block.count)

  def propose(self, trunk, caches, state, draft, choose):
    row = jnp.arange(len(state)) % self.config.tables
    row, tokens = jax.reshard(row, mesh.ids_B), state[:, None]
    choose = drafting.Likeliest() if self.config.one_hot else choose
    levels = []
    for k in range(draft):
      table = jnp.broadcast_to(row[:, None], tokens.shape)
      table = jax.reshard(table, mesh.whole_BT)
      spec = P(mesh.BATCH, None, None)
      logits = self.logits[...].at[table, tokens].get(out_sharding=spec)
      hidden = trunk.final_norm(trunk.embed(jax.reshard(tokens, mesh.ids_BT)))
      own = cache.whole(losses.head_logits(hidden, trunk.head()))
      logits = jnp.where((row == self.config.teacher)[:, None, None], own, logits)
      levels.append(choose(logits, k, levels[-1] if levels else None))
      tokens = levels[-1].tokens
    out = choose.draft(levels)
    if out.q is not None:
      broken = (row == self.config.broken)[:, None, None]
      out = dataclasses.replace(out, q=jnp.where(broken, jnp.nan, out.q))
    return out, state


def decoder(
  table,
  drafts=(),
  rule='rejection',
  depth=4,
  undefined=None,
  sizes=None,
  tree=None,
  draft_cost=None,
  **kinds,
):
  """A Decoder of that chain, p[last, next], and of drafts from those tables; after the
  token `undefined` the trunk gives no distribution."""
  V = len(table)
  small: dict[str, Any] = {'vocab_multiple': 1, 'layers': 1, 'kv_heads': 1, 'ffn': 8}
  config = trunk.Config(vocab=V, width=WIDTH, heads=2, **small, **(sizes or {}))
  config.finalize()
  own = Banked(depth=depth, tables=len(drafts), vocab=V, **kinds)
  graphdef, _, make = model.init(config, {'drafter': own} if len(drafts) else {}, 0)
  params = make()
  top = params['trunk']
  for name in ('w_mix', 'w_down'):
    top['blocks'][name] = top['blocks'][name] * 0
  scale = (1 / WIDTH + config.norm_epsilon) ** 0.5  # the final norm divides by it
  head = np.zeros((V, WIDTH))
  head[:, : min(V, WIDTH)] = scale * log(table).T[:, :WIDTH]
  if undefined is not None:  # infinities in float32
    head[:, undefined] = np.where(np.arange(V) % 2, 3e38, -3e38)
  for name, values in (('embedding', np.eye(V, WIDTH)), ('unembedding', head)):
    top[name] = jax.device_put(values.astype(np.float32), top[name].sharding)
  if len(drafts):
    part = params['objectives']['drafter']
    part['logits'] = jax.device_put(log(drafts), part['logits'].sharding)
  options = {'rule': rule, 'tree': tree, 'draft_cost': draft_cost}
  return generate.Decoder(graphdef, params, chunk=1, **options)


def log(table):
  return np.log(np.maximum(np.array(table, np.float32), 1e-30))


def filtered(table, own):
  """The chain that a row with these settings follows, in float64."""
  if own.temperature == 0:
    return np.eye(len(table))[table.argmax(-1)]
  p = table ** (1 / own.temperature)
  p = p / p.sum(-1, keepdims=True)
  rank = (-p).argsort(-1).argsort(-1)
  if own.top_k:
    p = np.where(rank < own.top_k, p, 0)
  p = p / p.sum(-1, keepdims=True)
  above = np.where(p[:, None] > p[..., None], p[:, None], 0).sum(-1)
  p = np.where(above < own.top_p, p, 0)
  p = np.where(p >= own.min_p * p.max(-1, keepdims=True), p, 0)
  return p / p.sum(-1, keepdims=True)


def joint(table, n):
  """Of n tokens after each: [V, V ** n]."""
  p = table
  for _ in range(n - 1):
    p = p.reshape(len(table), -1, len(table))[..., None] * table
  return p.reshape(len(table), -1)


def counts(texts, V, n):
  """How often n tokens came after each, [V, V ** n]; texts [B, 1 + a multiple of n]."""
  code = texts[:, :-1:n]
  for k in range(n):
    code = code * V + texts[:, 1 + k :: n]
  return np.bincount(code.ravel(), minlength=V ** (n + 1)).reshape(V, -1)


def p_value(seen, p):
  """Pearson's chi-square of counts [groups, cells] under p [groups, cells]; the cells
  of a group that expect fewer than 5 are taken together."""
  total, dof = 0.0, 0
  for found, row in zip(seen, p, strict=True):
    expected = row * found.sum()
    assert not found[expected == 0].any()
    rare = expected < 5
    found, expected = (np.append(x[~rare], x[rare].sum()) for x in (found, expected))
    if expected[-1] < 5 and len(expected) > 1:
      found, expected = (np.append(x[:-2], x[-2:].sum()) for x in (found, expected))
    if len(expected) > 1:
      total += ((found - expected) ** 2 / expected).sum()
      dof += len(expected) - 1
  return float(special.chdtrc(dof, total)) if dof else 1.0


# ------------------------------------------------------------------------- any drafter

RNG = np.random.default_rng(0)
TABLE = RNG.dirichlet(np.ones(4), 4)
SKEWED = RNG.dirichlet(np.ones(4), 4)
ROUNDED = TABLE.astype(np.float16) + 1e-4
KINDS = {
  'uniform': np.ones((4, 4)),
  'skewed': SKEWED,
  'teacher': np.ones((4, 4)),  # its own table is not read
  'broken': np.ones((4, 4)),
  'wrong': np.eye(4)[TABLE.argmin(-1)],
  'argmax': np.eye(4)[TABLE.argmax(-1)],
  'two of four': np.where(np.sort(SKEWED, -1)[:, 2:3] <= SKEWED, SKEWED, 0),
  'rounded': ROUNDED / ROUNDED.sum(-1, keepdims=True),
}
NAMES = list(KINDS)
SETTINGS = [
  Settings(temperature=1.0),
  Settings(temperature=1.0),
  Settings(temperature=1.0),
  Settings(temperature=0.7),
  Settings(temperature=1.0, top_k=2),
  Settings(temperature=1.3, top_p=0.8),
  Settings(temperature=1.0, min_p=0.3),
  Settings(),
]


def decode(decode, rows, seed, drafts=(None,), settings=SETTINGS, budget=16, V=4):
  """(text with its last prompt token [rows, 1 + budget], the generation)."""
  last = np.random.default_rng(seed).integers(0, V, (rows, 1))
  own = [
    dataclasses.replace(
      settings[b // 8 % len(settings)],
      budget=budget,
      seed=seed * rows + b,
      draft=drafts[b // 64 % len(drafts)],
    )
    for b in range(rows)
  ]
  out = generate.generate(decode, last, np.ones(rows, int), own)
  return np.concatenate([last, out.tokens], 1), out


def check(texts, table, settings, by):
  """Four tokens at a time follow the chain, in every group of rows."""
  low = {}
  for group in np.unique(by):
    for own in set(settings):
      same = [s == own for s in settings]
      rows = (by == group) & np.array(same)[np.arange(len(by)) // 8 % len(settings)]
      expected = filtered(table, own)
      low[group, own] = p_value(counts(texts[rows], 4, 4), joint(expected, 4))
  assert min(low.values()) > 1e-4, low


def check_acceptance(out, rule, names):
  """Of the drafts whose fate is certain."""
  accepted, proposed = (
    np.array([getattr(row, name).sum() for row in out.rows])
    for name in ('accepted', 'proposed')
  )
  kind = np.array(names)[np.arange(len(accepted)) % len(names)]
  greedy = np.arange(len(accepted)) // 8 % 8 == 7
  certain = (kind == 'teacher') & ((rule != 'sample-and-match') | greedy)
  certain |= (kind == 'argmax') & greedy
  np.testing.assert_array_equal(accepted[certain], proposed[certain])
  assert not accepted[(kind == 'wrong') & greedy].any()
  if rule != 'sample-and-match':
    assert not accepted[kind == 'broken'].any()


@pytest.mark.parametrize(
  'rule, tree',
  [
    *((rule, None) for rule in verify.RULES),
    ('rejection', '2x2x1'),
    pytest.param('rejection', 'dynamic:3:8', marks=pytest.mark.slow),
    pytest.param('sample-and-match', '3x1x2', marks=pytest.mark.slow),
  ],
)
def test_texts_follow_the_chain_whatever_the_drafter(rule, tree):
  kinds = {'broken': NAMES.index('broken'), 'teacher': NAMES.index('teacher')}
  model = decoder(TABLE, list(KINDS.values()), rule, tree=tree, **kinds)
  texts, out = decode(model, 8192, 1, drafts=(None, 1, 3))
  check(texts, TABLE, SETTINGS, np.array(NAMES)[np.arange(len(texts)) % 8])
  if tree is None:
    check_acceptance(out, rule, NAMES)
  else:  # the likeliest token is among the children
    teacher = out.rows[NAMES.index('teacher') + 56 :: 64]
    assert all((r.accepted == r.proposed).all() for r in teacher)
    assert all(r.nodes > r.proposed.sum() for r in teacher)
  score = np.log(TABLE)[texts[:, :-1], texts[:, 1:]]
  np.testing.assert_allclose(out.logprobs, score, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize('rule', verify.RULES)
@pytest.mark.parametrize('depth', [1, 3, 4])
def test_longer_runs_of_every_draft_length(depth, rule):
  kinds = {'broken': NAMES.index('broken'), 'teacher': NAMES.index('teacher')}
  model = decoder(TABLE, list(KINDS.values()), rule, depth, **kinds)
  runs = [decode(model, 16384, seed) for seed in (2, 3)]
  for _, out in runs:
    check_acceptance(out, rule, NAMES)
  by = np.array(NAMES)[np.arange(16384) % 8]
  check(np.concatenate([t for t, _ in runs], 1)[:, :17], TABLE, SETTINGS, by)
  check(np.concatenate([t for t, _ in runs]), TABLE, SETTINGS, np.tile(by, 2))


@pytest.mark.slow
@pytest.mark.parametrize('rule', verify.RULES)
def test_drafts_without_a_q_are_one_hot(rule):
  names = ['wrong', 'argmax', 'skewed', 'two of four']
  model = decoder(TABLE, [KINDS[name] for name in names], rule, one_hot=True)
  texts, out = decode(model, 16384, 4)
  check(texts, TABLE, SETTINGS, np.array(names)[np.arange(len(texts)) % 4])
  check_acceptance(out, rule, names)


@pytest.mark.slow
@pytest.mark.parametrize('rule', verify.RULES)
def test_eight_devices_draw_what_one_draws(rule):
  kinds = {'broken': NAMES.index('broken'), 'teacher': NAMES.index('teacher')}
  texts = []
  for axes in ({'fsdp': 1}, {'fsdp': 4, 'tensor': 2}):
    count = int(np.prod(list(axes.values())))
    with jax.set_mesh(mesh.make(mesh.Config(**axes), jax.devices()[:count])):
      model = decoder(TABLE, list(KINDS.values()), rule, **kinds)
      texts.append(decode(model, 64, 10)[0])
  np.testing.assert_array_equal(*texts)


# ------------------------------------------------------------------ cases from practice


def steady(p):
  """The chain of independent tokens."""
  return np.tile(np.array(p, np.float64), (len(p), 1))


def shares(texts, V):
  return np.bincount(texts[:, 1:].ravel(), minlength=V) / texts[:, 1:].size


WARM = [Settings(temperature=1.0)]


@pytest.mark.parametrize('one_hot', [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_honest_and_an_argmax_draft_of_three_tokens(one_hot):
  p, q = [0.5, 0.3, 0.2], [0.6, 0.3, 0.1]
  model = decoder(steady(p), [steady(q)], 'rejection', 1, one_hot=one_hot)
  texts, out = decode(model, 8192, 5, settings=WARM, V=3)
  np.testing.assert_allclose(shares(texts, 3), p, atol=0.004)
  assert p_value(counts(texts, 3, 2), joint(steady(p), 2)) > 1e-4
  accepted = 0.5 if one_hot else 0.9
  assert out.stats.acceptance_rate == pytest.approx(accepted, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize('rule', verify.RULES)
def test_a_draft_of_its_two_likeliest_tokens(rule):
  p, q = [0.4, 0.3, 0.2, 0.1], [0.5, 0.25, 0, 0]
  model = decoder(steady(p), [steady(q)], rule, 2)
  own = [Settings(temperature=1.0), Settings(temperature=1.0, top_k=2)]
  texts, _ = decode(model, 16384, 6, settings=own)
  two = np.arange(len(texts)) // 8 % 2 == 1
  np.testing.assert_allclose(shares(texts[~two], 4), p, atol=0.004)
  np.testing.assert_allclose(shares(texts[two], 4), [4 / 7, 3 / 7, 0, 0], atol=0.004)


@pytest.mark.slow
def test_equal_logits_of_a_bfloat16_model_are_drawn_evenly():
  table = np.full((1024, 1024), 1 / 1024)
  # A short window, for writes into a bfloat16 cache copy all of it on a CPU.
  model = decoder(table, sizes={'dtype': 'bfloat16', 'windows': (1,)})
  runs = [
    decode(model, 256, seed, settings=WARM, budget=50, V=1024)[0] for seed in range(16)
  ]
  seen = np.bincount(np.concatenate(runs)[:, 1:].ravel(), minlength=1024)
  assert seen.sum() >= 200_000
  assert ((seen - seen.mean()) ** 2 / seen.mean()).sum() / 1023 < 1.3


@pytest.mark.slow
@pytest.mark.parametrize('rule', verify.RULES)
def test_drafting_and_judging_draw_independently(rule):
  p, q = [0.4, 0.3, 0.2, 0.1], [0.1, 0.15, 0.15, 0.6]
  model = decoder(steady(p), [steady(q)], rule, 1)
  texts, _ = decode(model, 16384, 8, settings=WARM, budget=25)
  assert texts[:, 1:].size > 400_000
  np.testing.assert_allclose(shares(texts, 4), p, atol=0.002)


@pytest.mark.parametrize(
  'rule',
  [pytest.param(r, marks=[pytest.mark.slow] * (r != 'block')) for r in verify.RULES],
)
def test_rows_fail_alone_and_what_came_before_is_sound(rule):
  table = np.array([[1, 5, 3, 1], [3, 1, 5, 1], [3, 2, 1, 4], [0, 0, 0, 1]], float)
  table /= table.sum(-1, keepdims=True)
  bank = [KINDS[name] for name in NAMES[:4]]
  model = decoder(table, bank, rule, undefined=3, teacher=2, broken=3)
  texts, out = decode(model, 8192, 9, drafts=(None, 2), budget=12)
  last = texts[np.arange(len(texts)), out.lengths]
  failed = (last == 3) & (out.lengths < 12)
  assert failed[texts[:, 0] == 3].all() and not failed.all()
  assert np.isfinite(out.logprobs).all()
  reason = np.where(failed, 'failed', 'length')
  np.testing.assert_array_equal(out.finish_reason, reason)
  there = np.arange(13)[None] <= out.lengths[:, None]
  assert ((texts == 3) & there).sum(1).max() == 1
  texts = np.where(there, texts, 3)
  check(texts, table, SETTINGS, np.arange(len(texts)) % 4)
  alone, out = decode(model, 8192, 9, settings=[Settings()], budget=12)
  ends = np.array([3, 2, 1, 0])[alone[:, 0]]
  np.testing.assert_array_equal(out.lengths, ends)
  assert set(out.finish_reason) == {'failed'}


def by_position(monkeypatch):
  """Random keys of a token's position in place of the row's round: wrong."""
  at, one_round, keys = [], engine.one_round, verify.keys

  def located(graphdef, plan, weights, state, sampling):
    at.append(state.length)
    return one_round(graphdef, plan, weights, state, sampling)

  def of_positions(seed_B, round_B, stream, slots):
    if not at:  # the prefill
      return keys(seed_B, round_B, stream, slots)
    each = [keys(seed_B, at[-1] + k, stream, 1) for k in range(slots)]
    return jnp.concatenate(each, 1)

  monkeypatch.setattr(engine, 'one_round', located)
  monkeypatch.setattr(verify, 'keys', of_positions)


@pytest.mark.slow
@pytest.mark.parametrize('keyed, expected', [('round', 2 / 3), ('position', 0.6115)])
def test_keys_are_of_the_round_for_blocks_discard_draws(keyed, expected, monkeypatch):
  if keyed == 'position':
    by_position(monkeypatch)
  model = decoder(steady([1 / 3, 2 / 3]), [steady([2 / 3, 1 / 3])], 'block', 2)
  runs = [
    decode(model, 16384, seed, settings=WARM, budget=6, V=2)[0] for seed in range(8)
  ]
  # The prefill gives the first new token, the first round's block the second and third.
  assert np.mean(np.concatenate(runs)[:, 2]) == pytest.approx(2 / 3, abs=0.004)
  assert np.mean(np.concatenate(runs)[:, 3]) == pytest.approx(expected, abs=0.004)
