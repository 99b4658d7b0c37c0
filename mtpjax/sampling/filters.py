"""From logits to the distribution that is sampled: temperature, top-k, top-p, min-p,
after what `processors` does.

All in float32 or wider, each setting a row's own, greedy rows among them: where the
temperature is 0 a row becomes one-hot at its most likely token, the lowest id on ties,
so that the rules in `verify` need not know of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from mtpjax import mesh
from mtpjax.fields import ConfigError
from mtpjax.models.attention import Leaf
from mtpjax.sampling import processors, stops
from mtpjax.sampling.processors import Processing
from mtpjax.sampling.stops import Strings

STOPS = 16  # stop tokens of a row, at most: a shape that is compiled for


@dataclasses.dataclass(frozen=True)
class Settings:
  """How one prompt is continued. The defaults are greedy.

  Attributes:
    budget: new tokens at most.
    temperature: 0 takes the most likely token, the lowest id on ties.
    top_k: only the k most likely tokens; 0 is off.
    top_p: only the fewest tokens that hold this much probability, after top-k; 1 is
      off.
    min_p: only tokens with this share of the largest probability, after top-p; 0 is
      off.
    seed: the draws of a prompt depend on it and on nothing beside it.
    stop: token ids; the first of them ends the text, and is its last token. None is
      what ends a document, where a tokenizer says so: a `Sampler` then stops at its
      `end`. () is no stop at all.
    draft: tokens to draft a round, at most; None is as many as was compiled for.
    logit_bias: what is added to the logit of a token, by its id; -inf bans it.
    min_tokens: new tokens before a token of `stop` may come, or a stop string end.
    repetition_penalty: of tokens in prompt and text: logits above 0 are divided by it,
      those below multiplied (Keskar et al. 2019); 1 is off.
    presence_penalty: taken off the logit of every token in the text; 0 is off.
    frequency_penalty: the same for every time that it is there; 0 is off.
    stop_strings: a text ends with the token in which it holds one of them, be it in the
      middle of tokens; the prompt is no part of it. For this the tokens must have a
      text: a `Sampler` has, and ends its own before the string.

  Bias, minimum length and penalties apply in this order, before the temperature. What a
  token is judged by is the text before it, drafts among it.
  """

  budget: int = 64
  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  seed: int = 0
  stop: tuple[int, ...] | None = None
  draft: int | None = None
  logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
  min_tokens: int = 0
  repetition_penalty: float = 1.0
  presence_penalty: float = 0.0
  frequency_penalty: float = 0.0
  stop_strings: tuple[str, ...] = ()

  def __post_init__(self):
    if isinstance(self.logit_bias, Mapping):  # settings are hashable
      object.__setattr__(self, 'logit_bias', tuple(self.logit_bias.items()))

  def sample(self, number: int) -> Settings:
    """Those of a prompt's further samples, a seed each; number 0 is itself."""
    if not number:
      return self
    seed = np.random.SeedSequence((self.seed, number)).generate_state(1)[0]
    return dataclasses.replace(self, seed=int(seed))

  def check(self, vocab: int) -> None:
    """Raises ConfigError on what cannot be honoured."""
    for name in ('budget', 'top_k', 'seed', 'min_tokens', 'draft'):
      if name != 'draft' or self.draft is not None:
        check_whole(name, getattr(self, name))
    for name in ('temperature', 'top_p', 'min_p'):
      value = getattr(self, name)
      if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise ConfigError(name, value, 'is no number', 'use a float')
      if not abs(value) <= float(np.finfo(np.float32).max):
        raise ConfigError(name, value, 'is not finite', 'use a finite number')
    if self.temperature < 0 or 0 < self.temperature < 1e-4:
      fix = 'use 0 for greedy, or at least 1e-4'
      raise ConfigError('temperature', self.temperature, 'is out of range', fix)
    if not 1e-30 <= self.top_p <= 1:
      raise ConfigError('top_p', self.top_p, 'is not in (0, 1]', 'use 1 for off')
    if not 0 <= self.min_p <= 1:
      raise ConfigError('min_p', self.min_p, 'is not in [0, 1]', 'use 0 for off')
    processors.check(self, vocab)
    stops.check(self.stop_strings)
    if self.stop is None:
      return
    if not isinstance(self.stop, tuple | list):
      raise ConfigError('stop', self.stop, 'are no token ids', 'use a tuple of ids')
    if len(self.stop) > STOPS:
      raise ConfigError(
        'stop', f'{len(self.stop)} tokens', f'is more than {STOPS}', 'use fewer'
      )
    for token in self.stop:
      whole = isinstance(token, int | np.integer) and not isinstance(token, bool)
      if not whole or not 0 <= token < vocab:
        fix = f'use ids in 0 … {vocab - 1}'
        raise ConfigError('stop', token, 'is no token', fix)


