"""Future bag of words: one more head says which tokens occur in the window ahead, in
any order and number (the handcrafted summary of Mahajan et al. 2025, arXiv 2510.14751,
there weighed by tf-idf and here not).

The bag is of the tokens 2..W ahead: the next one is the trunk's own task. Each entry is
a yes or no of its own; the loss is the binary cross-entropy *summed* over the
vocabulary, the negative log-likelihood of the bag, so that λ = 1 weighs a bag as it
weighs the few tokens in it, whatever the size of the vocabulary: the mean would make
λ = 1 vanish as the vocabulary grows.

Nearly all answers are no. The scores have a fixed prior added, the log-odds of W - 1
among V entries (Lin et al. 2017, arXiv 1708.02002, § 3.3), so that training starts at
the cost of a bag of that size and not at V·log 2. It does not draft: a decode needs
none of its parameters.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from mtpjax.drafters import base
from mtpjax.models import trunk as trunks
from mtpjax.objectives import windows


@dataclasses.dataclass
class Config(windows.Config):
  nearest = 2
  unit = 'nats/bag'
  agreement = 'whole bag'

  def build(self, trunk: trunks.Config, rngs: nnx.Rngs) -> Bag:
    return Bag(self, trunk, rngs)


class Bag(base.Objective):
  config: Config

  def __init__(self, config: Config, trunk: trunks.Config, rngs: nnx.Rngs):
    super().__init__(config)
    self.unembedding = windows.unembedding(trunk, rngs)

  def targets(self, batch, key):
    return windows.ahead(batch, self.config)

  def predict(self, trunk, out, batch, step, key):
    head = trunks.Head(self.unembedding[...], trunk.head().vocab)
    one = functools.partial(loss, prior=prior(self.config.window, head.vocab))
    return base.Predictions(trunk.final_norm(out.hidden)[None], head, one)


def prior(window: int, vocab: int) -> float:
  """Log-odds that an entry is in a bag of `window` - 1 tokens; 0 if that is likely."""
  rate = min((window - 1) / vocab, 0.5)
  return math.log(rate / (1 - rate))


def loss(logits, ids, prior):
  """-log p of the bag, each entry being in it with probability sigmoid(logit + prior);
  agreement is whether the entries of the bag score higher than all others.

  Args:
    ids: tokens of the window, -1 where none counts, [*shape, W - 1].
  """
  inside = windows.contained(logits, ids)
  scores = logits + prior
  value = jnp.sum(jax.nn.softplus(jnp.where(inside, -scores, scores)), -1)
  lowest = jnp.min(jnp.where(inside, logits, jnp.inf), -1)
  return value, value, lowest > jnp.max(jnp.where(inside, -jnp.inf, logits), -1)
