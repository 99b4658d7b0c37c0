"""Beginning with another run's parameters: which are taken, which are not, and what is
refused before anything compiles."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from probes import oracle

from mtpjax import checkpoint, fields, init_from, mesh, model, workdir
from mtpjax import config as configs
from mtpjax.data import tokenizer
from mtpjax.drafters import parallel, residual, sequential
from mtpjax.models import trunk as trunks


@pytest.fixture(autouse=True)
def _mesh():
  with jax.set_mesh(mesh.make(mesh.Config())):
    yield


def settings(drafter=None, **trunk):
  config = configs.Config(
    trunk=trunks.Config(
      **{**dict(width=16, layers=2, heads=2, ffn=16, vocab_multiple=8), **trunk}
    ),
    drafter=drafter,
  )
  config.data.shards = config.data.batch = 8
  return configs.finalize(config, 256)


def made(config, seed=0):
  """(abstract, parameters) of that config."""
  _, abstract, _ = model.init(config.trunk, config.parts(), 0)
  return abstract, oracle.filled(abstract, seed)


def load(found, config, params):
  graphdef, _, _ = model.init(config.trunk, config.parts(), 0)
  return init_from.load(found, graphdef, params)


def save(directory, config, params, steps=(3,), tokens=None):
  metadata = workdir.metadata(config, tokens or tokenizer.Bytes())
  saving = checkpoint.Config(every=1)
  with checkpoint.Checkpoints(directory / 'checkpoints', saving, metadata) as saved:
    for step in steps:
      state = {
        'params': jax.tree.map(lambda x, n=step: x * n, params),
        'opt': params['trunk'],
      }
      saved.save(step, state, {})


SAVED = sequential.Config(depth=1)


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """A run with a drafter: steps 2 and 3, whose parameters are times 2 and 3."""
  directory = tmp_path_factory.mktemp('run')
  with jax.set_mesh(mesh.make(mesh.Config())):
    config = settings(dataclasses.replace(SAVED))
    _, params = made(config)
    save(directory, config, params, steps=(2, 3))
  return directory, params


def plan(path, config, fresh=(), tokens=None):
  abstract, params = made(config, seed=1)
  found = init_from.plan(
    init_from.Config(str(path), fresh),
    abstract,
    tokens or tokenizer.Bytes(),
    configs.conventions(config),
    config.trunk,
  )
  return found, params


def assert_taken(got, base, source, taken, times=3):
  """Leaves whose names start with `taken` are the source's, the others untouched."""
  flat: Any = flatten_dict
  base, got, source = (flat(x, sep='/') for x in (base, got, source))
  assert list(got) == list(base)
  seen = 0
  for name, leaf in got.items():
    theirs = name.startswith(taken)
    want = np.asarray(source[name]) * times if theirs else np.asarray(base[name])
    np.testing.assert_array_equal(np.asarray(leaf), want, err_msg=name)
    assert leaf.sharding == base[name].sharding
    seen += theirs
  assert seen


@pytest.mark.parametrize(
  ('drafter', 'fresh', 'taken'),
  [
    (sequential.Config(depth=1), (), ('trunk/', 'objectives/')),
    (sequential.Config(depth=3), (), ('trunk/', 'objectives/')),  # the shared module
    (sequential.Config(depth=1), ('objectives/*',), ('trunk/',)),
    (sequential.Config(depth=1), ('trunk/*',), ('objectives/',)),
    (parallel.Config(depth=1), ('objectives/*',), ('trunk/',)),
    (None, (), ('trunk/',)),
  ],
)
def test_what_is_there_and_not_fresh_is_taken(run, drafter, fresh, taken):
  directory, source = run
  config = settings(drafter)
  found, params = plan(directory, config, fresh)
  assert found.step == 3
  assert_taken(load(found, config, params), params, source, taken)
  names = {*flatten_dict(params, sep='/')}
  assert {*found.restored} == {n for n in names if n.startswith(taken)}
  assert {*found.fresh} == names - {*found.restored}
  unused = {*flatten_dict(source, sep='/')} - {*found.restored}
  assert {*found.unused} == unused
  text = str(found)
  for some in (*sorted(found.fresh)[:1], *sorted(unused)[:1]):
    assert some.split('/')[0] in text
  if not unused:
    assert 'unused there: nothing' in text


