"""One pre-norm decoder block, or a stack of them: parameters and the pure function.

Initialisation: every matrix is normal with variance 1 / fan-in; the two that write
into the residual stream are divided by sqrt(2 · layers of the trunk) besides (GPT-2),
so that the stream's variance does not grow with depth; gains are one, biases zero.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from mtpjax import mesh
from mtpjax.models import attention, kernels, layers
from mtpjax.models.attention import Rows

# (q, k, v) -> (attention's output [B, T, H, C], anything to hand on)
Look = Callable[[Array, Array, Array], tuple[Array, Any]]


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float, spec: P, dtype: str):
  values = jax.random.normal(rngs.params(), shape, dtype, out_sharding=spec)
  return nnx.Param(values * jnp.asarray(std, dtype))


def constant(value: float, shape: tuple[int, ...], spec: P, dtype: str):
  return nnx.Param(jnp.full(shape, value, dtype, out_sharding=spec))


class Blocks(nnx.Module):
  """`count` blocks, each parameter stacked on a leading axis."""

  def __init__(self, config, count: int, rngs: nnx.Rngs):
    D, F, H = config.width, config.ffn, config.heads
    G, C = config.kv_heads, config.head_width
    out = (2 * config.layers) ** -0.5

    def weight(shape, fan_in, spec, scale=1.0):
      std = scale * fan_in**-0.5
      spec = mesh.stacked(spec)
      return normal(rngs, (count, *shape), std, spec, config.param_dtype)

    def gains(width):
      shape, spec = (count, width), mesh.stacked(mesh.gain)
      return constant(1.0, shape, spec, config.param_dtype)

    def biases(shape, spec):
      shape, spec = (count, *shape), mesh.stacked(spec)
      return constant(0.0, shape, spec, config.param_dtype)

    self.gain_attention = gains(D)
    self.w_query = weight((D, H, C), D, mesh.w_DHC)
    self.w_key = weight((D, G, C), D, mesh.w_DGC(G))
    self.w_value = weight((D, G, C), D, mesh.w_DGC(G))
    self.w_mix = weight((H, C, D), H * C, mesh.w_HCD, out)
    if config.qkv_bias:
      self.bias_query = biases((H, C), mesh.bias_HC)
      self.bias_key = biases((G, C), mesh.bias_GC(G))
      self.bias_value = biases((G, C), mesh.bias_GC(G))
    if config.qk_norm:
      self.gain_query = gains(C)
      self.gain_key = gains(C)
    self.gain_ffn = gains(D)
    self.w_up = weight((D, F), D, mesh.w_DF)
    self.w_gate = weight((D, F), D, mesh.w_DF)
    self.w_down = weight((F, D), F, mesh.w_FD, out)


def lay_out(w: dict) -> dict:
  """Stacked blocks as decoding reads them: a tuple of arrays under each name, one a
  layer, every matrix with its outputs first."""

  def one(name: str, array):
    if not name.startswith('w_'):
      return array
    return layers.OutputsFirst.of(array, 2 if name == 'w_mix' else 1)

  return {name: tuple(one(name, a) for a in stack) for name, stack in w.items()}


def unstack(w: dict) -> list[dict]:
  """A dict a layer, of stacked parameters or of those that are laid out."""

  def laid_out(x):
    return isinstance(x, tuple)

  count = len(jax.tree.leaves(w, is_leaf=laid_out)[0])
  return [jax.tree.map(lambda a, n=n: a[n], w, is_leaf=laid_out) for n in range(count)]


def arrays(module: nnx.Module) -> dict[str, Any]:
  """The module's parameters by name, nested as its modules are."""
  return nnx.to_pure_dict(nnx.state(module))


def block(
  w: dict, x_BTD: Float[Array, 'B T D'], positions, config, look: Look
) -> tuple[Float[Array, 'B T D'], Any]:
  """One block; `look` decides what attention sees.

  Args:
    w: one layer's arrays, as `Blocks` names them, without the leading axis.
    positions: rotary positions of the rows, int [B, T].

  Returns: the residual stream after the block, and what `look` handed on.
  """
  h = layers.norm(x_BTD, w['gain_attention'], config.norm_epsilon)
  o, kept = look(*attention.project(w, h, positions, config))
  x_BTD = x_BTD + attention.mix(w, o)
  h = layers.norm(x_BTD, w['gain_ffn'], config.norm_epsilon)
  return x_BTD + layers.swiglu(w, h), kept


def look_at_rows(rows: Rows, config, window: int) -> Look:
  """Attention among the rows themselves, as training and prefill see them."""

  def look(q, k, v):
    return kernels.attend(q, k, v, rows, config, window), (k, v)

  return look
