"""Tokenising in worker processes: what comes out depends on neither their number nor
which is faster."""

import collections
import concurrent.futures
import concurrent.futures.process
import contextlib
import multiprocessing
import os
import signal
import threading
import zlib
from collections.abc import Iterable, Iterator

import numpy as np

from mtpjax.data.sources import DataError, Document
from mtpjax.data.tokenizer import Tokenizer, encode_document, from_json

Encoded = tuple[np.ndarray, np.ndarray | None]  # ids, and which may be targets
_JOB_BYTES = 1 << 18
_own: list[Tokenizer] = []  # of a worker process


class Workers:
  """Processes with a tokenizer each; 1 is this process itself."""

  def __init__(self, tokenizer: Tokenizer, number: int):
    self._tokenizer, self._number, self._pool = tokenizer, number, None
    if number > 1:
      self._pool = concurrent.futures.ProcessPoolExecutor(
        number,
        multiprocessing.get_context('spawn'),  # a fork would copy JAX's threads' locks
        _begin,
        (tokenizer.to_json(),),
      )
      with _uninterrupted():  # which the processes inherit: Ctrl-C is for their parent
        for _ in range(number):
          self._pool.submit(int)  # starts one, as none is idle yet

  def encode(self, documents: Iterable[Document]) -> Iterator[Encoded]:
    """In the documents' order; few are held at a time.

    Raises:
      DataError: a document cannot be encoded, or a worker died.
    """
    if self._pool is None:
      for document in documents:
        yield encode_document(self._tokenizer, document)
      return
    waiting = collections.deque()
    try:
      for job in _jobs(documents):
        waiting.append(self._pool.submit(_encode, job))
        if len(waiting) > 2 * self._number:
          yield from waiting.popleft().result()
      while waiting:
        yield from waiting.popleft().result()
    except concurrent.futures.process.BrokenProcessPool as error:
      raise DataError(
        f'workers={self._number}: one died, perhaps for want of memory; the same '
        'command goes on, with fewer --workers'
      ) from error

  def __enter__(self) -> 'Workers':
    return self

  def __exit__(self, *error) -> None:
    if self._pool is not None:
      self._pool.shutdown(cancel_futures=True)


def checksum(document: Document, before: int) -> int:
  """zlib.crc32 of all that a document is, after those before it."""
  flags = [(len(part), flag) for part, flag in document.parts or ()]
  head = f'{document.name}\0{len(document.text)}\0{flags}\0'
  check = zlib.crc32(head.encode('utf-8', 'surrogateescape'), before)
  check = zlib.crc32(document.text, check)
  for array in (document.tokens, document.mask):
    if array is not None:
      check = zlib.crc32(np.ascontiguousarray(array).tobytes(), check)
  return check


def _jobs(documents: Iterable[Document]) -> Iterator[list[Document]]:
  job, size = [], 0
  for document in documents:
    job.append(document)
    size += len(document.text) + 256
    if size >= _JOB_BYTES:
      yield job
      job, size = [], 0
  if job:
    yield job


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
  if threading.current_thread() is not threading.main_thread():
    yield  # only the main thread may set handlers
    return
  handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
  try:
    yield
  finally:
    signal.signal(signal.SIGINT, handler)


def _begin(tokenizer: str) -> None:
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  _own.append(from_json(tokenizer))
  threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
  parent = multiprocessing.parent_process()
  assert parent is not None
  parent.join()  # one that was killed tells nobody
  os._exit(1)


def _encode(job: list[Document]) -> list[Encoded]:
  return [encode_document(_own[0], document) for document in job]
