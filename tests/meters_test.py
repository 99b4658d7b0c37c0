"""The figures of a line of the log: sums and counts over its steps, divided once."""

import json
import math

import numpy as np
import pytest

from mtpjax import fields, losses, meters


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
  states = [meter.get_state() for meter in (straight, after)]
  assert states[0]['line'] == {} and states[0]['speed'][0] == 60
  for state in states:
    del state['speed'][1]  # seconds
  assert states[0] == states[1]


def test_a_depth_without_targets_is_not_measured_and_spoils_nothing():
  rng = np.random.default_rng(2)
  out = step_metrics(rng)
  drafter = out['sums']['drafter']
  for values in (drafter.nll, drafter.correct, drafter.count):
    values[2] = 0
  line = meters.Training().add(1, out, tokens=10)
  assert math.isnan(line['loss_by_depth'][3])
  assert all(math.isfinite(x) for x in line['loss_by_depth'][:3])


def test_a_step_without_targets_is_in_no_mean_and_lowers_no_lowest_loss():
  rng, guard = np.random.default_rng(8), meters.Guard(above=0.5, patience=2)
  meter, steps = meters.Training(guard), [step_metrics(rng, loss=5.0) for _ in range(9)]
  empty = step_metrics(rng, loss=0.0, grad_norm=0.0)
  for sums in empty['sums'].values():
    for values in (sums.nll, sums.correct, sums.count):
      values[:] = 0
  line = meter.add(1, empty, tokens=10)
  assert line['loss'] is None and line['grad_norm'] is None
  for n, out in enumerate([*steps, *[empty] * 30, *steps], 2):
    line = meter.add(n, out, tokens=10)
  assert not meter.high
  assert_line_is_of(line, 2 * steps)


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
  now['t'] = 50.0  # it was compiled
  meter.start()
  rng = np.random.default_rng(5)
  for n in range(1, 5):
    now['t'] = 50 + 2.0 * n
    meter.add(n, step_metrics(rng), tokens=100)
  assert meter.flush()['tokens_per_second'] == 400 / 8
  now['t'] = 59.0
  meter.add(5, step_metrics(rng), tokens=100)
  assert meter.flush()['tokens_per_second'] == 100 / 1  # since the line before
  now['t'] = 1000.0  # an evaluation is no training
  assert meter.tokens_per_second == 500 / 9
  # The next process adds to it, and one that finds nothing left to do says the same.
  state = json.loads(json.dumps(meter.get_state()))
  again = restarted(meter, None)
  assert again.tokens_per_second == 500 / 9
  now['t'] += 30
  again.start()
  now['t'] += 3
  again.add(6, step_metrics(rng), tokens=100)
  assert again.tokens_per_second == 600 / 12
  again.set_state(state)  # gone back: step 6 will be made again
  now['t'] += 6
  again.add(6, step_metrics(rng), tokens=100)
  assert again.tokens_per_second == 600 / 15


# ------------------------------------------------------------------------ the guard


def losses_until_it_stops(guard, values, skipped=()):
  """(step, message) at which these losses stop a run, (None, '') if they do not."""
  meter, rng = meters.Training(guard), np.random.default_rng(6)
  for n, value in enumerate(values, 1):
    out = step_metrics(rng, loss=value)
    if skipped:
      out['skipped'] = np.float32(n in skipped)
    try:
      meter.add(n, out, tokens=1)
    except meters.TrainingError as error:
      return n, str(error)
    meter = restarted(meter, guard)  # what it remembers survives a restart at any step
  return None, ''


def restarted(meter, guard):
  again = meters.Training(guard)
  again.set_state(json.loads(json.dumps(meter.get_state())))
  return again


def diverges_at(values, above, patience):
  """By definition, with all losses at hand."""
  smooth: list[float] = []
  low, high = math.inf, 0
  for n, value in enumerate(values, 1):
    smooth.append(value if not smooth else 0.9 * smooth[-1] + 0.1 * value)
    low = min(smooth)
    high = high + 1 if smooth[-1] > low + above else 0
    if high == patience:
      return n
  return None


@pytest.mark.parametrize('seed', range(4))
def test_a_loss_far_above_its_lowest_for_long_stops_at_its_step(seed):
  rng = np.random.default_rng(seed)
  values = [*rng.uniform(1, 2, 20), *rng.uniform(3, 9, 25)]
  guard = meters.Guard(above=1.5, patience=6)
  want = diverges_at(np.asarray(values, np.float32).astype(float), 1.5, 6)
  assert want is not None
  step, said = losses_until_it_stops(guard, values)
  assert step == want
  assert f'step {want}:' in said and 'guard.above' in said
  assert losses_until_it_stops(meters.Guard(above=None), values) == (None, '')


def test_a_short_peak_and_a_high_start_stop_nothing():
  guard = meters.Guard(above=1.0, patience=5)
  peak = [9.0, 5.0, *[2.0] * 30, *[30.0] * 1, *[2.0] * 20]
  assert diverges_at(peak, 1.0, 5) is not None  # one such peak is smoothed too slowly
  calm = [9.0, 5.0, *[2.0] * 30, *[8.0] * 1, *[2.0] * 20]
  assert diverges_at(calm, 1.0, 5) is None
  assert losses_until_it_stops(guard, calm) == (None, '')


