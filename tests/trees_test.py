"""Drafts that branch, with real drafters: shapes, what is drafted along every path, the
text, and what a round leaves behind."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import DRAFTERS, Scripted, V, build, on_mesh, plainly
from flax import nnx

from mtpjax import mesh
from mtpjax.fields import ConfigError
from mtpjax.models import cache
from mtpjax.sampling import drafting, engine, filters, judging, trees
from mtpjax.sampling.filters import Settings
from mtpjax.sampling.generate import Decoder

K = 3  # of the drafters
RAGGED = trees.Tree((-1, -1, -1, 0, 0, 2, 3, 3, 5))
DYNAMIC = trees.Dynamic(width=3, nodes=7, depth=K)


# --- Shapes


def test_a_tree_is_read_from_the_children_by_depth():
  tree = trees.Tree.full((3, 2, 1))
  assert trees.parse('3x2x1', 3, 100, 3) == tree
  assert tree == trees.Tree((-1,) * 3 + (0, 0, 1, 1, 2, 2) + tuple(range(3, 9)))
  assert tree.depths == [1] * 3 + [2] * 6 + [3] * 6
  assert tree.ranks == [0, 1, 2] + [0, 1] * 3 + [0] * 6
  assert (tree.inner(0), tree.inner(1), tree.inner(3)) == ([-1], [0, 1, 2], [])
  assert RAGGED.inner(1) == [0, 2] and RAGGED.inner(2) == [3, 5]
  assert trees.parse('1x1', 3, 100, 3) == trees.Tree.chain(2)
  assert trees.parse('dynamic:4:9', 3, 100, 3) == trees.Dynamic(4, 9, 3)


@pytest.mark.parametrize(
  'text, said',
  [
    ('2x0', 'is no tree'),
    ('', 'is no tree'),
    (4, 'is no tree'),
    ('2x2x2x2', 'is 4 deep, and drafts are up to 3'),
    ('99x99', 'is too large'),
    ('200x2', 'is too large'),
    ('-1,-1,7', 'is no tree'),
    ('128x1x1', 'has 384 nodes'),
    ('12x2', 'has 12 children of 10 tokens'),
    ('dynamic:2:40', 'has only 10 candidates'),
    ('dynamic:0:4', 'is 0 wide'),
    ('dynamic:16:4', 'is 16 wide'),
    ('dynamic:2:0', 'has 0 nodes'),
  ],
)
def test_what_is_no_tree_is_refused(text, said):
  with pytest.raises(ConfigError, match=said):
    trees.parse(text, 3, 10, 3)


@pytest.mark.parametrize('parents', [(0,), (-1, 1), (-1, 0, -1), (-2,)])
def test_nodes_are_numbered_breadth_first(parents):
  with pytest.raises(ConfigError, match='is no tree'):
    trees.Tree(parents)


def test_accepted_drafts_to_expect():
  table = [[0.5, 0.25], [0.4, 0.2]]
  tree = trees.Tree((-1, -1, 0, 0, 1))
  assert tree.accepted(table) == pytest.approx(0.5 * 1.6 + 0.25 * 1.4)
  assert trees.parse(str(tree), 3, 9, 3) == tree


def test_the_best_tree_is_the_best_of_all():
  rng = np.random.default_rng(0)
  for _ in range(5):
    table = -np.sort(-rng.dirichlet(np.ones(4), 3)[:, :3], 1)
    for budget in range(1, 6):
      best = trees.Tree.best(table, budget)
      others = []
      for parents in itertools.product(*(range(-1, n) for n in range(budget))):
        try:
          tree = trees.Tree(parents)
        except ConfigError:
          continue
        if tree.depth <= 3 and max(tree.ranks) < 3:
          others.append(tree.accepted(table))
      assert best.nodes <= budget
      assert best.accepted(table) == pytest.approx(max(others), rel=1e-12)


def test_candidates_that_are_never_right_are_left_out():
  assert trees.Tree.best([[0.5, 0.0], [0.0, 0.0]], 9) == trees.Tree((-1,))
  with pytest.raises(ConfigError, match='falling with the rank'):
    trees.Tree.best([[0.1, 0.2]], 3)


# --- Drafts along every path


class Noted:
  """Chooses as the one it wraps does, and keeps the logits by node."""

  def __init__(self, choose):
    self.choose, self.seen = choose, []

  def __call__(self, logits_BMV, k, above):
    self.seen.append(cache.whole(logits_BMV)[..., :V])
    return self.choose(logits_BMV, k, above)

  def draft(self, levels):
    return self.choose.draft(levels)


@pytest.mark.parametrize(
  'name, windows, axes',
  [
    ('depth, unshared', (3,), {}),
    ('rows', (3,), {}),
    ('depth, trunk hidden', (0,), {}),
    *(
      pytest.param(*case, marks=pytest.mark.slow)
      for case in [
        ('depth', (0,), {}),
        ('rows, trunk hidden', (3,), {}),
        ('parallel', (0,), {}),
        ('depth', (3,), {'fsdp': 4, 'tensor': 2}),
        ('rows', (3,), {'fsdp': 2, 'tensor': 4}),
      ]
    ),
  ],
)
def test_every_path_is_drafted_as_a_chain_of_its_tokens(name, windows, axes):
  """Whatever stands beside it: the logits at each node are those of a chain."""
  with on_mesh(**{'fsdp': 1, **axes}):
    graphdef, params = build(DRAFTERS[name], windows=windows)
    B, plan = 4, engine.Plan(draft=K, slots=40, chunk=4, tree=RAGGED)
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, V, (B, 13)).astype(np.int32)
    sampling = filters.arrays([Settings(budget=9)] * B, K)
    weights = engine.lay_out(graphdef, params)
    lengths = np.array([1, 3, 8, 13], np.int32)

    @jax.jit
    def run(weights, prompts, lengths):
      state = engine.prefill(graphdef, plan, weights, prompts, lengths, sampling)
      m = nnx.merge(graphdef, weights)
      part: Any = m.objectives['drafter']

      def propose(choose):
        return part.propose(m.trunk, state.caches, state.drafter, K, choose)[0]

      shaped = drafting.Shaped(RAGGED, sampling, state.rounds, lambda x, _: x)
      noted = Noted(shaped)
      tree = propose(noted)
      chains = {}
      for leaf in (4, 6, 7, 8):
        path = [leaf]
        while RAGGED.parents[path[0]] >= 0:
          path.insert(0, RAGGED.parents[path[0]])
        path += [path[-1]] * (K - len(path))
        along = Scripted(jnp.stack([tree.tokens[:, n] for n in path], 1))
        propose(along)
        chains[tuple(path)] = along.seen
      return tree, noted.seen, chains

    put = jax.device_put
    tree, seen, chains = jax.device_get(
      run(weights, put(prompts, mesh.whole_BT), put(lengths, mesh.ids_B))
    )
  assert (tree.parents == np.array(RAGGED.parents)).all()
  for path, logits in chains.items():
    for k in range(len(set(path))):
      parent = path[k - 1] if k else -1
      at = RAGGED.inner(k).index(parent) if parent in RAGGED.inner(k) else None
      if at is not None:
        np.testing.assert_allclose(seen[k][:, at], logits[k], rtol=0, atol=3e-5)
  # Siblings are the most likely tokens, in turn.
  for k in range(K):
    for m, parent in enumerate(RAGGED.inner(k)):
      kids = [n for n in RAGGED.level(k + 1) if RAGGED.parents[n] == parent]
      best = np.argsort(-seen[k][:, m], -1, kind='stable')[:, : len(kids)]
      np.testing.assert_array_equal(tree.tokens[:, kids], best)


# --- The text, and what a round leaves


SHORT = [
  ('depth, unshared', (3,), '2x2x1', {}),
  ('rows', (3,), RAGGED, {}),
  ('rows', (0,), DYNAMIC, {}),
  ('parallel', (6, 0), RAGGED, {}),
  ('residual', (0,), '2x2x1', {}),
]


@pytest.mark.parametrize(
  'name, windows, tree, axes',
  [
    *SHORT,
    *(
      pytest.param(*case, marks=pytest.mark.slow)
      for case in [
        *((name, (3,), RAGGED, {}) for name in DRAFTERS),
        ('depth', (3, 0), DYNAMIC, {}),
        ('rows, trunk hidden', (3, 0), DYNAMIC, {}),
        ('depth', (3,), DYNAMIC, {'fsdp': 4, 'tensor': 2}),
        ('rows', (3,), RAGGED, {'fsdp': 2, 'tensor': 4}),
      ]
      if case not in SHORT
    ),
  ],
)
def test_rounds_of_trees_leave_what_a_fresh_prefill_gives(name, windows, tree, axes):
  """Greedy text is the plain one, and the next drafts after every round are those of a
  state that never saw a draft."""
  new, slots = 24, 40
  with on_mesh(**{'fsdp': 1, **axes}):
    # Anticausal heads each read a layer of their own.
    layers = K + 1 if name == 'parallel, anticausal' else 2
    graphdef, params = build(DRAFTERS[name], windows=windows, layers=layers)
    lengths = np.array([1, 3, 8, 8], np.int32)
    prompts = np.random.default_rng(0).integers(0, V, (4, 8)).astype(np.int32)
    text, _, _ = plainly(graphdef, params, prompts, lengths, new)
    shape = trees.parse(tree, K, V, K)
    plan = engine.Plan(draft=K, slots=slots, chunk=4, tree=shape)
    sampling = filters.arrays([Settings(budget=new)] * 4, K)
    weights = engine.lay_out(graphdef, params)

    def drafts(weights, state):
      m = nnx.merge(graphdef, weights)
      past = judging.history(m, state, sampling)
      noted = Noted(judging.chooser(plan, sampling, state.rounds, past, K))
      part: Any = m.objectives['drafter']
      draft, _ = part.propose(m.trunk, state.caches, state.drafter, K, noted)
      return noted.seen, draft.tokens

    @jax.jit
    def both(weights, state, text):
      # All at once: no ring ever wraps, and nothing was ever rolled back.
      whole = engine.Plan(draft=K, slots=slots, chunk=slots, tree=shape)
      args = weights, text, state.length - 1, sampling
      fresh = engine.prefill(graphdef, whole, *args)
      return drafts(weights, state), drafts(weights, fresh)

    start = jax.jit(functools.partial(engine.prefill, graphdef, plan))
    go_on = jax.jit(functools.partial(engine.one_round, graphdef, plan))
    put = jax.device_put
    state = start(
      weights, put(prompts, mesh.whole_BT), put(lengths, mesh.ids_B), sampling
    )
    branched = 0
    full = np.pad(text, ((0, 0), (0, slots - text.shape[1])))
    while True:
      ours = jax.device_get(state)
      known = np.arange(slots)[None] < ours.length[:, None]
      np.testing.assert_array_equal(
        np.where(known, ours.tokens[:, :slots], 0), np.where(known, full, 0)
      )
      if (ours.reason != engine.LIVE).all():
        break
      given = put(np.where(known, full, 0).astype(np.int32), mesh.whole_BT)
      (seen, tokens), wanted = jax.device_get(both(weights, state, given))
      np.testing.assert_allclose(seen[0], wanted[0][0], rtol=0, atol=1e-4)
      # Candidates as likely as each other up to rounding may be drafted under or not.
      if isinstance(shape, trees.Tree):
        for own, fresh in zip(seen, wanted[0], strict=True):
          np.testing.assert_allclose(own, fresh, rtol=0, atol=1e-4)
        np.testing.assert_array_equal(tokens, wanted[1])
      before = ours.length
      state = go_on(weights, state, sampling)
      # Whether the first accepted token was another child than the first.
      for b, n in enumerate(before):
        moved = int(jax.device_get(state.length)[b]) - n > 1
        branched += bool(moved and tokens[b, 0] != full[b, n])
    assert branched >= 1
    assert (ours.length == lengths + new).all()
    assert (ours.accepted.sum(1) > 0).any()
    if isinstance(shape, trees.Tree):
      assert (ours.nodes <= ours.rounds * shape.nodes).all()


@pytest.mark.parametrize('tree', [RAGGED, DYNAMIC])
def test_processors_heed_the_path_to_each_node(tree):
  with on_mesh(fsdp=1):
    graphdef, params = build(DRAFTERS['parallel, linear'])
    prompts = np.random.default_rng(2).integers(0, V, (8, 4)).astype(np.int32)
    own = [
      Settings(
        budget=30,
        repetition_penalty=1.3 if b % 2 else 1.0,
        presence_penalty=3.0 * (b % 3 > 0),
        frequency_penalty=2.0 if b > 3 else 0.0,
        logit_bias={b: -2.0},
        min_tokens=9,
        stop=(3, 17, 29),
      )
      for b in range(8)
    ]
    plain, drafted = (
      decoder.generate(prompts, np.full(8, 4), own)
      for decoder in (
        Decoder(graphdef, params, draft=0),
        Decoder(graphdef, params, tree=tree),
      )
    )
    np.testing.assert_array_equal(plain.tokens, drafted.tokens)
    assert plain.finish_reason == drafted.finish_reason
    assert sum(row.kept.sum() > 0 for row in drafted.rows) >= 4
    free = [Settings(budget=30)] * 8
    without = Decoder(graphdef, params, draft=0).generate(prompts, np.full(8, 4), free)
    changed = [
      (a != b).any() for a, b in zip(plain.tokens, without.tokens, strict=True)
    ]
    assert sum(changed) >= 4


@pytest.mark.parametrize('tree', ['2x2x1', DYNAMIC])
def test_rows_and_settings_of_a_batch_keep_to_themselves(tree):
  with on_mesh(fsdp=1):
    graphdef, params = build(DRAFTERS['rows'], windows=(3,))
    prompts = np.random.default_rng(1).integers(0, V, (6, 5)).astype(np.int32)
    lengths = np.array([5, 1, 2, 5, 3, 4])
    own = [
      Settings(budget=12),
      Settings(budget=9, temperature=1.0, seed=1),
      Settings(budget=12, temperature=0.7, top_k=3, seed=2, draft=1),
      Settings(budget=0),
      Settings(budget=12, draft=2, stop=(3, 7)),
      Settings(budget=2, temperature=1.0, seed=3, draft=0),
    ]
    decode = Decoder(graphdef, params, tree=tree)
    out = decode.generate(prompts, lengths, own)
    for b, settings in enumerate(own):
      one = decode.generate(prompts[b : b + 1], lengths[b : b + 1], settings)
      n = one.lengths[0]
      assert out.lengths[b] == n and out.finish_reason[b] == one.finish_reason[0]
      np.testing.assert_array_equal(out.tokens[b, :n], one.tokens[0])
      assert out.rows[b].to_json() == one.rows[0].to_json()
    assert not out.rows[5].proposed.any() and not out.rows[5].nodes
    assert not out.rows[2].proposed[1:].any()


def test_a_chain_that_is_called_a_tree_decodes_as_a_chain():
  with on_mesh(fsdp=1):
    graphdef, params = build(DRAFTERS['depth'])
    prompts = np.random.default_rng(1).integers(0, V, (4, 5)).astype(np.int32)
    own = [
      Settings(budget=30, temperature=t, seed=b)
      for b, t in enumerate((1.0, 1.0, 0.0, 2.0))
    ]
    chain, tree = (
      Decoder(graphdef, params, tree=shape).generate(prompts, np.full(4, 5), own)
      for shape in (None, '1x1x1')
    )
    np.testing.assert_array_equal(chain.tokens, tree.tokens)
    for a, b in zip(chain.rows, tree.rows, strict=True):
      assert a.to_json() == b.to_json()


def test_refusals():
  with on_mesh(fsdp=1):
    graphdef, params = build(DRAFTERS['rows'])
    # A module that is reused drafts on beyond what it was trained for.
    assert Decoder(graphdef, params, tree='1x1x1x2').draft == 4
    for options, said in [
      ({'rule': 'block', 'tree': '2x2'}, 'judges chains only'),
      ({'draft': 0, 'tree': '2x2'}, 'needs a drafter that drafts'),
      ({'draft': 2, 'tree': '2x2x2'}, 'is 3 deep, and drafts are up to 2'),
      ({'tree': 'wide'}, 'is no tree'),
      ({'tree': '2x2', 'draft_cost': 0.1}, 'draft_cost'),
      ({'rule': 'typical', 'draft_cost': 0.1}, 'draft_cost'),
    ]:
      with pytest.raises(ConfigError, match=said):
        Decoder(graphdef, params, **options)
