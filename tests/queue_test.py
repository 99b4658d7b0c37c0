"""Prompts from a queue, and samples of one prompt: each text is what a batch gives,
whatever row it came from."""

import dataclasses

import numpy as np
import pytest
from decoding import V, build, on_mesh, row

from mtpjax.drafters import parallel, residual, sequential
from mtpjax.fields import ConfigError
from mtpjax.sampling import engine, generate
from mtpjax.sampling.filters import Settings

Q = 22
RANDOM = np.random.default_rng(0)
LENGTHS = np.resize([1, 7, 2, 12, 5], Q)  # of up to four chunks
PROMPTS = RANDOM.integers(0, V, (Q, 12))
SETTINGS = [
  Settings(
    budget=int(n),  # 1:10, and some of none
    temperature=[0.0, 1.0, 0.7][q % 3],
    top_k=[0, 0, 5][q % 3],
    seed=q,
    stop=(3, 4) if q % 4 == 0 else (),
    draft=None if q % 5 else 1,
  )
  for q, n in enumerate(np.resize([40, 4, 13, 0, 1, 25, 8], Q))
]


def make(drafter=None, windows=(0,), **options):
  graphdef, params = build(drafter, windows=windows)
  return generate.Decoder(graphdef, params, chunk=3, **options)


@pytest.fixture(scope='module')
def drafting():
  """(Decoder, what it gives in one batch)."""
  with on_mesh(fsdp=1):
    decoder = make(sequential.Config(depth=3, attend='rows'), (6, 0))
    return decoder, decoder.generate(PROMPTS, LENGTHS, SETTINGS)


def alike(out, right, count=Q):
  assert [row(out, q) for q in range(count)] == [row(right, q) for q in range(count)]
  most = out.logprobs.shape[1]
  np.testing.assert_allclose(out.logprobs, right.logprobs[:count, :most], atol=2e-5)


def check_queue(decoder, right):
  out = decoder.throughput(PROMPTS, LENGTHS, SETTINGS, rows=8)
  alike(out, right)
  assert out.idle < right.idle
  # Other numbers of prompts, the same programs.
  names = set(decoder.compilations)
  few = decoder.throughput(PROMPTS[:17], LENGTHS[:17], SETTINGS[:17], rows=8)
  alike(few, right, 17)
  # Texts of a token or none: rows that were never in use have nothing to hand over.
  once = [dataclasses.replace(own, budget=min(own.budget, 1)) for own in SETTINGS]
  short = decoder.throughput(PROMPTS, LENGTHS, once, rows=8)
  assert short.lengths.tolist() == [own.budget for own in once]
  np.testing.assert_array_equal(short.tokens, right.tokens[:, :1])
  assert short.idle == 0 and short.stats.rounds == 0
  assert set(decoder.compilations) == names


def test_every_text_is_that_of_a_batch(drafting):
  with on_mesh(fsdp=1):
    check_queue(*drafting)


@pytest.mark.slow
@pytest.mark.parametrize(
  'drafter, windows, options',
  [
    (sequential.Config(depth=3), (6, 0), {'rule': 'block'}),
    (parallel.Config(depth=2), (5,), {'rule': 'sample-and-match'}),
    (residual.Config(depth=3, form='medusa'), (0,), {}),
    (
      sequential.Config(depth=2),
      (6,),
      {'cache': 'int8', 'tree': '2x1'},
    ),
  ],
)
def test_every_text_is_that_of_a_batch_by_any_drafter(drafter, windows, options):
  with on_mesh(fsdp=1):
    decoder = make(drafter, windows, **options)
    check_queue(decoder, decoder.generate(PROMPTS, LENGTHS, SETTINGS))


