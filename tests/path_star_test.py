"""Path-star, made smaller: heads ahead plan, next-token training guesses."""

import json
import subprocess
import sys

import pytest
from runs import ROOT, ended_well, environment, lines, summary

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def learn(tmp_path_factory):
  place = tmp_path_factory.mktemp('path_star')

  def run(variant):
    workdir = place / variant
    start = [sys.executable, '-m', 'mtpjax.train', f'--workdir={workdir}']
    start += [f'--config={ROOT}/configs/papers/path_star.py:{variant}']
    start += ['--config.steps=300', '--config.evaluation.every=150']
    env = environment(place)
    env['XLA_FLAGS'] = ''  # here there is something to compute
    ended_well(subprocess.run(start, env=env, capture_output=True, text=True))
    return workdir

  return run


def test_a_head_for_the_second_next_token_finds_the_path(learn):
  found = summary(learn('parallel'))
  assert found['problems'] == 1024 and found['exact_match'] >= 0.98
  assert found['parity']


def test_the_next_token_alone_takes_either_path(learn):
  workdir = learn('ntp')
  for line in (x for x in lines(workdir) if x.get('split') == 'heldout'):
    assert abs(line['exact_match'] - 0.5) < 0.06
    # The start is told and the goal is too: only the label between is guessed.
    assert abs(line['agreement_by_depth'][0] - 2.5 / 3) < 0.03
  out = workdir / 'again.json'
  start = [sys.executable, '-m', 'mtpjax.evaluate', f'--checkpoint={workdir}']
  done = subprocess.run(
    [*start, f'--json={out}'],
    env=environment(workdir.parent),
    capture_output=True,
    text=True,
  )
  ended_well(done)
  again = json.loads(out.read_text())
  assert again['exact_match'] == summary(workdir)['exact_match']
  assert 'exact answers by greedy decoding' in done.stdout
