"""The contract. An objective learns from what the trunk computed, beyond the next
token; a drafter is an objective that can also propose tokens.

Training, evaluation and sampling know only this file, never a kind. A new idea is one
file with a `Config` and an `Objective`, and one file in `configs/`.

An objective never computes its own loss and never shifts hidden states: it says what
should be predicted (`targets`) and from which hidden states (`predict`). Weights, the
division by the true counts, chunking and sharding happen in one place for all of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from mtpjax import losses, mesh, schedules
from mtpjax.fields import ConfigError
from mtpjax.losses import Targets
from mtpjax.models import cache
from mtpjax.models import trunk as trunks
from mtpjax.models.attention import Leaf, Rows
from mtpjax.models.cache import LayerCache
from mtpjax.models.trunk import Needs, Trunk, TrunkOutput


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Batch:
  """Rows of tokens, packed documents side by side.

  Attributes:
    tokens: int [B, T].
    mask: loss mask of targets, whether the token at i may be predicted: bool [B, T].
    rows: where the tokens stand; `rows.segments` is 0 on padding.
    drawn: what this objective's `draw` returned; None before.
    whole_path: train only what a drafter of a frozen trunk will be asked for.
  """

  tokens: Leaf
  mask: Leaf
  rows: Rows
  drawn: Any = None
  whole_path: bool = dataclasses.field(default=False, metadata={'static': True})

  def targets(self, depths) -> Targets:
    """Tokens at those depths after each position; the one place where labels shift."""
    return losses.depth_targets(
      self.tokens, self.rows.segments, self.mask, list(depths), self.whole_path
    )


@dataclasses.dataclass
class Predictions:
  """Hidden states from which each depth is predicted.

  Attributes:
    hidden: normalised, ready for the head, [K, B, T, D]; T may be any number of rows
      that divides over the mesh's 'context', the same as in the targets.
    head: None is the trunk's; a tuple has one for each depth.
    loss: see `losses.Loss`; None is cross-entropy to token ids.
    trains_head: whether this loss changes the head.
  """

  hidden: Float[Array, 'K B T D']
  head: trunks.Head | tuple[trunks.Head, ...] | None = None
  loss: losses.Loss | None = None
  trains_head: bool = True


@dataclasses.dataclass
class Config:
  """What every objective has: its depth and its weight in the loss.

  L = L_next + λ(fraction of training) · Σ_k w_k L_k with w_k ∝ ρ^(k-1), Σ w_k = 1 over
  the depths that the curriculum has on; none on is no loss.

  Attributes:
    unit: of the losses of this kind, as tables and results say it.
    agreement: what counts as right.
  """

  unit: ClassVar[str] = 'nats/token'
  agreement: ClassVar[str] = 'top-1'

  depth: int = 1  # K: how many predictions beyond the next token
  weight: schedules.Schedule = dataclasses.field(default_factory=schedules.Piecewise)
  rho: float = 1.0  # 1: all depths alike; below 1 favours near tokens
  curriculum: schedules.Forward | schedules.Reverse | None = None  # None: all, always

  def needs(self, trunk: trunks.Config) -> Needs:
    """What the trunk must hand over; `trunk` is as configured, no layer given up."""
    return Needs()

  def finalize(self, trunk: trunks.Config, field: str) -> None:
    """Refuses what cannot be built, naming `field`."""
    self.weight.finalize(f'{field}.weight')
    if self.depth < 1:
      raise ConfigError(
        f'{field}.depth',
        self.depth,
        'is not positive',
        'use at least 1, or leave it out',
      )
    if not 0 < self.rho <= 100:
      raise ConfigError(
        f'{field}.rho', self.rho, 'is not in (0, 100]', 'use 1 for equal'
      )
    if self.curriculum is not None:
      self.curriculum.finalize(f'{field}.curriculum')

  def kernels(self) -> Literal['all', 'trunk', 'none']:
    """Where attention may go through a kernel that knows rows by their index: not in
    layers of its own ('trunk'), or nowhere, as it changes the trunk's rows ('none')."""
    return 'all'

  def build(self, trunk: trunks.Config, rngs: nnx.Rngs) -> Objective:
    raise NotImplementedError(f'{type(self)} builds nothing')

  def conventions(self) -> dict[str, Any]:
    """What somebody must know to run it elsewhere; stored in every checkpoint."""
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    for name in ('weight', 'rho', 'curriculum'):
      fields.pop(name)
    kind = type(self).__module__.rpartition('.')[2]
    return {'kind': kind, 'modules': self.depth, **fields}


