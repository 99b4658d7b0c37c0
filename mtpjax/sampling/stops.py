"""Stop strings, wherever they begin and end: inside tokens, over the borders of blocks,
in the middle of a character's bytes.

The automaton of a string over bytes (Knuth, Morris and Pratt 1977) is compiled on the
host into what every token does to every state. A state is how much of the string the
text ends with; the device steps it by one look-up for each new token.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from mtpjax import mesh
from mtpjax.fields import ConfigError
from mtpjax.models.attention import Leaf

STRINGS = 4  # of a row, at most: a shape that is compiled for
LONGEST = 256  # bytes of one
SMALLEST = 64  # rows of the smallest table


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Strings:
  """Automata of a batch, beneath each other in one table.

  Attributes:
    table: the state after a token, and its complement if a string has ended in that
      token, int [R, V]; row 0 is of no string, and leads to itself.
    start: of each row's strings, int [B, n].
  """

  table: Leaf
  start: Leaf


def check(strings: Any) -> None:
  """Raises ConfigError on strings that cannot be looked for."""
  if not isinstance(strings, tuple | list):
    raise ConfigError('stop_strings', strings, 'are no strings', 'use a tuple of them')
  if len(strings) > STRINGS:
    raise ConfigError(
      'stop_strings', f'{len(strings)} strings', f'is more than {STRINGS}', 'use fewer'
    )
  for text in strings:
    if not isinstance(text, str) or not text:
      problem = 'is empty' if text == '' else 'is no string'
      raise ConfigError('stop_strings', text, problem, 'use some text')
    try:
      size = len(text.encode())
    except UnicodeEncodeError:
      fix = 'leave lone surrogates out'
      raise ConfigError('stop_strings', text, 'is no text', fix) from None
    if size > LONGEST:
      fix = f'use up to {LONGEST} bytes'
      raise ConfigError('stop_strings', text, f'has {size} bytes', fix)


class Automata:
  """Compiles strings for a vocabulary.

  Args:
    spelt: bytes of each token; those of the vocabulary that lack are none.
  """

  def __init__(self, spelt: Sequence[bytes], vocab: int):
    spelt = [*spelt[:vocab], *[b''] * (vocab - len(spelt))]
    sizes = np.array([len(one) for one in spelt])
    self._order = np.argsort(-sizes, kind='stable')  # those with a j-th byte come first
    self._longer = [int((sizes > j).sum()) for j in range(sizes.max())]
    self._bytes = np.frombuffer(b''.join(spelt), np.uint8)
    self._first = (np.cumsum(sizes) - sizes)[self._order]
    self.compile = functools.lru_cache(64)(self._compile)

  def strings(self, rows: Sequence[Sequence[str]]) -> Strings:
    """Of each row's strings; rows of the table are rounded up to powers of two."""
    tables, at, count = [np.zeros((1, len(self._order)), np.int32)], {}, 1
    for text in dict.fromkeys(text for own in rows for text in own):
      table = self.compile(text.encode())
      tables.append(np.where(table < 0, table - count, table + count))
      at[text] = count
      count += len(table)
    R = 1 << max(SMALLEST - 1, count - 1).bit_length()
    whole = np.zeros((R, len(self._order)), np.int16 if R <= 2**15 else np.int32)
    whole[:count] = np.concatenate(tables)
    start = np.zeros((len(rows), STRINGS), np.int32)
    for n, own in enumerate(rows):
      start[n, : len(own)] = [at[text] for text in own]
    return Strings(
      jax.device_put(whole, jax.P(None, None)), jax.device_put(start, mesh.whole_BT)
    )

  def _compile(self, string: bytes) -> Int[np.ndarray, 'L V']:
    """The state after each token, from each; its complement if the string has ended."""
    L, V = len(string), len(self._order)
    after, last = automaton(string)
    state = np.tile(np.arange(L)[:, None], V)
    ended = np.zeros((L, V), bool)
    for j, n in enumerate(self._longer):
      now = after[state[:, :n], self._bytes[self._first[:n] + j]]
      ended[:, :n] |= now == L
      state[:, :n] = np.where(now == L, last, now)
    out = np.empty((L, V), np.int32)
    out[:, self._order] = np.where(ended, ~state, state)
    return out


def automaton(string: bytes) -> tuple[Int[np.ndarray, 'L 256'], int]:
  """How much of the string is there after each byte, from each state, L being all of
  it; and how much of its start a whole one ends with."""
  after = np.zeros((len(string), 256), np.int64)
  border = 0  # the state after string[1:n]
  for n, byte in enumerate(string):
    after[n] = after[border]
    after[n, byte] = n + 1
    border = int(after[border, byte]) if n else 0
  return after, border


def advance(
  table: Int[Array, 'R V'], state: Int[Array, 'B n'], tokens: Int[Array, 'B N']
) -> tuple[Bool[Array, 'B N'], Int[Array, 'B M n']]:
  """Whether a string has ended in each token, and the states before the first token,
  after it, after the second, …: M = N + 1."""

  def rows(table, state, tokens):
    ended, states = [], [state]
    for n in range(tokens.shape[1]):
      found = table[states[-1], tokens[:, n, None]].astype(state.dtype)
      ended.append((found < 0).any(-1))
      states.append(jnp.where(found < 0, ~found, found))
    return jnp.stack(ended, 1), jnp.stack(states, 1)

  # A device's own rows: a look-up by sharded indices would lose their sharding.
  whole, deep = mesh.whole_BT, jax.P(mesh.BATCH, None, None)
  run = jax.shard_map(
    rows, in_specs=(jax.P(None, None), whole, whole), out_specs=(whole, deep)
  )
  return run(table, *(jax.reshard(x, whole) for x in (state, tokens)))


def tail(spelt: Sequence[bytes], strings: Sequence[str]) -> bytes:
  """What a text of these tokens holds from a string on that ends in the last of them:
  the one that is whole first, and of those the longest. b'' if there is none."""
  text, found = b''.join(spelt), []
  for string in (one.encode() for one in strings):
    at = text.find(string, max(0, len(text) - len(spelt[-1]) - len(string) + 1))
    if at >= 0:
      found.append((at + len(string), at))
  return text[min(found)[1] :] if found else b''


def undecided(text: str, strings: Sequence[str]) -> int:
  """How many characters at the end of a text may be the start of a string."""
  longest = 0
  for string in strings:
    for size in range(min(len(text), len(string) - 1), longest, -1):
      if text.endswith(string[:size]):
        longest = size
        break
  return longest
