"""Meters as (sum, count), the files of metrics, the progress line, the loss figure.

One line of WORKDIR/metrics.jsonl is one JSON object: `step`, `loss` (total, nats),
`loss_by_depth`, `agreement_by_depth`, `count_by_depth` (lists, index 0 the next token),
`lambda` ({objective: λ}), `learning_rate`, `grad_norm`, `tokens_per_second`; lines on
held-out data also have `split: "heldout"`.
"""

from __future__ import annotations

import datetime
import io
import json
import math
import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorboardX
import tqdm
from jaxtyping import ArrayLike

# Okabe & Ito's palette (2008), told apart with every common colour blindness.
_COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#56B4E9', '#E69F00', '#000000')


class Meter:
  """Sums and counts by name; divides once, when read.

  A sum may be a scalar or an array of one entry a depth, `[K]`; counts broadcast to it.
  A NaN or an infinity stays in the mean; a count of 0 gives NaN: nothing was measured.
  """

  def __init__(self):
    self._totals: dict[str, tuple[np.ndarray, np.ndarray]] = {}

  def add(self, name: str, total: ArrayLike, count: ArrayLike = 1) -> None:
    """Adds a sum over `count` things. Call with host values, or wait for the device."""
    sums = np.asarray(total, np.float64)
    counts = np.broadcast_to(np.asarray(count, np.float64), sums.shape)
    if name in self._totals:
      sums, counts = sums + self._totals[name][0], counts + self._totals[name][1]
    self._totals[name] = sums, counts

  def merge(self, other: Meter) -> None:
    for name, (total, count) in other._totals.items():
      self.add(name, total, count)

  def count(self, name: str) -> Any:
    return self._totals[name][1].tolist()

  def mean(self, name: str) -> Any:
    """A float, or a list of floats, one a depth."""
    total, count = self._totals[name]
    with np.errstate(divide='ignore', invalid='ignore'):
      return np.where(count > 0, total / count, np.nan).tolist()

  def means(self) -> dict[str, Any]:
    return {name: self.mean(name) for name in self._totals}


def to_json(value: Any, indent: int | None = None) -> str:
  """Strict JSON (RFC 8259): NaN and infinities become null, arrays become lists."""
  return json.dumps(_plain(value), indent=indent, allow_nan=False, ensure_ascii=False)


