"""From logits to the distribution that is sampled: temperature, top-k, top-p, min-p.

All in float32 or wider, each setting a row's own, greedy rows among them: where the
temperature is 0 a row becomes one-hot at its most likely token, the lowest id on ties,
so that the rules in `verify` need not know of it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mtpjax.models.attention import Leaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Sampling:
  """Settings by row, all [B].

  Attributes:
    temperature: float; 0 is greedy.
    top_k: int; only the k most likely tokens, ties of the last kept; 0 is off.
    top_p: float; the fewest tokens that hold this much probability, at least one; 1 is
      off. After top-k.
    min_p: float; only tokens with at least this share of the largest probability; 0 is
      off. After top-p.
    seed: int; a row's draws depend on nothing else.
    budget: int; new tokens at most.
    draft: int; tokens to draft a round, at most.
    stop: int [B, n]; a token among them ends its row and is the last; -1 is none.
  """

  temperature: Leaf
  top_k: Leaf
  top_p: Leaf
  min_p: Leaf
  seed: Leaf
  budget: Leaf
  draft: Leaf
  stop: Leaf


def probabilities(
  logits: Float[Array, 'B N V'], sampling: Sampling
) -> Float[Array, 'B N V']:
  """The distribution to sample, [B, N, V], from the logits of N positions a row."""

  def each(x):
    return x[:, None, None]

  greedy = each(sampling.temperature) <= 0
  scaled = logits / jnp.where(greedy, 1.0, each(sampling.temperature)).astype(
    logits.dtype
  )
  p = jax.nn.softmax(scaled, -1)
  filtered = jax.lax.cond(
    jnp.any((sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)),
    lambda p: _filter(
      p, each(sampling.top_k), each(sampling.top_p), each(sampling.min_p)
    ),
    lambda p: p,
    p,
  )
  best = jnp.argmax(logits, -1)[..., None] == jnp.arange(logits.shape[-1])[None, None]
  # An all-NaN row must not look like a decision.
  one_hot = jnp.where(jnp.isnan(p), p, best.astype(p.dtype))
  return jnp.where(greedy, one_hot, filtered)


def _filter(p: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
  """Zeroes what the filters leave out, and renormalises."""
  V = p.shape[-1]
  falling = -jnp.sort(-p, -1)
  k = jnp.where(top_k > 0, jnp.minimum(top_k, V), V)
  least = jnp.take_along_axis(falling, jnp.broadcast_to(k - 1, (*p.shape[:2], 1)), -1)
  # A token stays while what is before it holds less than top_p of what top-k left.
  # Compared unnormalised: the same number, so that rounding cannot lose the last token.
  falling = jnp.where(falling >= least, falling, 0)
  before = jnp.cumsum(falling, -1) - falling
  stays = (before < top_p * jnp.sum(falling, -1, keepdims=True)) & (falling > 0)
  lowest = jnp.min(jnp.where(stays, falling, jnp.inf), -1, keepdims=True)
  kept = jnp.where(p >= jnp.where(top_p < 1, jnp.maximum(lowest, least), least), p, 0)
  kept = jnp.where(kept >= min_p * jnp.max(kept, -1, keepdims=True), kept, 0)
  return kept / jnp.sum(kept, -1, keepdims=True)
