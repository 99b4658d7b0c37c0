"""Command lines, config files and saved configs, and what each mistake says."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pickle
import re
import subprocess
import sys
from typing import Any, Literal

import pytest

from mtpjax import flags


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
  level: Literal[1, 2] = 1
  anything: Any = None


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
    ('objectives', '()', ()),
    ('anything', '5', 5),
  ],
)
def test_override_reads_the_annotated_type(path, text, value):
  config = Config(objectives=(Chain(), Block()))
  flags.override(config, path, text)
  node: Any = config
  for name in re.findall(r'\w+', path):
    node = node[int(name)] if isinstance(node, tuple) else getattr(node, name)
  assert node == value and type(node) is type(value)
  if isinstance(value, tuple):
    assert list(map(type, node)) == list(map(type, value))
  flags.check_types(config)


def test_a_nullable_field_is_set_and_set_back():
  config = Config()
  for text, value in (('3', 3), ('None', None), ('4', 4), ('none', None)):
    flags.override(config, 'limit', text)
    assert config.limit == value


@pytest.mark.parametrize(
  ('path', 'text', 'words'),
  [
    ('stpes', '5', "no field 'stpes' in config; did you mean 'steps'"),
    ('STEPS', '5', "did you mean 'steps'"),
    (
      'drafter.dpeth',
      '2',
      "in config.drafter (flags_test:Chain); did you mean 'depth'",
    ),
    ('drafter.xyz', '2', 'choose from: depth, kind'),
    ('kind', '2', "did you mean 'drafter.kind' or 'objectives[0].kind'?"),
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
    ('second', 'abc', 'not flags_test:Chain or flags_test:Block or None'),
    ('objectives', '1', 'set its fields, --config.objectives[0].FIELD'),
    ('objectives[5].depth', '1', 'count from 0'),
    ('objectives[0]', '1', 'an element cannot be replaced'),
    ('betas[0]', '1', 'set all of it, --config.betas=1,2'),
    ('steps.x', '1', 'no x in steps = 10'),
    ('.', '1', "no field ''"),
  ],
)
def test_a_wrong_override_names_field_value_and_fix(path, text, words):
  config = Config(objectives=(Chain(), Block()))
  before = flags.to_json(config)
  with pytest.raises(flags.ConfigError) as caught:
    flags.override(config, path, text)
  assert words in str(caught.value)
  assert (caught.value.field, caught.value.value) == (path, text)
  assert '\n' not in str(caught.value)
  assert flags.to_json(config) == before


@pytest.mark.parametrize(
  ('path', 'value', 'words'),
  [
    ('stpes', 5, "no field 'stpes' in config; did you mean 'steps'"),
    ('drafter.dpeth', 5, "did you mean 'depth'?"),
    ('steps', 1.5, 'float where a whole number is expected'),
    ('steps', True, 'bool where a whole number is expected'),
    ('steps', None, 'a whole number is expected'),
    ('lr', math.nan, 'a number is expected'),
    ('lr', False, 'a number is expected'),
    ('lr', '0.1', 'a number is expected'),
    ('level', True, '1 or 2 is expected'),
    ('fast', 1, 'true or false is expected'),
    ('taps', [1, 2], 'write a tuple: (1, 2)'),
    ('taps', (1, 'x'), 'tuple[int, ...] is expected'),
    ('betas', (0.9,), 'tuple[float, float] is expected'),
    ('drafter', Chain, 'flags_test:Chain or flags_test:Block or None is expected'),
    ('drafter', Derived(1), 'flags_test:Chain or flags_test:Block or None is expect'),
    ('drafter.kind', 'sqe', "'seq' or 'par' is expected"),
    ('weights', {'a': 'b'}, 'dict[str, float] is expected'),
    ('objectives', (Chain(depth='x'),), "depth = 'x'"),  # pyright: ignore
  ],
)
def test_check_types_finds_what_a_config_file_assigned(path, value, words):
  config = Config()
  flags.check_types(config)
  *parents, name = path.split('.')
  setattr(getattr(config, parents[0]) if parents else config, name, value)
  with pytest.raises(flags.ConfigError, match=f'^{path}') as caught:
    flags.check_types(config)
  assert words in str(caught.value)


def test_a_config_in_a_field_of_any_type_is_not_overwritten():
  config = Config(anything=Chain())
  with pytest.raises(flags.ConfigError, match='set its fields'):
    flags.override(config, 'anything', '5')
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
  flags.check_types(config)


def test_check_types_accepts_what_fits():
  config = Config(lr=1, clip=None, limit=3, drafter=Block(), weights={'a': 1.0})
  config.objectives = (Chain(), Block())
  config.anything = object()
  flags.check_types(config)


def full_config() -> Config:
  config = Config(lr=0.1 + 0.2, clip=None, betas=(1 / 3, 1e-300), taps=(1,), note='ü')
  config.drafter, config.second = Block(rate=5e-324), Chain(kind='par')
  config.objectives = (Block(size=9), Chain(depth=2))
  config.mix, config.weights = (('web', 0.5),), {'web': 0.25}
  return config


def test_json_is_lossless():
  config = full_config()
  text = json.dumps(flags.to_json(config))
  back = flags.from_json(json.loads(text))
  assert back == config and repr(back) == repr(config)  # repr tells 1 from 1.0.
  assert flags.to_json(config)['drafter']['class'] == 'flags_test:Block'
  derived = Derived(3)
  derived.doubled, derived.scaled = 7, 0.5
  assert flags.from_json(flags.to_json(derived)) == derived


def test_a_field_added_since_gets_its_default():
  saved = flags.to_json(Config(steps=3))
  del saved['lr'], saved['drafter']['kind']
  assert flags.from_json(saved) == Config(steps=3)


@pytest.mark.parametrize('value', [[1], {1, 2}, {1: 2}, {'class': 1}, Chain, object()])
def test_to_json_refuses_what_would_not_come_back(value):
  with pytest.raises(flags.ConfigError, match=r'^anything = .* cannot be saved'):
    flags.to_json(Config(anything=value))


def test_to_json_refuses_a_class_inside_a_function():
  @dataclasses.dataclass
  class Local:
    x: int = 1

  with pytest.raises(flags.ConfigError, match='top of a module'):
    flags.to_json(Config(anything=Local()))


@pytest.mark.parametrize(
  ('change', 'words'),
  [
    ({'stpes': 1}, "no field 'stpes' in flags_test:Config; did you mean 'steps'"),
    ({'steps': 'x'}, "steps = 'x'"),
    ({'drafter': {'class': 'flags_test:Chian'}}, "did you mean 'Chain'?"),
    ({'drafter': {'class': 'flags_test:os'}}, "no dataclass 'os'"),
    ({'drafter': {'class': 'os:system', 'command': 'true'}}, 'no dataclass'),
    ({'drafter': {'class': 'this:Config'}}, "module 'this' is not imported"),
    ({'drafter': {'class': 'mtpjax.nothing:Config'}}, 'is not imported'),
    ({'drafter': {'class': 5}}, 'drafter.class = 5'),
    ({'drafter': {'class': 'flags_test:Derived'}}, 'missing 1 required'),
  ],
)
def test_from_json_names_what_it_does_not_know(change, words):
  with pytest.raises(flags.ConfigError) as caught:
    flags.from_json({**flags.to_json(Config()), **change})
  assert words in str(caught.value)
  assert 'this' not in sys.modules, 'a saved config made us run a module'


@pytest.mark.parametrize('data', [{}, [], {'steps': 1}])
def test_from_json_needs_a_class(data):
  with pytest.raises(flags.ConfigError, match='names no class'):
    flags.from_json(data)


def test_from_json_imports_from_mtpjax(monkeypatch, tmp_path):
  import mtpjax

  (tmp_path / 'late.py').write_text(
    'import dataclasses\n@dataclasses.dataclass\nclass Config:\n  x: int = 1\n'
  )
  monkeypatch.setattr(mtpjax, '__path__', [*mtpjax.__path__, str(tmp_path)])
  config = flags.from_json({'class': 'mtpjax.late:Config', 'x': 4})
  monkeypatch.delitem(sys.modules, 'mtpjax.late')
  assert config.x == 4


def test_differences():
  a, b = full_config(), full_config()
  assert flags.differences(flags.to_json(a), flags.to_json(b)) == []
  b.steps, b.drafter, b.limit = 20, Chain(), 5
  b.objectives = (Block(size=8), Chain(depth=2), Chain())
  saved = json.loads(json.dumps(flags.to_json(b)))
  del saved['note']
  assert flags.differences(flags.to_json(a), saved) == [
    'steps: 10 → 20',
    'limit: None → 5',
    "note: 'ü' → absent",
    'drafter: flags_test:Block → flags_test:Chain',
    'objectives[0].size: 9 → 8',
    'objectives[2]: absent → flags_test:Chain',
  ]
  assert flags.differences(flags.to_json(Block()), flags.to_json(Chain())) == [
    'config: flags_test:Block → flags_test:Chain'
  ]


def test_config_error_survives_pickling_and_stays_short():
  error = flags.ConfigError('steps', 'x' * 500, 'too long', 'shorten it')
  again = pickle.loads(pickle.dumps(error))
  assert str(again) == str(error) and len(str(error)) < 130
  assert (again.field, again.fix) == ('steps', 'shorten it')


# --- The command, in processes of its own ---------------------------------------------

SHAPES = """
from __future__ import annotations
import dataclasses

