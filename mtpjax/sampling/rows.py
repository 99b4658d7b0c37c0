"""Rows of pytrees whose arrays have the batch first, whole: repeated, taken, put.

Every device does this with its own rows, and nothing moves between devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from mtpjax import mesh


def shards() -> int:
  """Over how many devices' rows a batch is dealt."""
  return mesh.axis_size(*mesh.BATCH)


def apart(f: Callable, *trees: PyTree, like: Callable[..., Any]) -> Any:
  """`f` of each device's own rows.

  Args:
    like: of the same arguments: trees that are sharded as what `f` returns is.
  """
  specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, (trees, like(*trees)))
  return jax.shard_map(f, in_specs=specs[0], out_specs=specs[1])(*trees)


def repeat(tree: PyTree, count: int) -> PyTree:
  """Every row `count` times, side by side."""

  def own(tree):
    return jax.tree.map(lambda x: jnp.repeat(x, count, 0), tree)

  return apart(own, tree, like=lambda tree: tree)


def one(tree: PyTree, at: Array) -> PyTree:
  """Row `at` of a device's own, the batch still first."""
  return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, at, 1), tree)


def put(tree: PyTree, row: PyTree, at: Array) -> PyTree:
  """A device's own with row `at` replaced."""
  write = jax.lax.dynamic_update_slice_in_dim
  return jax.tree.map(lambda x, new: write(x, new, at, 0), tree, row)
