"""Trains a trunk and its MTP objectives.

  python -m mtpjax.train --config=configs/quickstart.py [--workdir=runs/NAME]

The same command again goes on from the newest checkpoint. SIGTERM and Ctrl-C save the
step under way first.
"""

import functools
import signal
import sys
import time

import jax
import numpy as np
from absl import flags

from mtpjax import (
  acceptance,
  figures,
  heldout,
  mesh,
  meters,
  metrics,
  model,
  step,
  terminal,
  workdir,
)
from mtpjax import config as configs
from mtpjax import flags as command
from mtpjax.checkpoint import CheckpointError, Checkpoints
from mtpjax.data import batches
from mtpjax.data.sources import DataError

_WORKDIR = flags.DEFINE_string(
  'workdir', None, 'where everything is written; default runs/NAME'
)


def catch_signals() -> list[int]:
  """A list that fills when SIGTERM or Ctrl-C arrives: the step under way is finished.
  A second Ctrl-C ends at once."""
  received: list[int] = []

  def note(number, _):
    received.append(number)
    signal.signal(signal.SIGINT, signal.default_int_handler)

  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, note)
  return received


def main(config: configs.Config) -> int:
  began = time.monotonic()
  signals = catch_signals()

  # --- Everything that can be refused is refused before anything compiles.
  jax.set_mesh(mesh.make(config.mesh))
  say = terminal.say
  configs.finalize(config)
  data = batches.open_data(config.data, config.seed)
  configs.finalize(config, data.tokenizer.vocab_size)
  acceptance.prompts(config.decode, data.heldout, data.tokenizer)
  directory = workdir.claim(_WORKDIR.value or f'runs/{config.name}', config)
  saved = Checkpoints(
    directory / 'checkpoints',
    config.checkpoint,
    workdir.metadata(config, data.tokenizer),
  )

  # --- The model, and the two functions that everything else happens in.
  graphdef, abstract, make_params = model.init(
    config.trunk, config.parts(), config.seed
  )
  init_state = functools.partial(
    step.init_state,
    config=config.optimizer,
    freeze_trunk=config.freeze_trunk,
    tune=config.tune,
  )
  abstract_state = jax.eval_shape(init_state, abstract)
  rows = batches.TrainBatches(
    data.train,
    batch=config.data.batch,
    shards=config.data.shards,
    seed=config.seed,
    weights=data.weights,
    process_index=jax.process_index(),
    process_count=jax.process_count(),
  )
  restored = saved.restore(abstract_state)
  if restored is not None:
    state, start = restored.state, restored.step
    rows.set_state(restored.data_state['rows'])
    done = 'is finished, evaluating again' if start == config.steps else 'going on'
    say(f'resuming {directory} at step {start}: {done}')
  else:
    state, start = jax.jit(init_state)(make_params()), 0
  parameters = sum(x.size for x in jax.tree.leaves(state['params']))
  say(f'{config.name}: {parameters:,} parameters, {data}, in {directory}')
  say('compiling the train and evaluation steps …')
  compiling = time.monotonic()
  train_step = step.compile_train(graphdef, config, state)
  eval_step = step.compile_eval(
    graphdef, config, state['params'], data.tokenizer.bytes_per_token
  )
  compile_seconds = time.monotonic() - compiling

  # --- Training. A step's metrics are fetched once the next has been dispatched.
  meter, pending = meters.Training(), None
  if restored is not None:
    meter.set_state(restored.data_state['meter'])
  with (
    saved,
    metrics.Writer(directory, start if restored else None) as writer,
    terminal.Progress(config.steps, start, every=config.log_every) as progress,
  ):

    def record(done, out, tokens):
      line = meter.add(done, jax.device_get(out), tokens)
      progress.update(done, line)
      if done % config.log_every == 0 or done == config.steps:
        writer.write(done, meter.flush())

    for done in range(start + 1, config.steps + 1):
      arrays = next(rows)
      state, out = train_step(state, step.put(arrays))
      if pending:
        record(*pending)
      pending = done, out, np.count_nonzero(arrays['segments'])
      stopping = bool(signals)  # asked once: it may change at any line
      last = done == config.steps or stopping
      if done % config.checkpoint.every == 0 or last:
        record(*pending)  # a checkpoint is only made of a step known to be sound
        pending = None
        position = {'rows': rows.get_state(), 'meter': meter.get_state()}
        saved.save(done, state, position, wait=last)
      if stopping:
        name = signal.Signals(signals[0]).name
        say(f'{name}: saved step {done} in {directory}; the same command goes on')
        return 0 if signals[0] == signal.SIGTERM else 130

    # --- Held-out evaluation, and what people and programs read afterwards. All is
    # saved: what asks to stop is obeyed at once.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    result = heldout.evaluate(
      eval_step,
      step.evaluated(state),
      config,
      data.heldout,
      functools.partial(terminal.watch, total=heldout.count(config, data.heldout)),
    )
    if result['loss'] is not None:
      writer.write(config.steps, {'split': 'heldout', **result})
  say(heldout.table(result))
  first = jax.process_index() == 0
  lines = metrics.read_metrics(directory / 'metrics.jsonl') if first else []
  trained = [line for line in lines if 'split' not in line]
  summary = {
    **result,
    'train_loss_by_depth': trained[-1]['loss_by_depth'] if trained else None,
    'steps': config.steps,
    'resumed_at': start or None,
    'seconds': time.monotonic() - began,
    'compile_seconds': compile_seconds,
    'tokens_per_second': meter.tokens_per_second,
    'parameters': parameters,
    'mtp': configs.conventions(config),
    'conditions': {**metrics.conditions(), 'mesh': mesh.axis_sizes()},
  }
  if first:
    figures.loss_figure(lines, directory / 'loss.png')
    metrics.write_summary(directory / 'summary.json', summary)

  # --- What drafting is worth. Whatever fails here, the results above are written.
  say('decoding, plainly and with drafts …')
  drafted = acceptance.measure(
    graphdef, step.evaluated(state), config.decode, data.heldout, data.tokenizer
  )
  say(acceptance.table(drafted))
  if drafted and first:
    figures.acceptance_figure(drafted, directory / 'acceptance.png')
    summary |= {**drafted, 'seconds': time.monotonic() - began}
    metrics.write_summary(directory / 'summary.json', summary)
  say(
    f'{time.monotonic() - began:.0f} s, {compile_seconds:.0f} of them compiling steps. '
    f'Figures: {directory}/*.png, {directory}/summary.json\nNext:\n'
    f'  python -m mtpjax.evaluate --checkpoint={directory}\n'
    f"  python -m mtpjax.sample --checkpoint={directory} --prompt='…'\n"
    f'  tensorboard --logdir={directory}/tensorboard  (pip install tensorboard)'
  )
  return 0


if __name__ == '__main__':
  command.run(
    main,
    user_errors=(
      CheckpointError,
      DataError,
      meters.TrainingError,
      workdir.WorkdirError,
      OSError,  # a full disk, say
    ),
  )