@dataclasses.dataclass
class Drafter:
  depth: int = 1

@dataclasses.dataclass
class Config:
  steps: int = 10
  fast: bool = False
  limit: int | None = None
  betas: tuple[float, ...] = (0.9,)
  drafter: Drafter | None = dataclasses.field(default_factory=Drafter)
"""

FILE = """
import dataclasses
from typing import Literal
import shapes

def get_config(arg: Literal['', 'tiny', 'full'] = ''):
  config = shapes.Config(steps=1 if arg == 'tiny' else 100)
  return config
"""

DEMO = """'''Trains a demo.'''
import sys
from absl import flags as absl_flags
from mtpjax import flags

WORKDIR = absl_flags.DEFINE_string('workdir', None, 'where results go')
COUNT = absl_flags.DEFINE_integer('count', 1, 'how many')

def main(config=None):
  if WORKDIR.value == 'bug':
    raise KeyError('a real bug')
  if WORKDIR.value == 'full':
    raise OSError('full: no space left; free some\\nlike\\nthis\\nor\\nthat')
  if config and config.steps == 0:
    raise flags.ConfigError('steps', 0, 'must be positive', 'write --config.steps=1')
  print(config, WORKDIR.value, COUNT.value, 'later' in sys.modules)
  return 3 if WORKDIR.value == 'three' else 'no exit code'

