"""The bench: its arithmetic from raw records, its verdict, simulated drafts, and
whether draws of another distribution are found out."""

import dataclasses
import functools
import json
import re

import numpy as np
import pytest
import scipy.stats
from decoding import V, build, on_mesh
from runs import assert_mistake, ended_well

from mtpjax import figures, two_sample, verdict
from mtpjax.drafters import parallel, sequential
from mtpjax.sampling import generate, simulated, timing, verify
from mtpjax.sampling.filters import Settings
from mtpjax.sampling.generate import Decoder
from mtpjax.sampling.stats import Stats
from mtpjax.sampling.sweep import Sweep, draws, greedy_texts, measured
from mtpjax.sampling.timing import Batch, Request, Rounds, Variant

PLAIN, TWO = Variant(0, 'greedy', 1), Variant(2, 'greedy', 1)


def test_percentiles_are_of_the_nearest_rank():
  found = timing.spread([0.010] * 99 + [1.0])
  assert found == pytest.approx(
    {'n': 100, 'mean': 0.0199, 'p50': 0.01, 'p95': 0.01, 'p99': 0.01, 'max': 1.0}
  )
  values = np.random.default_rng(0).permutation(np.arange(1.0, 21.0)).tolist()
  for p in (1, 5, 50, 95, 96, 100):
    below = [x for x in sorted(values) if sum(y <= x for y in values) * 100 >= p * 20]
    assert timing.percentile(values, p) == below[0]
  nothing = timing.spread([None])
  assert nothing['n'] == 0 and nothing['p99'] is None and nothing['mean'] is None


def test_a_request_waits_for_its_first_token_and_then_for_each_of_the_others():
  one = Request(TWO, 4, 1, 0, arrival=10.0, times=[13.0, 14.0, 14.0, 16.0])
  assert one.ttft == 3.0 and one.tpot == 1.0
  assert Request(TWO, 4, 1, 0, 10.0, [13.0]).tpot is None
  assert timing.to_json(one)['times'] == [3.0, 4.0, 4.0, 6.0]


@pytest.mark.parametrize('n', [1, 4, 5, 7, 8, 20])
def test_the_bounds_of_a_median_are_those_of_the_binomial(n):
  values = np.random.default_rng(n).normal(size=n).tolist()
  low, high = verdict.bounds(values)
  ranks = [j for j in range(1, n + 1) if scipy.stats.binom.cdf(j - 1, n, 0.5) <= 0.05]
  if not ranks:
    assert n < 5 and low is None and high is None
    return
  assert (low, high) == (sorted(values)[ranks[-1] - 1], sorted(values)[-ranks[-1]])


def records(tau=2.0, base=1.0, verify=1.2, draft=0.1, other=0.0, repeats=5):
  """Of plain decoding and of two drafts a round, exact: 12 tokens after the first,
  seconds of a round, and `other` seconds that rounds do not explain."""
  requests, batches, rounds = [], [], []
  count = round(12 / tau)
  right = round((tau - 1) * count)
  for repeat in range(1, repeats + 1):
    for variant, n, each in ((PLAIN, 12, base), (TWO, count, draft + verify)):
      K = variant.draft
      table = np.array([right, 0])[:K]
      asked = np.array([n, n])[:K]
      stats = Stats(n, table, table, asked, asked, int(asked.sum()), 13, 1)
      more = other if K else 0.0
      batches.append(Batch(variant, repeat, 1, 64, n, 0.0, n * each + more, stats))
      times = [0.5 + each * k for k in range(13)]
      requests.append(Request(variant, 1, repeat, 0, 0.0, times))
      rounds.append(Rounds(variant, repeat, 'round', 4, 4 * each))
    rounds.append(Rounds(TWO, repeat, 'verify', 4, 4 * verify))
  return requests, batches, rounds


def judged(**values):
  (group,) = verdict.groups(verdict.figures(*records(**values)))
  return group, verdict.judge(group)


