"""The figures of training between two lines of the log, what makes a run stop or go
back, and where its seconds went."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mtpjax import terminal
from mtpjax.fields import ConfigError
from mtpjax.metrics import Meter
from mtpjax.model import NEXT


class TrainingError(RuntimeError):
  """Training cannot go on: at which step and why."""


@dataclasses.dataclass
class Guard:
  """When a run is not going well: it stops, or goes back to its last checkpoint and on
  with the data that follows.

  A loss or gradient that is not finite always counts; so does a total loss that has
  been `above` its lowest for `patience` steps in a row, in nats, smoothed. What is
  `stuck` ends the process, with an exit code that a launcher starts it anew after.
  """

  above: float | None = 3.0  # None: only what is not finite
  patience: int = 100  # steps
  rollbacks: int = 0  # times to go back before stopping
  stuck: float | None = 1800.0  # seconds of one step, save or held-out batch

  def finalize(self, field: str = 'guard') -> None:
    if self.above is not None and not self.above > 0:
      fix = 'use nats, e.g. 3.0, or None'
      raise ConfigError(f'{field}.above', self.above, 'is not positive', fix)
    if self.stuck is not None and not self.stuck > 0:
      fix = 'use seconds, e.g. 1800.0, or None'
      raise ConfigError(f'{field}.stuck', self.stuck, 'is not positive', fix)
    for name, least in (('patience', 1), ('rollbacks', 0)):
      value = getattr(self, name)
      if value < least:
        fix = f'use at least {least}'
        raise ConfigError(f'{field}.{name}', value, 'is too small', fix)


_SMOOTH = 0.9  # what a smoothed loss keeps of itself a step


class Clock:
  """Where the seconds of a run go, over all the processes it took.

  `with clock('compile'):` and the like; what is none of those, once training has begun,
  is productive. `restart` is what came before training, and what had to be done again.
  """

  KINDS = ('compile', 'checkpoint', 'input', 'evaluation', 'restart')

  def __init__(self):
    self._began = time.monotonic()
    self._training: float | None = None  # when it began
    self._past: dict[str, float] = {'productive': 0.0, **dict.fromkeys(self.KINDS, 0.0)}
    self._spent: dict[str, float] = {**dict.fromkeys(self.KINDS, 0.0)}
    self._lives = 1

  @contextlib.contextmanager
  def __call__(self, kind: str) -> Iterator[None]:
    began = time.monotonic()
    try:
      yield
    finally:
      self._spent[kind] += time.monotonic() - began

  @contextlib.contextmanager
  def waiting(self, ahead: Any) -> Iterator[None]:
    """For data. It costs nothing while the device still computes `ahead`."""
    began = time.monotonic()
    yield
    if ahead is None or ahead.is_ready():
      self._spent['input'] += time.monotonic() - began

  def waits(self) -> dict[str, str]:
    """For a progress line: the share of training spent waiting for data, if any to
    speak of."""
    if self._training is None:
      return {}
    share = self._spent['input'] / max(time.monotonic() - self._training, 1e-9)
    return {'waits_for_data': f'{share:.0%}'} if share > 0.05 else {}

  def training_begins(self) -> None:
    self._training = time.monotonic()
    self._spent['restart'] += self._training - self._began - sum(self._spent.values())

  def get_state(self, steps: int) -> dict[str, Any]:
    """As JSON, at so many steps."""
    return {'steps': steps, 'lives': self._lives, **self.seconds()}

  def set_state(self, state: dict[str, Any], redone: int = 0) -> None:
    """Goes on from there; `redone` steps are lost and will be done again."""
    self._past = {name: float(state[name]) for name in self._past}
    self._lives = state['lives'] + 1
    each = state['productive'] / max(state['steps'], 1)
    self._past['restart'] += max(redone, 0) * each

  def go_back(self, state: dict[str, Any]) -> None:
    """To a checkpoint of this run: what was productive since is to be done again."""
    self._spent['restart'] += self.seconds()['productive'] - state['productive']

  def seconds(self) -> dict[str, float]:
    """By kind."""
    productive = 0.0
    if self._training is not None:
      productive = time.monotonic() - self._began - sum(self._spent.values())
    now = {'productive': max(productive, 0.0), **self._spent}
    return {name: self._past[name] + now[name] for name in self._past}

  def summary(self) -> dict[str, Any]:
    """Of a run's summary: `seconds` in all, `goodput`, and how many processes it took,
    one after another."""
    seconds = self.seconds()
    total = sum(seconds.values())
    share = seconds['productive'] / max(total, 1e-9)
    return {
      'seconds': total,
      'goodput': {'share': share, **seconds},
      'lives': self._lives,
    }

  def __str__(self) -> str:
    seconds = self.seconds()
    said = ', '.join(f'{x:.0f} {name}' for name, x in seconds.items() if x >= 0.5)
    return f'{sum(seconds.values()):.0f} s: {said}'


class Trace:
  """A profiler's trace of some steps, on request: open it in TensorBoard or Perfetto.

  Args:
    span: (first step, how many), or () for none.
  """

  def __init__(self, directory: Path, span: tuple[int, ...]):
    self._directory, self._span, self._on = directory, span, False

  def at(self, step: int) -> None:
    """Called before each step is dispatched."""
    if not self._span:
      return
    first, count = self._span
    if self._on and step >= first + count:
      self.close()
    if not self._on and step == first:
      jax.profiler.start_trace(str(self._directory))
      self._on = True

  def close(self) -> None:
    if self._on:
      self._on = False
      jax.effects_barrier()
      jax.profiler.stop_trace()
      terminal.say(f'trace of steps {self._span[0]} … in {self._directory}')

  def __enter__(self) -> Trace:
    return self

  def __exit__(self, *error) -> None:
    self.close()


def _measured(out: dict) -> bool:
  """Whether there was a target. Without any, as where all answers of a batch are cut
  off, a loss of 0 is nothing that was reached."""
  return any(np.any(sums.count) for sums in out['sums'].values())


class Training:
  """Gathers steps' metrics as (sum, count); `flush` gives a line and starts anew.

  Attributes:
    full_speed: tokens a second with every device at its peak, if it is known.
  """

  def __init__(self, guard: Guard | None = None):
    self.guard = guard or Guard()
    self.full_speed: float | None = None
    self._meter = Meter()
    self._tokens = self._all_tokens = 0
    self._before = 0, 0.0  # tokens and seconds of processes before this one
    self.start()
    self._smooth = self._lowest = math.inf
    self._high = self._skipped = 0  # steps in a row
    self.skipped = 0  # steps in all

  def start(self) -> None:
    """Called as training begins: what came before is no step's time."""
    self._began = self._window = self._ended = time.monotonic()

  @property
  def tokens_per_second(self) -> float | None:
    """Real tokens over the time from the first step to the last, all processes."""
    tokens, seconds = self._speed()
    return tokens / max(seconds, 1e-9) if tokens else None

  def _speed(self) -> tuple[int, float]:
    tokens, seconds = self._before
    return tokens + int(self._all_tokens), seconds + self._ended - self._began

  def mfu(self, tokens_per_second: float | None) -> dict[str, float]:
    """Model FLOPs utilisation, where it can be said."""
    if self.full_speed is None or tokens_per_second is None:
      return {}
    return {'mfu': tokens_per_second / self.full_speed}

  @property
  def high(self) -> bool:
    """Whether the loss is so far above its lowest that it may have diverged."""
    return self._high > 0

  def get_state(self) -> dict[str, Any]:
    """The steps since the last line, and the guard's, as JSON, for a run that goes on
    from here."""
    known = math.isfinite(self._smooth)
    return {
      'line': self._meter.get_state(),
      'guard': [self._smooth, self._lowest, self._high] if known else None,
      'skipped': [self._skipped, self.skipped],
      'speed': [*self._speed()],
    }

  def set_state(self, state: dict[str, Any]) -> None:
    self._meter, self._tokens = Meter(), 0
    for name, (total, count) in state['line'].items():
      self._meter.add(name, np.asarray(total), np.asarray(count))
    unknown = math.inf, math.inf, 0
    self._smooth, self._lowest, self._high = state['guard'] or unknown
    self._skipped, self.skipped = state['skipped']
    self._before = tuple(state.get('speed', (0, 0.0)))  # older checkpoints have none
    self._all_tokens = 0
    self.start()

  def add(self, step: int, out: dict, tokens: int) -> dict[str, Any]:
    """Adds one step's metrics, on the host; returns what a progress line shows.

    Args:
      tokens: real ones of the global batch.

    Raises:
      TrainingError: the loss or the gradient is not finite and the step was not
        skipped, or the loss has diverged, see `Guard`.
    """
    self._check(step, out)
    sums = {name: s for name, s in out['sums'].items()}
    if not self._skipped:
      for name, s in sums.items():
        self._meter.add(f'{name}/loss', s.nll, s.count)
        self._meter.add(f'{name}/agreement', s.correct, s.count)
      if _measured(out):
        self._meter.add('loss', out['loss'])
        self._meter.add('grad_norm', out['grad_norm'])
    self._tokens += tokens
    self._all_tokens += tokens
    self._ended = time.monotonic()
    self._now = {
      'lambda': {name: float(x) for name, x in out['lambda'].items()},
      'learning_rate': float(out['rate']),
    }
    return self._line()

  def _check(self, step: int, out: dict) -> None:
    guard, loss = self.guard, float(out['loss'])
    if out.get('skipped'):
      self._skipped, self.skipped = self._skipped + 1, self.skipped + 1
      if self._skipped < guard.patience:
        return
      raise TrainingError(
        f'step {step}: {self._skipped} steps in a row were skipped; the loss is {loss}'
      )
    self._skipped = 0
    for name in ('loss', 'grad_norm'):
      if not math.isfinite(out[name]):
        raise TrainingError(
          f'step {step}: {name} is {float(out[name])}; nothing of it is saved; '
          'lower optimizer.rate.peak or optimizer.clip, or raise '
          'optimizer.rate.warmup'
        )
    if guard.above is None or not _measured(out):
      return
    first = not math.isfinite(self._smooth)
    self._smooth = loss if first else _SMOOTH * self._smooth + (1 - _SMOOTH) * loss
    self._lowest = min(self._lowest, self._smooth)
    self._high = self._high + 1 if self._smooth > self._lowest + guard.above else 0
    if self._high >= guard.patience:
      raise TrainingError(
        f'step {step}: the loss, {self._smooth:.3f} smoothed, has been more than '
        f'guard.above={guard.above} above its lowest, {self._lowest:.3f}, for '
        f'{self._high} steps; lower optimizer.rate.peak, or set guard.above=None'
      )

  def flush(self) -> dict[str, Any]:
    line = self._line()
    self._meter, self._tokens, self._window = Meter(), 0, time.monotonic()
    return line

  def _line(self) -> dict[str, Any]:
    means, parts = self._meter.means(), {}
    for name in {n.partition('/')[0]: None for n in means if '/' in n}:
      parts[name] = {
        'loss_by_depth': means[f'{name}/loss'],
        'agreement_by_depth': means[f'{name}/agreement'],
        'counts_by_depth': self._meter.count(f'{name}/loss'),
      }
    line = parts.pop(NEXT, {})
    for key, values in parts.pop('drafter', {}).items():
      line[key] = line[key] + values
    seconds = time.monotonic() - self._window
    speed = self._tokens / max(seconds, 1e-9)
    return {
      'loss': means.get('loss'),
      **line,
      **({'objectives': parts} if parts else {}),
      **self._now,
      'grad_norm': means.get('grad_norm'),
      **({'skipped': self.skipped} if self.skipped else {}),
      'tokens_per_second': speed,
      **self.mfu(speed),
    }
