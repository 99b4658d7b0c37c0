"""The directory a run writes: whose it is, and what it must be to go on in it.

It may be in a bucket, gs://BUCKET/NAME. There are no locks there: no two runs may use
one directory, and nothing sees to it.

config.json     the resolved config           checkpoints/  orbax
vocabulary.json the tokenizer                 best/         the best one, see `heldout`
metrics.jsonl   a line of figures a log       tensorboard/  the same as events
loss.png        the loss curves               summary.json  the result, for programs
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import fcntl
import json
import os
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import jax
from absl import logging
from etils import epath

from mtpjax import config as configs
from mtpjax import fields, metrics, paths, processes
from mtpjax.checkpoint import CheckpointError
from mtpjax.data.tokenizer import VOCABULARY, Tokenizer

METRICS = 'metrics.jsonl'


class WorkdirError(ValueError):
  """The directory cannot be used: which one, why, and what to do."""


@dataclasses.dataclass
class Workdir(contextlib.AbstractContextManager):
  """Where a run writes. Closing it copies what is left to copy.

  Attributes:
    path: what --workdir names; checkpoints go there.
    files: all else is written here: the same directory, or one whose files are copied
      to the bucket, by process 0.
  """

  path: epath.Path
  files: Path
  mirror: paths.Mirror | None = None

  def sync(self) -> None:
    """What is in `files` is safe when this returns."""
    if self.mirror is not None:
      self.mirror.sync()

  def __exit__(self, kind, error, trace) -> None:
    if self.mirror is not None:
      try:
        self.mirror.close()
      except Exception as failure:  # remote file systems raise their own
        if kind is None:
          raise WorkdirError(f'--workdir={self} cannot be written: {failure}') from None
        logging.error('copying to %s failed: %s', self, failure)

  def __str__(self) -> str:
    return str(self.path)


def claim(workdir: str, config: configs.Config) -> Workdir:
  """Makes the directory and writes the config into it, or finds it there.

  Raises:
    WorkdirError: it holds a run of another config, or cannot be written.
  """
  path = paths.at(workdir)  # the shell leaves --workdir=~/x as it is
  run = Workdir(path, Path(path))
  new = fields.to_json(config)
  mark = uuid.uuid4().hex
  if jax.process_index() > 0:
    mark = processes.agreed(None)  # process 0 has claimed it
    _follow(path, new, mark)
    run.files = _copy(path) if paths.is_bucket(path) else run.files
    return run
  try:
    if paths.is_bucket(path):
      run.files = _copy(path)
    saved = path / 'config.json'
    if saved.exists():
      _same(json.loads(saved.read_text()), new, path)
      if (run.files / METRICS).exists():
        metrics.read_metrics(run.files / METRICS)  # names a spoilt line
    elif path.exists() and any(not _torn(file) for file in path.iterdir()):
      raise WorkdirError(
        f'--workdir={workdir} holds files but no run of ours; use an empty directory'
      )
    run.files.mkdir(parents=True, exist_ok=True)
    if paths.is_bucket(path):
      run.mirror = paths.Mirror(run.files, path)
    else:
      _lock(run.files, mark)
    metrics.write_summary(run.files / 'config.json', new)
    run.sync()
  except WorkdirError:
    raise
  except Exception as error:  # remote file systems raise their own
    raise WorkdirError(
      f'--workdir={workdir} cannot be used: {error}; choose another directory'
    ) from error
  processes.agreed(mark)
  return run


def _copy(path: epath.Path) -> Path:
  """A local directory for the files of a bucket's run, with those that it goes on from.
  It goes with the process."""
  folder = tempfile.TemporaryDirectory(prefix='mtpjax-', ignore_cleanup_errors=True)
  atexit.register(folder.cleanup)
  files = Path(folder.name, path.name)
  files.mkdir()
  if (path / METRICS).exists():
    (files / METRICS).write_bytes((path / METRICS).read_bytes())
  return files


def _follow(path: epath.Path, new: dict[str, Any], mark: str) -> None:
  """Whether process 0 has the same directory and the same config, to the last field."""
  saved = path / 'config.json'
  until = time.monotonic() + _LATE
  while not (saved.exists() and (paths.is_bucket(path) or _mark(path) == mark)):
    if time.monotonic() > until:
      raise WorkdirError(
        f'--workdir={path} is not that of process 0, which wrote {_LOCK} and '
        'config.json there; use a directory that all processes see'
      )
    time.sleep(0.5)
  old = json.loads(saved.read_text())
  if differing := fields.differences(old, json.loads(metrics.to_json(new))):
    raise WorkdirError(
      f'process {jax.process_index()} has another config than process 0 '
      f'({"; ".join(differing[:4])}); give all of them the same command'
    )


def _torn(file: epath.Path) -> bool:
  """A run killed while it wrote its very first file leaves this."""
  return file.name == _LOCK or file.name.startswith('config.json.part-')


def keep(run: Workdir, tokenizer: Tokenizer) -> None:
  """Writes the tokenizer there, for runs that begin with this one."""
  if jax.process_index() == 0:
    metrics.replace(run.files / VOCABULARY, tokenizer.to_json())


_LOCK = '.lock'
_LATE = 60  # seconds until a network file system shows a new file


def _mark(path: epath.Path) -> str | None:
  """Whose it is. Another machine's disk may have a directory of that name too."""
  try:
    return (path / _LOCK).read_text()
  except OSError:
    return None


