"""What the README says is so: its tree, its code, its commands."""

import importlib
import os
import pathlib
import re
import shlex
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax import config, mesh, model, step
from mtpjax.models import trunk

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / 'README.md').read_text('utf-8')


def blocks(language):
  fences = re.findall(r'^```(\w*)\n(.*?)^```$', README, re.DOTALL | re.MULTILINE)
  return [text for name, text in fences if name == language]


def test_the_tree_names_every_module_and_nothing_else():
  tree = next(block for block in blocks('') if block.startswith('mtpjax/'))
  named = set(re.findall(r'(?<!/)\b[a-z_]+\.py\b', tree))
  modules = {path.name for path in (ROOT / 'mtpjax').glob('*.py')} - {'__init__.py'}
  assert named - {'base.py'} == modules
  folders = {
    f.name for f in (ROOT / 'mtpjax').iterdir() if (f / '__init__.py').exists()
  }
  named = {line.strip().partition('/')[0] for line in tree.splitlines() if '/ ' in line}
  assert folders <= named
  assert all((ROOT / f).exists() or f in folders for f in named)


def test_every_file_and_link_it_mentions_exists():
  for path in re.findall(r'\]\(([^)#:]+)\)', README):
    assert (ROOT / path).exists(), path
  for path in re.findall(r'(?:configs|benchmarks|drafters)/\w+\.py', README):
    if path not in ('configs/yours.py', 'drafters/linear.py'):
      assert (ROOT / path).exists() or (ROOT / 'mtpjax' / path).exists(), path


def test_the_drafter_of_the_readme_learns():
  code = next(block for block in blocks('python') if 'class Linear' in block)
  linear = types.ModuleType('mtpjax.drafters.linear')
  sys.modules[linear.__name__] = linear  # dataclasses look their module up
  try:
    exec(code, linear.__dict__)
    c = config.Config(
      steps=20, trunk=trunk.Config(width=16, layers=1, heads=2, ffn=32, remat='none')
    )
    c.drafter, c.data.batch, c.data.length = linear.Config(depth=2), 8, 16
    c.optimizer.rate.warmup, c.optimizer.rate.peak = 0, 1e-2
    with jax.set_mesh(mesh.make(mesh.Config(fsdp=1), jax.devices()[:1])):
      config.finalize(c, 32)
      graphdef, _, make = model.init(c.trunk, c.parts(), 0)
      state = step.init_state(make(), c)
      train = step.compile_train(graphdef, c, state)
      ids = np.arange(16, dtype=np.int32)[None] + np.arange(8, dtype=np.int32)[:, None]
      ones = np.ones_like(ids)
      arrays = {'tokens': ids, 'segments': ones, 'positions': ids * 0 + np.arange(16)}
      arrays = {k: v.astype(np.int32) for k, v in arrays.items()}
      arrays = step.put({**arrays, 'mask': ones.astype(bool)})
      losses = []
      for _ in range(20):
        state, out = train(state, arrays)
        sums = out['sums']['drafter']
        losses.append(np.asarray(sums.nll / jnp.maximum(sums.count, 1)))
    assert losses[0].shape == (2,)
    assert (losses[-1] < losses[0] - 0.5).all()
  finally:
    del sys.modules[linear.__name__]


def test_the_python_of_the_tour_runs():
  code = next(block for block in blocks('python') if 'make_params' in block)
  program = f'{code}\nprint(sorted(params), len(jax.tree.leaves(params)))'
  run = subprocess.run(
    [sys.executable, '-W', 'error', '-c', program], capture_output=True, text=True
  )
  assert run.returncode == 0, run.stderr
  assert run.stdout.startswith("['objectives', 'trunk']")


def test_the_sources_of_the_readme_are_made_as_it_says():
  code = next(block for block in blocks('python') if 'mixture.Mixture' in block)
  exec(code, {})


def test_what_it_says_can_be_learnt_can_be_configured():
  rows = re.findall(r'^\| [^|]+ \| `(\w+)\.Config\((.*)\)` \|', README, re.MULTILINE)
  assert len(rows) == 6
  for module, args in rows:
    folder = 'objectives' if 'window' in args or 'farthest' in args else 'drafters'
    found = importlib.import_module(f'mtpjax.{folder}.{module}')
    eval(f'Config({args.replace("form=…", "")})', vars(found))


@pytest.mark.slow
def test_the_commands_of_the_tour_and_of_data_run(tmp_path):
  tour, data = (
    README.partition(heading)[2].partition('```sh\n')[2].partition('```')[0]
    for heading in ('## A tour', '## Data')
  )
  commands = (tour + data).replace('\\\n', ' ').strip().splitlines()
  assert len(commands) >= 5 and 'prepare' in commands[-1]
  os.symlink(ROOT / 'configs', tmp_path / 'configs')
  os.symlink(ROOT / 'mtpjax', tmp_path / 'mtpjax')
  for command in commands:
    python, *rest = shlex.split(command)
    assert python == 'python'
    run = subprocess.run(
      [sys.executable, *rest], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == 0, f'{command}\n{run.stderr}'
  assert (tmp_path / 'runs/tiny/heldout.json').exists()
  code = next(block for block in blocks('python') if 'Sampler.load' in block)
  start = [sys.executable, '-W', 'error', '-c', code]
  run = subprocess.run(start, cwd=tmp_path, capture_output=True, text=True)
  assert run.returncode == 0, run.stderr
  assert re.search(r"\('decode', \d, 64, 1\)", run.stdout)


def test_nothing_is_left_to_fill_in():
  assert not re.search(r'@[A-Z0-9]+@|TODO|FIXME', README)
