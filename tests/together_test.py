"""`evaluate` and `sample` over several processes: what one process with as many devices
says, once."""

import json
import subprocess
import time

import pytest
from runs import (
  assert_mistake,
  command_line,
  ended_well,
  environment,
  finished,
  free_port,
  joined,
)

pytestmark = pytest.mark.slow

# The network of a CPU prints in the middle of what Python does.
APART = """
import os, runpy, sys
own = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
sys.stdout = os.fdopen(own, 'w', encoding='utf-8')
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)
"""


@pytest.fixture(scope='module')
def checkpoint(place, train):
  ended_well(train(place / 'few', variant='skips', devices=8))
  return place / 'few'


@pytest.fixture(scope='module')
def two(place, checkpoint):
  """Runs a command in two processes of four devices."""

  def run(command, *args, own=((), ()), homes=(place, place)):
    port = free_port()
    line = command_line(place, '', f'--checkpoint={checkpoint}', command=command)
    started = [
      subprocess.Popen(
        [
          *(line[0], '-c', APART, *line[2:]),
          *args,
          *own[index],
          *joined(index, 2, port),
        ],
        env=environment(place, 4, HOME=homes[index]),
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
      )
      for index in range(2)
    ]
    return finished(started, timeout=240)

  return run


@pytest.fixture(scope='module')
def one(place, train, checkpoint):
  def run(command, *args):
    given = (f'--checkpoint={checkpoint}', *args)
    return ended_well(train('', *given, command=command, devices=8))

  return run


def read(path):
  """What the figures say, without what depends on the clock or on where it ran."""
  found = json.loads(path.read_text())
  places = ('conditions', 'tokens_per_second', 'seconds', 'compile_seconds')
  return {name: x for name, x in found.items() if name not in places}


def alike(got, wanted, where=''):
  """Texts and counts the same, figures to rounding."""
  assert type(got) is type(wanted), where
  if isinstance(wanted, dict):
    assert got.keys() == wanted.keys(), where
    for name in wanted:
      alike(got[name], wanted[name], f'{where}.{name}')
  elif isinstance(wanted, list):
    assert len(got) == len(wanted), where
    for n, pair in enumerate(zip(got, wanted, strict=True)):
      alike(*pair, f'{where}[{n}]')
  elif isinstance(wanted, float):
    assert got == pytest.approx(wanted, rel=1e-5, abs=1e-6), where
  else:
    assert got == wanted, where


def said(done):
  return ended_well(done).stdout


# Time is split over the processes, and a decode takes it back.
TIME = ('--config.mesh.fsdp=1', '--config.mesh.context=8')


@pytest.mark.parametrize(
  'sizes', [('--config.mesh.fsdp=8',), TIME], ids=['rows', 'time']
)
def test_two_processes_evaluate_as_one(one, two, place, sizes):
  alone, both, none = (place / f'{name}.json' for name in ('one', 'two', 'none'))
  args = (*sizes, '--config.decode.tokens=12', '--config.decode.prompts=5')
  wanted = said(one('evaluate', *args, f'--json={alone}'))
  own = [f'--json={both}'], [f'--json={none}']
  first, second = two('evaluate', *args, own=own)
  assert said(second) == '' and not none.exists()
  assert said(first).splitlines()[:3] == wanted.splitlines()[:3]
  found = read(both)
  alike(found, read(alone))
  assert found['new_tokens'] == 60 and found['parity']
  assert json.loads(both.read_text())['conditions']['process_count'] == 2


def test_two_processes_sample_and_stream_what_one_samples(one, two, place):
  lines = [
    {'prompt': 'one module', 'temperature': 1.0},
    {'prompt': 'the token', 'budget': 5},
    {'prompt': 'next', 'temperature': 0.7, 'top_p': 0.9},
  ]
  (place / 'prompts.jsonl').write_text('\n'.join(map(json.dumps, lines)))
  alone, both, none = (place / f'{name}.json' for name in ('one', 'two', 'none'))
  args = f'--prompts={place}/prompts.jsonl', '--tokens=12'
  wanted = said(one('sample', *args, f'--json={alone}'))
  own = [f'--json={both}'], [f'--json={none}']
  first, second = two('sample', *args, own=own)
  assert said(second) == '' and not none.exists()
  texts = wanted.partition(' tokens in ')[0]
  assert len(texts) > 40 and said(first).startswith(texts)
  alike(read(both), read(alone))

  one_prompt = '--prompt=one module', '--tokens=12', '--temperature=1'
  first, second = two('sample', *one_prompt, *TIME)
  assert said(second) == ''
  text = read(alone)['completions'][0]['text']
  text = text.replace('\r\n', '\n').replace('\r', '\n')  # as a pipe is read
  assert len(text) > 6 and said(first).startswith(f'one module{text}\n')


def test_prompts_that_are_others_in_one_process_end_both(two, place):
  for name in ('one', 'three'):
    (place / name).mkdir()
    (place / name / 'some.txt').write_text(f'{name} module\n' * len(name))
  began = time.monotonic()
  homes = place / 'one', place / 'three'
  first, second = two('sample', '--prompts=~/some.txt', homes=homes)
  assert_mistake(second, "prompts = '5, checksum ", "is '3, checksum ")
  assert_mistake(first, "process 1 of 2 ended: prompts = '5, checksum ")
  assert time.monotonic() - began < 60
