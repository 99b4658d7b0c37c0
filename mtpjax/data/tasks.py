"""Synthetic tasks: examples made from their number, so that no two steps repeat one
and nothing is stored. What a greedy decode must answer is known exactly.

N examples, T tokens of an example, B rows of a batch.
"""

from __future__ import annotations

import dataclasses
import zlib
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int, Integer, Shaped, UInt64

from mtpjax.data.sources import Counts, DataError, Split
from mtpjax.data.words import Words

ENDLESS = 2**31 - 1  # rows of a training split: more than a run reads


@dataclasses.dataclass(frozen=True)
class Examples:
  """Problems with their answers.

  Attributes:
    tokens: int [N, T].
    mask: what may be a target, bool [N, T].
    answer: where each answer begins; it goes on to the end, int [N].
  """

  tokens: Int[np.ndarray, 'N T']
  mask: Bool[np.ndarray, 'N T']
  answer: Int[np.ndarray, ' N']


@runtime_checkable
class Task(Protocol):
  """What `TaskRows` knows of a task."""

  heldout: int

  @property
  def size(self) -> int: ...

  def check(self) -> None: ...

  def examples(self, index_N: Int[np.ndarray, ' N'], seed: int) -> Examples: ...


@dataclasses.dataclass
class PathStar:
  """Finding the path through a star of paths (Bachmann & Nagarajan 2024).

  1 + paths · (length - 1) distinct labels; the edges, shuffled, as `a b |`, the last
  bar a `/`; the start, the goal, `=`; then the path from start to goal, the only
  target. Its second label is what next-token training does not learn to plan.

  Attributes:
    paths: d, from the start outwards.
    length: ℓ, labels of a path, the start counted.
    labels: N, from which each graph draws its own.
    heldout: examples held out, the same for every seed.
  """

  paths: int = 2
  length: int = 3
  labels: int = 10
  heldout: int = 1024

  @property
  def _nodes(self) -> int:
    return 1 + self.paths * (self.length - 1)

  @property
  def size(self) -> int:
    """Tokens of an example."""
    return 3 * (self._nodes - 1) + 3 + self.length

  def tokenizer(self) -> Words:
    return Words((*map(str, range(self.labels)), '|', '/', '='))

  def rows(
    self, split: Split, length: int, seed: int, together: bool, counts: Counts
  ) -> TaskRows:
    """One split, see `open_rows`."""
    return open_rows(self, length, split, seed, together)

  def check(self) -> None:
    """Raises DataError, naming the field and a value that works."""
    for name, least in (('paths', 1), ('length', 2), ('heldout', 0)):
      if getattr(self, name) < least:
        raise DataError(f'{name}={getattr(self, name)}: must be at least {least}')
    if self.labels < self._nodes:
      raise DataError(
        f'labels={self.labels}: a graph of {self.paths} paths of {self.length} labels '
        f'has {self._nodes} of them; use at least as many'
      )

  def examples(self, index_N: Int[np.ndarray, ' N'], seed: int) -> Examples:
    d, length, N = self.paths, self.length, len(index_N)
    edges = self._nodes - 1
    keys = draws(index_N, seed, self.labels + edges + 1)
    nodes = np.argsort(keys[:, : self.labels], 1)[:, : self._nodes]
    arms = nodes[:, 1:].reshape(N, d, length - 1)
    start = np.repeat(nodes[:, None, :1], d, 1)
    paths = np.concatenate([start, arms], 2)
    pairs = np.stack([paths[:, :, :-1], paths[:, :, 1:]], -1).reshape(N, edges, 2)
    order = np.argsort(keys[:, self.labels : -1], 1)
    pairs = np.take_along_axis(pairs, order[:, :, None], 1)
    bar, slash, equals = (self.labels + n for n in range(3))
    bars = np.full((N, edges, 1), bar)
    bars[:, -1] = slash
    path = paths[np.arange(N), (keys[:, -1] % np.uint64(d)).astype(int)]
    tokens = np.concatenate(
      [
        np.concatenate([pairs, bars], 2).reshape(N, 3 * edges),
        path[:, :1],
        path[:, -1:],
        np.full((N, 1), equals),
        path,
      ],
      1,
    ).astype(np.int32)
    mask = np.broadcast_to(np.arange(self.size) >= self.size - length, tokens.shape)
    return Examples(tokens, mask, np.full(N, self.size - length))


