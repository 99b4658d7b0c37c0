"""Windows of the tokens ahead, for objectives that score the whole vocabulary at once,
and the head that they score it with.

Only token ids exist for every position, [B, T, W]; what they say of each vocabulary
entry is built in the loss, for one chunk of logits at a time. Time and memory grow with
the window: it is meant to be tens of tokens long.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Int

from mtpjax import losses, mesh, schedules
from mtpjax.drafters import base
from mtpjax.drafters.base import Batch
from mtpjax.fields import ConfigError
from mtpjax.losses import Targets
from mtpjax.models import block as blocks
from mtpjax.models import trunk as trunks

NONE = -1  # no token: past the document's or the row's end, or not to be predicted
Carry = TypeVar('Carry')


@dataclasses.dataclass
class Config(base.Config):
  """Of an objective that looks at the tokens up to `window` ahead.

  Its λ is 1 by default: the papers add the losses.
  """

  weight: schedules.Schedule = dataclasses.field(
    default_factory=lambda: schedules.Constant(1.0)
  )
  window: int = 8  # W: the farthest token is W ahead; 1 is the next

  nearest: ClassVar[int] = 1  # the first that is looked at

  def finalize(self, trunk: trunks.Config, field: str) -> None:
    super().finalize(trunk, field)
    if self.depth != 1:
      raise ConfigError(
        f'{field}.depth',
        self.depth,
        'is not 1, and one prediction is made of the whole window',
        f'leave it out and set {field}.window',
      )
    if self.window < self.nearest:
      raise ConfigError(
        f'{field}.window',
        self.window,
        f'ends before token {self.nearest} ahead, where it begins',
        f'use at least {self.nearest}',
      )


def ahead(batch: Batch, config: Config) -> Targets:
  """Tokens nearest..W ahead of each position, ids [1, B, T, N]; -1 where none counts.

  A token counts if the next-token loss may ask for it there: it is in the same document
  and the loss mask has it. The position itself need not be a target: what precedes an
  answer learns of the answer. Where no token counts, nothing is predicted.
  """
  found = batch.targets(range(config.nearest - 1, config.window))
  ids_KBT = jnp.where(found.valid, found.ids, NONE)
  ids_BTN = jnp.moveaxis(ids_KBT, 0, -1)
  return Targets(ids_BTN[None], jnp.any(found.valid, 0)[None], are_tokens=False)


def fold(
  logits: Array, ids: Int[Array, '*rows N'], body: Callable, carry: Carry
) -> Carry:
  """carry = body(n, hit, carry) for n = N-1, …, 0, the nearest token last.

  `hit` is bool, shaped as the logits are: whether an entry is the n-th token. A loop,
  so that never more than a few of them exist at a time.
  """
  vocabulary, N = losses.vocabulary(logits), ids.shape[-1]

  def one(j, carry):
    n = N - 1 - j
    hit = vocabulary == jax.lax.dynamic_index_in_dim(ids, n, -1, keepdims=True)
    return body(n, hit, carry)

  return jax.lax.fori_loop(0, N, one, carry, unroll=min(N, 8))


def contained(logits: Array, ids: Int[Array, '*rows N']) -> Bool[Array, '*rows V']:
  """Whether each entry is one of the tokens."""
  none = jnp.zeros_like(logits, bool)
  return fold(logits, ids, lambda _, hit, found: found | hit, none)


def unembedding(trunk: trunks.Config, rngs: nnx.Rngs) -> nnx.Param:
  """A head of one's own, [V, D], made as the trunk's is."""
  shape = (trunk.padded_vocab, trunk.width)
  return blocks.normal(rngs, shape, trunk.embed_std, mesh.w_VD, trunk.param_dtype)
