"""The loop below `generate`: rows apart, broken rows, and a buffer's end."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import Forcing, V, build, on_mesh, plainly, scripted

from mtpjax import mesh
from mtpjax.drafters import parallel, sequential
from mtpjax.sampling import engine, filters
from mtpjax.sampling.filters import Settings

K, NEW = 4, 24
LENGTHS = np.array([1, 3, 8, 8], np.int32)
PROMPTS = np.random.default_rng(0).integers(0, V, (4, 8)).astype(np.int32)
PLAN = engine.Plan(draft=K, slots=40, chunk=5)
# Right drafts of each row, by round.
RIGHT = np.stack([np.resize([a, 2, K, 0, 3], 128) for a in (0, 1, K, 2)])


def decoder(graphdef, plan=PLAN):
  run: Any = jax.jit(functools.partial(engine.decode, graphdef, plan))

  def decode(params, settings, rows: Any = slice(None)):
    ids = jax.device_put(PROMPTS[rows], mesh.whole_BT)
    lengths = jax.device_put(LENGTHS[rows], mesh.ids_B)
    weights = engine.lay_out(graphdef, params)
    sampling = filters.arrays(settings, plan.draft)
    return jax.device_get(run(weights, ids, lengths, sampling))

  return decode


def texts(state):
  return [row[:n].tolist() for row, n in zip(state.tokens, state.length, strict=True)]


@pytest.fixture(scope='module')
def forced():
  """(graphdef, parameters, text) of a drafter that has nothing to compute."""
  with on_mesh(fsdp=1):
    graphdef, params = build(Forcing(depth=K))
    return graphdef, params, plainly(graphdef, params, PROMPTS, LENGTHS, NEW)[0]


def test_every_row_equals_its_batch_of_one(forced):
  """Rows that accept 0, 1, K and 2 drafts in the first round, one done after it."""
  graphdef, params, text = forced
  decode = decoder(graphdef)
  settings = [
    Settings(budget=20),
    Settings(budget=3),
    Settings(budget=20, temperature=1.0, top_k=5, seed=2),
    Settings(budget=20, temperature=0.7, top_p=0.9, seed=3),
  ]
  with on_mesh(fsdp=1):
    together = decode(scripted(params, text, RIGHT), settings)
    for b in range(4):
      rows = slice(b, b + 1)
      script = scripted(params, text[rows], RIGHT[rows])
      alone = decode(script, settings[rows], rows)
      assert texts(alone) == [texts(together)[b]], f'row {b}'
      for name in ('reason', 'rounds', 'accepted', 'kept', 'proposed', 'reached'):
        one, all_of_them = getattr(alone, name), getattr(together, name)
        np.testing.assert_array_equal(one[0], all_of_them[b], f'{name} of row {b}')
  assert together.passes == 1 + together.rounds.max()
  assert together.rounds[1] == 1


@pytest.mark.parametrize(
  'drafter',
  [sequential.Config(depth=2, attend='rows'), parallel.Config(depth=2)],
)
def test_real_drafts_do_not_depend_on_longer_prompts_beside_them(drafter):
  plan = dataclasses.replace(PLAN, draft=2, chunk=3)  # prompts end in chunks 1 to 3
  warm = [Settings(budget=12, temperature=1.0, seed=b) for b in range(4)]
  with on_mesh(fsdp=1):
    graphdef, params = build(drafter)
    decode = decoder(graphdef, plan)
    together = decode(params, warm)
    assert together.accepted.any()
    for b in range(3):
      # The same prompt four times, so that nothing compiles again.
      alone = decode(params, [warm[b]] * 4, rows=[b] * 4)
      assert texts(alone)[0] == texts(together)[b]
      assert alone.accepted[0].tolist() == together.accepted[b].tolist()


def test_a_row_ends_where_its_buffer_does(forced):
  graphdef, params, text = forced
  with on_mesh(fsdp=1):
    decode = decoder(graphdef, dataclasses.replace(PLAN, slots=12))
    state = decode(scripted(params, text, np.full(4, K)), [Settings(budget=20)] * 4)
  assert (state.length == 12).all() and (state.reason == engine.LENGTH).all()
  np.testing.assert_array_equal(state.tokens[:, :12], text[:, :12])


@pytest.mark.slow
def test_a_broken_parameter_fails_every_row_and_ends():
  with on_mesh(fsdp=1):
    graphdef, params = build(sequential.Config(depth=2))
    params['trunk']['gain_final'] = params['trunk']['gain_final'] * jnp.nan
    plan = dataclasses.replace(PLAN, draft=2)
    state = decoder(graphdef, plan)(params, [Settings(budget=20)] * 4)
  assert (state.reason == engine.FAILED).all() and (state.length == LENGTHS).all()