def test_figures_follow_from_the_records():
  (plain, two), said = judged()
  assert plain['speedup'] == 1 and plain['t_base'] == pytest.approx(1.0)
  assert two['tau'] == 2 and two['t_draft'] == pytest.approx(0.1)
  assert two['verification_overhead'] == pytest.approx(0.2)
  assert two['predicted_speedup'] == pytest.approx(2 / 1.3)
  # All time is rounds, so that the prediction holds: 12 rounds of 1 s for 6 of 1.3.
  assert two['speedup'] == pytest.approx(12 / 7.8)
  assert said['pays'] == 2 and 'K = 2 pays: 1.54 (1.54 … 1.54)' in said['said']
  assert two['delivered'] == 5 * 13 and two['proposed'] == 5 * 12
  assert (two['last'], two['accepted'], two['refused'], two['padded']) == (
    30,
    30,
    30,
    0,
  )
  assert two['streams'][0]['tpot']['n'] == 5
  assert two['streams'][0]['tpot']['p50'] == pytest.approx(1.3)


@pytest.mark.parametrize(
  'values, said',
  [
    ({'tau': 1.0}, 'acceptance is too low: τ is 1.00, and it breaks even at 1.30'),
    ({'tau': 1.0, 'verify': 4.0}, 'verification is too dear: a round takes as long'),
    ({'tau': 1.0, 'draft': 4.0}, 'drafting is too dear: a round takes as long as 5.20'),
    ({'other': 9.0}, 'its rounds alone would (1.54)'),
  ],
)
def test_no_k_pays_and_why(values, said):
  _, found = judged(**values)
  assert found['pays'] is None and found['best'] == 2
  assert found['said'].startswith('no K pays here: the best, K = 2, is at 0.')
  assert said in found['said']


def test_doubt_is_no_gain():
  _, few = judged(repeats=4)
  assert few['pays'] is None and '4 repeats cannot show' in few['said']
  requests, batches, rounds = records()
  slow = next(b for b in batches if b.variant == TWO)
  slow.decode *= 2  # one of five repeats
  (group,) = verdict.groups(verdict.figures(requests, batches, rounds))
  found = verdict.judge(group)
  assert found['pays'] is None and 'no K is shown to pay' in found['said']
  assert group[1]['speedup'] > 1.5 and group[1]['speedup_low'] < 1


def test_what_pays_more_is_named_first():
  group, _ = judged()
  better = {**group[1], 'draft': 3, 'speedup': 1.7}
  worse = {**group[1], 'draft': 4, 'speedup': 1.1, 'speedup_low': 0.9}
  found = verdict.judge([*group, better, worse])
  assert found['pays'] == 3 and found['said'].endswith('; K = 2 too, but less')


def test_homogeneity_is_pearsons_with_rare_cells_pooled():
  rng = np.random.default_rng(0)
  ours, theirs = rng.integers(0, 6, 300), rng.integers(0, 6, 500)
  table = np.stack([np.bincount(x, minlength=6) for x in (ours, theirs)])
  chi2, p, dof, _ = map(np.asarray, scipy.stats.chi2_contingency(table, False))
  found = two_sample.homogeneity(ours, theirs)
  assert found == pytest.approx((float(chi2), int(dof)))
  assert two_sample.p_value(*found) == pytest.approx(float(p), rel=1e-4)
  # Ten cells of one draw or two become one.
  rare = np.arange(10, 20)
  pooled = two_sample.homogeneity(
    np.concatenate([ours, rare]), np.concatenate([theirs, rare])
  )
  table = np.concatenate([table, [[10], [10]]], 1)
  chi2, _, dof, _ = map(np.asarray, scipy.stats.chi2_contingency(table, False))
  assert pooled == pytest.approx((float(chi2), int(dof)))
  assert two_sample.homogeneity(rare, rare) == (0.0, 0)  # nothing to tell apart
  assert two_sample.p_value(0.0, 0) == 1.0


def test_equal_draws_are_called_different_as_rarely_as_p_says():
  rng = np.random.default_rng(1)
  p = rng.dirichlet(np.ones(30))
  found = [
    two_sample.compare(*([rng.choice(30, (200, 3), p=p)] for _ in range(2)))['p']
    for _ in range(100)
  ]
  assert np.mean(np.array(found) < 0.05) < 0.1  # 5 %, and two standard errors
  assert min(found) > two_sample.DOUBT / 10


def test_pairs_tell_what_single_tokens_do_not():
  rng = np.random.default_rng(2)
  a = rng.integers(0, 4, (400, 2))
  b = np.repeat(rng.integers(0, 4, (400, 1)), 2, 1)  # alike one by one
  found = two_sample.compare([a], [b])
  assert not found['same']
  assert [t['what'] for t in found['tests'] if t['p'] < 1e-6] == ['tokens 1, 2']


