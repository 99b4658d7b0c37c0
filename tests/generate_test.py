"""What `generate` hands out is plain decoding's text, whatever else is in the batch."""

import dataclasses
import itertools
import math
from typing import Any, cast

import jax
import numpy as np
import pytest
from decoding import Forcing, V, build, on_mesh, plainly, row, score, scripted

from mtpjax import mesh
from mtpjax.drafters import parallel, residual, sequential
from mtpjax.fields import ConfigError
from mtpjax.sampling import generate
from mtpjax.sampling.filters import Settings

K = 6  # drafts of a script
NEW = 63
LENGTHS = np.resize([1, 2, 5, 8], 64)
PROMPTS = np.resize(np.random.default_rng(0).integers(0, V, (4, 8)), (64, 8))
# Right drafts by round: four rows, one of each prompt, with the same script.
RIGHT = np.random.default_rng(1).integers(0, K + 1, (64, 128))
RIGHT[0:4], RIGHT[4:8] = K, 0
RIGHT[8:12] = np.resize([0, K, 1, K, 0], 128)
RIGHT[12:16] = np.resize([3, 0, 1, 3], 128)


@pytest.fixture(scope='module')
def forced():
  """(Decoder, text, log-probabilities) of 64 rows whose drafts are written down."""
  with on_mesh(fsdp=1):
    graphdef, params = build(Forcing(depth=K))
    text, scores, _ = plainly(graphdef, params, PROMPTS, LENGTHS, NEW)
    at = LENGTHS[:, None] + np.arange(NEW)[None]
    new, scores = (np.take_along_axis(x, at, 1) for x in (text, scores))
    return generate.Decoder(graphdef, scripted(params, text, RIGHT)), new, scores


def replay(right, draft, budget, end):
  """What a row with these right drafts by round comes to, `end` tokens long.

  Returns: which tokens are drafts, and (proposed, accepted, kept) of each round.
  """
  drafted, rounds = [False], []
  while len(drafted) < end:
    count = min(draft, budget - len(drafted) - 1)
    accepted = min(int(right[len(rounds)]), count)
    rounds.append((count, accepted, min(accepted, end - len(drafted))))
    drafted += [True] * accepted + [False]
  return drafted[:end], rounds


def check_rows(out, settings, new, scores):
  """All 64 rows against the plain text and a replay of their scripts."""
  for b, own in enumerate(settings):
    wanted = new[b, : own.budget].tolist()
    first = [wanted.index(t) for t in own.stop or () if t in wanted]
    end = min([own.budget, *(n + 1 for n in first)])
    assert out.lengths[b] == end
    assert out.finish_reason[b] == ('stop' if first else 'length')
    assert out.tokens[b, :end].tolist() == wanted[:end]
    np.testing.assert_allclose(out.logprobs[b, :end], scores[b, :end], atol=2e-5)
    assert not out.tokens[b, end:].any() and not out.drafted[b, end:].any()
    drafts, rounds = replay(
      RIGHT[b], K if own.draft is None else own.draft, own.budget, end
    )
    assert out.drafted[b, :end].tolist() == drafts
    stats, reach = out.rows[b], np.arange(1, K + 1)[None]
    proposed, accepted, kept = np.array(rounds or np.zeros((0, 3)), int).T[..., None]
    assert stats.rounds == len(rounds) and stats.delivered == end
    assert stats.accepted.tolist() == (reach <= accepted).sum(0).tolist()
    assert stats.kept.tolist() == (reach <= kept).sum(0).tolist()
    assert stats.proposed.tolist() == (reach <= proposed).sum(0).tolist()
    reached = reach <= np.minimum(accepted + 1, proposed)
    assert stats.reached.tolist() == reached.sum(0).tolist()
    assert stats.kept.sum() == sum(drafts)
  assert out.stats.delivered == out.lengths.sum()


