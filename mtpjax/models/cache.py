"""Keys and values of rows already seen, in buffers of fixed length.

Every row of the batch has its own length. A buffer of S slots holds position `p` in
slot `(p + before) mod S`; positions before 0, which some drafters write, are never
seen. New rows are written at any position and what lies beyond them is never looked at,
so rolling back is a matter of the length alone.

A layer with a window keeps a ring of `window + block` slots, block being the most rows
written at once: what a block overwrites is out of sight of every later row, even if all
but one of the block is rolled back.

Buffers are in the dtype of compute, in bfloat16, or in int8 with a scale for each row
and head of a slot. What is new is read back from there too, so a row sees the same
numbers whether it was written alone or in a block.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from mtpjax import mesh
from mtpjax.models import attention, layers
from mtpjax.models.attention import Leaf, Rows
from mtpjax.models.block import Look

KINDS = ('bfloat16', 'int8')  # beside the dtype of compute
LARGEST = 127  # of an int8 number's magnitude


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class LayerCache:
  """Keys and values of one layer; slots are axis 2 of every array, S a layer's own.

  Heads first: XLA on CPU would transpose every slot of a [B, S, G, C] buffer in every
  pass (measured: 103 ms against 6 at 4,096 slots).

  Attributes:
    keys, values: [B, G, S, C].
    key_scales, value_scales: what a slot's int8 numbers are multiplied by, float32 or
      wider [B, G, S, 1]; None where they are no int8.
  """

  keys: Leaf
  values: Leaf
  key_scales: Leaf = None
  value_scales: Leaf = None

  @property
  def scales(self) -> tuple[Array, Array] | None:
    return None if self.key_scales is None else (self.key_scales, self.value_scales)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Branches:
  """Rows of a draft that branches: they lie one after another in the cache, and each
  sees those on its own path alone.

  Attributes:
    first: slot of the first, int [B]; what is before is committed and seen by all.
    positions: of the rows to be written, int [B, T].
    keys_at: of all that lie from `first` on, those rows the last of them, int [B, R].
    seen: which of these each row sees, bool [B, T, R].
  """

  first: Leaf
  positions: Leaf
  keys_at: Leaf
  seen: Leaf


def empty(
  config,
  batch: int,
  slots: int,
  window: int = 0,
  block: int = 1,
  kind: str | None = None,
) -> LayerCache:
  """A layer's buffers, sharded over batch and heads.

  Args:
    slots: positions of a row, `before` included.
    window: of the layer; 0 sees everything.
    block: rows written at once, at most.
    kind: what they are kept in; None is the dtype of compute.
  """
  if window:
    slots = min(slots, window + block)
  shape = (batch, config.kv_heads, slots, config.head_width)
  spec = mesh.cached_keys(config.kv_heads)
  zeros = jnp.zeros(shape, config.dtype if kind is None else kind, out_sharding=spec)
  if kind != 'int8':
    return LayerCache(zeros, jnp.zeros_like(zeros))
  wide = layers.wide(config.dtype)
  scales = jnp.zeros((*shape[:3], 1), wide, out_sharding=spec)
  return LayerCache(zeros, jnp.zeros_like(zeros), scales, jnp.zeros_like(scales))


def quantised(x: Array) -> tuple[Array, Array]:
  """int8 numbers [..., C] and the scales [..., 1] that make them x to half a scale."""
  x = x.astype(layers.wide(x.dtype))
  scale = jnp.max(jnp.abs(x), -1, keepdims=True) / LARGEST
  # Zeros have no scale; what is no number keeps one that is none either.
  return jnp.round(x / jnp.where(scale == 0, 1, scale)).astype(jnp.int8), scale


def positions(start_B: Int[Array, ' B'], count: int) -> Int[Array, 'B T']:
  """start, start + 1, …: sharded as rows of tokens are."""
  ahead = jnp.arange(count, dtype=start_B.dtype)[None]
  return jax.reshard(start_B[:, None] + ahead, mesh.ids_BT)


def put(buffer: Array, new: Array, at_B: Int[Array, ' B'], axis: int = 1) -> Array:
  """Writes new rows into the buffer from slot at[b] on, along `axis`, in every row.

  The slots must be there: `dynamic_update_slice` clamps, and a block that does not fit
  would overwrite committed rows.
  """
  spec = jax.typeof(buffer).sharding.spec

  def write(buffer, new, at_B):
    def row(b, buffer):
      start = [b if n == 0 else 0 for n in range(buffer.ndim)]
      start[axis] = at_B[b]
      one = jax.lax.dynamic_slice_in_dim(new, b, 1)
      return jax.lax.dynamic_update_slice(buffer, one, start)

    # A device's own rows in turn, in place: `vmap` would make it a scatter, for which
    # XLA on CPU copies the buffer. It also copies where it knows of a single iteration.
    count = jnp.sum(at_B >= 0) if jax.default_backend() == 'cpu' else len(at_B)
    return jax.lax.fori_loop(0, count, row, buffer)

  specs = (spec, spec, jax.P(spec[0]))
  new = jax.reshard(new.astype(buffer.dtype), spec)
  at_B = jax.reshard(at_B, specs[2])
  return jax.shard_map(write, in_specs=specs, out_specs=spec)(buffer, new, at_B)


def put_around(ring: Array, new: Array, at_B: Int[Array, ' B'], axis: int = 1) -> Array:
  """`put` into a ring: what passes its end goes on at its start."""
  size, N = ring.shape[axis], new.shape[axis]
  at_B = at_B % size
  over = jnp.maximum(at_B + N - size, 0)  # rows past the end

  def merge(ring, at, first):
    """Slots at … at + N - 1 become rows first … of `new`, those that there are."""
    rows = first[:, None] + jnp.arange(N)[None]
    other = tuple(n for n in range(1, ring.ndim) if n != axis)
    there = jnp.expand_dims((rows >= 0) & (rows < N), other)
    pad = [(N, N) if n == axis else (0, 0) for n in range(ring.ndim)]
    moved = take(jnp.pad(new.astype(ring.dtype), pad), first + N, N, axis)
    old = take(ring, at, N, axis)
    return put(ring, jnp.where(there, moved, old), at, axis)

  ring = merge(ring, at_B - over, -over)
  return merge(ring, jnp.zeros_like(at_B), N - over)


def whole(x: Array) -> Array:
  """[B, …], sharded over the batch alone."""
  return jax.reshard(x, whole_spec(x.ndim))


def whole_spec(rank: int) -> jax.P:
  return jax.P(mesh.BATCH, *(None,) * (rank - 1))


def take(x: Array, start_B: Int[Array, ' B'], count: int, axis: int = 1) -> Array:
  """x[b, …, start[b] : start[b] + count] along `axis`, which becomes whole."""
  spec = list(jax.typeof(x).sharding.spec)
  spec[0], spec[axis] = mesh.BATCH, None
  row = jax.lax.dynamic_slice_in_dim
  return jax.vmap(lambda one, at: row(one, at, count, axis - 1))(
    jax.reshard(x, jax.P(*spec)), start_B
  )


def pick(x: Array, index_BN: Int[Array, 'B N'], axis: int = 1) -> Array:
  """x[b, …, index[b, n]] along `axis`, which becomes whole."""
  spec = list(jax.typeof(x).sharding.spec)
  spec[0], spec[axis] = mesh.BATCH, None
  specs = jax.P(*spec), whole_spec(2)

  def rows(x, index_BN):
    return jax.vmap(lambda one, at: jnp.take(one, at, axis - 1))(x, index_BN)

  x, index_BN = jax.reshard(x, specs[0]), jax.reshard(index_BN, specs[1])
  return jax.shard_map(rows, in_specs=specs, out_specs=specs[0])(x, index_BN)


def move(
  cache: LayerCache, start_B: Int[Array, ' B'], path_BN: Int[Array, 'B N'], window: int
) -> LayerCache:
  """Rows start + path[b, n] become rows start + n: what a draft that branches leaves of
  its block. Layers with a window are rings."""

  def one(buffer):
    at_BN = start_B[:, None] + path_BN
    at_BN = at_BN % buffer.shape[2] if window else at_BN
    rows = pick(buffer, at_BN, axis=2)
    return (put_around if window else put)(buffer, rows, start_B, axis=2)

  return jax.tree.map(one, cache)


def keep(old: Array, new: Array, count_B: Int[Array, ' B']) -> Array:
  """The new value [B, …] of rows that have any new tokens, else the old one."""
  some = jnp.expand_dims(count_B > 0, tuple(range(1, new.ndim)))
  return jnp.where(some, new, old)


def held(last_B: Int[Array, ' B'], slots: int, before: int = 0) -> Int[Array, 'B S']:
  """The position in each slot once `last` has been written; below 0 is none."""
  last_B1 = last_B[:, None] + before
  slot = jnp.arange(slots, dtype=last_B.dtype)[None]
  at = last_B1 - (last_B1 - slot) % slots - before
  return jax.reshard(at, mesh.whole_BT)


def look_at_cache(
  cache: LayerCache,
  start_B: Int[Array, ' B'],
  config,
  window: int,
  before: int = 0,
  branches: Branches | None = None,
) -> Look:
  """Attention of new rows at positions start, start + 1, … to all rows up to their own;
  hands on the cache with the new rows written. Rows that branch are written to those
  slots all the same."""
  write = put_around if window else put

  def look(q, k, v):
    k_BGTC, v_BGTC = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
    new = LayerCache(k_BGTC, v_BGTC)
    if cache.scales is not None:
      (keys, k_scales), (values, v_scales) = quantised(k_BGTC), quantised(v_BGTC)
      new = LayerCache(keys, values, k_scales, v_scales)
    kept = jax.tree.map(
      lambda old, rows: write(old, rows, start_B + before, axis=2), cache, new
    )
    at_BS = held(start_B + q.shape[1] - 1, kept.keys.shape[2], before)
    there = at_BS >= 0
    if branches is None:
      at_BT = positions(start_B, q.shape[1])
    else:
      at_BT = branches.positions
      there &= at_BS < branches.first[:, None]
    seen = attention.visibility(
      Rows(at_BT, jnp.ones_like(at_BT)),
      Rows(at_BS, there.astype(at_BT.dtype)),
      window,
    )
    if branches is not None:
      keys_at = whole(branches.keys_at)[:, None]
      own = whole(branches.seen) & (keys_at >= 0)
      if window:
        own &= whole(at_BT)[:, :, None] - keys_at < window
      nothing = jnp.zeros_like(whole(seen))
      seen |= write(nothing, own, branches.first + before, axis=2)
    out = attention.attend_cached(
      q,
      kept.keys,
      kept.values,
      seen,
      config.attention_softcap,
      kept.scales,
    )
    return out, kept

  return look
