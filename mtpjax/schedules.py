"""Pure functions of the step: λ over the fraction of training, the learning rate."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mtpjax.fields import ConfigError


@dataclasses.dataclass
class Constant:
  value: float = 0.3

  def __call__(self, fraction: Float[Array, '']) -> Float[Array, '']:
    return jnp.full_like(fraction, self.value)

  def finalize(self, field: str) -> None:
    _not_negative(field, value=self.value)


@dataclasses.dataclass
class Piecewise:
  """`values[i]` until `boundaries[i]`, fractions of training, then the next.

  The default is DeepSeek-V3's: 0.3 for the first 10 T of 14.8 T tokens, then 0.1.
  """

  values: tuple[float, ...] = (0.3, 0.1)
  boundaries: tuple[float, ...] = (10 / 14.8,)

  def __call__(self, fraction: Float[Array, '']) -> Float[Array, '']:
    passed = jnp.searchsorted(
      jnp.asarray(self.boundaries, fraction.dtype), fraction, side='right'
    )
    return jnp.asarray(self.values, fraction.dtype)[passed]

  def finalize(self, field: str) -> None:
    _not_negative(field, values=min(self.values, default=-1.0))
    if len(self.values) != len(self.boundaries) + 1:
      raise ConfigError(
        f'{field}.values',
        self.values,
        f'does not fit {len(self.boundaries)} boundaries',
        'give one value more than boundaries',
      )
    if list(self.boundaries) != sorted(set(self.boundaries)):
      raise ConfigError(
        f'{field}.boundaries', self.boundaries, 'do not increase', 'sort them'
      )
    if any(not 0 < b < 1 for b in self.boundaries):
      raise ConfigError(
        f'{field}.boundaries',
        self.boundaries,
        'are not fractions of training',
        'use numbers between 0 and 1',
      )


@dataclasses.dataclass
class Linear:
  first: float = 0.3
  last: float = 0.1

  def __call__(self, fraction: Float[Array, '']) -> Float[Array, '']:
    return self.first + (self.last - self.first) * jnp.clip(fraction, 0, 1)

  def finalize(self, field: str) -> None:
    _not_negative(field, first=self.first, last=self.last)


@dataclasses.dataclass
class Cosine:
  first: float = 0.3
  last: float = 0.1

  def __call__(self, fraction: Float[Array, '']) -> Float[Array, '']:
    half = (1 + jnp.cos(jnp.pi * jnp.clip(fraction, 0, 1))) / 2
    return self.last + (self.first - self.last) * half

  def finalize(self, field: str) -> None:
    _not_negative(field, first=self.first, last=self.last)


Schedule = Constant | Piecewise | Linear | Cosine


def _not_negative(field: str, **values: int | float) -> None:
  for name, value in values.items():
    if not value >= 0:
      raise ConfigError(f'{field}.{name}', value, 'is negative', 'use 0 for none')


# --- The learning rate. Step 0 already moves: its rate is peak / warmup.


def _rise(step: Int[Array, ''], warmup: int) -> Float[Array, '']:
  return jnp.minimum((jnp.asarray(step, jnp.float32) + 1) / max(warmup, 1), 1)


def _check_rise(field: str, peak: float, warmup: int, last: float = 0.0) -> None:
  _not_negative(field, peak=peak, warmup=warmup, last=last)
  if last > 1:
    raise ConfigError(
      f'{field}.last', last, 'is above the peak', 'it is a fraction of the peak'
    )


@dataclasses.dataclass
class WarmupCosine:
  """Linear warm-up to `peak`, then half a cosine to `last` at the end of training."""

  peak: float = 3e-3
  warmup: int = 100  # steps; 0 starts at the peak
  last: float = 0.1  # as a fraction of the peak

  def __call__(self, step: Int[Array, ''], steps: int) -> Float[Array, '']:
    after = jnp.asarray(step, jnp.float32) - self.warmup
    done = jnp.clip(after / max(steps - self.warmup, 1), 0, 1)
    fall = self.last + (1 - self.last) * (1 + jnp.cos(jnp.pi * done)) / 2
    return self.peak * _rise(step, self.warmup) * fall

  def finalize(self, field: str) -> None:
    _check_rise(field, self.peak, self.warmup, self.last)


@dataclasses.dataclass
class Wsd:
  """Warm-up, stable, decay (Hu et al. 2024, arXiv 2404.06395): linear warm-up to
  `peak`, which holds until the last `decay` of training, then a fall to `last`.

  With x the share of the decay that is done, the fall is 1 - x (`linear`) or 1 - √x
  (`sqrt`; Hägele et al. 2024, arXiv 2405.18392, found it the better).
  """

  peak: float = 3e-3
  warmup: int = 100  # steps; 0 starts at the peak
  decay: float = 0.2  # fraction of all steps
  shape: Literal['linear', 'sqrt'] = 'sqrt'
  last: float = 0.0  # as a fraction of the peak

  def __call__(self, step: Int[Array, ''], steps: int) -> Float[Array, '']:
    length = self.decay * steps
    after = jnp.asarray(step, jnp.float32) - (steps - length)
    done = jnp.clip(after / length, 0, 1)
    fall = 1 - (done if self.shape == 'linear' else jnp.sqrt(done))
    fall = self.last + (1 - self.last) * fall
    return self.peak * _rise(step, self.warmup) * fall

  def finalize(self, field: str) -> None:
    _check_rise(field, self.peak, self.warmup, self.last)
    if not 0 < self.decay <= 1:
      raise ConfigError(
        f'{field}.decay',
        self.decay,
        'is no fraction of training',
        'use a number in (0, 1], or WarmupConstant for no decay',
      )


@dataclasses.dataclass
class WarmupConstant:
  """Linear warm-up to `peak`, which then holds."""

  peak: float = 3e-3
  warmup: int = 100  # steps; 0 starts at the peak

  def __call__(self, step: Int[Array, ''], steps: int) -> Float[Array, '']:
    return self.peak * _rise(step, self.warmup)

  def finalize(self, field: str) -> None:
    _check_rise(field, self.peak, self.warmup)


@dataclasses.dataclass
class InverseSquareRoot:
  """Linear warm-up to `peak`, then peak · √(warmup / n) at the n-th step, from 1
  (Vaswani et al. 2017). It does not depend on the length of training."""

  peak: float = 3e-3
  warmup: int = 100  # steps; 0 is as 1: the first is at the peak

  def __call__(self, step: Int[Array, ''], steps: int) -> Float[Array, '']:
    n = jnp.asarray(step, jnp.float32) + 1
    fall = jnp.minimum(jnp.sqrt(max(self.warmup, 1) / n), 1)
    return self.peak * _rise(step, self.warmup) * fall

  def finalize(self, field: str) -> None:
    _check_rise(field, self.peak, self.warmup)


Rate = WarmupCosine | Wsd | WarmupConstant | InverseSquareRoot


# Which depths are trained when (Aynetdinov & Akbik 2025, arXiv 2505.22757). Depths that
# are off are still computed, with weight 0: nothing compiles anew when a stage begins.


@dataclasses.dataclass
class Forward:
  """The next token alone at first, then one depth more at each of K equal steps.

  By default K + 1 stages share the training, as in the paper.
  """

  full: float | None = None  # fraction from which all depths train; None: K / (K + 1)

  def __call__(self, fraction: Float[Array, ''], depth: int) -> Bool[Array, ' K']:
    """Which of the depths 1..K are trained at this fraction of training."""
    return jnp.arange(depth) < _stage(fraction, depth, self.full)

  def finalize(self, field: str) -> None:
    _check_fraction(field, full=self.full)


@dataclasses.dataclass
class Reverse:
  """All depths at first, then the farthest is dropped at each of K equal steps.

  By default K + 1 stages share the training, as in the paper. What is dropped is no
  longer trained, while the trunk moves on: a poor drafter is left.
  """

  alone: float | None = None  # fraction from which none trains; None: K / (K + 1)

  def __call__(self, fraction: Float[Array, ''], depth: int) -> Bool[Array, ' K']:
    """Which of the depths 1..K are trained at this fraction of training."""
    return jnp.arange(depth) < depth - _stage(fraction, depth, self.alone)

  def finalize(self, field: str) -> None:
    _check_fraction(field, alone=self.alone)


def _stage(fraction: Float[Array, ''], depth: int, end: float | None) -> Int[Array, '']:
  """How many of `depth` equal steps are done; the last is at `end`."""
  each = 1 / (depth + 1) if end is None else end / depth
  steps = jnp.asarray([each * (k + 1) for k in range(depth)], fraction.dtype)
  return jnp.sum(fraction >= steps)


def _check_fraction(field: str, **values: float | None) -> None:
  for name, value in values.items():
    if value is not None and not 0 < value <= 1:
      raise ConfigError(
        f'{field}.{name}',
        value,
        'is no fraction of training',
        'use more than 0 and at most 1, or None for equal stages',
      )
