"""Metrics: true means, strict JSON, files that survive a crash, a line one can read."""

import io
import json
import math
import os
import resource
import struct
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax import metrics, terminal


def line(step, **values):
  return {
    'step': step,
    'loss': 2.0,
    'loss_by_depth': [1.521, 1.809, 2.0],
    'lambda': {'mtp': 0.3},
    'learning_rate': 3e-4,
    'tokens_per_second': 12345.0,
    **values,
  }


def strict(text):
  """Python's reader takes NaN and Infinity, which no other does."""

  def refuse(name):
    raise ValueError(name)

  return json.loads(text, parse_constant=refuse)


def test_meter_divides_once():
  meter, other = metrics.Meter(), metrics.Meter()
  meter.add('loss', 10.0, 2)  # a mean of the two means would be 3.5
  other.add('loss', jnp.float32(6.0), jnp.int32(3))
  meter.add('depths', jnp.array([6.0, 4.0, 0.0]), np.array([3, 1, 0]))
  meter.add('depths', np.array([1.0, 5.0, 0.0]), np.array([1, 2, 0]))
  meter.merge(other)
  assert meter.mean('loss') == 16 / 5 and meter.count('loss') == 5
  *known, nothing = meter.mean('depths')
  assert known == [7 / 4, 9 / 3] and math.isnan(nothing)
  assert meter.means().keys() == {'loss', 'depths'}


def test_meter_is_exact_over_many_small_sums():
  meter, count = metrics.Meter(), 100_000
  for _ in range(count):
    meter.add('x', np.float32(0.1), 1)
  assert meter.mean('x') == pytest.approx(float(np.float32(0.1)), rel=1e-12)


@pytest.mark.parametrize('bad', [math.nan, math.inf])
def test_meter_carries_what_is_not_finite(bad):
  meter = metrics.Meter()
  for value in (1.0, bad, 2.0):
    meter.add('x', value)
  assert meter.mean('x') == pytest.approx(bad, nan_ok=True)


def test_json_is_strict():
  values = {
    'a': math.nan,
    'b': [math.inf, -math.inf, 1.5],
    'c': jnp.array([1.0, jnp.nan], jnp.bfloat16),
    'd': np.int64(3),
    'e': {'f': np.float32('nan'), 2: (True, None, 'λ')},
    'g': jnp.float32(0.5),
  }
  assert strict(metrics.to_json(values)) == {
    'a': None,
    'b': [None, None, 1.5],
    'c': [1.0, None],
    'd': 3,
    'e': {'f': None, '2': [True, None, 'λ']},
    'g': 0.5,
  }
  assert strict(metrics.to_json(1 / 3)) == 1 / 3


def test_writer_appends_whole_lines_at_once(tmp_path, caplog):
  with metrics.Writer(tmp_path) as writer:
    for step in (1, 2):
      writer.write(step, line(step, loss=math.nan))
      text = (tmp_path / 'metrics.jsonl').read_text()  # before it is closed
      assert text.count('\n') == step and text.endswith('}\n')
    writer.write(2, {'split': 'heldout', 'loss_by_depth': np.array([1.0, 2.0])})
  rows = metrics.read_metrics(tmp_path / 'metrics.jsonl')
  assert [row['step'] for row in rows] == [1, 2, 2]
  assert rows[0] == line(1, loss=None)
  assert not caplog.records  # TensorBoard has no event for what was not measured
  assert rows[2] == {'step': 2, 'split': 'heldout', 'loss_by_depth': [1.0, 2.0]}


@pytest.mark.parametrize('torn', ['', '{"step": 9, "lo', '{"step": 9}'])
def test_resuming_leaves_no_trace(tmp_path, torn):
  """Crashed in step 9, resumed from the checkpoint of step 5 = uninterrupted."""
  straight, crashed = tmp_path / 'straight', tmp_path / 'crashed'
  with metrics.Writer(straight) as writer:
    for step in range(1, 13):
      writer.write(step, line(step, loss=1 / step))
  with metrics.Writer(crashed) as writer:
    for step in range(1, 9):
      writer.write(step, line(step, loss=1 / step))
  with open(crashed / 'metrics.jsonl', 'a') as file:
    file.write(torn)
  assert [r['step'] for r in metrics.read_metrics(crashed / 'metrics.jsonl')][-1] == 8
  with metrics.Writer(crashed, resume_step=5) as writer:
    for step in range(6, 13):
      writer.write(step, line(step, loss=1 / step))
  name = 'metrics.jsonl'
  assert (crashed / name).read_bytes() == (straight / name).read_bytes()
  assert sorted(os.listdir(crashed)) == [name, 'tensorboard']


def test_a_new_run_starts_a_new_file(tmp_path):
  for loss in (1.0, 2.0):
    with metrics.Writer(tmp_path) as writer:
      writer.write(1, {'loss': loss})
  assert metrics.read_metrics(tmp_path / 'metrics.jsonl') == [{'step': 1, 'loss': 2.0}]


