"""Token order (TOP): one more unembedding scores every token by how near its next
occurrence is. It does not draft."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from mtpjax import losses, mesh
from mtpjax.drafters import base
from mtpjax.losses import Targets
from mtpjax.models import block as blocks
from mtpjax.models import trunk as trunks
from mtpjax.models.attention import MASKED


@dataclasses.dataclass
class Config(base.Config):
  window: int = 4  # W: tokens looked ahead

  def build(self, trunk, rngs):
    return TokenOrder(self, trunk, rngs)


class TokenOrder(base.Objective):
  config: Config

  def __init__(self, config, trunk, rngs):
    super().__init__(config)
    shape = (trunk.padded_vocab, trunk.width)
    std, dtype = trunk.embed_std, trunk.param_dtype
    self.unembedding = blocks.normal(rngs, shape, std, mesh.w_VD, dtype)

  def targets(self, batch, key):
    """Windows of the next tokens, [1, B, T, W]; -1 where there is none."""
    ahead = batch.targets(range(self.config.window))
    ids = jnp.where(ahead.valid, ahead.ids, -1)
    return Targets(
      jnp.moveaxis(ids, 0, -1)[None], jnp.any(ahead.valid, 0)[None], are_tokens=False
    )

  def predict(self, trunk, out, batch, step, key):
    return base.Predictions(
      trunk.final_norm(out.hidden)[None],
      trunks.Head(self.unembedding[...], trunk.head().vocab),
      functools.partial(order_loss, window=self.config.window),
    )


def order_loss(logits, ids, window):
  """Cross-entropy to softmax(W - distance) over the tokens that occur in the window."""
  vocabulary = losses.vocabulary(logits)
  scores = jnp.full_like(logits, MASKED)
  for n in reversed(range(window)):  # a nearer occurrence replaces a farther one
    scores = jnp.where(vocabulary == ids[..., n, None], float(window - n - 1), scores)
  value = -jnp.sum(jax.nn.softmax(scores, -1) * jax.nn.log_softmax(logits, -1), -1)
  return value, value, jnp.argmax(logits, -1) == ids[..., 0]
