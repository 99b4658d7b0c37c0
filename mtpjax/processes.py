"""One job of several processes: joining it, agreeing on things, and ending together.

Alone, nothing here starts, waits or costs anything. Otherwise a process joins the job
before JAX looks at a device, one that fails tells the others why, and nobody waits for
one that is gone: JAX notices within `_HEARTBEAT` seconds and ends the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import itertools
import json
import math
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import jax
import numpy as np
from absl import flags

# What jax.distributed keeps to itself: who is there, and what a launcher says of it.
from jax._src import clusters, distributed

from mtpjax import mesh
from mtpjax.fields import ConfigError

_HEARTBEAT = 10  # seconds without a sign of life until a process counts as dead
_GRACE = 5  # seconds that the others have to hear of a failure
_PATIENCE = 3_600_000  # ms to wait for what another process is busy with
_ENDED = 'mtpjax/ended'
_OWN = ('--coordinator', '--process', '--json')  # flags that may differ
_failing = threading.Event()  # this process, by itself
_turns = itertools.count()  # the same on every process, since all make the same calls


def define_flags() -> None:
  """--coordinator and the like, for a command; a library defines none."""
  if 'coordinator' not in flags.FLAGS:
    flags.DEFINE_string(
      'coordinator',
      None,
      'HOST:PORT of process 0, where no launcher says it; TPU pods, SLURM, Open MPI '
      'and Kubernetes do',
    )
    flags.DEFINE_integer('processes', None, 'how many there are; with --coordinator')
    flags.DEFINE_integer('process', None, 'which one this is, from 0')
    flags.DEFINE_integer(
      'join_timeout', 300, 'seconds to wait for all to arrive', lower_bound=1
    )


@contextlib.contextmanager
def together(given: dict[str, Any]) -> Iterator[None]:
  """Joins the job that the flags or a launcher describe, if any, and leaves it with all
  the others: at the end, or at once when one of them fails.

  Args:
    given: the command of this process, as JSON by flag.

  Raises:
    ConfigError: the flags do not fit, or the launcher's job cannot be found out; or
      process 0 was given another command.
  """
  if not _join():
    yield
    return
  listener = threading.Thread(target=_listen, daemon=True)
  listener.start()
  try:
    own = {name: x for name, x in given.items() if name not in _OWN}
    same(own, 'give all processes the same command')
    yield
  except BaseException as error:
    _fail(error)
  sys.stdout.flush()
  _client().wait_at_barrier('mtpjax/done', _PATIENCE)
  if _index() == 0:
    _client().key_value_set(_ENDED, '')
  listener.join()
  jax.distributed.shutdown()


def agreed(value: Any) -> Any:
  """Process 0's value, which is JSON; every process calls it."""
  if distributed.global_state.client is None:
    return value
  key = f'mtpjax/agreed/{next(_turns)}'
  if _index() == 0:
    _client().key_value_set(key, json.dumps(value))
    return value
  return json.loads(_client().blocking_key_value_get(key, _PATIENCE))


def same(found: dict[str, Any], fix: str) -> None:
  """What is not the same everywhere would have processes wait for each other for ever.

  Raises:
    ConfigError: names what process 0 has another value of; every process calls it.
  """
  own = json.loads(json.dumps(found))
  theirs = agreed(own)
  for name in sorted({*theirs, *own}):
    there, here = theirs.get(name), own.get(name)
    if there != here:
      raise ConfigError(name, here, f'is {there!r} in process 0 of this job', fix)


def anywhere(here: bool) -> bool:
  """Whether it is so on any process; every process calls it."""
  if distributed.global_state.client is None:
    return here
  key = f'mtpjax/anywhere/{next(_turns)}'
  if here:
    _client().key_value_set(f'{key}/{_index()}', '')
  _client().wait_at_barrier(key, _PATIENCE)
  return bool(_client().key_value_dir_get(f'{key}/'))


def end(code: int, said: str) -> NoReturn:
  """Ends this process at once, and with it the others, which say the same."""
  if distributed.global_state.client is not None:
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # somebody was first
      _client().key_value_set(_ENDED, json.dumps([code, _index(), said]))
  _leave(code)


class Stop:
  """SIGTERM and Ctrl-C: the step under way is finished first, the same one on every
  process, whichever was asked. A second Ctrl-C ends at once."""

  def __init__(self):
    self._received = 0
    self._sent: jax.Array | None = None
    for number in (signal.SIGTERM, signal.SIGINT):
      signal.signal(number, self._note)

  def _note(self, number, _) -> None:
    self._received = self._received or number
    signal.signal(signal.SIGINT, signal.default_int_handler)

  def inputs(self) -> dict[str, jax.Array]:
    """What the train step takes to make `asked` the same everywhere; alone, nothing."""
    if jax.process_count() == 1:
      return {}
    return {'stop': _everywhere(self._received)}

  def asked(self, metrics: dict[str, Any]) -> int:
    """The signal, or 0; called once a step, after it is dispatched.

    Several processes find out what any had received a step earlier, which waits for
    nothing that the figures of that step do not wait for too.
    """
    if jax.process_count() == 1:
      return self._received
    earlier, self._sent = self._sent, metrics['stop']
    return 0 if earlier is None else int(earlier)

  def obey_at_once(self) -> None:
    """From now on, all being saved."""

    def leave(number, _):
      raise SystemExit(128 + number) from InterruptedError(signal.Signals(number).name)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if self._received:  # during the last step or its save, which nobody asks after
      leave(self._received, None)