def _plain(value: Any) -> Any:
  if isinstance(value, Mapping):
    return {str(k): _plain(v) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [_plain(v) for v in value]
  if isinstance(value, (np.ndarray, np.generic, jax.Array)):
    array = np.asarray(value)
    wide = array.astype(np.float64) if array.dtype.name == 'bfloat16' else array
    return _plain(wide.tolist())
  if isinstance(value, float):
    return value if math.isfinite(value) else None
  if isinstance(value, os.PathLike):
    return os.fspath(value)
  return value


def read_metrics(path: str | os.PathLike) -> list[dict]:
  """The lines of a metrics file; a last line that a crash tore is left out.

  Raises:
    ValueError: Another line is not a JSON object; names the file and the line.
  """
  with open(path, encoding='utf-8', newline='\n') as file:
    lines = file.read().split('\n')
  rows = []
  for number, line in enumerate(lines[:-1], 1):  # past the last newline it is torn
    try:
      row = json.loads(line)
    except ValueError as error:
      raise ValueError(
        f'{path}:{number}: not JSON ({error}); remove the line'
      ) from None
    if not isinstance(row, dict):
      raise ValueError(f'{path}:{number}: not a JSON object; remove the line')
    rows.append(row)
  return rows


class Writer:
  """Appends metrics to WORKDIR/metrics.jsonl and as TensorBoard events.

  Lines past `resume_step`, which a crashed run wrote after its last checkpoint, are
  dropped: the file reads as if nothing had happened. Only process 0 writes.
  """

  def __init__(self, workdir: str | os.PathLike, resume_step: int | None = None):
    workdir = Path(workdir)
    self.path = workdir / 'metrics.jsonl'
    self._writes = jax.process_index() == 0
    if not self._writes:
      return
    workdir.mkdir(parents=True, exist_ok=True)
    start = 0 if resume_step is None else resume_step
    if self.path.exists():
      kept = [r for r in read_metrics(self.path) if r.get('step', 0) <= start]
      _replace(self.path, ''.join(to_json(row) + '\n' for row in kept))
    self._file = self.path.open('a', encoding='utf-8', newline='\n')
    # purge_step tells TensorBoard to forget the dropped steps' events as well.
    self._events = tensorboardX.SummaryWriter(
      str(workdir / 'tensorboard'),
      purge_step=None if resume_step is None else start + 1,
    )

  def write(self, step: int, values: Mapping[str, Any]) -> None:
    """One line, on disk when this returns, and one event for each number in it."""
    if not self._writes:
      return
    values = {k: v for k, v in values.items() if k != 'step'}
    self._file.write(to_json({'step': step, **values}) + '\n')
    self._file.flush()
    split = values.get('split', 'train')
    for name, value in _scalars(values):
      self._events.add_scalar(f'{split}/{name}', value, step)

  def close(self) -> None:
    if self._writes:
      self._file.close()
      self._events.close()

  def __enter__(self) -> Writer:
    return self

  def __exit__(self, *error) -> None:
    self.close()


def _scalars(
  values: Mapping[str, Any], prefix: str = ''
) -> Iterable[tuple[str, float]]:
  for name, value in values.items():
    if hasattr(value, 'tolist'):
      value = np.asarray(value).tolist()
    if isinstance(value, Mapping):
      yield from _scalars(value, f'{prefix}{name}/')
    elif isinstance(value, (list, tuple)):
      yield from _scalars({str(k): v for k, v in enumerate(value)}, f'{prefix}{name}/')
    elif isinstance(value, (int, float)):
      yield prefix + name, value


def _replace(path: Path, text: str) -> None:
  """Writes a file whole or not at all."""
  part = path.with_name(f'{path.name}.part-{os.getpid()}')
  with part.open('w', encoding='utf-8', newline='\n') as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  part.replace(path)


def write_summary(path: str | os.PathLike, summary: Mapping[str, Any]) -> None:
  """Writes strict JSON, atomically: a reader sees the old file or the new one."""
  path = Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  _replace(path, to_json(summary, indent=2) + '\n')


def conditions() -> dict[str, Any]:
  """What a figure's numbers were measured on."""
  device = jax.devices()[0]
  return {
    'platform': device.platform,
    'device': device.device_kind,
    'device_count': jax.device_count(),
    'process_count': jax.process_count(),
    'cpu_count': os.cpu_count(),
    'python': platform.python_version(),
    **{name: metadata.version(name) for name in ('jax', 'flax', 'mtpjax')},
    'date': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
  }


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
      weights = sorted(set(listed))
      parts += ['λ ' + ' '.join(_show(x, '.3g') for x in weights)] if weights else []
    elif name == 'learning_rate':
      parts.append(f'lr {_show(value, ".2e")}')
    elif name == 'tokens_per_second':
      parts.append(f'{tqdm.tqdm.format_sizeof(value)} tok/s')
    elif name not in _UNSAID and not isinstance(value, Mapping):
      parts.append(' '.join([name.replace('_', ' '), *(_show(x) for x in listed)]))
  return '  '.join(parts)


_UNSAID = ('step', 'loss', 'agreement_by_depth', 'count_by_depth', 'grad_norm', 'split')


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


def loss_figure(metrics: Sequence[Mapping[str, Any]], path: str | os.PathLike) -> None:
  """Draws loss by depth over the steps as a PNG: training and held-out, and λ below.

  Raises:
    ValueError: No line has `loss_by_depth`.
  """
  from matplotlib.figure import Figure  # slow to import, and few commands draw

  lines = [row for row in metrics if row.get('loss_by_depth')]
  if not lines:
    raise ValueError(f'no loss_by_depth among {len(metrics)} lines: nothing to draw')
  train = [row for row in lines if row.get('split', 'train') == 'train']
  held = [row for row in lines if row.get('split') == 'heldout']
  weights: dict[str, list[tuple[int, float]]] = {}
  for row in train:
    for name, value in (row.get('lambda') or {}).items():
      weights.setdefault(name, []).append((row['step'], _number(value)))
  figure = Figure(figsize=(7.2, 4.8 if weights else 4.0), dpi=160, layout='constrained')
  if weights:
    top, bottom = figure.subplots(2, sharex=True, height_ratios=[5, 1])
  else:
    top = bottom = figure.subplots()
  for axes in {top, bottom}:
    axes.spines[['top', 'right']].set_visible(False)
    axes.grid(axis='y', color='0.9', linewidth=0.8)
    axes.set_axisbelow(True)

  ends, smoothed = [], []
  for depth in range(max(len(row['loss_by_depth']) for row in lines)):
    colour = _COLOURS[depth % len(_COLOURS)]
    steps, raw = _curve(train, depth)
    points, values = _curve(held, depth)
    smooth = _smooth(raw)
    smoothed += [*smooth, *values]
    top.plot(steps, raw, color=colour, alpha=0.22, linewidth=0.8)
    top.plot(steps, smooth, color=colour, linewidth=1.8)
    top.plot(
      points, values, 'o', color=colour, markersize=5, markeredgecolor='white', zorder=3
    )
    last = [y for y in (smooth if len(smooth) else values) if math.isfinite(y)][-1:]
    ends += [(last[0], depth, colour)] if last else []
  _limit(top, smoothed)
  _label_ends(top, ends)
  top.set_ylabel('loss (nats per token)')
  if held:
    notes = [('train, smoothed', '-', None), ('held out', '', 'o')]
    for text, style, marker in notes:
      top.plot([], [], linestyle=style, marker=marker, color='0.35', label=text)
    top.legend(frameon=False, loc='upper right')
  for index, (name, values) in enumerate(sorted(weights.items())):
    style = ('-', '--', ':', '-.')[index % 4]
    bottom.plot(*zip(*values, strict=True), style, color='0.25', label=name)
  if weights:
    bottom.set_ylabel('λ', rotation=0, labelpad=12)
    top_weight = max(y for line in bottom.lines for y in np.ravel(line.get_ydata()))
    bottom.set_ylim(0, 1.25 * top_weight or 1)
    if len(weights) > 1:
      bottom.legend(frameon=False, fontsize='small', ncols=len(weights))
  top.margins(x=0.01)
  bottom.margins(x=0.01)
  bottom.set_xlabel('step')
  Path(path).parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, format='png')


