"""Checkpoints: asynchronous, atomic, sharded and verified. All that touches orbax.

DIRECTORY/STEP/                one checkpoint; orbax renames it into place when whole
  commit_success.txt           or, in a bucket, which cannot rename, writes this last
  _CHECKPOINT_METADATA         JSON: `custom_metadata` is our record, with its SHA-256
  state/                       the arrays under their names, nested
DIRECTORY/STEP.damaged-TIME/   was in the way of a save, and was moved aside

The record holds the caller's metadata (config, conventions, versions), the data
iterators' state, and each leaf's shape, dtype and checksum. Orbax 0.12 by itself missed
57 of 60 flipped bits in array data, casts dtypes silently, and takes an empty directory
with a number for a name as a checkpoint: the record is there to see these.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import json
import logging as std_logging
import os
import re
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import logging
from etils import epath
from flax.traverse_util import unflatten_dict
from jax.sharding import AbstractMesh, NamedSharding, SingleDeviceSharding
from jaxtyping import Array, PyTree
from orbax.checkpoint import v1 as ocp

from mtpjax import paths, processes
from mtpjax.checksum import checksum
from mtpjax.fields import ConfigError

_RECORD, _COMMIT = '_CHECKPOINT_METADATA', 'commit_success.txt'  # orbax's names
_SHOWN = 12  # leaves named in a message
_Path = str | os.PathLike


class CheckpointError(RuntimeError):
  """Checkpoints cannot be written, found or read; says where and what to do."""


class CheckpointMismatchError(CheckpointError):
  """The checkpoint is sound, but of another model: tree, shapes or dtypes differ."""


class _DamagedError(Exception):
  """This step cannot be read; an older one may do."""


@dataclasses.dataclass
class Config:
  every: int  # steps from one save to the next
  keep: int = 3  # the newest so many stay
  keep_every: int | None = None  # multiples of this step stay for ever

  def finalize(self, field: str = 'checkpoint') -> None:
    for name, value in vars(self).items():
      if (name, value) != ('keep_every', None) and not value >= 1:
        problem, fix = 'is not positive', 'use a whole number of at least 1'
        raise ConfigError(f'{field}.{name}', value, problem, fix)


class Restored(NamedTuple):
  step: int
  state: Any
  data_state: dict
  metadata: dict


class Checkpoints(contextlib.AbstractContextManager):
  """The checkpoints of one run: `save` while training, `restore` to go on.

  Without a config they are open for reading only; with one, a directory that cannot be
  written is a CheckpointError. Every process of a run makes the same calls.

  Args:
    behind: those that the run goes back to: the newest step here that is not newer than
      theirs stays too, since `forget_after` may leave nothing else.
  """

  def __init__(
    self,
    directory: _Path,
    config: Config | None = None,
    metadata: dict | None = None,
    behind: Checkpoints | None = None,
  ):
    std_logging.getLogger('absl').addFilter(_audible)  # orbax speaks through it
    self.directory = _absolute(directory)
    self.config, self.metadata, self._behind = config, metadata or {}, behind
    self._pending: tuple[int, ocp.AsyncResponse] | None = None
    self._damaged: set[int] = set()
    self._swept, self._primary = False, jax.process_index() == 0
    if config is not None:
      config.finalize()
      self._probe()

  def __exit__(self, kind, error, trace) -> None:
    try:
      self.close()
    except CheckpointError as failure:
      if kind is None:
        raise
      logging.error('%s', failure)  # must not hide the error already under way

  def steps(self) -> list[int]:
    """The steps with a whole checkpoint, ascending; those found damaged left out."""
    whole = [s for s in _numbered(self.directory) if s not in self._damaged]
    return [s for s in whole if (self.directory / str(s) / _RECORD).exists()]

  def latest_step(self) -> int | None:
    return max(self.steps(), default=None)

  def forget_after(self, step: int) -> None:
    """Deletes what is newer: a run that went back will make those steps again."""
    self.close()
    if self._primary:
      for newer in (s for s in _numbered(self.directory) if s > step):
        self._delete(newer)

  def save(self, step: int, state: PyTree, data_state: dict, *, wait=False) -> bool:
    """Starts saving; blocks for the copy to the host, and for a save still under way.

    The state's leaves are `jax.Array`s; `data_state` is JSON. `wait` blocks until the
    checkpoint is whole. Returns False, having done nothing, if the step is there. A
    failure in the background is a CheckpointError of the next `save` or of `close`.
    """
    if self.config is None:
      raise CheckpointError(f'{self.directory} is open for reading only; give a config')
    self.close()
    steps = processes.agreed(self.steps())
    if step in steps:
      return False
    if steps and step < steps[-1]:
      problem = f'saving step {step} in {self.directory}: step {steps[-1]} is there'
      raise CheckpointError(f'{problem} and newer; resume or use another directory')
    path, leaves = self.directory / str(step), _flatten(state)
    record = _seal(self.metadata, data_state, _describe(leaves))
    arrays = {'state': unflatten_dict(leaves, sep='/')}
    with self._failing(step):
      if self._primary:
        if not self._swept:  # what killed runs left; never when only reading
          self._sweep('[0-9]*.orbax-checkpoint-tmp*')
          self._sweep('[0-9]*.deleted')
          for begun in _numbered(self.directory, committed=False):
            self._sweep(str(begun))
        _move_aside(path)
      self._swept = True
      processes.agreed(None)  # the place is free
      with _context():
        response = ocp.save_checkpointables_async(path, arrays, custom_metadata=record)
    self._pending = step, response
    self._damaged.discard(step)
    if wait:
      self.close()
    return True

  def close(self) -> None:
    """Waits for what is under way. Raises CheckpointError if it failed."""
    if self._pending is not None:
      (step, response), self._pending = self._pending, None
      with self._failing(step):
        response.result()
      self.prune()

  def prune(self) -> None:
    """Deletes what `Config` does not keep."""
    if self.config is None or not self._primary:
      return
    steps = self.steps()
    reached = self._behind and self._behind.latest_step()
    needed = max((s for s in steps if s <= (reached or 0)), default=None)
    for step in steps[: -self.config.keep]:
      every = self.config.keep_every
      if step != needed and (every is None or step % every):
        self._delete(step)

  @contextlib.contextmanager
  def _failing(self, step: int) -> Iterator[None]:
    try:
      yield
    except Exception as error:
      if self._primary:  # a full disk needs the room
        self._sweep(f'{step}.orbax-checkpoint-tmp*')
      self._swept = False  # other threads may still have been writing there
      problem = f'saving step {step} in {self.directory} failed: {_brief(error)}'
      raise CheckpointError(f'{problem}; whole steps there: {self.steps()}') from error

  def _delete(self, step: int) -> None:
    # A kill must not leave half a checkpoint that looks like a whole one.
    path = self.directory / str(step)
    with contextlib.suppress(Exception):  # stays until another save
      if paths.is_bucket(path):
        (path / _COMMIT).unlink()
      else:
        path = path.rename(self.directory / f'{step}.deleted')
      path.rmtree()

  def _sweep(self, debris: str) -> None:
    with contextlib.suppress(Exception):  # remote file systems raise their own
      for path in self.directory.glob(debris):
        path.rmtree()

  def _probe(self) -> None:
    path = self.directory / f'.writable-{jax.process_index()}-{os.getpid()}'
    try:
      self.directory.mkdir(parents=True, exist_ok=True)
      path.write_text('probe')
      path.unlink()
    except Exception as error:  # remote file systems raise their own
      problem = f'cannot write checkpoints in {self.directory}: {_brief(error)}'
      raise CheckpointError(f'{problem}; choose another directory') from error

  def restore(
    self, abstract_state: PyTree, step: int | None = None, *, subset: bool = False
  ) -> Restored | None:
    """The newest checkpoint that can be read, or the given one; None if there is none.

    The state comes in the shardings of `abstract_state`, on any mesh; those that
    `jax.eval_shape` gives are taken on the mesh of `jax.set_mesh`. A damaged step is
    logged as an error and the next older one is tried, unless `step` is given. With
    `subset` it may hold more: a trunk is read out of one that has drafters too.

    Raises:
      CheckpointMismatchError: Tree, shapes or dtypes differ; names the leaves.
      CheckpointError: All are damaged, or the given step is missing or damaged.
    """
    self.close()
    wanted = {n: _target(x, n) for n, x in _flatten(abstract_state).items()}
    reasons = []
    there = processes.agreed(_numbered(self.directory)[::-1])
    if step is not None and step not in there:
      raise _nothing_found(self.directory, step)
    for candidate in there if step is None else [step]:
      path, reason, record, leaves = self.directory / str(candidate), '', {}, []
      try:
        record = _read_record(path)
        _compare(path, record['leaves'], wanted, subset)
        leaves = _load(path, record['leaves'], wanted)
      except _DamagedError as error:
        reason = str(error)
      if not processes.anywhere(bool(reason)):
        tree = jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)
        return Restored(candidate, tree, record['data_state'], record['metadata'])
      reasons.append(f'step {candidate}: {reason or "another process cannot read it"}')
      self._damaged.add(candidate)
      logging.error('damaged checkpoint in %s, %s', self.directory, reasons[-1])
    if reasons:
      problem = f'no checkpoint in {self.directory} can be read; {"; ".join(reasons)}'
      raise CheckpointError(f'{problem}; put back a copy or use another directory')
    return None


def find(directory: str | os.PathLike) -> epath.Path:
  """The checkpoints of a run, given its directory or that of the checkpoints."""
  path = _absolute(directory)
  return path / 'checkpoints' if (path / 'checkpoints').is_dir() else path


def read_metadata(directory: _Path, step: int | None = None) -> dict:
  """The metadata a checkpoint was saved with, the newest's by default. Reads no array.

  Raises CheckpointError if there is none that can be read.
  """
  return read_record(directory, step)['metadata']


def read_record(directory: _Path, step: int | None = None) -> dict:
  """The same, with `step`, and `leaves`: each one's shape, dtype and checksum by name,
  such as 'params/trunk/embedding'."""
  path = _absolute(directory)
  for candidate in (s for s in _numbered(path)[::-1] if step in (None, s)):
    try:
      return {'step': candidate, **_read_record(path / str(candidate))}
    except _DamagedError as error:
      logging.error('damaged checkpoint in %s, step %d: %s', path, candidate, error)
  raise _nothing_found(path, step)


def _flatten(tree: PyTree) -> dict[str, Any]:
  """{'params/trunk/w_DF': leaf}: names do not depend on the containers' classes."""
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def _describe(leaves: dict[str, Any]) -> dict[str, dict]:
  for name, x in leaves.items():
    if not isinstance(x, jax.Array) or jnp.issubdtype(x.dtype, jax.dtypes.extended):
      problem = f'state leaf {name} is a {getattr(x, "dtype", type(x).__name__)}'
      raise CheckpointError(f'{problem}; make it a jax.Array, of a key its key_data')
  sums = {n: int(checksum(x)) for n, x in leaves.items()}  # in turn, or CPUs deadlock
  return {
    name: {'shape': [*x.shape], 'dtype': str(x.dtype), 'checksum': sums[name]}
    for name, x in leaves.items()
  }


