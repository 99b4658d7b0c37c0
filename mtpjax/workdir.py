"""The directory a run writes: whose it is, and what it must be to go on in it.

config.json     the resolved config           checkpoints/  orbax
vocabulary.json the tokenizer                 best/         the best one, see `heldout`
metrics.jsonl   a line of figures a log       tensorboard/  the same as events
loss.png        the loss curves               summary.json  the result, for programs
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import jax

from mtpjax import config as configs
from mtpjax import fields, metrics
from mtpjax.checkpoint import CheckpointError
from mtpjax.data.tokenizer import VOCABULARY, Tokenizer


class WorkdirError(ValueError):
  """The directory cannot be used: which one, why, and what to do."""


def claim(workdir: str, config: configs.Config) -> Path:
  """Makes the directory and writes the config into it, or finds it there.

  Raises:
    WorkdirError: it holds a run of another config, or cannot be written.
  """
  path = Path(workdir).expanduser()  # the shell leaves --workdir=~/x as it is
  saved = path / 'config.json'
  new = fields.to_json(config)
  try:
    if saved.exists():
      _same(json.loads(saved.read_text('utf-8')), new, path)
      if (path / 'metrics.jsonl').exists():
        metrics.read_metrics(path / 'metrics.jsonl')  # names a spoilt line
    elif path.exists() and any(not _torn(file) for file in path.iterdir()):
      raise WorkdirError(
        f'--workdir={workdir} holds files but no run of ours; use an empty directory'
      )
    if jax.process_index() == 0:
      path.mkdir(parents=True, exist_ok=True)
      _lock(path)
      metrics.write_summary(saved, new)
  except WorkdirError:
    raise
  except (OSError, ValueError) as error:  # no text and no JSON among them
    raise WorkdirError(
      f'--workdir={workdir} cannot be used: {error}; choose another directory'
    ) from error
  return path


def _torn(file: Path) -> bool:
  """A run killed while it wrote its very first file leaves this."""
  return file.name == _LOCK or file.name.startswith('config.json.part-')


def keep(path: Path, tokenizer: Tokenizer) -> None:
  """Writes the tokenizer there, for runs that begin with this one."""
  if jax.process_index() == 0:
    metrics.replace(path / VOCABULARY, tokenizer.to_json())


_LOCK = '.lock'


def _lock(path: Path) -> None:
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
  except OSError:  # a file system without locks
    os.close(file)


def _same(old: Any, new: dict[str, Any], path: Path) -> None:
  if not isinstance(old, dict) or old.get('class') != new['class']:
    raise WorkdirError(
      f'--workdir={path} holds a config.json that is not ours; use an empty directory'
    )
  kept = {k: v for k, v in old.items() if k not in configs.FREE}
  wanted = {k: v for k, v in new.items() if k not in configs.FREE}
  if differing := fields.differences(kept, wanted):
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