@pytest.mark.parametrize('draft', range(K + 1))
def test_stops_and_budgets_cut_at_the_first_of_them(draft, forced):
  decoder, new, scores = forced
  for index in range(10):
    settings = [
      Settings(
        budget=max(0, index - 2 + b % 7),  # before the stop, with it, after it
        stop=(int(new[b, index]), *([int(new[b, 12])] if b % 2 else [])),
        draft=draft,
      )
      for b in range(64)
    ]
    with on_mesh(fsdp=1):
      out = generate.generate(decoder, PROMPTS, LENGTHS, settings)
    check_rows(out, settings, new, scores)


@pytest.mark.parametrize('draft', [4, None])
def test_budgets_are_met_exactly(draft, forced):
  decoder, new, scores = forced
  for budgets in ([0, 1, 2, 3, 4, 5, 9], [1, 7], 64 - LENGTHS):
    settings = [Settings(budget=int(n), draft=draft) for n in np.resize(budgets, 64)]
    with on_mesh(fsdp=1):  # 64 - LENGTHS fills the buffers to the last slot
      out = decoder.generate(PROMPTS, LENGTHS, settings)
    check_rows(out, settings, new, scores)
  assert set(decoder.compilations) == {('decode', 64, 64, K)}


def test_measures_of_the_worked_example(forced):
  decoder, new, scores = forced
  settings = [Settings(budget=12, draft=3)] * 64
  with on_mesh(fsdp=1):
    out = decoder.generate(PROMPTS, LENGTHS, settings)
  check_rows(out, settings, new, scores)
  for stats in out.rows[12:16]:  # rounds that accept 3, 0, 1 and 3
    assert stats.rounds == 4 and stats.delivered == 12 and stats.passes == 5
    assert stats.acceptance_rate == pytest.approx(7 / 12) and stats.tau == 2.75
    assert stats.acceptance_by_position[:3] == [0.75, 0.5, 0.5]
    assert stats.conditional_acceptance[:3] == pytest.approx([0.75, 2 / 3, 1.0])
    assert stats.tokens_per_pass == pytest.approx(12 / 5)
    assert stats.acceptance_by_position[3:] == [None] * (K - 3)


# --- A drafter of its own mind

MIXED = [
  Settings(budget=40),
  Settings(budget=40, temperature=1.0, seed=1),
  Settings(budget=33, temperature=0.7, top_k=5, seed=2, repetition_penalty=1.1),
  Settings(budget=40, temperature=1.3, top_p=0.9, seed=3, draft=2),
  Settings(budget=1, temperature=1.0, seed=4),
  Settings(budget=40, temperature=1.0, min_p=0.1, seed=5, stop=(3, 4)),
  Settings(budget=37, draft=1, frequency_penalty=0.2, logit_bias={3: 0.5}),
  Settings(budget=40, temperature=1.0, seed=7, draft=0),
]
ROWS = PROMPTS[:8], LENGTHS[:8]


@pytest.fixture(scope='module')
def natural():
  """(graphdef, parameters, Decoder), one draft beyond the depth it was made for."""
  with on_mesh(fsdp=1):
    drafter = sequential.Config(depth=3, attend='rows')
    graphdef, params = build(drafter, windows=(6, 0))
    return graphdef, params, generate.Decoder(graphdef, params, draft=4, chunk=3)


def test_greedy_text_is_plain_decodings_text(natural):
  graphdef, params, decoder = natural
  settings = [Settings(budget=40, draft=b % 5) for b in range(8)]
  with on_mesh(fsdp=1):
    text, _, _ = plainly(graphdef, params, *ROWS, 40)
    out = decoder.generate(*ROWS, settings)
  for b, n in enumerate(LENGTHS[:8]):
    assert out.tokens[b].tolist() == text[b, n : n + 40].tolist()
  assert out.stats.tau > 1.3


