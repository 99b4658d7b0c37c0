"""Trains a trunk and its MTP objectives.

  python -m mtpjax.train --config=configs/quickstart.py [--workdir=runs/NAME]

The same command again goes on from the newest checkpoint. SIGTERM and Ctrl-C save the
step under way first; the exit code is then 143 or 130. --dry_run compiles, says what it
would take, and ends.
"""

import contextlib
import dataclasses
import functools
import math
import signal
import tempfile
from typing import Any

import jax
from absl import flags

from mtpjax import (
  acceptance,
  answers,
  checkpoint,
  dry_run,
  figures,
  flops,
  heldout,
  init_from,
  mesh,
  meters,
  metrics,
  model,
  paths,
  processes,
  step,
  terminal,
  tuning,
  workdir,
)
from mtpjax import config as configs
from mtpjax import flags as command
from mtpjax.checkpoint import CheckpointError, Checkpoints
from mtpjax.data import batches
from mtpjax.data.sources import DataError
from mtpjax.fields import ConfigError
from mtpjax.terminal import say

_WORKDIR = flags.DEFINE_string(
  'workdir', None, 'where everything is written; default runs/NAME'
)
processes.define_flags()
flags.adopt_module_key_flags(processes)
dry_run.define_flags()
flags.adopt_module_key_flags(dry_run)


@dataclasses.dataclass
class Run:
  """Everything that training changes or looks at."""

  config: configs.Config
  data: batches.Data
  directory: workdir.Workdir
  saved: Checkpoints
  best: Checkpoints | None  # that of the lowest held-out loss
  clock: meters.Clock
  meter: meters.Training
  rows: batches.TrainBatches
  watch: processes.Watch
  graphdef: Any
  abstract_state: Any
  state: Any
  done: int = 0  # steps
  resumed_at: int | None = None
  lowest: float = math.inf  # held-out loss so far
  train_step: Any = None
  eval_step: Any = None
  answers: Any = None

  def position(self) -> dict[str, Any]:
    """What a checkpoint carries beside the state, as JSON."""
    return {
      'rows': self.rows.get_state(),
      'meter': self.meter.get_state(),
      'clock': self.clock.get_state(self.done),
      'lowest': self.lowest if math.isfinite(self.lowest) else None,
    }

  def restore_figures(self, position: dict[str, Any]) -> None:
    """Those that training goes on from: not the data's place, not the time spent."""
    self.meter.set_state(position['meter'])
    lowest = position['lowest']
    self.lowest = math.inf if lowest is None else lowest

  def evaluate(self, limit: int | None, shown=iter) -> dict[str, Any]:
    params = step.evaluated(self.state)

    def each(items):
      what = f'held out, after step {self.done}, batch'
      return shown(self.watch.over(items, what))

    with self.clock('evaluation'):
      found = heldout.evaluate(
        self.eval_step, params, self.config, self.data.heldout, each, limit
      )
      self.watch.at(None)  # a decode may be compiled
      return {**found, **self.answers.measure(params)}

  def save(self, where: Checkpoints, **how) -> None:
    self.watch.at(f'saving step {self.done}')
    where.save(self.done, self.state, self.position(), **how)


def main(config: configs.Config) -> int:
  if flags.FLAGS.dry_run:
    return dry_run.main(config)
  dry_run.refuse_flags()
  stop = processes.Stop()
  run = begin(config)
  writer = metrics.Writer(run.directory.files, run.resumed_at, config.wandb)
  try:
    with run.directory, writer, run.watch:
      compile_steps(run, stop)
      code = train(run, writer, stop)
      if code is None:
        stop.obey_at_once()  # all is saved
        finish(run, writer)
  except BrokenPipeError:
    raise
  except (CheckpointError, workdir.WorkdirError, OSError) as error:
    # The place could be written when the run began: a launcher should try again.
    raise command.FailedError(str(error)) from error
  return code or 0


