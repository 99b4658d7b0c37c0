"""The rules deliver exactly the target's distribution, whatever the draft."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax import mesh
from mtpjax.sampling import filters, processors, verify

ROWS = 100_000


@pytest.fixture(autouse=True)
def one_device():
  with jax.set_mesh(mesh.make(mesh.Config(fsdp=1), jax.devices()[:1])):
    yield


def sampling(rows, **settings):
  defaults = {
    'temperature': 1.0,
    'top_k': 0,
    'top_p': 1.0,
    'min_p': 0.0,
    'budget': 9,
    'draft': 9,
  }
  values = {**defaults, **settings}
  kinds: dict[str, Any] = dict.fromkeys(('top_k', 'budget', 'draft'), np.int32)
  arrays: dict[str, Any] = {
    name: jnp.asarray(np.broadcast_to(value, rows), kinds.get(name, np.float32))
    for name, value in values.items()
  }
  return filters.Sampling(
    **arrays,
    seed=jnp.arange(rows),
    stop=jnp.full((rows, 1), -1, jnp.int32),
    processing=processors.arrays([filters.Settings()] * rows),
  )


def deliver(rule, p, q, draw_from=None, one_hot=False, rows=ROWS, turn=1):
  """(first, second tokens; accepted) of many rows of one round, K = len(q)."""
  K, V = q.shape

  @jax.jit
  def run(p, q, draw_from):
    seeds, turns = jnp.arange(rows), jnp.full(rows, turn)
    spread = functools.partial(jnp.broadcast_to, shape=(rows, K, V))
    drafts = verify.draw(
      verify.keys(seeds, turns, verify.PROPOSE, K), spread(draw_from[None])
    )
    dense = None if one_hot else spread(q[None])
    full = jnp.broadcast_to(p[None], (rows, K + 1, V))
    judge = verify.RULES[rule]
    return drafts, judge(full, drafts, dense, jnp.full(rows, K), seeds, turns)

  drafts, out = run(p, q, q if draw_from is None else draw_from)
  first = jnp.where(out.accepted > 0, drafts[:, 0], out.after)
  return np.asarray(first), np.asarray(drafts), jax.device_get(out)


def marginal(tokens, size):
  return np.bincount(tokens, minlength=size) / len(tokens)


TABLES = [
  ([0.5, 0.3, 0.2], [0.6, 0.3, 0.1]),
  ([0.4, 0.3, 0.2, 0.1], [0.1, 0.15, 0.15, 0.6]),
  ([0.0, 0.7, 0.3], [0.5, 0.0, 0.5]),  # disjoint in part
]


@pytest.mark.parametrize('rule', verify.RULES)
@pytest.mark.parametrize('p, q', TABLES)
def test_the_first_token_has_the_targets_distribution(rule, p, q):
  p, q = np.array([p, p, p], np.float32), np.array([q, q], np.float32)
  first, _, _ = deliver(rule, p, q)
  np.testing.assert_allclose(marginal(first, p.shape[1]), p[0], atol=0.006)


@pytest.mark.parametrize('rule', verify.RULES)
def test_an_argmax_draft_is_judged_as_one_hot(rule):
  p = np.array([[0.5, 0.3, 0.2]] * 2, np.float32)
  draft = np.array([[1.0, 0.0, 0.0]], np.float32)
  first, _, _ = deliver(rule, p, draft, one_hot=True)
  np.testing.assert_allclose(marginal(first, 3), p[0], atol=0.006)


def test_a_softmax_q_for_an_argmax_draft_would_be_wrong():
  p = np.array([[0.5, 0.3, 0.2]] * 2, np.float32)
  q, drawn = np.array([[0.6, 0.3, 0.1]]), np.array([[1.0, 0.0, 0.0]])
  first, _, _ = deliver('rejection', p, q.astype(np.float32), drawn.astype(np.float32))
  np.testing.assert_allclose(marginal(first, 3), [0.833, 0, 0.167], atol=0.005)


def test_later_tokens_follow_the_target_given_the_earlier():
  p = np.array([[0.4, 0.6], [0.9, 0.1], [0.5, 0.5]], np.float32)
  q = np.array([[0.7, 0.3], [0.2, 0.8]], np.float32)
  first, drafts, out = deliver('rejection', p, q)
  # Where draft 1 was accepted the second token is draft 2 or its replacement.
  went_on = out.accepted > 0
  second = np.where(out.accepted > 1, drafts[:, 1], out.after)[went_on]
  np.testing.assert_allclose(marginal(second, 2), p[1], atol=0.006)
  third = out.after[out.accepted == 2]
  np.testing.assert_allclose(marginal(third, 2), p[2], atol=0.012)
  both = np.mean((first == 0)[went_on] & (second == 0))
  chance = np.mean((first == 0)[went_on]) * np.mean(second == 0)
  assert abs(both - chance) < 0.004


@pytest.mark.parametrize('rule', ['rejection', 'block'])
def test_q_equal_to_p_always_accepts(rule):
  rng = np.random.default_rng(0)
  p = rng.dirichlet(np.ones(300), 4).astype(np.float32)
  _, _, out = deliver(rule, np.concatenate([p, p[:1]]), p, rows=2000)
  assert (out.accepted == 4).all() and not out.failed.any()


@pytest.mark.parametrize('rule', ['rejection', 'block'])
def test_only_what_is_proposed_is_judged(rule):
  p = np.array([[0.5, 0.5]] * 4, np.float32)
  rows = 20_000
  q = jnp.broadcast_to(jnp.asarray(p[:3])[None], (rows, 3, 2))
  full = jnp.broadcast_to(jnp.asarray(p)[None], (rows, 4, 2))
  seeds, turns = jnp.arange(rows), jnp.ones(rows, int)
  judge = jax.jit(verify.RULES[rule])
  for count in range(4):
    drafts = jnp.zeros((rows, 3), int)
    out = judge(full, drafts, q, jnp.full(rows, count), seeds, turns)
    assert (out.accepted == count).all()  # p = q accepts what there is
    np.testing.assert_allclose(marginal(np.asarray(out.after), 2), p[0], atol=0.015)


def test_a_row_draws_the_same_among_other_rows():
  seeds, turns = jnp.array([3, 5, 7]), jnp.array([1, 4, 2])
  together = jax.random.key_data(verify.keys(seeds, turns, verify.ACCEPT, 2))
  alone = jax.random.key_data(verify.keys(seeds[1:2], turns[1:2], verify.ACCEPT, 2))
  np.testing.assert_array_equal(together[1], alone[0])
  streams = [verify.keys(seeds, turns, s, 2) for s in range(3)]
  assert (
    len({k.tobytes() for s in streams for k in np.asarray(jax.random.key_data(s))}) == 9
  )


def by_hand(logits, temperature, top_k, top_p, min_p):
  """The filters as a loop over tokens in order of their probability."""
  p = np.exp(logits / temperature - np.max(logits / temperature))
  p /= p.sum()
  order = sorted(range(len(p)), key=lambda i: -p[i])
  if top_k:
    least = p[order[min(top_k, len(p)) - 1]]
    p = np.where(p >= least, p, 0)
    p /= p.sum()
  if top_p < 1:
    held, kept = 0.0, []
    for i in order:
      if held < top_p:
        kept.append(i)
      held += p[i]
    p = np.where(np.isin(np.arange(len(p)), kept), p, 0)
  p = np.where(p / p.sum() >= min_p * p.max() / p.sum(), p, 0)
  return p / p.sum()


def test_filters_against_a_loop_with_a_rows_own_settings():
  rng = np.random.default_rng(1)
  logits = rng.normal(size=(64, 2, 11)).astype(np.float32) * 2
  settings = {
    'temperature': rng.uniform(0.3, 2, 64),
    'top_k': rng.integers(0, 14, 64),
    'top_p': rng.choice([1.0, 0.9, 0.5, 0.05], 64),
    'min_p': rng.choice([0.0, 0.1, 0.5], 64),
  }
  got = np.asarray(filters.probabilities(jnp.asarray(logits), sampling(64, **settings)))
  for b in range(64):
    row = {name: value[b] for name, value in settings.items()}
    for n in range(2):
      np.testing.assert_allclose(got[b, n], by_hand(logits[b, n], **row), atol=2e-6)


def test_temperature_0_is_the_lowest_of_the_most_likely():
  logits = jnp.array([[[1.0, 3.0, 3.0, 2.0]], [[0.0, 0.0, 0.0, 0.0]]])
  p = filters.probabilities(logits, sampling(2, temperature=[0.0, 0.0], top_k=[2, 0]))
  np.testing.assert_array_equal(p[:, 0], [[0, 1, 0, 0], [1, 0, 0, 0]])