PROMPTS = [np.arange(n) % V for n in (3, 5, 4, 9)]
DRAFTER = sequential.Config(depth=3, attend='rows')


@functools.cache
def decoder(mesh_sizes=(('fsdp', 1),)):
  with on_mesh(**dict(mesh_sizes)):
    return Decoder(*build(DRAFTER), draft=0, longest=64)


def test_simulated_drafts_are_right_as_often_as_asked_and_the_text_stays():
  accept = 0.8
  sweep = Sweep([2], ['rejection'], [2], [4], tokens=40, accept=accept)
  found = sweep.decoders(decoder(), PROMPTS)
  plain, two = (
    greedy_texts(own, variant, PROMPTS, sweep) for variant, (own, _) in found.items()
  )
  right = simulated.right_drafts(accept, (4, 9 + 40 + 3), 2)
  for ours, theirs in zip(plain, two, strict=True):
    np.testing.assert_array_equal(ours.tokens[:, :40], theirs.tokens[:, :40])
  for row, stats in enumerate(own for out in two for own in out.rows):
    given, taken, rounds = 1, 0, 0
    while given < 40:  # the last committed token has no features yet
      run = min(right[row, len(PROMPTS[row]) + given - 1], 40 - given - 1)
      given, taken, rounds = given + run + 1, taken + run, rounds + 1
    assert (stats.accepted.sum(), stats.rounds) == (taken, rounds)
  many = simulated.right_drafts(accept, (100, 1000), 3)
  assert np.mean(many + 1) == pytest.approx(1 + 0.8 + 0.64 + 0.512, abs=0.015)


@pytest.mark.slow
def test_simulated_drafts_on_a_mesh_and_with_heads_that_have_nothing_to_lay_out():
  with on_mesh(fsdp=2, tensor=2):
    config = parallel.Config(depth=2)
    plain = Decoder(*build(config), draft=0, longest=64)
  sweep = Sweep([2], ['block'], [4], [4], tokens=24, accept=1.0)
  outs = [
    greedy_texts(own, variant, PROMPTS, sweep)
    for variant, (own, _) in sweep.decoders(plain, PROMPTS).items()
  ]
  np.testing.assert_array_equal(outs[0][0].tokens, outs[1][0].tokens[:, :24])
  assert outs[1][0].stats.acceptance_rate == 1.0


def swept(sweep):
  decoders = sweep.decoders(decoder(), PROMPTS)
  kinds = {Request: [], Batch: [], Rounds: []}
  for found in measured(decoders, sweep.requests(PROMPTS), sweep):
    kinds[type(found[0])] += [one for one in found if one.repeat]
  return verdict.figures(*kinds.values()), kinds


def test_a_drafter_that_is_always_wrong_pays_for_no_k():
  sweep = Sweep([2], ['rejection'], [2], [4], tokens=40, repeats=5, accept=0.0)
  (plain, two), kinds = swept(sweep)
  assert two['accepted'] == 0 and two['tau'] == 1 and two['acceptance_rate'] == 0
  assert two['refused'] == two['proposed'] > 0
  found = verdict.judge([plain, two])
  assert found['pays'] is None and found['said'].startswith('no K ')

  for b in kinds[Batch]:
    kept, asked = int(b.stats.kept.sum()), int(b.stats.proposed.sum())
    K, positions = b.variant.draft, b.positions
    assert b.rows * b.rounds * (K + 1) == sum(positions.values())
    assert positions['refused'] == asked - kept and positions['last'] == 2 * 39
    # Near the budget's end fewer are asked for.
    assert positions['padded'] == (2 * 39 * 2 - asked if K else 0) >= 0
    assert b.stats.delivered == 80


def test_rows_that_are_done_and_rows_of_no_prompt_are_padding():
  sweep = Sweep([2], ['rejection'], [4], [3], tokens=40)
  decoders = sweep.decoders(decoder(), PROMPTS)
  one = Variant(0, 'greedy', 4)
  short = [Settings(9, stop=()), Settings(5, stop=()), Settings(3, stop=())]
  ((found, _),) = timing.in_the_loop(decoders[one][0], one, PROMPTS[:3], short, 0)
  assert (found.rows, found.rounds) == (4, 8)
  last = 8 + 4 + 2
  want = {'last': last, 'accepted': 0, 'refused': 0, 'padded': 4 * 8 - last}
  assert found.positions == want


