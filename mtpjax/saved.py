"""A saved run, opened again: what the commands that read one have in common."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any, cast

import jax
from absl import flags
from etils import epath

from mtpjax import config as configs
from mtpjax import fields, mesh, model, paths, workdir
from mtpjax import step as steps
from mtpjax.checkpoint import Checkpoints, find, read_metadata
from mtpjax.data import tokenizer
from mtpjax.data.tokenizer import Tokenizer


@dataclasses.dataclass
class Saved:
  """A checkpoint's model and all that belongs to it.

  Attributes:
    directory: of the checkpoints.
    config: finalised for this mesh.
    conventions: as they were saved.
  """

  directory: Any
  step: int
  config: configs.Config
  tokenizer: Tokenizer
  conventions: dict[str, Any]
  graphdef: Any
  params: dict[str, Any]


def define_flags() -> None:
  """--checkpoint, --step and --json, for a command; a library defines none."""
  if 'checkpoint' not in flags.FLAGS:
    flags.DEFINE_string('checkpoint', None, "a run's directory, or its checkpoints/")
    flags.DEFINE_integer('step', None, 'which one; default the newest')
  define_json()


def define_json() -> None:
  if 'json' not in flags.FLAGS:
    flags.DEFINE_string('json', None, 'write the figures here as well')


def named() -> Any:
  """The directory that --checkpoint names."""
  if flags.FLAGS.checkpoint is None:
    raise fields.ConfigError(
      '--checkpoint',
      None,
      'is needed',
      "give a run's directory: --checkpoint=runs/NAME",
    )
  return find(flags.FLAGS.checkpoint)


def config() -> configs.Config:
  """What the named checkpoint was trained with; overrides apply to it."""
  metadata = read_metadata(named(), flags.FLAGS.step)
  found = cast(configs.Config, fields.from_json(metadata['config']))
  found.trunk.attention = None  # this platform may be another
  return found


def restore(
  config: configs.Config | None = None, directory: Any = None, step: int | None = None
) -> Saved:
  """The model on the mesh that is set, or that `config` names if none is.

  Args:
    config: None is the saved one, on all devices.
    directory: a run's; None is the one that --checkpoint names, at --step.

  Raises:
    ConfigError, CheckpointError: it cannot be opened.
  """
  if directory is None:
    directory, step = named(), flags.FLAGS.step
  directory = find(directory)
  metadata = read_metadata(directory, step)
  trained = cast(configs.Config, fields.from_json(metadata['config']))
  if config is None:
    config = trained
    config.mesh, config.trunk.attention = mesh.Config(), None  # this platform's
  if config.data.tokenizer != trained.data.tokenizer:
    raise fields.ConfigError(
      'data.tokenizer',
      config.data.tokenizer,
      f'the checkpoint was trained with {trained.data.tokenizer}',
      'leave it as it is: the tokenizer comes with the checkpoint',
    )
  config.optimizer.accumulate = 1  # there is no gradient to accumulate
  if jax.sharding.get_mesh().empty:
    jax.set_mesh(mesh.make(config.mesh))
  tokens = tokenizer.from_json(metadata['tokenizer'])
  workdir.check_tokenizer(metadata, tokens)
  configs.finalize(config, tokens.vocab_size)
  graphdef, abstract, _ = model.init(config.trunk, config.parts(), config.seed)
  wanted = steps.to_evaluate(abstract, config)
  restored = Checkpoints(directory).restore(wanted, step, subset=True)
  assert restored is not None  # its metadata has been read
  return Saved(
    directory,
    restored.step,
    config,
    tokens,
    metadata['conventions'],
    graphdef,
    steps.evaluated(restored.state, abstract),
  )


def output(default: Any = None) -> Path | epath.Path | None:
  """The file that --json names, or the default; whether it can be written is found out
  before the work, not after."""
  name = flags.FLAGS.json or default
  if not name:
    return None
  if name == '-':
    raise fields.ConfigError('--json', '-', 'is no file here', 'name a file')
  path = paths.at(name)
  if paths.is_bucket(path):
    return path
  path = Path(path).resolve()
  if path.exists() and not path.is_file():
    raise fields.ConfigError('--json', str(name), 'is no file', 'name a file')
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    # It is written beside itself first, so that a reader never sees half of it.
    tempfile.TemporaryFile(dir=path.parent).close()
    if path.exists():
      path.open('a').close()
  except OSError as error:
    raise fields.ConfigError(
      '--json', str(name), f'cannot be written: {error.strerror}', 'name another file'
    ) from None
  return path