class Objective(nnx.Module):
  """Learns from what the trunk computed. Subclasses define at least `predict`."""

  def __init__(self, config: Config):
    self.config = config

  def adopt(self, trunk: Trunk) -> None:
    """Sets what starts as a copy of the trunk's; once the trunk is what training starts
    from, fresh or loaded."""

  def prepare(self, batch: Batch, key: Key[Array, '']) -> Batch:
    """May insert tokens: returns a batch with other rows, masks and visibility."""
    return batch

  def draw(self, batch: Batch, key: Key[Array, '']) -> Any:
    """Random choices that `targets` and `predict` must agree on, as `batch.drawn`.

    Arrays [B, ...], sharded as rows are: they are split into microbatches with them.
    Drawn in evaluation too, there always with the same key.
    """
    return None

  def targets(self, batch: Batch, key: Key[Array, '']) -> Targets:
    """What is predicted, from integers and masks alone, before any forward pass."""
    return batch.targets(range(1, self.config.depth + 1))

  def predict(
    self,
    trunk: Trunk,
    out: TrunkOutput,
    batch: Batch,
    step: Int[Array, ''],
    key: Key[Array, ''] | None,
  ) -> Predictions:
    """Hidden states of every depth, [K, B, T, D].

    Args:
      out: holds exactly what `Config.needs` asked for.
      key: None in evaluation, where nothing is random.
    """
    raise NotImplementedError(f'{type(self)} predicts nothing')


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Committed:
  """Rows that the trunk has computed and the sampler has kept.

  Attributes:
    start: position of the first of them, int [B].
    count: how many of the N are committed, int [B]; what follows is junk. A row with
      none stays as it was: its text ended before this chunk.
    tokens: the token after each, int [B, N]: that at position start + n + 1. The last
      of a row has no features yet; it opens the next verification.
    out: what `needs` asked for, over the N rows.
  """

  start: Leaf
  count: Leaf
  tokens: Leaf
  out: TrunkOutput


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Draft:
  """Proposed tokens, a tree of N nodes, breadth first; a chain has parents -1, 0, 1, ….

  Attributes:
    tokens: int [B, N].
    parents: index of each node's parent, -1 for the last committed token, int [B, N].
    count: how deep of it is proposed, int [B].
    q: the distribution each was really drawn from, siblings without replacement,
      [B, N, V]; None is one-hot. Where it is zero there was nothing to draw.
  """

  tokens: Leaf
  parents: Leaf
  count: Leaf
  q: Leaf = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Level:
  """What was drawn at one depth of a draft.

  Attributes:
    tokens: of the M nodes to draft under next, int [B, M].
    parents: which of the rows of logits each was drawn from, int [B, M].
    drawn: what `Choose.draft` wants to know, leaves among it.
  """

  tokens: Leaf
  parents: Leaf
  drawn: Any = None


@runtime_checkable
class Choose(Protocol):
  """Draws a draft as it is made, a depth at a time; a chain has one node at each."""

  def __call__(self, logits_BMV: Array, k: int, above: Level | None) -> Level:
    """Draws the nodes of depth k, from 0.

    Args:
      logits_BMV: after each of the nodes of the level above, [B, M, V]; at depth 0
        after the last committed token, [B, 1, V].
      above: what the last call returned.
    """
    ...

  def draft(self, levels: list[Level]) -> Draft:
    """All of it."""
    ...


def no_draft(zeros_B: Array) -> Draft:
  """Nothing proposed, in rows as many as those."""
  none = jnp.zeros((len(zeros_B), 0), jnp.int32, out_sharding=mesh.whole_BT)
  return Draft(none, none, zeros_B)