def _target(leaf: Any, name: str) -> jax.ShapeDtypeStruct:
  mesh, alone = jax.sharding.get_mesh(), SingleDeviceSharding(jax.local_devices()[0])
  sharding = leaf.sharding or (alone if mesh.empty else NamedSharding(mesh, jax.P()))
  if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
    if mesh.empty or mesh.abstract_mesh != sharding.mesh:
      problem = f'abstract leaf {name} is sharded over {sharding.mesh}, not in use'
      raise CheckpointError(f'{problem}; call jax.set_mesh with that mesh first')
    sharding = NamedSharding(mesh, sharding.spec)
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _compare(path, stored: dict, wanted: dict, subset: bool) -> None:
  want = {n: f'{x.dtype}{list(x.shape)}' for n, x in wanted.items()}
  have = {
    n: f'{x["dtype"]}{x["shape"]}' for n, x in stored.items() if n in want or not subset
  }
  lines = [
    f'  {n}: {have.get(n, "absent")} in the checkpoint, {want.get(n, "absent")} here'
    for n in sorted({n for n, _ in have.items() ^ want.items()})
  ]
  if lines:
    lines[_SHOWN:] = [f'  and {len(lines) - _SHOWN} more'] if lines[_SHOWN:] else []
    fix = 'use the config it was saved with (see read_metadata) or another directory'
    lines = [f'checkpoint {path} is of another model or precision; {fix}:', *lines]
    raise CheckpointMismatchError('\n'.join(lines))


