"""Tokenises a config's documents once, so that training reads their ids from disk.

  python -m mtpjax.data.prepare --config=FILE.py --output=DIR [--workers=N]

Training then takes `source=Prepared('DIR')`, of a mixture `Prepared('DIR/NAME')` for
each part. The same command goes on after the last whole shard, wherever it was stopped.
"""

import collections
import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from mtpjax import config as configs
from mtpjax import fields, terminal
from mtpjax import flags as command
from mtpjax.data import batches, prepared, tokenfile
from mtpjax.data.mixture import Mixture
from mtpjax.data.sources import Counts, DataError, Document, Source, Split
from mtpjax.data.tokenizer import Bytes, from_json
from mtpjax.data.workers import Workers, checksum

_OUTPUT = flags.DEFINE_string('output', None, 'the directory to write')
_WORKERS = flags.DEFINE_integer(
  'workers', os.cpu_count() or 1, 'processes that tokenise', lower_bound=1
)
_SHARD_TOKENS = flags.DEFINE_integer(
  'shard_tokens', 1 << 26, 'of a file', lower_bound=tokenfile.BLOCK
)
_SPLITS: tuple[Split, ...] = ('train', 'heldout')
_CLAIM = 'config.json'


def prepare(
  config: batches.Config, directory: Path, workers: int = 1, shard_tokens: int = 1 << 26
) -> None:
  """Writes both splits of the config's source, or goes on with them.

  Args:
    directory: made if need be; of a mixture each part has a folder in it.
    workers: processes that tokenise; the result does not depend on them.
    shard_tokens: of a file, a multiple of `tokenfile.BLOCK`; so many are in memory.

  Raises:
    DataError: bad fields or data; the directory has something else, or somebody else
      writes there.
    OSError: it cannot be written; what was whole stays.
  """
  config.validate()
  parts = _parts(config)
  if shard_tokens % tokenfile.BLOCK:
    raise DataError(
      f'shard_tokens={shard_tokens}: must be a multiple of {tokenfile.BLOCK}'
    )
  directory.mkdir(parents=True, exist_ok=True)
  with _locked(directory):
    claim = _claim(config, parts, directory, shard_tokens)
    run = hashlib.sha256(json.dumps(claim, sort_keys=True).encode()).hexdigest()[:16]
    tokenizer = from_json(claim['tokenizer'])
    unfinished = {
      name: part
      for name, part in parts.items()
      if not (directory / name / prepared.INDEX).exists()
    }
    if not unfinished:
      terminal.say(f'{directory} is finished: nothing to do')
      return
    for name in unfinished:
      (directory / name).mkdir(exist_ok=True)
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    writers = {
      (name, split): tokenfile.Writer(directory / name, split, run, dtype, shard_tokens)
      for name in unfinished
      for split in _SPLITS
    }
    total = sum(claim['documents'][name][split] for name, split in writers)
    before = sum(writer.documents for writer in writers.values())
    if before:
      terminal.say(f'going on after {before:,} of {total:,} documents in {directory}')
    with (
      Workers(tokenizer, workers) as pool,
      terminal.Progress(total, before, what='document') as progress,
    ):
      for name, part in unfinished.items():
        counts = {split: Counts() for split in _SPLITS}
        for split in _SPLITS:
          writer = writers[name, split]
          others = sum(w.documents for w in writers.values()) - writer.documents
          for _ in _write(part, split, counts[split], writer, pool):
            progress.update(others + writer.documents)
        index = {key: claim[key] for key in ('format', 'block', 'shard_tokens')}
        index |= {'run': run, 'tokenizer': claim['tokenizer'], 'splits': {}}
        for split in _SPLITS:
          index['splits'][split] = _described(
            directory / name, writers[name, split].headers, counts[split]
          )
        _write_json(directory / name / prepared.INDEX, index)
  tokens = sum(h.tokens for writer in writers.values() for h in writer.headers)
  places = [f"Prepared('{directory / name}')" for name in parts]
  terminal.say(
    f'{tokens:,} tokens of {total:,} documents; to train on them, '
    f'source={" and ".join(places)}'
  )


def _parts(config: batches.Config) -> dict[str, Source]:
  mixed = isinstance(config.source, Mixture)
  parts = (
    config.source.parts if isinstance(config.source, Mixture) else {'': config.source}
  )
  for name, part in parts.items():
    if not isinstance(part, Source):
      where = f'data.source.parts[{name}]' if mixed else 'data.source'
      raise DataError(
        f'{where}={part}: it makes its rows itself, so there is nothing to prepare'
      )
  return {name: part for name, part in parts.items() if isinstance(part, Source)}


