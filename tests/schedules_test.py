"""Schedules: the values of their formulas, refusals, and no compilation for a new λ."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax import schedules
from mtpjax.fields import ConfigError

FRACTIONS = (0.0, 0.1, 0.25, 0.5, 0.67, 0.68, 0.75, 1.0)


def at(schedule, fraction):
  return float(schedule(jnp.float32(fraction)))


def half_cosine(first, last, fraction):
  return last + (first - last) * (1 + math.cos(math.pi * fraction)) / 2


@pytest.mark.parametrize('fraction', FRACTIONS)
def test_each_schedule_has_its_formulas_value(fraction):
  close = functools.partial(pytest.approx, rel=1e-6, abs=1e-7)
  assert at(schedules.Constant(0.7), fraction) == close(0.7)
  linear = at(schedules.Linear(0.4, 0.2), fraction)
  assert linear == close(0.4 - 0.2 * fraction)
  cosine = at(schedules.Cosine(0.4, 0.1), fraction)
  assert cosine == close(half_cosine(0.4, 0.1, fraction))
  default = at(schedules.Piecewise(), fraction)  # DeepSeek-V3: 10 T of 14.8 T tokens
  assert default == close(0.3 if fraction < 10 / 14.8 else 0.1)


def test_piecewise_changes_at_the_boundary_itself():
  schedule = schedules.Piecewise((1.0, 2.0, 4.0), (0.25, 0.5))
  below = np.nextafter(np.float32(0.25), np.float32(0))
  values = [at(schedule, x) for x in (0, below, 0.25, 0.49, 0.5, 1)]
  assert values == [1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize('schedule', [schedules.Linear(), schedules.Cosine()])
def test_a_schedule_stays_at_its_ends_beyond_them(schedule):
  assert at(schedule, -1) == at(schedule, 0) == pytest.approx(0.3)
  assert at(schedule, 2) == at(schedule, 1) == pytest.approx(0.1)


@pytest.mark.parametrize('warmup', [0, 1, 5])
def test_warmup_rises_to_the_peak_and_falls_by_half_a_cosine(warmup):
  rate, steps = schedules.WarmupCosine(peak=2e-3, warmup=warmup, last=0.25), 21
  for step in range(steps + 2):
    if step < warmup:
      want = 2e-3 * (step + 1) / warmup
    else:
      done = min((step - warmup) / (steps - warmup), 1)
      want = half_cosine(2e-3, 5e-4, done)
    assert float(rate(jnp.int32(step), steps)) == pytest.approx(want, rel=1e-5)


def rates(schedule, steps, count=None):
  once = jax.jit(lambda step: schedule(step, steps))
  return [float(once(jnp.int32(step))) for step in range(count or steps)]


@pytest.mark.parametrize('shape', ['linear', 'sqrt'])
@pytest.mark.parametrize(('warmup', 'last'), [(0, 0.0), (1, 0.1), (4, 0.25)])
def test_wsd_rises_holds_and_falls(shape, warmup, last):
  """Hägele et al. 2024, equations 1 and 2: f is 1 - x or 1 - √x."""
  rate = schedules.Wsd(2e-3, warmup, decay=0.25, shape=shape, last=last)
  want, steps, decaying = [], 40, 10
  for step in range(steps + 3):
    if step < warmup:
      share = (step + 1) / warmup
    elif step <= steps - decaying:
      share = 1.0
    else:
      done = min((step - (steps - decaying)) / decaying, 1)
      fall = {'linear': 1 - done, 'sqrt': 1 - math.sqrt(done)}[shape]
      share = last + (1 - last) * fall
    want.append(2e-3 * share)
  got = rates(rate, steps, steps + 3)
  assert got == pytest.approx(want, rel=1e-5, abs=1e-9)
  assert got[0] > 0 and max(got) == pytest.approx(2e-3)


@pytest.mark.parametrize('warmup', [0, 1, 8])
def test_a_constant_rate_and_the_inverse_root_after_the_same_rise(warmup):
  constant = rates(schedules.WarmupConstant(3.0, warmup), 30)
  root = rates(schedules.InverseSquareRoot(3.0, warmup), 30)
  for n in range(1, 31):  # Vaswani et al. 2017, equation 3
    rise, w = min(n / max(warmup, 1), 1), max(warmup, 1)
    assert constant[n - 1] == pytest.approx(3.0 * rise)
    noam = min(n**-0.5, n * w**-1.5) * w**0.5
    assert root[n - 1] == pytest.approx(3.0 * noam, rel=1e-5)
  assert root[w - 1] == pytest.approx(3.0) and root[w] > 0.7 * 3.0


RATES = (
  schedules.WarmupCosine,
  schedules.Wsd,
  schedules.WarmupConstant,
  schedules.InverseSquareRoot,
)


@pytest.mark.parametrize('kind', RATES)
def test_a_run_shorter_than_its_warmup_only_rises(kind):
  rate = kind(peak=1.0, warmup=10)
  if isinstance(rate, schedules.Wsd):
    rate.decay = 0.01
  values = rates(rate, 4)
  assert values == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_the_kinds_of_rate_are_all_that_an_optimizer_takes():
  assert schedules.Rate == functools.reduce(lambda a, b: a | b, RATES)


def test_a_new_weight_of_the_loss_compiles_nothing():
  kinds = (
    schedules.Constant(),
    schedules.Piecewise((3.0, 2.0), (0.5,)),
    schedules.Linear(),
    schedules.Cosine(),
  )
  for schedule in kinds:
    chex.clear_trace_counter()
    traced = jax.jit(chex.assert_max_traces(lambda x, f=schedule: f(x), n=1))
    seen = {float(traced(jnp.float32(x))) for x in FRACTIONS}
    assert len(seen) == {'Constant': 1, 'Piecewise': 2}.get(type(schedule).__name__, 8)


@pytest.mark.parametrize(
  ('schedule', 'field'),
  [
    (schedules.Constant(-0.1), 'λ.value'),
    (schedules.Constant(math.nan), 'λ.value'),
    (schedules.Linear(0.1, -1.0), 'λ.last'),
    (schedules.Cosine(-0.1, 1.0), 'λ.first'),
    (schedules.Piecewise((0.3,), (0.5,)), 'λ.values'),
    (schedules.Piecewise((), ()), 'λ.values'),
    (schedules.Piecewise((0.3, 0.2, 0.1), (0.5, 0.2)), 'λ.boundaries'),
    (schedules.Piecewise((0.3, 0.1), (1.5,)), 'λ.boundaries'),
    (schedules.WarmupCosine(warmup=-1), 'λ.warmup'),
    (schedules.WarmupCosine(last=1.5), 'λ.last'),
    (schedules.Wsd(peak=-1.0), 'λ.peak'),
    (schedules.Wsd(warmup=-1), 'λ.warmup'),
    (schedules.Wsd(decay=0.0), 'λ.decay'),
    (schedules.Wsd(decay=1.5), 'λ.decay'),
    (schedules.Wsd(last=1.5), 'λ.last'),
    (schedules.WarmupConstant(warmup=-1), 'λ.warmup'),
    (schedules.InverseSquareRoot(peak=-1.0), 'λ.peak'),
  ],
)
def test_a_senseless_schedule_is_refused_by_its_field(schedule, field):
  with pytest.raises(ConfigError) as error:
    schedule.finalize('λ')
  assert error.value.field == field


def test_sensible_schedules_are_not_refused():
  for schedule in (schedules.Constant(0.0), schedules.Linear(), schedules.Cosine()):
    schedule.finalize('λ')
  schedules.Piecewise().finalize('λ')
  for kind in RATES:
    kind().finalize('λ')
