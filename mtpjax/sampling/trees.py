"""Shapes of drafts that branch: several candidates for a token, verified in one pass.

A draft is a tree under the last committed token. Nodes are numbered breadth first, so
that a parent comes before its children and siblings stand in the order in which they
are judged. A chain is the tree whose every node has one child.
"""

from __future__ import annotations

import dataclasses
import heapq
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from mtpjax.fields import ConfigError

NODES = 256  # of a tree, at most: the block of a verification


@dataclasses.dataclass(frozen=True)
class Tree:
  """A shape that is known before anything is drafted.

  Attributes:
    parents: of each node, -1 where it follows the last committed token.
  """

  parents: tuple[int, ...]

  def __post_init__(self):
    before = -1
    for node, parent in enumerate(self.parents):
      if not before <= parent < node:
        fix = 'number nodes breadth first, -1 for children of the last token'
        raise ConfigError('tree', self.parents, 'is no tree', fix)
      before = parent

  @classmethod
  def chain(cls, length: int) -> Tree:
    return cls(tuple(range(-1, length - 1)))

  @classmethod
  def full(cls, widths: Sequence[int]) -> Tree:
    """Every node of depth k - 1 has `widths[k - 1]` children."""
    parents, level = [], [-1]
    for width in widths:
      first = len(parents)
      parents += [parent for parent in level for _ in range(width)]
      level = range(first, len(parents))
    return cls(tuple(parents))

  @classmethod
  def best(cls, acceptance: Any, budget: int) -> Tree:
    """The tree of at most `budget` nodes with the most accepted drafts to expect: the
    largest sum over nodes of the product of acceptance along the path to each, its own
    included (SpecInfer; Medusa).

    Args:
      acceptance: [K][R], how often the token at a depth is the candidate of a rank, the
        path before it right; no rank more often than the one before.
    """
    table = np.asarray(acceptance, float)
    if table.ndim != 2 or not table.size or (np.diff(table, axis=1) > 1e-9).any():
      fix = 'give [depths][ranks], falling with the rank'
      raise ConfigError('acceptance', acceptance, 'is no table of ranks', fix)
    depths, ranks = table.shape
    # A node can be taken once its parent and the sibling before it have been: both are
    # worth as much at least, so the best that can be taken is the best there is.
    taken: list[tuple[int, ...]] = []
    ready: list[tuple[float, tuple[int, ...]]] = [(-table[0, 0], (0,))]
    while ready and len(taken) < budget:
      value, path = heapq.heappop(ready)
      if value >= 0:
        break
      taken.append(path)
      depth, rank = len(path), path[-1]
      if rank + 1 < ranks:
        before = value / table[depth - 1, rank]
        after = before * table[depth - 1, rank + 1]
        heapq.heappush(ready, (after, (*path[:-1], rank + 1)))
      if depth < depths:
        heapq.heappush(ready, (value * table[depth, 0], (*path, 0)))
    taken.sort(key=lambda path: (len(path), path))
    index = {path: n for n, path in enumerate(taken)}
    return cls(tuple(index.get(path[:-1], -1) for path in taken))

  def __str__(self) -> str:
    return ','.join(map(str, self.parents))

  def accepted(self, acceptance: Any) -> float:
    """Accepted drafts to expect; see `best`."""
    value: list[float] = []
    for parent, depth, rank in zip(self.parents, self.depths, self.ranks, strict=True):
      own = acceptance[depth - 1][rank]
      value.append(own * (value[parent] if parent >= 0 else 1.0))
    return sum(value)

  @property
  def nodes(self) -> int:
    return len(self.parents)

  @property
  def depth(self) -> int:
    return max(self.depths, default=0)

  @property
  def depths(self) -> list[int]:
    """Of each node, from 1."""
    found: list[int] = []
    for parent in self.parents:
      found.append(1 if parent < 0 else found[parent] + 1)
    return found

  @property
  def ranks(self) -> list[int]:
    """Of each node among its siblings, from 0."""
    return [
      node - self.parents.index(parent) for node, parent in enumerate(self.parents)
    ]

  def level(self, depth: int) -> list[int]:
    """Nodes of that depth."""
    return [node for node, own in enumerate(self.depths) if own == depth]

  def inner(self, depth: int) -> list[int]:
    """Those of them that have children; [-1] is the last committed token."""
    if depth == 0:
      return [-1]
    return [node for node in self.level(depth) if node in self.parents]


