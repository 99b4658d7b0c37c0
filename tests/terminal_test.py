"""What is said while one waits: a bar on a terminal, else plain lines."""

import io
import math

import numpy as np

from mtpjax import terminal


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


class Terminal(io.StringIO):
  def isatty(self):
    return True


def test_brief_is_compact():
  assert (
    terminal.brief(line(3)) == 'loss 1.52 1.81 2.00  λ 0.3  lr 3.00e-04  12.3k tok/s'
  )
  assert terminal.brief({'acceptance_length': 2.75, 'examples': 3}) == (
    'acceptance length 2.75  examples 3'
  )
  assert terminal.brief({'loss': math.nan}) == 'loss nan'
  assert terminal.brief({'loss_by_depth': [np.float32(1), None]}) == 'loss 1.00 –'
  own = {'order': {'loss_by_depth': [1.0, 2.5]}, 'bag': {'loss_by_depth': [3.0]}}
  assert terminal.brief({'objectives': own}) == 'order 1.00 2.50  bag 3.00'
  assert terminal.brief({'lambda': {'a': 0.5, 'b': 0.5}}) == 'λ 0.5'
  assert terminal.brief({'lambda': {'a': 0.5, 'b': 1.0}}) == 'λ a 0.5  λ b 1'
  assert terminal.brief({'lambda': {}}) == ''


def test_plain_lines_off_a_terminal(monkeypatch):
  clock = [100.0]
  monkeypatch.setattr(terminal.time, 'monotonic', lambda: clock[0])
  out = io.StringIO()
  with terminal.Progress(40, 10, seconds=10.0, every=4, file=out) as progress:
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
  with terminal.Progress(100, what='batch', file=out) as progress:
    for step in (1, 2, 3):
      progress.update(step, {'acceptance_length': 2.5})
  assert (
    out.getvalue().splitlines()[-1].startswith('batch 3/100  acceptance length 2.5')
  )
  assert len(out.getvalue().splitlines()) == 2  # the first, and this one


def test_a_bar_on_a_terminal():
  out = Terminal()
  with terminal.Progress(20, 10, file=out) as progress:
    for step in range(11, 21):
      progress.update(step, line(step))
  text = out.getvalue()
  assert '\r' in text and '20/20' in text and 'loss 1.52 1.81 2.00' in text
  assert '10/20' in text  # it starts where the run was resumed
