"""What a run of weeks needs: evaluation on the way, the best checkpoint kept, going
back when the loss is no number, beginning with another run, and where the time went.
"""

import itertools
import json
import signal

import numpy as np
import pytest
from runs import STEPS, arrays, assert_mistake, ended_well, lines, saved_steps, summary

EVALUATE = '--config.evaluation.every=5'


@pytest.fixture(scope='module')
def evaluated(place, train):
  """A run that evaluates every five steps."""
  ended_well(train(place / 'evaluated', EVALUATE))
  return place / 'evaluated'


def heldout_lines(workdir):
  return [x for x in lines(workdir) if x.get('split') == 'heldout']


def test_evaluating_changes_nothing_that_is_learnt(evaluated, straight):
  found = [x for x in lines(evaluated) if x.get('split') != 'heldout']
  assert found == [x for x in lines(straight) if x.get('split') != 'heldout']
  a, b = arrays(evaluated, STEPS), arrays(straight, STEPS)
  for name in a:
    np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def test_the_best_checkpoint_is_kept_and_evaluates_as_it_did(evaluated, train):
  *on_the_way, final = heldout_lines(evaluated)
  assert [x['step'] for x in on_the_way] == [5, 10, 15, 20]
  assert final['final'] and final['step'] == STEPS
  assert on_the_way[-1]['loss_by_depth'] == final['loss_by_depth']
  best = min(on_the_way, key=lambda x: x['loss'])
  assert saved_steps(evaluated, 'best') == [best['step']]
  assert summary(evaluated)['best_heldout_loss'] == best['loss']
  out = evaluated / 'best.json'
  where = [
    f'--checkpoint={evaluated}/best',
    f'--json={out}',
    '--config.decode.prompts=0',
  ]
  ended_well(train(None, *where, command='evaluate'))
  again = json.loads(out.read_text())
  assert (again['step'], again['loss']) == (best['step'], best['loss'])


def test_fewer_batches_on_the_way_and_all_at_the_end(place, train, straight):
  workdir = place / 'few'
  ended_well(train(workdir, EVALUATE, '--config.evaluation.batches=1'))
  *on_the_way, final = heldout_lines(workdir)
  assert final['counts_by_depth'] == heldout_lines(straight)[0]['counts_by_depth']
  for line in on_the_way:
    assert 0 < line['counts_by_depth'][0] < final['counts_by_depth'][0]


def test_a_killed_run_has_the_same_lines_and_the_same_best(place, train, evaluated):
  workdir = place / 'killed'
  whole = workdir / 'checkpoints' / '8'
  killed = train(workdir, EVALUATE, AT=13, SIGNAL=signal.SIGKILL, AFTER=whole)
  assert killed.returncode == -signal.SIGKILL
  ended_well(train(workdir, EVALUATE))
  assert lines(workdir) == lines(evaluated)
  assert saved_steps(workdir, 'best') == saved_steps(evaluated, 'best')
  found = summary(workdir)
  assert found['lives'] == 2 and found['goodput']['restart'] > 0
  assert found['seconds'] == pytest.approx(
    sum(x for name, x in found['goodput'].items() if name != 'share')
  )


def test_a_run_goes_back_and_on_with_other_data(place, train, straight):
  workdir = place / 'back'
  done = ended_well(train(workdir, '--config.guard.rollbacks=1', NAN_AT=12))
  assert 'step 12: loss is nan' in done.stdout
  assert 'going back to step 8, 1 of 1 times' in done.stdout
  found, want = (
    [x for x in lines(w) if x.get('split') != 'heldout'] for w in (workdir, straight)
  )
  assert [x['step'] for x in found] == list(range(1, STEPS + 1))
  assert found[:8] == want[:8]
  # Batches 9 to 12 are left out, and 13, which was under way when 12 was seen.
  for line, other in zip(found[8:], want[8:], strict=True):
    assert line['loss'] != other['loss']
    assert line['learning_rate'] == other['learning_rate']
  later = [x['counts_by_depth'] for x in want[13:]]
  assert [x['counts_by_depth'] for x in found[8 : 8 + len(later)]] == later
  assert summary(workdir)['goodput']['restart'] > 0


