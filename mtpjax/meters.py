"""The figures of training between two lines of the log."""

from __future__ import annotations

import math
import time
from typing import Any

import jax
import numpy as np

from mtpjax.metrics import Meter
from mtpjax.model import NEXT


class TrainingError(RuntimeError):
  """Training cannot go on: at which step and why."""


class Training:
  """Gathers steps' metrics as (sum, count); `flush` gives a line and starts anew."""

  def __init__(self):
    self._meter = Meter()
    self._tokens = self._all_tokens = 0
    self._began = self._window = self._ended = time.monotonic()

  @property
  def tokens_per_second(self) -> float | None:
    """Real tokens over the time from the first step to the last, all processes."""
    seconds = max(self._ended - self._began, 1e-9)
    return self._all_tokens / seconds if self._all_tokens else None

  def get_state(self) -> dict[str, Any]:
    """The steps since the last line, as JSON, for a run that goes on from here."""
    return self._meter.get_state()

  def set_state(self, state: dict[str, Any]) -> None:
    for name, (total, count) in state.items():
      self._meter.add(name, np.asarray(total), np.asarray(count))

  def add(self, step: int, out: dict, tokens: int) -> dict[str, Any]:
    """Adds one step's metrics, on the host; returns what a progress line shows.

    Raises:
      TrainingError: the loss or the gradient is not finite.
    """
    for name in ('loss', 'grad_norm'):
      if not math.isfinite(out[name]):
        raise TrainingError(
          f'step {step}: {name} is {float(out[name])}; nothing of it is saved; '
          'lower optimizer.rate.peak or optimizer.clip, or raise '
          'optimizer.rate.warmup'
        )
    sums = {name: s for name, s in out['sums'].items()}
    for name, s in sums.items():
      self._meter.add(f'{name}/loss', s.nll, s.count)
      self._meter.add(f'{name}/agreement', s.correct, s.count)
    self._meter.add('loss', out['loss'])
    self._meter.add('grad_norm', out['grad_norm'])
    self._tokens += tokens * jax.process_count()
    self._all_tokens += tokens * jax.process_count()
    self._ended = time.monotonic()
    self._now = {
      'lambda': {name: float(x) for name, x in out['lambda'].items()},
      'learning_rate': float(out['rate']),
    }
    return self._line()

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
    line = parts.pop(NEXT)
    for key, values in parts.pop('drafter', {}).items():
      line[key] = line[key] + values
    seconds = time.monotonic() - self._window
    return {
      'loss': means['loss'],
      **line,
      **({'objectives': parts} if parts else {}),
      **self._now,
      'grad_norm': means['grad_norm'],
      'tokens_per_second': self._tokens / max(seconds, 1e-9),
    }