def test_a_step_may_be_named(run):
  directory, source = run
  config = settings(None)
  found, params = plan(directory / 'checkpoints' / '2', config)
  assert found.step == 2
  assert_taken(load(found, config, params), params, source, ('trunk/',), times=2)


def test_where_there_is_an_average_it_is_taken(tmp_path):
  config = settings(dataclasses.replace(SAVED))
  _, source = made(config)
  metadata = workdir.metadata(config, tokenizer.Bytes())
  own = {'trunk': jax.tree.map(lambda x: 5 * x, source['trunk'])}
  saving = checkpoint.Config(every=1)
  with checkpoint.Checkpoints(tmp_path / 'checkpoints', saving, metadata) as saved:
    saved.save(3, {'params': source, 'ema': own}, {})
  found, params = plan(tmp_path, config)
  assert 'the average over training of' in str(found)
  got = load(found, config, params)
  assert_taken({'trunk': got['trunk']}, {'trunk': params['trunk']}, source, 'trunk/', 5)
  both = {'objectives': got['objectives']}, {'objectives': params['objectives']}
  assert_taken(*both, source, 'objectives/', 1)


def test_another_tokenizer_is_refused(run):
  with pytest.raises(fields.ConfigError, match='another tokenizer'):
    plan(run[0], settings(None), tokens=tokenizer.Characters('ab'))


def test_another_size_names_the_leaves_and_the_way_out(run):
  with pytest.raises(fields.ConfigError, match=r'gain_ffn float32\[2, 16\] there'):
    plan(run[0], settings(None, width=32))
  with pytest.raises(fields.ConfigError, match=r'init_from\.fresh'):
    plan(run[0], settings(None, layers=3))


@pytest.mark.parametrize(
  ('drafter', 'said'),
  [
    (sequential.Config(depth=1, concat='hidden_embed'), "concat='embed_hidden'"),
    (sequential.Config(depth=1, hidden_norm='pre'), "hidden_norm='post'"),
  ],
)
def test_a_drafter_of_other_choices_is_refused_though_its_shapes_fit(
  run, drafter, said
):
  with pytest.raises(fields.ConfigError, match=said):
    plan(run[0], settings(drafter))
  plan(run[0], settings(drafter), fresh=('objectives/*',))


def test_a_trunk_of_other_choices_is_said(run):
  found, _ = plan(run[0], settings(None, rope_theta=5e5))
  assert 'rope_theta=10000.0, not 500000.0' in str(found)


def test_a_pattern_without_a_match_and_a_run_without_a_checkpoint(run, tmp_path):
  with pytest.raises(fields.ConfigError, match=r"fresh = 'objectivs/\*'.*objectives/"):
    plan(run[0], settings(sequential.Config(depth=1)), fresh=('objectivs/*',))
  with pytest.raises(fields.ConfigError, match='has nothing of this model'):
    plan(run[0], settings(sequential.Config(depth=1)), fresh=('*',))
  with pytest.raises(checkpoint.CheckpointError, match='no checkpoint'):
    plan(tmp_path, settings(None))


def test_a_head_that_starts_as_the_trunk_s_starts_as_the_loaded_trunk_s(run):
  directory, source = run
  config = settings(residual.Config(depth=2, form='medusa'))
  found, params = plan(directory, config)
  got = load(found, config, params)
  heads = got['objectives']['drafter']['unembedding']
  assert len(heads) == 2
  for head in heads.values():
    np.testing.assert_array_equal(head, 3 * source['trunk']['unembedding'])
