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
from jaxtyping import Array, Bool, Float, Int

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
  """

  positions: Leaf
  segments: Leaf
  order: Leaf = None
  visible: Leaf = None

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
    queries: sharded over time.
    keys: whole in time.
    window: a query sees itself and `window - 1` positions before; 0 is no limit.
    ahead: how far the queries' rotary positions are ahead of their order.
  """
  q_BT1, k_B1S = queries.causal[:, :, None], keys.causal[:, None]
  seen = (k_B1S <= q_BT1) & (queries.segments[:, :, None] == keys.segments[:, None])
  if window:
    seen &= q_BT1 + ahead - k_B1S < window
  if keys.visible is not None:
    itself = jnp.eye(queries.segments.shape[1], keys.segments.shape[1], dtype=bool)
    seen &= keys.visible[:, None] | itself[None]
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
    weight = mesh.gathered(w[f'w_{name}'].astype(h_BTD.dtype))
    x = jnp.einsum('BTD,DHC->BTHC', h_BTD, weight)
    if f'bias_{name}' in w:
      x = x + w[f'bias_{name}'].astype(x.dtype)[None, None]
    if f'gain_{name}' in w:
      x = layers.norm(x, w[f'gain_{name}'], config.norm_epsilon)
    return x

  q = layers.rope(one('query'), positions_BT, config.rope_theta)
  if only_queries:
    return (q,)
  k = layers.rope(one('key'), positions_BT, config.rope_theta)
  return q, k, one('value')


def attend(
  q_BTHC: Float[Array, 'B T H C'],
  k_BSGC: Float[Array, 'B S G C'],
  v_BSGC: Float[Array, 'B S G C'],
  seen_BTS: Bool[Array, 'B T S'],
  softcap: float | None = None,
  own: tuple[
    Float[Array, 'B T N G C'], Float[Array, 'B T N G C'], Bool[Array, ' N']
  ]
  | None = None,
) -> Float[Array, 'B T H C']:
  """Softmax attention in float32 or wider.

  Args:
    own: keys, values and visibility of N further rows that belong to each query alone
      (the earlier draft steps of its position).
  """
  B, T, H, C = q_BTHC.shape
  G = k_BSGC.shape[2]
  wide = layers.wide(q_BTHC.dtype)
  if G % mesh.axis_size('tensor'):  # then each query head brings its own copy
    k_BSGC, v_BSGC = (jnp.repeat(x, H // G, axis=2) for x in (k_BSGC, v_BSGC))
    if own:
      own = (*(jnp.repeat(x, H // G, axis=3) for x in own[:2]), own[2])
    G = H
  spec = mesh.key_BSGC(G)
  k_BSGC, v_BSGC = jax.reshard(k_BSGC, spec), jax.reshard(v_BSGC, spec)
  q = q_BTHC.reshape((B, T, G, H // G, C), out_sharding=mesh.act_BTGQC)

  def score(pattern: str, keys: Array, seen: Array) -> Array:
    s = jnp.einsum(pattern, q, keys, preferred_element_type=wide) * C**-0.5
    return jnp.where(seen, layers.softcap(s, softcap), MASKED)

  scores = score('BTGQC,BSGC->BGQTS', k_BSGC, seen_BTS[:, None, None])
  if own is None:
    p = jax.nn.softmax(scores, -1).astype(v_BSGC.dtype)
    out = jnp.einsum('BGQTS,BSGC->BTGQC', p, v_BSGC)
  else:
    k_own, v_own = (
      jax.reshard(x, jax.P(mesh.BATCH, 'context', None, 'tensor', None))
      for x in own[:2]
    )
    more = score('BTGQC,BTNGC->BGQTN', k_own, own[2][None, None, None, None])
    p = jax.nn.softmax(jnp.concatenate([scores, more], -1), -1).astype(v_BSGC.dtype)
    S = k_BSGC.shape[1]
    out = jnp.einsum('BGQTS,BSGC->BTGQC', p[..., :S], v_BSGC)
    out = out + jnp.einsum('BGQTN,BTNGC->BTGQC', p[..., S:], v_own)
  return out.reshape((B, T, H, C), out_sharding=mesh.act_BTHC)


def mix(w: dict, o_BTHC: Float[Array, 'B T H C']) -> Float[Array, 'B T D']:
  """Heads back into the residual stream."""
  weight = mesh.gathered(w['w_mix'].astype(o_BTHC.dtype))
  return jnp.einsum('BTHC,HCD->BTD', o_BTHC, weight, out_sharding=mesh.act_BTD)
