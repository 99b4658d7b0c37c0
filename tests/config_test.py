"""The config tree: what cannot run is refused by name, and every config file loads."""

import ast
import copy
import dataclasses
import json
import typing
from pathlib import Path

import jax
import pytest

from mtpjax import config as configs
from mtpjax import fields, flags, mesh, optimizers, schedules
from mtpjax.checkpoint import Config as CheckpointConfig
from mtpjax.data import batches, sources
from mtpjax.drafters import base, parallel, sequential
from mtpjax.fields import ConfigError
from mtpjax.models import trunk as trunks

ROOT = Path(__file__).parents[1]
FILES = sorted(p.relative_to(ROOT) for p in (ROOT / 'configs').rglob('*.py'))


@dataclasses.dataclass
class Reader(base.Config):
  """Reads layers of the trunk, as EAGLE-3, DFlash and KV sharing do."""

  taps: tuple[int, ...] = ()
  kv_layers: tuple[int, ...] = ()

  def needs(self, trunk):
    return trunks.Needs(taps=self.taps, kv_layers=self.kv_layers)


def settings(**changes):
  config = configs.Config(
    data=batches.Config(source=sources.Stdlib(files=3), length=16, batch=16),
    trunk=trunks.Config(width=32, layers=4, heads=4, kv_heads=2),
    drafter=sequential.Config(depth=2),
  )
  for path, value in changes.items():
    *parents, name = path.split('__')
    node = config
    for parent in parents:
      node = getattr(node, parent)
    setattr(node, name, value)
  return config


def finalize(config, sizes=None, vocab=256):
  """As `train.main` does: the mesh, then before and after the data is read."""
  sizes = mesh.Config(**({'fsdp': 1} if sizes is None else sizes))
  devices = jax.devices() if -1 in vars(sizes).values() else None
  count = 1
  for size in vars(sizes).values():
    count *= size
  with jax.set_mesh(mesh.make(sizes, devices or jax.devices()[:count])):
    configs.finalize(config)
    return configs.finalize(config, vocab)


def test_what_follows_from_other_fields_is_filled_in_once_and_stays():
  config = finalize(settings(trunk__kv_heads=None))
  assert (config.trunk.vocab, config.trunk.padded_vocab) == (256, 256)
  assert (config.trunk.kv_heads, config.trunk.head_width) == (4, 8)
  assert config.trunk.ffn == 128  # 8/3 · 32 = 85.3, up to a multiple of 64
  again = finalize(copy.deepcopy(config))
  assert again == config
  assert fields.from_json(json.loads(json.dumps(fields.to_json(config)))) == config


def test_what_somebody_set_is_kept():
  config = settings(trunk__vocab=300, trunk__ffn=96, trunk__head_width=16)
  finalize(config)
  assert config.trunk.vocab == 300
  assert config.trunk.padded_vocab == 320
  assert (config.trunk.ffn, config.trunk.head_width) == (96, 16)


