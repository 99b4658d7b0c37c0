"""Drafters whose drafts somebody else decides: right with a given probability, to see
what acceptance would be worth, or free of cost, to see what verification costs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Int

from mtpjax import mesh
from mtpjax.drafters import base
from mtpjax.models import cache


class Simulated(base.Drafter):
  """Does all the work of another drafter, then proposes what a table says.

  A row finds its text among the given ones by what has been committed in it. Off all of
  them, its drafts are of no use.

  Args:
    inner: whose work is done.
    text_NS: greedy texts with their prompts; S has room for a draft past the end.
    right_NS: how many leading drafts are right after so many tokens with features.
  """

  def __init__(
    self,
    inner: base.Drafter,
    text_NS: Int[Any, 'N S'],
    right_NS: Int[Any, 'N S'],
  ):
    super().__init__(inner.config)
    self.inner = inner
    self.text, self.right = (
      nnx.Param(jax.device_put(np.asarray(table, np.int32), P(None, None)))
      for table in (text_NS, right_NS)
    )

  @property
  def max_draft(self) -> int:
    return self.inner.max_draft

  def init_state(self, room: base.Room) -> Any:
    zeros = jax.reshard(jnp.zeros((room.batch,), jnp.int32), mesh.ids_B)
    texts = jnp.ones((room.batch, len(self.text[...])), bool)
    return {
      'inner': self.inner.init_state(room),
      'length': zeros,
      'follows': jax.reshard(texts, mesh.whole_BT),  # the row, so far, which texts
    }

  def absorb(self, trunk, caches, state, block):
    at = block.start[:, None] + 1 + jnp.arange(block.tokens.shape[1])[None]
    texts = self.text[...].at[:, cache.whole(at)]
    text_NBT = texts.get(out_sharding=P(None, mesh.BATCH, None), mode='clip')
    junk = jnp.arange(at.shape[1])[None] >= block.count[:, None]
    same = (text_NBT == cache.whole(block.tokens)[None]) | junk[None]
    return {
      'inner': self.inner.absorb(trunk, caches, state['inner'], block),
      'length': cache.keep(state['length'], block.start + block.count, block.count),
      'follows': state['follows'] & jnp.swapaxes(same.all(-1), 0, 1),
    }

  def propose(self, trunk, caches, state, draft, choose):
    own, inner = self.inner.propose(trunk, caches, state['inner'], draft, choose)
    text = jnp.argmax(state['follows'], 1)
    at = state['length'][:, None] + 1 + jnp.arange(draft)[None]
    there = self.text[...].at[text[:, None], at]
    true = there.get(out_sharding=mesh.whole_BT, mode='clip')
    right = self.right[...].at[text, state['length']]
    right = right.get(out_sharding=mesh.ids_B, mode='clip')
    right = jnp.where(state['follows'].any(1), right, 0)
    wrong = jnp.arange(draft)[None] >= right[:, None]
    tokens = jnp.where(wrong, (true + 1) % trunk.config.vocab, true)
    # Never so, but the compiler cannot know, and leaves no work of the drafter's out.
    unused = jnp.min(cache.whole(own.tokens), 1, keepdims=True) < 0
    tokens = jnp.where(unused, -1, tokens)
    draft_BK = base.chain([tokens[:, k] for k in range(draft)], [None] * draft)
    return draft_BK, {**state, 'inner': inner}


class Free(base.Drafter):
  """Proposes token 0 in place of another drafter, at no cost."""

  def __init__(self, inner: base.Drafter):
    super().__init__(inner.config)
    self._longest = inner.max_draft

  @property
  def max_draft(self) -> int:
    return self._longest

  def init_state(self, room):
    return jax.reshard(jnp.zeros((room.batch, 1), jnp.int32), mesh.whole_BT)

  def absorb(self, trunk, caches, state, block):
    return state

  def propose(self, trunk, caches, state, draft, choose):
    return base.chain([state[:, 0]] * draft, [None] * draft), state


def right_drafts(
  accept: float, shape: tuple[int, int], draft: int, seed: int = 0
) -> Int[np.ndarray, 'N S']:
  """How many leading drafts of `draft` are right if each is so with that probability,
  independently: 1 + a + … + a^K tokens a round on average."""
  right = np.random.default_rng(seed).random((*shape, draft)) < accept
  return np.cumprod(right, -1).sum(-1).astype(np.int32)
