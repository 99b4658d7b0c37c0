"""Parallel heads (Gloeckle et al. 2024, arXiv 2404.19737): K extra heads, each one
block on the same hidden state, with the trunk's final norm and unembedding.

As in the authors' code, head 1 is the trunk's last layer, so the extra heads read the
output of the layer before it. Their ablations: `form: linear` has a matrix in place of
a block and reads the last layer's output. In `causal` the block of depth k reads that
of depth k-1, and depth 1's the last layer's output. In `anticausal` the trunk predicts
the farthest token first: depth k is what its last k layers have not yet changed, and
has nothing of its own but the shared norm and unembedding.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from mtpjax import losses, mesh
from mtpjax.drafters import base
from mtpjax.fields import ConfigError
from mtpjax.models import block as blocks
from mtpjax.models import cache, layers
from mtpjax.models import trunk as trunks
from mtpjax.models.attention import Leaf

READS = {
  'block': 'the layer before the last',
  'linear': 'the last layer',
  'causal': 'depth 1 the last layer, depth k the block of depth k-1',
  'anticausal': 'depth k the layer k before the last',
}


@dataclasses.dataclass
class Config(base.Config):
  form: Literal['block', 'linear', 'causal', 'anticausal'] = 'block'
  match_parameters: bool = False  # the trunk gives up a layer for each extra head
  detach: tuple[str, ...] = ()  # of 'hidden', 'head': no gradient into it

  def needs(self, trunk: trunks.Config) -> trunks.Needs:
    given_up = self.depth if self.match_parameters else 0
    return trunks.Needs(self.taps(trunk.layers - given_up), layers_given_up=given_up)

  def taps(self, layers: int) -> tuple[int, ...]:
    """Layers after which the heads read: one each, or one for all."""
    if self.form == 'anticausal':
      return tuple(layers - k for k in range(1, self.depth + 1))
    return (layers - (self.form == 'block'),)

  def finalize(self, trunk: trunks.Config, field: str) -> None:
    super().finalize(trunk, field)
    base.check_detach(self.detach, ('hidden', 'head'), field)
    if self.match_parameters and self.form in ('linear', 'anticausal'):
      has = 'is no layer' if self.form == 'linear' else 'has no parameters'
      raise ConfigError(
        f'{field}.match_parameters',
        True,
        f'takes a layer off the trunk for each head, and one of {self.form!r} {has}',
        f"use {field}.form='block' or 'causal', or False",
      )
    if self.form == 'anticausal' and self.depth >= trunk.layers:
      raise ConfigError(
        f'{field}.depth',
        self.depth,
        f'leaves depth {self.depth} none of trunk.layers={trunk.layers}',
        f'use at most {trunk.layers - 1}, or more layers',
      )
    if self.match_parameters and self.depth >= trunk.layers:
      raise ConfigError(
        f'{field}.depth',
        self.depth,
        f'gives up all of trunk.layers={trunk.layers}',
        f'use a smaller depth, more layers, or {field}.match_parameters=False',
      )

  def build(self, trunk: trunks.Config, rngs: nnx.Rngs) -> Parallel:
    return Parallel(self, trunk, rngs)

  def conventions(self) -> dict[str, Any]:
    return {
      **super().conventions(),
      'modules': 0 if self.form == 'anticausal' else self.depth,
      'shared': ['final_norm', 'head'],
      'reads': READS[self.form],
      'hidden_norm': 'pre',
      'teacher_forcing_inputs': 'none: no head reads a token',
    }


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
  """Keys and values of each head, and what the last row gives for the unembedding.

  `ready` is [B, K, D]; heads that attend to nothing have no cache.
  """

  caches: Leaf
  ready: Leaf


class Parallel(base.Drafter):
  config: Config

  def __init__(self, config: Config, trunk: trunks.Config, rngs: nnx.Rngs):
    super().__init__(config)
    self.sizes = trunk
    self.window = trunk.window(trunk.layers - 1)
    self.taps = config.taps(trunk.layers)
    self.attends = config.form in ('block', 'causal')
    if self.attends:
      self.block = blocks.Blocks(trunk, config.depth, rngs)
    elif config.form == 'linear':
      D, spec = trunk.width, mesh.stacked(mesh.w_DD)
      shape = (config.depth, D, D)
      self.w_map = blocks.normal(rngs, shape, D**-0.5, spec, trunk.param_dtype)

  def head(self, trunk, w: dict, x_BTD, positions_BT, look):
    """One head: (its hidden state, the same normalised, kept by `look`)."""
    h, kept = x_BTD, None
    if self.attends:
      h, kept = blocks.block(w['block'], x_BTD, positions_BT, self.sizes, look)
    elif self.config.form == 'linear':
      h = jax.reshard(layers.linear(x_BTD, w['w_map'], 'D,DE->E'), mesh.act_BTD)
    return h, trunk.final_norm(h), kept

  def predict(self, trunk, out, batch, step, key) -> base.Predictions:
    form, K = self.config.form, self.config.depth
    read = [out.taps[n] for n in self.taps]
    if 'hidden' in self.config.detach:
      read = [jax.lax.stop_gradient(x_BTD) for x_BTD in read]

    def body(x_BTD, xs):
      w, own_BTD = xs
      x_BTD = x_BTD if own_BTD is None else own_BTD
      look = blocks.look_at_rows(batch.rows, self.sizes, self.window)
      h, ready, _ = self.head(trunk, w, x_BTD, batch.rows.positions, look)
      return (h if form == 'causal' else x_BTD), ready

    if self.sizes.remat != 'none':
      body = jax.checkpoint(
        body, policy=trunks.REMAT[self.sizes.remat], prevent_cse=K == 1
      )
    each = jnp.stack(read) if form == 'anticausal' else None
    _, hidden_KBTD = jax.lax.scan(body, read[0], (blocks.arrays(self), each))
    return base.Predictions(hidden_KBTD, trains_head='head' not in self.config.detach)

  # --- Drafting

  def lay_out(self, params: dict) -> dict:
    if self.config.form == 'linear':
      return {'w_map': tuple(layers.OutputsFirst.of(w, 1) for w in params['w_map'])}
    return {'block': blocks.lay_out(params['block'])} if params else {}

  def init_state(self, room: base.Room) -> State:
    shape = (room.batch, room.draft, self.sizes.width)
    size = (room.batch, room.length, self.window, room.block, room.cache)
    return State(
      [
        cache.empty(self.sizes, *size) if self.attends else None
        for _ in range(room.draft)
      ],
      jnp.zeros(shape, self.sizes.dtype, out_sharding=P(mesh.BATCH, None, None)),
    )

  def absorb(self, trunk, caches, state: State, block: base.Committed) -> State:
    taps = [block.out.taps[n] for n in self.taps]
    x_BTD = taps[0]
    positions = cache.positions(block.start, x_BTD.shape[1])
    kept, ready = [], []
    own = blocks.arrays(self)
    heads = blocks.unstack(own) if own else [own] * self.config.depth
    for k, old in enumerate(state.caches):
      x_BTD = taps[k] if self.config.form == 'anticausal' else x_BTD
      look = old and cache.look_at_cache(old, block.start, self.sizes, self.window)
      h, normed, new = self.head(trunk, heads[k], x_BTD, positions, look)
      x_BTD = h if self.config.form == 'causal' else x_BTD
      kept.append(new)
      ready.append(cache.take(normed, block.count - 1, 1))
    ready_BKD = jnp.concatenate(ready, 1)
    return State(kept, cache.keep(state.ready, ready_BKD, block.count))

  def propose(
    self, trunk, caches, state: State, draft: int, choose: base.Choose
  ) -> tuple[base.Draft, State]:
    logits_BKV = losses.head_logits(state.ready, trunk.head())
    return base.independent([logits_BKV[:, k] for k in range(draft)], choose), state
