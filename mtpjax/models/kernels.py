"""Attention of rows to one another, by the kernel that the platform has.

XLA's on a CPU, splash (Pallas) on a TPU, cuDNN's flash attention on an NVIDIA GPU. The
last two never hold a score for every pair of rows, so memory grows with T and not T².

They know rows by their index: up to one's own, in the same segment. That is
`attention.visibility` wherever documents lie side by side, each in order, as loaders
hand them over; only padding, which nobody looks at, sees other padding. Rows with an
order or hidden rows of their own (registers) and queries with keys of their own
(`attend='rows'` of a sequential drafter) go through XLA, as does every decode.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from mtpjax import mesh
from mtpjax.fields import ConfigError
from mtpjax.models import attention
from mtpjax.models.attention import Rows

Kernel = Literal['xla', 'cudnn', 'splash']

PLATFORMS: dict[str, Kernel] = {'tpu': 'splash', 'gpu': 'cudnn'}  # others: 'xla'
BLOCK = 128  # splash reads rows by as many, or by a multiple up to
LARGEST = 512
SAVED = 'attention'  # the name of what splash's gradient needs of its output


def platform() -> str:
  """Of the mesh that is set: 'cpu', 'gpu' or 'tpu'."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return jax.default_backend() if device is None else device.platform


def lacks(
  kernel: Kernel, config: Any, length: int, packed: bool
) -> tuple[str, str] | None:
  """What keeps a kernel from rows of this length on this mesh, and what would help.

  Args:
    config: the trunk's.
    packed: whether a row may hold several documents.
  """
  context = mesh.axis_size('context')
  if kernel == 'splash':
    step = BLOCK * context
    if config.dtype == 'float64':
      return 'has no float64', 'use another trunk.dtype'
    if length % step:
      parts = '' if context == 1 else f' over mesh.context={context}'
      return (
        f'reads rows in blocks of {BLOCK}, and data.length={length}{parts} is no whole '
        'number of them',
        f'use a multiple of {step}, such as {-(-length // step) * step}',
      )
  if kernel == 'cudnn':
    widest = 256 if _capability() >= (9, 0) else 128
    if platform() != 'gpu' or _capability() < (8, 0):
      return 'needs an NVIDIA GPU, an A100 or newer', 'use None, for what there is'
    if config.dtype != 'bfloat16':
      return f'has no {config.dtype}', "use trunk.dtype='bfloat16'"
    if config.head_width % 8 or config.head_width > widest:
      return (
        f'does not fit trunk.head_width={config.head_width}',
        f'use a multiple of 8 up to {widest}',
      )
    if config.attention_softcap is not None:
      return 'caps no scores', 'use trunk.attention_softcap=None'
    if context > 1:
      return f'does not divide time by mesh.context={context}', 'use mesh.context=1'
    if packed and length % 2:
      return f'masks no odd data.length={length}', f'use {length + 1}, or no packing'
  return None


def choose(config: Any, length: int, packed: bool) -> tuple[Kernel, str]:
  """The kernel for rows in plain order, and why it is not the platform's own: the one
  place that decides. What `finalize` has not refused falls back to XLA."""
  own = PLATFORMS.get(platform(), 'xla')
  wanted = own if config.attention is None else config.attention
  if missing := lacks(wanted, config, length, packed):
    return 'xla', f'{wanted} {missing[0]}'
  if wanted == 'cudnn' and config.attention is None and packed:
    return 'xla', (
      "cudnn knows no documents: data.pack=False spares it a mask, trunk.attention='cu"
      "dnn' gives it one of data.length² for each row"
    )
  if wanted == 'splash' and own != 'splash':
    return wanted, 'interpreted, for tests: slow'
  return wanted, ''


def check(config: Any, length: int, packed: bool) -> None:
  """Refuses a kernel that was asked for by name and cannot do it."""
  kernel = config.attention
  missing = None if kernel is None else lacks(kernel, config, length, packed)
  if missing is not None:
    fix = f"{missing[1]}, or trunk.attention='xla'"
    raise ConfigError('trunk.attention', kernel, missing[0], fix)


def attend(
  q_BTHC: Float[Array, 'B T H C'],
  k_BTGC: Float[Array, 'B T G C'],
  v_BTGC: Float[Array, 'B T G C'],
  rows: Rows,
  config: Any,
  window: int,
) -> Float[Array, 'B T H C']:
  """Attention of rows to one another, as training sees them.

  Args:
    config: the trunk's.
    window: a query sees itself and `window - 1` positions before; 0 is no limit.
  """
  kernel, cap = 'xla', config.attention_softcap
  if rows.order is None and rows.visible is None:
    kernel, _ = choose(config, q_BTHC.shape[1], rows.packed)
  if kernel == 'splash':
    return splash(q_BTHC, k_BTGC, v_BTGC, rows.segments, window, cap)
  if kernel == 'cudnn':
    segments = rows.segments if rows.packed else None
    return dot_product(q_BTHC, k_BTGC, v_BTGC, segments, window, 'cudnn')
  seen = attention.visibility(rows, rows.whole(), window)
  return attention.attend(q_BTHC, k_BTGC, v_BTGC, seen, cap)


