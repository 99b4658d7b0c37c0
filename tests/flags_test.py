"""Command lines and config files, and what each mistake says, in processes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

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
from ml_collections import config_flags
from mtpjax import fields, flags

WORKDIR = absl_flags.DEFINE_string('workdir', None, 'where results go')
COUNT = absl_flags.DEFINE_integer('count', 1, 'how many')

def main(config=None):
  assert absl_flags.FLAGS.config is config
  if WORKDIR.value == 'bug':
    raise KeyError('a real bug')
  if WORKDIR.value == 'flag':
    print(config_flags.get_config_filename(absl_flags.FLAGS['config']))
  if WORKDIR.value == 'again':
    raise flags.FailedError('the network is gone')
  if WORKDIR.value == 'full':
    raise OSError('full: no space left; free some\\nlike\\nthis\\nor\\nthat')
  if config and config.steps == 0:
    raise fields.ConfigError('steps', 0, 'must be positive', 'write --config.steps=1')
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
    'raising.py': 'from mtpjax import fields\n'
    'def get_config(): raise fields.ConfigError("depth", 9, "big", "lower it")\n',
    'open.py': 'def get_config():\n  try: 1 / 0\n'
    '  except ZeroDivisionError: open("gone.json")\n',
    'early.py': 'open("gone.json")\n',
    'cause.py': 'def get_config():\n  try: int("x")\n'
    '  except ValueError as e: raise KeyError("mine") from e\n',
    'big.py': 'def get_config(): return 2.0 ** 9999\n',
    'bytes.py': 'def get_config(): return b"\\xff".decode()\n',
    'imports.py': 'import syntax\n',
    'strange.py': '\n\n\ndef get_config(arg: "Missing" = ""): pass\n',
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


def test_config_is_an_ml_collections_flag(demo):
  done = demo('--config=quick.py:tiny', '--config.limit=3', '--workdir=flag')
  expected = 'quick.py:tiny\nConfig(steps=1, fast=False, limit=3,'
  assert done.stdout.startswith(expected), done.stderr
  done = demo('--workdir=flag', options="{'default': 'quick.py'}")
  assert done.stdout.startswith('quick.py\nConfig(steps=100,'), done.stderr


def test_other_ways_to_a_config(demo):
  """A default file, a function, none at all, a class in the file; main's exit code."""
  done = demo('--workdir=three', options="{'default': 'quick.py:full'}")
  assert done.stdout.startswith('Config(steps=100,') and done.returncode == 3
  made = "{'default': lambda: __import__('shapes').Config(steps=COUNT.value)}"
  done = demo('--count=7', '--config.fast=true', options=made)
  assert done.stdout.startswith('Config(steps=7, fast=True,'), done.stderr
  done = demo(options="{'takes_config': False}")
  assert done.stdout == 'None None 1 False\n', done.stderr
  done = demo('--config=quick.py', options="{'takes_config': False}")
  assert done.returncode == 2 and '--config = ' in done.stderr
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
  ('--config=', '; choose from: '),
  ('--config=quikc.py', "; did you mean 'quick.py'?"),
  ('--config=quick.py:tniy', "no variant 'tniy'; did you mean 'tiny'?"),
  ('--config=stray.py', "stpes = 5: no field 'stpes' in config; did you mean 'steps'"),
  ('--config=syntax.py', 'syntax.py:10: SyntaxError: '),
  ('--config=name.py', "name.py:8: NameError: name 'cofnig' is not defined"),
  ('--config=deep.py', 'deep.py:7: TypeError: '),
  ('--config=inner.py', 'inner.py:2, from '),
  ('--config=nothing.py', 'get_config returned None; return an instance'),
  ('--config=nothing.py:x', 'takes 0 positional arguments'),
  ('--config=raising.py', 'error: depth = 9: big; lower it\n'),
  ('--config=open.py', 'open.py:3: FileNotFoundError: '),
  ('--config=early.py', "'gone.json'"),
  ('--config=cause.py', "cause.py:3: KeyError: 'mine'"),
  ('--config=big.py', 'big.py:1: OverflowError: '),
  ('--config=bytes.py', 'bytes.py:1: UnicodeDecodeError: '),
  ('--config=imports.py', 'syntax.py:10: SyntaxError: '),
  ('--config=strange.py:x', "NameError: name 'Missing' is not defined"),
  ('--config=deep.py:tniy', "no variant 'tniy'"),
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
  for name in ('workdir', 'count', 'import', 'config'):
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


def test_what_failed_without_a_mistake_has_a_code_of_its_own(demo):
  done = demo('--config=quick.py', '--workdir=again')
  assert (done.returncode, done.stderr) == (1, 'error: the network is gone\n')


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
