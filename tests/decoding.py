"""Small models to decode with, drafters whose drafts the test decides, and decoding
without any cache to compare with."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mtpjax import losses, mesh, model
from mtpjax.drafters import base, parallel, residual, sequential
from mtpjax.models import cache, trunk
from mtpjax.models.attention import Rows
from mtpjax.sampling import drafting

V = 41
SIZES: dict[str, Any] = {
  'vocab': V,
  'width': 16,
  'layers': 2,
  'heads': 4,
  'kv_heads': 2,
  'ffn': 32,
}
TURNS = 128  # rounds that a script is written for
DRAFTERS = {
  'depth': sequential.Config(depth=3),
  'depth, unshared': sequential.Config(depth=3, share=False, chain_norm='pre'),
  'depth, trunk hidden': sequential.Config(depth=3, hidden_source='trunk'),
  'rows': sequential.Config(depth=3, attend='rows', zero_first_embedding=True),
  'rows, trunk hidden': sequential.Config(
    depth=3, attend='rows', hidden_source='trunk', hidden_norm='pre'
  ),
  'parallel': parallel.Config(depth=3),
  'parallel, linear': parallel.Config(depth=3, form='linear'),
  'parallel, causal': parallel.Config(depth=3, form='causal'),
  'parallel, anticausal': parallel.Config(depth=3, form='anticausal'),
  'residual': residual.Config(depth=3, own_head=True),
  'residual, medusa': residual.Config(depth=3, form='medusa', layers=2),
}


@dataclasses.dataclass
class Forcing(base.Config):
  """A drafter that reads its drafts from a script: the right tokens, up to a number of
  them by round. `inner` does its own work on them; None has none to do."""

  inner: base.Config | None = None

  def needs(self, trunk):
    return self.inner.needs(trunk) if self.inner else super().needs(trunk)

  def build(self, trunk, rngs):
    return Forced(self, trunk, rngs)


class Forced(base.Drafter):
  """Its state also holds the logits from which `inner` would have chosen."""

  config: Forcing

  def __init__(self, config, trunk, rngs):
    super().__init__(config)
    self.inner = config.inner.build(trunk, rngs) if config.inner else None
    self.text = nnx.Param(jnp.zeros((1, 1), jnp.int32))  # with its prompt, by row
    self.right = nnx.Param(jnp.zeros((1, 1), jnp.int32))  # right drafts, by round

  def lay_out(self, params):
    if self.inner is None or 'inner' not in params:  # it may have no parameters
      return params
    return {**params, 'inner': self.inner.lay_out(params['inner'])}

  def init_state(self, room):
    zeros = jax.reshard(jnp.zeros((room.batch,), jnp.int32), mesh.ids_B)
    inner = self.inner.init_state(room) if self.inner else None
    shape = (room.batch, room.draft, V if self.inner else 1)
    logits = jax.reshard(jnp.zeros(shape), jax.P(mesh.BATCH, None, None))
    return {'length': zeros, 'turn': zeros, 'inner': inner, 'logits': logits}

  def absorb(self, trunk, caches, state, block):
    inner = state['inner']
    if self.inner is not None:
      inner = self.inner.absorb(trunk, caches, inner, block)
    return {**state, 'length': block.start + block.count, 'inner': inner}

  def propose(self, trunk, caches, state, draft, choose):
    text, right = (cache.whole(x[...]) for x in (self.text, self.right))
    true = cache.take(text, state['length'] + 1, draft)
    wrong = jnp.arange(draft)[None] >= cache.take(right, state['turn'], 1)
    script = jnp.where(wrong, (true + 1) % V, true)
    after = {**state, 'turn': state['turn'] + 1}
    if self.inner is not None:
      chosen = Scripted(script)
      after['inner'] = self.inner.propose(trunk, caches, state['inner'], draft, chosen)[
        1
      ]
      after['logits'] = jnp.stack(chosen.seen, 1)
    return base.chain([script[:, k] for k in range(draft)], [None] * draft), after


class Scripted(drafting.Likeliest):
  """Chooses what the script says [B, K], and keeps the logits it was given."""

  def __init__(self, script):
    self.script, self.seen = script, []

  def __call__(self, logits, k, above):
    self.seen.append(cache.whole(logits)[:, 0, :V])
    token = cache.whole(self.script[:, k : k + 1])
    return base.Level(token, jnp.zeros_like(token))


def scripted(params, text, right):
  """Parameters of a model whose drafter is Forced, with the script written into them.

  Args:
    text: prompts and what follows, [B, S].
    right: how many drafts are right, [B] or by round, [B, n].
  """
  B = len(text)
  right = np.asarray(right)
  right = np.broadcast_to(right[:, None] if right.ndim == 1 else right, (B, TURNS))
  script = {
    'text': jnp.asarray(np.pad(text, ((0, 0), (0, 32))), jnp.int32),
    'right': jnp.asarray(right, jnp.int32),
  }
  objectives = {'drafter': {**params['objectives']['drafter'], **script}}
  return {**params, 'objectives': objectives}


def on_mesh(**sizes):
  count = int(np.prod(list(sizes.values())))
  return jax.set_mesh(mesh.make(mesh.Config(**sizes), jax.devices()[:count]))


def build(drafter: base.Config | None = None, **sizes):
  """(graphdef, parameters) of a model that has something to draft: its last token
  decides most of what follows but not all. Sequential modules hand its embedding on,
  linear heads what the trunk made of it, and one draft or so is accepted a round."""
  config = trunk.Config(**{**SIZES, 'embed_std': 0.7, **sizes})
  config.finalize()
  parts = {'drafter': drafter} if drafter else {}
  graphdef, _, make = model.init(config, parts, 0)
  params = make()
  part = params.get('objectives', {}).get('drafter', {})
  if 'w_join' in part:
    join = np.array(part['w_join'])  # [modules, 2, D, D], the embedding's half first
    join[:, 0], join[:, 1] = np.eye(config.width), 0.3 * join[:, 1]
    part['w_join'] = jax.device_put(join, part['w_join'].sharding)
  if 'w_map' in part:
    same = np.broadcast_to(np.eye(config.width, dtype=np.float32), part['w_map'].shape)
    part['w_map'] = jax.device_put(same, part['w_map'].sharding)
  return graphdef, params


def score(graphdef, params, tokens):
  """Logits after every token of whole rows [B, T], without a cache."""
  m = nnx.merge(graphdef, params)
  shape = tokens.shape
  at = jnp.broadcast_to(jnp.arange(shape[1])[None], shape, out_sharding=mesh.ids_BT)
  hidden = m.trunk(tokens, Rows(at, jnp.ones_like(tokens))).hidden
  return losses.head_logits(m.trunk.final_norm(hidden), m.trunk.head())


def plainly(graphdef, params, prompts, lengths, count):
  """Greedy text without a cache or a loop: whole rows again for every token.

  Returns: prompts and `count` tokens more, their log-probabilities, and by how much the
  most likely token was ahead, as a share of the largest logit; each [B, P + count].
  """

  @jax.jit
  def following(params, tokens, lengths):
    logits = score(graphdef, params, tokens)
    row = cache.whole(cache.take(logits, lengths - 1, 1)[:, 0])[:, :V]
    best = jnp.sort(row, -1)
    margin = (best[:, -1] - best[:, -2]) / jnp.max(jnp.abs(row), -1)
    return jnp.argmax(row, -1), jax.nn.log_softmax(row).max(-1), margin

  B, P = prompts.shape
  at = np.arange(B)
  tokens = np.zeros((B, P + count), np.int32)
  scores, margins = (np.zeros((B, P + count), np.float32) for _ in range(2))
  tokens[:, :P] = np.where(np.arange(P) < np.asarray(lengths)[:, None], prompts, 0)
  for n in range(count):
    now = np.asarray(lengths, np.int32) + n
    found = following(
      params, jax.device_put(tokens, mesh.ids_BT), jax.device_put(now, mesh.ids_B)
    )
    tokens[at, now], scores[at, now], margins[at, now] = found
  return tokens, scores, margins


def row(out, b):
  """All that is said of one row, without its padding."""
  n = out.lengths[b]
  counts = {k: np.asarray(v).tolist() for k, v in vars(out.rows[b]).items()}
  return (
    out.tokens[b, :n].tolist(),
    out.drafted[b, :n].tolist(),
    out.finish_reason[b],
    counts,
  )
