"""The rules where drafts branch. A walk in float64 delivers exactly the target's joint
distribution, over every draft that can be drawn; the rules then decide as it does on
either side of its every threshold, and draw from what it draws from."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumeration_test import KINDS, after, make, whole

from mtpjax import mesh
from mtpjax.sampling import branching, trees, verify

TREES = {
  'two and two': trees.Tree((-1, -1, 0, 0)),
  'ragged': trees.Tree((-1, -1, 0, 1, 1)),
  'three': trees.Tree((-1, -1, -1)),
  'chain': trees.Tree.chain(2),
}
EXACT = ('rejection', 'sample-and-match')


@pytest.fixture(autouse=True)
def one_device():
  with jax.set_mesh(mesh.make(mesh.Config(fsdp=1), jax.devices()[:1])):
    yield


def path(tree, x, node):
  """Tokens down to a node, itself included."""
  found = []
  while node >= 0:
    found.insert(0, x[node])
    node = tree.parents[node]
  return tuple(found)


def drawn_from(tree, q, x, node):
  """q of a node: that of its parent's children without the siblings before it; None
  where nothing is left."""
  parent = tree.parents[node]
  row = q[len(path(tree, x, parent))][path(tree, x, parent)].astype(float).copy()
  for other in range(node):
    if tree.parents[other] == parent:
      row[x[other]] = 0
  return row / row.sum() if row.sum() > 1e-9 else None


def drafts(tree, q):
  """Every draft that can be drawn and its probability; where nothing is left to draw
  a node's token is 0."""

  def grow(x, chance):
    node = len(x)
    if node == tree.nodes:
      yield tuple(x), chance
      return
    row = drawn_from(tree, q, [*x, 0], node)
    for token in range(len(q[0])) if row is not None else (0,):
      own = 1.0 if row is None else row[token]
      if own > 0:
        yield from grow([*x, token], chance * own)

  yield from grow([], 1.0)


def outcomes(rule, tree, p, q, x, depth):
  """Everywhere the walk may end: (chance, node, what a token is drawn from, what was
  accepted of the nodes that were judged {node: (threshold, accepted)})."""

  def walk(at, chance, judged):
    prefix = path(tree, x, at)
    rest = p[len(prefix)][prefix].astype(float)
    for node in range(tree.nodes):
      if tree.parents[node] != at or tree.depths[node] > depth:
        continue
      own = drawn_from(tree, q, x, node)
      if own is None:
        continue
      if rule == 'rejection':
        h = min(1.0, rest[x[node]] / own[x[node]])
        left = np.maximum(rest - own, 0)
      else:  # the token drawn from p is known not to be x
        h = rest[x[node]]
        left = np.where(np.arange(len(rest)) == x[node], 0, rest)
      if h > 0:
        yield from walk(node, chance * h, {**judged, node: (h, True)})
      judged = {**judged, node: (h, False)}
      chance = chance * (1 - h)
      if chance <= 0:
        return
      rest = left / left.sum() if left.sum() > 1e-12 else rest
    yield chance, at, rest, judged

  yield from walk(-1, 1.0, {})


@pytest.mark.parametrize('rule', EXACT)
@pytest.mark.parametrize('name', TREES)
def test_the_walk_delivers_the_target(name, rule):
  tree = TREES[name]
  for kind in KINDS:
    p, q = make(kind, 3, 2)
    for depth in range(tree.depth + 1):
      joint, total = np.zeros(whole(p).shape), 0.0
      for x, chance in drafts(tree, q):
        for own, at, rest, _ in outcomes(rule, tree, p, q, x, depth):
          prefix = path(tree, x, at)
          now = rest.reshape(-1, *(1,) * (len(p) - len(prefix) - 1))
          joint[prefix] += chance * own * now * after(p, prefix)
          total += chance * own
      assert total == pytest.approx(1, abs=1e-9)
      np.testing.assert_allclose(joint, whole(p), rtol=0, atol=1e-9, err_msg=kind)


