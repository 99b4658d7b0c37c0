"""The device mesh, and the one table of shardings, named by shape.

Letters are those of `models/trunk.py`. A mesh always has all five axes, (1, 1, 1, 1, 1)
on one CPU, so no code asks whether there is one. All axes are Explicit: a wrong
sharding is a type error at trace time.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from mtpjax.fields import ConfigError

AXES = ('replica', 'fsdp', 'tensor', 'context', 'expert')
# Rows of a batch are spread over every axis that holds no part of a row.
BATCH = ('replica', 'fsdp', 'expert')

# Activations and integer inputs.
ids_B = P(BATCH)
ids_BT = P(BATCH, 'context')
ids_KBT = P(None, BATCH, 'context')
act_BTD = P(BATCH, 'context', None)
act_KBTD = P(None, BATCH, 'context', None)
act_BTHC = P(BATCH, 'context', 'tensor', None)
whole_BT = P(BATCH, None)  # time unsharded: keys' positions, shifted tokens

# Weights at rest; `gathered` drops 'fsdp' where one is used.
w_VD = P('tensor', 'fsdp')
w_PD = P(None, 'fsdp')
w_DHC = P('fsdp', 'tensor', None)
w_HCD = P('tensor', None, 'fsdp')
w_DF = P('fsdp', 'tensor')
w_FD = P('tensor', 'fsdp')
w_DD = P('fsdp', None)
gain = P(None)
bias_HC = P('tensor', None)


def heads_axis(heads: int) -> str | None:
  """'tensor' if `heads` divides over it, else None (key-value heads are then whole)."""
  return 'tensor' if heads % axis_size('tensor') == 0 else None


def w_DGC(heads: int) -> P:
  return P('fsdp', heads_axis(heads), None)


def bias_GC(heads: int) -> P:
  return P(heads_axis(heads), None)


def key_BSGC(heads: int) -> P:
  """Keys and values: every query may look at all of time."""
  return P(BATCH, None, heads_axis(heads), None)


def cached_keys(heads: int) -> P:
  """The same in a cache, heads first."""
  return P(BATCH, heads_axis(heads), None, None)


def stacked(spec: P) -> P:
  """The same weight, once a layer, depth or module."""
  return P(None, *spec)


def gathered(w: jax.Array) -> jax.Array:
  """All-gathers a weight over 'fsdp', for the moment of its use."""
  spec = jax.typeof(w).sharding.spec
  return jax.reshard(w, P(*(None if axis == 'fsdp' else axis for axis in spec)))


def axis_size(*axes: str) -> int:
  mesh = jax.sharding.get_abstract_mesh()
  return math.prod(mesh.shape[axis] for axis in axes)


def axis_sizes() -> dict[str, int]:
  """Every axis and its size."""
  return dict(jax.sharding.get_abstract_mesh().shape)


@dataclasses.dataclass
class Config:
  """Sizes of the mesh axes; one may be -1 and takes the devices that are left."""

  replica: int = 1  # copies of the whole model, across slices or hosts
  fsdp: int = -1  # rows of the batch, and the stored parameters
  tensor: int = 1  # heads, feed-forward width, vocabulary
  context: int = 1  # time
  expert: int = 1  # experts; without any, rows of the batch


def make(config: Config, devices: Sequence[Any] | None = None) -> Mesh:
  """The mesh of `config` over `devices` (default: all).

  Raises:
    ConfigError: the sizes do not multiply to the number of devices.
  """
  devices = jax.devices() if devices is None else devices
  sizes = {axis: getattr(config, axis) for axis in AXES}
  free = [axis for axis, size in sizes.items() if size == -1]
  fixed = math.prod(size for size in sizes.values() if size != -1)
  said = ' × '.join(f'{axis} {size}' for axis, size in sizes.items())
  for axis, size in sizes.items():
    if size < 1 and size != -1:
      raise ConfigError(
        f'mesh.{axis}', size, 'is no size of an axis', 'use a positive number, or -1'
      )
  if len(free) > 1:
    raise ConfigError('mesh', said, 'has more than one -1', 'give all sizes but one')
  if len(devices) % fixed or (not free and fixed != len(devices)):
    raise ConfigError(
      'mesh',
      said,
      f'does not multiply to the {len(devices)} devices there are',
      f'make the product {len(devices)}, or leave one axis at -1',
    )
  for axis in free:
    sizes[axis] = len(devices) // fixed
  return jax.make_mesh(
    tuple(sizes.values()), AXES, (AxisType.Explicit,) * len(AXES), devices=devices
  )
