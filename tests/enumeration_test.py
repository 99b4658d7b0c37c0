"""The rules, enumerated. An oracle in float64 delivers exactly the target's joint
distribution on tables that depend on all earlier tokens; the rules then decide as the
oracle does on either side of its every threshold, and draw from what it draws from.

A table is a list: p[i] has shape (V,) * (i + 1), the distribution of token i + 1 given
the i before it. `x` is a draft, a tuple of as many tokens as are proposed.
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax import mesh
from mtpjax.sampling import verify

SIZES = list(itertools.product((2, 3, 4), (1, 2, 3)))  # V, K
KINDS = ['any', 'q with zeros', 'p with zeros', 'disjoint', 'equal', 'one-hot', 'sharp']
RULES = [*verify.RULES, 'greedy']


@pytest.fixture(autouse=True)
def one_device():
  with jax.set_mesh(mesh.make(mesh.Config(fsdp=1), jax.devices()[:1])):
    yield


def make(kind, V, K, seed=0):
  rng = np.random.default_rng([seed, V, K])

  def draw(i, alpha=0.7, kept=None):
    shape = (V,) * i
    table = rng.dirichlet(np.full(V, alpha), shape) + 1e-6
    if kept is not None:
      table = np.where(kept, table, 0)
    return table / table.sum(-1, keepdims=True)

  def some(i):
    """Which tokens are left, at least one."""
    kept = rng.random((V,) * (i + 1)) < 0.6
    return kept | (np.arange(V) == rng.integers(0, V, (V,) * i)[..., None])

  even = np.arange(V) % 2 == 0
  alpha = 0.1 if kind == 'sharp' else 0.7
  kept_p = {'p with zeros': some, 'disjoint': lambda i: even}.get(kind, lambda i: None)
  kept_q = {
    'q with zeros': some,
    'disjoint': lambda i: ~even,
    'one-hot': lambda i: np.arange(V) == rng.integers(0, V, (V,) * i)[..., None],
  }.get(kind, lambda i: None)
  p = [draw(i, alpha, kept_p(i)) for i in range(K + 1)]
  return p, p[:K] if kind == 'equal' else [draw(i, alpha, kept_q(i)) for i in range(K)]


def drafts(q, length):
  """Every draft of that length that can be drawn, and its probability."""
  for x in itertools.product(range(len(q[0])), repeat=length):
    chance = np.prod([q[i][x[: i + 1]] for i in range(length)])
    if chance > 0:
      yield x, chance


# ------------------------------------------------------------------------- the oracle


@dataclasses.dataclass
class Judged:
  """Draft i counts if η_i < h[i - 1]; after i accepted, a token ∝ rest[i]."""

  h: list
  rest: list

  def chances(self, rule):
    """Of 0, 1, … accepted."""
    h = np.array([1.0, *self.h])
    if rule == 'block':  # the last that counts
      return [h[i] * np.prod(1 - h[i + 1 :]) for i in range(len(h))]
    stops = np.append(1 - h[1:], 1.0)  # before the first that does not
    return [np.prod(h[: i + 1]) * stops[i] for i in range(len(h))]

  def accepted(self, rule, u):
    counts = [eta < h for eta, h in zip(u, self.h, strict=False)]
    if rule == 'block':
      return max((i + 1 for i, ok in enumerate(counts) if ok), default=0)
    return [*counts, False].index(False)


def judge(rule, p, q, x):
  """The equations of the papers."""
  V, h, rest = len(p[0]), [], []
  joint = 1.0
  for i in range(len(x) + 1):
    now = p[i][x[:i]]
    if rule == 'greedy':
      now = np.eye(V)[np.argmax(now)]
    scale = joint if rule == 'block' else 1.0
    left = now if i == len(x) else np.maximum(scale * now - q[i][x[:i]], 0)
    if i > 0 and rule == 'block':
      R = left.sum()
      both = R + 1 - joint
      h.append(joint if i == len(x) else R / both if both > 0 else 1.0)
    if i < len(x):
      if rule == 'greedy':
        h.append(now[x[i]])
        left = now
      elif rule == 'sample-and-match':
        h.append(now[x[i]])
        left = np.where(np.arange(V) == x[i], 0, now)
      else:
        ratio = now[x[i]] / q[i][x[: i + 1]]
        joint = min(1.0, joint * ratio)
        if rule == 'rejection':
          h.append(min(1.0, ratio))
    rest.append(left)
  return Judged(h, rest)


def after(p, prefix):
  """p of all tokens after the prefix and one more, given that one: [V, …]."""
  out = np.ones(len(p[0]))
  for j in range(len(prefix) + 1, len(p)):
    out = out[..., None] * p[j][prefix]
  return out


def whole(p):
  return p[0].reshape(-1, *(1,) * (len(p) - 1)) * after(p, ())


def deliver(rule, p, q, ends):
  """(joint distribution of what is delivered, completed by the target; mean accepted).

  Args:
    ends: whether drafting ends after a prefix.
  """
  joint, mean = np.zeros(whole(p).shape), 0.0
  for x, chance in drafts(q, len(q)):
    x = x[: next((i for i in range(len(q)) if ends(x[:i])), len(q))]
    judged = judge(rule, p, q, x)
    each = zip(judged.chances(rule), judged.rest, strict=True)
    for t, (of_t, rest) in enumerate(each):
      if of_t > 0 and rest.sum() > 0:
        now = (rest / rest.sum()).reshape(-1, *(1,) * (len(p) - t - 1))
        joint[x[:t]] += chance * of_t * now * after(p, x[:t])
      mean += chance * of_t * t
  return joint, mean


@pytest.mark.parametrize('rule', RULES)
@pytest.mark.parametrize('V, K', SIZES)
def test_the_oracle_delivers_the_target(V, K, rule):
  for kind in KINDS:
    p, q = make(kind, V, K)
    if rule == 'greedy':
      p = [np.eye(V)[np.argmax(table, -1)] for table in p]
    for count in range(K + 1):
      joint, _ = deliver(rule, p, q, lambda prefix, n=count: len(prefix) == n)
      np.testing.assert_allclose(joint, whole(p), rtol=0, atol=1e-12)


@pytest.mark.parametrize('rule', RULES[:-1])
def test_a_draft_may_end_where_its_own_tokens_say(rule):
  rng = np.random.default_rng(4)
  p, q = make('any', 3, 3)
  for _ in range(20):
    broken = [rng.random((3,) * i) < 0.3 for i in range(3)]
    joint, _ = deliver(
      rule, p, q, lambda prefix, b=broken: bool(b[len(prefix)][prefix])
    )
    np.testing.assert_allclose(joint, whole(p), rtol=0, atol=1e-12)


def test_block_accepts_no_fewer_than_rejection():
  gains = []
  for seed in range(200):
    V, K = SIZES[seed % len(SIZES)]
    p, q = make('any', V, K, seed)
    means = [deliver(r, p, q, lambda _: False)[1] for r in ('rejection', 'block')]
    gains.append(means[1] - means[0])
  assert min(gains) > -1e-12 and max(gains) > 0.05


# -------------------------------------------------------------------------- the rules


class Fed:
  """Runs rules on uniforms and tokens of the test's own, and keeps what weights tokens
  were to be drawn from."""

  def __init__(self, monkeypatch):
    self.uniform: Any = None
    self.tokens: Any = None  # None: the heaviest
    self.weights: Any = None
    monkeypatch.setattr(verify, 'uniform', lambda *_: self.uniform)
    monkeypatch.setattr(verify, 'draw', self.draw)

  def draw(self, keys, weights):
    self.weights = weights
    return jnp.argmax(weights, -1) if self.tokens is None else self.tokens

  def run(self, rule, rows, one_hot=False):
    @jax.jit
    def judged(p, x, q, count, *given):
      self.uniform, self.tokens = given
      out = verify.RULES[rule](p, x, q, count, count, count)
      return out, self.weights

    p, q, u = (np.array(a, np.float32) for a in (rows.p, rows.q, rows.u))
    args = p, rows.x, None if one_hot else q, rows.count, u, rows.tokens
    out, self.weights = jax.device_get(judged(*args))
    return out


@pytest.fixture
def fed(monkeypatch):
  return Fed(monkeypatch)


@dataclasses.dataclass
class Batch:
  """A row for each draft and choice of uniforms, with the oracle's answer."""

  p: Any
  x: Any
  q: Any
  count: Any
  u: Any
  accepted: Any = None
  rest: Any = None
  tokens: Any = None


