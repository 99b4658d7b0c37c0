"""Overrides, type checks and saved configs, and what each mistake says."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pickle
import re
import sys
from typing import Any, Literal

import pytest

from mtpjax import fields


@dataclasses.dataclass
class Chain:
  depth: int = 1
  kind: Literal['seq', 'par'] = 'seq'


@dataclasses.dataclass
class Block:
  size: int = 4
  rate: float = 0.1


@dataclasses.dataclass
class Config:
  steps: int = 10
  lr: float = 0.1
  fast: bool = False
  name: str = 'run'
  limit: int | None = None
  note: str | None = None
  clip: float | None = 1.0
  betas: tuple[float, float] = (0.9, 0.95)
  taps: tuple[int, ...] = ()
  files: tuple[str, ...] = ()
  mix: tuple[tuple[str, float], ...] = ()
  drafter: Chain | Block | None = dataclasses.field(default_factory=Chain)
  second: Chain | Block | None = None
  objectives: tuple[Chain | Block, ...] = ()
  weights: dict[str, float] = dataclasses.field(default_factory=dict)
  table: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
  parts: dict[str, Chain | Block] | None = None
  level: Literal[1, 2] = 1
  either: float | int = 1
  anything: Any = None


def _filled():
  config = Config(objectives=(Chain(), Block()), parts={'code': Chain()})
  config.weights, config.table = {'code': 1.0, 'text': 2.0}, {'code': (1, 2)}
  config.anything = {'x': 1}
  return config


@dataclasses.dataclass(frozen=True)
class Frozen:
  size: int = 4
  rate: float = 0.1


@dataclasses.dataclass
class Derived:
  x: int
  doubled: int = dataclasses.field(init=False)
  scaled: float = 1.0

  def __post_init__(self):
    self.doubled = 2 * self.x
    self.scaled *= 10


@pytest.mark.parametrize(
  ('path', 'text', 'value'),
  [
    ('steps', '5', 5),
    ('steps', '-5', -5),
    ('lr', '1e-3', 1e-3),
    ('lr', '3', 3.0),
    ('either', '3', 3),
    ('fast', 'true', True),
    ('fast', 'False', False),
    ('name', '007', '007'),
    ('name', 'None', 'None'),
    ('name', 'a=b, c', 'a=b, c'),
    ('limit', '7', 7),
    ('note', '12', '12'),
    ('note', '', ''),
    ('clip', 'None', None),
    ('clip', '2', 2.0),
    ('betas', '0,0.5', (0.0, 0.5)),
    ('betas', '(0.8, 1e-2)', (0.8, 0.01)),
    ('taps', '1,2', (1, 2)),
    ('taps', '(1,)', (1,)),
    ('taps', '[3]', (3,)),
    ('taps', '()', ()),
    ('taps', '', ()),
    ('files', 'a/b.txt,1.50', ('a/b.txt', '1.50')),
    ('files', '"a,b","c"', ('a,b', 'c')),
    ('files', '"ab"', ('ab',)),
    ('files', '(a/b,c)', ('a/b', 'c')),
    ('mix', '("web",1),("code",0.5)', (('web', 1.0), ('code', 0.5))),
    ('drafter.kind', 'par', 'par'),
    ('drafter.depth', '3', 3),
    ('drafter', 'None', None),
    ('objectives[1].rate', '2', 2.0),
    ('objectives.0.depth', '6', 6),
    ('weights.code', '2', 2.0),
    ('weights[text]', '0.5', 0.5),
    ('table.code', '3,4', (3, 4)),
    ('parts.code.depth', '7', 7),
    ('anything.x', '2', 2),
    ('objectives', '()', ()),
    ('anything', '5', 5),
  ],
)
def test_override_reads_the_annotated_type(path, text, value):
  config = _filled()
  fields.override(config, path, text)
  node: Any = config
  for name in re.findall(r'\w+', path):
    if isinstance(node, tuple | dict):
      node = node[int(name) if isinstance(node, tuple) else name]
    else:
      node = getattr(node, name)
  assert node == value and type(node) is type(value)
  if isinstance(value, tuple):
    assert list(map(type, node)) == list(map(type, value))
  fields.check_types(config)


def test_a_nullable_field_is_set_and_set_back():
  config = Config()
  for text, value in (('3', 3), ('None', None), ('4', 4), ('none', None)):
    fields.override(config, 'limit', text)
    assert config.limit == value


@pytest.mark.parametrize(
  ('path', 'text', 'words'),
  [
    ('stpes', '5', "no field 'stpes' in config; did you mean 'steps'"),
    ('STEPS', '5', "did you mean 'steps'"),
    (
      'drafter.dpeth',
      '2',
      "in config.drafter (fields_test:Chain); did you mean 'depth'",
    ),
    ('drafter.xyz', '2', 'choose from: depth, kind'),
    ('kind', '2', "mean 'drafter.kind' or 'objectives[0].kind' or 'parts[code]"),
    (
      'steps',
      '1.5',
      "steps = '1.5': not a whole number; write for example --config.st",
    ),
    ('steps', 'abc', "steps = 'abc': not a whole number"),
    ('steps', 'True', "steps = 'True': not a whole number"),
    ('steps', 'None', 'not a whole number'),
    ('lr', 'abc', "lr = 'abc': not a number"),
    ('lr', 'nan', "lr = 'nan': not a number"),
    ('lr', 'True', 'not a number'),
    ('lr', 'inf', "lr = 'inf': not a number"),
    ('clip', '-inf', "clip = '-inf': not a number or None"),
    ('lr', '1e999', 'not a number'),
    ('betas', '0,inf', 'not tuple[float, float]'),
    ('fast', '2', 'not true or false'),
    ('limit', '1.5', 'not a whole number or None'),
    ('drafter.kind', 'sqe', "not 'seq' or 'par'; did you mean 'seq'?"),
    ('betas', '1', 'not tuple[float, float]'),
    ('betas', '1,2,3', 'not tuple[float, float]'),
    ('table', '1,2', 'not dict[str, tuple[int, int]]'),
    ('level', 'True', 'not 1 or 2'),
    ('taps', '1,x', 'not tuple[int, ...]'),
    ('files', '("a"', 'not tuple[str, ...]'),
    ('second.depth', '2', 'as in second=module.Config()'),
    ('drafter', 'abc', 'set its fields, --config.drafter.FIELD'),
    ('second', 'abc', 'not fields_test:Chain or fields_test:Block or None'),
    ('objectives', '1', 'set its fields, --config.objectives[0].FIELD'),
    ('objectives[5].depth', '1', 'count from 0'),
    ('objectives[0]', '1', 'an element cannot be replaced'),
    ('betas[0]', '1', 'set all of it, --config.betas=1,2'),
    ('weights.cod', '1', "no cod in weights = {'code': 1.0, 'text'"),
    ('weights.cod', '1', "did you mean 'code'?"),
    ('weights.code', 'x', "weights.code = 'x': not a number; write for example --con"),
    ('weights.code', 'inf', 'not a number'),
    ('weights', 'code:1', 'set one of its values, --config.weights.code=VALUE'),
    ('parts.code', '1', 'set its fields, --config.parts[code].FIELD'),
    ('steps.x', '1', 'no x in steps = 10'),
    ('.', '1', "no field ''"),
  ],
)
def test_a_wrong_override_names_field_value_and_fix(path, text, words):
  config = _filled()
  before = fields.to_json(config)
  with pytest.raises(fields.ConfigError) as caught:
    fields.override(config, path, text)
  assert words in str(caught.value)
  assert (caught.value.field, caught.value.value) == (path, text)
  assert '\n' not in str(caught.value)
  assert fields.to_json(config) == before


@pytest.mark.parametrize(
  ('path', 'value', 'words'),
  [
    ('stpes', 5, "no field 'stpes' in config; did you mean 'steps'"),
    ('drafter.dpeth', 5, "did you mean 'depth'?"),
    ('steps', 1.5, 'float where a whole number is expected'),
    ('steps', True, 'bool where a whole number is expected'),
    ('steps', None, 'a whole number is expected'),
    ('lr', math.nan, 'not finite where a number is expected'),
    ('lr', -math.inf, 'not finite where a number is expected'),
    ('clip', math.inf, 'not finite where a number or None is expected'),
    ('betas', (0.9, math.inf), 'tuple[float, float] is expected'),
    ('lr', 10**400, 'int where a number is expected'),
    ('lr', False, 'a number is expected'),
    ('lr', '0.1', 'a number is expected'),
    ('level', True, '1 or 2 is expected'),
    ('fast', 1, 'true or false is expected'),
    ('taps', [1, 2], 'write a tuple: (1, 2)'),
    ('taps', (1, 'x'), 'tuple[int, ...] is expected'),
    ('betas', (0.9,), 'tuple[float, float] is expected'),
    ('drafter', Chain, 'fields_test:Chain or fields_test:Block or None is expected'),
    ('drafter', Derived(1), 'fields_test:Chain or fields_test:Block or None is expect'),
    ('drafter.kind', 'sqe', "'seq' or 'par' is expected"),
    ('weights', {'a': 'b'}, 'dict[str, float] is expected'),
    ('objectives', (Chain(depth='x'),), "depth = 'x'"),  # pyright: ignore
  ],
)
def test_check_types_finds_what_a_config_file_assigned(path, value, words):
  config = Config()
  fields.check_types(config)
  *parents, name = path.split('.')
  setattr(getattr(config, parents[0]) if parents else config, name, value)
  with pytest.raises(fields.ConfigError, match=f'^{path}') as caught:
    fields.check_types(config)
  assert words in str(caught.value)


def test_an_int_in_a_float_field_becomes_a_float():
  config = Config(lr=1, clip=2, betas=(0, 0.5), mix=(('web', 3),), limit=5, either=9)
  config.weights, config.anything = {'a': 1, 'b': 0.5}, (Block(rate=7), Frozen(rate=8))
  fields.check_types(config)
  expected = Config(lr=1.0, clip=2.0, betas=(0.0, 0.5), mix=(('web', 3.0),), limit=5)
  expected.either, expected.weights = 9, {'a': 1.0, 'b': 0.5}
  expected.anything = (Block(rate=7.0), Frozen(rate=8.0))
  assert repr(config) == repr(expected)  # repr tells 1 from 1.0.


def test_a_frozen_config_is_not_overridden():
  config = Config(anything=Frozen())
  words = (
    r"^anything.size = '5': fields_test:Frozen is frozen; set it in the config file"
  )
  with pytest.raises(fields.ConfigError, match=words):
    fields.override(config, 'anything.size', '5')
  assert config.anything == Frozen()


def test_a_config_in_a_field_of_any_type_is_not_overwritten():
  config = Config(anything=Chain())
  with pytest.raises(fields.ConfigError, match='set its fields'):
    fields.override(config, 'anything', '5')
  assert config.anything == Chain()


def test_a_cached_property_is_no_stray_attribute():
  @dataclasses.dataclass
  class Caching:
    x: int = 2

    @functools.cached_property
    def double(self):
      return 2 * self.x

  config = Caching()
  assert config.double == 4
  fields.check_types(config)


def test_check_types_accepts_what_fits():
  config = Config(lr=1, clip=None, limit=3, drafter=Block(), weights={'a': 1.0})
  config.objectives = (Chain(), Block())
  config.anything = object()
  fields.check_types(config)


def full_config() -> Config:
  config = Config(lr=0.1 + 0.2, clip=None, betas=(1 / 3, 1e-300), taps=(1,), note='ü')
  config.drafter, config.second = Block(rate=5e-324), Chain(kind='par')
  config.objectives = (Block(size=9), Chain(depth=2))
  config.mix, config.weights = (('web', 0.5),), {'web': 0.25}
  return config


def test_json_is_lossless():
  config = full_config()
  text = json.dumps(fields.to_json(config))
  back = fields.from_json(json.loads(text))
  assert back == config and repr(back) == repr(config)  # repr tells 1 from 1.0.
  assert fields.to_json(config)['drafter']['class'] == 'fields_test:Block'
  derived = Derived(3)
  derived.doubled, derived.scaled = 7, 0.5
  assert fields.from_json(fields.to_json(derived)) == derived


def test_a_field_added_since_gets_its_default():
  saved = fields.to_json(Config(steps=3))
  del saved['lr'], saved['drafter']['kind']
  assert fields.from_json(saved) == Config(steps=3)


@pytest.mark.parametrize('value', [[1], {1, 2}, {1: 2}, {'class': 1}, Chain, object()])
def test_to_json_refuses_what_would_not_come_back(value):
  with pytest.raises(fields.ConfigError, match=r'^anything = .* cannot be saved'):
    fields.to_json(Config(anything=value))


def test_to_json_refuses_a_class_inside_a_function():
  @dataclasses.dataclass
  class Local:
    x: int = 1

  with pytest.raises(fields.ConfigError, match='top of a module'):
    fields.to_json(Config(anything=Local()))


@pytest.mark.parametrize(
  ('change', 'words'),
  [
    ({'stpes': 1}, "no field 'stpes' in fields_test:Config; did you mean 'steps'"),
    ({'steps': 'x'}, "steps = 'x'"),
    ({'drafter': {'class': 'fields_test:Chian'}}, "did you mean 'Chain'?"),
    ({'drafter': {'class': 'fields_test:os'}}, "no dataclass 'os'"),
    ({'drafter': {'class': 'os:system', 'command': 'true'}}, 'no dataclass'),
    ({'drafter': {'class': 'this:Config'}}, "module 'this' is not imported"),
    ({'drafter': {'class': 'mtpjax.nothing:Config'}}, 'is not imported'),
    ({'drafter': {'class': 5}}, 'drafter.class = 5'),
    ({'drafter': {'class': 'fields_test:Derived'}}, 'missing 1 required'),
  ],
)
def test_from_json_names_what_it_does_not_know(change, words):
  with pytest.raises(fields.ConfigError) as caught:
    fields.from_json({**fields.to_json(Config()), **change})
  assert words in str(caught.value)
  assert 'this' not in sys.modules, 'a saved config made us run a module'


@pytest.mark.parametrize('data', [{}, [], {'steps': 1}])
def test_from_json_needs_a_class(data):
  with pytest.raises(fields.ConfigError, match='names no class'):
    fields.from_json(data)


def test_from_json_imports_from_mtpjax(monkeypatch, tmp_path):
  import mtpjax

  (tmp_path / 'late.py').write_text(
    'import dataclasses\n@dataclasses.dataclass\nclass Config:\n  x: int = 1\n'
  )
  monkeypatch.setattr(mtpjax, '__path__', [*mtpjax.__path__, str(tmp_path)])
  config = fields.from_json({'class': 'mtpjax.late:Config', 'x': 4})
  monkeypatch.delitem(sys.modules, 'mtpjax.late')
  assert config.x == 4


def test_differences():
  a, b = full_config(), full_config()
  assert fields.differences(fields.to_json(a), fields.to_json(b)) == []
  b.steps, b.drafter, b.limit = 20, Chain(), 5
  b.objectives = (Block(size=8), Chain(depth=2), Chain())
  saved = json.loads(json.dumps(fields.to_json(b)))
  del saved['note']
  assert fields.differences(fields.to_json(a), saved) == [
    'steps: 10 → 20',
    'limit: None → 5',
    "note: 'ü' → absent",
    'drafter: fields_test:Block → fields_test:Chain',
    'objectives[0].size: 9 → 8',
    'objectives[2]: absent → fields_test:Chain',
  ]
  assert fields.differences(fields.to_json(Block()), fields.to_json(Chain())) == [
    'config: fields_test:Block → fields_test:Chain'
  ]


def test_config_error_survives_pickling_and_stays_short():
  error = fields.ConfigError('steps', 'x' * 500, 'too long', 'shorten it')
  again = pickle.loads(pickle.dumps(error))
  assert str(again) == str(error) and len(str(error)) < 130
  assert (again.field, again.fix) == ('steps', 'shorten it')
