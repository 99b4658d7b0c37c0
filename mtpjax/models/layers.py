"""Norms, positions and the feed-forward layer: pure functions of arrays.

Every function computes in `promote_types(dtype, float32)` where it reduces, and
returns the dtype it was given.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mtpjax import mesh


def wide(dtype) -> jnp.dtype:
  """The dtype of reductions: at least float32."""
  return jnp.promote_types(dtype, jnp.float32)


def norm(
  x: Float[Array, '*shape D'], gain_D: Float[Array, ' D'], epsilon: float
) -> Float[Array, '*shape D']:
  """RMSNorm with gain (Zhang & Sennrich 2019)."""
  y = x.astype(wide(x.dtype))
  y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + epsilon)
  gain = jnp.expand_dims(gain_D.astype(y.dtype), tuple(range(x.ndim - 1)))
  return (y * gain).astype(x.dtype)


def rope(
  x_BTHC: Float[Array, 'B T H C'], positions_BT: Int[Array, 'B T'], theta: float
) -> Float[Array, 'B T H C']:
  """Rotary positions, the two halves of a head paired (Su et al. 2021)."""
  dtype = wide(x_BTHC.dtype)
  half = x_BTHC.shape[-1] // 2
  frequency = theta ** (-jnp.arange(half, dtype=dtype) / half)
  angle = positions_BT.astype(dtype)[:, :, None, None] * frequency[None, None, None]
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  a, b = jnp.split(x_BTHC.astype(dtype), 2, -1)
  rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
  return rotated.astype(x_BTHC.dtype)


def softcap(x: Float[Array, '*shape'], cap: float | None) -> Float[Array, '*shape']:
  """Squashes into (-cap, cap), as Gemma 2 does; None leaves `x` as it is."""
  return x if cap is None else cap * jnp.tanh(x / cap)


def swiglu(w: dict, h_BTD: Float[Array, 'B T D']) -> Float[Array, 'B T D']:
  """The gated feed-forward layer (Shazeer 2020)."""
  up, gate, down = (
    mesh.gathered(w[name].astype(h_BTD.dtype)) for name in ('w_up', 'w_gate', 'w_down')
  )
  up_BTF = jnp.einsum('BTD,DF->BTF', h_BTD, up)
  gate_BTF = jax.nn.silu(jnp.einsum('BTD,DF->BTF', h_BTD, gate))
  return jnp.einsum('BTF,FD->BTD', up_BTF * gate_BTF, down, out_sharding=mesh.act_BTD)


def embed(
  table_VD: Float[Array, 'V D'], ids: Int[Array, '*shape'], dtype
) -> Float[Array, '*shape D']:
  """Rows of the table, sharded as the ids are.

  The cast comes first so that a gather over 'fsdp' moves the small dtype. The table is
  looked up whole in width: one sharded both ways would be rematerialised.
  """
  spec = jax.typeof(ids).sharding.spec
  table = mesh.gathered(table_VD.astype(dtype))
  return table.at[ids].get(out_sharding=jax.sharding.PartitionSpec(*spec, None))