def batch(rule, kinds):
  """Tables of all sizes, every draft and count, uniforms just below and just above each
  threshold and anywhere. Filled up to the largest size, in which shapes are compiled
  once; what is past the count is nobody's business and is NaN."""
  rng, rows = np.random.default_rng(0), []
  for kind, (V, K) in itertools.product(kinds, SIZES):
    narrow = [[t.astype(np.float32) for t in tables] for tables in make(kind, V, K)]
    p, q = ([t.astype(float) for t in tables] for tables in narrow)
    for count in range(K + 1):
      for x, _ in drafts(q[: max(count, 1)], count):
        judged = judge(rule, p, q, x)
        sides = [
          [h * (1 - 1e-5) - 1e-7] * bool(h > 0)
          + [h * (1 + 1e-5) + 1e-7] * bool(h < 0.9999)
          for h in judged.h
        ]
        for u in [*itertools.product(*sides), rng.random(count)]:
          u = np.clip(u, 0, 1 - 2**-24)
          t = judged.accepted(rule, u)
          row = [np.full(s, np.nan) for s in ((4, 4), (3,), (3, 4), (3,), (4,))]
          row[0][: count + 1, :] = row[2][:count, :] = row[4][:] = 0
          row[1] = np.zeros(3, int)
          for i in range(count + 1):
            row[0][i, :V] = p[i][x[:i]]
          for i in range(count):
            row[2][i, :V] = q[i][x[:i]]
          row[1][:count], row[3][:count], row[4][:V] = x, u, judged.rest[t]
          rows.append((*row[:3], count, row[3], t, row[4]))
  return Batch(*(np.array(column) for column in zip(*rows, strict=True)))


