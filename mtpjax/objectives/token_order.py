"""Token order prediction (TOP; Zuhri et al. 2025, arXiv 2508.19228): one more
unembedding scores every vocabulary entry by how near its next occurrence is.

Entry v, whose next occurrence is d(v) ≤ W tokens ahead, has the target probability
softmax over all such v of W - d(v); entries that do not occur have none. The loss is
the cross-entropy to it, whose least value is the target's own entropy, not 0. It does
not draft: a decode needs none of its parameters.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from mtpjax.drafters import base
from mtpjax.models import trunk as trunks
from mtpjax.models.attention import MASKED
from mtpjax.objectives import windows


@dataclasses.dataclass
class Config(windows.Config):
  unit = 'nats/window'
  agreement = 'nearest'

  def build(self, trunk: trunks.Config, rngs: nnx.Rngs) -> TokenOrder:
    return TokenOrder(self, trunk, rngs)


class TokenOrder(base.Objective):
  config: Config

  def __init__(self, config: Config, trunk: trunks.Config, rngs: nnx.Rngs):
    super().__init__(config)
    self.unembedding = windows.unembedding(trunk, rngs)

  def targets(self, batch, key):
    return windows.ahead(batch, self.config)

  def predict(self, trunk, out, batch, step, key):
    head = trunks.Head(self.unembedding[...], trunk.head().vocab)
    return base.Predictions(trunk.final_norm(out.hidden)[None], head, loss)


def loss(logits, ids):
  """Cross-entropy to softmax(W - distance) over the tokens that occur; agreement is of
  the highest score with the nearest token that counts.

  Args:
    ids: the tokens 1..W ahead, -1 where none counts, [*shape, W].
  """
  W = ids.shape[-1]

  def nearer(n, hit, scores):
    return jnp.where(hit, (W - 1 - n).astype(scores.dtype), scores)

  scores = windows.fold(logits, ids, nearer, jnp.full_like(logits, MASKED))
  value = -jnp.sum(jax.nn.softmax(scores, -1) * jax.nn.log_softmax(logits, -1), -1)
  return value, value, jnp.argmax(logits, -1) == jnp.argmax(scores, -1)
