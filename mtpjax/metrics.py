"""Meters as (sum, count), the files of metrics, the progress line, the loss figure.

One line of WORKDIR/metrics.jsonl is one JSON object: `step`, `loss` (total, nats),
`loss_by_depth`, `agreement_by_depth`, `counts_by_depth` (lists, the next token first),
`lambda` ({objective: λ}), `learning_rate`, `grad_norm`, `tokens_per_second`; lines on
held-out data also have `split: "heldout"`, and the one at the end `final: true`.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorboardX
from jaxtyping import ArrayLike

from mtpjax import paths
from mtpjax.fields import ConfigError


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

  def get_state(self) -> dict[str, Any]:
    """As JSON: {name: [total, count]}, which `add` takes back exactly."""
    return {name: [s.tolist(), n.tolist()] for name, (s, n) in self._totals.items()}

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


def last_step(directory: str | os.PathLike) -> int:
  """Of the lines that a run has written, 0 if there is none."""
  path = Path(directory) / 'metrics.jsonl'
  rows = read_metrics(path) if path.exists() else []
  return max((row.get('step', 0) for row in rows), default=0)


class Writer:
  """Appends metrics to WORKDIR/metrics.jsonl and as TensorBoard events.

  Lines past `resume_step`, which a crashed run wrote after its last checkpoint, are
  dropped, and so is the final evaluation, as it is made again: the file reads as if
  nothing had happened. Only process 0 writes.

  Args:
    project: of Weights & Biases, to log to as well.
  """

  def __init__(
    self,
    workdir: str | os.PathLike,
    resume_step: int | None = None,
    project: str | None = None,
  ):
    self._workdir = Path(workdir)
    self.path = self._workdir / 'metrics.jsonl'
    self._writes = jax.process_index() == 0
    self._run: Any = None
    if not self._writes:
      return
    self._workdir.mkdir(parents=True, exist_ok=True)
    self._open(resume_step)
    if project:
      import wandb  # pyright: ignore[reportMissingImports]  # slow, and an extra

      name = self._workdir.resolve().name
      place = str(self._workdir)
      try:
        self._run = wandb.init(
          project=project, name=name, id=name, dir=place, resume='allow'
        )
      except Exception as error:  # no key, no network, no such project
        fix = 'run `wandb login`, or set WANDB_MODE=offline'
        said = ' '.join(str(error).split())
        raise ConfigError('wandb', project, f'cannot start: {said}', fix) from error
      self._run.define_metric('*', step_metric='step')

  def _open(self, resume_step: int | None) -> None:
    start = 0 if resume_step is None else resume_step
    if self.path.exists():
      rows = read_metrics(self.path)
      kept = [r for r in rows if r.get('step', 0) <= start and not r.get('final')]
      replace(self.path, ''.join(to_json(row) + '\n' for row in kept))
    self._file = self.path.open('a', encoding='utf-8', newline='\n')
    # purge_step tells TensorBoard to forget the dropped steps' events as well.
    self._events = tensorboardX.SummaryWriter(
      str(self._workdir / 'tensorboard'),
      purge_step=None if resume_step is None else start + 1,
    )

  def go_back(self, step: int) -> None:
    """Drops what was written after that step."""
    if self._writes:
      self._file.close()
      self._events.close()
      self._open(step)

  def write(self, step: int, values: Mapping[str, Any]) -> None:
    """One line, on disk when this returns, and one event for each number in it."""
    if not self._writes:
      return
    values = {k: v for k, v in values.items() if k != 'step'}
    with _naming(self.path):
      try:
        self._file.write(to_json({'step': step, **values}) + '\n')
        self._file.flush()
      except OSError:
        with contextlib.suppress(OSError):  # what is left of the line fails again
          self._file.close()
        raise
    split = values.get('split', 'train')
    for name, value in _scalars(values):
      self._events.add_scalar(f'{split}/{name}', value, step)
    if self._run is not None:
      named = {f'{split}/{name}': value for name, value in _scalars(values)}
      self._run.log({'step': step, **named})

  def close(self) -> None:
    if self._writes:
      self._file.close()
      with _naming(self._workdir / 'tensorboard'):
        self._events.close()
    if self._run is not None:
      self._run.finish()

  def __enter__(self) -> Writer:
    return self

  def __exit__(self, kind, error, trace) -> None:
    try:
      self.close()
    except OSError:
      if kind is None:  # else it must not hide the error already under way
        raise


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
    elif isinstance(value, (int, float)) and math.isfinite(value):
      yield prefix + name, value  # of what is none, TensorBoard warns each time


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
  """The system does not say which file a full disk cut short."""
  try:
    yield
  except OSError as error:
    if error.filename is not None:
      raise
    raise OSError(error.errno, error.strerror, str(path)) from error


def replace(path: str | os.PathLike, text: str) -> None:
  """Writes a file whole or not at all, as a bucket does by itself."""
  if paths.is_bucket(path):
    paths.at(path).write_text(text)
    return
  path = Path(path)
  part = path.with_name(f'{path.name}.part-{os.getpid()}')
  with _naming(path), part.open('w', encoding='utf-8', newline='\n') as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  part.replace(path)


def write_summary(path: str | os.PathLike, summary: Mapping[str, Any]) -> None:
  """Writes strict JSON, atomically: a reader sees the old file or the new one."""
  path = paths.at(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  replace(path, to_json(summary, indent=2) + '\n')


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
