"""The trunk: a Llama/Qwen-style decoder whose layers are stacked and scanned.

Shape letters, everywhere: B batch, T time, S cache length, D model width, F
feed-forward, H query heads, G key-value heads, C head width, Q = H / G, V vocabulary,
K depth or draft length, L layers, E experts, N any other count.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mtpjax import mesh
from mtpjax.fields import ConfigError
from mtpjax.models import block as blocks
from mtpjax.models import cache, kernels, layers
from mtpjax.models.attention import Leaf, Rows
from mtpjax.models.cache import LayerCache

_BY_KERNELS = jax.checkpoint_policies.save_only_these_names(kernels.SAVED)
_ON_HOST = jax.checkpoint_policies.offload_dot_with_no_batch_dims(
  'device', 'pinned_host'
)


def _offload(primitive, *args, **params):
  return _BY_KERNELS(primitive, *args, **params) or _ON_HOST(primitive, *args, **params)


REMAT = {
  'full': jax.checkpoint_policies.nothing_saveable,
  'dots': jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _BY_KERNELS
  ),
  # As 'dots', but products wait in the host's memory. A CPU has no other.
  'offload': _offload,
}


@dataclasses.dataclass
class Config:
  """A decoder of pre-norm blocks with grouped-query attention and SwiGLU.

  `windows` is a pattern repeated over the layers; 0 attends to everything, n to the
  last n positions. (4096, 0) alternates as Gemma 2 does.
  """

  vocab: int | None = None  # None: the tokenizer's
  vocab_multiple: int = (
    64  # the tables are padded to a multiple; padding is never scored
  )
  width: int = 256
  layers: int = 4
  heads: int = 4
  kv_heads: int | None = None  # None: as many as heads
  head_width: int | None = None  # None: width / heads
  ffn: int | None = None  # None: 8/3 width, rounded up to a multiple of 64
  tied: bool = False  # the embedding is the head
  qk_norm: bool = False
  qkv_bias: bool = False
  windows: tuple[int, ...] = (0,)
  attention_softcap: float | None = None
  logit_softcap: float | None = None
  rope_theta: float = 10_000.0
  # None: rotary positions. n: learnt ones instead, for n positions, as GPT-2 has them.
  learned_positions: int | None = None
  norm_epsilon: float = 1e-6
  embed_std: float = 0.02  # of the embedding and of a separate head
  # What the backward pass keeps of a layer: everything; products with weights, on the
  # device or (offload) in the host's pinned memory; or only its input.
  remat: Literal['none', 'dots', 'offload', 'full'] = 'full'
  # The kernel of attention over whole rows. None: the platform's own, if it can, see
  # `kernels`.
  attention: kernels.Kernel | None = None
  # Of compute. None: bfloat16 on an accelerator, float32 on a CPU.
  dtype: Literal['float32', 'bfloat16', 'float64'] | None = None
  param_dtype: Literal['float32', 'bfloat16', 'float64'] = 'float32'

  @property
  def padded_vocab(self) -> int:
    assert self.vocab is not None
    return -(-self.vocab // self.vocab_multiple) * self.vocab_multiple

  def finalize(self, vocab: int | None = None) -> None:
    """Fills what follows from other fields, and refuses what cannot be built."""
    self.vocab = vocab if self.vocab is None else self.vocab
    self.kv_heads = self.heads if self.kv_heads is None else self.kv_heads
    if self.dtype is None:
      self.dtype = 'float32' if jax.default_backend() == 'cpu' else 'bfloat16'
    for name in ('width', 'layers', 'heads', 'kv_heads', 'vocab_multiple'):
      if getattr(self, name) < 1:
        raise ConfigError(
          f'trunk.{name}', getattr(self, name), 'is not positive', 'use at least 1'
        )
    if self.ffn is None:
      self.ffn = -(-8 * self.width // (3 * 64)) * 64
    if vocab is not None and self.vocab is not None and self.vocab < vocab:
      raise ConfigError(
        'trunk.vocab',
        self.vocab,
        f'is smaller than the {vocab} tokens of the tokenizer',
        f'use at least {vocab}, or None for just that',
      )
    if self.head_width is None:
      if self.width % self.heads:
        raise ConfigError(
          'trunk.heads',
          self.heads,
          f'does not divide trunk.width={self.width}',
          'change one of them, or set trunk.head_width',
        )
      self.head_width = self.width // self.heads
    if self.head_width % 2:
      raise ConfigError(
        'trunk.head_width',
        self.head_width,
        'is odd',
        'rotary positions pair its halves',
      )
    if self.heads % self.kv_heads:
      raise ConfigError(
        'trunk.kv_heads',
        self.kv_heads,
        f'does not divide trunk.heads={self.heads}',
        'use a divisor of the heads',
      )
    for name in ('ffn', 'head_width', 'rope_theta', 'norm_epsilon', 'embed_std'):
      value = getattr(self, name)
      if not value > 0:
        raise ConfigError(f'trunk.{name}', value, 'is not positive', 'use more than 0')
    if self.vocab is not None and not 0 < self.vocab < 2**31 - self.vocab_multiple:
      raise ConfigError('trunk.vocab', self.vocab, 'is out of range', 'use below 2³¹')
    if not self.windows or min(self.windows) < 0 or max(self.windows) >= 2**31:
      raise ConfigError(
        'trunk.windows', self.windows, 'is no pattern of windows', 'use e.g. (1024, 0)'
      )
    count = self.learned_positions
    if count is not None and not 1 <= count < 2**31:
      fix = 'use at least data.length, or None for rotary ones'
      raise ConfigError('trunk.learned_positions', count, 'is out of range', fix)
    for name in ('attention_softcap', 'logit_softcap'):
      cap = getattr(self, name)
      if cap is not None and cap <= 0:
        raise ConfigError(f'trunk.{name}', cap, 'is not positive', 'use None for none')

  def build(self, rngs: nnx.Rngs) -> Trunk:
    return Trunk(self, rngs)

  def window(self, layer: int) -> int:
    return self.windows[layer % len(self.windows)]


@dataclasses.dataclass(frozen=True)
class Needs:
  """What an objective reads of the trunk.

  Attributes:
    taps: the residual stream after that many layers; 0 is the embedding.
    kv_layers: layers (from 0) whose keys and values are wanted.
    layers_given_up: layers taken off the trunk, to match parameters.
  """

  taps: tuple[int, ...] = ()
  kv_layers: tuple[int, ...] = ()
  layers_given_up: int = 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrunkOutput:
  """What the trunk computed: exactly what was needed of it.

  Attributes:
    hidden: the residual stream before the final norm, [B, T, D].
    taps: after n layers, {n: [B, T, D]}.
    keys: {layer: (keys, values)}, each [B, T, G, C], positions applied; none in a
      decode, where the caches hold them.
  """

  hidden: Leaf
  taps: dict[int, Leaf]
  keys: dict[int, Leaf]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Head:
  """An unembedding: logits = softcap(h · w), entries from `vocab` on are padding."""

  w_VD: Leaf
  vocab: int = dataclasses.field(metadata={'static': True})
  softcap: float | None = dataclasses.field(default=None, metadata={'static': True})


class Trunk(nnx.Module):
  def __init__(self, config: Config, rngs: nnx.Rngs):
    self.config = config
    V, D, std, dtype = (
      config.padded_vocab,
      config.width,
      config.embed_std,
      config.param_dtype,
    )
    self.embedding = blocks.normal(rngs, (V, D), std, mesh.w_VD, dtype)
    if config.learned_positions is not None:
      shape = (config.learned_positions, D)
      self.places = blocks.normal(rngs, shape, std, mesh.w_PD, dtype)
    self.blocks = blocks.Blocks(config, config.layers, rngs)
    self.gain_final = blocks.constant(1.0, (D,), mesh.gain, dtype)
    if not config.tied:
      self.unembedding = blocks.normal(rngs, (V, D), std, mesh.w_VD, dtype)

  def embed(self, ids: Int[Array, '*shape']) -> Float[Array, '*shape D']:
    return layers.embed(self.embedding[...], ids, self.config.dtype)

  def enter(
    self, ids_BT: Int[Array, 'B T'], positions_BT: Int[Array, 'B T']
  ) -> Float[Array, 'B T D']:
    """What the first layer reads."""
    x_BTD, count = self.embed(ids_BT), self.config.learned_positions
    if count is None:
      return x_BTD
    # Junk rows of a decode may be beyond the table.
    at = jnp.minimum(positions_BT, count - 1)
    return x_BTD + layers.embed(self.places[...], at, self.config.dtype)

  def final_norm(self, x_BTD: Float[Array, 'B T D']) -> Float[Array, 'B T D']:
    return layers.norm(x_BTD, self.gain_final[...], self.config.norm_epsilon)

  def head(self) -> Head:
    table = self.embedding if self.config.tied else self.unembedding
    assert self.config.vocab is not None
    return Head(table[...], self.config.vocab, self.config.logit_softcap)

  def __call__(
    self, tokens_BT: Int[Array, 'B T'], rows: Rows, needs: Needs = Needs()
  ) -> TrunkOutput:
    """All layers over whole rows."""
    x_BTD = self.enter(tokens_BT, rows.positions)
    return scan(blocks.arrays(self.blocks), x_BTD, rows, self.config, needs)


def extend(
  weights: list[dict],
  x_BTD: Float[Array, 'B T D'],
  start_B: Int[Array, ' B'],
  caches: list[LayerCache],
  config: Config,
  needs: Needs,
  branches: cache.Branches | None = None,
) -> tuple[TrunkOutput, list[LayerCache]]:
  """All layers over new rows at positions start, start + 1, …, after the cached ones.

  Args:
    weights: a dict a layer, from `block.lay_out` or `block.unstack`.
    branches: where the rows stand instead, if they are a draft that branches.

  Returns: the output for the new rows, and the caches with them written.
  """
  positions = cache.positions(start_B, x_BTD.shape[1])
  positions = branches.positions if branches else positions
  taps = {0: x_BTD} if 0 in needs.taps else {}
  kept = []
  for n, (w, old) in enumerate(zip(weights, caches, strict=True)):
    window = config.window(n)
    look = cache.look_at_cache(old, start_B, config, window, branches=branches)
    x_BTD, new = blocks.block(w, x_BTD, positions, config, look)
    kept.append(new)
    if n + 1 in needs.taps:
      taps[n + 1] = x_BTD
  return TrunkOutput(x_BTD, taps, {}), kept


def scan(
  w: dict, x_BTD: Float[Array, 'B T D'], rows: Rows, config: Config, needs: Needs
) -> TrunkOutput:
  """The stacked layers, one pattern of windows an iteration.

  Taps travel in the carry, each replaced at its own layer, so that memory holds the
  tapped layers and no others.
  """
  L, period = config.layers, len(config.windows)

  def layer(carry, w, index, window):
    x, taps, kept = carry
    look = blocks.look_at_rows(rows, config, window)
    x, (k, v) = blocks.block(w, x, rows.positions, config, look)
    taps = {n: jnp.where(index + 1 == n, x, old) for n, old in taps.items()}
    kept = {
      n: (jnp.where(index == n, k, old[0]), jnp.where(index == n, v, old[1]))
      for n, old in kept.items()
    }
    return x, taps, kept

  def layer_fn(scanned: bool):
    if config.remat == 'none':
      return layer
    return jax.checkpoint(
      layer,
      policy=REMAT[config.remat],
      prevent_cse=not scanned,
      static_argnums=(3,),
    )

  B, T, _ = x_BTD.shape
  G, C = config.kv_heads, config.head_width
  assert G is not None and C is not None
  shape, spec = (B, T, G, C), jax.P(mesh.BATCH, 'context', mesh.heads_axis(G), None)
  nothing = jnp.zeros(shape, x_BTD.dtype, out_sharding=spec)
  carry: Any = (
    x_BTD,
    {n: x_BTD for n in needs.taps},
    {n: (nothing, nothing) for n in needs.kv_layers},
  )
  whole, rest = divmod(L, period)

  def body(carry, xs):
    index, group = xs
    for j, window in enumerate(config.windows):
      one = jax.tree.map(lambda a, j=j: a[j], group)
      carry = layer_fn(scanned=whole > 1)(carry, one, index * period + j, window)
    return carry, None

  if whole:
    groups = jax.tree.map(
      lambda a: a[: whole * period].reshape(whole, period, *a.shape[1:]), w
    )
    carry, _ = jax.lax.scan(body, carry, (jnp.arange(whole), groups))
  for n in range(L - rest, L):
    one = jax.tree.map(lambda a, n=n: a[n], w)
    carry = layer_fn(scanned=False)(carry, one, jnp.int32(n), config.window(n))
  x_BTD, taps, kept = carry
  return TrunkOutput(x_BTD, taps, kept)