def test_every_text_is_that_of_one_device(drafting):
  """Drafts or not; some devices have fewer prompts than others, some none."""
  plain = [dataclasses.replace(own, draft=0) for own in SETTINGS]
  with on_mesh(fsdp=1):
    right = drafting[0].generate(PROMPTS, LENGTHS, plain)
  with on_mesh(fsdp=4, tensor=2):
    decoder = make(windows=(6, 0))
    out = decoder.throughput(PROMPTS, LENGTHS, plain, rows=8)
    few = decoder.throughput(PROMPTS[:18], LENGTHS[:18], plain[:18], rows=8)
    names = set(decoder.compilations)
    three = decoder.throughput(PROMPTS[:3], LENGTHS[:3], plain[:3], rows=8)
  for q in range(Q):
    for found in (out, few, three):
      if q < len(found.lengths):
        assert row(found, q)[:3] == row(right, q)[:3]
  assert len(names) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
  'drafter, axes',
  [
    (sequential.Config(depth=3, attend='rows'), {'fsdp': 8}),
    (sequential.Config(depth=2), {'fsdp': 2, 'context': 2, 'tensor': 2}),
  ],
)
def test_every_draft_is_that_of_one_device(drafter, axes):
  plain = [dataclasses.replace(own, draft=None) for own in SETTINGS]
  with on_mesh(fsdp=1):
    right = make(drafter).generate(PROMPTS, LENGTHS, plain)
  with on_mesh(**axes):
    alike(make(drafter).throughput(PROMPTS, LENGTHS, plain, rows=8), right)


def test_short_texts_go_through_some_rows_while_others_write_long_ones(drafting):
  # Rounds: two texts of 30, three times six of 10, and two of none.
  budgets = np.array([11] * 9 + [31, 0, 31, 1] + [11] * 9)
  settings = [Settings(budget=int(n), draft=0) for n in budgets]
  with on_mesh(fsdp=1):
    out = drafting[0].throughput(PROMPTS, LENGTHS, settings, rows=8)
    batch = drafting[0].generate(PROMPTS, LENGTHS, settings)
  assert out.lengths.tolist() == budgets.tolist() and out.idle == 0
  assert batch.idle == pytest.approx(1 - 240 / (32 * 30))


# --- Samples of a prompt

N = 3
DRAWN = [dataclasses.replace(own, temperature=1.0, draft=None) for own in SETTINGS]


def check_samples(decoder):
  """30 texts of 10 prompts against as many copies of these, nothing shared."""
  right = decoder.generate(
    np.repeat(PROMPTS[:10], N, 0),
    np.repeat(LENGTHS[:10], N),
    [own.sample(n) for own in DRAWN[:10] for n in range(N)],
  )
  given = PROMPTS[:10], LENGTHS[:10], DRAWN[:10]
  alike(decoder.generate(*given, samples=N), right, 10 * N)
  alike(decoder.throughput(*given, samples=N, rows=13), right, 10 * N)


def test_samples_are_what_copies_of_the_prompt_give(drafting, monkeypatch):
  """And the prompt is read once but for its last token."""
  read, extend = [], engine.trunk.extend

  def watched(layers, x, *args):
    read.append(x.shape[:2])
    return extend(layers, x, *args)

  monkeypatch.setattr(engine.trunk, 'extend', watched)
  with on_mesh(fsdp=1):
    check_samples(drafting[0])
  # As it is traced: chunks of 16 prompts, a token of 48 rows, a round; and a prompt at
  # a time, its three rows, and a round of the twelve that fit into rows=13.
  assert read == [(16, 3), (48, 1), (48, 4), (1, 3), (3, 1), (12, 4)]


@pytest.mark.slow
@pytest.mark.parametrize(
  'drafter, axes',
  [
    (sequential.Config(depth=3), {'fsdp': 2, 'tensor': 2}),
    (parallel.Config(depth=2), {'fsdp': 1}),
    (residual.Config(depth=2, form='medusa'), {'fsdp': 4}),
  ],
)
def test_samples_are_what_copies_give_by_any_drafter(drafter, axes):
  with on_mesh(**axes):
    check_samples(make(drafter, (6, 0)))


def test_samples_have_seeds_of_their_own():
  own = Settings(seed=7, temperature=1.0)
  assert own.sample(0) == own
  seeds = {Settings(seed=s).sample(n).seed for s in range(30) for n in range(30)}
  assert len(seeds) == 900
  assert own.sample(1) == dataclasses.replace(own, seed=own.sample(1).seed)


def test_numbers_that_cannot_be_honoured(drafting):
  decoder = drafting[0]
  for options, field in [
    ({'samples': 0}, 'samples = 0: is not positive'),
    ({'samples': True}, 'samples = True: is no whole number'),
    ({'rows': 0}, 'rows = 0: is not positive'),
    ({'rows': True}, 'rows = True: is no whole number'),
  ]:
    call = decoder.throughput if 'rows' in options else decoder.generate
    with on_mesh(fsdp=1), pytest.raises(ConfigError, match=field):
      call(PROMPTS, LENGTHS, SETTINGS, **options)
