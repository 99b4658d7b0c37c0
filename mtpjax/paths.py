"""Paths that a run is given: local ones, and buckets, gs://BUCKET/NAME.

A bucket cannot append to an object, rename many at once or lock anything; but an object
is written whole or not at all. So a run writes its files locally, and `Mirror` copies
those that changed; only checkpoints go there directly.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from pathlib import Path

import fsspec.config
from absl import logging
from etils import epath

from mtpjax.fields import ConfigError


def at(name: str | os.PathLike) -> epath.Path:
  """The path of that name, `~` expanded.

  Raises:
    ConfigError: a place that cannot be reached from here; says what to install.
  """
  text = os.fspath(name)
  scheme, remote, _ = text.partition('://')
  if not remote:
    return epath.Path(text).expanduser()
  if scheme != 'gs':
    fix = 'use a local or mounted directory, or gs://BUCKET/NAME'
    raise ConfigError('path', text, f'{scheme}:// is not supported', fix)
  if importlib.util.find_spec('gcsfs') is None:
    fix = "pip install 'mtpjax[gcs]'"
    raise ConfigError('path', text, 'needs a package that is missing', fix)
  # Other processes, and TensorStore in this one, write there as well.
  fsspec.config.conf.setdefault('gcs', {})['use_listings_cache'] = False
  return epath.Path(text)


def is_bucket(path: str | os.PathLike) -> bool:
  return '://' in os.fspath(path)


class Mirror:
  """Copies the files below a local directory into a bucket as they change: every so
  many seconds, and when asked.

  A copy that fails on the way is logged and made again later. A file that is appended
  to meanwhile may end there in the middle of a line, as after a crash.
  """

  def __init__(self, local: Path, remote: epath.Path, seconds: float = 60.0):
    self._local, self._remote, self._seconds = local, remote, seconds
    self._copied: dict[Path, tuple[int, int]] = {}
    self._lock, self._ended = threading.Lock(), threading.Event()
    self._thread = threading.Thread(target=self._watch, daemon=True)
    self._thread.start()

  def sync(self) -> None:
    """All that is there now is copied when this returns."""
    with self._lock:
      for file in sorted(self._local.rglob('*')):
        if not file.is_file() or '.part-' in file.name:
          continue
        found = file.stat()
        state = found.st_mtime_ns, found.st_size
        if self._copied.get(file) != state:
          target = self._remote / file.relative_to(self._local).as_posix()
          target.write_bytes(file.read_bytes())
          self._copied[file] = state

  def _watch(self) -> None:
    while not self._ended.wait(self._seconds):
      try:
        self.sync()
      except Exception as error:  # remote file systems raise their own
        logging.error('copying to %s failed, for now: %s', self._remote, error)

  def close(self) -> None:
    self._ended.set()
    self._thread.join()
    self.sync()
