"""Registers (MuToR; Gerontopoulos et al. 2025, arXiv 2505.10518): after each token
comes a register that no ordinary token sees, and that predicts the token d ahead with
the trunk's own layers and head.

A register sees the tokens up to its own, and itself, but no other register. d is drawn
from 1..d_max for each row and step. All registers have one learned embedding; what says
d is their position, that of the token before the predicted one, i + d - 1, from where
the trunk would predict it as its next. The paper's loss, (1 - a) next + a registers, is
λ = a / (1 - a); its recommended a = 0.3 and d_max = 4 are the defaults.

Registers are appended to the row, so that ordinary tokens stay side by side; order and
visibility do the interleaving. Training costs twice the rows, a decode nothing: the
only parameter is the first spare row of the trunk's table, which is never scored. It
does not draft, and learns nothing on a frozen trunk.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from mtpjax import mesh, schedules
from mtpjax.drafters import base
from mtpjax.fields import ConfigError
from mtpjax.losses import Targets
from mtpjax.models import trunk as trunks


@dataclasses.dataclass
class Config(base.Config):
  weight: schedules.Schedule = dataclasses.field(
    default_factory=lambda: schedules.Constant(3 / 7)
  )
  farthest: int = 4  # d_max

  def finalize(self, trunk: trunks.Config, field: str) -> None:
    super().finalize(trunk, field)
    if self.depth != 1:
      raise ConfigError(
        f'{field}.depth',
        self.depth,
        'is not 1, and a register makes one prediction',
        f'leave it out and set {field}.farthest',
      )
    if self.farthest < 1:
      raise ConfigError(
        f'{field}.farthest', self.farthest, 'is no token ahead', 'use at least 1'
      )
    if trunk.vocab is not None and trunk.padded_vocab == trunk.vocab:
      more = trunk.vocab_multiple + max(trunk.vocab_multiple // 2, 1)
      fits = next(n for n in itertools.count(more) if trunk.vocab % n)
      raise ConfigError(
        'trunk.vocab_multiple',
        trunk.vocab_multiple,
        'leaves no spare row for the register token',
        f'use a number that does not divide {trunk.vocab}, such as {fits}',
      )

  def kernels(self):
    return 'none'

  def build(self, trunk: trunks.Config, rngs: nnx.Rngs) -> Registers:
    assert trunk.vocab is not None
    return Registers(self, trunk.vocab)

  def conventions(self) -> dict[str, Any]:
    return {**super().conventions(), 'register_token': 'the first past the vocabulary'}


class Registers(base.Objective):
  config: Config

  def __init__(self, config: Config, token: int):
    super().__init__(config)
    self.token = token

  def prepare(self, batch, key):
    if batch.rows.visible is not None:
      raise ConfigError(
        'objectives', 'registers, registers', 'hold registers twice', 'leave one out'
      )
    tokens, mask, rows = whole((batch.tokens, batch.mask, batch.rows))
    shape = (len(tokens), 1)
    d = jax.random.randint(key, shape, 1, self.config.farthest + 1, tokens.dtype)
    d = jax.reshard(d, mesh.whole_BT)
    no = jnp.zeros_like(mask)
    rows = dataclasses.replace(
      rows,
      positions=append(rows.positions, rows.positions + d - 1),
      segments=append(rows.segments, rows.segments),
      order=append(rows.causal, rows.causal),
      visible=append(~no, no),
    )
    fill = jnp.full_like(tokens, self.token)
    return dataclasses.replace(
      batch, tokens=append(tokens, fill), mask=append(mask, no), rows=rows
    )

  def targets(self, batch, key):
    """Of the registers; ordinary tokens have none."""
    ahead = batch.targets(range(self.config.farthest))
    T = batch.tokens.shape[1] // 2
    distance = whole(batch.rows.positions - batch.rows.causal)[:, T:]
    ids, valid = jnp.zeros_like(distance), jnp.zeros_like(distance, bool)
    for n in range(self.config.farthest):
      chosen = distance == n
      ids = jnp.where(chosen, whole(ahead.ids[n])[:, :T], ids)
      valid = valid | (chosen & whole(ahead.valid[n])[:, :T])
    ids, valid = (append(jnp.zeros_like(x), x) for x in (ids, valid))
    return Targets(ids[None], valid[None])

  def predict(self, trunk, out, batch, step, key):
    return base.Predictions(trunk.final_norm(out.hidden)[None])


def whole(tree):
  """With time unsharded: integers and masks only."""
  return jax.tree.map(lambda x: jax.reshard(x, mesh.whole_BT), tree)


def append(x_BT: Array, more_BT: Array) -> Array:
  return jax.reshard(jnp.concatenate([x_BT, more_BT], 1), mesh.ids_BT)
