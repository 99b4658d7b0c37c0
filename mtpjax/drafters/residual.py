"""Residual heads: depth k is a small residual network on the trunk's hidden state at i
alone, then a head, the trunk's or its own.

`form: seed`: h + N2(W2 drop(SiLU(W1 N1(h)))) on the residual stream, before the trunk's
final norm, which comes after. N2's gain starts at zero, as the last gain of a residual
branch (Goyal et al. 2017, arXiv 1706.02677): zero matrices under a norm would get
gradients of 1 / √epsilon.

`form: medusa` (Cai et al. 2024, arXiv 2401.10774): x + SiLU(W x) on the hidden state
after the trunk's final norm, nothing after; W starts at zero and each head's own
unembedding as the trunk's. Their head i, from 0, is depth i + 1.

Either way every depth starts as the trunk's own next-token prediction.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from mtpjax import losses, mesh
from mtpjax.drafters import base
from mtpjax.fields import ConfigError
from mtpjax.models import block as blocks
from mtpjax.models import cache, layers
from mtpjax.models import trunk as trunks


@dataclasses.dataclass
class Config(base.Config):
  form: Literal['seed', 'medusa'] = 'seed'
  expansion: int = 4  # of 'seed': inner width over the trunk's
  dropout: float = 0.0  # of 'seed', in training: share of inner values that are zeroed
  layers: int = 1  # of 'medusa': residual blocks a head
  own_head: bool | None = (
    None  # an unembedding a depth; None: 'medusa' has, as published
  )
  detach: tuple[str, ...] = ()  # of 'hidden', 'head': no gradient into it

  @property
  def owns_head(self) -> bool:
    return self.form == 'medusa' if self.own_head is None else self.own_head

  def finalize(self, trunk: trunks.Config, field: str) -> None:
    super().finalize(trunk, field)
    base.check_detach(self.detach, ('hidden', 'head'), field)
    for name in ('expansion', 'layers'):
      if getattr(self, name) < 1:
        raise ConfigError(
          f'{field}.{name}', getattr(self, name), 'is not positive', 'use at least 1'
        )
    if not 0 <= self.dropout < 1:
      raise ConfigError(
        f'{field}.dropout', self.dropout, 'is not in [0, 1)', 'use 0 for none'
      )
    fresh = type(self)()
    for form, names in (('seed', ('expansion', 'dropout')), ('medusa', ('layers',))):
      for name in names:
        value, usual = getattr(self, name), getattr(fresh, name)
        if form != self.form and value != usual:
          raise ConfigError(
            f'{field}.{name}',
            value,
            f'means nothing with {field}.form={self.form!r}',
            f'use {usual}, or {field}.form={form!r}',
          )
    if self.owns_head and 'head' in self.detach:
      raise ConfigError(
        f'{field}.detach',
        'head',
        'would leave heads of its own at the copy of the trunk that they start as',
        f'use {field}.own_head=False, or leave it out',
      )
    inner, parts = self.expansion * trunk.width, mesh.axis_size('tensor')
    if self.form == 'seed' and inner % parts:
      raise ConfigError(
        f'{field}.expansion',
        self.expansion,
        f'times trunk.width={trunk.width} does not divide by mesh.tensor={parts}',
        'change one of them',
      )

  def build(self, trunk: trunks.Config, rngs: nnx.Rngs) -> Residual:
    return Residual(self, trunk, rngs)

  def conventions(self) -> dict[str, Any]:
    seed = self.form == 'seed'
    shared = ['final_norm', *([] if self.owns_head else ['head'])]
    return {
      **super().conventions(),
      'own_head': self.owns_head,
      'hidden_norm': 'pre' if seed else 'post',  # hidden read before / after final norm
      'final_norm_after': seed,
      'shared': shared,
      'teacher_forcing_inputs': 'none: every head reads only the trunk',
    }


class Residual(base.Drafter):
  """Its state is what the heads read of the last row, [B, 1, D]."""

  config: Config

  def __init__(self, config: Config, trunk: trunks.Config, rngs: nnx.Rngs):
    super().__init__(config)
    self.sizes = trunk
    K, D, dtype = config.depth, trunk.width, trunk.param_dtype
    if config.form == 'medusa':
      shape, spec = (K, config.layers, D, D), mesh.stacked(mesh.stacked(mesh.w_DD))
      self.w_map = blocks.constant(0.0, shape, spec, dtype)
    else:
      F, gains = config.expansion * D, mesh.stacked(mesh.gain)
      self.gain_in = blocks.constant(1.0, (K, D), gains, dtype)
      self.w_up = blocks.normal(
        rngs, (K, D, F), D**-0.5, mesh.stacked(mesh.w_DF), dtype
      )
      self.w_down = blocks.normal(
        rngs, (K, F, D), F**-0.5, mesh.stacked(mesh.w_FD), dtype
      )
      self.gain_out = blocks.constant(0.0, (K, D), gains, dtype)
    if config.owns_head:
      # Not one stack: its gradient would be put together from a copy of each depth's.
      self.unembedding = nnx.Dict(
        {
          f'depth_{k}': blocks.constant(0.0, (trunk.padded_vocab, D), mesh.w_VD, dtype)
          for k in range(1, K + 1)
        }
      )

  def adopt(self, trunk: trunks.Trunk) -> None:
    if self.config.owns_head:
      for table in self.unembedding.values():
        table[...] = trunk.head().w_VD

  def heads(self, trunk: trunks.Trunk) -> tuple[trunks.Head, ...] | None:
    """Its own, a depth each; None is the trunk's."""
    if not self.config.owns_head:
      return None
    tables = (self.unembedding[f'depth_{k + 1}'] for k in range(self.config.depth))
    return tuple(dataclasses.replace(trunk.head(), w_VD=w[...]) for w in tables)

  def weights(self) -> dict:
    """Parameters of the residual networks by name, stacked over depths."""
    return {n: a for n, a in blocks.arrays(self).items() if n != 'unembedding'}

  def read(self, trunk: trunks.Trunk, hidden_BTD):
    """What the heads take of the trunk."""
    return hidden_BTD if self.config.form == 'seed' else trunk.final_norm(hidden_BTD)

  def one(self, trunk: trunks.Trunk, w: dict, x_BTD, key=None):
    """One depth, ready for its head; `key` where inner values are to be dropped."""
    if self.config.form == 'medusa':
      for w_map in w['w_map']:
        y = jax.nn.silu(layers.linear(x_BTD, w_map, 'D,DE->E'))
        x_BTD = x_BTD + jax.reshard(y, mesh.act_BTD)
      return x_BTD
    y = layers.norm(x_BTD, w['gain_in'], self.sizes.norm_epsilon)
    y = jax.nn.silu(layers.linear(y, w['w_up'], 'D,DF->F'))
    if key is not None:
      kept, spec = 1 - self.config.dropout, jax.typeof(y).sharding.spec
      there = jax.random.bernoulli(key, kept, y.shape, out_sharding=spec)
      y = jnp.where(there, y / kept, 0)
    y = layers.linear(y, w['w_down'], 'F,FD->D', shard_last=(None,))
    y = layers.norm(y, w['gain_out'], self.sizes.norm_epsilon)
    return trunk.final_norm(x_BTD + y)

  def predict(self, trunk, out, batch, step, key) -> base.Predictions:
    config, K = self.config, self.config.depth
    x_BTD = self.read(trunk, out.hidden)
    if 'hidden' in config.detach:
      x_BTD = jax.lax.stop_gradient(x_BTD)
    keys = None
    if key is not None and config.dropout > 0:
      keys = jax.random.split(key, K)

    def body(x_BTD, xs):
      return x_BTD, self.one(trunk, xs[0], x_BTD, xs[1])

    if self.sizes.remat != 'none':
      body = jax.checkpoint(
        body, policy=trunks.REMAT[self.sizes.remat], prevent_cse=K == 1
      )
    _, hidden_KBTD = jax.lax.scan(body, x_BTD, (self.weights(), keys))
    return base.Predictions(
      hidden_KBTD, self.heads(trunk), trains_head='head' not in config.detach
    )

  # --- Drafting

  def lay_out(self, params: dict) -> dict:
    def matrices(stack):
      if stack.ndim == 2:
        return layers.OutputsFirst.of(stack, 1)
      return tuple(matrices(w) for w in stack)

    return {
      name: matrices(x)
      if name.startswith('w_')
      else x
      if name == 'unembedding'
      else tuple(x)
      for name, x in params.items()
    }

  def init_state(self, room: base.Room):
    shape = (room.batch, 1, self.sizes.width)
    return jnp.zeros(shape, self.sizes.dtype, out_sharding=mesh.act_BTD)

  def absorb(self, trunk, caches, state, block: base.Committed):
    last_B1D = cache.take(block.out.hidden, block.count - 1, 1)
    read_B1D = self.read(trunk, jax.reshard(last_B1D, mesh.act_BTD))
    return cache.keep(state, read_B1D, block.count)

  def propose(
    self, trunk, caches, state, draft: int, choose: base.Choose
  ) -> tuple[base.Draft, Any]:
    own = self.heads(trunk)
    each = blocks.unstack(self.weights())[:draft]
    ready_KBD = jnp.stack([cache.whole(self.one(trunk, w, state))[:, 0] for w in each])
    logits_KBV = losses.head_logits(ready_KBD, own[:draft] if own else trunk.head())
    return base.independent(list(logits_KBV), choose), state