def test_the_best_of_what_a_run_goes_back_to_is_still_there(place, train):
  workdir, every = place / 'back_to_best', '--config.evaluation.every=3'
  args = [every, '--config.guard.rollbacks=1']
  # It goes back from 12 to 8, having replaced the best, of 6, by that of 9.
  killed = train(workdir, *args, NAN_AT=12, AT=14, SIGNAL=signal.SIGKILL)
  assert killed.returncode == -signal.SIGKILL
  assert 'going back to step 8' in killed.stdout
  assert saved_steps(workdir) == [8]
  assert saved_steps(workdir, 'best') == [6]
  ended_well(train(workdir, *args))
  *on_the_way, _ = heldout_lines(workdir)
  best = min(on_the_way, key=lambda x: x['loss'])
  assert saved_steps(workdir, 'best') == [best['step']]


def test_it_goes_back_only_as_often_as_it_may(place, train):
  done = train(place / 'again', '--config.guard.rollbacks=1', NAN_AT=3)
  assert_mistake(done, 'step 3: loss is nan')  # there is nothing to go back to yet


def test_a_run_begins_with_the_trunk_of_another(place, train, straight):
  workdir, gone = place / 'begun', place / 'gone'
  done = ended_well(train(workdir, variant='begun'))
  assert f'init_from {straight}/checkpoints, step {STEPS}' in done.stdout
  assert 'fresh here: objectives/drafter/' in done.stdout
  first, fresh = lines(workdir)[0], lines(straight)[0]
  assert first['loss_by_depth'][0] < fresh['loss_by_depth'][0] - 0.5
  # The same command goes on, whatever became of the other run.
  straight.rename(gone)
  try:
    assert 'is finished' in ended_well(train(workdir, variant='begun')).stdout
  finally:
    gone.rename(straight)


def test_a_run_whose_last_step_is_skipped_ends_well(place, train):
  workdir = place / 'skips'
  args = ['--config.decode.prompts=0', '--config.evaluation.every=2']
  ended_well(train(workdir, *args, variant='skips', NAN_AT=4))
  trained = [x for x in lines(workdir) if 'split' not in x]
  assert trained[-1]['skipped'] == 1 and 'loss_by_depth' not in trained[-1]
  found = summary(workdir)
  assert found['skipped_steps'] == 1
  assert found['train_loss_by_depth'] == trained[-2]['loss_by_depth']


def test_a_trace_and_a_cache_of_compilations_are_written_on_request(place, train):
  workdir, cache = place / 'traced', place / 'compiled'
  args = ['--config.profile=3,2', f'--config.compilation_cache={cache}']
  ended_well(train(workdir, *args, variant='plain'))
  assert any((workdir / 'profile').rglob('*.xplane.pb'))
  assert any(cache.iterdir())


@pytest.mark.parametrize(
  ('arg', 'said'),
  [
    ('--config.profile=3', 'no span of steps'),
    ('--config.evaluation.every=0', 'evaluation.every'),
    ('--config.data.source.heldout=0', 'has nothing held out'),
    ('--config.guard.patience=0', 'guard.patience'),
    ('--config.wandb=project', "pip install 'mtpjax[wandb]'"),
    ('--config.compilation_cache=/proc/x', 'compilation_cache'),
    ('--topology=cpu:8', 'add --dry_run'),
    ('--workdir=', "--workdir = '': is empty"),
    ('--json=figures.json', 'add --dry_run'),
  ],
)
def test_what_makes_no_sense_is_refused(place, train, arg, said):
  workdir = place / 'refused'
  args = [arg] if 'evaluation' in arg else [arg, EVALUATE]
  assert_mistake(train(workdir, *args, MISSING='wandb'), said)
  assert not workdir.exists()


def test_while_the_loss_is_high_nothing_is_saved_over_the_sound_steps(place, train):
  workdir = place / 'high'
  args = ['--config.optimizer.rate.peak=3', '--config.optimizer.rate.warmup=20']
  args += ['--config.checkpoint.every=1', '--config.checkpoint.keep=3']
  args += ['--config.guard.above=0.3', '--config.guard.patience=4']
  done = train(workdir, *args, '--config.guard.rollbacks=1')
  assert_mistake(done, 'guard.above=0.3')
  losses = [x['loss'] for x in lines(workdir)]
  smooth = list(itertools.accumulate(losses, lambda a, b: 0.9 * a + 0.1 * b))
  lowest = list(itertools.accumulate(smooth, min))
  calm = [
    n
    for n, (x, low) in enumerate(zip(smooth, lowest, strict=True), 1)
    if x <= low + 0.3
  ]
  assert saved_steps(workdir) == calm[-3:]
  assert f'going back to step {calm[-1]}, 1 of 1 times' in done.stdout
