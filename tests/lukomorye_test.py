"""The lesson's table: what a module and a parallel head know of a text by heart."""

import math
import subprocess
import sys

import pytest
from runs import ROOT, ended_well, environment, lines, summary

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def learn(tmp_path_factory):
  place = tmp_path_factory.mktemp('lukomorye')

  def run(variant, *args):
    workdir = place / '-'.join([variant, *args])
    start = [sys.executable, '-m', 'mtpjax.train', f'--workdir={workdir}']
    start += [f'--config={ROOT}/configs/lukomorye.py:{variant}', *args]
    env = environment(place)
    env['XLA_FLAGS'] = ''  # here there is something to compute
    ended_well(subprocess.run(start, env=env, capture_output=True, text=True))
    found = summary(workdir)
    assert found['parity'] and found['plain_passes'] == 50
    for start in lines(workdir)[0]['loss_by_depth']:
      assert abs(start - math.log(45)) < 0.15
    assert found['seconds'] < 120
    return found

  return run


@pytest.mark.parametrize('seed', range(3))
def test_the_module_is_nearly_always_right(learn, seed):
  found = learn('sequential', f'--config.seed={seed}')
  assert found['acceptance_rate'] >= 0.85 and found['draft_passes'] <= 28


@pytest.mark.parametrize('variant', ['sequential', 'parallel'])
def test_what_was_not_trained_is_right_by_chance(learn, variant):
  found = learn(variant, '--config.drafter.weight.value=0')
  assert found['acceptance_rate'] < 0.15 and found['train_loss_by_depth'][1] > 3
  assert found['train_loss_by_depth'][0] < 0.2


@pytest.mark.parametrize('variant', ['sequential', 'parallel'])
def test_more_steps_teach_both_more(learn, variant):
  few, many = (learn(variant, f'--config.steps={n}') for n in (60, 400))
  assert many['acceptance_rate'] >= 0.85 > few['acceptance_rate']
  assert many['train_loss_by_depth'][1] < few['train_loss_by_depth'][1]


def test_a_head_that_has_to_guess_learns_later_than_the_module(learn):
  module, head = (learn(v, '--config.steps=60') for v in ('sequential', 'parallel'))
  assert head['train_loss_by_depth'][1] > module['train_loss_by_depth'][1]
