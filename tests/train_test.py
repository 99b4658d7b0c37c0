"""The train command: what it writes, and what it refuses before anything compiles."""

import json
import shutil
import struct
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from runs import (
  STEPS,
  arrays,
  assert_mistake,
  ended_well,
  lines,
  saved_steps,
  summary,
)
from tensorboardX.proto import event_pb2

from mtpjax import fields

# ------------------------------------------------------------------------------ output


def events(workdir):
  """{(tag, step): value} of the TensorBoard files: length, CRC, record, CRC."""
  found = {}
  for path in sorted((workdir / 'tensorboard').iterdir()):
    data, at = path.read_bytes(), 0
    while at < len(data):
      (length,) = struct.unpack_from('<Q', data, at)
      record = data[at + 12 : at + 12 + length]
      event: Any = event_pb2
      event = event.Event.FromString(record)  # the class is made at run time
      at += 12 + length + 4
      for value in event.summary.value:
        found[value.tag, event.step] = value.simple_value
  return found


def test_help_lists_every_flag(start, tmp_path):
  done = ended_well(start('train', '--help', cwd=tmp_path))
  for name in ('workdir', 'dry_run', 'topology', 'json', 'coordinator', 'import'):
    assert f'\n  --{name}=' in done.stdout


def test_a_run_writes_everything_that_people_and_programs_read(straight):
  names = {p.name for p in straight.iterdir()}
  assert names == {
    *(
      'config.json',
      'vocabulary.json',
      '.lock',
      'metrics.jsonl',
      'tensorboard',
      'checkpoints',
    ),
    *('acceptance.png', 'loss.png', 'summary.json'),
  }
  config = fields.from_json(json.loads((straight / 'config.json').read_text()))
  assert config.trunk.vocab == 256
  assert config.steps == STEPS
  *trained, heldout = lines(straight)
  assert [x['step'] for x in trained] == list(range(1, STEPS + 1))
  assert heldout['step'] == STEPS
  assert heldout['split'] == 'heldout'
  for line in trained:
    assert len(line['loss_by_depth']) == 3
    assert line['loss_by_depth'][0] > 0
  assert trained[-1]['loss'] < trained[0]['loss'] - 0.5  # it learns
  image = matplotlib.image.imread(straight / 'loss.png')
  assert image.std() > 0.01


def test_events_are_the_lines_of_metrics(straight):
  found = events(straight)
  for line in lines(straight):
    split = line.get('split', 'train')
    for depth, loss in enumerate(line['loss_by_depth']):
      assert found[f'{split}/loss_by_depth/{depth}', line['step']] == np.float32(loss)


def test_a_step_total_is_the_next_token_and_weighted_depths(straight):
  for line in lines(straight)[:-1]:
    main, *depths = line['loss_by_depth']
    total = main + line['lambda']['drafter'] * np.mean(depths)
    np.testing.assert_allclose(line['loss'], total, rtol=1e-5)


def test_the_rate_warms_up_over_five_steps_and_falls_to_a_tenth(straight):
  rates = [x['learning_rate'] for x in lines(straight)[:-1]]
  np.testing.assert_allclose(rates[:5], 1e-2 * np.arange(1, 6) / 5, rtol=1e-6)
  done = (np.arange(5, STEPS) - 5) / (STEPS - 5)
  fall = 0.1 + 0.9 * (1 + np.cos(np.pi * done)) / 2
  np.testing.assert_allclose(rates[5:], 1e-2 * fall, rtol=1e-5)


def test_the_summary_says_what_was_learnt_how_fast_and_on_what(straight):
  found = summary(straight)
  heldout = lines(straight)[-1]
  for name in ('loss', 'loss_by_depth', 'agreement_by_depth', 'counts_by_depth'):
    assert found[name] == heldout[name]
  assert found['train_loss_by_depth'] == lines(straight)[-2]['loss_by_depth']
  assert 0 < found['compile_seconds'] < found['seconds']
  params = {n: x for n, x in arrays(straight, STEPS).items() if n.startswith('/params')}
  assert found['parameters'] == sum(x.size for x in params.values())
  # Its steps took less time than everything, so they were faster than that.
  trained = sum(x['counts_by_depth'][0] for x in lines(straight)[:-1])
  assert found['tokens_per_second'] > trained / found['seconds']
  mtp = found['mtp']
  assert mtp['kind'] == 'sequential'
  assert mtp['modules'] == 1
  assert mtp['shared'] == ['embedding', 'head', 'module']
  assert 't[i+k]' in mtp['teacher_forcing_inputs']
  for name in (
    *('depth', 'share', 'hidden_norm', 'chain_norm', 'hidden_source', 'concat'),
    *('attend', 'detach', 'zero_first_embedding', 'block'),
  ):
    assert name in mtp
  conditions = found['conditions']
  assert conditions['device_count'] == 1
  assert conditions['mesh'] == dict.fromkeys(
    ('replica', 'fsdp', 'tensor', 'context', 'expert'), 1
  )
  assert {'jax', 'flax', 'python', 'device', 'date'} <= set(conditions)