@dataclasses.dataclass(frozen=True)
class Dynamic:
  """A tree that the drafter's confidence shapes anew in every round (EAGLE-2, Li et al.
  2024, arXiv 2406.16858).

  The `width` most likely children of `width` nodes a depth are candidates, the `width`
  best of them have children in turn, and the `nodes` best of all are verified, by the
  product of the drafter's probabilities along the path. What is drafted follows from
  the context alone, so that q is one-hot.
  """

  width: int
  nodes: int
  depth: int

  @property
  def candidates(self) -> int:
    return self.width + (self.depth - 1) * self.width**2


def parse(text: Any, depth: int, vocab: int, longest: int) -> Tree | Dynamic:
  """A tree as it is written: '4x2x1' (children by depth), '-1,-1,0,1' (parents of the
  nodes) or 'dynamic:WIDTH:NODES'.

  Args:
    depth: of a dynamic tree.
    vocab: tokens that there are.
    longest: depth that a tree may have.
  """
  forms = "use '4x2x1' (children by depth) or 'dynamic:8:24' (width, nodes)"
  tree = text
  if not isinstance(text, Tree | Dynamic):
    if not isinstance(text, str):
      raise ConfigError('tree', text, 'is no tree', forms)
    dynamic = re.fullmatch(r'dynamic:(\d{1,4}):(\d{1,4})', text)
    if dynamic:
      tree = Dynamic(int(dynamic[1]), int(dynamic[2]), depth)
    elif re.fullmatch(r'-1(,(-1|\d{1,3}))*', text):
      tree = Tree(tuple(map(int, text.split(','))))
    elif re.fullmatch(r'[1-9]\d{0,2}(x[1-9]\d{0,2})*', text):
      widths = [int(width) for width in text.split('x')]
      if np.prod(widths, dtype=float) > NODES:
        raise ConfigError('tree', text, 'is too large', f'use up to {NODES} nodes')
      tree = Tree.full(widths)
    else:
      raise ConfigError('tree', text, 'is no tree', forms)
  return _checked(tree, text, longest, vocab)


def _checked(
  tree: Tree | Dynamic, said: Any, longest: int, vocab: int
) -> Tree | Dynamic:
  """Refuses what cannot be drafted."""
  if not 1 <= tree.nodes <= NODES:
    raise ConfigError(
      'tree', said, f'has {tree.nodes} nodes', f'use 1 … {NODES}, or no tree'
    )
  if not 1 <= tree.depth <= longest:
    raise ConfigError(
      'tree',
      said,
      f'is {tree.depth} deep, and drafts are up to {longest}',
      f'use a depth of 1 … {longest}, or a larger draft if the drafter can',
    )
  if isinstance(tree, Dynamic):
    if not 1 <= tree.width <= min(64, vocab):
      fix = f'use 1 … {min(64, vocab)}'
      raise ConfigError('tree', said, f'is {tree.width} wide', fix)
    if tree.nodes > tree.candidates:
      raise ConfigError(
        'tree',
        said,
        f'has only {tree.candidates} candidates',
        f'use up to {tree.candidates} nodes, or a larger width',
      )
  elif max(tree.ranks) >= vocab:
    children = max(tree.ranks) + 1
    fix = f'use up to {vocab} children of a node'
    raise ConfigError('tree', said, f'has {children} children of {vocab} tokens', fix)
  return tree
