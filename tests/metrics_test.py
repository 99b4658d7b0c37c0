"""Metrics: true means, strict JSON, files that survive a crash, a line one can read."""

import io
import json
import logging
import math
import os
import struct
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax import metrics


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


def test_writer_appends_whole_lines_at_once(tmp_path):
  with metrics.Writer(tmp_path) as writer:
    for step in (1, 2):
      writer.write(step, line(step, loss=math.nan))
      text = (tmp_path / 'metrics.jsonl').read_text()  # before it is closed
      assert text.count('\n') == step and text.endswith('}\n')
    writer.write(2, {'split': 'heldout', 'loss_by_depth': np.array([1.0, 2.0])})
  rows = metrics.read_metrics(tmp_path / 'metrics.jsonl')
  assert [row['step'] for row in rows] == [1, 2, 2]
  assert rows[0] == line(1, loss=None)
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
  with metrics.Writer(tmp_path / 'run') as writer, metrics.Progress(1, file=out) as bar:
    writer.write(1, line(1))
    bar.update(1, line(1))
  assert not (tmp_path / 'run').exists() and not out.getvalue()


class Terminal(io.StringIO):
  def isatty(self):
    return True


def test_brief_is_compact():
  assert (
    metrics.brief(line(3)) == 'loss 1.52 1.81 2.00  λ 0.3  lr 3.00e-04  12.3k tok/s'
  )
  assert metrics.brief({'acceptance_length': 2.75, 'examples': 3}) == (
    'acceptance length 2.75  examples 3'
  )
  assert metrics.brief({'loss': math.nan}) == 'loss nan'
  assert metrics.brief({'loss_by_depth': [np.float32(1), None]}) == 'loss 1.00 –'
  assert metrics.brief({'objectives': {'order': {'loss_by_depth': [1.0]}}}) == ''


def test_plain_lines_off_a_terminal(monkeypatch):
  clock = [100.0]
  monkeypatch.setattr(metrics.time, 'monotonic', lambda: clock[0])
  out = io.StringIO()
  with metrics.Progress(40, 10, seconds=10.0, every=4, file=out) as progress:
    for step in range(11, 41):
      clock[0] += 2
      progress.update(step, line(step))
  text = out.getvalue()
  assert '\r' not in text and '\x1b' not in text
  said = [int(row.split()[1].split('/')[0]) for row in text.splitlines()]
  # At once as soon as four steps are done, then every 10 s (5 steps), and the last.
  assert said == [14, 19, 24, 29, 34, 39, 40]
  first, last = text.splitlines()[0], text.splitlines()[-1]
  assert first.startswith('step 14/40  loss 1.52 1.81 2.00  λ 0.3')
  assert first.endswith('00:52 left')  # 26 steps at 2 s, counted from the resumed one
  assert 'left' not in last


def test_the_last_line_is_said_when_a_run_ends_early():
  out = io.StringIO()
  with metrics.Progress(100, what='batch', file=out) as progress:
    for step in (1, 2, 3):
      progress.update(step, {'acceptance_length': 2.5})
  assert (
    out.getvalue().splitlines()[-1].startswith('batch 3/100  acceptance length 2.5')
  )
  assert len(out.getvalue().splitlines()) == 2  # the first, and this one


def test_a_bar_on_a_terminal():
  out = Terminal()
  with metrics.Progress(20, 10, file=out) as progress:
    for step in range(11, 21):
      progress.update(step, line(step))
  text = out.getvalue()
  assert '\r' in text and '20/20' in text and 'loss 1.52 1.81 2.00' in text
  assert '10/20' in text  # it starts where the run was resumed


def curve(steps=60):
  rows = []
  for step in range(1, steps + 1):
    losses = [1 + depth / 10 + 3 / step for depth in range(4)]
    rows.append(
      {'step': step, 'loss_by_depth': losses, 'lambda': {'mtp': 0.3, 'x': 0.1}}
    )
    if step % 20 == 0:
      rows.append({'step': step, 'split': 'heldout', 'loss_by_depth': losses})
  return rows


@pytest.mark.parametrize(
  'rows',
  [
    curve(),
    curve(1),
    [{'step': 1, 'loss_by_depth': [None, 2.0]}],  # a NaN of a run that diverged
    [row for row in curve() if 'split' in row],
    [{'step': s, 'loss_by_depth': [2.0], 'lambda': {}} for s in range(3)],
  ],
  ids=['usual', 'one step', 'nan', 'held out alone', 'no mtp'],
)
def test_loss_figure_is_a_png(tmp_path, rows, caplog):
  path = tmp_path / 'figures' / 'loss.png'
  with caplog.at_level(logging.WARNING):
    metrics.loss_figure(rows, path)
  raw = path.read_bytes()
  assert raw.startswith(b'\x89PNG') and raw.rstrip().endswith(b'IEND\xaeB`\x82')
  width, height = struct.unpack('>II', raw[16:24])
  assert width > 1000 and height > 600
  assert not caplog.records


def test_loss_figure_draws_what_it_was_given(tmp_path, monkeypatch):
  from matplotlib.figure import Figure

  drawn = []
  monkeypatch.setattr(Figure, 'savefig', lambda self, *a, **k: drawn.append(self))
  metrics.loss_figure(curve(), tmp_path / 'loss.png')
  top, bottom = drawn[0].axes
  raw, smooth, held = top.lines[3:6]  # depth 1, after the three of depth 0
  assert list(raw.get_ydata()) == [1.1 + 3 / step for step in range(1, 61)]
  assert len(smooth.get_ydata()) == 60
  assert list(held.get_xdata()) == [20, 40, 60]
  assert [text.get_text() for text in top.texts] == [
    'next token  1.05',
    'depth 1  1.15',
    'depth 2  1.25',
    'depth 3  1.35',
  ]
  assert [line.get_label() for line in bottom.lines] == ['mtp', 'x']
  places = [text.xy[1] for text in top.texts]
  assert min(np.diff(places)) >= 0.05 * np.ptp(top.get_ylim())  # none over another


def test_smoothing_matches_a_loop():
  values = np.random.default_rng(0).normal(size=400)
  want = [np.mean(values[max(0, i - 5) : min(400, i + 6)]) for i in range(400)]
  np.testing.assert_allclose(metrics._smooth(values), want)


def test_no_losses_is_an_error(tmp_path):
  with pytest.raises(ValueError, match='no loss_by_depth among 1 lines'):
    metrics.loss_figure([{'step': 1, 'loss': 2.0}], tmp_path / 'loss.png')
