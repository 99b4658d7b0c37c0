"""The rules where drafts branch: the walk from the last committed token down to the
node after which no child is accepted.

In a block of N + 1 rows, row 0 is the last committed token and row n + 1 is node n; row
r of `p` judges the children of row r, siblings in turn.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer

from mtpjax.models import cache
from mtpjax.models.attention import Leaf
from mtpjax.sampling import verify
from mtpjax.sampling.verify import Verdict


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Block:
  """How the rows of a draft hang together.

  Attributes:
    parents: row of each node's parent, int [B, N].
    seen: which rows are on the path to each row, itself included, bool [B, N + 1,
      N + 1].
    depth: of each row, 0 for the last committed token, int [B, N + 1].
  """

  parents: Leaf
  seen: Leaf
  depth: Leaf

  @classmethod
  def of(cls, parents_BN: Int[Array, 'B N'], depth: int) -> Block:
    """From a draft's parents, -1 at the top; `depth` is that of the deepest node."""
    B, N = parents_BN.shape
    rows = jnp.arange(N + 1)
    own = jnp.broadcast_to(jnp.eye(N + 1, dtype=bool)[None], (B, N + 1, N + 1))
    up = jnp.pad(parents_BN + 1, ((0, 0), (1, 0)), constant_values=N + 1)
    up = cache.whole(up)[:, :, None] == rows[None, None]
    seen = own = cache.whole(own)
    for _ in range(depth):
      # The path to a row is that to its parent and itself.
      above = jnp.einsum('BNM,BMR->BNR', up.astype(jnp.int32), seen.astype(jnp.int32))
      seen = own | (above > 0)
    return cls(parents_BN + 1, seen, jnp.sum(seen.astype(jnp.int32), -1) - 1)

  def proposed(self, count_B: Int[Array, ' B']) -> Bool[Array, 'B N']:
    """Nodes no deeper than that."""
    return self.depth[:, 1:] <= count_B[:, None]

  def path(self, row_B: Int[Array, ' B'], length: int) -> Int[Array, 'B K']:
    """Rows from the first to that one, which repeats where the path is shorter."""
    on = verify.pick(self.seen.astype(jnp.int32), row_B)[:, None] > 0
    at = jnp.arange(length)[None, :, None]
    here = on & (self.depth[:, None] == at)
    index = jnp.sum(jnp.where(here, jnp.arange(on.shape[-1])[None, None], 0), -1)
    return jnp.where(here.any(-1), index, row_B[:, None])

  def down(self, ok_BN: Bool[Array, 'B N']) -> Int[Array, ' B']:
    """The row where it ends that goes to a row's first child that is `ok`."""
    N = ok_BN.shape[1]
    kin = self.parents[:, :, None] == self.parents[:, None]
    earlier = kin & (jnp.arange(N)[None] < jnp.arange(N)[:, None])[None]
    first = ok_BN & ~(earlier & ok_BN[:, None]).any(-1)
    return self.deepest(first, jnp.zeros(self.depth.shape))

  def deepest(self, ok_BN: Bool[Array, 'B N'], score: Array) -> Int[Array, ' B']:
    """The deepest row to which all are `ok`; of several the one of the best score."""
    ok = jnp.pad(ok_BN, ((0, 0), (1, 0)), constant_values=True)
    reached = ~(self.seen & ~cache.whole(ok)[:, None]).any(-1)
    deep = jnp.where(reached, self.depth, -1)
    best = deep == jnp.max(deep, -1, keepdims=True)
    return jnp.argmax(jnp.where(best, score, -jnp.inf), -1).astype(jnp.int32)


def greedy(
  logits: Float[Array, 'B R V'],
  tokens_BN: Int[Array, 'B N'],
  block: Block,
  ok_BN: Array,
) -> tuple[Int[Array, ' B'], Verdict]:
  """Down the most likely tokens, the lowest id on ties."""
  best = jnp.argmax(logits, -1).astype(jnp.int32)
  broken = ~jnp.isfinite(jnp.max(logits, -1))
  ok = cache.pick(jnp.where(broken, -1, best), block.parents) == tokens_BN
  row = block.down(ok & ok_BN)
  failed = verify.pick(broken.astype(jnp.int32), row) > 0
  return row, Verdict(verify.pick(block.depth, row), verify.pick(best, row), failed)