@pytest.mark.parametrize('kinds, one_hot', [(KINDS, False), (['one-hot'], True)])
@pytest.mark.parametrize('rule', ['rejection', 'block'])
def test_rules_decide_as_the_oracle(rule, kinds, one_hot, fed):
  rows = batch(rule, kinds)
  out = fed.run(rule, rows, one_hot)
  np.testing.assert_array_equal(out.accepted, rows.accepted)
  assert not out.failed.any()
  size = rows.rest.sum(-1, keepdims=True)  # what rounding is to be held against
  got = fed.weights[:, 0] / fed.weights[:, 0].sum(-1, keepdims=True)
  np.testing.assert_allclose(got * size, rows.rest, rtol=0, atol=1e-6)


def test_sample_and_match_compares_with_draws_from_p(fed):
  rows = batch('sample-and-match', KINDS)
  rng = np.random.default_rng(1)
  y = rng.integers(0, 4, rows.p.shape[:2])
  same = np.arange(4)[None] < rng.integers(0, 4, len(y))[:, None]
  y = np.where(same, np.pad(rows.x, ((0, 0), (0, 1))), y).astype(np.int32)
  rows.tokens = y
  out = fed.run('sample-and-match', rows)
  np.testing.assert_array_equal(fed.weights, rows.p.astype(np.float32))
  for b, count in enumerate(rows.count):
    hits = [*(y[b, :count] == rows.x[b, :count]), False]
    assert out.accepted[b] == hits.index(False)
    assert out.after[b] == y[b, out.accepted[b]]


def test_a_one_hot_target_is_greedy_under_every_rule(fed):
  V, K = 3, 3
  p, q = make('any', V, K)
  p[0][:2] = p[0].max()  # a tie
  rows = [(x, n) for x, _ in drafts(q, K) for n in range(K + 1)]
  x, count = zip(*rows * 2, strict=True)
  table = np.array([[p[i][row[:i]] for i in range(K + 1)] for row in x])
  best = table.argmax(-1)
  accepted = [
    [*(best[b, :n] == x[b][:n]), False].index(False) for b, n in enumerate(count)
  ]
  after = best[np.arange(len(x)), accepted]
  out = verify.greedy(jnp.log(table), jnp.asarray(x), jnp.asarray(count))
  np.testing.assert_array_equal(out.accepted, accepted)
  np.testing.assert_array_equal(out.after, after)
  dense = [[q[i][row[:i]] for i in range(K)] for row in x]
  u = np.repeat([[0], [1 - 2**-24]], len(rows), 0) * np.ones(K)
  case = Batch(np.eye(V)[best], np.array(x), dense, np.array(count), u)
  for rule, one_hot in itertools.product(verify.RULES, (False, True)):
    drawn = fed.run(rule, case, one_hot)
    np.testing.assert_array_equal(drawn.accepted, accepted)
    np.testing.assert_array_equal(drawn.after, after)


