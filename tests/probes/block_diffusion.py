"""A block-diffusion drafter: one pass predicts all slots after an anchor (DFlash-like).

Training draws anchors. A block is [anchor, mask, ..., mask]; it sees itself in both
directions and features of the context strictly before the anchor. Slot j predicts
t[anchor + j], so slots are the depths and `rho` weighs them.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from mtpjax import mesh
from mtpjax.drafters import base
from mtpjax.losses import Targets
from mtpjax.models import attention, layers
from mtpjax.models import block as blocks
from mtpjax.models import trunk as trunks
from mtpjax.models.attention import Rows


@dataclasses.dataclass
class Config(base.Config):
  anchors: int = 4  # blocks a row

  def needs(self, trunk):
    return trunks.Needs(taps=(trunk.layers // 2, trunk.layers))

  def build(self, trunk, rngs):
    return BlockDiffusion(self, trunk, rngs)


class BlockDiffusion(base.Objective):
  config: Config

  def __init__(self, config, trunk, rngs):
    super().__init__(config)
    D, dtype = trunk.width, trunk.param_dtype
    self.sizes = trunk
    self.taps = config.needs(trunk).taps
    self.w_join = blocks.normal(
      rngs, (2, D, D), D**-0.5, mesh.stacked(mesh.w_DD), dtype
    )
    self.gain_context = blocks.constant(1.0, (D,), mesh.gain, dtype)
    self.mask = blocks.normal(rngs, (D,), 0.02, mesh.gain, dtype)
    self.block = blocks.Blocks(trunk, 1, rngs)
    self.gain_out = blocks.constant(1.0, (D,), mesh.gain, dtype)

  def draw(self, batch, key):
    """Anchors: indices of ordinary tokens, [B, A]; index 0 where there are too few."""
    rows = batch.rows.whole()
    usable = rows.segments != 0
    if rows.visible is not None:
      usable &= rows.visible
    score = jax.reshard(jax.random.uniform(key, usable.shape), mesh.whole_BT)
    order = jnp.argsort(jnp.where(usable, score, 2.0), 1)[:, : self.config.anchors]
    return jax.reshard(order, mesh.ids_BT)

  def targets(self, batch, key):
    ahead = batch.targets(range(self.config.depth))
    ids, valid = (
      jnp.stack([pick(x, batch.drawn) for x in jax.reshard(y, P(None, mesh.BATCH))])
      for y in (ahead.ids, ahead.valid)
    )
    return Targets(ids, valid)

  def predict(self, trunk, out, batch, step, key):
    sizes, eps = self.sizes, self.sizes.norm_epsilon
    w = jax.tree.map(lambda a: a[0], blocks.arrays(self.block))
    pairs = zip(self.taps, self.w_join[...], strict=True)
    parts = [layers.linear(out.taps[n], m, 'D,DE->E') for n, m in pairs]
    context = jax.reshard(functools.reduce(jnp.add, parts), mesh.act_BTD)
    context = layers.norm(context, self.gain_context[...], eps)
    _, keys, values = attention.project(w, context, batch.rows.positions, sizes)

    whole = batch.rows.whole()
    S = self.config.depth + 1

    def slots(x_BA):
      return merge(repeat(x_BA, 2, S))

    slot = merge(repeat(jnp.zeros_like(batch.drawn), 2, S) + jnp.arange(S)[None, None])
    at = slots(pick(whole.positions, batch.drawn))
    tokens = slots(pick(jax.reshard(batch.tokens, mesh.whole_BT), batch.drawn))
    segments = slots(pick(whole.segments, batch.drawn))
    mask = self.mask[...].astype(context.dtype)[None, None]
    x = jnp.where((slot == 0)[..., None], trunk.embed(tokens), mask)
    queries = Rows(at + slot, segments, order=at - 1)

    def look(q, k, v):
      def own(y):
        """Every query's whole block: [B, A·S, S, G, C]."""
        return merge(repeat(part(y, S), 2, S))

      seen = attention.visibility(queries, whole)
      mine = own(k), own(v), jnp.ones(S, bool)
      cap = sizes.attention_softcap
      return attention.attend(q, keys, values, seen, cap, mine), None

    x, _ = blocks.block(w, x, queries.positions, sizes, look)
    x = layers.norm(x, self.gain_out[...], eps)
    return base.Predictions(jnp.moveaxis(part(x, S)[:, :, 1:], 2, 0))


def pick(x_BT, at_BA):
  """x[b, at[b, a]], x whole in time."""
  hit = at_BA[..., None] == jnp.arange(x_BT.shape[1])[None, None]
  return jnp.sum(jnp.where(hit, x_BT[:, None], 0), -1).astype(x_BT.dtype)


def repeat(x, axis, count):
  """A new axis of that length."""
  spec = list(jax.typeof(x).sharding.spec)
  shape = (*x.shape[:axis], count, *x.shape[axis:])
  spec.insert(axis, None)
  return jnp.broadcast_to(jnp.expand_dims(x, axis), shape, out_sharding=P(*spec))


def merge(x):
  """[B, A, S, ...] -> [B, A·S, ...]; the mesh's shares of A stay where they are."""
  B, A, S, *rest = x.shape
  spec = jax.typeof(x).sharding.spec
  return x.reshape((B, A * S, *rest), out_sharding=P(*spec[:2], *spec[3:]))


def part(x, count):
  """[B, A·S, ...] -> [B, A, S, ...]."""
  B, N, *rest = x.shape
  spec = jax.typeof(x).sharding.spec
  shape = (B, N // count, count, *rest)
  return x.reshape(shape, out_sharding=P(*spec[:2], None, *spec[2:]))