class Fed:
  """Uniforms and drawn tokens of the test's own; keeps the weights of the draws."""

  u: Any
  y: Any  # None: the heaviest
  weights: Any

  def __init__(self, monkeypatch):
    monkeypatch.setattr(verify, 'uniform', lambda *_: self.u)
    monkeypatch.setattr(verify, 'draw', self.draw)

  def draw(self, keys, weights):
    self.weights = weights
    return jnp.argmax(weights, -1).astype(jnp.int32) if self.y is None else self.y

  def run(self, rule, tree, p, x, q, depth, u, y=None):
    @jax.jit
    def judged(p, x, q, depth, u, y):
      self.u, self.y = u, y
      parents = jnp.broadcast_to(jnp.array(tree.parents)[None], x.shape)
      block = branching.Block.of(parents, tree.depth)
      ok = block.proposed(depth)
      row, verdict = branching.RULES[rule](p, x, q, block, ok, depth, depth)
      return row, verdict, self.weights, block.path(row, tree.depth + 1)

    p, u = np.array(p, np.float32), np.array(u, np.float32)
    q = None if q is None else np.array(q, np.float32)
    return jax.device_get(judged(p, np.array(x), q, np.array(depth), u, y))


@pytest.fixture
def fed(monkeypatch):
  return Fed(monkeypatch)


def rows_of(tree, p, x):
  """p after the last committed token and after every node."""
  each = [path(tree, x, node) for node in range(-1, tree.nodes)]
  return [p[len(own)][own] for own in each]


@pytest.mark.parametrize('name', TREES)
def test_rejection_decides_as_the_walk(name, fed):
  tree, V = TREES[name], 3
  rng, cases = np.random.default_rng(0), []
  for kind in KINDS:
    p, q = make(kind, V, 2)
    p, q = ([t.astype(np.float32).astype(float) for t in tables] for tables in (p, q))
    every = list(drafts(tree, q))
    some = rng.permutation(len(every))[:60]
    for x, _ in (every[n] for n in some):
      for depth in range(tree.depth + 1):
        for _, at, rest, judged in outcomes('rejection', tree, p, q, x, depth):
          if any(h > 0.9999 and not ok for h, ok in judged.values()):
            continue  # only rounding refuses it
          u = rng.random(tree.nodes)
          for node, (h, accepted) in judged.items():
            u[node] = h * (1 - 1e-5) - 1e-7 if accepted else h * (1 + 1e-5) + 1e-7
          own = [drawn_from(tree, q, x, n) for n in range(tree.nodes)]
          own = [np.zeros(V) if row is None else row for row in own]
          u = np.clip(u, 0, 1 - 2**-24)
          cases.append((rows_of(tree, p, x), x, own, depth, u, at + 1, rest))
  p, x, q, depth, u, at, rest = (np.array(c) for c in zip(*cases, strict=True))
  row, verdict, weights, ways = fed.run('rejection', tree, p, x, q, depth, u)
  np.testing.assert_array_equal(row, at)
  assert not verdict.failed.any()
  depths = np.array([0, *tree.depths])
  np.testing.assert_array_equal(verdict.accepted, depths[at])
  got = weights[:, 0] / weights[:, 0].sum(-1, keepdims=True)
  np.testing.assert_allclose(got, rest, rtol=0, atol=2e-5)
  for way, end in zip(ways, at, strict=True):
    nodes = [end - 1]
    while nodes[0] >= 0:
      nodes.insert(0, tree.parents[nodes[0]])
    wanted = [node + 1 for node in nodes]
    assert way.tolist() == wanted + [end] * (tree.depth + 1 - len(wanted))


@pytest.mark.parametrize('name', TREES)
def test_without_a_q_drafts_are_one_hot(name, fed):
  tree, V, B = TREES[name], 4, 500
  rng = np.random.default_rng(1)
  p = rng.dirichlet(np.ones(V), (B, tree.nodes + 1))
  x = np.array([rng.permutation(V)[tree.ranks] for _ in range(B)])
  u, depth = rng.random((B, tree.nodes)), rng.integers(0, tree.depth + 1, B)
  given = fed.run('rejection', tree, p, x, np.eye(V)[x], depth, u)
  left = fed.run('rejection', tree, p, x, None, depth, u)
  jax.tree.map(np.testing.assert_array_equal, given, left)
  assert len(set(given[0])) == tree.nodes + 1


def went(tree, y, x, depth):
  """Down while a child is the token drawn after its parent."""
  at = -1
  while True:
    below = [
      n
      for n in range(tree.nodes)
      if tree.parents[n] == at and tree.depths[n] <= depth and x[n] == y[at + 1]
    ]
    if not below:
      return at + 1
    at = below[0]


