"""Evaluates a checkpoint on held-out data: the losses of training, every example once.

  python -m mtpjax.evaluate --checkpoint=runs/quickstart [--files=GLOB] [--json=FILE]

The model, the tokenizer and the data come from the checkpoint. `--files` evaluates on
other text, whole files; `--config.mesh.tensor=2` and the like choose another mesh.
"""

import functools
from pathlib import Path
from typing import Any

import jax
from absl import flags

from mtpjax import config as configs
from mtpjax import fields, heldout, mesh, metrics, model, step, terminal
from mtpjax import flags as command
from mtpjax.checkpoint import CheckpointError, Checkpoints, find, read_metadata
from mtpjax.data import batches, tokenizer
from mtpjax.data.sources import DataError, Text

_CHECKPOINT = flags.DEFINE_string(
  'checkpoint', None, "a run's directory, or its checkpoints/"
)
_STEP = flags.DEFINE_integer('step', None, 'which one; default the newest')
_FILES = flags.DEFINE_list('files', None, 'other text to evaluate on: globs')
_JSON = flags.DEFINE_string('json', None, 'write the figures here as well')


def saved_checkpoints() -> Any:
  """The directory that --checkpoint names."""
  if _CHECKPOINT.value is None:
    raise fields.ConfigError(
      '--checkpoint',
      None,
      'is needed',
      "give a run's directory: --checkpoint=runs/NAME",
    )
  return find(_CHECKPOINT.value)


def writable(name: str) -> Path:
  """Where --json will be written; found out before the evaluation, not after."""
  path = Path(name).expanduser()
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.open('a').close()
  except OSError as error:
    raise fields.ConfigError(
      '--json', name, f'cannot be written: {error.strerror}', 'name another file'
    ) from None
  return path


def saved_config() -> Any:
  """The config that the checkpoint was trained with."""
  metadata = read_metadata(saved_checkpoints(), _STEP.value)
  return fields.from_json(metadata['config'])


def main(config: configs.Config) -> int:
  out = writable(_JSON.value) if _JSON.value else None
  directory = saved_checkpoints()
  saved = read_metadata(directory, _STEP.value)
  if _FILES.value:
    config.data.source = Text(files=tuple(_FILES.value))
  config.optimizer.accumulate = 1  # there is no gradient to accumulate
  jax.set_mesh(mesh.make(config.mesh))
  tokens = tokenizer.from_json(saved['tokenizer'])
  configs.finalize(config, tokens.vocab_size)
  split = 'train' if _FILES.value else 'heldout'
  title = ', '.join(_FILES.value) if _FILES.value else 'held out'
  rows = batches.open_rows(config.data, tokens, split)

  graphdef, abstract, _ = model.init(config.trunk, config.parts(), config.seed)
  restored = Checkpoints(directory).restore_params(abstract, _STEP.value)
  compiled = step.compile_eval(graphdef, config, abstract, tokens.bytes_per_token)
  figures = heldout.evaluate(
    compiled,
    restored.state,
    config,
    rows,
    functools.partial(terminal.watch, total=heldout.count(config, rows)),
  )
  terminal.say(f'{directory}, step {restored.step}\n{heldout.table(figures, title)}')
  if out and jax.process_index() == 0:
    summary = {
      'checkpoint': str(directory),
      'step': restored.step,
      **figures,
      'mtp': saved['conventions'],
      'conditions': {**metrics.conditions(), 'mesh': mesh.axis_sizes()},
    }
    metrics.write_summary(out, summary)
  return 0


if __name__ == '__main__':
  command.run(
    main, default=saved_config, user_errors=(CheckpointError, DataError, OSError)
  )