@pytest.mark.parametrize(
  'drafter',
  [
    parallel.Config(depth=3, form='causal'),
    parallel.Config(depth=3, form='anticausal'),
    pytest.param(residual.Config(depth=3), marks=pytest.mark.slow),
    residual.Config(depth=3, form='medusa'),
  ],
  ids=lambda own: f'{own.conventions()["kind"]} {own.form}',
)
def test_every_heads_greedy_text_is_plain_decodings_at_every_length(drafter):
  """And a sampled row does not depend on the greedy ones beside it."""
  settings = [Settings(budget=24, draft=b % 4, seed=b) for b in range(8)]
  settings[5] = dataclasses.replace(settings[5], temperature=1.0)
  with on_mesh(fsdp=1):
    # Anticausal heads each read a layer of their own.
    graphdef, params = build(drafter, layers=4 if drafter.form == 'anticausal' else 2)
    text, _, _ = plainly(graphdef, params, *ROWS, 24)
    decoder = generate.Decoder(graphdef, params, chunk=3)
    out = decoder.generate(*ROWS, settings)
    # The last rows first: nothing compiles again.
    turned = decoder.generate(ROWS[0][::-1], LENGTHS[:8][::-1], settings[::-1])
  assert decoder.draft == 3
  for b, n in enumerate(LENGTHS[:8]):
    if b != 5:
      assert out.tokens[b].tolist() == text[b, n : n + 24].tolist()
    assert row(turned, 7 - b) == row(out, b)
  assert all(out.rows[b].proposed.any() == (b % 4 > 0) for b in range(8))
  assert out.stats.kept.any()


@pytest.mark.parametrize(
  'sizes', [{'fsdp': 1}, {'fsdp': 4, 'tensor': 2}], ids=['1', '8']
)
def test_learned_positions_decode_as_they_are_trained_up_to_the_last_one(sizes):
  drafter = sequential.Config(depth=2)
  longest = int(LENGTHS[:8].max()) + 24
  with on_mesh(fsdp=1):
    graphdef, params = build(drafter, learned_positions=longest)
    text, _, _ = plainly(graphdef, params, *ROWS, 24)
  with on_mesh(**sizes):
    graphdef, params = build(drafter, learned_positions=longest)
    decoder = generate.Decoder(graphdef, params, chunk=3)
    settings = [Settings(budget=24, draft=b % 3) for b in range(8)]
    out = decoder.generate(*ROWS, settings)
    for b, n in enumerate(LENGTHS[:8]):
      assert out.tokens[b].tolist() == text[b, n : n + 24].tolist()
    assert out.stats.kept.any() and decoder.longest == longest
    with pytest.raises(ConfigError, match=f'does not fit longest={longest}'):
      decoder.generate(*ROWS, Settings(budget=25))


def test_padding_of_the_vocabulary_is_never_sampled_or_drafted(natural):
  """Though it would win every time."""
  _, params, decoder = natural
  table = np.array(params['trunk']['unembedding'])
  assert len(table) > V
  table[V:] = 100 * np.sign(table[:1])
  loud = {**params, 'trunk': {**params['trunk'], 'unembedding': jax.numpy.array(table)}}
  with on_mesh(fsdp=1):
    placed = jax.device_put(loud, jax.tree.map(lambda x: x.sharding, params))
    decoder.take(placed)
    out = decoder.generate(*ROWS, MIXED)
    decoder.take(params)
    same = decoder.generate(*ROWS, MIXED)
  assert out.tokens.max() < V
  np.testing.assert_array_equal(out.tokens, same.tokens)
  np.testing.assert_array_equal(out.logprobs, same.logprobs)


def test_a_row_does_not_depend_on_its_batch(natural):
  decoder = natural[2]
  prompts, lengths = ROWS
  with on_mesh(fsdp=1):
    together = decoder.generate(prompts, lengths, MIXED)
    assert together.stats.tau > 1.3
    order = np.array([6, 2, 0, 5, 3])  # and three rows that fill the bucket up
    some = decoder.generate(prompts[order], lengths[order], [MIXED[b] for b in order])
    for n, b in enumerate(order):
      assert row(some, n) == row(together, b)
    for b in range(8):
      alone = decoder.generate(prompts[b : b + 1], lengths[b : b + 1], MIXED[b])
      assert row(alone, 0) == row(together, b)


