"""The figures of a line of the log: sums and counts over its steps, divided once."""

import json
import math

import numpy as np
import pytest

from mtpjax import losses, meters


def step_metrics(rng, loss=None, grad_norm=None):
  """What `train_step` returns, on the host: float32 and int32, counts far apart."""

  def sums(depths):
    count = rng.integers(1, 10 ** rng.integers(1, 5), depths).astype(np.int32)
    return losses.Sums(
      nll=(rng.uniform(0.5, 5, depths) * count).astype(np.float32),
      correct=(rng.uniform(0, 1, depths) * count).astype(np.float32).round(),
      count=count,
    )

  return {
    'loss': np.float32(rng.uniform(1, 9) if loss is None else loss),
    'grad_norm': np.float32(rng.uniform(0, 2) if grad_norm is None else grad_norm),
    'sums': {'next': sums(1), 'drafter': sums(3), 'token_order': sums(1)},
    'lambda': {'drafter': np.float32(rng.uniform()), 'token_order': np.float32(0.5)},
    'rate': np.float32(rng.uniform()),
  }


def assert_line_is_of(line, steps):
  """By definition, in Python's own numbers: one division of sums over all the steps."""

  def ratio(name, depth, field):
    sums = [s['sums'][name] for s in steps]
    total = math.fsum(float(getattr(s, field)[depth]) for s in sums)
    return total / sum(int(s.count[depth]) for s in sums)

  depths = [('next', 0), *(('drafter', k) for k in range(3))]
  expected = {
    'loss_by_depth': [ratio(*d, 'nll') for d in depths],
    'agreement_by_depth': [ratio(*d, 'correct') for d in depths],
  }
  for name, values in expected.items():
    np.testing.assert_allclose(line[name], values, rtol=1e-14)
  counts = [sum(int(s['sums'][n].count[k]) for s in steps) for n, k in depths]
  assert line['counts_by_depth'] == counts
  (other,) = line['objectives']
  assert other == 'token_order'
  np.testing.assert_allclose(
    line['objectives'][other]['loss_by_depth'],
    [ratio(other, 0, 'nll')],
    rtol=1e-14,
  )
  for name in ('loss', 'grad_norm'):
    mean = math.fsum(float(s[name]) for s in steps) / len(steps)
    assert line[name] == pytest.approx(mean, rel=1e-14)
  assert line['learning_rate'] == float(steps[-1]['rate'])
  assert line['lambda'] == {n: float(x) for n, x in steps[-1]['lambda'].items()}


def test_a_line_divides_sums_over_its_own_steps_once():
  rng = np.random.default_rng(0)
  steps = [step_metrics(rng) for _ in range(7)]
  meter = meters.Training()
  for n, out in enumerate(steps[:4], 1):
    assert_line_is_of(meter.add(n, out, tokens=10), steps[:n])
  assert_line_is_of(meter.flush(), steps[:4])
  for n, out in enumerate(steps[4:], 5):
    meter.add(n, out, tokens=10)
  assert_line_is_of(meter.flush(), steps[4:])


def test_a_state_carries_the_steps_since_the_last_line_exactly():
  rng = np.random.default_rng(1)
  steps = [step_metrics(rng) for _ in range(6)]
  straight, before, after = (meters.Training() for _ in range(3))
  for n, out in enumerate(steps, 1):
    straight.add(n, out, tokens=10)
    if n <= 2:
      before.add(n, out, tokens=10)
  after.set_state(json.loads(json.dumps(before.get_state())))
  for n, out in enumerate(steps[2:], 3):
    after.add(n, out, tokens=10)
  timed = ('tokens_per_second',)
  lines = [
    {k: v for k, v in meter.flush().items() if k not in timed}
    for meter in (straight, after)
  ]
  assert lines[0] == lines[1]
  assert straight.get_state() == {}


def test_a_depth_without_targets_is_not_measured_and_spoils_nothing():
  rng = np.random.default_rng(2)
  out = step_metrics(rng)
  drafter = out['sums']['drafter']
  for values in (drafter.nll, drafter.correct, drafter.count):
    values[2] = 0
  line = meters.Training().add(1, out, tokens=10)
  assert math.isnan(line['loss_by_depth'][3])
  assert all(math.isfinite(x) for x in line['loss_by_depth'][:3])


def test_without_a_drafter_a_line_has_the_next_token_alone():
  out = step_metrics(np.random.default_rng(3))
  out['sums'], out['lambda'] = {'next': out['sums']['next']}, {}
  line = meters.Training().add(1, out, tokens=10)
  assert len(line['loss_by_depth']) == len(line['counts_by_depth']) == 1
  assert 'objectives' not in line
  assert line['lambda'] == {}


@pytest.mark.parametrize('name', ['loss', 'grad_norm'])
@pytest.mark.parametrize('value', [math.nan, math.inf])
def test_a_value_that_is_not_finite_ends_training_naming_the_step(name, value):
  meter = meters.Training()
  good = step_metrics(np.random.default_rng(4))
  meter.add(41, good, tokens=10)
  bad = step_metrics(np.random.default_rng(4), **{name: value})
  with pytest.raises(meters.TrainingError, match=f'step 42: {name} is {value}.*rate'):
    meter.add(42, bad, tokens=10)


def test_throughput_counts_from_the_start_to_the_last_step(monkeypatch):
  now = {'t': 0.0}
  monkeypatch.setattr(meters.time, 'monotonic', lambda: now['t'])
  meter = meters.Training()
  assert meter.tokens_per_second is None
  rng = np.random.default_rng(5)
  for n in range(1, 5):
    now['t'] = 2.0 * n
    meter.add(n, step_metrics(rng), tokens=100)
  assert meter.flush()['tokens_per_second'] == 400 / 8
  now['t'] = 9.0
  meter.add(5, step_metrics(rng), tokens=100)
  assert meter.flush()['tokens_per_second'] == 100 / 1  # since the line before
  now['t'] = 1000.0  # an evaluation is no training
  assert meter.tokens_per_second == 500 / 9
