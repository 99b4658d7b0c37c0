"""Between rounds, caches and drafters hold what a fresh prefill would give them, and a
round copies none of it."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import DRAFTERS, TURNS, Forcing, V, build, on_mesh, plainly, scripted
from flax import nnx

from mtpjax import mesh
from mtpjax.models import cache
from mtpjax.sampling import engine, filters

K, NEW, SLOTS = 3, 64, 72
LENGTHS = np.array([1, 3, 8, 8], np.int32)
# A ring holds a window and the 4 rows written at once: 7 slots for a window of 3.
PLAN = engine.Plan(draft=K, slots=SLOTS, chunk=4)
FRESH = dataclasses.replace(PLAN, chunk=SLOTS)  # all at once: no ring ever wraps

# Right drafts of each row, by round.
PATTERNS = np.stack(
  [
    np.resize([0, K, 1, K, 0], TURNS),
    np.resize(np.arange(K + 1), TURNS),
    np.random.default_rng(2).integers(0, K + 1, TURNS),
    np.resize([K], TURNS),
  ]
)


def by_position(kept, last_B, window, before=0):
  """What a query at last + 1 may see of a layer: keys and values by position,
  [B, S, 2, G, C]; NaN where it sees nothing, or where the buffer holds nothing."""
  keys, values = (np.asarray(x) for x in (kept.keys, kept.values))
  B, G, slots, C = keys.shape
  held = np.asarray(cache.held(jax.device_put(last_B, mesh.ids_B), slots, before))
  lowest = last_B - window + 2 if window else np.zeros_like(last_B)
  found = np.full((B, SLOTS, 2, G, C), np.nan, np.float32)
  for b, slot in zip(*np.nonzero(held >= np.maximum(lowest, 0)[:, None]), strict=True):
    found[b, held[b, slot]] = keys[b, :, slot], values[b, :, slot]
  seen = np.arange(SLOTS)[None] <= last_B[:, None]
  seen &= np.arange(SLOTS)[None] >= lowest[:, None]
  assert (np.isfinite(found).all((2, 3, 4)) == seen).all()
  return found


def assert_same(model, ours, fresh):
  """Whatever a later round may look at is the same in both states."""
  close: Any = functools.partial(np.testing.assert_allclose, rtol=0, atol=3e-5)
  last, part = ours.length - 2, model.objectives['drafter'].inner
  for n, pair in enumerate(zip(ours.caches, fresh.caches, strict=True)):
    window = model.trunk.config.window(n)
    close(*(by_position(kept, last, window) for kept in pair), err_msg=f'layer {n}')
  # With keys of its own, each depth does its last K rows again in every round.
  before = K if getattr(part.config, 'attend', None) == 'depth' else 0
  inner = [state.drafter['inner'] for state in (ours, fresh)]
  if not dataclasses.is_dataclass(inner[0]):  # nothing but the last row
    jax.tree.map(close, *inner)
    return
  for n, pair in enumerate(zip(*(state.caches for state in inner), strict=True)):
    if pair[0] is None:  # a linear head attends to nothing
      continue
    found = (by_position(kept, last - before, part.window, before) for kept in pair)
    close(*found, err_msg=f'cache {n} of the drafter')
  rest = (dataclasses.replace(state, caches=None) for state in inner)
  jax.tree.map(close, *rest)


SHORT = [  # the others are slow
  ('depth, unshared', (3,), {}),
  ('rows', (3,), {}),
  ('parallel', (6, 0), {}),
  ('residual', (3,), {}),
]
# Those whose own caches differ, with each kind of the trunk's; the others with a ring.
OWN_CACHES = ('depth', 'rows', 'parallel', 'parallel, anticausal')


@pytest.mark.parametrize(
  'name, windows, axes',
  [
    *SHORT,
    *(
      pytest.param(*case, marks=pytest.mark.slow)
      for case in [
        *((name, w, {}) for name in OWN_CACHES for w in [(0,), (6, 0)]),
        *((name, (3,), {}) for name in DRAFTERS),
        ('depth', (3,), {'fsdp': 4, 'tensor': 2}),
        ('rows', (3,), {'fsdp': 2, 'tensor': 4}),
        ('parallel', (3,), {'fsdp': 4, 'tensor': 2}),
      ]
      if case not in SHORT
    ),
  ],
)
def test_every_round_leaves_what_a_fresh_prefill_gives(name, windows, axes):
  with on_mesh(**{'fsdp': 1, **axes}):
    drafter = Forcing(depth=K, inner=DRAFTERS[name])
    # Anticausal heads each read a layer of their own.
    layers = K + 1 if name == 'parallel, anticausal' else len(windows)
    graphdef, params = build(drafter, windows=windows, layers=layers)
    prompts = np.random.default_rng(0).integers(0, V, (4, 8)).astype(np.int32)
    text, _, _ = plainly(graphdef, params, prompts, LENGTHS, NEW)
    model = nnx.merge(graphdef, params)
    sampling = filters.arrays([filters.Settings(budget=NEW)] * 4, K)

    @jax.jit
    def fresh_state(weights, tokens, lengths, turn):
      state = engine.prefill(graphdef, FRESH, weights, tokens, lengths, sampling)
      m = nnx.merge(graphdef, weights)
      drafter = {**state.drafter, 'turn': turn}
      propose: Any = m.objectives['drafter'].propose
      return state, propose(m.trunk, state.caches, drafter, K, None)[1]['logits']

    start = jax.jit(functools.partial(engine.prefill, graphdef, PLAN))
    go_on = jax.jit(functools.partial(engine.one_round, graphdef, PLAN))
    laid_out = engine.lay_out(graphdef, params)
    for roll in range(0, 4, 2):
      weights = scripted(laid_out, text, np.roll(PATTERNS, roll, 0))
      state = start(
        weights,
        jax.device_put(prompts, mesh.whole_BT),
        jax.device_put(LENGTHS, mesh.ids_B),
        sampling,
      )
      live = True
      while live:
        ours = jax.device_get(state)
        live = (ours.reason == engine.LIVE).any()
        known = np.arange(SLOTS)[None] < ours.length[:, None]
        assert (ours.tokens[:, :SLOTS] == text)[known].all()
        fresh, wanted = jax.device_get(
          fresh_state(
            weights,
            jax.device_put(np.where(known, text, 0), mesh.whole_BT),
            jax.device_put(ours.length - 1, mesh.ids_B),
            jax.device_put(ours.drafter['turn'], mesh.ids_B),
          )
        )
        assert_same(model, ours, fresh)
        state = go_on(weights, state, sampling)
        np.testing.assert_allclose(state.drafter['logits'], wanted, rtol=0, atol=1e-4)
      assert (ours.length == LENGTHS + NEW).all()
      # All were proposed and the right ones accepted, or nothing was rolled back.
      right = np.roll(PATTERNS, roll, 0)
      for b in range(4):
        rounds = right[b, : ours.rounds[b]]
        assert abs(int(ours.accepted[b].sum()) - rounds.sum()) <= K


def test_held_is_what_was_written_last_into_each_slot():
  held = jax.jit(cache.held, static_argnums=(1, 2))
  for slots in range(1, 8):
    for before in range(5):
      wanted = np.full((20 + before, slots), -1)
      for n, last in enumerate(range(-before, 20)):
        wanted[n:, (last + before) % slots] = max(last, -1)
      with on_mesh(fsdp=1):
        found = held(jnp.arange(-before, 20), slots, before)
      np.testing.assert_array_equal(np.maximum(found, -1), wanted)


@pytest.mark.parametrize('axes', [{'fsdp': 1}, {'fsdp': 4, 'tensor': 2}])
@pytest.mark.parametrize('shape, axis', [((5,), 1), ((5, 4, 3), 1), ((4, 5, 3), 2)])
def test_writing_and_reading_at_every_start_and_size(shape, axis, axes):
  rng, S, B = np.random.default_rng(0), 5, 8
  old, new = (rng.normal(size=(B, *shape)).astype(np.float32) for _ in range(2))
  heads = 'tensor' if (shape, axis) == ((4, 5, 3), 2) else None
  spec = jax.P(mesh.BATCH, *((heads, None, None)[: len(shape)]))

  @functools.partial(jax.jit, static_argnames='size')
  def run(old, new, at, size):
    new = jax.lax.slice_in_dim(new, 0, size, axis=axis)
    fits = jnp.minimum(at, S - size)
    return (
      cache.put(old, new, fits, axis),
      cache.put_around(old, new, at, axis),
      cache.take(old, fits, size, axis),
    )

  with on_mesh(**axes):
    for size in range(1, S + 1):
      for first in range(0, 3 * S, B):
        at = np.arange(first, first + B, dtype=np.int32)
        found = run(
          jax.device_put(old, spec),
          jax.device_put(new, spec),
          jax.device_put(at, mesh.ids_B),
          size=size,
        )
        put, around, taken = (np.moveaxis(np.asarray(x), axis, 1) for x in found)
        before, rows = (np.moveaxis(x, axis, 1) for x in (old, new))
        for b in range(B):
          start = min(at[b], S - size)
          one, ring = before[b].copy(), before[b].copy()
          for n in range(size):
            one[start + n] = rows[b, n]
            ring[(at[b] + n) % S] = rows[b, n]
          np.testing.assert_array_equal(put[b], one)
          np.testing.assert_array_equal(around[b], ring)
          np.testing.assert_array_equal(taken[b], before[b, start : start + size])


# --- What a round costs in memory


@pytest.fixture
def optimised():
  """As users compile; the suite leaves most optimisations out."""
  jax.config.update('jax_disable_most_optimizations', False)
  yield
  jax.config.update('jax_disable_most_optimizations', True)


def share_of_caches(what, drafter):
  """How temporary memory grows with a buffer, as a share of how its caches do."""
  sizes = {'width': 128, 'heads': 4, 'kv_heads': 4, 'ffn': 64, 'layers': 1}
  graphdef, params = build(drafter, **sizes)
  weights = engine.lay_out(graphdef, params)
  sampling = filters.arrays([filters.Settings()], 2)
  prompt = jax.device_put(np.ones((1, 8), np.int32), mesh.whole_BT)
  length = jax.device_put(np.array([8], np.int32), mesh.ids_B)
  found = []
  for slots in (512, 2048):
    plan = engine.Plan(draft=2, slots=slots, chunk=3)
    start = functools.partial(engine.prefill, graphdef, plan)
    state = jax.eval_shape(start, weights, prompt, length, sampling)
    caches = jax.tree.leaves((state.caches, state.drafter.caches))
    own = sum(x.size * x.dtype.itemsize for x in caches)
    if what == 'decode':
      run, args, donated = engine.decode, (prompt, length, sampling), ()
    else:
      run, args, donated = engine.one_round, (state, sampling), (1,)
    jitted = jax.jit(functools.partial(run, graphdef, plan), donate_argnums=donated)
    memory = jitted.lower(weights, *args).compile().memory_analysis()
    assert memory is not None
    temporary = memory.temp_size_in_bytes
    if what == 'decode':  # they are its own, once
      temporary -= own
    found.append((temporary, own))
  (less, few), (more, many) = found
  return (more - less) / (many - few)


def put_by_scatter(buffer, new, at_B, axis=1):
  """`cache.put` as one would write it first: XLA on CPU copies a buffer of one row."""
  spec = jax.typeof(buffer).sharding.spec
  one = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=axis - 1)
  specs = (spec, spec, jax.P(spec[0]))
  write = jax.shard_map(jax.vmap(one), in_specs=specs, out_specs=spec)
  return write(buffer, jax.reshard(new.astype(buffer.dtype), spec), at_B)


@pytest.mark.slow
@pytest.mark.parametrize('what', ['one_round', 'decode'])
@pytest.mark.parametrize('name', ['depth', 'rows', 'parallel'])
def test_no_round_copies_a_cache(what, name, optimised):
  with on_mesh(fsdp=1):
    share = share_of_caches(what, dataclasses.replace(DRAFTERS[name], depth=2))
    assert share < 0.1


@pytest.mark.slow
@pytest.mark.parametrize('what', ['one_round', 'decode'])
def test_a_copied_cache_would_be_seen(what, optimised, monkeypatch):
  monkeypatch.setattr(cache, 'put', put_by_scatter)
  with on_mesh(fsdp=1):
    drafter = dataclasses.replace(DRAFTERS['rows'], depth=2)
    assert share_of_caches(what, drafter) > 0.5