def check_whole(name: str, value: Any) -> None:
  """Raises ConfigError unless the value is a whole number that its array can hold."""
  limit = 2**32 if name == 'seed' else 2**31
  if isinstance(value, bool) or not isinstance(value, int | np.integer):
    raise ConfigError(name, value, 'is no whole number', 'use an int')
  if not 0 <= value < limit:
    raise ConfigError(name, value, 'is out of range', f'use 0 … {limit - 1}')


def check_positive(name: str, value: Any) -> None:
  """Raises ConfigError unless the value is a whole number, and at least 1."""
  check_whole(name, value)
  if value < 1:
    raise ConfigError(name, value, 'is not positive', 'use at least 1')


def arrays(
  settings: Sequence[Settings],
  draft: int,
  key: Key[Array, ''] | None = None,
  strings: Strings | None = None,
) -> Sampling:
  """Checked settings as the device reads them, a row each.

  Args:
    draft: the longest draft compiled for.
    key: folded into every seed.
    strings: the compiled stop strings of all rows.
  """

  def row(name: str, dtype):
    values = np.array([getattr(s, name) for s in settings], dtype)
    return jax.device_put(values, mesh.ids_B)

  stop = np.full((len(settings), STOPS), -1, np.int32)
  for n, own in enumerate(settings):
    ids = own.stop or ()
    stop[n, : len(ids)] = ids
  drafts = [draft if s.draft is None else s.draft for s in settings]
  seeds = np.array([s.seed for s in settings], np.uint32)
  if key is not None:
    fold = jax.vmap(lambda seed: jax.random.bits(jax.random.fold_in(key, seed)))
    seeds = np.asarray(fold(seeds))
  return Sampling(
    **{name: row(name, np.float32) for name in ('temperature', 'top_p', 'min_p')},
    **{name: row(name, np.int32) for name in ('top_k', 'budget')},
    seed=jax.device_put(seeds, mesh.ids_B),
    draft=jax.device_put(np.array(drafts, np.int32), mesh.ids_B),
    stop=jax.device_put(stop, mesh.whole_BT),
    processing=processors.arrays(settings),
    strings=strings,
  )


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Sampling:
  """Settings by row, all [B].

  Attributes:
    temperature: float; 0 is greedy.
    top_k: int; only the k most likely tokens, ties of the last kept; 0 is off.
    top_p: float; the fewest tokens that hold this much probability, at least one; 1 is
      off. After top-k.
    min_p: float; only tokens with at least this share of the largest probability; 0 is
      off. After top-p.
    seed: uint32; a row's draws depend on nothing else.
    budget: int; new tokens at most.
    draft: int; tokens to draft a round, at most.
    stop: int [B, n]; a token among them ends its row and is the last; -1 is none.
    processing: what changes logits before all of this.
    strings: the stop strings, None where no row has any.
  """

  temperature: Leaf
  top_k: Leaf
  top_p: Leaf
  min_p: Leaf
  seed: Leaf
  budget: Leaf
  draft: Leaf
  stop: Leaf
  processing: Processing
  strings: Strings | None = None


def probabilities(
  logits: Float[Array, 'B N V'], sampling: Sampling
) -> Float[Array, 'B N V']:
  """The distribution to sample, [B, N, V], from the logits of N positions a row."""

  def each(x):
    return x[:, None, None]

  greedy = each(sampling.temperature) <= 0
  scaled = logits / jnp.where(greedy, 1.0, each(sampling.temperature)).astype(
    logits.dtype
  )
  p = jax.nn.softmax(scaled, -1)
  filtered = jax.lax.cond(
    jnp.any((sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)),
    lambda p: _filter(
      p, each(sampling.top_k), each(sampling.top_p), each(sampling.min_p)
    ),
    lambda p: p,
    p,
  )
  best = jnp.argmax(logits, -1)[..., None] == jnp.arange(logits.shape[-1])[None, None]
  # An all-NaN row must not look like a decision.
  one_hot = jnp.where(jnp.isnan(p), p, best.astype(p.dtype))
  return jnp.where(greedy, one_hot, filtered)


def _filter(p: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
  """Zeroes what the filters leave out, and renormalises."""
  V = p.shape[-1]
  falling = -jnp.sort(-p, -1)
  k = jnp.where(top_k > 0, jnp.minimum(top_k, V), V)
  least = jnp.take_along_axis(falling, jnp.broadcast_to(k - 1, (*p.shape[:2], 1)), -1)
  # A token stays while what is before it holds less than top_p of what top-k left.
  # Compared unnormalised: the same number, so that rounding cannot lose the last token.
  falling = jnp.where(falling >= least, falling, 0)
  before = jnp.cumsum(falling, -1) - falling
  stays = (before < top_p * jnp.sum(falling, -1, keepdims=True)) & (falling > 0)
  lowest = jnp.min(jnp.where(stays, falling, jnp.inf), -1, keepdims=True)
  kept = jnp.where(p >= jnp.where(top_p < 1, jnp.maximum(lowest, least), least), p, 0)
  kept = jnp.where(kept >= min_p * jnp.max(kept, -1, keepdims=True), kept, 0)
  return kept / jnp.sum(kept, -1, keepdims=True)
