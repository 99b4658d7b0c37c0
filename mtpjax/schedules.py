"""Pure functions of the step: λ over the fraction of training, the learning rate."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

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
