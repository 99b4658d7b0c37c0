"""Grouped-query attention: who may look at whom, and the weighted sum.

Keys and values are whole in time on every device, queries are sharded over 'context'.
Visibility is decided from true positions and segments, never from array indices, so
packed rows, shifted rows and rows in any order are all one case.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Num

from mtpjax import mesh
from mtpjax.models import layers

# A field of a pytree: an array, and whatever a tree is mapped to (shapes, shardings).
Leaf = Any
MASKED = -1e30  # finite: a row that may look at nothing gets a mean, not NaN


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Rows:
  """Where tokens stand. All [B, T] int32, `visible` [B, T] bool.

  Attributes:
    positions: rotary positions, from 0 in each document.
    segments: document ids, 0 = padding; attention stays inside one.
    order: causal order, if it is not that of the positions.
    visible: False for tokens that only they themselves may look at (registers).
    packed: whether a row may hold several documents; one stands before all padding.
  """

  positions: Leaf
  segments: Leaf
  order: Leaf = None
  visible: Leaf = None
  packed: bool = dataclasses.field(default=True, metadata={'static': True})

  @property
  def causal(self) -> Int[Array, 'B T']:
    return self.positions if self.order is None else self.order

  def whole(self) -> Rows:
    """The same with time unsharded, as keys need it."""
    return jax.tree.map(lambda x: jax.reshard(x, mesh.whole_BT), self)


def visibility(
  queries: Rows, keys: Rows, window: int = 0, ahead: int | jax.Array = 0
) -> Bool[Array, 'B T S']:
  """Which keys a query may look at.

  Args:
    queries: sharded over time. Those that have `visible` are the keys' own rows; others
      see no hidden key.
    keys: whole in time.
    window: a query sees itself and `window - 1` positions before; 0 is no limit.
    ahead: how far the queries' rotary positions are ahead of their order.
  """
  q_BT1, k_B1S = queries.causal[:, :, None], keys.causal[:, None]
  seen = (k_B1S <= q_BT1) & (queries.segments[:, :, None] == keys.segments[:, None])
  if window:
    seen &= q_BT1 + ahead - k_B1S < window
  if keys.visible is not None:
    visible = keys.visible[:, None]
    if queries.visible is not None:
      visible |= jnp.eye(visible.shape[-1], dtype=bool)[None]
    seen &= visible
  return jax.reshard(seen, jax.P(mesh.BATCH, 'context', None))


def project(
  w: dict,
  h_BTD: Float[Array, 'B T D'],
  positions_BT: Int[Array, 'B T'],
  config,
  only_queries: bool = False,
) -> tuple[Float[Array, 'B T H C'], ...]:
  """Queries [B, T, H, C], keys and values [B, T, G, C], with positions applied."""

  def one(name: str):
    x = layers.linear(h_BTD, w[f'w_{name}'], 'D,DHC->HC')
    if f'bias_{name}' in w:
      x = x + w[f'bias_{name}'].astype(x.dtype)[None, None]
    if f'gain_{name}' in w:
      x = layers.norm(x, w[f'gain_{name}'], config.norm_epsilon)
    return x

  def placed(x):
    if config.learned_positions is not None:  # they are in the residual stream
      return x
    return layers.rope(x, positions_BT, config.rope_theta)

  q = placed(one('query'))
  if only_queries:
    return (q,)
  return q, placed(one('key')), one('value')


def attend(
  q_BTHC: Float[Array, 'B T H C'],
  k_BSGC: Float[Array, 'B S G C'],
  v_BSGC: Float[Array, 'B S G C'],
  seen_BTS: Bool[Array, 'B T S'],
  softcap: float | None = None,
  own: tuple[Float[Array, 'B T N G C'], Float[Array, 'B T N G C'], Bool[Array, ' N']]
  | None = None,
) -> Float[Array, 'B T H C']:
  """Softmax attention in float32 or wider.

  Args:
    own: keys, values and visibility of N further rows that belong to each query alone
      (the earlier draft steps of its position).
  """
  H, C = q_BTHC.shape[2:]
  wide = layers.wide(q_BTHC.dtype)

  def score(pattern: str, keys: Array, seen: Array) -> Array:
    s = jnp.einsum(pattern, q_BTHC, keys, preferred_element_type=wide) * C**-0.5
    return jnp.where(seen, layers.softcap(s, softcap), MASKED)

  spec = mesh.key_BSGC(k_BSGC.shape[2])
  k_BSHC, v_BSHC = (each_query_head(jax.reshard(x, spec), H) for x in (k_BSGC, v_BSGC))
  scores = score('BTHC,BSHC->BHTS', k_BSHC, seen_BTS[:, None])
  largest = jnp.max(scores, -1, keepdims=True)
  if own is not None:
    k_own, v_own = (each_query_head(x, H) for x in own[:2])
    more = score('BTHC,BTNHC->BHTN', k_own, own[2][None, None, None])
    largest = jnp.maximum(largest, jnp.max(more, -1, keepdims=True))
  # Normalised after the sum over keys, where there are C numbers a query, not S.
  largest = jax.lax.stop_gradient(largest)
  p = jnp.exp(scores - largest)
  total = jnp.sum(p, -1)
  out = jnp.einsum('BHTS,BSHC->BTHC', p.astype(v_BSHC.dtype), v_BSHC)
  if own is not None:
    p = jnp.exp(more - largest)
    total = total + jnp.sum(p, -1)
    out = out + jnp.einsum('BHTN,BTNHC->BTHC', p.astype(v_BSHC.dtype), v_own)
  return (out / jnp.swapaxes(total, 1, 2)[..., None]).astype(q_BTHC.dtype)


def attend_cached(
  q_BTHC: Float[Array, 'B T H C'],
  k_BGSC: Num[Array, 'B G S C'],
  v_BGSC: Num[Array, 'B G S C'],
  seen_BTS: Bool[Array, 'B T S'],
  softcap: float | None = None,
  scales: tuple[Float[Array, 'B G S 1'], Float[Array, 'B G S 1']] | None = None,
) -> Float[Array, 'B T H C']:
  """`attend` for few queries and many cached keys, which are read where they lie: the
  queries of a group are rows of one matrix product.

  Args:
    scales: of int8 keys and values. Scores are multiplied by the former, probabilities
      by the latter, so that nothing is multiplied out over C.
  """
  B, T, H, C = q_BTHC.shape
  G = k_BGSC.shape[1]
  Q, wide = H // G, layers.wide(q_BTHC.dtype)
  heads = mesh.heads_axis(G)
  # Groups over 'tensor' or, where they do not divide over it, the queries of each.
  inner = None if heads else mesh.heads_axis(Q)
  if heads is None:
    q_BTHC = jax.reshard(q_BTHC, P(mesh.BATCH, None, None, None))
  q = q_BTHC.reshape((B, T, G, Q, C), out_sharding=P(mesh.BATCH, None, heads))
  q = jax.reshard(q, P(mesh.BATCH, None, heads, inner, None))
  spec = P(mesh.BATCH, heads, inner, None)
  q = jnp.transpose(q, (0, 2, 3, 1, 4)).reshape((B, G, Q * T, C), out_sharding=spec)
  keys = k_BGSC.astype(q.dtype)
  scores = jnp.einsum('BGNC,BGSC->BGNS', q, keys, preferred_element_type=wide)
  if scales is not None:
    k_BG1S, v_BG1S = (jnp.swapaxes(x, 2, 3) for x in scales)
    scores = scores * k_BG1S
  scores = layers.softcap(scores * C**-0.5, softcap)
  seen = jnp.broadcast_to(
    jax.reshard(seen_BTS, P(mesh.BATCH, None, None))[:, None, None],
    (B, 1, Q, T, seen_BTS.shape[-1]),
    out_sharding=P(mesh.BATCH, None, inner),
  ).reshape(
    (B, 1, Q * T, seen_BTS.shape[-1]), out_sharding=P(mesh.BATCH, None, inner, None)
  )
  scores = jnp.where(seen, scores, MASKED)
  p = jnp.exp(scores - jnp.max(scores, -1, keepdims=True))
  share = p if scales is None else p * v_BG1S
  values = v_BGSC.astype(q.dtype)
  out = jnp.einsum('BGNS,BGSC->BGNC', share.astype(q.dtype), values)
  out = (out / jnp.sum(p, -1, keepdims=True)).astype(q_BTHC.dtype)
  spec = P(mesh.BATCH, heads, inner, None, None)
  out = jnp.transpose(out.reshape((B, G, Q, T, C), out_sharding=spec), (0, 3, 1, 2, 4))
  if heads is None:
    out = jax.reshard(out, P(mesh.BATCH, None, None, None, None))
  out = out.reshape((B, T, H, C), out_sharding=P(mesh.BATCH, None, heads, None))
  return jax.reshard(out, mesh.act_BTHC)


def each_query_head(x: Array, heads: int) -> Array:
  """[…, G, C] -> […, H, C]: each query head with its own copy of its keys or values,
  sharded over 'tensor'. Whole groups stay where they are if G divides over the axis.

  XLA on CPU computes this form twice as fast as one that keeps the groups apart.
  """
  *rest, G, C = x.shape
  spec = jax.typeof(x).sharding.spec
  if heads != G:
    x = jnp.expand_dims(x, -2)
    x = jnp.broadcast_to(
      x, (*rest, G, heads // G, C), out_sharding=P(*spec[:-1], None, None)
    )
    x = x.reshape((*rest, heads, C), out_sharding=P(*spec))
  return jax.reshard(x, P(*spec[:-2], 'tensor', None))


def mix(w: dict, o_BTHC: Float[Array, 'B T H C']) -> Float[Array, 'B T D']:
  """Heads back into the residual stream."""
  return layers.linear(o_BTHC, w['w_mix'], 'HC,HCD->D', shard_last=(None,))