def through_a_grid(rule, p, q, K, cells, fed):
  """Mean accepted of the same p and q at every position, by the rule itself; exact
  where every threshold is a multiple of 1 / cells."""
  x = np.array(list(itertools.product(range(len(p)), repeat=K)))
  grid = (np.array(list(itertools.product(range(cells), repeat=K))) + 0.5) / cells
  drafted, n = np.repeat(x, len(grid), 0), len(x) * len(grid)
  rows = Batch(
    *(np.broadcast_to(p, (n, K + 1, len(p))), drafted),
    *(np.broadcast_to(q, (n, K, len(q))), np.full(n, K), np.tile(grid, (len(x), 1))),
  )
  chance = np.prod(np.array(q)[drafted], 1)
  return np.sum(chance * fed.run(rule, rows).accepted) / len(grid)


@pytest.mark.parametrize('rule, expected', [('rejection', 10 / 9), ('block', 11 / 9)])
def test_two_drafts_by_the_worked_example(rule, expected, fed):
  p, q = np.array([1, 2]) / 3, np.array([2, 1]) / 3
  assert through_a_grid(rule, p, q, 2, 4, fed) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize('K, expected', [(1, 1.70), (2, 2.19), (5, 2.941)])
def test_tokens_by_rejection_at_an_acceptance_of_70_percent(K, expected, fed):
  found = 1 + through_a_grid('rejection', (0.5, 0.3, 0.2), (0.2, 0.3, 0.5), K, 5, fed)
  assert found == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize('rule', verify.RULES)
def test_a_broken_row_ends_the_draft_before_it(rule):
  rng = np.random.default_rng(5)
  B, K, V = 400, 3, 3
  p, q = (rng.dirichlet(np.ones(V), (B, n)).astype(np.float32) for n in (K + 1, K))
  x, count = rng.integers(0, V, (B, K)), rng.integers(0, K + 1, B)
  seeds, rows = jnp.arange(B), jax.jit(verify.RULES[rule])

  def run(p, q, count):
    args = jnp.asarray(p), jnp.asarray(x), jnp.asarray(q), jnp.asarray(count)
    return jax.device_get(rows(*args, seeds, seeds))

  whole = run(p, q, count)
  for j in range(K):
    cut = run(p, q, np.minimum(count, j))
    for values in ([np.nan] * V, [0.5, np.nan, 0.5], [0.0] * V, [np.inf, 0, 0]):
      broken = q.copy()
      broken[:, j] = values
      out, want = run(p, broken, count), whole if rule == 'sample-and-match' else cut
      np.testing.assert_array_equal(out.accepted, want.accepted)
      np.testing.assert_array_equal(out.after, want.after)
      assert not out.failed.any()
      broken = p.copy()
      broken[:, j] = values
      out = run(broken, q, count)
      np.testing.assert_array_equal(out.accepted, cut.accepted)
      np.testing.assert_array_equal(out.failed, out.accepted == j)
      np.testing.assert_array_equal(out.after[~out.failed], cut.after[~out.failed])
      assert out.failed.any() and (j == 0 or not out.failed.all())


def test_a_broken_row_ends_a_greedy_draft_too():
  logits = np.zeros((2, 3, 4), np.float32)
  logits[1, 1] = np.nan
  out = verify.greedy(jnp.asarray(logits), jnp.zeros((2, 2), int), jnp.array([2, 2]))
  np.testing.assert_array_equal(out.accepted, [2, 1])
  np.testing.assert_array_equal(out.failed, [False, True])
