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
from jaxtyping import Array, Float, Int

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
  seed_B: Int[Array, ' B'], round_B: Int[Array, ' B'], stream: int, slots: int
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
  return jax.vmap(jax.vmap(jax.random.categorical))(keys_BN, log).astype(jnp.int32)


def greedy(
  logits: Float[Array, 'B N V'], tokens_BK: Int[Array, 'B K'], count_B: Int[Array, ' B']
) -> Verdict:
  """Accepts while the draft is the most likely token, the lowest id on ties; the first
  that is not is replaced by it. What every rule comes to where all rows are greedy."""
  best = jnp.argmax(logits, -1).astype(jnp.int32)
  accepted = _leading(best[:, :-1] == tokens_BK, count_B)
  broken = jnp.isnan(jnp.sum(logits, -1)).astype(jnp.int32)
  return Verdict(accepted, _pick(best, accepted), _pick(broken, accepted) > 0)


def rejection(
  p: Float[Array, 'B N V'],
  tokens_BK: Int[Array, 'B K'],
  q: Float[Array, 'B K V'] | None,
  count_B: Int[Array, ' B'],
  seed_B: Int[Array, ' B'],
  round_B: Int[Array, ' B'],
) -> Verdict:
  """Speculative sampling (Leviathan et al. 2023; Chen et al. 2023).

  Draft x is accepted iff u < p(x)/q(x); the first refused one is replaced by a draw
  from (p - q)+ normalised; if none is refused, the last row gives a further token.
  """
  K, V = tokens_BK.shape[1], p.shape[-1]
  hit = tokens_BK[..., None] == jnp.arange(V)[None, None]
  q = hit.astype(p.dtype) if q is None else q
  p_x, q_x = (jnp.sum(jnp.where(hit, d, 0), -1) for d in (p[:, :K], q))
  u = jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, dtype=p.dtype)))(
    keys(seed_B, round_B, ACCEPT, K)
  )
  # p ≥ q accepts whatever u is: u·q can round up to q. NaN accepts nothing.
  ok = (p_x >= q_x) | (u * q_x < p_x)
  accepted = _leading(ok, count_B)
  # Where nothing was proposed, or by a broken draft, all of p remains.
  judged = (jnp.arange(K)[None] < count_B[:, None])[..., None] & jnp.isfinite(q)
  rest = jnp.maximum(p[:, :K] - jnp.where(judged, q, 0), 0)
  rest = jnp.where(jnp.sum(rest, -1, keepdims=True) > 0, rest, p[:, :K])
  return _verdict(p, jnp.concatenate([rest, p[:, K:]], 1), accepted, seed_B, round_B)


def sample_and_match(
  p: Float[Array, 'B N V'],
  tokens_BK: Int[Array, 'B K'],
  q: Float[Array, 'B K V'] | None,
  count_B: Int[Array, ' B'],
  seed_B: Int[Array, ' B'],
  round_B: Int[Array, ' B'],
) -> Verdict:
  """Draws every token from p and accepts drafts while they are the same.

  Exact whatever the draft, and `q` plays no part; accepts Σ p·q.
  """
  drawn = draw(keys(seed_B, round_B, CORRECT, p.shape[1]), p)
  sound = jnp.isfinite(p[:, :-1]).all(-1)  # NaN would be drawn as token 0
  accepted = _leading((drawn[:, :-1] == tokens_BK) & sound, count_B)
  after = _pick(drawn, accepted)
  return Verdict(accepted, after, _failed(p, accepted))


def _leading(ok_BK: Array, count_B: Array) -> Array:
  """How many are accepted before the first that is not, of those proposed."""
  proposed = jnp.arange(ok_BK.shape[1])[None] < count_B[:, None]
  return jnp.sum(jnp.cumprod((ok_BK & proposed).astype(jnp.int32), 1), 1)


def _pick(x: Array, index_B: Array) -> Array:
  """x[b, index[b]] of [B, N, …]. A gather would lose the sharding of a batch of one."""
  here = jnp.arange(x.shape[1])[None] == index_B[:, None]
  here = here.reshape(*here.shape, *(1,) * (x.ndim - 2))
  return jnp.sum(jnp.where(here, x, 0), 1, dtype=x.dtype)


def _verdict(p, weights, accepted, seed_B, round_B) -> Verdict:
  """Draws the token after the accepted ones from that row of `weights`."""
  row = _pick(weights, accepted)[:, None]
  after = draw(keys(seed_B, round_B, CORRECT, 1), row)[:, 0]
  return Verdict(accepted, after, _failed(p, accepted))


def _failed(p, accepted) -> Array:
  """Rows whose target is not a distribution where the next token comes from."""
  row = _pick(p, accepted)
  return ~(jnp.isfinite(row).all(-1) & (jnp.sum(row, -1) > 0))


RULES = {'rejection': rejection, 'sample-and-match': sample_and_match}
