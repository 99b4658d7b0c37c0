"""What the decode loop carries, and what it is compiled for."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from mtpjax import mesh
from mtpjax.drafters import base
from mtpjax.models import cache
from mtpjax.models.attention import Leaf
from mtpjax.sampling import adaptive, trees

LIVE, STOP, LENGTH, FAILED = range(4)  # why a row ended


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
  """What the loop carries. B rows, S slots of the buffers, K drafts at most.

  Attributes:
    tokens: prompt and what follows, int [B, S].
    length: committed tokens, int [B].
    prompt: tokens of the prompt, int [B].
    reason: why a row ended, or LIVE, int [B].
    logprobs: of each committed new token under the model itself, float [B, S].
    drafted: whether a committed token is an accepted draft, bool [B, S].
    caches: the trunk's, a layer each.
    drafter: the drafter's state, None without one.
    rounds: verification rounds of the row, int [B].
    accepted: of those, the ones that accepted at least j drafts, before truncation at
      stops and budgets, int [B, K].
    kept: the same, after truncation.
    proposed: those that proposed at least j, int [B, K].
    reached: those that accepted at least j - 1 and proposed at least j, int [B, K].
    nodes: drafts proposed in all, int [B]; where they branch, more than the above add
      up to.
    pace: how the row's drafts have fared lately.
    passes: trunk passes, the prefill counted as one, int [].
    strings: how much of its stop strings each row's text ends with, as states of their
      automata, int [B, n]; None where no row has any.
  """

  tokens: Leaf
  length: Leaf
  prompt: Leaf
  reason: Leaf
  logprobs: Leaf
  drafted: Leaf
  caches: Any
  drafter: Any
  rounds: Leaf
  accepted: Leaf
  kept: Leaf
  proposed: Leaf
  reached: Leaf
  nodes: Leaf
  pace: adaptive.Pace
  passes: Leaf
  strings: Leaf = None


@dataclasses.dataclass(frozen=True)
class Plan:
  """What is compiled for: shapes and the rule. Everything else is data."""

  draft: int  # K, the longest draft; 0 decodes plainly
  slots: int  # tokens of a row, prompt and new ones
  chunk: int = 64  # tokens of a prompt read at once
  rule: str = 'rejection'
  cache: str | None = None  # of keys and values; None: the dtype of compute
  tree: trees.Tree | trees.Dynamic | None = None  # of depth K; None is a chain
  # What one more draft costs, as a share of a plain pass: rows then draft as many as
  # pay. None: as many as they may.
  draft_cost: float | None = None
  samples: int = 1  # texts of a prompt, rows side by side

  @property
  def nodes(self) -> int:
    """Tokens of a draft."""
    return self.tree.nodes if self.tree else self.draft


def drafting_part(model: Any, plan: Plan) -> base.Drafter | None:
  """The drafter, where there are drafts."""
  return model.objectives['drafter'] if plan.draft else None


def empty(model: Any, plan: Plan, batch: int) -> State:
  """Rows of one token that are done before they start."""
  part, config = drafting_part(model, plan), model.trunk.config
  # Junk rows of a chunk or a draft may be written past the last token, never clamped.
  block = max(plan.chunk, plan.nodes + 1)
  room = base.Room(batch, plan.slots + block, block, plan.draft, plan.cache)
  zeros = jax.reshard(jnp.zeros((batch,), jnp.int32), mesh.ids_B)
  counts = jnp.zeros((batch, plan.draft), jnp.int32, out_sharding=mesh.whole_BT)
  shape = (batch, room.length)
  tokens = jnp.zeros(shape, jnp.int32, out_sharding=mesh.whole_BT)
  return State(
    tokens=tokens,
    length=zeros + 1,
    prompt=zeros + 1,
    reason=zeros + LENGTH,
    logprobs=jnp.zeros_like(tokens, jnp.float32),
    drafted=jnp.zeros_like(tokens, bool),
    caches=[
      cache.empty(config, batch, room.length, config.window(n), block, plan.cache)
      for n in range(config.layers)
    ],
    drafter=part.init_state(room) if part else None,
    rounds=zeros,
    accepted=counts,
    kept=counts,
    proposed=counts,
    reached=counts,
    nodes=zeros,
    pace=adaptive.Pace(*(jnp.zeros_like(zeros, jnp.float32),) * 2),
    passes=jnp.ones((), jnp.int32),
  )
