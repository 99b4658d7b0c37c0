"""A drafter without keys and values of its own: narrow, query-only layers that look at
the trunk's last (Gemma-4-like), with its own unembedding."""

from __future__ import annotations

import dataclasses

import jax

from mtpjax import losses, mesh
from mtpjax.drafters import base
from mtpjax.models import attention, layers
from mtpjax.models import block as blocks
from mtpjax.models import trunk as trunks


@dataclasses.dataclass
class Config(base.Config):
  width: int = 8

  def needs(self, trunk):
    return trunks.Needs(kv_layers=(trunk.layers - 1,))

  def build(self, trunk, rngs):
    return KVSharing(self, trunk, rngs)


class KVSharing(base.Objective):
  config: Config

  def __init__(self, config, trunk, rngs):
    super().__init__(config)
    D, H, C, V = trunk.width, trunk.heads, trunk.head_width, trunk.padded_vocab
    d, F = config.width, 2 * config.width
    self.sizes = trunk

    def weight(shape, fan_in, spec):
      return blocks.normal(rngs, shape, fan_in**-0.5, spec, trunk.param_dtype)

    def gain():
      return blocks.constant(1.0, (d,), mesh.gain, trunk.param_dtype)

    self.w_pre = weight((2, D, d), 2 * D, mesh.stacked(mesh.w_DD))
    self.gain_attention = gain()
    self.w_query = weight((d, H, C), d, mesh.w_DHC)
    self.w_mix = weight((H, C, d), H * C, mesh.w_HCD)
    self.gain_ffn = gain()
    self.w_up = weight((d, F), d, mesh.w_DF)
    self.w_gate = weight((d, F), d, mesh.w_DF)
    self.w_down = weight((F, d), F, mesh.w_FD)
    self.w_post = weight((d, D), d, mesh.w_DF)
    self.gain_out = gain()
    self.unembedding = weight((V, d), d, mesh.w_VD)

  def predict(self, trunk, out, batch, step, key):
    sizes, w, rows = self.sizes, blocks.arrays(self), batch.rows
    last = sizes.layers - 1
    keys, values = out.keys[last]
    depths = range(1, self.config.depth + 1)
    tokens_KBT, _ = losses.depth_inputs(batch.tokens, rows.segments, depths)

    def body(h, ids):
      e = sizes.width**0.5 * trunk.embed(ids)
      x = layers.linear(e, w['w_pre'][0], 'D,DE->E')
      x = jax.reshard(x + layers.linear(h, w['w_pre'][1], 'D,DE->E'), mesh.act_BTD)
      # The position stays that of the row at every depth.
      y = layers.norm(x, w['gain_attention'], sizes.norm_epsilon)
      (q,) = attention.project(w, y, rows.positions, sizes, only_queries=True)
      seen = attention.visibility(rows, rows.whole(), sizes.window(last))
      o = attention.attend(q, keys, values, seen, sizes.attention_softcap)
      x = x + attention.mix(w, o)
      x = x + layers.swiglu(w, layers.norm(x, w['gain_ffn'], sizes.norm_epsilon))
      h = layers.linear(x, w['w_post'], 'D,DE->E')
      h = jax.reshard(h, mesh.act_BTD)
      return h, layers.norm(x, w['gain_out'], sizes.norm_epsilon)

    _, hidden_KBTD = jax.lax.scan(body, trunk.final_norm(out.hidden), tokens_KBT)
    head = trunks.Head(self.unembedding[...], trunk.head().vocab)
    return base.Predictions(hidden_KBTD, head)
