"""Figures for people, as PNG."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

# Okabe & Ito's palette (2008), told apart with every common colour blindness.
_COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#56B4E9', '#E69F00', '#000000')


def loss_figure(metrics: Sequence[Mapping[str, Any]], path: str | os.PathLike) -> None:
  """Draws loss by depth over the steps as a PNG: training and held-out, and below them
  a task's exact answers and λ, where there are any.

  Raises:
    ValueError: No line has `loss_by_depth`.
  """
  from matplotlib.figure import Figure  # slow to import, and few commands draw

  lines = [row for row in metrics if row.get('loss_by_depth')]
  if not lines:
    raise ValueError(f'no loss_by_depth among {len(metrics)} lines: nothing to draw')
  train = [row for row in lines if row.get('split', 'train') == 'train']
  held = [row for row in lines if row.get('split') == 'heldout']
  weights: dict[str, list[tuple[int, float]]] = {}
  for row in train:
    for name, value in (row.get('lambda') or {}).items():
      weights.setdefault(name, []).append((row['step'], _number(value)))
  answers = [(r['step'], r['exact_match']) for r in held if 'exact_match' in r]
  heights = [5, *([2] if answers else []), *([1] if weights else [])]
  size = (7.2, 4.0 + 0.8 * (sum(heights) - 5))
  figure = Figure(figsize=size, dpi=160, layout='constrained')
  panels = figure.subplots(
    len(heights), sharex=True, height_ratios=heights, squeeze=False
  )[:, 0]
  top, bottom = panels[0], panels[-1]
  for axes in panels:
    axes.spines[['top', 'right']].set_visible(False)
    axes.grid(axis='y', color='0.9', linewidth=0.8)
    axes.set_axisbelow(True)

  ends, smoothed = [], []
  for depth in range(max(len(row['loss_by_depth']) for row in lines)):
    colour = _COLOURS[depth % len(_COLOURS)]
    steps, raw = _curve(train, depth)
    points, values = _curve(held, depth)
    smooth = _smooth(raw)
    smoothed += [*smooth, *values]
    top.plot(steps, raw, color=colour, alpha=0.22, linewidth=0.8)
    top.plot(steps, smooth, color=colour, linewidth=1.8)
    top.plot(
      points, values, 'o', color=colour, markersize=5, markeredgecolor='white', zorder=3
    )
    last = [y for y in (smooth if len(smooth) else values) if math.isfinite(y)][-1:]
    ends += [(last[0], depth, colour)] if last else []
  _limit(top, smoothed)
  _label_ends(top, ends)
  top.set_ylabel('loss (nats per token)')
  if held:
    notes = [('train, smoothed', '-', None), ('held out', '', 'o')]
    for text, style, marker in notes:
      top.plot([], [], linestyle=style, marker=marker, color='0.35', label=text)
    top.legend(frameon=False, loc='upper right')
  if answers:
    panels[1].plot(*zip(*answers, strict=True), 'o-', color=_COLOURS[0], markersize=4)
    panels[1].set(ylabel='exact answers', ylim=(0, 1.05))
  for index, (name, values) in enumerate(sorted(weights.items())):
    style = ('-', '--', ':', '-.')[index % 4]
    steps = zip(*values, strict=True)
    bottom.plot(*steps, style, color='0.25', label=name, drawstyle='steps-post')
  if weights:
    bottom.set_ylabel('λ', rotation=0, labelpad=12)
    top_weight = max(y for line in bottom.lines for y in np.ravel(line.get_ydata()))
    bottom.set_ylim(0, 1.25 * top_weight or 1)
    if len(weights) > 1:
      bottom.legend(frameon=False, fontsize='small', ncols=len(weights))
  top.margins(x=0.01)
  bottom.margins(x=0.01)
  bottom.set_xlabel('step')
  Path(path).parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, format='png')


def acceptance_figure(figures: Mapping[str, Any], path: str | os.PathLike) -> None:
  """Draws what `acceptance.measure` found: by position, and τ by draft length."""
  from matplotlib.figure import Figure

  alone = [_number(x) for x in figures['acceptance_by_position']]
  given = [_number(x) for x in figures['conditional_acceptance']]
  tau = [1.0, *(_number(own['tau']) for own in figures['by_draft_length'])]
  K = len(alone)
  figure = Figure(figsize=(7.2, 3.2), dpi=160, layout='constrained')
  left, right = figure.subplots(1, 2)
  for axes in (left, right):
    axes.spines[['top', 'right']].set_visible(False)
    axes.grid(axis='y', color='0.9', linewidth=0.8)
    axes.set_axisbelow(True)
  at = np.arange(1, K + 1)
  bars = left.bar(at, alone, width=0.6, color=_COLOURS[0], label='accepted so far')
  left.bar_label(bars, [f'{x:.2f}' for x in alone], padding=2, fontsize='small')
  left.plot(at, given, 'o', color=_COLOURS[1], label='given all before')
  left.set(xlabel='draft', ylabel='acceptance', ylim=(0, 1.25), xticks=at)
  left.set_yticks(np.linspace(0, 1, 6))
  left.legend(frameon=False, fontsize='small', loc='upper center', ncols=2)
  right.plot(np.arange(K + 1), tau, 'o-', color=_COLOURS[0])
  right.plot([0, K], [1, K + 1], ':', color='0.6')
  right.annotate(
    'all accepted',
    (K, K + 1),
    (-24, 0),
    textcoords='offset points',
    ha='right',
    va='top',
    color='0.4',
    fontsize='small',
  )
  for k, value in enumerate(tau):
    right.annotate(
      f'{value:.2f}',
      (k, value),
      (0, -12),
      textcoords='offset points',
      ha='center',
      fontsize='small',
    )
  right.set(xlabel='drafts a round', ylabel='acceptance length τ', xticks=range(K + 1))
  right.set_ylim(0, K + 1.4)
  Path(path).parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, format='png')


def bench_figure(
  groups: Sequence[Sequence[Mapping[str, Any]]], file: str | os.PathLike | IO[bytes]
) -> None:
  """Draws what `verdict.groups` holds, a row each: S by K, measured and predicted, and
  a request's time a token as it streams."""
  from matplotlib.figure import Figure

  size = (7.2, 0.2 + 2.9 * len(groups))
  figure = Figure(figsize=size, dpi=160, layout='constrained')
  for own, (left, right) in zip(
    groups, figure.subplots(len(groups), 2, squeeze=False), strict=True
  ):
    for axes in (left, right):
      axes.spines[['top', 'right']].set_visible(False)
      axes.grid(axis='y', color='0.9', linewidth=0.8)
      axes.set_axisbelow(True)
      axes.set_xticks(range(len(own)), [f['draft'] for f in own])
      axes.set(xlabel='drafts a round', xlim=(-0.6, len(own) - 0.4))
    _speedups(left, own)
    left.set_title(f'{own[0]["rule"]}, batch {own[0]["batch"]}', fontsize='medium')
    for n, (name, shade) in enumerate((('p50', 1.0), ('p95', 0.6), ('p99', 0.3))):
      heights = [1e3 * _number(f['streams'][0]['tpot'][name]) for f in own]
      places = np.arange(len(own)) + 0.27 * (n - 1)
      right.bar(places, heights, 0.25, color=_COLOURS[0], alpha=shade, label=name)
    right.set_ylabel('time a token (ms)')
    right.margins(y=0.25)
    right.legend(frameon=False, fontsize='small', ncols=3, loc='upper right')
  figure.savefig(file, format='png')