def begin(config: configs.Config) -> Run:
  """Everything that can be refused is refused before anything compiles."""
  clock = meters.Clock()
  if config.compilation_cache is not None:
    keep_compiled(config.compilation_cache)
  jax.set_mesh(mesh.make(config.mesh))
  configs.finalize(config)
  data = batches.open_data(config.data, config.seed)
  read = {'data.source': f'{data}, checksum {data.fingerprint()}'}
  processes.same(read, 'let all of them read the same')
  configs.finalize(config, data.tokenizer.vocab_size)
  acceptance.prompts(
    config.decode, data.heldout, data.tokenizer, config.trunk.learned_positions
  )
  if config.evaluation.every is not None and not len(data.heldout):
    fix = 'set data.source.heldout, a fraction, or evaluation.every=None'
    raise ConfigError(
      'evaluation.every', config.evaluation.every, 'has nothing held out', fix
    )
  graphdef, abstract, make_params = model.init(
    config.trunk, config.parts(), config.seed
  )
  init_state = functools.partial(step.init_state, config=config)
  abstract_state = jax.eval_shape(init_state, abstract)
  plan, name = None, _WORKDIR.value
  if name is None:
    name = f'runs/{config.name}'
  if not name:  # a variable of a shell that is not set
    fix = 'name a directory, or leave it out'
    raise ConfigError('--workdir', name, 'is empty', fix)
  # A run that goes on has no more need of the other, which may be gone.
  there = processes.agreed(Checkpoints(f'{name}/checkpoints').steps())
  if config.init_from is not None and not there:
    conventions = configs.conventions(config)
    plan = init_from.plan(
      config.init_from, abstract, data.tokenizer, conventions, config.trunk
    )
  directory = workdir.claim(name, config)
  workdir.keep(directory, data.tokenizer)
  metadata = workdir.metadata(config, data.tokenizer)
  saved = Checkpoints(directory.path / 'checkpoints', config.checkpoint, metadata)
  best = None
  if config.evaluation.every is not None and config.evaluation.keep_best:
    one = checkpoint.Config(every=1, keep=1)
    best = Checkpoints(directory.path / 'best', one, metadata, behind=saved)
  run = Run(
    config,
    data,
    directory,
    saved=saved,
    best=best,
    clock=clock,
    meter=meters.Training(config.guard),
    rows=batches.TrainBatches(
      data.train,
      batch=config.data.batch,
      shards=config.data.shards,
      seed=config.seed,
      weights=data.weights,
      own=step.rows_held(config.data.batch),
    ),
    watch=processes.Watch(config.guard.stuck),
    graphdef=graphdef,
    abstract_state=abstract_state,
    state=None,
  )
  if restored := run.saved.restore(run.abstract_state):
    workdir.check_tokenizer(restored.metadata, data.tokenizer)
    run.state, run.done = restored.state, restored.step
    run.resumed_at = run.done
    position = restored.data_state
    run.rows.set_state(position['rows'])
    run.restore_figures(position)
    lost = metrics.last_step(directory.files) - run.done
    run.clock.set_state(position['clock'], lost)
    finished = run.done == config.steps
    what = 'is finished, evaluating again' if finished else 'going on'
    say(f'resuming {directory} at step {run.done}: {what}')
  else:
    params = make_params()
    if plan is not None:
      say(str(plan))
      params = init_from.load(plan, graphdef, params)
    run.state = jax.jit(init_state)(params)
  if best is not None:
    best.forget_after(run.done)
  own = tuning.select(abstract, config.freeze_trunk, config.tune)
  trains = tuning.count(abstract, own)
  every = sum(x.size for x in jax.tree.leaves(abstract))
  some = '' if trains == every else f', of which {trains:,} train'
  say(f'{config.name}: {every:,} parameters{some}, {data}, in {directory}')
  run.answers = answers.Answers(graphdef, data.heldout, config.evaluation.problems)
  return run


def keep_compiled(directory: str) -> None:
  """Raises ConfigError where that cannot be; JAX would warn, and compile each time."""
  path = paths.at(directory)
  try:
    if not paths.is_bucket(path):
      path.mkdir(parents=True, exist_ok=True)
      tempfile.TemporaryFile(dir=path).close()
  except OSError as error:
    problem, fix = f'cannot be written: {error.strerror}', 'name another directory'
    raise ConfigError('compilation_cache', directory, problem, fix) from None
  jax.config.update('jax_compilation_cache_dir', str(path))


def compile_steps(run: Run, stop: processes.Stop) -> None:
  config, params = run.config, run.state['params']
  say(f'attention: {configs.attention(config)}')
  say('compiling the train and evaluation steps …')
  lengths = run.data.tokenizer.bytes_per_token
  with run.clock('compile'):
    run.train_step = step.compile_train(run.graphdef, config, run.state, stop.inputs())
    run.eval_step = step.compile_eval(run.graphdef, config, params, lengths)
    run.meter.full_speed = flops.full_speed(config)


