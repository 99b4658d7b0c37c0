"""Targets of every depth, and the fused, chunked, vocabulary-sharded loss.

Depth 0 is the next token; depth k predicts t[i+k+1]. `L = L_0 + λ Σ_k w_k L_k`, each
L_k the mean over that depth's own valid targets. Nothing here divides by a local count:
the weights a caller passes are λ·w_k·valid / count_k with the true global count.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from mtpjax import mesh
from mtpjax.fields import ConfigError
from mtpjax.models.attention import MASKED, Leaf
from mtpjax.models.layers import softcap, wide
from mtpjax.models.trunk import Head


@dataclasses.dataclass
class Config:
  z_loss: float = 0.0  # weight of (log Z)², which keeps logits from drifting
  chunk_tokens: int = 1024  # tokens of a device whose logits exist at one time

  def finalize(self) -> None:
    if self.chunk_tokens < 1:
      raise ConfigError(
        'loss.chunk_tokens', self.chunk_tokens, 'is not positive', 'use e.g. 1024'
      )
    if not self.z_loss >= 0:
      raise ConfigError('loss.z_loss', self.z_loss, 'is negative', 'use 0 for none')


# ------------------------------------------------------------------------------ targets


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Targets:
  """What the rows should predict at each depth.

  Attributes:
    ids: target tokens, int [K, B, T]; or arrays [K, B, T, ...] that a loss reads.
    valid: which of them count, [K, B, T].
    are_tokens: whether `ids` are, so that evaluation can give bits per byte.
  """

  ids: Leaf
  valid: Leaf
  are_tokens: bool = dataclasses.field(default=True, metadata={'static': True})

  @property
  def counts(self) -> Int[Array, ' K']:
    return jnp.sum(self.valid, (1, 2), dtype=jnp.int32)


def shift(x_BT: Array, by: int) -> Array:
  """x[i + by], zeros (False) beyond the row. For integers and masks only."""
  x = jax.reshard(x_BT, mesh.whole_BT)
  # Padded before it is sliced: a slice of one row and one token loses its sharding.
  x = jnp.pad(x, ((0, 0), (0, min(by, x.shape[1]))))[:, -x.shape[1] :]
  return jax.reshard(x, mesh.ids_BT)


def depth_inputs(
  tokens_BT: Int[Array, 'B T'], segments_BT: Int[Array, 'B T'], depths: Sequence[int]
) -> tuple[Int[Array, 'K B T'], Bool[Array, 'K B T']]:
  """Depth k's teacher-forced input t[i+k] and its validity, seg[i] == seg[i+k] != 0.

  From the unshifted arrays: shifting an already masked array again and again leaks
  across documents from depth 2 on.
  """
  tokens = jnp.stack([shift(tokens_BT, k) for k in depths])
  same = [(segments_BT == shift(segments_BT, k)) & (segments_BT != 0) for k in depths]
  return tokens, jnp.stack(same)


def depth_targets(
  tokens_BT: Int[Array, 'B T'],
  segments_BT: Int[Array, 'B T'],
  mask_BT: Bool[Array, 'B T'],
  depths: Sequence[int],
  whole_path: bool = False,
) -> Targets:
  """Depth k's target t[i+k+1], valid iff in the same document and `mask[i+k+1]`.

  Args:
    mask_BT: loss mask of targets.
    whole_path: also ask for mask[i+1..i+k+1], the pairs that sampling will ask a
      drafter of a frozen trunk for.
  """
  ids, same = depth_inputs(tokens_BT, segments_BT, [k + 1 for k in depths])
  valid = []
  for n, k in enumerate(depths):
    first = 1 if whole_path else k + 1
    ok = same[n]
    for j in range(first, k + 2):
      ok = ok & shift(mask_BT, j)
    valid.append(ok)
  return Targets(ids, jnp.stack(valid))


def depth_weights(depth: int, rho: float) -> tuple[float, ...]:
  """w_k ∝ ρ^(k-1), Σ w_k = 1, for k = 1..depth."""
  raw = [rho**k for k in range(depth)]
  return tuple(w / sum(raw) for w in raw)


def normalised(targets: Targets, counts: Int[Array, ' K'], weights: Float[Array, ' K']):
  """weight_k · valid / count_k; a depth without any target anywhere weighs nothing."""
  scale = weights / jnp.maximum(counts, 1).astype(weights.dtype)
  return targets.valid.astype(weights.dtype) * scale[:, None, None]


# --------------------------------------------------------------------------------- loss

# (logits [*shape, V] in float32 or wider, `Targets.ids` [*shape, ...]) ->
#   (value to minimise, figure to report in its place, agreement), each [*shape]
# The logits are one chunk, sharded over V: reduce over it, and pick entries by
# comparing with `vocabulary(logits)`; indexing a sharded axis has no gradient.
Loss = Callable[[Array, Any], tuple[Array, Array, Array]]


def cross_entropy(logits: Array, ids: Array, z_loss: float = 0.0):
  """-log p(id) in nats, plus z_loss·(log Z)²; agreement is of the top-1 token."""
  log_z = jax.nn.logsumexp(logits, -1)
  hit = vocabulary(logits) == ids[..., None]
  nll = log_z - jnp.sum(jnp.where(hit, logits, 0), -1)
  return nll + z_loss * log_z**2, nll, jnp.argmax(logits, -1) == ids


def vocabulary(logits: Array) -> Array:
  """0..V-1 on the last axis, sharded as the logits are."""
  shape = (1,) * (logits.ndim - 1) + logits.shape[-1:]
  spec = P(*(None,) * (logits.ndim - 1), jax.typeof(logits).sharding.spec[-1])
  return jax.reshard(jnp.arange(logits.shape[-1]).reshape(shape), spec)


def head_logits(
  hidden: Float[Array, '*rows D'], head: Head | tuple[Head, ...]
) -> Float[Array, '*rows V']:
  """Logits in float32 or wider, sharded over the vocabulary; for sampling.

  Args:
    head: of all rows, or one for each entry of their first axis.
  """
  if isinstance(head, tuple):
    each = [head_logits(h, one) for h, one in zip(hidden, head, strict=True)]
    return jnp.stack(each)
  w_VD = mesh.gathered(head.w_VD.astype(hidden.dtype))
  dtype = wide(hidden.dtype)
  logits = jnp.einsum('...D,VD->...V', hidden, w_VD, preferred_element_type=dtype)
  return finish_logits(logits, head)


def finish_logits(logits: Array, head: Head) -> Array:
  """Soft-cap, and no probability for the padding of the table."""
  logits = softcap(logits, head.softcap)
  if head.vocab == logits.shape[-1]:
    return logits
  return jnp.where(vocabulary(logits) < head.vocab, logits, MASKED)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Sums:
  """Per depth [K], over the valid targets; everything divides once, at the end.

  `nll` and `correct` are sums in nats and agreements, `count` the number of targets.
  """

  nll: Leaf
  correct: Leaf
  count: Leaf

  def __add__(self, other: Sums) -> Sums:
    return jax.tree.map(jnp.add, self, other)


def fused(
  hidden_KBTD: Float[Array, 'K B T D'],
  head: Head,
  targets: Targets,
  weights_KBT: Float[Array, 'K B T'],
  loss: Loss,
  chunk_tokens: int,
  trains_head: tuple[bool, ...] | None = None,
) -> tuple[Float[Array, ''], Sums]:
  """Σ weights · loss(head(hidden), targets), and the per-depth sums.

  Logits exist for one chunk of tokens at a time, sharded over the vocabulary; the
  gradients with respect to `hidden` and the head are formed in the same pass. Only the
  total is differentiable, and only in `hidden_KBTD` and `head.w_VD`.

  Args:
    hidden_KBTD: normalised hidden states of all depths that share this head.
    chunk_tokens: tokens a device holds logits for at one time.
    trains_head: per depth, whether its loss reaches the head (default: all).
  """
  K, B, T = hidden_KBTD.shape[:3]
  groups, parts = mesh.axis_size(*mesh.BATCH), mesh.axis_size('context')
  local = T // parts
  chunk = min(max(chunk_tokens // (B // groups), 1), local)
  # The nearest size that divides, if there is one close by; else the rows are padded.
  chunk = next((c for c in range(chunk, chunk // 2, -1) if local % c == 0), chunk)
  chunks = -(-local // chunk)

  def split(x):
    """[K, B, T, ...] -> [K, g, b, X, n, c, ...]: whole axes to scan, none moved."""
    rest = x.shape[3:]
    none = (None,) * len(rest)
    spec = P(None, mesh.BATCH, None, 'context', None, *none)
    x = x.reshape((K, groups, B // groups, parts, local, *rest), out_sharding=spec)
    short = chunks * chunk - local
    if short:
      widths = [(0, 0)] * 4 + [(0, short)] + [(0, 0)] * len(rest)
      x = jnp.pad(x, widths)
    shape = (K, groups, B // groups, parts, chunks, chunk, *rest)
    return x.reshape(shape, out_sharding=P(*spec[:5], None, *none))

  w_VD = mesh.gathered(head.w_VD.astype(hidden_KBTD.dtype))
  # pyright takes a custom_vjp for the partial that made it.
  total, (nll, correct) = cast(Any, _fused)(
    split(hidden_KBTD),
    w_VD,
    jax.tree.map(split, targets.ids),
    split(weights_KBT),
    split(targets.valid),
    _Static(head.vocab, head.softcap, loss, trains_head or (True,) * K),
  )
  return total, Sums(nll, correct, targets.counts)


@dataclasses.dataclass(frozen=True)
class _Static:
  vocab: int
  softcap: float | None
  loss: Loss
  trains_head: tuple[bool, ...]


def _chunks(
  hidden, w_VD, ids, weights, valid, static: _Static, with_gradient: bool
) -> tuple[Any, Any]:
  """One pass over the chunks, of one depth after another.

  Shapes: hidden [K, g, b, X, n, c, D], the others alike; g and X are the mesh's shares
  of batch and time, so that no collective ever moves hidden states.
  """
  K, g, _, X, n = hidden.shape[:5]
  rows = P(mesh.BATCH, None, 'context', None)
  dtype = wide(hidden.dtype)
  flags = jnp.asarray(static.trains_head, dtype)

  def body(carry, index):
    k, j = index // n, index % n

    def take(x):
      one = jax.lax.dynamic_index_in_dim(x, k, 0, keepdims=False)
      return jax.lax.dynamic_index_in_dim(one, j, 3, keepdims=False)

    h, t, a, ok = (jax.tree.map(take, x) for x in (hidden, ids, weights, valid))

    def value(logits):
      logits = finish_logits(logits, Head(w_VD, static.vocab, static.softcap))
      value, nll, correct = static.loss(logits, t)
      counted = jnp.sum(jnp.where(ok, nll, 0)), jnp.sum((correct & ok).astype(dtype))
      return jnp.sum(jnp.where(a != 0, value, 0) * a.astype(dtype)), counted

    logits = jnp.einsum('gbxcd,vd->gbxcv', h, w_VD, preferred_element_type=dtype)
    if not with_gradient:
      total, counted = value(logits)
      return carry, (total, *counted)
    (total, counted), dz = jax.value_and_grad(value, has_aux=True)(logits)
    dh, dw = carry
    # A loss may be NaN on fill, which counts for nothing.
    dz = jnp.where((a != 0)[..., None], dz, 0).astype(h.dtype)
    one = jnp.einsum('gbxcv,vd->gbxcd', dz, w_VD, out_sharding=P(*rows, None))
    dh = jax.lax.dynamic_update_slice(
      dh, one[None, :, :, :, None], (k, 0, 0, 0, j, 0, 0)
    )
    if any(static.trains_head):
      share = jnp.einsum(
        'gbxcd,gbxcv->gxvd',
        h,
        dz if all(static.trains_head) else dz * flags[k].astype(dz.dtype),
        preferred_element_type=dtype,
        out_sharding=P(mesh.BATCH, 'context', 'tensor', None),
      )
      dw = dw + share
    return (dh, dw), (total, *counted)

  carry: Any = None
  if with_gradient:
    spec = P(mesh.BATCH, 'context', 'tensor', None)
    shape = (g, X, *w_VD.shape) if any(static.trains_head) else (g, X, 0, 0)
    carry = (
      jnp.zeros_like(hidden),
      jnp.zeros(shape, dtype, out_sharding=spec),
    )
  carry, (totals, nll, correct) = jax.lax.scan(body, carry, jnp.arange(K * n))
  sums = tuple(jnp.sum(x.reshape(K, n), 1) for x in (nll, correct))
  return (jnp.sum(totals), sums), carry


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _fused(hidden, w_VD, ids, weights, valid, static):
  return _chunks(hidden, w_VD, ids, weights, valid, static, with_gradient=False)[0]


def _forward(hidden, w_VD, ids, weights, valid, static):
  out, (dh, dw) = _chunks(hidden, w_VD, ids, weights, valid, static, True)
  if not any(static.trains_head):
    return out, (dh, jnp.zeros_like(w_VD))
  return out, (dh, jnp.sum(dw, (0, 1)).astype(w_VD.dtype))


def _backward(static, kept, cotangent):
  dh, dw = kept
  scale = cotangent[0]
  return scale.astype(dh.dtype) * dh, scale.astype(dw.dtype) * dw, None, None, None


cast(Any, _fused).defvjp(_forward, _backward)
