"""Path-star, made smaller: heads ahead plan, next-token training guesses."""

import json

import pytest
from runs import ROOT, ended_well, lines, summary

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def learn(tmp_path_factory, start):
  place = tmp_path_factory.mktemp('path_star')

  def run(variant):
    workdir = place / variant
    config = f'{ROOT}/configs/papers/path_star.py:{variant}'
    own = [f'--config={config}', f'--workdir={workdir}']
    own += ['--config.steps=300', '--config.evaluation.every=150']
    # Here there is something to compute.
    ended_well(start('train', *own, cwd=place, XLA_FLAGS=''))
    return workdir

  return run


def test_a_head_for_the_second_next_token_finds_the_path(learn):
  found = summary(learn('parallel'))
  assert found['problems'] == 1024 and found['exact_match'] >= 0.98
  assert found['parity']


def test_the_next_token_alone_takes_either_path(learn, start):
  workdir = learn('ntp')
  for line in (x for x in lines(workdir) if x.get('split') == 'heldout'):
    assert abs(line['exact_match'] - 0.5) < 0.06
    # The start is told and the goal is too: only the label between is guessed.
    assert abs(line['agreement_by_depth'][0] - 2.5 / 3) < 0.03
  out = workdir / 'again.json'
  own = [f'--checkpoint={workdir}', f'--json={out}']
  done = ended_well(start('evaluate', *own, cwd=workdir.parent))
  again = json.loads(out.read_text())
  assert again['exact_match'] == summary(workdir)['exact_match']
  assert 'exact answers by greedy decoding' in done.stdout