def train(run: Run, writer: metrics.Writer, stop: processes.Stop) -> int | None:
  """All steps that are left; an exit code if a signal ended them early."""
  config, clock = run.config, run.clock
  with (
    run.saved,
    run.best or contextlib.nullcontext(),
    terminal.Progress(config.steps, run.done, every=config.log_every) as progress,
    meters.Trace(run.directory.files / 'profile', config.profile) as trace,
  ):
    # A step's metrics are fetched once the next has been dispatched.
    pending: Any = None
    rollbacks, owed = 0, False

    def record(done: int, out: dict) -> None:
      out = jax.device_get(out)
      line = run.meter.add(done, out, int(out['tokens']))
      progress.update(done, {**line, **clock.waits()})
      if done % config.log_every == 0 or done == config.steps:
        writer.write(done, run.meter.flush())

    clock.training_begins()
    run.meter.start()
    while run.done < config.steps:
      run.done += 1
      trace.at(run.done)
      run.watch.at(f'reading the data of step {run.done}')
      with clock.waiting(pending[1]['loss'] if pending else None):
        arrays = next(run.rows)
      run.watch.at(f'step {run.done}')
      arrays = {**step.put(arrays, config.data.batch), **stop.inputs()}
      run.state, out = run.train_step(run.state, arrays)
      stopping = stop.asked(out)  # once: it may change at any line
      last = run.done == config.steps or stopping > 0
      owed = owed or run.done % config.checkpoint.every == 0
      every = config.evaluation.every
      evaluating = every is not None and run.done % every == 0
      try:
        if pending:
          record(*pending)
        pending = run.done, out
        if owed or last or evaluating:  # only of a step known to be sound
          record(*pending)
          pending = None
      except meters.TrainingError as error:
        rollbacks += 1
        go_back(run, error, rollbacks)
        writer.go_back(run.done)
        pending = None
        continue
      if evaluating:
        found = run.evaluate(config.evaluation.batches)
        writer.write(run.done, {'split': 'heldout', **found})
        say(f'step {run.done}, held out: {heldout.brief(found)}')
        if found['loss'] is not None and found['loss'] < run.lowest:
          run.lowest = found['loss']
          if run.best is not None:
            with clock('checkpoint'):
              run.save(run.best)
      # While the loss is high, the checkpoints of before stay those to go back to.
      if last or (owed and not run.meter.high):
        owed = False
        with clock('checkpoint'):
          run.directory.sync()  # the lines up to here belong to it
          if run.best is not None:
            run.best.close()  # a checkpoint's `lowest` is that of a best one on disk
          run.save(run.saved, wait=last)
          if run.best is not None:
            run.best.prune()
      if stopping:
        name = signal.Signals(stopping).name
        where = f'step {run.done} in {run.directory}'
        say(f'{name}: saved {where}; the same command goes on')
        return 128 + stopping  # not finished: a launcher starts it again
  return None


def go_back(run: Run, error: meters.TrainingError, times: int) -> None:
  """To the newest checkpoint, but on with the data that follows."""
  allowed = run.config.guard.rollbacks
  sound = run.saved.restore(run.abstract_state) if times <= allowed else None
  if sound is None:
    raise error
  run.watch.at(None)
  say(f'{error}\ngoing back to step {sound.step}, {times} of {allowed} times')
  run.state, run.done = sound.state, sound.step
  run.restore_figures(sound.data_state)
  run.clock.go_back(sound.data_state['clock'])
  if run.best is not None:
    run.best.forget_after(run.done)


def finish(run: Run, writer: metrics.Writer) -> None:
  """Held-out evaluation, and what people and programs read afterwards."""
  config, first = run.config, jax.process_index() == 0
  directory, files = run.directory, run.directory.files
  total = heldout.count(config, run.data.heldout)
  result = run.evaluate(None, functools.partial(terminal.watch, total=total))
  if result['loss'] is not None:
    writer.write(config.steps, {'split': 'heldout', 'final': True, **result})
  say('\n'.join(x for x in (heldout.table(result), answers.table(result)) if x))
  lines = metrics.read_metrics(files / 'metrics.jsonl') if first else []
  # Where every step was skipped, a line has no losses.
  drawn = [line for line in lines if line.get('loss_by_depth')]
  trained = [line for line in drawn if 'split' not in line]
  summary = {
    **result,
    'train_loss_by_depth': trained[-1]['loss_by_depth'] if trained else None,
    'best_heldout_loss': run.lowest if math.isfinite(run.lowest) else None,
    'steps': config.steps,
    'resumed_at': run.resumed_at,
    'skipped_steps': run.meter.skipped,
    'tokens_per_second': run.meter.tokens_per_second,
    **run.meter.mfu(run.meter.tokens_per_second),
    'parameters': sum(x.size for x in jax.tree.leaves(run.state['params'])),
    'mtp': configs.conventions(config),
    'conditions': {**metrics.conditions(), 'mesh': mesh.axis_sizes()},
    **run.clock.summary(),
    'compile_seconds': run.clock.seconds()['compile'],
  }
  if drawn:
    figures.loss_figure(drawn, files / 'loss.png')
  if first:
    metrics.write_summary(files / 'summary.json', summary)

  # What drafting is worth. Whatever fails here, the results above are written.
  if config.drafter is not None:
    say('decoding, plainly and with drafts …')
  with run.clock('evaluation'):
    drafted = acceptance.measure(
      run.graphdef,
      step.evaluated(run.state),
      config.decode,
      run.data.heldout,
      run.data.tokenizer,
    )
  say(acceptance.table(drafted))
  if drafted and first:
    figures.acceptance_figure(drafted, files / 'acceptance.png')
    summary |= {**drafted, **run.clock.summary()}
    metrics.write_summary(files / 'summary.json', summary)
  say(
    f'{run.clock}. Figures: {directory}/*.png, {directory}/summary.json\nNext:\n'
    f'  python -m mtpjax.evaluate --checkpoint={directory}\n'
    f"  python -m mtpjax.sample --checkpoint={directory} --prompt='…'\n"
    f'  tensorboard --logdir={directory}/tensorboard  (pip install tensorboard)'
  )


if __name__ == '__main__':
  command.run(
    main,
    within=processes.together,
    user_errors=(
      CheckpointError,
      DataError,
      meters.TrainingError,
      workdir.WorkdirError,
      OSError,  # a full disk, say
    ),
  )