def _lock(path: Path, mark: str) -> None:
  """Two runs in one directory would delete and overwrite each other's steps. The system
  drops the lock with the process, however that ends."""
  file = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT)  # open until the process ends
  try:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except (BlockingIOError, PermissionError):
    os.close(file)
    raise WorkdirError(
      f'--workdir={path} is in use by another training; wait for it, or use another '
      'directory'
    ) from None
  except OSError:
    pass  # a file system without locks
  os.ftruncate(file, 0)  # of another file that is closed the lock would go
  os.write(file, mark.encode())
  os.fsync(file)


def _same(old: Any, new: dict[str, Any], path: epath.Path) -> None:
  if not isinstance(old, dict) or old.get('class') != new['class']:
    raise WorkdirError(
      f'--workdir={path} holds a config.json that is not ours; use an empty directory'
    )
  free = tuple(f'{name}{end}' for name in configs.FREE for end in ':.[')
  differing = fields.differences(old, new)
  if differing := [line for line in differing if not line.startswith(free)]:
    shown = '; '.join(differing[:4]) + ('; …' if len(differing) > 4 else '')
    raise WorkdirError(
      f'--workdir={path} holds a run of another config ({shown}); '
      'use another directory, or the config that is there'
    )


def metadata(config: configs.Config, tokenizer: Tokenizer) -> dict[str, Any]:
  """What every checkpoint carries, so that nothing about it is ever guessed."""
  return {
    'config': fields.to_json(config),
    'conventions': configs.conventions(config),
    'tokenizer': tokenizer.to_json(),
    'tokenizer_fingerprint': tokenizer.fingerprint,
    'vocabulary': {
      'tokens': config.trunk.vocab,
      'padded': config.trunk.padded_vocab,
    },
    'conditions': metrics.conditions(),
  }


def check_tokenizer(saved: dict[str, Any], tokenizer: Tokenizer) -> None:
  """Raises CheckpointError if a checkpoint's metadata is of another tokenizer: its ids
  would mean other text."""
  if saved['tokenizer_fingerprint'] != tokenizer.fingerprint:
    raise CheckpointError(
      f'the checkpoint was made with another tokenizer ({saved["tokenizer"][:60]}…) '
      f'than this ({tokenizer.to_json()[:60]}…); give it the documents and versions it '
      'was made with, or start in another directory'
    )