def splash(
  q_BTHC: Float[Array, 'B T H C'],
  k_BTGC: Float[Array, 'B T G C'],
  v_BTGC: Float[Array, 'B T G C'],
  segments_BT: Int[Array, 'B T'],
  window: int = 0,
  softcap: float | None = None,
) -> Float[Array, 'B T H C']:
  """Block-sparse flash attention on a TPU, interpreted elsewhere.

  Every device has its heads and its part of the queries' time; keys are whole. Blocks
  that no query of a device sees are not read, so of the parts of time the last has the
  most to do.
  """
  T, H, C = q_BTHC.shape[1:]
  k_BTGC, v_BTGC = _whole_keys(k_BTGC, H), _whole_keys(v_BTGC, H)
  context = mesh.axis_size('context')
  block_q, block_k = _block(T // context), _block(T)
  mask = splash_attention.CausalMask((T, T))
  if 0 < window < T:
    mask = splash_attention.LocalMask((T, T), (window - 1, 0), 0)
  heads = [mask] * (H // mesh.axis_size('tensor'))
  kernel = splash_attention.make_splash_mha(
    splash_attention.MultiHeadMask(heads),
    block_sizes=splash_attention.BlockSizes(
      block_q=block_q,
      block_kv=block_k,
      block_q_dkv=block_q,
      block_kv_dkv=block_k,
      block_q_dq=block_q,
      block_kv_dq=block_k,
    ),
    head_shards=1,
    q_seq_shards=context,
    attn_logits_soft_cap=softcap,
    residual_checkpoint_name=SAVED,
    interpret=platform() != 'tpu',
  )
  over = jax.NamedSharding(jax.sharding.get_abstract_mesh(), P(None, 'context'))
  specs = kernel.manual_sharding_spec(over)

  def local(kernel, q, k, v, own, every):
    ids = splash_attention.SegmentIds(own, every)
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q * C**-0.5, k, v))
    return jnp.swapaxes(jax.vmap(kernel)(q, k, v, ids), 1, 2)

  keys = P(mesh.BATCH, None, 'tensor', None)
  return jax.shard_map(
    local,
    in_specs=(specs, mesh.act_BTHC, keys, keys, mesh.ids_BT, mesh.whole_BT),
    out_specs=mesh.act_BTHC,
    check_vma=False,  # the kernel's outputs do not say over which axes they vary
  )(
    jax.tree.map(jax.reshard, kernel, specs),
    q_BTHC,
    k_BTGC,
    v_BTGC,
    segments_BT,
    jax.reshard(segments_BT, mesh.whole_BT),
  )


def dot_product(
  q_BTHC: Float[Array, 'B T H C'],
  k_BTGC: Float[Array, 'B T G C'],
  v_BTGC: Float[Array, 'B T G C'],
  segments_BT: Int[Array, 'B T'] | None,
  window: int = 0,
  implementation: Literal['xla', 'cudnn'] = 'cudnn',
) -> Float[Array, 'B T H C']:
  """JAX's own attention, each device with its heads and rows of the batch.

  Args:
    segments_BT: for a mask [T, T] of each row; None if a row is one document, whose
      tokens come before all padding, so that causal order says it all.
  """
  k_BTGC, v_BTGC = (_whole_keys(x, q_BTHC.shape[2]) for x in (k_BTGC, v_BTGC))

  def local(q, k, v, segments):
    mask = None
    if segments is not None:
      mask = segments[:, None, :, None] == segments[:, None, None, :]
    return jax.nn.dot_product_attention(
      q,
      k,
      v,
      mask=mask,
      is_causal=True,
      local_window_size=(window - 1, 0) if window else None,
      implementation=implementation,
    )

  keys = P(mesh.BATCH, None, 'tensor', None)
  return jax.shard_map(
    local,
    in_specs=(mesh.act_BTHC, keys, keys, mesh.whole_BT),
    out_specs=mesh.act_BTHC,
    check_vma=False,
  )(
    q_BTHC,
    k_BTGC,
    v_BTGC,
    None if segments_BT is None else jax.reshard(segments_BT, mesh.whole_BT),
  )


def _whole_keys(x_BTGC: Array, heads: int) -> Array:
  """Whole in time and sharded over 'tensor': groups if they divide over it, or else a
  copy for every query head."""
  groups = x_BTGC.shape[2]
  x_BTGC = jax.reshard(x_BTGC, mesh.key_BSGC(groups))
  if mesh.heads_axis(groups) is None:
    return attention.each_query_head(x_BTGC, heads)
  return x_BTGC


def _block(length: int) -> int:
  """The largest whole part that splash can read at once."""
  return max(n for n in range(BLOCK, LARGEST + 1, BLOCK) if length % n == 0)


def _capability() -> tuple[int, ...]:
  """Of the GPU, (8, 0) for an A100; one that is not here is taken for a newer one."""
  if jax.default_backend() != 'gpu':
    return (9, 0)
  return tuple(int(n) for n in jax.local_devices()[0].compute_capability.split('.'))
