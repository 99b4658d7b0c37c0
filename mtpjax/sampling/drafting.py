"""Drafts as they are drawn from a drafter's logits, a depth at a time: into a shape
known beforehand, a chain among them, or into one that the drafter's confidence makes.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from mtpjax.drafters import base
from mtpjax.models import cache
from mtpjax.sampling import filters, trees, verify
from mtpjax.sampling.filters import Sampling

# (logits [B, M, V], the tokens drafted before each [B, M, K]) -> logits to draw from
Process = Callable[[Array, Array], Array]


class Likeliest:
  """A chain of the most likely tokens, the lowest id on ties; q is one-hot."""

  def __call__(self, logits_BMV: Array, k: int, above: base.Level | None) -> base.Level:
    tokens = _largest(cache.whole(logits_BMV), 1)[..., 0]
    return base.Level(tokens, jnp.zeros_like(tokens))

  def draft(self, levels: list[base.Level]) -> base.Draft:
    tokens = [level.tokens[:, 0] for level in levels]
    return base.chain(tokens, [None] * len(tokens))


class Shaped:
  """Children are drawn as the trunk's own tokens are, from a stream of their own,
  siblings without replacement; those of a greedy row are its most likely tokens.

  Args:
    rounds_B: the row's own count of rounds.
    process: what changes logits before they are drawn from.
  """

  def __init__(
    self, tree: trees.Tree, sampling: Sampling, rounds_B: Array, process: Process
  ):
    self.tree, self.sampling = tree, sampling
    self.rounds, self.process = rounds_B, process

  def __call__(self, logits_BMV: Array, k: int, above: base.Level | None) -> base.Level:
    tree = self.tree
    logits, paths = _processed(self.process, logits_BMV, above)
    rows = tree.inner(k)  # one for each row of logits
    nodes = tree.level(k + 1)
    row = [rows.index(tree.parents[n]) for n in nodes]
    rank = [tree.ranks[n] for n in nodes]
    most = max(rank) + 1
    # Of all rows that have children, this depth's come after those above.
    first = sum(len(tree.inner(above)) for above in range(k))
    greedy_B = self.sampling.temperature <= 0

    def drawn():
      p = filters.probabilities(logits, self.sampling)
      slots = first + len(rows)
      keys = verify.keys(self.sampling.seed, self.rounds + 1, verify.PROPOSE, slots)[
        :, first:
      ]
      noise = _noise(keys, p)
      log = jnp.where(p > 0, jnp.log(p), -jnp.inf)
      # The largest of log p + Gumbel noise, one after another, are draws in turn from
      # what is left.
      score = jnp.where(greedy_B[:, None, None], logits, log + noise)
      tokens = _largest(score, most)
      picked = _at(tokens, row, rank)
      return picked, cache.whole(self._drawn_from(p, tokens, picked, row, rank))

    def best():  # nobody will ask for q
      picked = _at(_largest(logits, most), row, rank)
      nothing = jnp.zeros((*picked.shape, logits.shape[-1]), logits.dtype)
      return picked, cache.whole(nothing)

    tokens, q = jax.lax.cond(jnp.any(~greedy_B), drawn, best)
    inner = np.array([nodes.index(n) for n in tree.inner(k + 1)], int)
    parents = jnp.asarray(np.array(row, np.int32)[inner])[None]
    parents = cache.whole(jnp.broadcast_to(parents, (len(tokens), len(inner))))
    below = cache.whole(tokens[:, inner])
    return base.Level(below, parents, (tokens, q, _down(paths, parents, below)))

  def _drawn_from(self, p, tokens_BMC, picked_BN, row, rank) -> Array:
    """q of each node: its row of p without the siblings drawn before it; one-hot where
    the row is greedy. Zero where nothing was left."""
    ids = jnp.arange(p.shape[-1])[None, None]
    q = jnp.stack([p[:, m] for m in row], 1)
    for r in range(max(rank)):
      earlier = jnp.stack([tokens_BMC[:, m, r] for m in row], 1)
      later = jnp.asarray([own > r for own in rank])[None, :, None]
      q = jnp.where(later & (earlier[..., None] == ids), 0, q)
    if max(rank):
      total = jnp.sum(q, -1, keepdims=True)
      q = jnp.where(total > 0, q / jnp.where(total > 0, total, 1), q)
    hit = picked_BN[..., None] == ids
    greedy = (self.sampling.temperature <= 0)[:, None, None]
    return jnp.where(greedy, hit.astype(p.dtype), q)

  def draft(self, levels: list[base.Level]) -> base.Draft:
    tokens = jnp.concatenate([level.drawn[0] for level in levels], 1)
    q = jnp.concatenate([level.drawn[1] for level in levels], 1)
    B, N = tokens.shape
    depth = len(levels)
    parents = jnp.asarray(self.tree.parents[:N], jnp.int32)[None]
    parents = cache.whole(jnp.broadcast_to(parents, (B, N)))
    return base.Draft(tokens, parents, jnp.full_like(tokens[:, 0], depth), q)


class Confident:
  """`trees.Dynamic`: the likeliest children, by the product of the drafter's
  probabilities along the path."""

  def __init__(self, tree: trees.Dynamic, sampling: Sampling, process: Process):
    self.tree, self.sampling, self.process = tree, sampling, process

  def __call__(self, logits_BMV: Array, k: int, above: base.Level | None) -> base.Level:
    W = self.tree.width
    logits, paths = _processed(self.process, logits_BMV, above)
    B, M, V = logits.shape
    temperature = self.sampling.temperature[:, None, None]
    log = jax.nn.log_softmax(logits / jnp.where(temperature > 0, temperature, 1), -1)
    C = min(W, V)
    tokens = _largest(log, C)
    score = jnp.stack([verify.lookup(log, tokens[..., c]) for c in range(C)], -1)
    score = jnp.where(jnp.isnan(score), -jnp.inf, score)  # a sort has NaN first
    if above is None:
      parents, offset = jnp.full((B, M), -1), 0
    else:
      score = score + above.drawn[1]['best'][..., None]
      parents, offset = above.drawn[1]['index'], above.drawn[1]['end']
    flat = tuple(cache.whole(x.reshape(B, M * C)) for x in (tokens, score))
    tokens, score = flat
    parents = cache.whole(jnp.repeat(parents, C, 1))
    best, index = jax.lax.top_k(score, min(W, M * C))
    below, parents_of = cache.pick(tokens, index), index // C
    drawn = {
      'tokens': tokens,
      'score': score,
      'parents': parents,
      'best': best,
      'index': index + offset,
      'end': offset + M * C,
    }
    paths = _down(paths, parents_of, below)
    return base.Level(below, parents_of, (None, drawn, paths))

  def draft(self, levels: list[base.Level]) -> base.Draft:
    tokens, score, parents = (
      jnp.concatenate([level.drawn[1][name] for level in levels], 1)
      for name in ('tokens', 'score', 'parents')
    )
    N = min(self.tree.nodes, tokens.shape[1])
    # A child is no likelier than its parent and comes after it, so that a parent is
    # among the best where its child is.
    _, index = jax.lax.top_k(score, N)
    index = cache.whole(jnp.sort(index, -1))
    up = cache.pick(parents, index)
    place = jnp.arange(N)[None, None]
    new = jnp.sum(jnp.where(up[..., None] == index[:, None], place, 0), -1)
    tokens = cache.pick(tokens, index)
    new = jnp.where(up < 0, -1, new)
    return base.Draft(tokens, new, jnp.full_like(tokens[:, 0], len(levels)))


def _processed(process: Process, logits_BMV: Array, above: base.Level | None):
  """Logits to draw from, and the tokens drafted before them, [B, M, K]."""
  B, M, _ = logits_BMV.shape
  none = jnp.zeros((B, M, 0), jnp.int32)
  paths = cache.whole(none) if above is None else above.drawn[2]
  return process(cache.whole(logits_BMV), paths), paths


def _down(paths_BMK: Array, parents_BN: Array, tokens_BN: Array) -> Array:
  """The tokens drafted down to each node, itself included."""
  above = cache.pick(paths_BMK, parents_BN)
  return cache.whole(jnp.concatenate([above, tokens_BN[..., None]], -1))


def _noise(keys_BM: Array, like_BMV: Array) -> Array:
  """What `jax.random.categorical` adds to the logarithms."""
  spec = jax.typeof(like_BMV).sharding.spec
  keys_BM = jax.reshard(keys_BM, jax.P(*spec[:2]))

  def row(key, one):
    return jax.random.gumbel(key, one.shape, one.dtype)

  return jax.vmap(jax.vmap(row))(keys_BM, like_BMV)


def _largest(score_BMV: Array, count: int) -> Array:
  """Indices of the largest, int [B, M, count]."""
  if count == 1:  # a sort is dearer
    return jnp.argmax(score_BMV, -1, keepdims=True).astype(jnp.int32)
  return jax.lax.top_k(score_BMV, count)[1].astype(jnp.int32)


def _at(tokens_BMC: Array, row: list[int], rank: list[int]) -> Array:
  """Of each node, [B, N]."""
  pairs = zip(row, rank, strict=True)
  return cache.whole(jnp.stack([tokens_BMC[:, m, r] for m, r in pairs], 1))