def _speedups(axes: Any, own: Sequence[Mapping[str, Any]]) -> None:
  drafted = [(n, f) for n, f in enumerate(own) if f['draft']]
  at, S = [n for n, _ in drafted], np.array([f['speedup'] for _, f in drafted])
  ends = [
    [abs(f['speedup'] - (f['speedup'] if f[k] is None else f[k])) for _, f in drafted]
    for k in ('speedup_low', 'speedup_high')
  ]
  predicted = [_number(f['predicted_speedup']) for _, f in drafted]
  axes.axhline(1, color='0.5', linewidth=1)
  axes.plot(at, predicted, '_', color=_COLOURS[1], markersize=22, label='predicted')
  axes.errorbar(at, S, ends, fmt='o', color=_COLOURS[0], capsize=4, label='measured')
  for n, value in zip(at, S, strict=True):
    axes.annotate(
      f'{value:.2f}', (n, value), (9, -3), textcoords='offset points', fontsize='small'
    )
  axes.plot(0, 1, 'o', color='0.5')
  axes.set_ylabel("speed, plain decoding's = 1")
  axes.set_ylim(0, 1.25 * max(1, *S, *(y for y in predicted if math.isfinite(y))))
  axes.legend(frameon=False, fontsize='small', loc='lower right')


def _number(value: Any) -> float:
  return math.nan if value is None else float(value)


def _curve(rows: Iterable[Mapping[str, Any]], depth: int) -> tuple[list, np.ndarray]:
  """(steps, losses) of one depth; null, which JSON has for NaN, leaves a gap."""
  points = [
    (row['step'], _number(row['loss_by_depth'][depth]))
    for row in rows
    if depth < len(row['loss_by_depth'])
  ]
  return [step for step, _ in points], np.array([loss for _, loss in points], float)


def _smooth(values: np.ndarray) -> np.ndarray:
  """Mean over a centred window of a fortieth of the curve, cut off at both ends."""
  half = len(values) // 80
  windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
  return np.array([np.mean(window) for window in windows])


def _limit(axes: Any, values: list[float]) -> None:
  """The first steps' loss, several times the rest, must not flatten the curves."""
  finite = np.array([y for y in values if math.isfinite(y)])
  if len(finite):
    low, high = float(finite.min()), float(np.quantile(finite, 0.95))
    pad = max(high - low, 1e-3) * 0.08
    axes.set_ylim(low - pad, high + pad)


def _label_ends(axes: Any, ends: list[tuple[float, int, str]]) -> None:
  """Names the curves at their right ends, pushed apart where they would overlap."""
  low, high = axes.get_ylim()
  gap, at = (high - low) * 0.06, -math.inf
  for y, depth, colour in sorted(ends):
    at = max(y, at + gap)
    text = 'next token' if depth == 0 else f'depth {depth}'
    axes.annotate(
      f'{text}  {y:.2f}',
      (1.0, at),
      xycoords=('axes fraction', 'data'),
      xytext=(6, 0),
      textcoords='offset points',
      va='center',
      color=colour,
      annotation_clip=False,
    )