def _number(value: Any) -> float:
  return math.nan if value is None else float(value)


def _curve(rows: Iterable[Mapping[str, Any]], depth: int) -> tuple[list, np.ndarray]:
  """(steps, losses) of one depth; null, which JSON has for NaN, leaves a gap."""
  points = [
    (row['step'], _number(row['loss_by_depth'][depth]))
    for row in rows
    if depth < len(row['loss_by_depth'])
  ]
  return [step for step, _ in points], np.array([loss for _, loss in points], float)


def _smooth(values: np.ndarray) -> np.ndarray:
  """Mean over a centred window of a fortieth of the curve, cut off at both ends."""
  half = len(values) // 80
  windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
  return np.array([np.mean(window) for window in windows])


def _limit(axes: Any, values: list[float]) -> None:
  """The first steps' loss, several times the rest, must not flatten the curves."""
  finite = np.array([y for y in values if math.isfinite(y)])
  if len(finite):
    low, high = float(finite.min()), float(np.quantile(finite, 0.985))
    pad = max(high - low, 1e-3) * 0.08
    axes.set_ylim(low - pad, high + pad)


def _label_ends(axes: Any, ends: list[tuple[float, int, str]]) -> None:
  """Names the curves at their right ends, pushed apart where they would overlap."""
  low, high = axes.get_ylim()
  gap, at = (high - low) * 0.06, -math.inf
  for y, depth, colour in sorted(ends):
    at = max(y, at + gap)
    text = 'next token' if depth == 0 else f'depth {depth}'
    axes.annotate(
      f'{text}  {y:.2f}',
      (1.0, at),
      xycoords=('axes fraction', 'data'),
      xytext=(6, 0),
      textcoords='offset points',
      va='center',
      color=colour,
      annotation_clip=False,
    )