def test_requests_in_flight_wait_for_those_before():
  one = Variant(0, 'greedy', 2)
  settings = [Settings(12, stop=())] * 4
  found = timing.as_stream(decoder(), one, PROMPTS, settings, 4, 0)
  assert len({r.arrival for r in found}) == 1
  for r in found:
    assert len(r.times) == 12 and r.times == sorted(r.times)
  a, b, c, d = (r.times for r in found)
  assert a[0] == b[0] and a[-1] < c[0] == d[0]
  apart = timing.as_stream(decoder(), one, PROMPTS, settings, 2, 0)
  assert apart[2].arrival > apart[0].times[-1]


def biased(p, tokens, q, count, seed, turn):
  """Accepts whatever is proposed."""
  own = verify.sample_and_match(p, tokens, q, count, seed, turn)
  return dataclasses.replace(own, accepted=count)


@pytest.mark.parametrize(
  'rule, same',
  [pytest.param('rejection', True, marks=pytest.mark.slow), ('biased', False)],
)
def test_a_rule_with_another_distribution_is_found_out(monkeypatch, rule, same):
  monkeypatch.setitem(verify.RULES, 'biased', biased)
  monkeypatch.setattr(generate, 'RULES', tuple(verify.RULES))
  settings = Settings(4, temperature=1.0)
  variant = Variant(2, rule, 2)
  other = Settings(4, temperature=1.0, seed=2**31)
  ours = draws(decoder(), Variant(0, rule, 2), PROMPTS, settings, 256)
  theirs = draws(decoder().over(2, rule), variant, PROMPTS, other, 256)
  found = two_sample.compare(ours, theirs)
  assert found['n'] == [256, 256] and len(found['tests']) == 7
  assert found['same'] is same, found
  first = next(t for t in found['tests'] if t['what'] == 'token 1')
  assert first['p'] > 0.01  # the prefill's is drawn in one way only


@pytest.fixture(scope='module')
def bench(place, train, straight):
  def run(*args, **env):
    start = f'--checkpoint={straight}', '--tokens=12', '--config.decode.prompts=4'
    return train('', *start, *args, command='bench', **env)

  return run


def test_the_command_says_what_its_records_say(bench, place):
  args = '--batches=2', '--draft=1,2', '--concurrency=4', '--samples=32'
  done = ended_well(bench(*args, f'--json={place}/bench/out.json'))
  found = json.loads((place / 'bench/out.json').read_text())
  raw = found['records']
  assert (place / 'bench/out.png').read_bytes().startswith(b'\x89PNG')
  assert found['compiled_while_measuring'] == 0 and len(found['compilations']) >= 6
  assert found['conditions']['mesh']['fsdp'] == 1 and found['sweep']['requests'] == 4
  assert all(own['parity'] for own in found['parity'])
  assert 'greedy: all texts equal plain decoding' in done.stdout

  def speed(repeat, K):
    own = [b for b in raw['batches'] if (b['repeat'], b['draft']) == (repeat, K)]
    assert len(own) == 2
    seconds = sum(b['prefill'] + b['decode'] for b in own)
    return sum(b['stats']['delivered'] for b in own) / seconds

  def each(K, part):
    own = [r for r in raw['rounds'] if (r['draft'], r['part']) == (K, part)]
    assert len(own) == 10
    return sorted(r['seconds'] / r['count'] for r in own)[4]

  assert [own['draft'] for own in found['figures']] == [0, 1, 2]
  for own in found['figures']:
    K = own['draft']
    assert own['tokens_per_second'] == pytest.approx(
      sorted(speed(r, K) for r in range(1, 6))[2]
    )
    ratios = sorted(speed(r, K) / speed(r, 0) for r in range(1, 6))
    assert own['speedup'] == pytest.approx(ratios[2])
    assert own['speedup_low'] == pytest.approx(ratios[0])
    requests = [r['times'] for r in raw['requests'] if r['draft'] == K]
    assert len(requests) == 20
    (stream,) = own['streams']
    assert stream['concurrency'] == 4
    firsts = sorted(times[0] for times in requests)
    tokens = sorted((t[-1] - t[0]) / (len(t) - 1) for t in requests)
    for name, rank in (('p50', 10), ('p95', 19), ('p99', 20)):
      assert stream['ttft'][name] == pytest.approx(firsts[rank - 1], abs=1e-6)
      assert stream['tpot'][name] == pytest.approx(tokens[rank - 1], abs=1e-6)
    row = rf'^ *{K} +{own["tokens_per_second"]:.1f}\b'
    assert re.search(row, done.stdout, re.MULTILINE), done.stdout
    if not K:
      continue
    stats = [b['stats'] for b in raw['batches'] if b['draft'] == K]
    rounds = sum(s['rounds'] for s in stats)
    tau = 1 + sum(sum(s['accepted']) for s in stats) / rounds
    assert own['tau'] == pytest.approx(tau)
    draft = max(0, each(K, 'round') - each(K, 'verify'))
    cost = (draft + each(K, 'verify')) / each(0, 'round')
    assert own['predicted_speedup'] == pytest.approx(tau / cost)
    assert own['proposed'] == sum(sum(s['proposed']) for s in stats)
  assert found['verdicts'][0]['said'] in done.stdout