@pytest.mark.parametrize(
  ('changes', 'field', 'fix'),
  [
    ({'steps': 0}, 'steps = 0', 'use 1 …'),
    ({'log_every': 0}, 'log_every = 0', 'use 1 …'),
    ({'seed': -1}, 'seed = -1', '2³²'),
    ({'seed': 2**32}, 'seed = 4294967296', '2³²'),
    ({'steps': '5'}, "steps = '5'", 'assign a whole number'),
    ({'steps': True}, 'steps = True', 'assign a whole number'),
    ({'optimizer__rate__peak': float('nan')}, 'optimizer.rate.peak', 'assign a number'),
    ({'trunk__dtype': 'float16'}, "trunk.dtype = 'float16'", 'bfloat16'),
    ({'trunk__dtype': 'float64'}, "trunk.dtype = 'float64'", 'JAX_ENABLE_X64=1'),
    ({'trunk__heads': 5}, 'trunk.heads = 5', 'trunk.head_width'),
    ({'trunk__kv_heads': 3}, 'trunk.kv_heads = 3', 'divisor of the heads'),
    ({'trunk__head_width': 7}, 'trunk.head_width = 7', 'rotary'),
    ({'trunk__layers': 0}, 'trunk.layers = 0', 'at least 1'),
    ({'trunk__windows': ()}, 'trunk.windows = ()', '(1024, 0)'),
    ({'trunk__vocab': 255}, 'trunk.vocab = 255', 'at least 256'),
    ({'drafter__depth': 0}, 'drafter.depth = 0', 'at least 1'),
    ({'drafter__depth': -2}, 'drafter.depth = -2', 'at least 1'),
    ({'drafter__rho': 0.0}, 'drafter.rho = 0.0', 'use 1'),
    (
      {'drafter__detach': ('tap',)},
      "drafter.detach = 'tap'",
      'hidden, embedding, head',
    ),
    ({'drafter__weight': schedules.Constant(-1.0)}, 'drafter.weight.value', 'use 0'),
    (
      {'drafter__weight': schedules.Piecewise(values=(1.0,))},
      'drafter.weight.values',
      'one value more',
    ),
    (
      {'drafter': sequential.Config(depth=2, share=False, attend='rows')},
      "drafter.attend = 'rows'",
      "drafter.share=True or drafter.attend='depth'",
    ),
    (
      {'drafter': parallel.Config(depth=4, match_parameters=True)},
      'drafter.depth = 4',
      'match_parameters=False',
    ),
    ({'drafter': Reader(taps=(2, 5))}, 'drafter.taps = 5', 'use 0 … 4'),
    ({'drafter': Reader(taps=(-1,))}, 'drafter.taps = -1', 'use 0 … 4'),
    ({'drafter': Reader(kv_layers=(4,))}, 'drafter.kv_layers = 4', 'use 0 … 3'),
    (
      {'objectives': (Reader(depth=0),)},
      'objectives[0].depth = 0',
      'at least 1',
    ),
    (
      # The drafter takes two of the four layers that the other one reads.
      {
        'drafter': parallel.Config(depth=2, match_parameters=True),
        'objectives': (Reader(taps=(3,)),),
      },
      'objectives[0].taps = 3',
      'a trunk of 2; use 0 … 2',
    ),
    ({'drafter': None, 'freeze_trunk': True}, 'freeze_trunk = True', 'set a drafter'),
    ({'loss__chunk_tokens': 0}, 'loss.chunk_tokens = 0', '1024'),
    ({'loss__z_loss': -0.1}, 'loss.z_loss = -0.1', 'use 0'),
    ({'optimizer__b2': 1.0}, 'optimizer.b2 = 1.0', '0.9'),
    ({'optimizer__clip': 0.0}, 'optimizer.clip = 0.0', '1.0'),
    ({'optimizer__accumulate': 0}, 'optimizer.accumulate = 0', 'at least 1'),
    ({'optimizer__weight_decay': -1.0}, 'optimizer.weight_decay = -1.0', 'use 0'),
    ({'optimizer__rate__last': 1.5}, 'optimizer.rate.last = 1.5', 'fraction'),
    ({'checkpoint__every': 0}, 'checkpoint.every = 0', 'at least 1'),
    ({'checkpoint__keep': 0}, 'checkpoint.keep = 0', 'at least 1'),
    ({'optimizer__accumulate': 3}, 'data.batch = 16', 'such as 24'),
    ({'trunk__widht': 5}, 'trunk.widht = 5', "did you mean 'width'?"),
    ({'trunk__rho': 5}, 'trunk.rho = 5', "did you mean 'drafter.rho'?"),
  ],
)
def test_what_cannot_run_is_refused_with_field_value_and_fix(changes, field, fix):
  with pytest.raises(ConfigError) as caught:
    finalize(settings(**changes))
  where, _, said = str(caught.value).partition(';')
  assert where.startswith(field), caught.value
  assert fix in str(caught.value), caught.value
  assert said.strip()


@pytest.mark.parametrize(
  ('changes', 'field', 'fix'),
  [
    ({'data__length': 1}, 'length=1', '2 slots'),
    ({'data__batch': 12}, 'batch=12', 'such as 16'),
    ({'data__batch': 0}, 'batch=0', 'such as 8'),
    ({'data__shards': 0}, 'shards=0', 'at least 1'),
  ],
)
def test_what_the_data_cannot_be_is_refused_with_field_value_and_fix(
  changes, field, fix
):
  with pytest.raises(sources.DataError) as caught:
    finalize(settings(**changes))
  assert field in str(caught.value)
  assert fix in str(caught.value)


@pytest.mark.parametrize(
  ('changes', 'sizes', 'field', 'fix'),
  [
    ({}, {'fsdp': 8, 'replica': 1}, None, None),
    ({'optimizer__accumulate': 4}, {'fsdp': -1}, 'data.batch = 16', 'such as 32'),
    ({'data__batch': 8}, {'fsdp': 2, 'replica': 2, 'expert': 2}, None, None),
    (
      {'data__batch': 8, 'data__shards': 4},
      {'fsdp': 3},
      'data.batch = 8',
      'such as 12',
    ),
    ({}, {'fsdp': 1, 'tensor': 8}, 'trunk.heads = 4', 'such as 8'),
    ({'trunk__ffn': 66}, {'fsdp': 1, 'tensor': 4}, 'trunk.ffn = 66', 'such as 68'),
    (
      {'trunk__vocab_multiple': 2},
      {'fsdp': 1, 'tensor': 4},
      'trunk.vocab_multiple = 2',
      'such as 4',
    ),
    (
      {'data__length': 18},
      {'fsdp': 1, 'context': 4},
      'data.length = 18',
      'such as 20',
    ),
    (
      {'trunk__width': 36, 'trunk__head_width': 8},
      {'fsdp': 8},
      'trunk.width = 36',
      'such as 40',
    ),
    ({'trunk__kv_heads': 1}, {'fsdp': 2, 'tensor': 4}, None, None),
  ],
)
def test_lengths_must_divide_over_the_axes_that_hold_them(changes, sizes, field, fix):
  config = settings(**changes)
  if field is None:
    finalize(config, sizes)
    return
  with pytest.raises(ConfigError) as caught:
    finalize(config, sizes)
  assert str(caught.value).startswith(field)
  assert 'mesh.' in str(caught.value)
  assert fix in str(caught.value)


