"""What changes logits before they are judged: bias, minimum length, and penalties on
what the text holds already, in this order; temperature and filters come after.

A row of logits that follows drafts is judged by the history it would then have: what is
committed, and the drafts before it. Rows that ask for nothing stay as they are, bit for
bit, and where none asks nothing is computed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mtpjax import mesh
from mtpjax.fields import ConfigError
from mtpjax.models.attention import MASKED, Leaf

BIASES = 64  # tokens with a bias of a row, at most: a shape that is compiled for
LARGEST = 1e6  # of a bias or penalty: sums of them stay finite


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Processing:
  """Settings by row; see `filters.Settings`.

  Attributes:
    repetition, presence, frequency: the penalties, float [B].
    least: new tokens before a stop may come, int [B].
    biased: tokens with a bias, int [B, n]; -1 is none.
    bias: theirs, float [B, n].
  """

  repetition: Leaf
  presence: Leaf
  frequency: Leaf
  least: Leaf
  biased: Leaf
  bias: Leaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class History:
  """What is committed: `seen` tokens of prompt and text, bool [B, V]; `counts` in the
  text alone, int [B, V], both of which are empty where no row is penalised; and new
  tokens `so_far`, int [B]."""

  seen: Leaf
  counts: Leaf
  so_far: Leaf


def check(own: Any, vocab: int) -> None:
  """Raises ConfigError on settings that cannot be honoured."""
  for name in ('repetition_penalty', 'presence_penalty', 'frequency_penalty'):
    _check_number(name, getattr(own, name))
  if not 1e-4 <= own.repetition_penalty <= 1e4:
    fix = 'use 1 for off, above it against repetition, within 1e-4 … 1e4'
    raise ConfigError(
      'repetition_penalty', own.repetition_penalty, 'is out of range', fix
    )
  if own.min_tokens > own.budget:
    fix = f'use 0 … {own.budget}, or a larger budget'
    raise ConfigError(
      'min_tokens', own.min_tokens, f'is more than the budget of {own.budget}', fix
    )
  pairs = own.logit_bias
  if not isinstance(pairs, tuple) or not all(
    isinstance(pair, tuple) and len(pair) == 2 for pair in pairs
  ):
    fix = 'use a dict of ids and what is added to their logits'
    raise ConfigError('logit_bias', pairs, 'is no bias by token', fix)
  if len(pairs) > BIASES:
    raise ConfigError(
      'logit_bias', f'{len(pairs)} tokens', f'is more than {BIASES}', 'use fewer'
    )
  seen = set()
  for token, value in pairs:
    whole = isinstance(token, int | np.integer) and not isinstance(token, bool)
    if not whole or not 0 <= token < vocab:
      fix = f'use ids in 0 … {vocab - 1}'
      raise ConfigError('logit_bias', token, 'is no token', fix)
    if token in seen:
      raise ConfigError('logit_bias', token, 'has two biases', 'give it one')
    seen.add(token)
    if value != -math.inf:
      _check_number('logit_bias', value, ', or -inf to ban the token')


def _check_number(name: str, value: Any, otherwise: str = '') -> None:
  fix = f'use a number within ±{LARGEST:g}{otherwise}'
  if isinstance(value, bool) or not isinstance(value, int | float | np.number):
    raise ConfigError(name, value, 'is no number', fix)
  if not abs(value) <= LARGEST:
    raise ConfigError(name, value, 'is out of range', fix)


def arrays(settings: Sequence[Any]) -> Processing:
  """Checked settings as the device reads them, a row each."""

  def row(name: str, dtype: Any = np.float32):
    values = np.array([getattr(s, name) for s in settings], dtype)
    return jax.device_put(values, mesh.ids_B)

  biased = np.full((len(settings), BIASES), -1, np.int32)
  bias = np.zeros((len(settings), BIASES), np.float32)
  for n, own in enumerate(settings):
    for at, (token, value) in enumerate(own.logit_bias):
      biased[n, at], bias[n, at] = token, value
  return Processing(
    repetition=row('repetition_penalty'),
    presence=row('presence_penalty'),
    frequency=row('frequency_penalty'),
    least=row('min_tokens', np.int32),
    biased=jax.device_put(biased, mesh.whole_BT),
    bias=jax.device_put(bias, mesh.whole_BT),
  )


def history(
  tokens: Int[Array, 'B S'],
  prompt: Int[Array, ' B'],
  length: Int[Array, ' B'],
  own: Processing,
  vocab: int,
) -> History:
  """Of rows with `length` committed tokens, the first `prompt` of them given."""
  at = jnp.arange(tokens.shape[1])[None]
  shape = (len(tokens), vocab)

  def count():
    new = (at >= prompt[:, None]) & (at < length[:, None])
    seen = _by_token(tokens, (at < length[:, None]).astype(jnp.int32), vocab) > 0
    return seen, _by_token(tokens, new.astype(jnp.int32), vocab)

  def nothing():
    kinds = (bool, jnp.int32)
    return tuple(jnp.zeros(shape, k, out_sharding=mesh.whole_BT) for k in kinds)

  seen, counts = jax.lax.cond(jnp.any(_penalised(own)), count, nothing)
  return History(seen, counts, length - prompt)


def processed(
  logits: Float[Array, 'B N V'],
  own: Processing,
  stop: Int[Array, 'B n'],
  past: History,
  drafted: Int[Array, 'B K'],
  before: Bool[Array, 'B N K'],
) -> Float[Array, 'B N V']:
  """The logits of N rows as they are judged.

  Args:
    stop: tokens that may not come before the minimum length; -1 is none.
    drafted: drafts after the committed tokens.
    before: whether row n follows draft k.
  """
  asked = _penalised(own) | (own.biased >= 0).any(-1) | (own.least > past.so_far)

  def process(logits):
    V, dtype = logits.shape[-1], logits.dtype
    each = (own.repetition, own.presence, own.frequency)
    repetition, presence, frequency = (x.astype(dtype)[:, None, None] for x in each)
    bias = _by_token(own.biased, own.bias.astype(dtype), V)
    # No probability for the table's padding, even if nothing else has any.
    x = jnp.where(logits <= MASKED, -jnp.inf, logits) + bias[:, None]
    stops = _by_token(stop, jnp.ones_like(stop), V) > 0
    early = past.so_far[:, None] + jnp.sum(before, -1) < own.least[:, None]
    x = jnp.where(stops[:, None] & early[..., None], -jnp.inf, x)
    hit = (drafted[..., None] == jnp.arange(V)[None, None]).astype(dtype)
    drafts = jnp.einsum('BNK,BKV->BNV', before.astype(dtype), hit)
    seen = past.seen[:, None] | (drafts > 0)
    counts = past.counts[:, None].astype(dtype) + drafts
    # Keskar et al. 2019, with the sign heeded as Hugging Face does.
    x = jnp.where(seen, jnp.where(x > 0, x / repetition, x * repetition), x)
    x = x - frequency * counts - presence * (counts > 0)
    return jnp.where(asked[:, None, None], x, logits)

  return jax.lax.cond(jnp.any(asked), process, lambda x: x, logits)


def chain(drafted: Array, rows: int) -> Bool[Array, 'B N K']:
  """`before` where drafts [B, K] follow one another: the last of N rows follows them
  all, the one before it all but one, and so on."""
  B, K = drafted.shape
  last = jnp.arange(K + 1 - rows, K + 1)
  before = jnp.arange(K)[None, None] < last[None, :, None]
  spec = jax.P(mesh.BATCH, None, None)
  return jnp.broadcast_to(before, (B, rows, K), out_sharding=spec)


def _penalised(own: Processing) -> Array:
  return (own.repetition != 1) | (own.presence != 0) | (own.frequency != 0)


def _by_token(ids_BN: Array, values_BN: Array, vocab: int) -> Array:
  """Sums of values by token, [B, V]; ids below 0 are nobody's."""

  def add(ids, values):
    zeros = jnp.zeros(vocab, values.dtype)
    # A negative index would count from the end.
    return zeros.at[jnp.where(ids < 0, vocab, ids)].add(values, mode='drop')

  # A device's own rows: a scatter into sharded ones fails.
  run = jax.shard_map(
    jax.vmap(add), in_specs=(mesh.whole_BT, mesh.whole_BT), out_specs=mesh.whole_BT
  )
  return run(*(jax.reshard(x, mesh.whole_BT) for x in (ids_BN, values_BN)))
