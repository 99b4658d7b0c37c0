"""What commands say to people: lines and progress, from the first process alone."""

from __future__ import annotations

import io
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import tqdm


def say(text: str) -> None:
  if jax.process_index() == 0:
    print(text, flush=True)


def watch(items: Iterable[Any], total: int, what: str = 'batch') -> Iterator[Any]:
  """The items, with progress."""
  with Progress(total, what=what) as progress:
    for done, item in enumerate(items, 1):
      yield item
      progress.update(done)


class Progress:
  """A bar on a terminal, else a plain line now and then, and always the last.

  Only process 0 says anything.

  Args:
    total: Steps (batches, examples) at the end.
    start: Those done before, so that the speed is this run's.
    what: What is counted.
    every: Off a terminal, at most one line in so many steps,
    seconds: and at most one in so many seconds.
  """

  def __init__(
    self,
    total: int,
    start: int = 0,
    *,
    what: str = 'step',
    every: int = 1,
    seconds: float = 10.0,
    file: io.TextIOBase | None = None,
  ):
    self.total, self.start, self.what = total, start, what
    self._every, self._seconds = every, seconds
    self._file: Any = sys.stderr if file is None else file
    self._began = time.monotonic()
    self._said = -math.inf, start  # when, and at what step
    self._last: tuple[int, str] | None = None  # not yet said
    self._bar, self._speaks = None, jax.process_index() == 0
    if self._speaks and self._file.isatty():
      self._bar = tqdm.tqdm(
        total=total,
        initial=start,
        file=self._file,
        dynamic_ncols=True,
        bar_format='{n_fmt}/{total_fmt} {bar:12} {desc} {remaining} left',
      )

  def update(self, step: int, values: Mapping[str, Any] | None = None) -> None:
    if not self._speaks:
      return
    text = brief(values or {})
    if self._bar is not None:
      self._bar.set_description_str(text, refresh=False)
      self._bar.update(step - self._bar.n)
      return
    self._last = step, text
    now = time.monotonic()
    said_at, said_step = self._said
    due = now - said_at >= self._seconds and step - said_step >= self._every
    if due or step >= self.total:
      self._say(now)

  def _say(self, now: float) -> None:
    assert self._last is not None
    (step, text), self._last = self._last, None
    self._said = now, step
    elapsed, done = now - self._began, step - self.start
    left = elapsed / done * (self.total - step) if done > 0 else math.nan
    parts = [f'{self.what} {step}/{self.total}', text]
    parts += [f'{_clock(left)} left'] if step < self.total else []
    print('  '.join(part for part in parts if part), file=self._file, flush=True)

  def close(self) -> None:
    if self._bar is not None:
      self._bar.close()
    elif self._last is not None:
      self._say(time.monotonic())

  def __enter__(self) -> Progress:
    return self

  def __exit__(self, *error) -> None:
    self.close()


def brief(values: Mapping[str, Any]) -> str:
  """'loss 1.52 1.81  λ 0.3  lr 3e-4  12.3k tok/s': one short line of a metrics dict."""
  parts = []
  for name, value in values.items():
    listed = _listed(value)
    if name == 'loss_by_depth' or (name == 'loss' and 'loss_by_depth' not in values):
      parts.append('loss ' + ' '.join(_show(x, '.2f') for x in listed))
    elif name == 'lambda':
      if len(set(listed)) == 1:
        parts.append(f'λ {_show(listed[0], ".3g")}')
      else:
        parts += [f'λ {own} {_show(x, ".3g")}' for own, x in value.items()]
    elif name == 'objectives':
      for own, part in value.items():
        losses = ' '.join(_show(x, '.2f') for x in part['loss_by_depth'])
        parts.append(f'{own} {losses}')
    elif name == 'learning_rate':
      parts.append(f'lr {_show(value, ".2e")}')
    elif name == 'tokens_per_second':
      parts.append(f'{tqdm.tqdm.format_sizeof(value)} tok/s')
    elif name not in _UNSAID and not isinstance(value, Mapping):
      parts.append(' '.join([name.replace('_', ' '), *(_show(x) for x in listed)]))
  return '  '.join(parts)


_UNSAID = (
  'step',
  'loss',
  'agreement_by_depth',
  'counts_by_depth',
  'grad_norm',
  'split',
)


def _listed(value: Any) -> Sequence[Any]:
  if isinstance(value, Mapping):
    return list(value.values())
  if hasattr(value, 'tolist'):
    value = np.asarray(value).tolist()
  return value if isinstance(value, (list, tuple)) else [value]


def _show(value: Any, form: str = '.4g') -> str:
  """Null, which JSON has for NaN, is a dash."""
  if value is None:
    return '–'
  return format(value, form) if isinstance(value, float | np.floating) else str(value)


def _clock(seconds: float) -> str:
  return '?' if math.isnan(seconds) else tqdm.tqdm.format_interval(round(seconds))