class Watch(contextlib.AbstractContextManager):
  """Ends a process that takes too long over one thing, with all threads' stacks, so
  that a launcher can start it anew.

  Args:
    seconds: None is for ever.
  """

  def __init__(self, seconds: float | None):
    self._seconds = seconds
    self._now: tuple[float, str] | None = None
    self._over = threading.Event()

  def at(self, what: str | None) -> None:
    """It begins now; None is nothing."""
    self._now = None if what is None else (time.monotonic(), what)

  def over(self, items: Iterable[Any], what: str) -> Iterator[Any]:
    """The items, each a thing of its own."""
    for number, item in enumerate(items, 1):
      self.at(f'{what} {number}')
      yield item

  def __enter__(self) -> Watch:
    if self._seconds is not None:
      threading.Thread(target=self._look, daemon=True).start()
    return self

  def __exit__(self, *error) -> None:
    self._over.set()

  def _look(self) -> None:
    assert self._seconds is not None
    while not self._over.wait(min(self._seconds / 4, 10)):
      began, what = self._now or (math.inf, '')
      if time.monotonic() - began > self._seconds:
        said = f'{what} has taken more than guard.stuck={self._seconds:g} s'
        _say(f'{said}; the same command goes on')
        faulthandler.dump_traceback(sys.stderr)
        end(1, said)


@functools.cache
def _everywhere(value: int) -> jax.Array:
  """One number a device; this process's are `value`."""
  sharding = jax.NamedSharding(jax.sharding.get_mesh(), jax.P(mesh.AXES))
  return jax.make_array_from_callback(
    (jax.device_count(),), sharding, lambda _: np.full(1, value, np.int32)
  )


def _join() -> bool:
  """Whether there is a job; this process is then part of it."""
  values = flags.FLAGS.coordinator, flags.FLAGS.processes, flags.FLAGS.process
  address, count, index = values
  if values == (None, None, None):
    if _launched() == 1:
      return False
    given: dict[str, Any] = {'local_device_ids': _own_devices()}
  elif None in values:
    missing = ('--coordinator', '--processes', '--process')[values.index(None)]
    fix = 'give --coordinator=HOST:PORT, --processes and --process, or none of them'
    raise ConfigError(missing, None, 'is missing', fix)
  elif not _is_address(address):
    fix = 'write HOST:PORT, such as 10.0.0.1:9876'
    raise ConfigError('--coordinator', address, 'is no address', fix)
  elif count < 1 or not 0 <= index < count:
    fix = f'use 0 … {count - 1}' if count > 0 else 'use at least 1'
    name, value = ('--process', index) if count > 0 else ('--processes', count)
    raise ConfigError(name, value, f'is not one of {count} processes', fix)
  elif count == 1:
    return False
  else:
    if index == 0:
      _check_port(address)
    given = {
      'coordinator_address': address,
      'num_processes': count,
      'process_id': index,
      'cluster_detection_method': 'deactivate',  # what is said counts
    }
  seconds = flags.FLAGS.join_timeout
  timer = threading.Timer(seconds, _give_up, (seconds,))
  timer.daemon = True
  timer.start()
  # Its own handler of SIGTERM would keep ours from being asked.
  jax.config.update('jax_enable_preemption_service', False)
  try:
    jax.distributed.initialize(
      **given,
      # JAX aborts with a stack trace; what it is waiting for is said before that.
      initialization_timeout=seconds + 60,
      heartbeat_timeout_seconds=_HEARTBEAT,
    )
  except (RuntimeError, ValueError, OSError) as error:
    said = ' '.join(str(error).split())[:200]
    fix = 'see that it is free, and that all processes name the same'
    raise ConfigError('--coordinator', _address(), f'failed: {said}', fix) from error
  finally:
    timer.cancel()
  with contextlib.suppress(AttributeError, flags.Error):
    # Orbax's other barrier would take the devices' turn while a step runs on them.
    flags.FLAGS.experimental_orbax_use_distributed_barrier = True
  return True


def _is_address(text: str) -> bool:
  host, _, port = text.rpartition(':')
  # With port 0 each process would take another.
  return bool(host) and port.isdecimal() and 0 < int(port) < 2**16


