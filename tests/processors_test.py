"""Bias, minimum length and penalties: against loops in NumPy, plain decoding and exact
enumeration, with the history that each verified row would have."""

import dataclasses
import itertools
import math
from typing import Any

import jax
import numpy as np
import pytest
from decoding import V, build, on_mesh, row, score
from table_test import KINDS, NAMES, TABLE, decoder, p_value

from mtpjax import mesh
from mtpjax.drafters import sequential
from mtpjax.fields import ConfigError
from mtpjax.models import cache
from mtpjax.sampling import generate, processors, verify
from mtpjax.sampling.filters import Settings

INF = math.inf
OWN: list[dict[str, Any]] = [
  {},
  {'repetition_penalty': 1.3},
  {'repetition_penalty': 0.7, 'logit_bias': {1: 0.3}},
  {'presence_penalty': 1.1},
  {'frequency_penalty': 0.6, 'presence_penalty': -0.2},
  {'logit_bias': {0: 2.0, 2: -INF, 3: -1.5}},
  {'min_tokens': 9, 'stop': (1, 3)},
  {'min_tokens': 4, 'stop': (0, 1), 'repetition_penalty': 1.5, 'logit_bias': {3: 1.0}},
]


def processed(logits, own, prompt, new):
  """One row of logits after these tokens, in float64, one token at a time."""
  x = np.array(logits, np.float64)
  for token, bias in own.logit_bias:
    x[token] += bias
  for token in own.stop or ():
    if len(new) < own.min_tokens:
      x[token] = -INF
  for token in set(prompt) | set(new):
    x[token] *= own.repetition_penalty if x[token] <= 0 else 1 / own.repetition_penalty
  for token in set(new):
    x[token] -= own.presence_penalty
  for token in new:
    x[token] -= own.frequency_penalty
  return x


@pytest.mark.parametrize(
  'sizes', [{'fsdp': 1}, {'fsdp': 4, 'tensor': 2}], ids=['1', '8']
)
def test_every_row_is_processed_with_its_own_history(sizes):
  """Of any tree, which `before` says."""
  rng = np.random.default_rng(0)
  B, N, K, S, v = 16, 5, 4, 24, 6
  settings = [Settings(**OWN[b % len(OWN)]) for b in range(B)]
  prompt, new = rng.integers(1, 9, B), rng.integers(0, 12, B)
  tokens, drafts = (rng.integers(0, v, (B, n)).astype(np.int32) for n in (S, K))
  before = rng.random((B, N, K)) < 0.5
  logits = rng.normal(0, 2, (B, N, v)).astype(np.float32)
  logits[3, 2] = np.nan
  stop = np.array([(*(s.stop or ()), -1, -1)[:2] for s in settings], np.int32)

  @jax.jit
  def run(logits, tokens, prompt, length, drafts, before, stop, own):
    past = processors.history(tokens, prompt, length, own, v)
    return processors.processed(logits, own, stop, past, drafts, before)

  with on_mesh(**sizes):
    lengths = [
      jax.device_put(n.astype(np.int32), mesh.ids_B) for n in (prompt, prompt + new)
    ]
    deep = jax.P(mesh.BATCH, None, None)
    wide = [jax.device_put(x, mesh.whole_BT) for x in (tokens, drafts, stop)]
    out = run(
      jax.device_put(logits, deep),
      *(wide[0], *lengths, wide[1]),
      *(jax.device_put(before, deep), wide[2], processors.arrays(settings)),
    )
  out = np.asarray(out)
  for b, n in itertools.product(range(B), range(N)):
    text = [*tokens[b, prompt[b] : prompt[b] + new[b]], *drafts[b, before[b, n]]]
    wanted = processed(logits[b, n], settings[b], tokens[b, : prompt[b]], text)
    if b % len(OWN) == 0:
      assert out[b, n].tobytes() == logits[b, n].tobytes()
    np.testing.assert_allclose(out[b, n], wanted, rtol=1e-5, atol=1e-5, err_msg=str(b))
  assert not np.array_equal(out[1:8], logits[1:8])


# ------------------------------------------------------------------------ greedy rows

LENGTHS = np.resize([1, 2, 5, 8], 8)
BUDGET = 24


@pytest.fixture(scope='module')
def natural():
  """(graphdef, parameters, Decoder) of a drafter of its own mind."""
  with on_mesh(fsdp=1):
    graphdef, params = build(sequential.Config(depth=3, attend='rows'))
    return graphdef, params, generate.Decoder(graphdef, params, draft=4, chunk=3)


