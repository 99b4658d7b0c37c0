"""Evaluates a checkpoint on held-out data: the losses of training, every example once,
and acceptance by really drafting after `--config.decode.prompts` of them.

  python -m mtpjax.evaluate --checkpoint=runs/quickstart [--files=GLOB] [--json=FILE]

The model, the tokenizer and the data come from the checkpoint. `--files` evaluates on
other text, whole files, or on other records if it was trained on records;
`--config.mesh.tensor=2` and the like choose another mesh.
"""

import dataclasses
import functools

import jax
from absl import flags

from mtpjax import (
  acceptance,
  answers,
  heldout,
  mesh,
  metrics,
  processes,
  saved,
  step,
  terminal,
)
from mtpjax import config as configs
from mtpjax import flags as command
from mtpjax.checkpoint import CheckpointError
from mtpjax.data import batches
from mtpjax.data.records import Records
from mtpjax.data.sources import DataError, Text

_FILES = flags.DEFINE_list('files', None, 'other text to evaluate on: globs')
saved.define_flags()
processes.define_flags()
for _module in (saved, processes):
  flags.adopt_module_key_flags(_module)


def main(config: configs.Config) -> int:
  out = saved.output()
  if _FILES.value:
    files, source = tuple(_FILES.value), config.data.source
    config.data.source = Text(files)
    if isinstance(source, Records):  # read as those that were trained on
      others = {'files': files, 'heldout_files': (), 'heldout': 0.0}
      config.data.source = dataclasses.replace(source, **others)
  jax.set_mesh(mesh.make(config.mesh))
  run = saved.restore(config)
  split = 'train' if _FILES.value else 'heldout'
  title = ', '.join(_FILES.value) if _FILES.value else 'held out'
  rows = batches.open_rows(config.data, run.tokenizer, split)
  read = {'data.source': f'{len(rows):,} rows, checksum {rows.fingerprint():08x}'}
  processes.same(read, 'let all of them read the same')
  # Refused before the work.
  learned = config.trunk.learned_positions
  acceptance.prompts(config.decode, rows, run.tokenizer, learned)

  abstract = jax.eval_shape(lambda: run.params)
  compiled = step.compile_eval(
    run.graphdef, config, abstract, run.tokenizer.bytes_per_token
  )
  figures = heldout.evaluate(
    compiled,
    run.params,
    config,
    rows,
    functools.partial(terminal.watch, total=heldout.count(config, rows)),
  )
  problems = config.evaluation.problems
  figures |= answers.Answers(run.graphdef, rows, problems).measure(run.params)
  terminal.say('decoding, plainly and with drafts …')
  drafted = acceptance.measure(
    run.graphdef, run.params, config.decode, rows, run.tokenizer
  )
  terminal.say(
    '\n'.join(
      text
      for text in (
        f'{run.directory}, step {run.step}',
        heldout.table(figures, title),
        answers.table(figures),
        acceptance.table(drafted),
      )
      if text
    )
  )
  if out and jax.process_index() == 0:
    summary = {
      'checkpoint': str(run.directory),
      'step': run.step,
      **figures,
      **(drafted or {}),
      'mtp': run.conventions,
      'conditions': {**metrics.conditions(), 'mesh': mesh.axis_sizes()},
    }
    metrics.write_summary(out, summary)
  return 0


if __name__ == '__main__':
  command.run(
    main,
    default=saved.config,
    user_errors=(CheckpointError, DataError, OSError),
    within=processes.together,
  )
