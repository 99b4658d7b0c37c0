"""The device mesh, and the one table of shardings, named by shape.

Letters are those of `models/trunk.py`. A mesh always has all five axes, (1, 1, 1, 1, 1)
on one CPU, so no code asks whether there is one. All axes are Explicit: a wrong
sharding is a type error at trace time.
"""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mtpjax.fields import ConfigError

AXES = ('replica', 'fsdp', 'tensor', 'context', 'expert')
# Rows of a batch are spread over every axis that holds no part of a row.
BATCH = ('replica', 'fsdp', 'expert')
# At rest a weight is spread over every axis but 'replica', which holds copies.
STORED = ('fsdp', 'context', 'expert')
# Which axes go over the slow network first: those with the least to send.
OUTER = (*BATCH, 'context', 'tensor')

# Activations and integer inputs.
ids_B = P(BATCH)
ids_BT = P(BATCH, 'context')
ids_KBT = P(None, BATCH, 'context')
act_BTD = P(BATCH, 'context', None)
act_KBTD = P(None, BATCH, 'context', None)
act_BTHC = P(BATCH, 'context', 'tensor', None)
whole_BT = P(BATCH, None)  # time unsharded: keys' positions, shifted tokens

# Weights at rest; `gathered` drops STORED where one is used.
w_VD = P('tensor', STORED)
w_PD = P(None, STORED)
w_DHC = P(STORED, 'tensor', None)
w_HCD = P('tensor', None, STORED)
w_DF = P(STORED, 'tensor')
w_FD = P('tensor', STORED)
w_DD = P(STORED, 'tensor')
gain = P(None)
bias_HC = P('tensor', None)


def heads_axis(heads: int) -> str | None:
  """'tensor' if `heads` divides over it, else None (key-value heads are then whole)."""
  return 'tensor' if heads % axis_size('tensor') == 0 else None


def w_DGC(heads: int) -> P:
  return P(STORED, heads_axis(heads), None)


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
  """All-gathers a weight that is spread at rest, for the moment of its use."""
  spec = jax.typeof(w).sharding.spec
  return jax.reshard(w, P(*(None if axis == STORED else axis for axis in spec)))


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
  placed = place(sizes, devices)
  return Mesh(placed, AXES, axis_types=(AxisType.Explicit,) * len(AXES))


def place(sizes: dict[str, int], devices: Sequence[Any]) -> np.ndarray:
  """Devices by their coordinates on AXES, neighbours where the network is fast.

  A slow network joins slices, or processes where no devices say their slice. The first
  axes of OUTER go over it, each by as much as divides; the others stay within a slice.

  Args:
    sizes: of every axis; their product is the number of devices.

  Raises:
    ConfigError: one slice has more devices than another.
  """
  unit, shape = _unit(devices), tuple(sizes[axis] for axis in AXES)
  if unit is None:
    return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
  counts = collections.Counter(getattr(device, unit) for device in devices)
  if len(set(counts.values())) > 1:
    kind = 'slices' if unit == 'slice_index' else 'processes'
    each = ', '.join(str(count) for _, count in sorted(counts.items()))
    raise ConfigError(
      'mesh',
      ' × '.join(f'{axis} {size}' for axis, size in sizes.items()),
      f'cannot be laid over {kind} of {each} devices',
      f'use {kind} of equally many',
    )
  # What is left of the number of slices divides the sizes that are left, to the end.
  left, outer = len(counts), {}
  for axis in OUTER:
    outer[axis] = math.gcd(left, sizes[axis])
    left //= outer[axis]
  return mesh_utils.create_hybrid_device_mesh(
    [sizes[axis] // outer[axis] for axis in AXES],
    [outer[axis] for axis in AXES],
    devices,
    process_is_granule=unit == 'process_index',
    allow_split_physical_axes=True,
  )


def _unit(devices: Sequence[Any]) -> str | None:
  """What a device says of its slice; None where one network joins all of them."""
  # GPUs of one node are a slice, whatever their processes; CPUs say nothing.
  if len({d.slice_index for d in devices if hasattr(d, 'slice_index')}) > 1:
    return 'slice_index'
  one = devices[0].platform == 'tpu' or len({d.process_index for d in devices}) == 1
  return None if one else 'process_index'


def whole_in_time() -> Mesh:
  """The mesh that is set, with what 'context' has given to 'fsdp': for decoding, which
  has no time to split. Weights at rest stay where they are."""
  mesh = jax.sharding.get_mesh()
  replica, fsdp, tensor, context, expert = mesh.devices.shape
  devices = np.moveaxis(mesh.devices, AXES.index('context'), AXES.index('tensor'))
  devices = devices.reshape(replica, fsdp * context, tensor, 1, expert)
  return Mesh(devices, AXES, axis_types=mesh.axis_types)


def moved(tree: Any) -> Any:
  """The same arrays, sharded alike over the mesh that is set."""
  mesh = jax.sharding.get_mesh()

  def one(x):
    return jax.device_put(x, NamedSharding(mesh, jax.typeof(x).sharding.spec))

  return jax.tree.map(one, tree)