@pytest.mark.parametrize('name', TREES)
def test_matching_rules_go_down_the_drawn_tokens(name, fed):
  tree, V, B = TREES[name], 3, 400
  rng = np.random.default_rng(2)
  p = rng.dirichlet(np.ones(V), (B, tree.nodes + 1)).astype(np.float32)
  x = rng.integers(0, V, (B, tree.nodes))  # siblings may be the same here
  y = rng.integers(0, V, p.shape[:2])
  depth = rng.integers(0, tree.depth + 1, B)
  u = np.zeros(x.shape)
  row, verdict, weights, _ = fed.run('sample-and-match', tree, p, x, None, depth, u, y)
  np.testing.assert_array_equal(weights, p)
  wanted = [went(tree, y[b], x[b], depth[b]) for b in range(B)]
  np.testing.assert_array_equal(row, wanted)
  np.testing.assert_array_equal(verdict.after, y[np.arange(B), wanted])
  parents = jnp.broadcast_to(jnp.array(tree.parents)[None], x.shape)
  block = branching.Block.of(parents, tree.depth)
  ok = block.proposed(jnp.asarray(depth))
  row, verdict = branching.greedy(jnp.log(p), jnp.asarray(x), block, ok)
  best = p.argmax(-1)
  wanted = [went(tree, best[b], x[b], depth[b]) for b in range(B)]
  np.testing.assert_array_equal(row, wanted)
  np.testing.assert_array_equal(verdict.after, best[np.arange(B), wanted])
  # Under every rule a one-hot p is greedy.
  x = np.array([rng.permutation(V)[tree.ranks] for _ in range(B)])
  wanted = [went(tree, best[b], x[b], depth[b]) for b in range(B)]
  for rule in branching.RULES:
    one = fed.run(rule, tree, np.eye(V)[best], x, None, depth, u + 1 - 2**-24)
    np.testing.assert_array_equal(one[0], wanted, err_msg=rule)
    np.testing.assert_array_equal(one[1].after, best[np.arange(B), wanted])


def test_typical_acceptance_by_its_formula(fed):
  # Of few tokens p can only be so even that ε is the lower bound.
  tree, V, B = TREES['ragged'], 12, 400
  rng = np.random.default_rng(3)
  even = rng.dirichlet(np.full(V, 3.0), (B // 2, tree.nodes + 1))
  p = np.concatenate([rng.dirichlet(np.full(V, 0.1), even.shape[:2]), even]) + 1e-6
  p = p / p.sum(-1, keepdims=True)
  x = np.array([rng.permutation(V)[tree.ranks] for _ in range(B)])
  depth = rng.integers(0, tree.depth + 1, B)
  row, verdict, weights, _ = fed.run(
    'typical', tree, p, x, None, depth, np.zeros(x.shape)
  )
  for b in range(B):
    scores = {-1: (0, 0.0)}
    for node, parent in enumerate(tree.parents):
      above = p[b, parent + 1]
      entropy = -(above * np.log(above)).sum()
      fits = above[x[b, node]] > min(0.09, 0.3 * np.exp(-entropy))
      if parent in scores and fits and tree.depths[node] <= depth[b]:
        likely = scores[parent][1] + np.log(above[x[b, node]])
        scores[node] = tree.depths[node], likely
    assert row[b] == max(scores, key=lambda node: scores[node]) + 1
  np.testing.assert_allclose(weights[:, 0], p[np.arange(B), row], rtol=1e-6)
  assert len(set(row)) == tree.nodes + 1 and not verdict.failed.any()


@pytest.mark.parametrize('rule', branching.RULES)
def test_a_broken_row_ends_the_walk_before_it(rule):
  tree, V, B = TREES['ragged'], 3, 300
  rng = np.random.default_rng(4)
  p = rng.dirichlet(np.ones(V), (B, tree.nodes + 1)).astype(np.float32)
  x = np.array([rng.permutation(V)[tree.ranks] for _ in range(B)])
  q = np.eye(V, dtype=np.float32)[x]
  parents = jnp.broadcast_to(jnp.array(tree.parents)[None], x.shape)
  block = branching.Block.of(parents, tree.depth)
  every = jnp.ones(x.shape, bool)

  @jax.jit
  def run(p, q):
    seeds = jnp.arange(B)
    return branching.RULES[rule](p, jnp.asarray(x), q, block, every, seeds, seeds)

  whole_row, _ = run(p, q)
  for broken in range(tree.nodes + 1):
    bad = p.copy()
    bad[:, broken] = np.nan
    row, out = run(bad, q)
    on_it = np.asarray(row) == broken
    np.testing.assert_array_equal(out.failed, on_it)
    away = ~on_it & (np.asarray(whole_row) != broken)
    below = np.asarray(block.seen)[0, :, broken][np.asarray(whole_row)]
    if rule != 'typical':  # which chooses among paths
      np.testing.assert_array_equal(
        np.asarray(row)[~below], np.asarray(whole_row)[~below]
      )
    assert on_it.any() and (away.any() or broken == 0)
