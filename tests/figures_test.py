"""Figures: what they draw is what they were given."""

import logging
import struct

import numpy as np
import pytest

from mtpjax import figures


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
    figures.loss_figure(rows, path)
  raw = path.read_bytes()
  assert raw.startswith(b'\x89PNG') and raw.rstrip().endswith(b'IEND\xaeB`\x82')
  width, height = struct.unpack('>II', raw[16:24])
  assert width > 1000 and height > 600
  assert not caplog.records


def test_loss_figure_draws_what_it_was_given(tmp_path, monkeypatch):
  from matplotlib.figure import Figure

  drawn = []
  monkeypatch.setattr(Figure, 'savefig', lambda self, *a, **k: drawn.append(self))
  figures.loss_figure(curve(), tmp_path / 'loss.png')
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


def test_exact_answers_have_a_panel_of_their_own(tmp_path, monkeypatch):
  from matplotlib.figure import Figure

  drawn = []
  monkeypatch.setattr(Figure, 'savefig', lambda self, *_, **__: drawn.append(self))
  rows = curve()
  answers = {20: 0.25, 40: 0.0, 60: 1.0}
  for row in rows:
    if 'split' in row:
      row['exact_match'] = answers[row['step']]
  figures.loss_figure(rows, tmp_path / 'loss.png')
  _, panel, weights = drawn[0].axes
  (points,) = panel.lines
  assert dict(zip(*points.get_data(), strict=True)) == answers
  assert panel.get_ylabel() == 'exact answers' and weights.get_ylabel() == 'λ'


def test_smoothing_matches_a_loop():
  values = np.random.default_rng(0).normal(size=400)
  want = [np.mean(values[max(0, i - 5) : min(400, i + 6)]) for i in range(400)]
  np.testing.assert_allclose(figures._smooth(values), want)


def test_no_losses_is_an_error(tmp_path):
  with pytest.raises(ValueError, match='no loss_by_depth among 1 lines'):
    figures.loss_figure([{'step': 1, 'loss': 2.0}], tmp_path / 'loss.png')


@pytest.mark.parametrize('K', [1, 3, 8])
def test_acceptance_is_drawn_for_any_draft_length(tmp_path, K):
  found = {
    'acceptance_by_position': [0.9**k for k in range(1, K)] + [None],
    'conditional_acceptance': [0.9] * (K - 1) + [None],
    'by_draft_length': [{'tau': 1 + 0.5 * k} for k in range(1, K + 1)],
  }
  path = tmp_path / 'new' / 'acceptance.png'
  figures.acceptance_figure(found, path)
  assert path.read_bytes().startswith(b'\x89PNG') and path.stat().st_size > 10_000