def test_padding_on_the_left_is_padding_on_the_right(natural):
  decoder = natural[2]
  prompts, lengths = ROWS
  left = np.stack([np.roll(p, 8 - n) for p, n in zip(prompts, lengths, strict=True)])
  with on_mesh(fsdp=1):
    right = decoder.generate(prompts, lengths, MIXED)
    out = decoder.generate(left, lengths, MIXED, padding='left')
  assert [row(out, b) for b in range(8)] == [row(right, b) for b in range(8)]


def test_logprobs_are_the_models_own_and_drafted_marks_the_accepted(natural):
  graphdef, params, decoder = natural
  prompts, lengths = ROWS
  with on_mesh(fsdp=1):
    out = decoder.generate(prompts, lengths, MIXED)
    tokens = np.zeros((8, 48), np.int32)
    for b, n in enumerate(lengths):
      text = [*prompts[b, :n], *out.tokens[b, : out.lengths[b]]]
      tokens[b, : len(text)] = text
    scores = jax.jit(lambda p, t: jax.nn.log_softmax(score(graphdef, p, t), -1))
    wanted = np.asarray(scores(params, jax.device_put(tokens, mesh.ids_BT)))
  seen = set()
  for b, n in enumerate(lengths):
    for i in range(out.lengths[b]):
      one = wanted[b, n - 1 + i, out.tokens[b, i]]
      assert out.logprobs[b, i] == pytest.approx(one, abs=3e-5)
      seen.add((b, bool(out.drafted[b, i])))
    assert out.drafted[b].sum() == out.rows[b].kept.sum()
  # Accepted drafts and corrections of greedy, sampled and filtered rows alike.
  assert seen >= {(b, drafted) for b in (0, 1, 2, 3, 5) for drafted in (False, True)}


def test_the_last_of_a_stream_is_the_whole(natural):
  decoder = natural[2]
  prompts, lengths = PROMPTS[:7], LENGTHS[:7]  # and a row that fills the bucket up
  with on_mesh(fsdp=1):
    whole = decoder.generate(prompts, lengths, MIXED[:7])
    parts = list(decoder.stream(prompts, lengths, MIXED[:7]))
  assert [row(parts[-1], b) for b in range(7)] == [row(whole, b) for b in range(7)]
  np.testing.assert_allclose(parts[-1].logprobs, whole.logprobs, atol=2e-5)
  for part, then in itertools.pairwise(parts):
    for b in range(7):
      n = part.lengths[b]
      going_on = part.finish_reason[b] is None
      assert (
        n < then.lengths[b] if going_on else n == then.lengths[b] == whole.lengths[b]
      )
      for name in ('tokens', 'logprobs', 'drafted'):
        some, more = getattr(part, name)[b], getattr(then, name)[b]
        np.testing.assert_array_equal(some[:n], more[:n])
  assert len(parts) == 1 + max(stats.rounds for stats in whole.rows)


def test_a_key_changes_every_sampled_row_and_no_greedy_one(natural):
  decoder = natural[2]
  prompts, lengths = ROWS
  one, two = jax.random.key(1), jax.random.key(2)
  many = [dataclasses.replace(s, budget=40, stop=(), seed=5) for s in MIXED]
  with on_mesh(fsdp=1):
    plain, keyed, other = (
      decoder.generate(prompts, lengths, many, key) for key in (None, one, two)
    )
    again = decoder.generate(prompts[::-1], lengths[::-1], many[::-1], one)
    same = decoder.generate(PROMPTS[[0] * 8], LENGTHS[[0] * 8], many[1], one)
    seeds = [dataclasses.replace(many[1], seed=n) for n in range(8)]
    apart = decoder.generate(PROMPTS[[0] * 8], LENGTHS[[0] * 8], seeds, one)
  for b, own in enumerate(many):
    texts = {str(row(out, b)[0]) for out in (plain, keyed, other)}
    assert len(texts) == (3 if own.temperature else 1)
    assert row(again, 7 - b) == row(keyed, b)
  assert len({str(row(same, b)) for b in range(8)}) == 1
  assert len({str(row(apart, b)[0]) for b in range(8)}) == 8
  assert row(apart, 5)[0] == row(same, 0)[0]


