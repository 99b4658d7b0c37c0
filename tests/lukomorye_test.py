"""The lesson's table: what a module and a parallel head know of a text by heart."""

import functools
import math

import pytest
from runs import ROOT, ended_well, lines, summary

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def learn(tmp_path_factory, start):
  place = tmp_path_factory.mktemp('lukomorye')

  @functools.cache
  def run(variant, *args):
    workdir = place / '-'.join([variant, *args])
    config = f'{ROOT}/configs/lukomorye.py:{variant}'
    own = [f'--config={config}', f'--workdir={workdir}', *args]
    # Here there is something to compute.
    ended_well(start('train', *own, cwd=place, XLA_FLAGS=''))
    found = summary(workdir)
    assert found['parity'] and found['plain_passes'] == 50
    for loss in lines(workdir)[0]['loss_by_depth']:
      assert abs(loss - math.log(45)) < 0.15
    assert found['seconds'] < 120
    return found

  return run


@pytest.mark.parametrize('seed', range(3))
def test_a_head_that_has_to_guess_is_right_half_as_often_as_the_module(learn, seed):
  module, head = (learn(v, f'--config.seed={seed}') for v in ('sequential', 'parallel'))
  assert module['acceptance_rate'] >= 0.85 and module['draft_passes'] <= 28
  assert head['acceptance_rate'] <= module['acceptance_rate'] / 2
  assert head['draft_passes'] >= 33


@pytest.mark.parametrize('variant', ['sequential', 'parallel'])
def test_what_was_not_trained_is_right_by_chance(learn, variant):
  found = learn(variant, '--config.drafter.weight.value=0')
  assert found['acceptance_rate'] < 0.15 and found['train_loss_by_depth'][1] > 3
  assert found['train_loss_by_depth'][0] < 0.2


def test_more_steps_teach_both_more_and_the_module_sooner(learn):
  both = ('sequential', 'parallel')
  few = {v: learn(v, '--config.steps=60') for v in both}
  many = {v: learn(v, '--config.seed=0') for v in both}  # 150 steps
  assert many['sequential']['acceptance_rate'] >= 0.85
  for variant in few:
    assert many[variant]['acceptance_rate'] > few[variant]['acceptance_rate']
  for found in few, many:
    head, module = found['parallel'], found['sequential']
    assert head['train_loss_by_depth'][1] > 2 * module['train_loss_by_depth'][1]
