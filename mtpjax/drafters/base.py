"""The contract. An objective learns from what the trunk computed, beyond the next
token; a drafter is an objective that can also propose tokens.

Training, evaluation and sampling know only this file, never a kind. A new idea is one
file with a `Config` and an `Objective`, and one file in `configs/`.

An objective never computes its own loss and never shifts hidden states: it says what
should be predicted (`targets`) and from which hidden states (`predict`). Weights, the
division by the true counts, chunking and sharding happen in one place for all of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from mtpjax import losses, schedules
from mtpjax.fields import ConfigError
from mtpjax.losses import Targets
from mtpjax.models import trunk as trunks
from mtpjax.models.attention import Leaf, Rows
from mtpjax.models.trunk import Needs, Trunk, TrunkOutput


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Batch:
  """Rows of tokens, packed documents side by side.

  Attributes:
    tokens: int [B, T].
    mask: loss mask of targets, whether the token at i may be predicted: bool [B, T].
    rows: where the tokens stand; `rows.segments` is 0 on padding.
    whole_path: train only what a drafter of a frozen trunk will be asked for.
  """

  tokens: Leaf
  mask: Leaf
  rows: Rows
  whole_path: bool = dataclasses.field(default=False, metadata={'static': True})

  def targets(self, depths) -> Targets:
    """Tokens at those depths after each position; the one place where labels shift."""
    return losses.depth_targets(
      self.tokens, self.rows.segments, self.mask, list(depths), self.whole_path
    )


@dataclasses.dataclass
class Predictions:
  """Hidden states from which each depth is predicted.

  Attributes:
    hidden: normalised, ready for the head, [K, B, T, D].
    head: None is the trunk's.
    loss: None is cross-entropy to token ids.
    trains_head: whether this loss changes the head.
  """

  hidden: Float[Array, 'K B T D']
  head: trunks.Head | None = None
  loss: losses.Loss | None = None
  trains_head: bool = True


@dataclasses.dataclass
class Config:
  """What every objective has: its depth and its weight in the loss.

  L = L_next + λ(fraction of training) · Σ_k w_k L_k with w_k ∝ ρ^(k-1), Σ w_k = 1.
  """

  depth: int = 1  # K: how many predictions beyond the next token
  weight: schedules.Schedule = dataclasses.field(default_factory=schedules.Piecewise)
  rho: float = 1.0  # 1: all depths alike; below 1 favours near tokens

  def needs(self, trunk: trunks.Config) -> Needs:
    """What the trunk must hand over; `trunk` is as configured, no layer given up."""
    return Needs()

  def finalize(self, trunk: trunks.Config, field: str) -> None:
    """Refuses what cannot be built, naming `field`."""
    self.weight.finalize(f'{field}.weight')
    if self.depth < 1:
      raise ConfigError(
        f'{field}.depth', self.depth, 'is not positive', f'use {field}=None for none'
      )
    if not self.rho > 0:
      raise ConfigError(f'{field}.rho', self.rho, 'is not positive', 'use 1 for equal')

  def build(self, trunk: trunks.Config, rngs: nnx.Rngs) -> Objective:
    raise NotImplementedError(f'{type(self)} builds nothing')

  def conventions(self) -> dict[str, Any]:
    """What somebody must know to run it elsewhere; stored in every checkpoint."""
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    for name in ('weight', 'rho'):
      fields.pop(name)
    kind = type(self).__module__.rpartition('.')[2]
    return {'kind': kind, 'modules': self.depth, **fields}


class Objective(nnx.Module):
  """Learns from what the trunk computed. Subclasses define at least `predict`."""

  def __init__(self, config: Config):
    self.config = config

  def prepare(self, batch: Batch, key: Key[Array, '']) -> Batch:
    """May insert tokens: returns a batch with other rows, masks and visibility."""
    return batch

  def targets(self, batch: Batch, key: Key[Array, '']) -> Targets:
    """What is predicted, from integers and masks alone, before any forward pass."""
    return batch.targets(range(1, self.config.depth + 1))

  def predict(
    self,
    trunk: Trunk,
    out: TrunkOutput,
    batch: Batch,
    step: Int[Array, ''],
    key: Key[Array, ''] | None,
  ) -> Predictions:
    """Hidden states of every depth, [K, B, T, D].

    Args:
      out: holds exactly what `Config.needs` asked for.
      key: None in evaluation, where nothing is random.
    """
    raise NotImplementedError(f'{type(self)} predicts nothing')


def check_detach(detach: tuple[str, ...], known: tuple[str, ...], field: str) -> None:
  for name in detach:
    if name not in known:
      raise ConfigError(
        f'{field}.detach',
        name,
        'is no shared tensor',
        f'choose from {", ".join(known)}',
      )