def chain(tokens: list[Array], q: list[Array | None]) -> Draft:
  """A draft without branches that was not drawn by `Choose`: tokens [B] one after
  another, and the distribution of each, [B, V], or None."""
  tokens_BN = jnp.stack(tokens, 1)
  B, N = tokens_BN.shape
  spec = jax.typeof(tokens_BN).sharding.spec
  parents = jnp.broadcast_to(jnp.arange(-1, N - 1)[None], (B, N), out_sharding=spec)
  dense = [x for x in q if x is not None]
  return Draft(
    tokens_BN,
    parents,
    jnp.full_like(tokens_BN[:, 0], N),
    jnp.stack(dense, 1) if dense else None,
  )


def independent(logits_KBV: list[Array], choose: Choose) -> Draft:
  """The draft of heads that do not read what was drafted: a depth's logits [B, V] are
  the same under every node."""
  levels: list[Level] = []
  for k, logits_BV in enumerate(logits_KBV):
    above = levels[-1] if levels else None
    (B, V), M = logits_BV.shape, above.tokens.shape[1] if above else 1
    spec = P(mesh.BATCH, None, None)
    logits_BV = jax.reshard(logits_BV, P(mesh.BATCH, None))
    same = jnp.broadcast_to(logits_BV[:, None], (B, M, V), out_sharding=spec)
    levels.append(choose(same, k, above))
  return choose.draft(levels)


def lineage(levels: list[Level]) -> Bool[Array, 'B R R']:
  """Which nodes of these levels are on the path to each of them, itself included."""
  B = len(levels[0].tokens)
  rows: list[Array] = []
  done = 0
  for level in levels:
    M = level.tokens.shape[1]
    own = jnp.broadcast_to(jnp.eye(M, dtype=bool)[None], (B, M, M))
    path = jnp.zeros((B, M, done), bool)
    if rows:
      above = rows[-1]
      path = cache.pick(above, level.parents)
    rows.append(jnp.concatenate([cache.whole(path), cache.whole(own)], 2))
    done += M
  wide = [jnp.pad(x, ((0, 0), (0, 0), (0, done - x.shape[2]))) for x in rows]
  return jnp.concatenate([cache.whole(x) for x in wide], 1)


@dataclasses.dataclass(frozen=True)
class Room:
  """What a decode makes room for.

  Attributes:
    batch: rows, B.
    length: positions of a row, junk rows past its end included.
    block: rows that `absorb` gets at once, at most.
    draft: depth of a draft, at most.
    cache: what keys and values are kept in; None is the dtype of compute.
  """

  batch: int
  length: int
  block: int
  draft: int
  cache: str | None = None


class Drafter(Objective):
  """An objective that can also propose. State is a pytree of arrays with batch first.

  Between rounds the state holds what has been committed: all rows before the last
  token, whose features the trunk has not computed yet.
  """

  @property
  def max_draft(self) -> int:
    """The longest draft it can propose."""
    return self.config.depth

  def lay_out(self, params: dict) -> dict:
    """Its parameters as drafting reads them, made once: what is sliced off a stack
    inside the loop is copied in every round. See `block.lay_out`."""
    return params

  def init_state(self, room: Room) -> PyTree:
    """The state before any token."""
    raise NotImplementedError(f'{type(self)} drafts nothing')

  def absorb(
    self, trunk: Trunk, caches: list[LayerCache], state: PyTree, block: Committed
  ) -> PyTree:
    """The state after these rows. Called for each chunk of the prompt, then once
    a round.

    Args:
      caches: the trunk's, a layer each; they hold the block's rows.
    """
    raise NotImplementedError(f'{type(self)} drafts nothing')

  def propose(
    self,
    trunk: Trunk,
    caches: list[LayerCache],
    state: PyTree,
    draft: int,
    choose: Choose,
  ) -> tuple[Draft, PyTree]:
    """Tokens after the last committed one, `draft` deep at most.

    `choose` draws them from this drafter's logits, a depth at a time, and says under
    which of them to draft next.

    Returns: the draft, and the state, whose committed part is as it was (its buffers
      may hold the draft's rows beyond).
    """
    raise NotImplementedError(f'{type(self)} drafts nothing')


def check_detach(detach: tuple[str, ...], known: tuple[str, ...], field: str) -> None:
  for name in detach:
    if name not in known:
      raise ConfigError(
        f'{field}.detach',
        name,
        'is no shared tensor',
        f'choose from {", ".join(known)}',
      )
