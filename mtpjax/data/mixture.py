"""Mixtures: several sources, each a domain, drawn from in proportion to its weight."""

import dataclasses
import fractions
import math
import re
import sys
import zlib
from typing import Any, Protocol, runtime_checkable

import grain

from mtpjax.data import pack
from mtpjax.data.sources import Counts, DataError, Source, Split
from mtpjax.data.tokenizer import Tokenizer


@runtime_checkable
class RowSource(Protocol):
  """A source that makes its rows itself, of ids of its own tokenizer."""

  def tokenizer(self) -> Tokenizer | None:
    """None: whichever the other sources or the config have."""
    ...

  def rows(
    self, split: Split, length: int, seed: int, together: bool, counts: Counts
  ) -> pack.Rows:
    """One split; `length`, `seed` and `together` are as `pack.pack` has them.

    Raises:
      DataError: bad fields or data.
    """
    ...


@dataclasses.dataclass
class Mixture:
  """Domains by name, each a source of its own, under one tokenizer.

  Training draws rows of a domain in proportion to its weight, whatever its size, and
  starts a small domain anew while a large one is still in its first epoch. Held-out
  rows stay apart, domain after domain.

  Attributes:
    parts: the sources; not mixtures themselves.
    weights: of each part, positive, in any unit: 3 and 1, or 0.75 and 0.25.
  """

  parts: dict[str, Source | RowSource] = dataclasses.field(default_factory=dict)
  weights: dict[str, float] = dataclasses.field(default_factory=dict)

  def validate(self) -> None:
    """Raises DataError, naming the field and a fix."""
    if not self.parts:
      raise DataError(
        "data.source.parts={}: name at least one, as in {'code': Stdlib()}"
      )
    for name, part in self.parts.items():
      if not re.fullmatch(r'[\w-]+', name):
        raise DataError(
          f'data.source.parts has the name {name!r}: use letters, digits, _ and -'
        )
      if isinstance(part, Mixture):
        raise DataError(
          f'data.source.parts[{name}] is a mixture: put its parts and weights here'
        )
    if missing := [name for name in self.parts if name not in self.weights]:
      raise DataError(
        f'data.source.weights={self.weights}: no weight for {", ".join(missing)}; add '
        f"'{missing[0]}': 1.0"
      )
    if unknown := [name for name in self.weights if name not in self.parts]:
      raise DataError(
        f'data.source.weights={self.weights}: no part is called '
        f'{", ".join(unknown)}; there are {", ".join(self.parts)}'
      )
    for name, weight in self.weights.items():
      if not 0 < weight < math.inf:
        raise DataError(
          f'data.source.weights[{name}]={weight}: must be positive; to leave a part '
          'out, take it from data.source.parts'
        )


def whole_shares(weights: dict[str, float]) -> dict[str, int]:
  """The smallest whole numbers in the proportion of the weights, read as decimals."""
  exact = {name: fractions.Fraction(str(share)) for name, share in weights.items()}
  scale = math.lcm(*(share.denominator for share in exact.values()))
  whole = {name: int(share * scale) for name, share in exact.items()}
  divisor = math.gcd(*whole.values())
  return {name: share // divisor for name, share in whole.items()}


def draw(k: int, shares: tuple[int, ...]) -> tuple[int, int]:
  """Which domain element k of the mixture is from, and its index among that domain's.

  Of the first n elements the domains after the first have n · (their shares) // (all
  shares), and those are dealt among them in the same way. So every sum(shares)
  elements have exactly the shares, and any n of them nearly.
  """
  left = sum(shares)
  for domain, share in enumerate(shares):
    later = left - share
    before, after = k * later // left, (k + 1) * later // left
    if before == after:  # k is not among those of the later domains
      return domain, k - before
    k, left = before, later
  raise AssertionError('the last domain takes what is left')


def endless(
  rows: pack.Rows, weights: dict[str, float] | None, seed: int
) -> grain.MapDataset:
  """Numbers of rows, epoch after epoch, as one sequence that any index is found in.

  Without weights an epoch is all rows, shuffled. With them each domain has epochs of
  its own, shuffled by itself, and its elements come in their order.
  """
  if weights is None:
    return _shuffled(0, len(rows), seed)
  shares = tuple(whole_shares(weights)[name] for name in rows.domains)
  own = [
    _shuffled(first, end, seed ^ zlib.crc32(name.encode()))
    for name, (first, end) in rows.domains.items()
  ]

  def element(k: int) -> int:
    domain, index = draw(k, shares)
    return own[domain][index]

  return grain.MapDataset.range(sys.maxsize).map(element)


def _shuffled(first: int, end: int, seed: int) -> Any:
  return grain.MapDataset.range(first, end).seed(seed).shuffle().repeat()