def _write(
  part: Source, split: Split, counts: Counts, writer: tokenfile.Writer, pool: Workers
) -> Iterator[None]:
  """One split after what its shards hold already, yielding after every document."""
  whole, rest = writer.documents, int(writer.carry > 0)
  documents, check = iter(part.documents(split, counts)), 0
  last = []  # the document that the last shard ends in
  for document in itertools.islice(documents, whole):
    check = checksum(document, check)
    last = [document]
  if check != writer.origin:
    raise DataError(
      f'{part}: its documents are not those of the shards that are there already; '
      'prepare them in a new directory'
    )
  if rest:
    writer.add_rest(*next(pool.encode(last)))
  checks = collections.deque()

  def noted() -> Iterator[Document]:
    nonlocal check
    for document in documents:
      check = checksum(document, check)
      checks.append(check)
      yield document

  for ids, mask in pool.encode(noted()):
    writer.add(ids, mask, checks.popleft())
    yield
  writer.close()


def _claim(
  config: batches.Config, parts: dict[str, Source], directory: Path, shard_tokens: int
) -> dict[str, Any]:
  """What the directory is for, written before all else; read again if it is there."""
  tokens = config.tokenizer or Bytes.Config()
  documents = {
    name: fields.to_json(part, 'data.source') for name, part in parts.items()
  }
  wanted = {
    'format': prepared.FORMAT,
    'block': tokenfile.BLOCK,
    'shard_tokens': shard_tokens,
    'source': documents if isinstance(config.source, Mixture) else documents[''],
    'tokenizer_config': fields.to_json(tokens, 'data.tokenizer'),
  }
  path = directory / _CLAIM
  if path.exists():
    try:
      claim = json.loads(path.read_text())
      found = {key: claim[key] for key in wanted}
    except (ValueError, KeyError, TypeError):
      raise DataError(f'{path} is of something else: choose a new --output') from None
    if changed := fields.differences(found, wanted):
      raise DataError(
        f'{directory} is of another config ({"; ".join(changed)}): choose a new '
        '--output, or go on with that config'
      )
    return claim
  if others := [p.name for p in directory.iterdir() if p.suffix != '.part']:
    raise DataError(
      f'{directory} holds {min(others)} but no {_CLAIM}: choose a new --output'
    )
  terminal.say('reading and counting the documents …')
  counted = {name: dict.fromkeys(_SPLITS, 0) for name in parts}

  def read(split: Split) -> Iterator[Document]:
    for name, part in parts.items():
      for document in part.documents(split):
        counted[name][split] += 1
        yield document

  train, heldout = map(read, _SPLITS)
  tokenizer = tokens.build(train, heldout)
  for _ in itertools.chain(train, heldout):  # what the tokenizer did not look at
    pass
  claim = {**wanted, 'tokenizer': tokenizer.to_json(), 'documents': counted}
  _write_json(path, claim)
  return claim


def _described(
  directory: Path, headers: list[tokenfile.Header], counts: Counts
) -> dict[str, Any]:
  """A split in the index."""
  shards = []
  for header in headers:
    path = tokenfile.shard_path(directory, header.stream, header.number)
    shards.append(
      {
        'file': path.name,
        'bytes': path.stat().st_size,
        'header': dataclasses.asdict(header),
      }
    )
  return {'counts': dataclasses.asdict(counts), 'shards': shards}


def _write_json(path: Path, data: dict[str, Any]) -> None:
  part = path.with_name(path.name + '.part')
  try:
    part.write_text(json.dumps(data, indent=1) + '\n')
    tokenfile.replace(part, path)
  except OSError as error:
    raise OSError(f'cannot write {path}: {error.strerror}') from error


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
  """Nobody else writes there."""
  handle = os.open(directory, os.O_RDONLY)
  try:
    try:
      fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise DataError(
        f'{directory}: another process is preparing data there; wait for it, or choose '
        'another --output'
      ) from None
    except OSError:  # a file system without locks
      pass
    yield
  finally:
    os.close(handle)


def main(config: configs.Config) -> None:
  if _OUTPUT.value is None:
    raise fields.ConfigError('--output', None, 'is needed', 'name a directory to write')
  jax.config.update('jax_platforms', 'cpu')  # nothing here is for an accelerator
  prepare(
    config.data, Path(_OUTPUT.value).expanduser(), _WORKERS.value, _SHARD_TOKENS.value
  )


if __name__ == '__main__':
  command.run(main, user_errors=(DataError, OSError))
