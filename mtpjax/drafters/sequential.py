"""Sequential MTP modules: DeepSeek-V3's, and the shared, multi-step form of FastMTP,
Qwen3-Next, MiMo and Nemotron.

Depth k combines the hidden state of depth k-1 with the embedding of t[i+k]:
x_i = W [N_e(e(t_{i+k})) ; N_h(h^{k-1}_i)], one block, N_out, the trunk's embedding and
head (DeepSeek-V3, arXiv 2412.19437, equations 21 to 23).
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
from mtpjax.models import attention, layers
from mtpjax.models import block as blocks
from mtpjax.models import trunk as trunks


@dataclasses.dataclass
class Config(base.Config):
  share: bool = True  # one module repeated, or one a depth
  hidden_norm: Literal['pre', 'post'] = 'post'  # trunk hidden before / after its norm
  chain_norm: Literal['pre', 'post'] = 'post'  # the chained hidden before / after N_out
  hidden_source: Literal['chained', 'trunk'] = 'chained'  # h^{k-1}, or h^0 every time
  concat: Literal['embed_hidden', 'hidden_embed'] = 'embed_hidden'
  # 'depth': each depth has its own keys and values over the rows. 'rows': step k is a
  # row at position i+k-1 that sees step 1's rows up to i and its own earlier steps, as
  # vLLM, SGLang and EAGLE serve a module that is reused.
  attend: Literal['depth', 'rows'] = 'depth'
  detach: tuple[str, ...] = ()  # of 'hidden', 'embedding', 'head': no gradient into it
  zero_first_embedding: bool = False  # of a row at position 0, as serving engines do
  # 'trunk': the kind of the trunk's last layer, its window included. 'dense': a plain
  # dense block that attends to everything.
  block: Literal['trunk', 'dense'] = 'trunk'

  def finalize(self, trunk: trunks.Config, field: str) -> None:
    super().finalize(trunk, field)
    base.check_detach(self.detach, ('hidden', 'embedding', 'head'), field)
    if self.attend == 'rows' and not self.share and self.depth > 1:
      raise ConfigError(
        f'{field}.attend',
        self.attend,
        f'with {field}.share=False has no engine and no meaning: the rows of one cache '
        'would come from different modules',
        f"use {field}.share=True or {field}.attend='depth'",
      )

  def build(self, trunk: trunks.Config, rngs: nnx.Rngs) -> Sequential:
    return Sequential(self, trunk, rngs)

  def conventions(self) -> dict[str, Any]:
    shared = ['embedding', 'head', *(['module'] if self.share else [])]
    return {
      **super().conventions(),
      'modules': 1 if self.share else self.depth,
      'shared': shared,
      'teacher_forcing_inputs': 'depth k at position i reads the true token t[i+k]',
    }


class Sequential(base.Objective):
  config: Config

  def __init__(self, config: Config, trunk: trunks.Config, rngs: nnx.Rngs):
    super().__init__(config)
    self.sizes = trunk
    self.window = trunk.window(trunk.layers - 1) if config.block == 'trunk' else 0
    count, D = (1 if config.share else config.depth), trunk.width
    dtype = trunk.param_dtype

    def gains():
      return blocks.constant(1.0, (count, D), mesh.stacked(mesh.gain), dtype)

    self.gain_embedding = gains()
    self.gain_hidden = gains()
    self.w_join = blocks.normal(
      rngs, (count, 2, D, D), (2 * D) ** -0.5, mesh.stacked(mesh.w_2DD), dtype
    )
    self.block = blocks.Blocks(trunk, count, rngs)
    self.gain_out = gains()

  def weights(self) -> dict:
    """Parameters by name, stacked over modules."""
    return blocks.arrays(self)

  def first_hidden(self, trunk: trunks.Trunk, hidden_BTD):
    """h^0: what depth 1 takes of the trunk."""
    if self.config.hidden_norm == 'post':
      hidden_BTD = trunk.final_norm(hidden_BTD)
    if 'hidden' in self.config.detach:
      hidden_BTD = jax.lax.stop_gradient(hidden_BTD)
    return hidden_BTD

  def module(self, w: dict, h_BTD, e_BTD, positions_BT, look):
    """One depth of one module: (hidden for the head, hidden to chain, kept by `look`).

    Args:
      h_BTD: hidden of the depth before.
      e_BTD: embedding of the token to condition on.
      positions_BT: rotary positions of the rows.
    """
    config, eps = self.config, self.sizes.norm_epsilon
    if config.zero_first_embedding:
      e_BTD = jnp.where((positions_BT == 0)[..., None], 0, e_BTD)
    e = layers.norm(e_BTD, w['gain_embedding'], eps)
    h = layers.norm(h_BTD, w['gain_hidden'], eps)
    pair = (e, h) if config.concat == 'embed_hidden' else (h, e)
    x = layers.linear(pair[0], w['w_join'][0], 'D,DE->E')
    x = x + layers.linear(pair[1], w['w_join'][1], 'D,DE->E')
    x, kept = blocks.block(w['block'], x, positions_BT, self.sizes, look)
    out = layers.norm(x, w['gain_out'], eps)
    return out, (out if config.chain_norm == 'post' else x), kept

  def predict(self, trunk, out, batch, step, key) -> base.Predictions:
    config, K = self.config, self.config.depth
    rows = batch.rows
    tokens_KBT, _ = losses.depth_inputs(batch.tokens, rows.segments, range(1, K + 1))
    h0 = self.first_hidden(trunk, out.hidden)
    table = trunk.embedding[...]
    if 'embedding' in config.detach:
      table = jax.lax.stop_gradient(table)
    w = self.weights()
    one = jax.tree.map(lambda a: a[0], w)
    earlier = self._no_steps(h0) if config.attend == 'rows' else None

    def body(carry, xs):
      h, earlier = carry
      ids, index, own = xs
      e = layers.embed(table, ids, h.dtype)
      positions = rows.positions
      if config.attend == 'depth':
        look = blocks.look_at_rows(rows, self.sizes, self.window)
      else:
        positions = positions + index
        look = self._look_at_steps(rows, index, earlier)
      h = h0 if config.hidden_source == 'trunk' else h
      w = one if config.share else own
      y, h, kept = self.module(w, h, e, positions, look)
      return (h, kept if config.attend == 'rows' else None), y

    if self.sizes.remat != 'none':
      body = jax.checkpoint(
        body, policy=trunks.REMAT[self.sizes.remat], prevent_cse=False
      )
    xs = (tokens_KBT, jnp.arange(K), None if config.share else w)
    _, hidden_KBTD = jax.lax.scan(body, (h0, earlier), xs)
    return base.Predictions(hidden_KBTD, trains_head='head' not in config.detach)

  def _no_steps(self, h_BTD):
    """Room for every step's keys and values: two arrays [B, T, K, G, C]."""
    B, T, _ = h_BTD.shape
    G, C = self.sizes.kv_heads, self.sizes.head_width
    assert G is not None and C is not None
    spec = jax.P(mesh.BATCH, 'context', None, mesh.heads_axis(G), None)
    room = jnp.zeros((B, T, self.config.depth, G, C), h_BTD.dtype, out_sharding=spec)
    return room, room

  def _look_at_steps(self, rows: attention.Rows, index, earlier):
    """`attend: rows` for step `index` (from 0): step 0's rows up to i, and i's own."""

    def look(q, k, v):
      put = jax.lax.dynamic_update_index_in_dim
      keys, values = (put(a, x, index, 2) for a, x in zip(earlier, (k, v), strict=True))
      seen = attention.visibility(rows, rows.whole(), self.window, ahead=index)
      step = jnp.arange(self.config.depth)
      mine = (step > 0) & (step <= index)
      if self.window:
        mine &= index - step < self.window
      o = attention.attend(
        q,
        keys[:, :, 0],
        values[:, :, 0],
        seen,
        self.sizes.attention_softcap,
        own=(keys, values, mine),
      )
      return o, (keys, values)

    return look
