"""Parallel heads (Gloeckle et al. 2024, arXiv 2404.19737): K extra heads, each one
block on the same hidden state, with the trunk's final norm and unembedding.

As in the authors' code, head 1 is the trunk's last layer, so the extra heads read the
output of the layer before it. Their ablation, `form: linear`, has a matrix in place of
a block and reads the last layer's output.
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


@dataclasses.dataclass
class Config(base.Config):
  form: Literal['block', 'linear'] = 'block'
  match_parameters: bool = False  # the trunk gives up a layer for each extra head
  detach: tuple[str, ...] = ()  # of 'hidden', 'head': no gradient into it

  def needs(self, trunk: trunks.Config) -> trunks.Needs:
    given_up = self.depth if self.match_parameters else 0
    tap = trunk.layers - given_up - (self.form == 'block')
    return trunks.Needs(taps=(tap,), layers_given_up=given_up)

  def finalize(self, trunk: trunks.Config, field: str) -> None:
    super().finalize(trunk, field)
    base.check_detach(self.detach, ('hidden', 'head'), field)
    if self.match_parameters and self.form == 'linear':
      raise ConfigError(
        f'{field}.match_parameters',
        True,
        'takes a layer off the trunk for each head, and a linear head is no layer',
        f"use {field}.form='block', or False",
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
      'shared': ['final_norm', 'head'],
      'teacher_forcing_inputs': 'none: every head reads only the trunk',
    }


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
  """Keys and values of each head, and what the last row gives for the unembedding.

  `ready` is [B, K, D].
  """

  caches: Leaf
  ready: Leaf


class Parallel(base.Drafter):
  config: Config

  def __init__(self, config: Config, trunk: trunks.Config, rngs: nnx.Rngs):
    super().__init__(config)
    self.sizes = trunk
    self.window = trunk.window(trunk.layers - 1)
    self.tap = trunk.layers - (config.form == 'block')
    if config.form == 'block':
      self.block = blocks.Blocks(trunk, config.depth, rngs)
    else:
      D, spec = trunk.width, mesh.stacked(mesh.w_DD)
      shape = (config.depth, D, D)
      self.w_map = blocks.normal(rngs, shape, D**-0.5, spec, trunk.param_dtype)

  def head(self, trunk, w: dict, x_BTD, positions_BT, look):
    """One head: (its normalised hidden, kept by `look`)."""
    if self.config.form == 'linear':
      x = layers.linear(x_BTD, w['w_map'], 'D,DE->E')
      return trunk.final_norm(jax.reshard(x, mesh.act_BTD)), None
    h, kept = blocks.block(w['block'], x_BTD, positions_BT, self.sizes, look)
    return trunk.final_norm(h), kept

  def predict(self, trunk, out, batch, step, key) -> base.Predictions:
    x_BTD = out.taps[self.tap]
    if 'hidden' in self.config.detach:
      x_BTD = jax.lax.stop_gradient(x_BTD)

    def body(x_BTD, w):
      look = blocks.look_at_rows(batch.rows, self.sizes, self.window)
      h, _ = self.head(trunk, w, x_BTD, batch.rows.positions, look)
      return x_BTD, h

    if self.sizes.remat != 'none':
      body = jax.checkpoint(
        body,
        policy=trunks.REMAT[self.sizes.remat],
        prevent_cse=self.config.depth == 1,
      )
    _, hidden_KBTD = jax.lax.scan(body, x_BTD, blocks.arrays(self))
    return base.Predictions(hidden_KBTD, trains_head='head' not in self.config.detach)

  # --- Drafting

  def lay_out(self, params: dict) -> dict:
    if self.config.form == 'linear':
      return {'w_map': tuple(layers.OutputsFirst.of(w, 1) for w in params['w_map'])}
    return {'block': blocks.lay_out(params['block'])}

  def init_state(self, room: base.Room) -> State:
    shape = (room.batch, room.draft, self.sizes.width)
    size = (self.sizes, room.batch, room.length, self.window, room.block)
    attends = self.config.form == 'block'
    return State(
      [cache.empty(*size) if attends else None for _ in range(room.draft)],
      jnp.zeros(shape, self.sizes.dtype, out_sharding=P(mesh.BATCH, None, None)),
    )

  def absorb(self, trunk, caches, state: State, block: base.Committed) -> State:
    x_BTD = block.out.taps[self.tap]
    positions = cache.positions(block.start, x_BTD.shape[1])
    kept, ready = [], []
    heads = blocks.unstack(blocks.arrays(self))[: len(state.caches)]
    for w, old in zip(heads, state.caches, strict=True):
      look = old and cache.look_at_cache(old, block.start, self.sizes, self.window)
      h, new = self.head(trunk, w, x_BTD, positions, look)
      kept.append(new)
      ready.append(cache.take(h, block.count - 1, 1))
    ready_BKD = jnp.concatenate(ready, 1)
    return State(kept, cache.keep(state.ready, ready_BKD, block.count))

  def propose(
    self, trunk, caches, state: State, draft: int, choose: base.Choose
  ) -> tuple[base.Draft, State]:
    logits_BKV = losses.head_logits(state.ready, trunk.head())
    chosen = [choose(logits_BKV[:, k], k) for k in range(draft)]
    return base.chain([t for t, _ in chosen], [q for _, q in chosen]), state
