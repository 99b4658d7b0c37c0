"""Rows draft as many tokens as their own acceptance pays for."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from decoding import V, build, on_mesh
from table_test import KINDS, NAMES, SETTINGS, TABLE, check, decode, decoder

from mtpjax.drafters import parallel, sequential
from mtpjax.fields import ConfigError
from mtpjax.sampling import adaptive
from mtpjax.sampling.filters import Settings
from mtpjax.sampling.generate import Decoder


@pytest.mark.parametrize('cost', [0.0, 0.05, 0.3, 1.5])
def test_the_length_has_the_most_tokens_for_its_time(cost):
  rates = np.linspace(0, 1, 41)
  found = adaptive.length(jnp.asarray(rates), cost, 6)
  for a, k in zip(rates, found, strict=True):
    worth = [sum(a**j for j in range(n + 1)) / (1 + cost * n) for n in range(7)]
    assert worth[k] == pytest.approx(max(worth), rel=1e-5)
    assert k == 0 or worth[k] > worth[k - 1] * (1 - 1e-5)


def test_the_pace_is_that_of_the_last_rounds():
  start = adaptive.Pace(jnp.zeros(2), jnp.zeros(2))
  np.testing.assert_allclose(start.acceptance, 0.8)
  pace = start
  judged, accepted = 0.0, 0.0
  for count, right in [(3, 3), (3, 1), (2, 0), (0, 0)]:
    pace = pace.after(jnp.full(2, count), jnp.full(2, right))
    judged = 0.9 * judged + min(right + 1, count)
    accepted = 0.9 * accepted + right
  np.testing.assert_allclose(
    pace.acceptance, (1.6 + accepted) / (2 + judged), rtol=1e-6
  )
  for _ in range(200):  # without drafts it is forgotten
    pace = pace.after(jnp.zeros(2, int), jnp.zeros(2, int))
  np.testing.assert_allclose(pace.acceptance, 0.8, rtol=1e-6)


def test_sizes_that_are_compiled_for():
  assert [adaptive.sizes(n) for n in (0, 1, 3, 4, 7)] == [
    *([0], [0, 1], [0, 1, 2, 3]),
    *([0, 1, 2, 4], [0, 1, 2, 4, 7]),
  ]


def test_texts_follow_the_chain_and_rows_go_at_their_own_pace():
  kinds: dict[str, Any] = {
    'broken': NAMES.index('broken'),
    'teacher': NAMES.index('teacher'),
  }
  with on_mesh(fsdp=1):
    model = decoder(TABLE, list(KINDS.values()), draft_cost=0.2, **kinds)
    texts, out = decode(model, 4096, 5)
  check(texts, TABLE, SETTINGS, np.array(NAMES)[np.arange(len(texts)) % 8])
  kind = np.array(NAMES)[np.arange(4096) % 8]
  # Drafts a round, of the rounds that are not cut short by the budget.
  mean = {
    name: np.mean(
      [out.rows[b].nodes / out.rows[b].rounds for b in np.where(kind == name)[0]]
    )
    for name in ('teacher', 'broken', 'wrong')
  }
  assert mean['broken'] < 1.5 and mean['wrong'] < 2.0 and mean['teacher'] > 2.5, mean


@pytest.mark.parametrize(
  'drafter',
  [
    parallel.Config(depth=4, form='linear'),
    pytest.param(sequential.Config(depth=4), marks=pytest.mark.slow),
    pytest.param(sequential.Config(depth=4, attend='rows'), marks=pytest.mark.slow),
  ],
)
def test_a_row_does_not_depend_on_the_rows_beside_it(drafter):
  with on_mesh(fsdp=1):
    graphdef, params = build(drafter, windows=(3,))
    prompts = np.random.default_rng(1).integers(0, V, (6, 5)).astype(np.int32)
    lengths = np.array([5, 1, 2, 5, 3, 4])
    own = [
      Settings(budget=20 + b, temperature=float(b % 2), seed=b, draft=b % 5)
      for b in range(6)
    ]
    decode = Decoder(graphdef, params, draft_cost=0.3)
    plain = Decoder(graphdef, params, draft=0)
    out = decode.generate(prompts, lengths, own)
    for b, settings in enumerate(own):
      row = prompts[b : b + 1], lengths[b : b + 1]
      one = decode.generate(*row, settings)
      np.testing.assert_array_equal(out.tokens[b, : one.lengths[0]], one.tokens[0])
      assert out.rows[b].to_json() == one.rows[0].to_json()
      if not settings.temperature:
        free = Settings(budget=settings.budget)
        np.testing.assert_array_equal(one.tokens, plain.generate(*row, free).tokens)
    tried = {row.nodes / row.rounds for row in out.rows if row.nodes}
    assert len(tried) > 1 and max(tried) < 4


@pytest.mark.parametrize('cost', [-0.1, float('nan'), float('inf')])
def test_what_is_no_cost_is_refused(cost):
  with on_mesh(fsdp=1):
    graphdef, params = build(sequential.Config(depth=1))
    with pytest.raises(ConfigError, match='draft_cost'):
      Decoder(graphdef, params, draft_cost=cost)
