"""The whole decode as one `lax.while_loop`: propose, verify in one forward pass over
the last token and its drafts, accept, emit, roll back, absorb.

With n tokens committed in a row, the trunk has rows 0 … n-2 in its cache and the last
token has no features yet. A round reads it together with the drafts, keeps what the
rule accepts and one token more. Rolling back is a matter of the length: rows written
beyond it are never looked at. Without a drafter the same loop decodes plainly.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int, PyTree

from mtpjax import losses, mesh
from mtpjax.drafters import base
from mtpjax.models import block as blocks
from mtpjax.models import cache, trunk
from mtpjax.sampling import adaptive, branching, judging, rows, verify
from mtpjax.sampling.filters import Sampling
from mtpjax.sampling.state import (
  FAILED,
  LENGTH,
  LIVE,
  STOP,
  Plan,
  State,
  drafting_part,
  empty,
)
from mtpjax.sampling.stops import advance


def lay_out(graphdef: Any, params: PyTree) -> PyTree:
  """Parameters as decoding reads them: a layer's weights each an array of its own.

  Done once, outside jit: slicing stacked weights inside the loop would copy them every
  round. Objectives that do not draft are left out.
  """

  @jax.jit
  def run(params):
    parts = nnx.merge(graphdef, params).objectives
    own = {
      name: parts[name].lay_out(given)
      if isinstance(parts[name], base.Drafter)
      else jax.tree.map(lambda _: None, given)
      for name, given in params.get('objectives', {}).items()
    }
    top = {**params['trunk'], 'blocks': blocks.lay_out(params['trunk']['blocks'])}
    return {**params, 'trunk': top, 'objectives': own}

  return run(params)


def decode(
  graphdef: Any,
  plan: Plan,
  weights: PyTree,
  prompts_BP: Int[Array, 'B P'],
  lengths_B: Int[Array, ' B'],
  sampling: Sampling,
) -> State:
  """Prefill and all rounds; nothing returns to the host before the batch is done, and
  the caches not even then.

  Args:
    weights: from `lay_out`.
    prompts_BP: right-padded prompts, P at most `plan.slots`.
    sampling: of B · `plan.samples` rows.
  """
  if prompts_BP.shape[1] > plan.slots:
    raise ValueError(
      f'prompts of {prompts_BP.shape[1]} tokens do not fit {plan.slots} slots'
    )
  state = prefill(graphdef, plan, weights, prompts_BP, lengths_B, sampling)
  state = rounds(graphdef, plan, weights, state, None, sampling)
  return dataclasses.replace(state, caches=None, drafter=None)


def rounds(
  graphdef: Any,
  plan: Plan,
  weights: PyTree,
  state: State,
  limit: Int[Array, ''] | None,
  sampling: Sampling,
) -> State:
  """Rounds until no row is live, or so many."""

  def goes_on(carry):
    n, state = carry
    live = jnp.any(state.reason == LIVE)
    return live if limit is None else live & (n < limit)

  def one(carry):
    n, state = carry
    return n + 1, one_round(graphdef, plan, weights, state, sampling)

  return jax.lax.while_loop(goes_on, one, (jnp.zeros((), jnp.int32), state))[1]


def prefill(
  graphdef: Any,
  plan: Plan,
  weights: PyTree,
  prompts_BP: Int[Array, 'B P'],
  lengths_B: Int[Array, ' B'],
  sampling: Sampling,
) -> State:
  """Reads the prompts a chunk at a time and commits the first token of each row.

  Several samples of a prompt are read as one up to its last token, then each reads that
  and draws its own first token.
  """
  model = nnx.merge(graphdef, weights)
  B, P = prompts_BP.shape
  state = empty(model, plan, B)
  left = state.tokens.shape[1] - P
  tokens = jnp.pad(cache.whole(prompts_BP), ((0, 0), (0, left)))
  state = dataclasses.replace(state, tokens=tokens, length=lengths_B, prompt=lengths_B)
  shared = plan.samples > 1
  ends = lengths_B - shared

  def read(carry):
    at, state = carry
    start = jnp.minimum(at, ends)
    count = jnp.clip(ends - start, 0, plan.chunk)
    own = None if shared else sampling
    return at + plan.chunk, _read(model, plan, state, start, count, plan.chunk, own)

  if not shared:
    state = _ready(plan, state, sampling)
  longest = jnp.max(ends)
  state = jax.lax.while_loop(
    lambda carry: carry[0] < longest, read, (jnp.zeros((), jnp.int32), state)
  )[1]
  if not shared:
    return state
  each = rows.repeat(dataclasses.replace(state, passes=None), plan.samples)
  state = dataclasses.replace(each, passes=state.passes)
  state = _ready(plan, state, sampling)
  last = state.length - 1
  return _read(model, plan, state, last, jnp.ones_like(last), 1, sampling)


def _ready(plan: Plan, state: State, sampling: Sampling) -> State:
  """Rows before their first token; one that may have none is done."""
  some = _bounded(plan, sampling, state.prompt).budget > 0
  strings = None if sampling.strings is None else sampling.strings.start
  reason = jnp.where(some, LIVE, LENGTH)
  return dataclasses.replace(state, reason=reason, strings=strings)


def _read(
  model,
  plan: Plan,
  state: State,
  start_B: Array,
  count_B: Array,
  width: int,
  sampling: Sampling | None,
) -> State:
  """The state after `count` more tokens of each prompt, `width` at most.

  Args:
    sampling: gives rows whose prompt ends here their first token; None: none ends.
  """
  part, config = drafting_part(model, plan), model.trunk.config
  layers = blocks.unstack(blocks.arrays(model.trunk.blocks))
  inputs = cache.take(state.tokens, start_B, width)
  x = _enter(model, inputs, cache.positions(start_B, width))
  out, caches = trunk.extend(layers, x, start_B, state.caches, config, model.needs)
  state = dataclasses.replace(state, caches=caches)
  if sampling is not None:
    sampling = _bounded(plan, sampling, state.prompt)
    ends = (count_B > 0) & (start_B + count_B == state.prompt)
    hidden = cache.take(out.hidden, jnp.maximum(count_B - 1, 0), 1)
    logits = _logits(model, hidden)
    zeros = jnp.zeros_like(start_B)
    past = judging.history(model, state, sampling)
    none = base.no_draft(zeros)
    verdict = judging.chain(plan, logits, none, zeros, sampling, zeros, past)
    first = verdict.after[:, None]
    live = state.reason == LIVE
    state = _commit(state, ends & live, verdict, first, logits, sampling)
  if part:
    after = cache.take(state.tokens, start_B + 1, width)
    given = base.Committed(start_B, count_B, after, out)
    drafter = part.absorb(model.trunk, caches, state.drafter, given)
    state = dataclasses.replace(state, drafter=drafter)
  return state


def _enter(model, ids_BT, positions_BT):
  return model.trunk.enter(jax.reshard(ids_BT, mesh.ids_BT), positions_BT)


def one_round(
  graphdef: Any, plan: Plan, weights: PyTree, state: State, sampling: Sampling
) -> State:
  """Draft, verify, keep, absorb: one trunk pass for every row that is live."""
  sampling = _bounded(plan, sampling, state.prompt)
  left = sampling.budget - (state.length - state.prompt)
  count = jnp.minimum(sampling.draft, left - 1)
  if plan.draft_cost is not None:
    paying = adaptive.length(state.pace.acceptance, plan.draft_cost, plan.draft)
    count = jnp.minimum(count, paying)
  count = jnp.clip(count, 0, plan.draft)
  run = functools.partial(_round, graphdef, plan, weights)
  if plan.draft_cost is None or plan.tree:
    return run(plan.draft, state, sampling, count)
  # No more is drafted and verified than the row that drafts most wants.
  longest = jnp.max(jnp.where(state.reason == LIVE, count, 0))
  sizes = adaptive.sizes(plan.draft)
  which = jnp.sum(longest > jnp.array(sizes[:-1]))
  each = [functools.partial(run, size) for size in sizes]
  return jax.lax.switch(which, each, state, sampling, count)


def _round(
  graphdef: Any,
  plan: Plan,
  weights: PyTree,
  most: int,
  state: State,
  sampling: Sampling,
  count: Array,
) -> State:
  """A round whose rows draft `count` tokens, `most` at most."""
  model = nnx.merge(graphdef, weights)
  part, K = drafting_part(model, plan), plan.draft
  layers = blocks.unstack(blocks.arrays(model.trunk.blocks))
  live = state.reason == LIVE
  start = state.length - 1  # the last token, which has no features yet
  last = cache.take(state.tokens, start, 1)
  past = judging.history(model, state, sampling)
  draft = base.no_draft(count)
  if part and most:
    choose = judging.chooser(plan, sampling, state.rounds, past, most)
    draft, drafter = part.propose(
      model.trunk, state.caches, state.drafter, most, choose
    )
    state = dataclasses.replace(state, drafter=drafter)
    count = jnp.minimum(count, draft.count)
  drafted = cache.whole(draft.tokens)
  block, branches = None, None
  positions = cache.positions(start, drafted.shape[1] + 1)
  if plan.tree:
    block = branching.Block.of(cache.whole(draft.parents), most)
    positions = jax.reshard(start[:, None] + block.depth, mesh.ids_BT)
    branches = cache.Branches(start, positions, positions, block.seen)
  x = _enter(model, jnp.concatenate([last, drafted], 1), positions)
  out, caches = trunk.extend(
    layers, x, start, state.caches, model.trunk.config, model.needs, branches
  )
  logits = _logits(model, out.hidden)
  turn = state.rounds + 1
  if block:
    row, verdict = judging.tree(plan, logits, draft, block, count, sampling, turn, past)
    # What is left of the block is a chain: the path to that row.
    path = block.path(row, most + 1)
    logits = cache.pick(logits, path)
    out = jax.tree.map(lambda rows: cache.pick(rows, path), out)
    caches = [
      cache.move(own, start, path, model.trunk.config.window(n))
      for n, own in enumerate(caches)
    ]
    drafted = cache.pick(drafted, jnp.maximum(path[:, 1:] - 1, 0))
    nodes = jnp.sum(block.proposed(count), 1)
    count = jnp.minimum(count, jnp.max(block.depth, 1))
  else:
    verdict = judging.chain(plan, logits, draft, count, sampling, turn, past)
    nodes = count

  # The accepted drafts, then the token after them.
  place = jnp.arange(most + 1)[None] == verdict.accepted[:, None]
  # Nothing padded loses the sharding of a batch of one on jax 0.12.
  padded = cache.whole(jnp.pad(drafted, ((0, 0), (0, 1))))
  emitted = jnp.where(place, verdict.after[:, None], padded)
  before = state.length
  state = dataclasses.replace(state, caches=caches, passes=state.passes + 1)
  state = _commit(state, live, verdict, emitted, logits, sampling)
  new = state.length - before
  reach = jnp.arange(1, K + 1)[None]

  def tally(table, depth):
    return table + (live[:, None] & (reach <= depth[:, None])).astype(jnp.int32)

  state = dataclasses.replace(
    state,
    rounds=state.rounds + live.astype(jnp.int32),
    accepted=tally(state.accepted, verdict.accepted),
    kept=tally(state.kept, jnp.minimum(verdict.accepted, new)),
    proposed=tally(state.proposed, count),
    reached=tally(state.reached, jnp.minimum(verdict.accepted + 1, count)),
    nodes=state.nodes + jnp.where(live, nodes, 0),
    pace=state.pace.after(count, verdict.accepted),
  )
  if part:
    given = base.Committed(
      start, new, cache.take(state.tokens, start + 1, most + 1), out
    )
    drafter = part.absorb(model.trunk, caches, state.drafter, given)
    state = dataclasses.replace(state, drafter=drafter)
  return state


def _bounded(plan: Plan, sampling: Sampling, prompt_B: Array) -> Sampling:
  """A row ends where its buffer does: past it, a write would spoil committed tokens."""
  budget = jnp.minimum(sampling.budget, plan.slots - prompt_B)
  return dataclasses.replace(sampling, budget=budget)


def _logits(model, hidden_BTD) -> Array:
  """[B, T, V] in float32 or wider, whole in V: sampling looks up and sorts."""
  return cache.whole(
    losses.head_logits(model.trunk.final_norm(hidden_BTD), model.trunk.head())
  )


def _commit(
  state: State, who, verdict: verify.Verdict, emitted, logits, sampling: Sampling
) -> State:
  """Appends accepted tokens up to the first stop or the budget's end, in rows `who`."""
  N = emitted.shape[1]
  at = jnp.arange(N)[None]
  given = jnp.minimum(
    verdict.accepted + 1, sampling.budget - (state.length - state.prompt)
  )
  ends = (emitted[:, :, None] == sampling.stop[:, None]).any(-1)
  if sampling.strings is not None:
    table, so_far = sampling.strings.table, (state.length - state.prompt)[:, None]
    found, matched = advance(table, state.strings, emitted)
    ends |= found & (so_far + at >= sampling.processing.least[:, None])
  ends &= at < given[:, None]
  first = jnp.min(jnp.where(ends, at, N), 1)
  count = jnp.minimum(given, first + 1)
  failed = who & verdict.failed
  # What was accepted before a broken row is sound and stays.
  count = jnp.where(failed, jnp.minimum(count, verdict.accepted), count)
  count = jnp.where(who, count, 0)
  length = state.length + count
  reason = jnp.where(
    who & (length - state.prompt >= sampling.budget), LENGTH, state.reason
  )
  reason = jnp.where(failed, FAILED, reason)
  reason = jnp.where(who & (first < count), STOP, reason)
  score = verify.lookup(logits, emitted) - jax.nn.logsumexp(logits, -1)

  if sampling.strings is not None:
    kept = jnp.arange(N + 1)[None] == count[:, None]
    matched = jnp.sum(jnp.where(kept[..., None], matched, 0), 1)
    state = dataclasses.replace(state, strings=matched)

  def write(table, new):
    old = cache.take(table, state.length, N)
    new = jnp.where(at < count[:, None], new.astype(table.dtype), old)
    return cache.put(table, new, state.length)

  return dataclasses.replace(
    state,
    tokens=write(state.tokens, emitted),
    logprobs=write(state.logprobs, score),
    drafted=write(state.drafted, at < verdict.accepted[:, None]),
    length=length,
    reason=reason,
  )