@pytest.mark.slow
def test_a_mesh_rules_and_a_drafter_that_is_always_wrong(bench, place):
  args = '--repeats=1', '--config.mesh.tensor=2', f'--json={place}/mesh.json'
  rules = '--temperature=1', '--rules=rejection,block', '--samples=0'
  ended_well(bench(*args, *rules, devices=4))
  found = json.loads((place / 'mesh.json').read_text())
  assert [own['rule'] for own in found['verdicts']] == ['rejection', 'block']
  assert found['conditions']['mesh']['tensor'] == 2
  done = ended_well(bench('--accept=0', f'--json={place}/wrong.json'))
  found = json.loads((place / 'wrong.json').read_text())
  assert found['verdicts'][0]['pays'] is None and 'no K ' in done.stdout
  assert all(own['tau'] == 1 for own in found['figures'][1:])


@pytest.mark.parametrize(
  'args, said',
  [
    (('--accept=1.5',), ('--accept = 1.5', 'no probability')),
    (('--accept=.5', '--temperature=1'), ('--accept', 'greedy')),
    (('--batches=0',), ("--batches = '0'", 'whole numbers from 1')),
    (('--rules=hope',), ('--rules', 'hope', 'rejection')),
    (('--draft=3',), ('--draft = 3', '1 … 2')),
    (('--tokens=3',), ('--tokens = 3', 'at least 4')),
    (('--prompts=nowhere',), ('--prompts', 'cannot be read')),
    (('--config.decode.prompts=0',), ('--prompts', 'no held-out text')),
  ],
)
@pytest.mark.slow
def test_mistakes_are_one_line(bench, args, said):
  assert_mistake(bench(*args), *said)


def test_a_run_that_drafts_nothing_is_refused(place, train):
  ended_well(train('plain', variant='plain'))
  done = train('', '--checkpoint=plain', command='bench')
  assert_mistake(done, '--checkpoint', 'nothing drafts')


def test_the_figure_draws_what_it_was_given(tmp_path, monkeypatch):
  from matplotlib.figure import Figure

  drawn = []
  monkeypatch.setattr(Figure, 'savefig', lambda self, *_, **__: drawn.append(self))
  group, _ = judged()
  figures.bench_figure([group, group], tmp_path / 'bench.png')
  left, right, *_ = drawn[0].axes
  assert len(drawn[0].axes) == 4
  (measured_S,) = [c for c in left.containers if c.get_label() == 'measured']
  assert measured_S[0].get_ydata() == pytest.approx([12 / 7.8])
  (predicted,) = [x for x in left.lines if x.get_label() == 'predicted']
  assert list(predicted.get_ydata()) == pytest.approx([2 / 1.3])
  assert [bar.get_height() for bar in right.containers[0]] == pytest.approx([1e3, 1300])


def test_a_run_without_rounds_has_a_reason():
  parts = {'break_even_tau': 2.0, 'tau': None, 'draft': 2}
  assert 'ended with its first token' in verdict.reason(parts)