def plainly(graphdef, params, prompts, settings):
  """Greedy text without a cache or drafts, and the model's own log-probabilities."""

  @jax.jit
  def following(params, tokens, lengths):
    logits = score(graphdef, params, tokens)
    return cache.whole(cache.take(logits, lengths - 1, 1)[:, 0])[:, :V]

  B = len(prompts)
  tokens = np.zeros((B, 8 + BUDGET), np.int32)
  tokens[:, :8] = np.where(np.arange(8) < LENGTHS[:, None], prompts, 0)
  scores, live = np.zeros((B, BUDGET)), np.ones(B, bool)
  lengths = LENGTHS.astype(np.int32)
  for n in range(BUDGET):
    logits = np.asarray(
      following(
        params, jax.device_put(tokens, mesh.ids_BT), jax.device_put(lengths, mesh.ids_B)
      )
    )
    logprobs = jax.nn.log_softmax(logits, -1)
    for b in np.flatnonzero(live):
      text, P = tokens[b, : lengths[b]].tolist(), LENGTHS[b]
      best = int(processed(logits[b], settings[b], text[:P], text[P:]).argmax())
      tokens[b, lengths[b]], scores[b, n] = best, logprobs[b, best]
      live[b] = best not in (settings[b].stop or ())
    lengths = lengths + live
  ends = lengths - LENGTHS + ~live
  return [(tokens[b, LENGTHS[b] :][: ends[b]].tolist(), scores[b]) for b in range(B)]


@pytest.mark.parametrize('seed', range(3))
def test_greedy_text_is_plain_decodings_whatever_the_batch(natural, seed):
  graphdef, params, decoder = natural
  rng = np.random.default_rng(seed)
  prompts = rng.integers(0, V, (8, 8)).astype(np.int32)
  settings = [
    Settings(budget=BUDGET, draft=(b + seed) % 3 + 2, **own)
    for b, own in enumerate(OWN)
  ]
  with on_mesh(fsdp=1):
    wanted = plainly(graphdef, params, prompts, settings)
    out = decoder.generate(prompts, LENGTHS, settings)
    # The same prompt eight times, so that nothing compiles again.
    alone = [
      decoder.generate(prompts[[b] * 8], LENGTHS[[b] * 8], settings[b])
      for b in range(8)
    ]
  for b, (text, scores) in enumerate(wanted):
    n = out.lengths[b]
    assert out.tokens[b, :n].tolist() == text, OWN[b]
    np.testing.assert_allclose(out.logprobs[b, :n], scores[:n], atol=3e-5)
  for b, one in enumerate(alone):
    assert row(one, 0) == row(out, b)
  assert (np.array([stats.kept.sum() for stats in out.rows]) > 0).sum() >= 6


# ------------------------------------------------------------------------- drawn rows

PROMPT = np.array([[2, 1, 2]])
DRAWN: list[dict[str, Any]] = [
  {'repetition_penalty': 1.8},
  {'frequency_penalty': 0.9, 'logit_bias': {0: 1.0, 3: -0.7}},
  {'presence_penalty': 1.5, 'repetition_penalty': 0.6, 'top_k': 3},
  {'min_tokens': 2, 'stop': (0,), 'frequency_penalty': -0.5},
]
WARM = [Settings(temperature=1.0, budget=4, **own) for own in DRAWN]


def enumerated(table, own):
  """The probability of every text of four tokens after the prompt, [V, V, V, V]; past
  a stop it is filled up with the token 0."""
  found = np.zeros((4,) * 4)
  for text in itertools.product(range(4), repeat=4):
    p, prompt, done = 1.0, PROMPT[0].tolist(), False
    for n, token in enumerate(text):
      if done:
        p *= token == 0
        continue
      last = (prompt + list(text[:n]))[-1]
      x = processed(np.log(table[last]), own, prompt, list(text[:n]))
      if own.top_k:
        x = np.where(x >= np.sort(x)[-own.top_k], x, -INF)
      q = np.exp(x - x.max())
      p *= q[token] / q.sum()
      done = token in (own.stop or ())
    found[text] = p
  return found


@pytest.fixture
def one_device():
  with on_mesh(fsdp=1):
    yield


