"""A round's choices by the row's own settings: what is drafted, and what is accepted of
it. Every row of logits is judged by the history that it would then have.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from mtpjax.drafters import base
from mtpjax.models import cache
from mtpjax.sampling import branching, drafting, filters, processors, trees, verify
from mtpjax.sampling.branching import Block
from mtpjax.sampling.filters import Sampling
from mtpjax.sampling.processors import History
from mtpjax.sampling.state import Plan, State


def history(model: Any, state: State, sampling: Sampling) -> History:
  """What is committed, as processors want to know it."""
  return processors.history(
    state.tokens,
    state.prompt,
    state.length,
    sampling.processing,
    len(model.trunk.head().w_VD),
  )


def chooser(
  plan: Plan, sampling: Sampling, rounds_B: Array, past: History, most: int
) -> base.Choose:
  """Draws drafts as the trunk's own tokens are drawn, from a stream of their own.

  Args:
    most: depth of the draft.
  """

  def process(logits_BMV, paths_BMK):
    B, M, K = paths_BMK.shape
    drafted = cache.whole(paths_BMK.reshape(B, M * K))
    own = jnp.repeat(jnp.eye(M, dtype=bool), K, 1)[None]
    before = cache.whole(jnp.broadcast_to(own, (B, M, M * K)))
    return processors.processed(
      logits_BMV, sampling.processing, sampling.stop, past, drafted, before
    )

  if isinstance(plan.tree, trees.Dynamic):
    return drafting.Confident(plan.tree, sampling, process)
  tree = plan.tree or trees.Tree.chain(most)
  return drafting.Shaped(tree, sampling, rounds_B, process)


def chain(
  plan: Plan,
  logits: Array,
  draft: base.Draft,
  count_B: Array,
  sampling: Sampling,
  rounds_B: Array,
  past: History,
) -> verify.Verdict:
  """The rule's verdict; where every row is greedy, without a single random number.

  Args:
    logits: the last row follows all drafts, the one before it all but one, and so on.
  """
  drafted = cache.whole(draft.tokens)
  before = processors.chain(drafted, logits.shape[1])
  logits = processors.processed(
    logits, sampling.processing, sampling.stop, past, drafted, before
  )

  def drawn():
    p = filters.probabilities(logits, sampling)
    # Without drafts, all draw from p: those for trees are not asked then.
    rule = verify.RULES.get(plan.rule, verify.rejection)
    return rule(p, drafted, draft.q, count_B, sampling.seed, rounds_B)

  def greedy():
    return verify.greedy(logits, drafted, count_B)

  return jax.lax.cond(jnp.any(sampling.temperature > 0), drawn, greedy)


def tree(
  plan: Plan,
  logits: Array,
  draft: base.Draft,
  block: Block,
  count_B: Array,
  sampling: Sampling,
  rounds_B: Array,
  past: History,
) -> tuple[Array, verify.Verdict]:
  """The same where drafts branch; and the row of the block where the path ends."""
  tokens, ok = cache.whole(draft.tokens), block.proposed(count_B)
  before = block.seen[:, :, 1:]
  logits = processors.processed(
    logits, sampling.processing, sampling.stop, past, tokens, before
  )

  def drawn():
    p = filters.probabilities(logits, sampling)
    rule = branching.RULES[plan.rule]
    return rule(p, tokens, draft.q, block, ok, sampling.seed, rounds_B)

  def greedy():
    return branching.greedy(logits, tokens, block, ok)

  return jax.lax.cond(jnp.any(sampling.temperature > 0), drawn, greedy)