def test_one_compilation_serves_all_settings(natural):
  decoder = natural[2]
  prompts, lengths = ROWS
  compiled: list[Any] = []

  def listen(event, duration_secs, **about):
    if event == '/jax/core/compile/backend_compile_duration':
      compiled.append((duration_secs, about))

  with on_mesh(fsdp=1):
    decoder.generate(prompts, lengths, MIXED, jax.random.key(0))
    names = set(decoder.compilations)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
      for n in range(6):
        settings = [
          Settings(
            budget=(7 * n + b) % 50,
            temperature=n * b / 10,
            top_k=n,
            top_p=1 - 0.1 * n,
            min_p=0.01 * b,
            seed=n + b,
            stop=tuple(range(n)),
            draft=[None, 0, 1, 2, 3, 4][n],
            logit_bias=dict.fromkeys(range(n), 0.5),
            repetition_penalty=1 + 0.1 * n,
            frequency_penalty=0.1 * b,
          )
          for b in range(5 + n % 4)
        ]
        count = len(settings)
        texts = np.roll(prompts, n, 1)[:count, : 8 - n]
        key = jax.random.key(n) if n % 2 else None
        decoder.generate(texts, np.full(count, 8 - n), settings, key)
      assert set(decoder.compilations) == names and not compiled
      jax.jit(lambda x: x + 1)(0.0)
      assert compiled  # the listener does hear
    finally:
      jax.monitoring.unregister_event_duration_listener(listen)


# --- What cannot be honoured

TOKENS = PROMPTS[:2], LENGTHS[2:4]


@pytest.fixture(scope='module')
def plain():
  """A Decoder without a drafter."""
  with on_mesh(fsdp=1):
    return generate.Decoder(*build(), longest=100)


@pytest.mark.parametrize(
  'changes, parts',
  [
    ({'temperature': -1.0}, ('temperature = -1.0', 'use 0 for greedy')),
    ({'temperature': 1e-5}, ('temperature = 1e-05', 'at least 1e-4')),
    ({'temperature': math.inf}, ('temperature = inf', 'use a finite number')),
    ({'temperature': 1e39}, ('temperature = 1e+39', 'use a finite number')),
    ({'temperature': '1'}, ("temperature = '1'", 'use a float')),
    ({'top_p': math.nan}, ('top_p = nan', 'use a finite number')),
    ({'top_p': 0.0}, ('top_p = 0.0', 'use 1 for off')),
    ({'top_p': 1e-46}, ('top_p = 1e-46', 'use 1 for off')),  # 0 in float32
    ({'top_p': True}, ('top_p = True', 'use a float')),
    ({'top_k': -1}, ('top_k = -1', 'use 0 … 2147483647')),
    ({'top_k': 2.5}, ('top_k = 2.5', 'use an int')),
    ({'min_p': 2.0}, ('min_p = 2.0', 'use 0 for off')),
    ({'seed': -1}, ('seed = -1', 'use 0 … 4294967295')),
    ({'seed': 2**32}, ('seed = 4294967296', 'use 0 … 4294967295')),
    ({'stop': tuple(range(17))}, ("stop = '17 tokens'", 'more than 16', 'use fewer')),
    ({'stop': (V,)}, (f'stop = {V}', f'use ids in 0 … {V - 1}')),
    ({'stop': (1, -1)}, ('stop = -1', f'use ids in 0 … {V - 1}')),
    ({'stop': (1.0,)}, ('stop = 1.0', f'use ids in 0 … {V - 1}')),
    ({'stop': (True,)}, ('stop = True', f'use ids in 0 … {V - 1}')),
    ({'stop': 5}, ('stop = 5', 'use a tuple of ids')),
    ({'draft': 7}, ('settings[0].draft = 7', 'the 6 compiled', 'draft=7')),
    ({'draft': -1}, ('draft = -1', 'use 0 …')),
    ({'budget': -1}, ('budget = -1', 'use 0 …')),
    ({'budget': 1.5}, ('budget = 1.5', 'use an int')),
    ({'budget': True}, ('budget = True', 'use an int')),
  ],
)
def test_settings_that_cannot_be_honoured(changes, parts, forced, unchecked):
  with on_mesh(fsdp=1), pytest.raises(ConfigError) as error:
    generate.generate(forced[0], *TOKENS, Settings(**changes))
  assert all(part in str(error.value) for part in parts), error.value