def test_a_spoilt_line_is_named(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
  with pytest.raises(ValueError, match=r'metrics\.jsonl:2: not JSON'):
    metrics.read_metrics(path)
  path.write_text('3\n')
  with pytest.raises(ValueError, match=r':1: not a JSON object'):
    metrics.read_metrics(path)


def test_a_full_disk_names_the_file(tmp_path):
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  try:
    with (
      pytest.raises(OSError, match=r"too large: '.*metrics\.jsonl'"),
      metrics.Writer(tmp_path) as writer,
    ):
      writer.write(1, {'loss': 1.0})
      resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
      writer.write(2, {'said': 'x' * 100})
    with pytest.raises(OSError, match=r"too large: '.*summary\.json'"):
      metrics.write_summary(tmp_path / 'summary.json', {'said': 'x' * 100})
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert not (tmp_path / 'summary.json').exists()


def test_tensorboard_events(tmp_path):
  with metrics.Writer(tmp_path) as writer:
    writer.write(7, line(7))
  from tensorboardX.proto import event_pb2

  [path] = (tmp_path / 'tensorboard').iterdir()
  raw, at, found = path.read_bytes(), 0, {}
  while at < len(raw):  # TFRecord: length, its CRC, the event, its CRC
    [length] = struct.unpack_from('<Q', raw, at)
    event = event_pb2.Event()  # pyright: ignore[reportAttributeAccessIssue]
    event.ParseFromString(raw[at + 12 : at + 12 + length])
    found |= {v.tag: (event.step, v.simple_value) for v in event.summary.value}
    at += 16 + length
  assert found['train/loss_by_depth/2'] == (7, 2.0)
  assert found['train/lambda/mtp'] == (7, pytest.approx(0.3))
  assert 'train/step' not in found


def test_summary_is_atomic_and_strict(tmp_path):
  path = tmp_path / 'deep' / 'summary.json'
  metrics.write_summary(path, {'loss': math.nan, 'conditions': metrics.conditions()})
  assert strict(path.read_text())['conditions']['jax'] == jax.__version__
  before = path.read_bytes()
  with pytest.raises(TypeError):
    metrics.write_summary(path, {'loss': object()})
  assert path.read_bytes() == before and os.listdir(path.parent) == ['summary.json']


def test_conditions():
  found = metrics.conditions()
  assert found['platform'] == 'cpu' and found['device_count'] == 8
  assert found['python'] == '.'.join(map(str, sys.version_info[:3]))
  assert {'device', 'process_count', 'flax', 'mtpjax', 'cpu_count', 'date'} < set(found)


def test_only_process_0_writes(tmp_path, monkeypatch):
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  out = io.StringIO()
  with (
    metrics.Writer(tmp_path / 'run') as writer,
    terminal.Progress(1, file=out) as bar,
  ):
    writer.write(1, line(1))
    bar.update(1, line(1))
  assert not (tmp_path / 'run').exists() and not out.getvalue()


def test_going_back_drops_what_came_after(tmp_path):
  with metrics.Writer(tmp_path) as writer:
    for step in range(1, 6):
      writer.write(step, {'loss': step})
    writer.write(4, {'split': 'heldout', 'loss': 9})
    writer.go_back(3)
    writer.write(4, {'loss': 40})
  found = metrics.read_metrics(writer.path)
  assert [(x['step'], x['loss']) for x in found] == [(1, 1), (2, 2), (3, 3), (4, 40)]
  assert metrics.last_step(tmp_path) == 4
  assert metrics.last_step(tmp_path / 'nowhere') == 0


def test_evaluations_on_the_way_stay_and_the_final_one_is_made_again(tmp_path):
  with metrics.Writer(tmp_path) as writer:
    for step in (2, 4):
      writer.write(step, {'loss': step})
      writer.write(step, {'split': 'heldout', 'loss': -step})
    writer.write(4, {'split': 'heldout', 'final': True, 'loss': -4})
  with metrics.Writer(tmp_path, 4):
    pass
  found = metrics.read_metrics(writer.path)
  assert [x['loss'] for x in found] == [2, -2, 4, -4]


class Tracker:
  """In the place of wandb."""

  def __init__(self):
    self.calls = []

  def init(self, **args):
    self.calls.append(('init', args))
    return self

  def define_metric(self, *names, **args):
    self.calls.append(('define', names))

  def log(self, values):
    self.calls.append(('log', values))

  def finish(self):
    self.calls.append(('finish',))


def test_a_tracker_hears_every_number_of_every_line(tmp_path, monkeypatch):
  tracker = Tracker()
  monkeypatch.setitem(sys.modules, 'wandb', tracker)
  workdir = tmp_path / 'mine'
  with metrics.Writer(workdir, project='project') as writer:
    writer.write(1, line(1))
    writer.write(1, {'split': 'heldout', 'loss': 3.0, 'final': True})
  (_, start), _, (_, first), (_, second), _ = tracker.calls
  assert start['project'] == 'project' and start['name'] == start['id'] == 'mine'
  assert start['resume'] == 'allow'
  assert first['step'] == 1 and first['train/loss_by_depth/1'] == 1.809
  assert second == {'step': 1, 'heldout/loss': 3.0, 'heldout/final': True}
