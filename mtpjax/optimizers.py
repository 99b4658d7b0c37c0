"""Optimisers up to the learning rate, and the watch over the loss that skips an update.

Whatever the parameters' dtype, gradients, moments and the update itself are computed in
float32 (float64 for float64); only the parameters and, by option, the first moment are
stored in less.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, PyTree

from mtpjax import mesh, schedules
from mtpjax.fields import ConfigError
from mtpjax.models import layers

# (input, output) dimensions at the end of a weight; what is before them stacks
# matrices. A `w_` of fewer than four dimensions that is not here has one of each. None
# is for Adam.
MATRICES: dict[str, tuple[int, int] | None] = {
  'w_query': (1, 2),
  'w_key': (1, 2),
  'w_value': (1, 2),
  'w_mix': (2, 1),
  # Of experts too, in pairs, or several layers in each module.
  'w_up': (1, 1),
  'w_gate': (1, 1),
  'w_down': (1, 1),
  'w_join': (1, 1),
  'w_map': (1, 1),
}


@dataclasses.dataclass
class Spike:
  """An update is skipped if the loss or the gradient's norm leaves its usual range:
  above mean + `sigmas` · deviation of the updates before, or not finite.

  Statistics are of the accepted steps alone: plain ones at first, over an exponential
  window later. So that a lasting new level is not skipped for ever, the first finite
  step after `patience` skipped ones in a row is accepted, and statistics start anew
  from it. A step that is not finite is never accepted.
  """

  sigmas: float = 6.0
  window: int = 128  # steps
  warmup: int = 64  # accepted steps before any finite one is skipped
  patience: int = 5
  watch: tuple[Literal['loss', 'grad_norm'], ...] = ('loss', 'grad_norm')

  def finalize(self, field: str) -> None:
    for name, least in (('window', 2), ('warmup', 2), ('patience', 1)):
      if getattr(self, name) < least:
        raise ConfigError(
          f'{field}.{name}',
          getattr(self, name),
          'is too few steps',
          f'use at least {least}',
        )
    if not self.sigmas > 0:
      raise ConfigError(f'{field}.sigmas', self.sigmas, 'is not positive', 'use e.g. 6')
    if not self.watch:
      raise ConfigError(
        f'{field}.watch', (), 'watches nothing', "use ('loss', 'grad_norm')"
      )

  def init(self) -> dict[str, Any]:
    def zero(dtype):
      return jnp.zeros((), dtype)

    figures = {n: zero(jnp.float32) for x in self.watch for n in (x, f'{x}_variance')}
    counts = ('accepted', 'in_a_row', 'skipped')  # since the start anew, now, in all
    return {**figures, **{name: zero(jnp.int32) for name in counts}}

  def __call__(
    self, state: dict[str, Any], **seen: Float[Array, '']
  ) -> tuple[Bool[Array, ''], dict[str, Any]]:
    """(skip this update, the statistics after it), given loss and grad_norm."""
    count, row = state['accepted'], state['in_a_row']
    high = jnp.zeros((), bool)
    for name in self.watch:
      deviation = jnp.sqrt(state[f'{name}_variance'])
      high |= seen[name] > state[name] + self.sigmas * deviation
    finite = jnp.isfinite(jnp.stack([x.astype(jnp.float32) for x in seen.values()]))
    high &= count >= self.warmup
    anew = high & (row >= self.patience)
    skip = (high & ~anew) | ~jnp.all(finite)
    count = jnp.where(anew, 0, count) + 1
    part = jnp.maximum(1 / count, 1 / self.window)
    after = {
      'accepted': count,
      'in_a_row': jnp.zeros_like(row),
      'skipped': state['skipped'],
    }
    for name in self.watch:  # West 1979; a part of one forgets what was
      off = seen[name].astype(jnp.float32) - state[name]
      after[name] = state[name] + part * off
      spread = state[f'{name}_variance'] + part * off * off
      after[f'{name}_variance'] = (1 - part) * spread
    held = {**state, 'in_a_row': row + 1, 'skipped': state['skipped'] + 1}
    return skip, chosen(skip, held, after)


@dataclasses.dataclass
class AdamW:
  """AdamW (Loshchilov & Hutter 2019). Matrices decay; tables, gains, biases do not."""

  rate: schedules.Rate = dataclasses.field(default_factory=schedules.WarmupCosine)
  b1: float = 0.9
  b2: float = 0.95
  epsilon: float = 1e-8
  weight_decay: float = 0.1
  clip: float | None = 1.0  # global norm of the gradient; None for no clipping
  accumulate: int = 1  # microbatches a step
  moment_dtype: Literal['float32', 'bfloat16'] = 'float32'  # the first moment's
  ema: float | None = None  # decay of an average of the parameters, see `step.averaged`
  skip: Spike | None = None  # None applies every update

  def finalize(self) -> None:
    self.rate.finalize('optimizer.rate')
    self._check_fractions('b1', 'b2')
    for name in ('epsilon', 'clip'):
      value = getattr(self, name)
      if value is not None and not value > 0:
        raise ConfigError(
          f'optimizer.{name}', value, 'is not positive', 'use e.g. 1e-8, 1.0'
        )
    if not self.weight_decay >= 0:
      raise ConfigError(
        'optimizer.weight_decay', self.weight_decay, 'is negative', 'use 0 for none'
      )
    if self.accumulate < 1:
      raise ConfigError(
        'optimizer.accumulate', self.accumulate, 'is not positive', 'use at least 1'
      )
    if self.ema is not None and not 0 < self.ema < 1:
      raise ConfigError(
        'optimizer.ema', self.ema, 'is not in (0, 1)', 'use e.g. 0.999, or None'
      )
    if self.skip is not None:
      self.skip.finalize('optimizer.skip')

  def _check_fractions(self, *names: str) -> None:
    for name in names:
      if not 0 <= getattr(self, name) < 1:
        raise ConfigError(
          f'optimizer.{name}', getattr(self, name), 'is not in [0, 1)', 'use e.g. 0.9'
        )

  def build(self) -> optax.GradientTransformation:
    """Gradients and parameters (both wide) to what the rate is multiplied with."""
    return optax.chain(self.adam(), self.decay())

  def adam(self) -> optax.GradientTransformation:
    return _first_moment_in(
      self.moment_dtype, optax.scale_by_adam(self.b1, self.b2, self.epsilon)
    )

  def decay(self) -> optax.GradientTransformation:
    def decays(params):
      return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key.startswith('w_'), params
      )

    return optax.add_decayed_weights(self.weight_decay, mask=decays)


@dataclasses.dataclass
class Muon(AdamW):
  """Muon (Jordan et al. 2024) for matrices, one by one however they are stacked; AdamW
  for tables, gains and biases.

  m ← μm + (1 - μ)g, and the update is the orthogonal factor of (1 - μ)g + μm, by
  Newton-Schulz, times the scale: `rms` is 0.2 √max(inputs, outputs), which moves as
  far as AdamW does at the same rate (Liu et al. 2025, arXiv 2502.16982), and `fan` is
  Jordan's √max(1, outputs / inputs). Decay is decoupled, as in AdamW.
  """

  momentum: float = 0.95
  scale: Literal['rms', 'fan'] = 'rms'
  iterations: int = 5  # of Newton-Schulz
  adam_rate: float = 1.0  # of all but matrices, as a multiple of `rate`

  def finalize(self) -> None:
    super().finalize()
    self._check_fractions('momentum')
    if self.iterations < 1:
      raise ConfigError(
        'optimizer.iterations', self.iterations, 'is not positive', 'use e.g. 5'
      )
    if not self.adam_rate >= 0:
      raise ConfigError(
        'optimizer.adam_rate', self.adam_rate, 'is negative', 'use 1 for the same'
      )

  def build(self) -> optax.GradientTransformation:
    def kinds(params):
      return jax.tree_util.tree_map_with_path(
        lambda path, x: 'adam' if matrix(path, x) is None else 'muon', params
      )

    adam = optax.chain(self.adam(), optax.scale(self.adam_rate))
    each = optax.partition({'adam': adam, 'muon': self.orthogonal()}, kinds)
    return optax.chain(each, self.decay())

  def orthogonal(self) -> optax.GradientTransformation:
    def init(params):
      return Momentum(jax.tree.map(jnp.zeros_like, params))

    def one(path, g, m):
      inputs, outputs = matrix(path, g) or (1, 1)
      way = (1 - self.momentum) * g + self.momentum * m
      u = per_matrix(way, inputs, outputs, self.iterations)
      rows, columns = (math.prod(n) for n in matrix_shape(g, inputs, outputs))
      if self.scale == 'rms':
        return u * (0.2 * max(rows, columns) ** 0.5)
      return u * max(1, columns / rows) ** 0.5

    def update(updates, state, params=None):
      del params
      mu = jax.tree.map(
        lambda g, m: self.momentum * m + (1 - self.momentum) * g, updates, state.mu
      )
      return jax.tree_util.tree_map_with_path(one, updates, mu), Momentum(mu)

    return _first_moment_in(
      self.moment_dtype, optax.GradientTransformation(init, update)
    )


class Momentum(NamedTuple):
  mu: PyTree


def wide(tree: PyTree) -> PyTree:
  return jax.tree.map(lambda x: x.astype(layers.wide(x.dtype)), tree)


def chosen(skip: Bool[Array, ''], old: PyTree, new: PyTree) -> PyTree:
  """`old` where the update is skipped, bit for bit."""
  return jax.tree.map(lambda a, b: jnp.where(skip, a, b), old, new)


def _first_moment_in(
  dtype: str, inner: optax.GradientTransformation
) -> optax.GradientTransformation:
  """`inner` computes in the wide dtype; its `mu` is rounded only to be stored."""

  def stored(state):
    if dtype == 'float32':
      return state
    return state._replace(mu=jax.tree.map(lambda m: m.astype(dtype), state.mu))

  def init(params):
    return stored(inner.init(wide(params)))

  def update(updates, state, params=None):
    if dtype != 'float32':
      state = state._replace(
        mu=jax.tree.map(lambda m, g: m.astype(g.dtype), state.mu, updates)
      )
    updates, state = inner.update(updates, state, params)
    return updates, stored(state)

  return optax.GradientTransformation(init, update)


# --- Matrices


def matrix(path, x: Any) -> tuple[int, int] | None:
  """How many of a parameter's last dimensions are inputs and outputs of a matrix; None
  if it is a table, gains or biases.

  Raises:
    ConfigError: it could be read in several ways.
  """
  name = path[-1].key
  if not name.startswith('w_'):
    return None
  if name not in MATRICES and x.ndim >= 4:
    where = jax.tree_util.keystr(path, simple=True, separator='/')
    raise ConfigError(
      'optimizer',
      'Muon',
      f'does not know which dimensions of {where} {list(x.shape)} are inputs',
      f'set optimizers.MATRICES[{name!r}] = (inputs, outputs), or None for AdamW',
    )
  return MATRICES.get(name, (1, 1))


def matrix_shape(x: Any, inputs: int, outputs: int):
  stack = x.ndim - inputs - outputs
  return x.shape[stack : stack + inputs], x.shape[stack + inputs :]


def newton_schulz(
  x_SMN: Float[Array, 'S M N'], iterations: int
) -> Float[Array, 'S M N']:
  """About U Vᵀ of each matrix U Σ Vᵀ: its singular values come near one (Jordan's
  quintic, which ends between 0.7 and 1.2). A matrix of zeros stays one."""
  a, b, c = 3.4445, -4.7750, 2.0315
  x = x_SMN / (jnp.sqrt(jnp.sum(x_SMN**2, (1, 2), keepdims=True)) + 1e-7)
  tall = x.shape[1] > x.shape[2]
  x = x.mT if tall else x

  def once(_, x):
    y = x @ x.mT
    return a * x + (b * y + c * (y @ y)) @ x

  x = jax.lax.fori_loop(0, iterations, once, x)
  return x.mT if tall else x


# A replica of the model computes its own: less to send between slices.
_SPREAD = tuple(axis for axis in mesh.AXES if axis != 'replica')


def per_matrix(
  x: Float[Array, '*shape'], inputs: int, outputs: int, iterations: int
) -> Float[Array, '*shape']:
  """Newton-Schulz of every matrix of a stack, in the sharding of `x`.

  Whole matrices are dealt out over the devices, as many to each, so that nothing is
  sent while iterating, none holds all of the stack, and no product is done twice.
  """
  spec = P(*jax.typeof(x).sharding.spec, *[None] * x.ndim)[: x.ndim]
  stacked = x.ndim - inputs - outputs
  # The dimension that is sharded (experts) goes first, or it could not be merged.
  order = sorted(range(stacked), key=lambda axis: spec[axis] is None)
  order += range(stacked, x.ndim)
  back = sorted(range(x.ndim), key=order.__getitem__)
  kept = [spec[axis] for axis in order]
  kept[1:stacked] = [None] * max(stacked - 1, 0)
  y = jax.reshard(jnp.transpose(x, order), P(*kept))
  shape, rows, columns = y.shape[:stacked], *matrix_shape(x, inputs, outputs)
  flat = (math.prod(shape), math.prod(rows), math.prod(columns))
  at_rest = P(kept[0] if stacked else None, kept[stacked], kept[stacked + inputs])
  y = y.reshape(flat, out_sharding=at_rest)
  more, start = -flat[0] % mesh.axis_size(*_SPREAD), at_rest
  if more:
    start = P(None, *at_rest[1:])
    y = jnp.pad(jax.reshard(y, start), ((0, more), (0, 0), (0, 0)))
  route = _deal(start)
  for spec_SMN in route:
    y = jax.reshard(y, spec_SMN)
  y = newton_schulz(y, iterations)
  for spec_SMN in (*route[-2::-1], start):
    y = jax.reshard(y, spec_SMN)
  y = jax.reshard(y[: flat[0]], at_rest)
  y = y.reshape((*shape, *rows, *columns), out_sharding=P(*kept))
  return jax.reshard(jnp.transpose(y, back), P(*spec))


def _deal(start: P) -> list[P]:
  """Shardings on the way from matrices in parts to whole ones dealt out over all axes.

  One axis at a time: that is one all-to-all each, where XLA would gather everything for
  two at once.
  """
  parts: list[list[str]] = [
    [axis] if isinstance(axis, str) else list(axis or ()) for axis in start
  ]
  stack, route = parts[0], []
  for part in parts[1:]:
    while part:
      stack.append(part.pop())
      route.append(P(*(tuple(axes) or None for axes in parts)))
  stack += [axis for axis in _SPREAD if axis not in stack]
  return [*route, P(tuple(stack), None, None)]
