"""A queue of prompts through a few rows, as one `lax.while_loop`: a row whose text has
ended gets the next prompt, so that uneven lengths leave no row without work.

Each device has a part of the queue and rows of its own. When enough of its rows are
free, the next prompts are read as a small batch, in time proportional to their number,
and every array of that batch's state is written over that of the free rows. A row's
draws depend on its own seed and round alone, so its text is what a batch of the same
prompts gives.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int, PyTree

from mtpjax.models.attention import Leaf
from mtpjax.sampling import engine, rows
from mtpjax.sampling.filters import Sampling


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Queue:
  """Prompts, Q of them; each device has Q / N, the first so many of which are real.

  Attributes:
    prompts: right-padded, int [Q, P].
    lengths: of the prompts, int [Q].
    sampling: of their texts, a prompt's samples side by side, [Q · samples].
    counts: how many are real on each of N devices, int [N].
  """

  prompts: Leaf
  lengths: Leaf
  sampling: Sampling
  counts: Leaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _Loop:
  """What the loop carries. B rows decode, `done` has a row for each text.

  Attributes:
    state: of the rows that decode.
    sampling: what they are decoded with.
    text: the row of `done` that each is for, on its device; -1 is none. int [B].
    next: the first prompt that waits, on each device, int [N].
    done: texts that have ended and what was counted, without caches.
  """

  state: engine.State
  sampling: Sampling
  text: Leaf
  next: Leaf
  done: engine.State


def run(
  graphdef: Any,
  plan: engine.Plan,
  weights: PyTree,
  queue: Queue,
  *,
  batch: int,
  group: int,
) -> engine.State:
  """All texts, in the order of the queue; nothing returns to the host before the end.

  Args:
    weights: from `engine.lay_out`.
    batch: rows that decode side by side, a multiple of devices · samples.
    group: prompts read at once on each device, at most.

  Returns: without caches; `passes` counts the prefills as one.
  """
  strings = queue.sampling.strings
  queue = dataclasses.replace(queue, sampling=_with(queue.sampling, None))
  table = None if strings is None else strings.table
  Q = queue.prompts.shape[0]
  model = nnx.merge(graphdef, weights)
  texts = engine.empty(model, plan, Q * plan.samples)
  state = engine.empty(model, plan, batch)
  sampling = _any(queue.sampling, batch // rows.shards())
  if sampling.strings is not None:
    state = dataclasses.replace(state, strings=sampling.strings.start)
  loop = _Loop(
    state,
    sampling,
    jnp.full_like(state.length, -1),
    jnp.zeros_like(queue.counts),
    dataclasses.replace(texts, caches=None, drafter=None, passes=None),
  )

  def live(loop):
    return jnp.any(loop.state.reason == engine.LIVE)

  def waiting(loop):
    """Whether prompts should be read: for half of what can be read at once."""
    fit = _fit(plan, queue, loop, group)
    most = jnp.minimum(queue.counts - loop.next, group)
    return (jnp.sum(fit) > 0) & (2 * jnp.sum(fit) >= jnp.sum(most))

  def one_round(loop):
    return dataclasses.replace(
      loop,
      state=engine.one_round(
        graphdef, plan, weights, loop.state, _with(loop.sampling, table)
      ),
    )

  def some_rounds(loop):
    loop = _refill(graphdef, plan, weights, queue, loop, group, table)
    return jax.lax.while_loop(lambda loop: live(loop) & ~waiting(loop), one_round, loop)

  loop = jax.lax.while_loop(
    lambda loop: live(loop) | jnp.any(loop.next < queue.counts), some_rounds, loop
  )
  return dataclasses.replace(_rest(loop), passes=loop.state.passes)


def _with(sampling: Sampling, table: Array | None) -> Sampling:
  """With this table of stop strings, which no row has to itself."""
  if sampling.strings is None:
    return sampling
  strings = dataclasses.replace(sampling.strings, table=table)
  return dataclasses.replace(sampling, strings=strings)


def _any(sampling: Sampling, count: int) -> Sampling:
  """That many rows on each device: what rows without a text are given."""

  def own(sampling):
    return jax.tree.map(lambda x: jnp.repeat(x[:1], count, 0), sampling)

  return rows.apart(own, sampling, like=lambda sampling: sampling)


def _fit(plan: engine.Plan, queue: Queue, loop: _Loop, group: int) -> Int[Array, ' N']:
  """How many prompts each device can read now."""

  def own(reason_B, next_1, count_1):
    free = jnp.sum(reason_B != engine.LIVE) // plan.samples
    return jnp.minimum(jnp.minimum(free, group), count_1 - next_1)

  return rows.apart(
    own, loop.state.reason, loop.next, queue.counts, like=lambda *given: given[1]
  )


def _refill(
  graphdef: Any,
  plan: engine.Plan,
  weights: PyTree,
  queue: Queue,
  loop: _Loop,
  group: int,
  table: Array | None,
) -> _Loop:
  """The next prompts, read and put into free rows; what these had done is kept."""
  fit_N = _fit(plan, queue, loop, group)

  def choose(reason_B, fit_1, next_1, queue):
    # Free rows first; those beyond what fits are left alone.
    at = jnp.argsort(reason_B == engine.LIVE, stable=True)[: group * plan.samples]
    there = jnp.arange(group) < fit_1
    which = jnp.where(there, next_1 + jnp.arange(group), 0)
    text = which[:, None] * plan.samples + jnp.arange(plan.samples)[None]
    text = text.reshape(-1)
    sampling = jax.tree.map(lambda x: x[text], queue.sampling)
    # Those beyond what fits keep nobody waiting.
    lengths = jnp.where(there, queue.lengths[which], 1)
    return queue.prompts[which], lengths, sampling, text, at

  prompts, lengths, sampling, text, at = rows.apart(
    choose,
    loop.state.reason,
    fit_N,
    loop.next,
    queue,
    like=lambda reason, fit, next, queue: (
      queue.prompts,
      queue.lengths,
      queue.sampling,
      reason,
      reason,
    ),
  )
  new = engine.prefill(
    graphdef, plan, weights, prompts, lengths, _with(sampling, table)
  )

  def place(held, done, new, at, fit_1):
    def replace(n, both):
      held, done = both
      done = _hand_over(held, done, at[n])
      return rows.put(held, rows.one(new, n), at[n]), done

    return jax.lax.fori_loop(0, fit_1[0] * plan.samples, replace, (held, done))

  def by_row(state, sampling, text):
    return dataclasses.replace(state, passes=None), sampling, text

  held, done = rows.apart(
    place,
    by_row(loop.state, loop.sampling, loop.text),
    loop.done,
    by_row(new, sampling, text),
    at,
    fit_N,
    like=lambda held, done, *_: (held, done),
  )
  state, sampling, text = held
  state = dataclasses.replace(state, passes=loop.state.passes)
  return _Loop(state, sampling, text, loop.next + fit_N, done)


def _hand_over(held, done: engine.State, at: Array) -> engine.State:
  """Results with those of row `at`, if it is for any."""
  state, _, text = held
  to = text[at]
  light = dataclasses.replace(state, caches=None, drafter=None, strings=None)
  new = rows.one(light, at)
  old = rows.one(done, jnp.maximum(to, 0))
  kept = jax.tree.map(lambda new, old: jnp.where(to >= 0, new, old), new, old)
  return rows.put(done, kept, jnp.maximum(to, 0))


def _rest(loop: _Loop) -> engine.State:
  """Results with those of all rows."""

  def own(state, text, done):
    def hand_over(n, done):
      return _hand_over((state, None, text), done, n)

    return jax.lax.fori_loop(0, len(text), hand_over, done)

  state = dataclasses.replace(loop.state, passes=None, caches=None, drafter=None)
  return rows.apart(own, state, loop.text, loop.done, like=lambda *given: given[2])