def _check_port(address: str) -> None:
  """JAX ends in a segmentation fault, or shares the port with another job."""
  both = socket.has_dualstack_ipv6()
  family = socket.AF_INET6 if both else socket.AF_INET
  place = '', int(address.rpartition(':')[2])
  try:
    socket.create_server(place, family=family, dualstack_ipv6=both).close()
  except OSError as error:
    problem, fix = f'cannot be listened at: {error}', 'use another port'
    raise ConfigError('--coordinator', address, problem, fix) from None


def _launched() -> int:
  """How many processes a launcher started, as JAX finds out."""
  for kind in clusters.ClusterEnv._cluster_types:
    # In a pod of no job there is nobody to ask.
    pod = kind is clusters.K8sCluster and 'JOB_COMPLETION_INDEX' not in os.environ
    if kind.opt_in_only_method or pod:
      continue
    try:
      with warnings.catch_warnings():
        warnings.simplefilter('error')
        if kind.is_env_present():
          return kind.get_process_count()
    except (RuntimeError, ValueError, Warning) as error:
      said = ' '.join(str(error).split())
      fix = 'mend that, or give --coordinator, --processes and --process'
      problem = f'the job of {kind.__name__} cannot be found out: {said}'
      raise ConfigError('--coordinator', None, problem, fix) from error
  return 1


def _own_devices() -> list[int] | None:
  """[] takes all that this process sees. None: on a GPU the one of its local rank,
  which is wrong where a launcher started one process a node, or chose for it."""
  env = os.environ
  tasks, nodes = env.get('SLURM_STEP_NUM_TASKS'), env.get('SLURM_STEP_NUM_NODES')
  alone = tasks is not None and tasks == nodes
  alone = alone or env.get('OMPI_COMM_WORLD_LOCAL_SIZE') == '1'
  chosen = env.get('CUDA_VISIBLE_DEVICES', '')
  return [] if alone or (chosen and ',' not in chosen) else None


def _client() -> Any:
  return distributed.global_state.client


def _index() -> int:
  return distributed.global_state.process_id


def _address() -> str | None:
  return distributed.global_state.coordinator_address or flags.FLAGS.coordinator


def _name(index: int) -> str:
  return f'process {index} of {distributed.global_state.num_processes}'


def _give_up(seconds: int) -> None:
  _say(
    f'{_address() or "the coordinator"} did not bring all processes together within '
    f'--join_timeout={seconds} s; see that process 0 runs there, that it can be '
    'reached, and that the others were started'
  )
  _exit(1)  # no mistake: a machine may be late, and a launcher should try again


def _listen() -> None:
  """Ends this process when another one has failed."""
  try:
    told = _client().blocking_key_value_get(_ENDED, 2**40)
  except jax.errors.JaxRuntimeError:  # JAX is about to abort this process
    _say(f'{_name(0)}, the coordinator at {_address()}, is gone')
    _exit(1)
  if not told:
    return  # all is done
  code, index, said = json.loads(told)
  if index == _index() or _failing.wait(0.5):
    return  # it ends by itself
  _say(f'{_name(index)} ended: {said}', code)
  _leave(code)


def _fail(error: BaseException) -> NoReturn:
  if isinstance(error, jax.errors.JaxRuntimeError):
    # Most likely another process is gone, and why is being told.
    time.sleep(_GRACE)
  _failing.set()
  if isinstance(error, SystemExit):
    code = error.code if isinstance(error.code, int) else int(error.code is not None)
    said = str(error.__cause__ or f'exit code {code}')
    if isinstance(error.code, str):
      _say(said := error.code)
  elif isinstance(error, ConfigError):  # another command
    code, said = 2, str(error)
    _say(said)
  else:
    sys.excepthook(type(error), error, error.__traceback__)
    code, said = 1, f'{type(error).__name__}: {" ".join(str(error).split())[:300]}'
    if isinstance(error, jax.errors.JaxRuntimeError):
      said += '; perhaps another process is gone: the same command goes on'
    _say(f'{_name(_index())}: {said}')
  end(code, said)


def _leave(code: int) -> NoReturn:
  """Process 0 last, since the others hear each other through it."""
  sure = threading.Timer(2 * _GRACE, _exit, (code,))
  sure.daemon = True
  sure.start()
  state = distributed.global_state
  with contextlib.suppress(jax.errors.JaxRuntimeError):
    if state.client is not None:
      _client().key_value_set(f'{_ENDED}/{_index()}', '')
    until = time.monotonic() + _GRACE
    while state.service is not None and time.monotonic() < until:
      if len(_client().key_value_dir_get(f'{_ENDED}/')) >= state.num_processes:
        break
      time.sleep(0.05)
  _exit(code)


def _say(text: str, code: int = 1) -> None:
  lines = f'{"error: " if code else ""}{text}'.splitlines()[:3]
  sys.stderr.write('\n'.join(lines) + '\n')


def _exit(code: int) -> NoReturn:
  """Without waiting for anything, as the end of an interpreter does."""
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(OSError, ValueError):
      stream.flush()
  os._exit(code)
