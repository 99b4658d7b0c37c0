"""What drafting was worth, from what the loop counted; every ratio divides once.

Acceptance length τ is Σ (accepted + 1) / rounds, before truncation at stops and budgets
and without the prefill; the acceptance rate is of proposed drafts, after truncation.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Int


@dataclasses.dataclass
class Stats:
  """Counts over rows; `+` joins batches. The arrays are [K], of j = 1 … K.

  Attributes:
    rounds: verification rounds.
    accepted: rounds that accepted at least j drafts, before truncation.
    kept: the same after truncation.
    proposed: rounds that proposed at least j.
    reached: rounds that accepted at least j - 1 and proposed at least j.
    nodes: drafts proposed in all; more than `proposed` adds up to where they branch.
    delivered: tokens handed out.
    prefills: rows that delivered any: each took a trunk pass for its prompt.
  """

  rounds: int
  accepted: Int[np.ndarray, ' K']
  kept: Int[np.ndarray, ' K']
  proposed: Int[np.ndarray, ' K']
  reached: Int[np.ndarray, ' K']
  nodes: int
  delivered: int
  prefills: int

  @classmethod
  def of(cls, state: Any, rows: slice = slice(None)) -> Stats:
    """Of an engine's final state, on the host; of some of its rows, if asked."""
    delivered = np.asarray(state.length)[rows] - np.asarray(state.prompt)[rows]
    tables = ('accepted', 'kept', 'proposed', 'reached')
    return cls(
      rounds=int(np.sum(np.asarray(state.rounds)[rows])),
      **{name: np.asarray(getattr(state, name))[rows].sum(0) for name in tables},
      nodes=int(np.sum(np.asarray(state.nodes)[rows])),
      delivered=int(delivered.sum()),
      prefills=int((delivered > 0).sum()),
    )

  def __add__(self, other: Stats) -> Stats:
    names = [field.name for field in dataclasses.fields(self)]
    return Stats(**{name: getattr(self, name) + getattr(other, name) for name in names})

  @property
  def passes(self) -> int:
    """Trunk passes, each row's own: its prefill and its rounds."""
    return self.prefills + self.rounds

  @property
  def tau(self) -> float | None:
    """Acceptance length: tokens that a verification round yields."""
    return _ratio(self.accepted.sum() + self.rounds, self.rounds)

  @property
  def acceptance_rate(self) -> float | None:
    return _ratio(self.kept.sum(), self.nodes)

  @property
  def tokens_per_pass(self) -> float | None:
    return _ratio(self.delivered, self.passes)

  @property
  def acceptance_by_position(self) -> list[float | None]:
    """Unconditional: rounds with ≥ j accepted / rounds that proposed ≥ j."""
    return [_ratio(a, p) for a, p in zip(self.accepted, self.proposed, strict=True)]

  @property
  def conditional_acceptance(self) -> list[float | None]:
    """Rounds with ≥ j accepted / rounds with ≥ j-1 accepted that proposed ≥ j."""
    return [_ratio(a, r) for a, r in zip(self.accepted, self.reached, strict=True)]

  def to_json(self) -> dict[str, Any]:
    return {
      'tau': self.tau,
      'acceptance_rate': self.acceptance_rate,
      'acceptance_by_position': self.acceptance_by_position,
      'conditional_acceptance': self.conditional_acceptance,
      'tokens_per_pass': self.tokens_per_pass,
      'rounds': self.rounds,
      'passes': self.passes,
      'delivered': self.delivered,
      'accepted': int(self.kept.sum()),
      'proposed': self.nodes,
    }


def _ratio(total: Any, count: Any) -> float | None:
  return float(total / count) if count else None