if __name__ == '__main__':
  options = eval(sys.argv.pop(1))
  flags.run(main, user_errors=(OSError,), **options)
"""


@pytest.fixture(scope='session')
def demo(tmp_path_factory):
  folder = tmp_path_factory.mktemp('demo')
  files = {
    'shapes.py': SHAPES,
    'quick.py': FILE,
    'demo.py': DEMO,
    'later.py': '',
    'many.py': MANY,
    'stray.py': FILE.replace('  return', '  config.stpes = 5\n  return'),
    'syntax.py': FILE + '\nx = = 1\n',
    'name.py': FILE.replace('  return config', '  return cofnig'),
    'deep.py': FILE.replace('shapes.Config(', 'shapes.Config(wrong=1, '),
    'inner.py': 'import json\ndef get_config(): return json.loads("{")\n',
    'nothing.py': 'def get_config(): pass\n',
    'empty.py': '',
    'raising.py': 'from mtpjax import flags\n'
    'def get_config(): raise flags.ConfigError("depth", 9, "big", "lower it")\n',
    'long.py': 'raise ValueError("word\\n" * 999)\n',
    'own.py': 'from __future__ import annotations\n'
    + FILE.replace('import shapes', SHAPES.partition('annotations')[2])
    .replace('shapes.Config', 'Config')
    .replace('from __future__ import annotations', '')
    + '\nassert __file__ == "own.py"\n',
    'more.flags': '--config.steps=8\n--count=9\n',
  }
  for name, text in files.items():
    (folder / name).write_text(text)

  def start(*args, options='{}', script='demo.py'):
    return subprocess.run(
      [sys.executable, '-W', 'error', script, options, *args],
      cwd=folder,
      capture_output=True,
      text=True,
      timeout=60,
    )

  return start


def test_run_gives_main_the_config_and_the_flags(demo):
  done = demo(
    *('--config.limit=3', '--config', 'quick.py:tiny', '--config.betas', '0.5,1'),
    *('--config.limit=None', '--config.fast', '--flagfile=more.flags', '--workdir=w'),
    *('--import=later', '--config.drafter.depth', '-2'),
  )
  expected = 'Config(steps=8, fast=True, limit=None, betas=(0.5, 1.0), drafter='
  assert done.stdout == expected + 'Drafter(depth=-2)) w 9 True\n', done.stderr
  assert (done.returncode, done.stderr) == (0, '')


def test_other_ways_to_a_config(demo):
  """A default file, a function, none at all, a class in the file; main's exit code."""
  done = demo('--workdir=three', options="{'default': 'quick.py:full'}")
  assert done.stdout.startswith('Config(steps=100,') and done.returncode == 3
  made = "{'default': lambda: __import__('shapes').Config(steps=COUNT.value)}"
  done = demo('--count=7', '--config.fast=true', options=made)
  assert done.stdout.startswith('Config(steps=7, fast=True,'), done.stderr
  done = demo(options="{'takes_config': False}")
  assert done.stdout == 'None None 1 False\n', done.stderr
  done = demo('--config=own.py', '--config.drafter.depth=5')
  assert 'Drafter(depth=5)' in done.stdout, done.stderr


