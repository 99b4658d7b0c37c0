"""Keys and values in any dtype: attention to them is a loop over what was written."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import V, build, on_mesh, plainly

from mtpjax import mesh
from mtpjax.drafters import parallel, sequential
from mtpjax.models import cache, trunk
from mtpjax.sampling import engine, filters, generate
from mtpjax.sampling.filters import Settings

B, H, G, C, SLOTS, BEFORE = 4, 4, 2, 6, 20, 2
# First positions of the blocks, by row: on, back over all but one row, back to the
# start, and a prompt that ended before the others'.
STARTS = [[0, 0, 0, 0], [3, 1, 0, 2], [4, 4, 1, 2], [6, 5, 4, 3], [9, 6, 7, 3]]
BLOCK = 3


def kept(x, kind):
  """One row [C] as a cache gives it back, in NumPy."""
  if kind == 'bfloat16':
    return np.asarray(jnp.asarray(x).astype('bfloat16'), np.float64)
  if kind is None or not x.any():
    return x.astype(np.float64)
  scale = np.float32(np.abs(x).max() / np.float32(127))
  return np.round(x / scale).astype(np.int8) * np.float64(scale)


def wanted(q, rows, at, window, cap):
  """One query [C] over rows {position: (key, value)} up to its own."""
  seen = [rows[p] for p in range(at + 1) if not window or at - p < window]
  scores = np.array([q @ key for key, _ in seen]) * C**-0.5
  scores = scores if cap is None else cap * np.tanh(scores / cap)
  p = np.exp(scores - scores.max())
  return sum(a * value for a, (_, value) in zip(p / p.sum(), seen, strict=True))


@pytest.mark.parametrize('kind', [None, 'bfloat16', 'int8'])
@pytest.mark.parametrize(
  'window, before, cap, axes',
  [
    (0, 0, None, {}),
    (4, BEFORE, 2.0, {}),  # a ring that goes around, and positions before 0
    (4, 0, None, {'fsdp': 2, 'tensor': 2}),
    (0, BEFORE, None, {'fsdp': 2, 'tensor': 4}),  # heads do not divide
  ],
)
def test_attention_is_a_loop_over_what_was_written(kind, window, before, cap, axes):
  random = np.random.default_rng(0)
  config = trunk.Config(vocab=V, width=24, heads=H, kv_heads=G, attention_softcap=cap)
  config.finalize()
  rows: list[Any] = [[{} for _ in range(G)] for _ in range(B)]
  with on_mesh(**{'fsdp': 1, **axes}):
    held = cache.empty(config, B, SLOTS + before, window, BLOCK + before, kind)

    @jax.jit
    def step(held, start, q, k, v):
      look = cache.look_at_cache(held, start, config, window, before)
      return look(q, k, v)

    for start in np.array(STARTS, np.int32):
      q = random.normal(size=(B, BLOCK, H, C)).astype(np.float32)
      # Rows of very different sizes: each has a scale of its own.
      k, v = random.normal(size=(2, B, BLOCK, G, C)).astype(np.float32)
      v *= np.exp(random.normal(size=(B, BLOCK, G, 1)) * 3).astype(np.float32)
      v[:, 1, 0] = 0
      given = (
        jax.device_put(x, mesh.act_BTHC if n == 0 else mesh.key_BSGC(G))
        for n, x in enumerate((q, k, v))
      )
      out, held = step(held, jax.device_put(start, mesh.ids_B), *given)
      out = np.asarray(out)
      for b, first in enumerate(start):
        for g in range(G):
          for t in range(BLOCK):
            rows[b][g][first + t] = kept(k[b, t, g], kind), kept(v[b, t, g], kind)
        for t in range(BLOCK):
          for h in range(H):
            own = rows[b][h // (H // G)]
            right = wanted(q[b, t, h].astype(np.float64), own, first + t, window, cap)
            scale = max(np.abs(value).max() for _, value in own.values())
            np.testing.assert_allclose(out[b, t, h], right, atol=3e-6 * scale)


def test_int8_is_right_to_half_a_step_and_hides_nothing_broken():
  x = np.random.default_rng(1).normal(size=(7, 5, 9)).astype(np.float32)
  x[0] = 0
  x[1] *= 1e30
  numbers, scale = cache.quantised(jnp.asarray(x))
  assert numbers.dtype == jnp.int8 and scale.shape == (7, 5, 1)
  back = np.asarray(numbers, np.float64) * np.asarray(scale, np.float64)
  assert (np.abs(back - x) <= 0.5001 * np.asarray(scale)).all()
  np.testing.assert_array_equal(np.abs(numbers[1:]).max(-1), 127)
  for broken in (np.nan, np.inf):
    numbers, scale = cache.quantised(jnp.asarray(x).at[2, 3, 4].set(broken))
    with np.errstate(invalid='ignore'):
      bad = ~np.isfinite(np.asarray(numbers, np.float32) * np.asarray(scale))
    assert bad[2, 3].any() and not np.isnan(scale[0]).any() and bad.sum() <= 9


PROMPTS = np.random.default_rng(0).integers(0, V, (8, 8)).astype(np.int32)
LENGTHS = np.resize([1, 2, 5, 8], 8)
SETTINGS = [
  Settings(budget=24, temperature=float(b % 3 == 2), seed=b, draft=b % 4)
  for b in range(8)
]


@pytest.mark.parametrize(
  'drafter, axes',
  [
    (sequential.Config(depth=3, attend='rows'), {'fsdp': 1}),
    pytest.param(
      sequential.Config(depth=3), {'fsdp': 4, 'tensor': 2}, marks=pytest.mark.slow
    ),
    pytest.param(
      parallel.Config(depth=3), {'fsdp': 2, 'tensor': 4}, marks=pytest.mark.slow
    ),
  ],
)
def test_greedy_text_from_int8_does_not_depend_on_drafts(drafter, axes):
  """No tie is near in these texts, on one device or more."""
  plain = [Settings(budget=24, draft=0)] * 8
  with on_mesh(**axes):
    graphdef, params = build(drafter, windows=(6, 0))
    decoder = generate.Decoder(graphdef, params, chunk=3, cache='int8')
    out = decoder.generate(PROMPTS, LENGTHS, SETTINGS)
    alone = decoder.generate(PROMPTS, LENGTHS, plain)
    text, scores, _ = plainly(graphdef, params, PROMPTS, LENGTHS, 24)
  for b in range(8):
    if not SETTINGS[b].temperature:
      assert out.tokens[b].tolist() == alone.tokens[b].tolist()
  assert out.stats.kept.any()
  # It was in use: the model scores the same first tokens a little differently.
  at = LENGTHS[:, None] + np.arange(4)[None]
  same = np.take_along_axis(text, at, 1) == alone.tokens[:, :4]
  away = np.abs(np.take_along_axis(scores, at, 1) - alone.logprobs[:, :4])[same]
  assert same.sum() > 20 and 1e-4 < away.max() < 0.3


@pytest.mark.parametrize('drafter', [sequential.Config(depth=2), parallel.Config()])
def test_all_keys_and_values_are_of_the_kind_the_drafters_too(drafter):
  with on_mesh(fsdp=1):
    graphdef, params = build(drafter)
    weights = engine.lay_out(graphdef, params)
    prompts = jax.device_put(PROMPTS, mesh.whole_BT)
    lengths = jax.device_put(LENGTHS.astype(np.int32), mesh.ids_B)
    for kind, size in (('int8', 4 + 4), (None, 4 * 4), ('bfloat16', 2 * 4)):
      plan = engine.Plan(draft=drafter.depth, slots=32, cache=kind)
      prefill = functools.partial(engine.prefill, graphdef, plan)
      sampling = filters.arrays(SETTINGS, drafter.depth)
      state = jax.eval_shape(prefill, weights, prompts, lengths, sampling)
      caches = [
        x for x in jax.tree.leaves((state.caches, state.drafter)) if x.ndim == 4
      ]
      slots = sum(x.shape[2] for x in caches if x.shape[3] > 1)
      # A row and head of a slot is C = 4 numbers, and a scale where they are int8.
      assert sum(x.size * x.dtype.itemsize for x in caches) == 8 * 2 * slots * size
      assert slots > 2 * 2 * 32  # the trunk's two layers and the drafter's