def _absolute(directory: _Path) -> epath.Path:
  path = paths.at(directory)
  return path if paths.is_bucket(path) else path.absolute()


def _numbered(directory: epath.Path, committed: bool = True) -> list[int]:
  """The steps that are there; or those of a bucket whose save was never finished."""
  found = directory.iterdir() if directory.is_dir() else []
  named = [p for p in found if re.fullmatch(r'0|[1-9][0-9]{0,17}', p.name)]
  return sorted(
    int(path.name)
    for path in named
    if path.is_dir()
    and (not paths.is_bucket(path) or (path / _COMMIT).exists()) == committed
  )


def _seal(metadata: dict, data_state: dict, leaves: dict) -> dict:
  record = {'metadata': metadata, 'data_state': data_state, 'leaves': leaves}
  try:
    record = json.loads(json.dumps(record, allow_nan=False))
  except (TypeError, ValueError) as error:
    raise CheckpointError(f'metadata or data_state is not JSON: {error}') from error
  return {**record, 'sha256': _digest(record)}


def _digest(record: dict) -> str:
  return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _read_record(path: epath.Path) -> dict:
  try:
    record = json.loads((path / _RECORD).read_text())['custom_metadata']
    if record.pop('sha256') != _digest(record):
      raise ValueError('changed since it was saved')
  except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
    raise _DamagedError(f'{_RECORD} cannot be read ({_brief(error)})') from None
  return record


