"""The rules that accept drafts, as pure functions of probabilities.

Row j of `p` judges draft j; row K follows the last draft. `q` is the distribution each
draft was really drawn from, None where it is one-hot. Greedy rows have a one-hot `p`,
and every rule here then accepts while the draft is the most likely token.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Integer

from mtpjax.models.attention import Leaf

# Streams of a row's round; what decides must not be what drew.
PROPOSE, ACCEPT, CORRECT = range(3)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Verdict:
  """`accepted` drafts [B], the token `after` them [B], and rows that `failed` [B]."""

  accepted: Leaf
  after: Leaf
  failed: Leaf


def keys(
  seed_B: Integer[Array, ' B'], round_B: Int[Array, ' B'], stream: int, slots: int
) -> Array:
  """A key for each row and slot, [B, slots], from the row's seed and round alone."""

  def one(seed, turn, slot):
    key = jax.random.fold_in(jax.random.key(seed), turn)
    return jax.random.fold_in(jax.random.fold_in(key, stream), slot)

  # Made whole on every device and then dealt out: `fold_in` cannot be lowered over a
  # sharded batch of one.
  batch = jax.typeof(seed_B).sharding.spec[0]
  seeds, rounds = (jax.reshard(x, P(None)) for x in (seed_B, round_B))
  rows = jax.vmap(jax.vmap(one, (None, None, 0)), (0, 0, None))
  return jax.reshard(rows(seeds, rounds, jnp.arange(slots)), P(batch, None))


def draw(keys_BN: Array, weights: Float[Array, 'B N V']) -> Int[Array, 'B N']:
  """One token of each row and slot, in proportion to unnormalised weights."""
  log = jnp.where(weights > 0, jnp.log(weights), -jnp.inf)
  # Slicing keys of a batch of one can lose their sharding.
  keys_BN = jax.reshard(keys_BN, P(*jax.typeof(log).sharding.spec[:2]))
  return jax.vmap(jax.vmap(jax.random.categorical))(keys_BN, log).astype(jnp.int32)


def greedy(
  logits: Float[Array, 'B N V'], tokens_BK: Int[Array, 'B K'], count_B: Int[Array, ' B']
) -> Verdict:
  """Accepts while the draft is the most likely token, the lowest id on ties; the first
  that is not is replaced by it. What every rule comes to where all rows are greedy."""
  best = jnp.argmax(logits, -1).astype(jnp.int32)
  broken = ~jnp.isfinite(jnp.max(logits, -1))
  accepted = _leading((best[:, :-1] == tokens_BK) & ~broken[:, :-1], count_B)
  failed = pick(broken.astype(jnp.int32), accepted) > 0
  return Verdict(accepted, pick(best, accepted), failed)


def rejection(
  p: Float[Array, 'B N V'],
  tokens_BK: Int[Array, 'B K'],
  q: Float[Array, 'B K V'] | None,
  count_B: Int[Array, ' B'],
  seed_B: Integer[Array, ' B'],
  round_B: Int[Array, ' B'],
) -> Verdict:
  """Speculative sampling (Leviathan et al. 2023; Chen et al. 2023).

  Draft x is accepted iff u < p(x)/q(x); the first refused one is replaced by a draw
  from (p - q)+ normalised; if none is refused, the last row gives a further token.
  """
  q, p_x, q_x, count_B = _judged(p, tokens_BK, q, count_B)
  u = uniform(seed_B, round_B, p_x)
  # p ≥ q accepts whatever u is: u·q can round up to q.
  accepted = _leading((p_x > 0) & ((p_x >= q_x) | (u * q_x < p_x)), count_B)
  return _verdict(p, _rest(p, q, count_B), accepted, seed_B, round_B)


def block(
  p: Float[Array, 'B N V'],
  tokens_BK: Int[Array, 'B K'],
  q: Float[Array, 'B K V'] | None,
  count_B: Int[Array, ' B'],
  seed_B: Integer[Array, ' B'],
  round_B: Int[Array, ' B'],
) -> Verdict:
  """Block verification (Sun et al. 2024, arXiv 2403.10444).

  P_0 = 1, P_i = min(1, P_{i-1}·p(x_i)/q(x_i)), R_i = Σ (P_i·p - q)+ over the row after
  i drafts. The largest i with η_i < h_i is accepted, where h_i = R_i / (R_i + 1 - P_i)
  and h = P after the last draft; then a draw from (P_i·p - q)+ normalised, or from p if
  none is refused. Accepts at least as many as `rejection` on average.
  """
  q, p_x, q_x, count_B = _judged(p, tokens_BK, q, count_B)
  P = [jnp.ones_like(p[:, 0, 0])]
  for k in range(tokens_BK.shape[1]):
    joint, least = P[-1] * p_x[:, k], q_x[:, k]
    above = joint >= least  # then no division, so that p = q is 1 exactly
    ratio = joint / jnp.where(above, 1, least)
    P.append(jnp.where(above, (joint > 0).astype(p.dtype), ratio))
  P_BN = jnp.stack(P, 1)
  rest = _rest(p, q, count_B, P_BN[..., None])
  P_BK, R_BK = P_BN[:, 1:], jnp.sum(rest[:, 1:], -1)
  either = R_BK + (1 - P_BK)
  h_BK = jnp.where(either > 0, R_BK / jnp.where(either > 0, either, 1), 1)
  i = jnp.arange(1, P_BN.shape[1])[None]
  h_BK = jnp.where(i < count_B[:, None], h_BK, P_BK)
  ok = (uniform(seed_B, round_B, p_x) < h_BK) & (i <= count_B[:, None])
  accepted = jnp.max(jnp.where(ok, i, 0), 1, initial=0)
  return _verdict(p, rest, accepted, seed_B, round_B)


