"""Objectives that do not draft, beside a drafter and without one: evaluation prints
them all, and a decode is what it is without them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import oracle

from mtpjax import config as configs
from mtpjax import heldout, mesh, model, step
from mtpjax.data import batches, pack
from mtpjax.drafters import parallel
from mtpjax.models import trunk
from mtpjax.objectives import bag, registers, token_order
from mtpjax.sampling.filters import Settings
from mtpjax.sampling.generate import Decoder

V, NAMES = 19, ('token_order', 'bag', 'registers')


@pytest.fixture(autouse=True, scope='module')
def one_device():
  with jax.set_mesh(mesh.make(mesh.Config(), jax.devices()[:1])):
    yield


def settings(drafter, auxiliary=NAMES):
  every = (token_order.Config(), bag.Config(), registers.Config())
  objectives = tuple(
    x for x, name in zip(every, NAMES, strict=True) if name in auxiliary
  )
  return configs.finalize(
    configs.Config(
      data=batches.Config(length=12, batch=2, shards=2),
      trunk=trunk.Config(vocab=V, width=16, layers=1, heads=2, ffn=32, remat='none'),
      drafter=parallel.Config(depth=2, form='linear') if drafter else None,
      objectives=objectives,
    )
  )


def init(config):
  graphdef, abstract, _ = model.init(config.trunk, config.parts(), 0)
  return graphdef, oracle.filled(abstract, plain=True)


def test_evaluation_gives_every_objective_its_figures_and_units():
  config = settings(drafter=True)
  graphdef, params = init(config)
  rng = np.random.default_rng(0)
  texts = [rng.integers(0, V, n).astype(np.int32) for n in (12, 5, 6, 12, 9)]
  rows = pack.pack(pack.concatenate(iter(texts), V), 12, 0)
  compiled = step.compile_eval(graphdef, config, params, np.ones(V, np.int32))
  figures = heldout.evaluate(compiled, params, config, rows)
  again = heldout.evaluate(compiled, params, config, rows)
  assert figures == again  # registers are drawn, always with the same key
  assert len(figures['loss_by_depth']) == 3
  assert set(figures['objectives']) == set(NAMES)
  units = {name: x['unit'] for name, x in figures['objectives'].items()}
  assert units == {
    'token_order': 'nats/window',
    'bag': 'nats/bag',
    'registers': 'nats/token',
  }
  for name, part in figures['objectives'].items():
    assert np.isfinite(part['loss_by_depth']).all(), name
    assert ('bits_per_byte_by_depth' in part) == (name == 'registers')
  # A token order is learnt from wherever there is a next token, a bag one token less.
  counts = {name: x['counts_by_depth'] for name, x in figures['objectives'].items()}
  assert counts['token_order'] == figures['counts_by_depth'][:1]
  assert counts['bag'] == figures['counts_by_depth'][1:2]
  said = heldout.table(figures)
  for name in NAMES:
    assert f'{name} 1' in said


def test_a_decode_needs_none_of_their_parameters():
  """Greedy texts of one trunk: with all of them, plainly with registers, which have
  none, and with the drafter alone."""
  prompts = np.array([[3, 1, 4, 1], [5, 9, 2, 6]], np.int32)
  lengths = np.array([4, 2], np.int32)

  def decode(drafter, auxiliary):
    graphdef, params = init(settings(drafter, auxiliary))
    parts = params.get('objectives', {})
    lost = {
      name: jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), part)
      for name, part in parts.items()
      if name in NAMES
    }
    assert set(lost) == set(auxiliary) - {'registers'}
    params |= {'objectives': {**parts, **lost}} if parts else {}
    out = Decoder(graphdef, params, longest=32).generate(
      prompts, lengths, Settings(budget=6)
    )
    return out.tokens, out.stats.rounds

  alone, rounds = decode(True, ())
  together, also = decode(True, NAMES)
  plain, _ = decode(False, ('registers',))
  np.testing.assert_array_equal(together, alone)
  np.testing.assert_array_equal(plain, alone)
  assert rounds == also
