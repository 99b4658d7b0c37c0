"""Keys and values of rows already seen, in buffers of fixed length.

Every row of the batch has its own length. Slot `s` holds position `s - before`; the
first `before` slots stand for positions before the document and are never seen. New
rows are written at any position and what lies beyond them is never looked at, so
rolling back is a matter of the length alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mtpjax import mesh
from mtpjax.models import attention
from mtpjax.models.attention import Rows
from mtpjax.models.block import Look

# Keys and values of one layer, each [B, S, G, C].
LayerCache = tuple[Float[Array, 'B S G C'], Float[Array, 'B S G C']]


def empty(config, batch: int, slots: int) -> LayerCache:
  """A layer's buffers, sharded over batch and heads."""
  shape = (batch, slots, config.kv_heads, config.head_width)
  spec = mesh.key_BSGC(config.kv_heads)
  zeros = jnp.zeros(shape, config.dtype, out_sharding=spec)
  return zeros, jnp.zeros_like(zeros)


def positions(start_B: Int[Array, ' B'], count: int) -> Int[Array, 'B T']:
  """start, start + 1, …: sharded as rows of tokens are."""
  ahead = jnp.arange(count, dtype=start_B.dtype)[None]
  return jax.reshard(start_B[:, None] + ahead, mesh.ids_BT)


def put(buffer: Array, new: Array, at_B: Int[Array, ' B']) -> Array:
  """Writes new [B, N, …] into buffer [B, S, …] from slot at[b] on, in every row.

  The slots must be there: `dynamic_update_slice` clamps, and a block that does not fit
  would overwrite committed rows.
  """
  write = jax.vmap(
    lambda old, one, at: jax.lax.dynamic_update_slice(
      old, one.astype(old.dtype), (at, *(0,) * (one.ndim - 1))
    )
  )
  spec = jax.typeof(buffer).sharding.spec
  return write(buffer, jax.reshard(new, spec), at_B)


def whole(x: Array) -> Array:
  """[B, …], sharded over the batch alone."""
  return jax.reshard(x, jax.P(mesh.BATCH, *(None,) * (x.ndim - 1)))


def take(x: Array, start_B: Int[Array, ' B'], count: int) -> Array:
  """x[b, start[b] : start[b] + count] of [B, T, …], whole in time."""
  row = jax.lax.dynamic_slice_in_dim
  return jax.vmap(lambda one, at: row(one, at, count))(whole(x), start_B)


def keep(old: Array, new: Array, count_B: Int[Array, ' B']) -> Array:
  """The new value [B, …] of rows that have any new tokens, else the old one."""
  some = (count_B > 0).reshape(-1, *(1,) * (new.ndim - 1))
  return jnp.where(some, new, old)


def look_at_cache(
  cache: LayerCache, start_B: Int[Array, ' B'], config, window: int, before: int = 0
) -> Look:
  """Attention of new rows at positions start, start + 1, … to all rows up to their own;
  hands on the cache with the new rows written."""

  def look(q, k, v):
    keys, values = (
      put(old, new, start_B + before) for old, new in zip(cache, (k, v), strict=True)
    )
    B, S = keys.shape[:2]
    at_BS = jnp.broadcast_to(
      jnp.arange(S)[None] - before, (B, S), out_sharding=mesh.whole_BT
    )
    at_BT = positions(start_B, q.shape[1])
    rows = Rows(at_BT, jnp.ones_like(at_BT))
    seen = attention.visibility(rows, Rows(at_BS, (at_BS >= 0).astype(int)), window)
    return attention.attend(q, keys, values, seen, config.attention_softcap), (
      keys,
      values,
    )

  return look