@pytest.mark.usefixtures('one_device')
@pytest.mark.parametrize(
  'rule',
  [pytest.param(r, marks=[pytest.mark.slow] * (r != 'block')) for r in verify.RULES],
)
def test_drawn_text_has_the_distribution_of_the_chain_with_its_history(rule):
  model = decoder(TABLE, list(KINDS.values()), rule, 2, teacher=NAMES.index('teacher'))
  rows = 8192
  prompts, lengths = np.repeat(PROMPT, rows, 0), np.full(rows, 3)
  each = [
    dataclasses.replace(WARM[b // 8 % 4], seed=b, draft=b // 32 % 2 + 1)
    for b in range(rows)
  ]
  out = generate.generate(model, prompts, lengths, each)
  low = {}
  for n, own in enumerate(WARM):
    texts = out.tokens[np.arange(rows) // 8 % 4 == n]
    seen = np.bincount(texts @ 4 ** np.arange(4)[::-1], minlength=256)
    p = enumerated(TABLE, own)
    assert p.sum() == pytest.approx(1)
    low[n] = p_value(seen[None], p.reshape(1, -1))
  assert min(low.values()) > 1e-4, low
  assert out.stats.kept.all()


@pytest.mark.usefixtures('one_device')
def test_drafts_are_drawn_with_the_history_too():
  """A drafter that knows the trunk's table is then always right."""
  model = decoder(TABLE, [KINDS['uniform']], 'rejection', 3, teacher=0)
  settings = [
    Settings(budget=20, temperature=float(b % 2), seed=b, **own)
    for b, own in enumerate(OWN)
  ]
  out = generate.generate(model, np.repeat(PROMPT, 8, 0), np.full(8, 3), settings)
  assert out.stats.proposed.all() and out.lengths[1] == 20
  for stats in out.rows:
    np.testing.assert_array_equal(stats.accepted, stats.proposed)


@pytest.mark.usefixtures('one_device')
def test_where_every_token_is_banned_a_row_fails_alone(natural):
  decoder = natural[2]  # whose table is padded: no padding is taken for a token
  table = natural[1]['trunk']['unembedding']
  assert len(table) > V
  banned: dict[str, Any] = {'logit_bias': dict.fromkeys(range(V), -INF)}
  late: dict[str, Any] = {
    'logit_bias': dict.fromkeys(range(4, V), -INF),
    'presence_penalty': 3.0,
  }
  early: dict[str, Any] = {'stop': (0, 1, 2, 3), 'min_tokens': 1, **late}
  for temperature in (0.0, 1.0):
    settings = [
      Settings(budget=9, temperature=temperature, **own)
      for own in (banned, late, early, {}) * 2
    ]
    out = decoder.generate(np.zeros((8, 3), int), np.full(8, 3), settings)
    assert out.finish_reason == ['failed', 'length', 'failed', 'length'] * 2
    assert out.lengths.tolist() == [0, 9, 0, 9] * 2
    assert set(out.tokens[1]) == {0, 1, 2, 3}


# ------------------------------------------------------------ what cannot be honoured


@pytest.mark.parametrize(
  'changes, parts',
  [
    ({'repetition_penalty': 0.0}, ('repetition_penalty = 0.0', 'use 1 for off')),
    ({'repetition_penalty': -1.0}, ('repetition_penalty = -1.0', 'use 1 for off')),
    ({'repetition_penalty': math.nan}, ('repetition_penalty = nan', 'within ±')),
    ({'presence_penalty': INF}, ('presence_penalty = inf', 'within ±')),
    ({'presence_penalty': '1'}, ("presence_penalty = '1'", 'is no number')),
    ({'frequency_penalty': True}, ('frequency_penalty = True', 'is no number')),
    ({'frequency_penalty': 1e7}, ('frequency_penalty', 'within ±1e+06')),
    ({'min_tokens': 65}, ('min_tokens = 65', 'the budget of 64', 'use 0 … 64')),
    ({'min_tokens': -1}, ('min_tokens = -1', 'use 0')),
    ({'min_tokens': 1.5}, ('min_tokens = 1.5', 'use an int')),
    ({'logit_bias': {V: 1.0}}, (f'logit_bias = {V}', f'use ids in 0 … {V - 1}')),
    ({'logit_bias': {-1: 1.0}}, ('logit_bias = -1', 'use ids in 0 …')),
    ({'logit_bias': {'a': 1.0}}, ("logit_bias = 'a'", 'use ids in 0 …')),
    ({'logit_bias': {1: math.nan}}, ('logit_bias = nan', '-inf to ban')),
    ({'logit_bias': {1: INF}}, ('logit_bias = inf', '-inf to ban')),
    ({'logit_bias': {1: '2'}}, ("logit_bias = '2'", 'is no number')),
    ({'logit_bias': ((1, 1.0), (1, 2.0))}, ('logit_bias = 1', 'two biases')),
    ({'logit_bias': 3}, ('logit_bias = 3', 'use a dict')),
    (
      {'logit_bias': dict.fromkeys(range(65), 1.0)},
      ("logit_bias = '65 tokens'", 'more than 64', 'use fewer'),
    ),
  ],
)
def test_settings_that_cannot_be_honoured(changes, parts, unchecked):
  with pytest.raises(ConfigError) as error:
    Settings(**changes).check(V)
  assert all(part in str(error.value) for part in parts), error.value


def test_settings_that_can(unchecked):
  for own in [*OWN, {'min_tokens': 64}, {'logit_bias': {0: 1, V - 1: -INF}}]:
    Settings(**own).check(V)
    hash(Settings(**own))