def sample_and_match(
  p: Float[Array, 'B N V'],
  tokens_BK: Int[Array, 'B K'],
  q: Float[Array, 'B K V'] | None,
  count_B: Int[Array, ' B'],
  seed_B: Integer[Array, ' B'],
  round_B: Int[Array, ' B'],
) -> Verdict:
  """Draws every token from p and accepts drafts while they are the same.

  Exact whatever the draft, and `q` plays no part; accepts Σ p·q.
  """
  drawn = draw(keys(seed_B, round_B, CORRECT, p.shape[1]), p)
  # NaN would be drawn as token 0.
  accepted = _leading((drawn[:, :-1] == tokens_BK) & sound(p[:, :-1]), count_B)
  return Verdict(accepted, pick(drawn, accepted), ~sound(pick(p, accepted)))


def _judged(p, tokens_BK, q, count_B) -> tuple[Array, Array, Array, Array]:
  """q made dense, p and q of each draft, and how many can be judged.

  A draft ends before a row that is no distribution: what comes there is drawn from p.
  Exact, for the row depends on earlier drafts alone.
  """
  hit = tokens_BK[..., None] == jnp.arange(p.shape[-1])[None, None]
  q = hit.astype(p.dtype) if q is None else q
  p_x, q_x = (jnp.sum(jnp.where(hit, d, 0), -1) for d in (p[:, :-1], q))
  return q, p_x, q_x, _leading(sound(p[:, :-1]) & sound(q), count_B)


def uniform(seed_B, round_B, like_BK: Array) -> Array:
  """What each draft is judged with, in [0, 1)."""
  rows = keys(seed_B, round_B, ACCEPT, like_BK.shape[1])
  each = jax.vmap(lambda key: jax.random.uniform(key, dtype=like_BK.dtype))
  return jax.vmap(each)(rows)


def _rest(p, q, count_B, scale: Array | float = 1.0) -> Array:
  """What each row of p gives where its draft is refused, unnormalised; all of it where
  there is no draft."""
  judged = (jnp.arange(p.shape[1])[None] < count_B[:, None])[..., None]
  q = jnp.pad(q, ((0, 0), (0, 1), (0, 0)))
  return jnp.where(judged, jnp.maximum(scale * p - q, 0), p)


def _leading(ok_BK: Array, count_B: Array) -> Array:
  """How many are accepted before the first that is not, of those proposed."""
  proposed = jnp.arange(ok_BK.shape[1])[None] < count_B[:, None]
  return jnp.sum(jnp.cumprod((ok_BK & proposed).astype(jnp.int32), 1), 1)


def pick(x: Array, index_B: Array) -> Array:
  """x[b, index[b]] of [B, N, …]. A gather would lose the sharding of a batch of one."""
  here = jnp.arange(x.shape[1])[None] == index_B[:, None]
  here = here.reshape(*here.shape, *(1,) * (x.ndim - 2))
  return jnp.sum(jnp.where(here, x, 0), 1, dtype=x.dtype)


def _verdict(p, rest, accepted, seed_B, round_B) -> Verdict:
  """Draws the token after the accepted ones."""
  whole, row = (pick(x, accepted) for x in (p, rest))
  # Nothing remains where p = q but for rounding.
  row = jnp.where(jnp.sum(row, -1, keepdims=True) > 0, row, whole)
  after = draw(keys(seed_B, round_B, CORRECT, 1), row[:, None])[:, 0]
  return Verdict(accepted, after, ~sound(whole))


def lookup(x_BNV: Array, ids_BN: Int[Array, 'B N']) -> Array:
  """x[b, n, ids[b, n]]."""
  hit = ids_BN[..., None] == jnp.arange(x_BNV.shape[-1])[None, None]
  return jnp.sum(jnp.where(hit, x_BNV, 0), -1)


def sound(rows: Array) -> Array:
  """Which rows can be drawn from."""
  total = jnp.sum(rows, -1)
  return (total > 0) & jnp.isfinite(total)


RULES = {
  'rejection': rejection,
  'sample-and-match': sample_and_match,
  'block': block,
}
