"""Registers (MuToR-like): after each token a register that no ordinary token sees and
that predicts the token d ≤ d_max ahead, d drawn at random.

Registers are appended to the row; their causal order is that of the token they follow,
their position that of the token before the one they predict. Their token is the first
spare row of the trunk's table, which is never scored.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from mtpjax import mesh
from mtpjax.drafters import base
from mtpjax.fields import ConfigError
from mtpjax.losses import Targets


@dataclasses.dataclass
class Config(base.Config):
  farthest: int = 3  # d_max

  def finalize(self, trunk, field):
    super().finalize(trunk, field)
    if trunk.padded_vocab == trunk.vocab:
      raise ConfigError(
        'trunk.vocab_multiple',
        trunk.vocab_multiple,
        'leaves no spare row for the register token',
        f'use a number that does not divide {trunk.vocab}',
      )

  def build(self, trunk, rngs):
    return Registers(self, trunk)


class Registers(base.Objective):
  config: Config

  def __init__(self, config, trunk):
    super().__init__(config)
    self.token = trunk.vocab

  def prepare(self, batch, key):
    tokens, mask, rows = whole((batch.tokens, batch.mask, batch.rows))
    ahead = jax.random.randint(key, tokens.shape, 1, self.config.farthest + 1)
    ahead = jax.reshard(ahead, mesh.whole_BT)
    no = jnp.zeros_like(mask)
    visible = ~no if rows.visible is None else rows.visible
    return dataclasses.replace(
      batch,
      tokens=append(tokens, jnp.full_like(tokens, self.token)),
      mask=append(mask, no),
      rows=dataclasses.replace(
        rows,
        positions=append(rows.positions, rows.positions + ahead - 1),
        segments=append(rows.segments, rows.segments),
        order=append(rows.causal, rows.causal),
        visible=append(visible, no),
      ),
    )

  def targets(self, batch, key):
    ahead = batch.targets(range(self.config.farthest))
    distance = whole(batch.rows.positions - batch.rows.causal)
    T = distance.shape[1] // 2
    ids, valid = jnp.zeros_like(distance[:, T:]), jnp.zeros_like(distance[:, T:], bool)
    for d in range(self.config.farthest):
      chosen = distance[:, T:] == d
      ids = jnp.where(chosen, whole(ahead.ids[d])[:, :T], ids)
      valid = jnp.where(chosen, whole(ahead.valid[d])[:, :T], valid)
    ids, valid = (append(jnp.zeros_like(x), x) for x in (ids, valid))
    return Targets(ids[None], valid[None])

  def predict(self, trunk, out, batch, step, key):
    return base.Predictions(trunk.final_norm(out.hidden)[None])


def whole(tree):
  return jax.tree.map(lambda x: jax.reshard(x, mesh.whole_BT), tree)


def append(x_BT, more_BT):
  return jax.reshard(jnp.concatenate([x_BT, more_BT], 1), mesh.ids_BT)
