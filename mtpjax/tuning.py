"""Which parameters train: by name, and in a stack of layers by number.

A parameter's name is its path, 'objectives/drafter/gain_out'; one of a stack of blocks
has the layer's number after the stack: 'trunk/blocks/3/w_up'. Patterns are those of
`fnmatch`, whose `*` runs over slashes too, and 'trunk/blocks/4-15/*' is a range of
layers; so is 'trunk/blocks/[4-15]/*'.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Container, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jaxtyping import PyTree

from mtpjax import fields
from mtpjax.fields import ConfigError

Path = tuple[str, ...]
# Of each parameter that trains: which layers of its stack do, None for all of it.
Selection = dict[Path, np.ndarray | None]


def flat(tree: dict) -> dict[Path, Any]:
  """The leaves by their paths."""
  return cast(dict[Path, Any], traverse_util.flatten_dict(tree))


def select(params: dict, freeze_trunk: bool, tune: tuple[str, ...]) -> Selection:
  """What trains: all that `freeze_trunk` leaves, or what of it a pattern matches.

  Args:
    params: nested; only names and shapes matter.

  Raises:
    ConfigError: nothing trains, or a pattern matches nothing.
  """
  every = flat(params)
  free = {p: x for p, x in every.items() if not (freeze_trunk and p[0] == 'trunk')}
  if not free:
    fix = 'use a drafter that has parameters of its own, or freeze_trunk=False'
    raise ConfigError('freeze_trunk', True, 'leaves nothing to train', fix)
  if not tune:
    return dict.fromkeys(free)
  names = {path: _names(path, x.shape) for path, x in free.items()}
  found = {path: np.zeros(len(each), bool) for path, each in names.items()}
  for pattern in tune:
    any_of = [re.compile(fnmatch.translate(p)) for p in _ranges(pattern)]
    hits = 0
    for path, each in names.items():
      matched = [any(p.match(name) for p in any_of) for name in each]
      hits += sum(matched)
      found[path] |= matched
    if not hits:
      raise _nothing(pattern, every, freeze_trunk)
  return {p: None if on.all() else on for p, on in found.items() if on.any()}


def _stack(path: Path) -> int | None:
  """Where in the path the stack of blocks is whose layers are numbered."""
  return next((n for n, key in enumerate(path[:-1]) if key.startswith('block')), None)


def _names(path: Path, shape: tuple[int, ...]) -> list[str]:
  at = _stack(path)
  if at is None:
    return ['/'.join(path)]
  before, after = '/'.join(path[: at + 1]), '/'.join(path[at + 1 :])
  return [f'{before}/{layer}/{after}' for layer in range(shape[0])]


def _ranges(pattern: str) -> list[str]:
  """The pattern once for each number of its range of layers."""
  found = re.search(r'(?<=/)\[?(\d+)-(\d+)\]?(?=/|$)', pattern)
  if not found:
    return [pattern]
  first, last = map(int, found.groups())
  if not first <= last < 10_000:
    raise ConfigError(
      'tune', pattern, 'is no range of layers', 'write the lower number first'
    )
  before, after = pattern[: found.start()], pattern[found.end() :]
  return [f'{before}{n}{after}' for n in range(first, last + 1)]


def _nothing(
  pattern: str, every: Mapping[Path, Any], freeze_trunk: bool
) -> ConfigError:
  if freeze_trunk and pattern.startswith('trunk'):
    return ConfigError(
      'tune', pattern, 'is frozen by freeze_trunk', 'use freeze_trunk=False'
    )
  names = []
  for path, x in every.items():
    each = _names(path, x.shape)
    if len(each) > 1:
      at = _stack(path)
      assert at is not None
      each = ['/'.join((*path[: at + 1], f'0-{len(each) - 1}', *path[at + 1 :]))]
    names += each
  return ConfigError(
    'tune', pattern, 'matches no parameter', fields.suggest(pattern, names)
  )


def count(params: dict, selection: Selection) -> int:
  """How many numbers train."""
  every, total = flat(params), 0
  for path, on in selection.items():
    size = every[path].size
    total += size if on is None else size // len(on) * int(on.sum())
  return total


def split(params: dict, selection: Container[Path]) -> tuple[dict, dict]:
  """(what trains, in whole or in part; what does not), as nested as the parameters."""
  every = flat(params)
  own = {path: x for path, x in every.items() if path in selection}
  rest = {path: x for path, x in every.items() if path not in selection}
  return traverse_util.unflatten_dict(own), traverse_util.unflatten_dict(rest)


def merge(params: dict, other: dict) -> dict:
  """Both; `other`'s where both have one."""
  return traverse_util.unflatten_dict({**flat(params), **flat(other)})


def only(selection: Selection, new: PyTree, old: PyTree | None = None) -> PyTree:
  """`new`, but in layers that do not train `old` bit for bit, zero without one."""

  def one(path, new, old):
    on = selection[tuple(key.key for key in path)]
    if on is None:
      return new
    return jnp.where(jnp.asarray(on).reshape(-1, *[1] * (new.ndim - 1)), new, old)

  if old is None:
    old = jax.tree.map(jnp.zeros_like, new)
  return jax.tree_util.tree_map_with_path(one, new, old)