def test_the_summary_says_what_drafting_is_worth(straight):
  found = summary(straight)
  assert found['parity'] is True and found['completion'] == found['draft_completion']
  assert 1 <= found['tau'] <= 3 and found['replay_tau'] == pytest.approx(found['tau'])
  assert found['tokens_per_pass'] >= 1 and len(found['acceptance_by_position']) == 2
  assert found['draft_passes'] <= found['plain_passes'] == 64
  assert (straight / 'acceptance.png').stat().st_size > 10_000


# -------------------------------------------------------------------- stop and go on


def test_a_loss_that_is_no_number_ends_the_run_and_is_never_saved(
  place, train, straight
):
  workdir = place / 'spoilt'
  done = train(workdir, NAN_AT=16)  # a step at which a checkpoint is due
  assert_mistake(done, 'step 16: loss is nan', 'optimizer.rate.peak')
  assert saved_steps(workdir) == [8]
  assert lines(workdir) == lines(straight)[:15]
  good, expected = arrays(workdir, 8), arrays(straight, 8)
  for name, x in good.items():
    np.testing.assert_array_equal(x, expected[name])


# ---------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
  ('args', 'said'),
  [
    (['--config.stpes=5'], ('stpes', "did you mean 'steps'?")),
    (['--config.steps=many'], ('steps', "'many'", 'a whole number')),
    (['--config.optimizer.accumulate=16'], ('data.batch = 8', 'such as 16')),
    (['--config.trunk.vocab=100'], ('trunk.vocab = 100', 'at least 256')),
    (['--config.data.source.files=nowhere/*'], ("'nowhere/*'", 'matches no file')),
  ],
)
def test_a_mistake_ends_the_run_before_anything_is_compiled_or_written(
  place, train, tmp_path, args, said
):
  done = train(tmp_path / 'run', *args)
  assert_mistake(done, *said)
  assert 'compiling' not in done.stdout
  assert not (tmp_path / 'run').exists()


def test_a_directory_that_cannot_be_written_is_named_before_anything_is_compiled(
  place, train, straight, tmp_path
):
  (tmp_path / 'file').write_text('')
  done = train(tmp_path / 'file' / 'run')
  assert_mistake(done, f'{tmp_path}/file/run', 'choose another directory')
  assert 'compiling' not in done.stdout
  shutil.copy(straight / 'config.json', tmp_path)
  (tmp_path / 'file').rename(tmp_path / 'checkpoints')
  done = train(tmp_path)
  assert_mistake(done, f'{tmp_path}/checkpoints', 'choose another directory')
  assert 'compiling' not in done.stdout


def test_a_used_directory_is_refused_for_another_run(place, train, straight):
  before = {p: p.stat().st_mtime_ns for p in straight.rglob('*')}
  done = train(straight, '--config.steps=21', '--config.drafter.depth=3')
  assert_mistake(done, 'steps: 20 → 21', 'drafter.depth: 2 → 3', 'another directory')
  assert 'compiling' not in done.stdout
  assert {p: p.stat().st_mtime_ns for p in straight.rglob('*')} == before


# -------------------------------------------------------------------- other objectives


def test_plain_pretraining_without_held_out_data_ends_well(place, train):
  workdir = place / 'plain'
  done = ended_well(train(workdir, variant='plain'))
  assert 'held out: nothing' in done.stdout
  found = summary(workdir)
  assert found['loss'] is None
  assert found['counts_by_depth'] == found['agreement_by_depth'] == []
  assert found['mtp']['modules'] == 0
  assert [x['step'] for x in lines(workdir)] == [1, 2, 3, 4]
  assert all(len(x['loss_by_depth']) == 1 for x in lines(workdir))
  assert found['train_loss_by_depth'] == lines(workdir)[-1]['loss_by_depth']
  assert (workdir / 'loss.png').stat().st_size > 1000


@pytest.mark.slow
def test_a_frozen_trunk_stays_bit_for_bit_and_has_no_optimiser_state(place, train):
  workdir = place / 'frozen'
  ended_well(train(workdir, variant='frozen'))
  first, last = arrays(workdir, 2), arrays(workdir, 4)
  moved = {n for n in first if not np.array_equal(first[n], last[n])}
  assert not [n for n in moved if n.startswith('/params/trunk')]
  drafter = {n for n in first if n.startswith('/params/objectives')}
  assert drafter <= moved
  assert not [n for n in first if n.startswith('/opt') and '/trunk/' in n]
  assert [n for n in first if n.startswith('/opt') and '/objectives/' in n]


# -------------------------------------------------------------------------------- slow


@pytest.mark.slow
def test_too_high_a_rate_ends_the_run_naming_the_step(place, train):
  workdir = place / 'rate'
  args = ['--config.optimizer.rate.peak=1e30', '--config.checkpoint.every=1']
  done = train(workdir, *args)
  assert_mistake(done, ': loss is nan', 'lower optimizer.rate.peak')
  step = int(done.stderr.partition('error: step ')[2].partition(':')[0])
  assert saved_steps(workdir) == list(range(1, step))
  assert all(np.isfinite(x).all() for x in arrays(workdir, step - 1).values())