def _load(path: epath.Path, stored: dict, wanted: dict) -> list[Array]:
  """The wanted leaves, checked against the checksums they were saved with."""
  loaded, reason, abstract = {}, '', {'state': unflatten_dict(wanted, sep='/')}
  with _quiet():
    try:
      with _context():
        loaded = _flatten(ocp.load_checkpointables(path, abstract)['state'])
    except (MemoryError, jax.errors.JaxRuntimeError):
      raise  # no damage: an older one would not fit either
    except Exception as error:
      reason = f'its arrays cannot be read ({_brief(error)})'
    if reason:
      for _ in range(3):  # the other reads complain as they end and are collected
        time.sleep(0.1)
        gc.collect()
      raise _DamagedError(reason)
  sums = {name: int(checksum(loaded[name])) for name in wanted}  # as in `_describe`
  wrong = [name for name in wanted if sums[name] != stored[name]['checksum']]
  if wrong:
    raise _DamagedError(f'changed since it was saved: {", ".join(wrong[:_SHOWN])}')
  return [loaded[name] for name in wanted]


def _move_aside(path: epath.Path) -> None:
  """Nothing that a user may have put there is deleted."""
  if path.exists():
    aside = path.rename(path.parent / f'{path.name}.damaged-{time.time_ns()}')
    logging.error('%s is no sound checkpoint: moved to %s', path, aside)


def _nothing_found(directory: epath.Path, step: int | None = None) -> CheckpointError:
  if not directory.is_dir():
    return CheckpointError(f'no checkpoint: {directory} is not a directory')
  wanted = 'named by its step, such as 1000/' if step is None else f'{step}/'
  names = ', '.join(sorted(p.name for p in directory.iterdir())[:_SHOWN]) or 'nothing'
  looked = f'looked for a directory {wanted} that holds {_RECORD}; found: {names}'
  return CheckpointError(f'no checkpoint in {directory}: {looked}')


def _context() -> ocp.Context:
  context = ocp.Context()
  # With True, a directory that cannot be made keeps the process from ending for 5 min.
  context.async_options.create_directories_asynchronously = False
  context.pytree.loading.partial_load = True  # `_compare` sees what is missing
  return context


def _audible(record: std_logging.LogRecord) -> bool:  # CheckpointError says it once
  return '/orbax/' not in record.pathname


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  """A read that fails leaves tasks behind that say so again, with tracebacks."""

  def heard(unraisable) -> None:
    if not re.match('Event loop is closed|Encountered err', str(unraisable.exc_value)):
      hook(unraisable)

  logger, hook = std_logging.getLogger('asyncio'), sys.unraisablehook
  try:
    logger.disabled = True
    sys.unraisablehook = heard
    with warnings.catch_warnings():
      warnings.filterwarnings('ignore', 'coroutine .* was never awaited')
      yield
  finally:
    logger.disabled = False
    sys.unraisablehook = hook


def _brief(error: BaseException) -> str:
  while error.__cause__ is not None:  # orbax wraps what happened in what it tried
    error = error.__cause__
  text = ' '.join(str(error).split())
  return f'{type(error).__name__}: {text[:300]}{"…" if len(text) > 300 else ""}'
