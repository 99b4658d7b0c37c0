"""Pure functions of the step: λ over the fraction of training, the learning rate."""

import dataclasses

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


@dataclasses.dataclass
class WarmupCosine:
  """Linear warm-up to `peak`, then half a cosine to `last` at the end of training.

  Step 0 already moves: its rate is peak / warmup.
  """

  peak: float = 3e-3
  warmup: int = 100  # steps; 0 starts at the peak
  last: float = 0.1  # as a fraction of the peak

  def __call__(self, step: Int[Array, ''], steps: int) -> Float[Array, '']:
    step = jnp.asarray(step, jnp.float32)
    rise = jnp.minimum((step + 1) / max(self.warmup, 1), 1)
    done = jnp.clip((step - self.warmup) / max(steps - self.warmup, 1), 0, 1)
    fall = self.last + (1 - self.last) * (1 + jnp.cos(jnp.pi * done)) / 2
    return self.peak * rise * fall

  def finalize(self, field: str) -> None:
    _not_negative(field, peak=self.peak, warmup=self.warmup, last=self.last)
    if self.last > 1:
      raise ConfigError(
        f'{field}.last', self.last, 'is above the peak', 'it is a fraction of the peak'
      )


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
