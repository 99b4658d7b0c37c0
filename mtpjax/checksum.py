"""A checksum of an array that does not depend on how it is sharded."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped, UInt32


@jax.jit
def checksum(x: Shaped[Array, '*shape']) -> UInt32[Array, '']:
  """Σ mix(bits(x[i]) + c·i) mod 2³², i the flat global position.

  The same whatever the sharding, for the sum is over integers. `mix` is MurmurHash3's
  finaliser (Appleby 2011), a bijection, so any one changed element changes the sum.
  """
  if x.dtype != jnp.bool_:  # 64 bits become two words
    x = lax.bitcast_convert_type(x, f'uint{min(32, 8 * x.dtype.itemsize)}')
  words = x.astype(jnp.uint32)
  position = jnp.zeros(words.shape, jnp.uint32)
  for axis, size in enumerate(words.shape):
    index = lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    position = position * jnp.uint32(size & 0xFFFFFFFF) + index
  h = words + position * jnp.uint32(0x9E3779B9)
  h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
  h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
  return jnp.sum(h ^ (h >> 16), dtype=jnp.uint32)