MISTAKES = [
  ('--config.stpes=5', "no field 'stpes' in config; did you mean 'steps'"),
  ('--config.steps=1.5', "steps = '1.5': not a whole number"),
  ('--config.steps=0', 'steps = 0: must be positive; write --config.steps=1'),
  ('--workdri=x', "--workdri = 'x': no such flag; did you mean --workdir?"),
  ('--zzz=x', 'a config field is --config.FIELD=VALUE'),
  ('--count=x', '--count=x'),
  ('stray', "arguments = 'stray': not expected"),
  ('-- --config.steps=2', "arguments = '--config.steps=2': not expected"),
  ('--workdir=full', 'full: no space left; free some'),
  ('--import=no_such', "No module named 'no_such'"),
  ('--config=', 'no such file; choose from: '),
  ('--config=quikc.py', "no such file; did you mean 'quick.py'?"),
  ('--config=quick.py:tniy', "no variant 'tniy'; did you mean 'tiny'?"),
  ('--config=stray.py', "stpes = 5: no field 'stpes' in config; did you mean 'steps'"),
  ('--config=syntax.py', 'syntax.py:10: SyntaxError: '),
  ('--config=name.py', "name.py:8: NameError: name 'cofnig' is not defined"),
  ('--config=deep.py', 'deep.py:7: TypeError: '),
  ('--config=inner.py', 'inner.py:2, from '),
  ('--config=nothing.py', 'get_config returned None; return an instance'),
  ('--config=nothing.py:x', 'takes 0 positional arguments'),
  ('--config=raising.py', 'error: depth = 9: big; lower it\n'),
  ('--config=long.py', 'long.py:1: ValueError: word word'),
  ('--config=empty.py', "has no attribute 'get_config'"),
]

# All of them in one process: Python's start is most of the time.
MANY = """
import contextlib, io, json, sys
import demo
from mtpjax import flags

for line in json.loads(sys.argv[1]):
  with contextlib.redirect_stderr(io.StringIO()) as stderr:
    try:
      args = line.split()
      if '--config=' not in line:
        args.insert(0, '--config=quick.py')
      flags.run(demo.main, user_errors=(OSError,), argv=['many.py', *args])
    except SystemExit as error:
      code = error.code
  print(json.dumps([code, stderr.getvalue()]))
  demo.absl_flags.FLAGS.unparse_flags()
  for name in ('workdir', 'count', 'import'):
    demo.absl_flags.FLAGS[name].unparse()
"""


@pytest.fixture(scope='session')
def said(demo):
  lines = [line for line, _ in MISTAKES]
  done = demo(script='many.py', options=json.dumps(lines))
  assert done.returncode == 0, done.stderr
  return dict(zip(lines, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize(('line', 'words'), MISTAKES)
def test_a_users_mistake_ends_with_one_message(line, words, said):
  code, error = said[line]
  assert code == 2
  assert error.startswith('error: ') and words in error, error
  assert error.count('\n') <= 3 and len(error) < 500 and 'Traceback' not in error


def test_without_a_config(demo):
  done = demo()
  assert (done.returncode, done.stdout) == (2, '')
  assert done.stderr.startswith('error: --config = None: a config is needed; name a')


def test_a_bug_shows_its_traceback(demo):
  done = demo('--config=quick.py', '--workdir=bug')
  assert done.returncode == 1
  assert 'Traceback' in done.stderr and "KeyError: 'a real bug'" in done.stderr


def test_help(demo):
  done = demo('--help', '--config=quick.py:tiny')
  assert (done.returncode, done.stderr) == (0, '')
  for words in (
    'Trains a demo.',
    '--workdir=  where results go',
    "--count='1'  how many",
    '--config=FILE.py',
    'fields of quick.py:tiny:',
    '--config.steps=1  a whole number',
    '--config.limit=None  a whole number or None',
    '--config.drafter.depth=1',
  ):
    assert words in done.stdout, done.stdout
  assert demo('--help').returncode == 0


def test_flags_imports_no_jax():
  """Every mistake is told before JAX, which takes seconds, is even imported."""
  script = 'import sys, mtpjax.flags; sys.exit("jax" in sys.modules)'
  assert subprocess.run([sys.executable, '-c', script]).returncode == 0