def test_going_back_to_before_any_loss_was_watched_forgets_the_watch():
  rng, guard = np.random.default_rng(7), meters.Guard(above=1.0, patience=2)
  meter, start = meters.Training(guard), meters.Training(guard).get_state()
  for value in (1.0, 40.0):
    meter.add(1, step_metrics(rng, loss=value), tokens=1)
  meter.set_state(start)
  meter.add(1, step_metrics(rng, loss=40.0), tokens=1)
  assert meter.get_state()['guard'] == [40.0, 40.0, 0]


def test_skipped_steps_are_counted_left_out_of_means_and_only_many_in_a_row_stop():
  guard = meters.Guard(patience=3)
  values = [1.0, math.nan, math.nan, 1.0, math.nan, math.nan, math.nan]
  step, said = losses_until_it_stops(guard, values, skipped={2, 3, 5, 6, 7})
  assert step == 7 and '3 steps in a row' in said
  meter, rng = meters.Training(guard), np.random.default_rng(7)
  steps = [step_metrics(rng, loss=x) for x in (1.0, math.nan, 3.0)]
  for n, out in enumerate(steps):
    out['skipped'] = np.float32(n == 1)
    line = meter.add(n, out, tokens=10)
  assert line['skipped'] == 1
  del line['skipped']
  assert_line_is_of(line, [steps[0], steps[2]])


@pytest.mark.parametrize(
  ('field', 'value'),
  [('above', 0.0), ('above', -1.0), ('patience', 0), ('rollbacks', -1)],
)
def test_a_guard_that_makes_no_sense_is_refused(field, value):
  with pytest.raises(fields.ConfigError, match=rf'guard\.{field} = {value}'):
    meters.Guard(**{field: value}).finalize()


# ------------------------------------------------------------------------ the clock


@pytest.fixture
def now(monkeypatch):
  clock = {'t': 100.0}
  monkeypatch.setattr(meters.time, 'monotonic', lambda: clock['t'])
  return clock


def spend(clock, now, kind, seconds):
  with clock(kind):
    now['t'] += seconds


def test_every_second_is_of_one_kind(now):
  clock = meters.Clock()
  now['t'] += 2
  spend(clock, now, 'compile', 30)
  clock.training_begins()
  for _ in range(4):
    now['t'] += 10
    spend(clock, now, 'checkpoint', 1)
  spend(clock, now, 'evaluation', 5)
  assert clock.summary() == {
    'seconds': 81.0,
    'lives': 1,
    'goodput': {
      'share': 40 / 81,
      **{'productive': 40.0, 'compile': 30.0, 'checkpoint': 4.0, 'input': 0.0},
      **{'evaluation': 5.0, 'restart': 2.0},
    },
  }


def test_a_restarted_run_adds_up_and_counts_what_it_has_to_do_again(now):
  clock = meters.Clock()
  spend(clock, now, 'compile', 10)
  clock.training_begins()
  now['t'] += 50
  state = json.loads(json.dumps(clock.get_state(steps=25)))
  again = meters.Clock()
  again.set_state(state, redone=3)
  now['t'] += 4
  spend(again, now, 'compile', 10)
  again.training_begins()
  now['t'] += 20
  found = again.summary()
  assert found['lives'] == 2
  assert found['goodput']['productive'] == 70.0
  assert found['goodput']['compile'] == 20.0
  assert found['goodput']['restart'] == 4.0 + 3 * 50 / 25
  assert found['seconds'] == 60 + 34 + 6


def test_going_back_turns_what_was_productive_since_into_a_restart(now):
  clock = meters.Clock()
  clock.training_begins()
  now['t'] += 30
  state = clock.get_state(steps=10)
  now['t'] += 12
  clock.go_back(state)
  now['t'] += 5
  found = clock.summary()['goodput']
  assert found['productive'] == 35.0 and found['restart'] == 12.0


class Computed:
  def __init__(self, ready):
    self.is_ready = lambda: ready


def test_waiting_for_data_costs_only_what_the_device_is_idle(now):
  clock = meters.Clock()
  clock.training_begins()
  for ahead, seconds in ((Computed(False), 8), (Computed(True), 3), (None, 2)):
    with clock.waiting(ahead):
      now['t'] += seconds
  assert clock.seconds()['input'] == 5.0 and clock.seconds()['productive'] == 8.0
  assert clock.waits() == {'waits_for_data': '38%'}
  now['t'] += 100
  assert clock.waits() == {}


def test_a_trace_covers_the_steps_asked_for(monkeypatch, tmp_path):
  said = []
  monkeypatch.setattr(
    meters.jax.profiler, 'start_trace', lambda path: said.append(path)
  )
  monkeypatch.setattr(meters.jax.profiler, 'stop_trace', lambda: said.append('stop'))
  for span, steps, want in (
    ((3, 2), range(1, 7), [1, 2, 'start', 3, 4, 'stop', 5, 6]),
    ((3, 9), range(1, 6), [1, 2, 'start', 3, 4, 5, 'stop']),  # the run ends first
    ((), range(1, 4), [1, 2, 3]),
    ((3, 2), range(7, 9), [7, 8]),  # resumed past it
  ):
    said.clear()
    with meters.Trace(tmp_path, span) as trace:
      for n in steps:
        trace.at(n)
        said.append(n)
    assert ['start' if x == str(tmp_path) else x for x in said] == want