def rejection(
  p: Float[Array, 'B R V'],
  tokens_BN: Int[Array, 'B N'],
  q: Float[Array, 'B N V'] | None,
  block: Block,
  ok_BN: Bool[Array, 'B N'],
  seed_B: Integer[Array, ' B'],
  round_B: Int[Array, ' B'],
) -> tuple[Int[Array, ' B'], Verdict]:
  """Recursive rejection (SpecInfer, Miao et al. 2023; EAGLE-2, Li et al. 2024).

  Siblings in turn: x is accepted iff u < r(x)/q(x), r being p at first; a refused one
  leaves r ∝ (r - q)+. After the last, a draw from r.

  Args:
    q: what each node was drawn from, the siblings before it left out.
    ok_BN: which nodes are proposed.

  Returns: the row where the walk ends, and the verdict.
  """
  N = tokens_BN.shape[1]
  u_BN = verify.uniform(seed_B, round_B, p[:, 1:, 0])
  ids = jnp.arange(p.shape[-1])[None]

  def judge(n, carry):
    row, rest = carry

    def at(x):
      return cache.whole(jax.lax.dynamic_index_in_dim(x, n, 1, keepdims=False))

    hit = at(tokens_BN)[:, None] == ids
    q_row = hit.astype(p.dtype) if q is None else at(q)
    mine = at(ok_BN) & (at(block.parents) == row) & verify.sound(rest)
    mine &= verify.sound(q_row)
    r_x, q_x = (jnp.sum(jnp.where(hit, d, 0), -1) for d in (rest, q_row))
    # r ≥ q accepts whatever u is: u·q can round up to q.
    taken = mine & (r_x > 0) & ((r_x >= q_x) | (at(u_BN) * q_x < r_x))
    left = jnp.maximum(rest - q_row, 0)
    total = jnp.sum(left, -1, keepdims=True)
    # Nothing remains where r = q but for rounding.
    left = jnp.where(total > 0, left / jnp.where(total > 0, total, 1), rest)
    rest = jnp.where((mine & ~taken)[:, None], left, rest)
    below = jax.lax.dynamic_index_in_dim(p, n + 1, 1, keepdims=False)
    rest = jnp.where(taken[:, None], below, rest)
    return cache.whole(jnp.where(taken, n + 1, row)), cache.whole(rest)

  start = cache.whole(jnp.zeros_like(tokens_BN[:, 0])), cache.whole(p[:, 0])
  row, rest = jax.lax.fori_loop(0, N, judge, start)
  key = verify.keys(seed_B, round_B, verify.CORRECT, 1)
  after = verify.draw(key, rest[:, None])[:, 0]
  failed = verify.pick((~verify.sound(p)).astype(jnp.int32), row) > 0
  return row, Verdict(verify.pick(block.depth, row), after, failed)


def sample_and_match(
  p, tokens_BN, q, block: Block, ok_BN, seed_B, round_B
) -> tuple[Int[Array, ' B'], Verdict]:
  """Draws the token after every row from p and goes down while a child is the same."""
  drawn = verify.draw(verify.keys(seed_B, round_B, verify.CORRECT, p.shape[1]), p)
  sound = verify.sound(p)
  ok = cache.pick(jnp.where(sound, drawn, -1), block.parents) == tokens_BN
  row = block.down(ok & ok_BN)
  failed = verify.pick((~sound).astype(jnp.int32), row) > 0
  return row, Verdict(verify.pick(block.depth, row), verify.pick(drawn, row), failed)


def typical(
  p, tokens_BN, q, block: Block, ok_BN, seed_B, round_B
) -> tuple[Int[Array, ' B'], Verdict]:
  """Typical acceptance (Medusa, Cai et al. 2024, arXiv 2401.10774). Lossy: what it
  delivers is not distributed as p.

  x is accepted iff p(x) > min(ε, δ·exp(-H(p))), ε = 0.09, δ = 0.3; the longest path
  wins, of several the likeliest. The token after it is drawn from p, so that a round
  always delivers one that is.
  """
  log = jnp.log(jnp.where(p > 0, p, 1))
  entropy = -jnp.sum(p * log, -1)
  least = jnp.minimum(0.09, 0.3 * jnp.exp(-entropy))
  p_x = verify.lookup(cache.pick(p, block.parents), tokens_BN)
  ok = ok_BN & (p_x > cache.pick(least, block.parents))
  log_x = jnp.log(jnp.where(ok, p_x, 1))
  log_x = jnp.pad(log_x, ((0, 0), (1, 0)))
  score = jnp.sum(jnp.where(block.seen, cache.whole(log_x)[:, None], 0), -1)
  row = block.deepest(ok, score)
  whole = verify.pick(p, row)
  key = verify.keys(seed_B, round_B, verify.CORRECT, 1)
  after = verify.draw(key, whole[:, None])[:, 0]
  return row, Verdict(verify.pick(block.depth, row), after, ~verify.sound(whole))


RULES = {
  'rejection': rejection,
  'sample-and-match': sample_and_match,
  'typical': typical,
}
