"""What speculative decoding is worth here: figures of raw records, and what they say.

Pure functions. S is tokens per second over plain decoding's in the same repeat; its
median counts, between bounds that hold with 95 % each whatever the times' distribution.
It is predicted as T_base · τ / (T_draft + T_verify): T_base is a plain round, T_verify
one whose drafts cost nothing, T_draft what drafting adds to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from mtpjax.sampling.generate import LOSSY
from mtpjax.sampling.stats import Stats
from mtpjax.sampling.timing import (
  Batch,
  Request,
  Rounds,
  Variant,
  percentile,
  spread,
  tokens_per_second,
)

CONFIDENCE = 0.95


def bounds(values: Sequence[float]) -> tuple[float | None, float | None]:
  """Order statistics that the median is above, and below, each with 95 % confidence;
  None of fewer than five values."""
  n, ranked = len(values), sorted(values)
  below, rank = 0.5**n, 0  # how likely fewer than rank + 1 values are below the median
  while below <= 1 - CONFIDENCE:
    rank += 1
    below += math.comb(n, rank) * 0.5**n
  return (ranked[rank - 1], ranked[n - rank]) if rank else (None, None)


def figures(
  requests: Iterable[Request], batches: Iterable[Batch], rounds: Iterable[Rounds]
) -> list[dict[str, Any]]:
  """One entry a variant, plain ones too, those that differ in K alone together."""
  requests, batches, rounds = list(requests), list(batches), list(rounds)
  found = []
  variants = {b.variant for b in batches}
  for variant in sorted(variants, key=lambda v: (v.rule, v.batch, v.draft)):
    own = [b for b in batches if b.variant == variant]
    plain = Variant(0, variant.rule, variant.batch)
    speed, base = (_by_repeat(batches, v) for v in (variant, plain))
    stats = sum((b.stats for b in own[1:]), own[0].stats)
    kinds = {k: sum(b.positions[k] for b in own) for k in own[0].positions}
    found.append(
      {
        **vars(variant),
        'rows': max(b.rows for b in own),
        'slots': max(b.slots for b in own),
        'repeats': len(speed),
        'tokens_per_second': percentile(speed.values(), 50),
        **_speedup([speed[r] / base[r] for r in speed]),
        **_parts(rounds, variant, plain, stats),
        'tau': stats.tau,
        'acceptance_rate': stats.acceptance_rate,
        'acceptance_by_position': stats.acceptance_by_position,
        'delivered': stats.delivered,
        'proposed': int(stats.proposed.sum()),
        **kinds,
        'positions': sum(kinds.values()),
        'streams': _streams([r for r in requests if r.variant == variant]),
      }
    )
  return found


def _by_repeat(batches: Iterable[Batch], variant: Variant) -> dict[int, float]:
  own: dict[int, list[Batch]] = {}
  for b in batches:
    if b.variant == variant:
      own.setdefault(b.repeat, []).append(b)
  return {repeat: tokens_per_second(group) for repeat, group in own.items()}


def _speedup(ratios: list[float]) -> dict[str, Any]:
  low, high = bounds(ratios)
  return {'speedup': percentile(ratios, 50), 'speedup_low': low, 'speedup_high': high}


def _parts(
  rounds: list[Rounds], variant: Variant, plain: Variant, stats: Stats
) -> dict[str, Any]:
  """Medians in seconds, and what follows from them."""

  def median(who, part):
    each = [r.each for r in rounds if (r.variant, r.part) == (who, part)]
    return percentile(each, 50)

  base = median(plain, 'round')
  if variant == plain:
    return {'t_base': base}
  verify = median(variant, 'verify')
  draft = max(0.0, median(variant, 'round') - verify)
  tau = stats.tau
  return {
    't_base': base,
    't_draft': draft,
    't_verify': verify,
    'verification_overhead': verify / base - 1,
    'break_even_tau': (draft + verify) / base,
    'draft_cost': ((draft + verify) / base - 1) / variant.draft,
    'predicted_speedup': None if tau is None else base * tau / (draft + verify),
  }


def _streams(requests: list[Request]) -> list[dict[str, Any]]:
  return [
    {
      'concurrency': c,
      'ttft': spread(r.ttft for r in requests if r.concurrency == c),
      'tpot': spread(r.tpot for r in requests if r.concurrency == c),
    }
    for c in dict.fromkeys(r.concurrency for r in requests)
  ]


def judge(group: Sequence[dict[str, Any]]) -> dict[str, Any]:
  """Which K pays, of figures that differ in K alone; None where none does, and why."""
  drafted = [f for f in group if f['draft']]
  best = max(drafted, key=lambda f: f['speedup'])
  pays = [f for f in drafted if f['speedup_low'] is not None and f['speedup_low'] > 1]
  K, S = best['draft'], _range(best)
  found = {k: best[k] for k in ('rule', 'batch')} | {'best': K, 'pays': None}
  if pays:
    best = max(pays, key=lambda f: f['speedup'])
    others = [f['draft'] for f in pays if f is not best]
    more = f'; {_list(others)} too, but less' if others else ''
    said = f'K = {best["draft"]} pays: {_range(best)} of plain decoding{more}'
    return found | {'best': best['draft'], 'pays': best['draft'], 'said': said}
  if best['speedup_low'] is None:
    n = best['repeats']
    said = f'{n} repeats cannot show that a K pays; the best, K = {K}, is at {S}'
  elif any(f['speedup_high'] > 1 for f in drafted):
    said = f'no K is shown to pay: the best, K = {K}, is at {S} of plain decoding'
  else:
    said = f'no K pays here: the best, K = {K}, is at {S} of plain decoding'
  return found | {'said': f'{said}; {reason(best)}'}


def reason(figures: dict[str, Any]) -> str:
  """Why a K does not pay, from its parts."""
  cost, tau, K = figures['break_even_tau'], figures['tau'], figures['draft']
  if tau is None:
    return 'no round was needed: every text ended with its first token'
  if cost >= K + 1:
    more = figures['t_verify'] - figures['t_base']
    dear = 'drafting' if figures['t_draft'] > more else 'verification'
    return (
      f'{dear} is too dear: a round takes as long as {cost:.2f} plain ones and yields '
      f'{K + 1} tokens at most'
    )
  if tau < cost:
    return f'acceptance is too low: τ is {tau:.2f}, and it breaks even at {cost:.2f}'
  return (
    f'its rounds alone would ({figures["predicted_speedup"]:.2f}): the rest is reading '
    'prompts, rows that wait for the longest, and noise'
  )


def _range(figures: dict[str, Any]) -> str:
  low, high = figures['speedup_low'], figures['speedup_high']
  within = '' if low is None else f' ({low:.2f} … {high:.2f})'
  return f'{figures["speedup"]:.2f}{within}'


def _list(numbers: list[int]) -> str:
  return ' and '.join(f'K = {n}' for n in numbers)


def groups(figures: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
  """Those that differ in K alone together."""
  found: dict[tuple, list[dict[str, Any]]] = {}
  for own in figures:
    found.setdefault((own['rule'], own['batch']), []).append(own)
  return list(found.values())


def table(figures: Sequence[dict[str, Any]], verdicts: Sequence[dict[str, Any]]) -> str:
  """The same for people; times in milliseconds."""
  lines = []
  for group, verdict in zip(groups(figures), verdicts, strict=True):
    first = group[0]
    lines += [
      '',
      f'{first["rule"]}{" (lossy)" * (first["rule"] in LOSSY)}, '
      f'batch {first["batch"]}, {first["slots"]} slots, '
      f'{first["repeats"]} repeats; times in ms',
      ' K tokens/s     S  (95 % bounds)  predicted     τ   rate'
      '  T_base  T_draft  T_verify  overhead',
    ]
    for f in group:
      line = f'{f["draft"]:2} {f["tokens_per_second"]:8.1f}'
      if f['draft']:
        line += (
          f' {f["speedup"]:5.2f} {_interval(f):>15}'
          f' {_number(f["predicted_speedup"], ".2f"):>10}'
          f' {_number(f["tau"], ".2f"):>5} {_number(f["acceptance_rate"], ".3f"):>6}'
          f' {_ms(f["t_base"]):>7} {_ms(f["t_draft"]):>8} {_ms(f["t_verify"]):>9}'
          f' {f["verification_overhead"]:+9.0%}'
        )
      lines.append(line)
    lines += [
      ' K  in flight  TTFT p50    p95    p99  TPOT p50    p95    p99     n'
      '  delivered accepted proposed   padded',
    ]
    for f in group:
      for own in f['streams']:
        first_token, token = own['ttft'], own['tpot']
        lines.append(
          f'{f["draft"]:2} {own["concurrency"]:10}'
          f' {" ".join(_ms(first_token[p]).rjust(w) for p, w in _WIDTHS)}'
          f'  {" ".join(_ms(token[p]).rjust(w) for p, w in _WIDTHS)}'
          f' {first_token["n"]:5} {f["delivered"]:10} {f["accepted"]:8}'
          f' {f["proposed"]:8} {f["padded"]:8}'
        )
    lines.append(verdict['said'])
  return '\n'.join(lines[1:])


_WIDTHS = (('p50', 9), ('p95', 6), ('p99', 6))


def _interval(f: dict[str, Any]) -> str:
  low, high = f['speedup_low'], f['speedup_high']
  return '–' if low is None else f'({low:.2f} … {high:.2f})'


def _ms(seconds: float | None) -> str:
  return _number(seconds and 1000 * seconds, '.2f')


def _number(value: float | None, form: str) -> str:
  return '–' if value is None else format(value, form)