@pytest.mark.parametrize(
  'prompts, lengths, settings, parts',
  [
    (PROMPTS[:2], [0, 3], Settings(), ("prompts[0] = '0 tokens'", 'at least one')),
    (PROMPTS[:2], [3, 9], Settings(), ("prompts[1] = '9 tokens'", 'in 8 tokens')),
    (PROMPTS[:2], [3, -1], Settings(), ("prompts[1] = '-1 tokens'", 'use 1 … 8')),
    (PROMPTS[:2] + 0.5, [3, 3], Settings(), ('prompts', 'float64', 'whole numbers')),
    ([[1, 2], [3]], [2, 1], Settings(), ('ragged', 'generate.pad')),
    (PROMPTS[:2], [3, 3], {'budget': 4}, ('settings[0]', 'filters.Settings')),
    (
      PROMPTS[:2],
      [8, 3],
      Settings(budget=93),
      ("prompts[0] = '8 tokens and a budget of 93'", 'longest=100', 'up to 92'),
    ),
    (PROMPTS[:2], [3], Settings(), ('[2, 8] with lengths [1]', 'give tokens [B, P]')),
    (PROMPTS[0], [3], Settings(), ('[8] with lengths [1]', 'give tokens [B, P]')),
    (PROMPTS[:0], [], Settings(), ('[0, 8] with lengths [0]', 'B at least 1')),
    (PROMPTS[:2], [3, 3], [Settings()], ('settings = 1', '2 prompts', 'as many')),
    (PROMPTS[:2] + V, [3, 3], Settings(), ('prompts = ', f'no token of {V}')),
    (PROMPTS[:2] - V, [3, 3], Settings(), ('prompts = -', f'no token of {V}')),
  ],
)
def test_prompts_that_cannot_be_honoured(
  prompts, lengths, settings, parts, plain, unchecked
):
  with on_mesh(fsdp=1):
    with pytest.raises(ConfigError) as error:
      plain.generate(prompts, np.array(lengths, np.int32), settings)
    assert all(part in str(error.value) for part in parts), error.value
    plain.check(PROMPTS[:2], np.array([8, 3]), Settings(budget=92))  # just fits
    with pytest.raises(
      ConfigError, match=r"padding = 'both': .* use 'right' or 'left'"
    ):
      plain.generate(*TOKENS, Settings(), padding=cast(Any, 'both'))
  assert not plain.compilations


def test_decoders_that_cannot_be_made(natural, plain, unchecked):
  graphdef, params, _ = natural
  for changes, parts in [
    ({'rule': 'best'}, ("rule = 'best'", 'use rejection or')),
    ({'draft': 17}, ('draft = 17', 'use 0 … 16')),
    ({'draft': -1}, ('draft = -1', 'use 0 … 16')),
    ({'draft': True}, ('draft = True', 'use an int')),
    ({'longest': 64.5}, ('longest = 64.5', 'use an int')),
    ({'longest': 0}, ('longest = 0', 'at least 1')),
    ({'chunk': 0}, ('chunk = 0', 'at least 1')),
    ({'cache': 'int4'}, ("cache = 'int4'", 'use bfloat16 or int8, or None')),
  ]:
    with on_mesh(fsdp=1), pytest.raises(ConfigError) as error:
      generate.Decoder(graphdef, params, **changes)
    assert all(part in str(error.value) for part in parts), error.value
  with on_mesh(fsdp=1):
    graphdef, params = build()
    with pytest.raises(ConfigError, match=r'draft = 2: needs a drafter.*use draft=0'):
      generate.Decoder(graphdef, params, draft=2)
    with pytest.raises(
      ConfigError, match=r'settings\[0\].draft = 1: is more than the 0'
    ):
      plain.generate(*TOKENS, Settings(draft=1))