@dataclasses.dataclass
class Induction:
  """Names of two tokens among noise (after Gloeckle et al. 2024): once a name has been
  mentioned, its first token says what the second is.

  A text is `mentions` mentions of names in random order, each after 0 … `gap` words of
  noise; its last word is a second mention, and the answer is that name's second token.
  Names are drawn anew for every text, so nothing can be learnt but looking back.

  Attributes:
    names: names of a text.
    mentions: of names, at least one more than there are names.
    gap: words of noise before a mention, at most.
    words: vocabulary, noise and names' tokens alike.
    heldout: examples held out, the same for every seed.
  """

  names: int = 2
  mentions: int = 6
  gap: int = 2
  words: int = 40
  heldout: int = 1024

  @property
  def size(self) -> int:
    """Tokens of an example; shorter texts begin with more noise."""
    return self.mentions * (2 + self.gap)

  def tokenizer(self) -> Words:
    return Words(tuple(f'w{n}' for n in range(self.words)))

  def rows(
    self, split: Split, length: int, seed: int, together: bool, counts: Counts
  ) -> TaskRows:
    """One split, see `open_rows`."""
    return open_rows(self, length, split, seed, together)

  def check(self) -> None:
    """Raises DataError, naming the field and a value that works."""
    for name, least in (('names', 1), ('gap', 0), ('heldout', 0)):
      if getattr(self, name) < least:
        raise DataError(f'{name}={getattr(self, name)}: must be at least {least}')
    if self.mentions <= self.names:
      raise DataError(
        f'mentions={self.mentions}: the last must be of a name mentioned before; use '
        f'more than names={self.names}'
      )
    if self.words <= 2 * self.names:
      raise DataError(
        f'words={self.words}: {self.names} names have {2 * self.names} tokens, and '
        'noise needs another; use more'
      )

  def examples(self, index_N: Int[np.ndarray, ' N'], seed: int) -> Examples:
    N, M, size = len(index_N), self.mentions, self.size
    keys = draws(index_N, seed, self.words + 2 * M + size)
    order = np.argsort(keys[:, : self.words], 1)
    name_NA2 = order[:, : 2 * self.names].reshape(N, self.names, 2)
    noise = order[:, 2 * self.names :]  # never a token of a name
    rest = keys[:, self.words :]
    # Every name at least once among all mentions but the last, which repeats one.
    which = (rest[:, :M] % np.uint64(self.names)).astype(int)
    first = np.argsort(rest[:, : M - 1], 1)[:, : self.names]
    np.put_along_axis(which, first, np.arange(self.names)[None].repeat(N, 0), 1)
    gaps = (rest[:, M : 2 * M] % np.uint64(self.gap + 1)).astype(int)
    ends = size - np.cumsum((2 + gaps)[:, ::-1], 1)[:, ::-1] + gaps  # of each mention
    drawn = (rest[:, 2 * M :] % np.uint64(noise.shape[1])).astype(int)
    tokens = np.take_along_axis(noise, drawn, 1).astype(np.int32)
    mentioned = np.take_along_axis(name_NA2, which[:, :, None], 1)
    for part in (0, 1):
      np.put_along_axis(tokens, ends + part, mentioned[:, :, part].astype(np.int32), 1)
    return Examples(tokens, np.ones(tokens.shape, bool), np.full(N, size - 1))


@dataclasses.dataclass(frozen=True, eq=False)
class TaskRows:
  """Rows of a task: whole examples side by side, `each` a row, `count` rows."""

  task: Task
  length: int
  seed: int
  each: int
  count: int

  @property
  def domains(self) -> dict[str, tuple[int, int]]:
    return {'': (0, self.count)}

  def __len__(self) -> int:
    return self.count

  def fingerprint(self) -> int:
    """31 bits that change with the task, the seed or the layout."""
    return zlib.crc32(repr(self).encode()) >> 1

  def row(self, index: int) -> dict[str, Shaped[np.ndarray, ' T']]:
    """Row `index`, as `rows` gives it."""
    return {name: x[0] for name, x in self.rows(np.array([index])).items()}

  def rows(
    self, indices: Integer[np.ndarray, ' I'], size: int | None = None
  ) -> dict[str, Shaped[np.ndarray, 'B T']]:
    """As `pack.Plan.rows`: tokens, segments, positions, mask."""
    indices = np.asarray(indices, np.int64)
    if indices.size and not 0 <= indices.min() <= indices.max() < self.count:
      raise IndexError(f'rows {indices} of {self.count}')
    each, T = self.each, self.task.size
    index_N = (indices[:, None] * each + np.arange(each)).reshape(-1)
    made = self.task.examples(index_N, self.seed)
    shape = (len(indices) if size is None else size, self.length)

    def whole(x, dtype):
      found = np.zeros(shape, dtype)
      found[: len(indices), : each * T] = np.broadcast_to(x, (len(index_N), T)).reshape(
        len(indices), each * T
      )
      return found

    segment_N = np.tile(np.arange(1, each + 1), len(indices))
    return {
      'tokens': whole(made.tokens, np.int32),
      'segments': whole(segment_N[:, None], np.int32),
      'positions': whole(np.arange(T)[None], np.int32),
      'mask': whole(made.mask, bool),
    }

  def problems(self, count: int) -> Examples:
    """The first so many examples, fewer if there are fewer."""
    return self.task.examples(np.arange(min(count, self.count * self.each)), self.seed)


def open_rows(
  task: Task, length: int, split: Split, seed: int, together: bool = True
) -> TaskRows:
  """One split, as many examples a row as fit, or one if not `together`.

  Raises:
    DataError: the task's fields or `length` do not fit.
  """
  task.check()
  if task.size > length:
    raise DataError(
      f'data.length={length}: an example of {type(task).__name__} has {task.size} '
      'tokens; use at least as many'
    )
  each = length // task.size if together else 1
  if split == 'train':
    return TaskRows(task, length, seed + 1, each, ENDLESS)
  return TaskRows(task, length, 0, each, -(-task.heldout // each))


def draws(
  index_N: Int[np.ndarray, ' N'], seed: int, count: int
) -> UInt64[np.ndarray, 'N count']:
  """Uniform 64-bit draws that depend on the seed and each example's number only.

  SplitMix64 (Steele et al. 2014) of a counter: no generator to carry from example to
  example, and no change with NumPy.
  """
  with np.errstate(over='ignore'):
    start = _mix(np.asarray(index_N, np.uint64) + _mix(np.array([seed], np.uint64)))
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return _mix(start[:, None] + steps[None])


def _mix(z):
  z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return z ^ (z >> np.uint64(31))
