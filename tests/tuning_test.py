"""What trains, by name and layer: which it is, and that nothing else moves by a bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from updates import CONSTANT, drawn, named, on

from mtpjax import config as configs
from mtpjax import fields, optimizers, step, tuning
from mtpjax.drafters import sequential
from mtpjax.fields import ConfigError
from mtpjax.models import trunk

SHAPES = {
  ('trunk', 'blocks', 'w_up'): (12, 4, 8),
  ('trunk', 'blocks', 'gain_ffn'): (12, 4),
  ('trunk', 'embedding'): (16, 4),
  ('objectives', 'drafter', 'w_join'): (2, 2, 4, 4),
  ('objectives', 'drafter', 'block', 'w_up'): (2, 4, 8),
}
PARAMS = tuning.traverse_util.unflatten_dict(
  {path: jax.ShapeDtypeStruct(shape, 'float32') for path, shape in SHAPES.items()}
)


def chosen(*tune, freeze_trunk=False):
  """{name: 'all' or the layers that train}."""
  found = tuning.select(PARAMS, freeze_trunk, tune)
  layers = {
    p: 'all' if on is None else on.nonzero()[0].tolist() for p, on in found.items()
  }
  return {'/'.join(path): value for path, value in layers.items()}


def test_patterns_choose_leaves_and_layers():
  every = {'/'.join(path): 'all' for path in SHAPES}
  assert chosen() == every
  drafter = {n: 'all' for n in every if n.startswith('objectives')}
  assert chosen(freeze_trunk=True) == chosen('objectives/*') == drafter
  up, gain = 'trunk/blocks/w_up', 'trunk/blocks/gain_ffn'
  assert chosen('trunk/blocks/*/w_up') == {up: 'all'}
  assert chosen('trunk/blocks/3/*') == {up: [3], gain: [3]}
  assert chosen('trunk/blocks/1/*') == {up: [1], gain: [1]}  # not 10, 11
  assert chosen('*/w_up', freeze_trunk=True) == {'objectives/drafter/block/w_up': 'all'}
  assert chosen('objectives/drafter/block/1/*') == {
    'objectives/drafter/block/w_up': [1]
  }
  several = chosen('trunk/blocks/0/w_up', 'trunk/emb*', 'trunk/blocks/[5-6]/w_*')
  assert several == {up: [0, 5, 6], 'trunk/embedding': 'all'}


@pytest.mark.parametrize('written', ['8-11', '[8-11]'])
def test_a_range_of_layers_is_one_of_numbers(written):
  assert chosen(f'trunk/blocks/{written}/w_up') == {'trunk/blocks/w_up': [8, 9, 10, 11]}


@pytest.mark.parametrize(
  ('pattern', 'freeze_trunk', 'said'),
  [
    ('trunk/block/*/w_up', False, 'trunk/blocks/0-11/w_up'),
    ('objectives/draftr/w_join', False, 'objectives/drafter/w_join'),
    ('trunk/blocks/12/w_up', False, 'trunk/blocks/0-11/w_up'),
    ('trunk/blocks/7-4/*', False, 'lower number first'),
    ('trunk/blocks/0/*', True, 'freeze_trunk=False'),
    ('w_up', False, 'choose from'),
  ],
)
def test_a_pattern_of_nothing_is_refused_with_what_is_near(pattern, freeze_trunk, said):
  with pytest.raises(ConfigError, match='tune = ') as error:
    chosen('objectives/*', pattern, freeze_trunk=freeze_trunk)
  assert said in str(error.value)


def test_a_frozen_trunk_without_parameters_beside_it_leaves_nothing_to_train():
  with pytest.raises(ConfigError, match='freeze_trunk = True: leaves nothing to train'):
    tuning.select({'trunk': PARAMS['trunk'], 'objectives': {}}, True, ())


def test_a_config_with_a_pattern_of_nothing_is_refused_before_anything_compiles():
  with on():
    config = configs.Config(
      trunk=trunk.Config(vocab=64, width=16, layers=2, heads=2, ffn=32),
      drafter=sequential.Config(),
      tune=('trunk/blocks/0/*', 'objectives/drafter/block/*'),
    )
    configs.finalize(config)
    fields.override(config, 'tune', 'trunk/blocks/2-3/*')
    with pytest.raises(ConfigError, match='trunk/blocks/2-3'):
      configs.finalize(config)


@pytest.mark.parametrize('kind', [optimizers.AdamW, optimizers.Muon])
def test_what_no_pattern_matches_stays_bit_identical(kind, given_gradients):
  config = kind(rate=CONSTANT, weight_decay=0.5, clip=None)
  tune = ('trunk/blocks/1/*', 'objectives/heads/*')
  with on(fsdp=2, tensor=4):
    params, *each = [drawn(seed, 'float32') for seed in range(4)]
    seen = given_gradients(params, config, each, tune=tune)
    state, metrics = seen[-1]
    before, after = named(params), named(state['params'])
    alone = given_gradients(params, config, each)[-1][0]
    alone = named(alone['params'])
  square = 0.0
  for name, p in before.items():
    if name.startswith('trunk/blocks'):
      np.testing.assert_array_equal(after[name][[0, 2]], p[[0, 2]], err_msg=name)
      assert np.all(after[name][1] != p[1]), name
      # Layers do not mix: the one that trains moves as if all did.
      np.testing.assert_allclose(after[name][1], alone[name][1], rtol=1e-5, atol=1e-6)
      square += np.sum(named(each[-1])[name][1] ** 2)
    elif name.startswith('objectives/heads'):
      assert np.all(after[name] != p), name
      square += np.sum(named(each[-1])[name] ** 2)
    else:
      np.testing.assert_array_equal(after[name], p, err_msg=name)
  assert float(metrics['grad_norm']) == pytest.approx(square**0.5, rel=1e-5)
  kept = [
    jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state['opt'])
  ]
  assert not [name for name in kept if 'embedding' in name or 'w_join' in name]
  assert [name for name in kept if 'w_map' in name]


def test_freezing_the_trunk_and_patterns_go_together(given_gradients):
  with on():
    params, grads = (drawn(seed, 'float32') for seed in (0, 1))
    config = optimizers.AdamW(rate=CONSTANT, weight_decay=0.5)
    state, _ = given_gradients(
      params, config, [grads], freeze_trunk=True, tune=('*/w_*',)
    )[-1]
  assert 'trunk' not in state['opt'][0].mu
  before, after = named(params), named(state['params'])
  for name, p in before.items():
    assert np.array_equal(after[name], p) == name.startswith('trunk'), name


def test_gradients_of_a_part_are_those_of_the_whole():
  """Of a real model: the parts are put together again in the right place."""
  from step_test import prepared, rows, settings

  found = []
  with on():
    for tune in ((), ('trunk/blocks/1/w_*', 'objectives/drafter/w_join')):
      config = settings(dtype='float32', tune=tune)
      graphdef, params = prepared(config)
      run = jax.jit(
        lambda p, a, c=config, g=graphdef: step.gradients(
          g, p, step.to_batch(a, False), c, jnp.int32(0)
        )
      )
      found.append(jax.device_get(run(params, step.put(rows()))))
  (loss, _, whole), (same, _, part) = found
  assert same == pytest.approx(loss, rel=1e-6)
  whole, part = named(whole), named(part)
  assert {n for n in part if not n.startswith('trunk/blocks/w_')} == {
    'objectives/drafter/w_join'
  }
  for name, g in part.items():
    want = whole[name].copy()
    if name.startswith('trunk'):
      want[0] = 0
    assert np.any(want)
    np.testing.assert_allclose(g, want, rtol=1e-4, atol=1e-6, err_msg=name)