def test_objectives_are_named_after_their_files_and_numbered():
  config = settings(objectives=(Reader(), parallel.Config(), Reader(depth=3)))
  assert list(config.parts()) == ['drafter', 'config_test', 'parallel', 'config_test_2']
  assert config.parts()['config_test_2'].depth == 3
  assert list(settings(drafter=None).parts()) == []


def test_conventions_name_every_choice_of_every_objective():
  config = settings(
    drafter=sequential.Config(depth=3, share=False, concat='hidden_embed'),
    objectives=(parallel.Config(depth=2),),
  )
  found = configs.conventions(config)
  assert found['modules'] == found['depth'] == 3
  assert found['concat'] == 'hidden_embed'
  assert found['shared'] == ['embedding', 'head']
  assert found['objectives']['parallel']['teacher_forcing_inputs'].startswith('none')
  json.dumps(found)


def test_the_fields_that_may_change_between_runs_exist():
  config = configs.Config()
  known = {field.name for field in dataclasses.fields(config)}
  known |= {f'trunk.{field.name}' for field in dataclasses.fields(config.trunk)}
  assert set(configs.FREE) < known


# ------------------------------------------------------------------------ config files


def load(path, arg):
  return flags.load(f'{ROOT / path}:{arg}' if arg else str(ROOT / path))


def variants(path):
  """The arguments that a file's `get_config` says it takes, read without running it."""
  for node in ast.parse((ROOT / path).read_text()).body:
    if isinstance(node, ast.FunctionDef) and node.name == 'get_config':
      literal = node.args.args[0].annotation
      assert isinstance(literal, ast.Subscript)
      return list(ast.literal_eval(literal.slice))
  raise AssertionError(f'{path} has no get_config')


@pytest.mark.parametrize(
  ('backend', 'dtype'), [('cpu', 'float32'), ('gpu', 'bfloat16'), ('tpu', 'bfloat16')]
)
def test_accelerators_compute_in_bfloat16_with_parameters_in_float32(
  monkeypatch, backend, dtype
):
  monkeypatch.setattr('jax.default_backend', lambda: backend)
  trunk = finalize(configs.Config()).trunk
  assert (trunk.dtype, trunk.param_dtype) == (dtype, 'float32')
  named = configs.Config()
  named.trunk.dtype = 'float32'
  assert finalize(named).trunk.dtype == 'float32'


def test_a_table_of_positions_reaches_as_far_as_rows_and_decodes():
  config = configs.Config()
  config.trunk.learned_positions = config.data.length - 1
  with pytest.raises(ConfigError, match=r'learned_positions = 255: .*data\.length'):
    finalize(config)
  config.trunk.learned_positions = config.data.length = 100
  config.decode.prompt_tokens, config.decode.tokens = 64, 37
  with pytest.raises(ConfigError, match=r'= 100: .*101 positions.*decode\.tokens'):
    finalize(config)
  config.decode.tokens = 36
  finalize(config)


@pytest.mark.parametrize('arg', ['', 'tiny'])
@pytest.mark.parametrize('path', FILES, ids=str)
def test_every_config_file_loads_and_can_run(path, arg):
  assert arg in variants(path)
  config = load(path, arg)
  assert isinstance(config, configs.Config)
  finalize(config)
  assert config.name == path.stem + ('-tiny' if arg else '')
  assert config.steps >= 20
  assert config.checkpoint.every <= config.steps
  assert config.optimizer.rate.warmup < config.steps
  # It survives being a checkpoint's metadata.
  assert fields.from_json(json.loads(json.dumps(fields.to_json(config)))) == config


@pytest.mark.parametrize('path', FILES, ids=str)
def test_a_tiny_config_is_the_same_run_in_small(path):
  whole, tiny = finalize(load(path, '')), finalize(load(path, 'tiny'))
  assert {n: type(p) for n, p in whole.parts().items()} == {
    n: type(p) for n, p in tiny.parts().items()
  }
  for size in ('width', 'layers'):
    assert getattr(tiny.trunk, size) <= getattr(whole.trunk, size)
  assert tiny.steps < whole.steps


@pytest.mark.parametrize('path', FILES, ids=str)
def test_every_config_file_carries_its_command_hardware_time_and_result(path):
  said = ast.get_docstring(ast.parse((ROOT / path).read_text())) or ''
  assert f'python -m mtpjax.train --config={path}' in said
  for word in ('Hardware:', 'Time:', 'Expected:'):
    assert word in said, word


@pytest.mark.parametrize('path', FILES, ids=str)
def test_every_argument_of_a_config_file_loads(path):
  for arg in variants(path):
    finalize(load(path, arg))
  with pytest.raises(ConfigError, match='tiny'):
    load(path, 'tinny')


def test_defaults_of_the_tree_can_run():
  config = configs.Config()
  finalize(config)
  assert isinstance(config.checkpoint, CheckpointConfig)
  assert isinstance(config.optimizer, optimizers.AdamW)
  hints = typing.get_type_hints(configs.Config)
  assert set(hints) == {field.name for field in dataclasses.fields(config)}
