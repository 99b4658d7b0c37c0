"""Benchmarks that nothing here can run in earnest do run in small."""

import json
import subprocess
import sys

import pytest
from runs import ROOT, ended_well, environment


@pytest.mark.slow
def test_an_accelerators_table_in_small_on_a_cpu(place):
  done = subprocess.run(
    [
      sys.executable,
      f'{ROOT}/benchmarks/mfu.py',
      *('--tiny', '--drafts=1', '--json=mfu.json'),
    ],
    env=environment(place),
    cwd=place,
    capture_output=True,
    text=True,
    timeout=300,
  )
  ended_well(done)
  found = json.loads((place / 'mfu.json').read_text())
  training, decoding = found['training'], found['decoding']
  # Width 64, two heads, one layer, feed-forward 192, 64 positions, 1024 tokens: as
  # many operations a token as weights that multiply it, three times two.
  block = 4 * 64 * 64 + 3 * 64 * 192 + 2 * 64 * 64
  plain, more = block + 64 * 1024, block + 2 * 64 * 64 + 64 * 1024
  for depth, products in (('depth_0', plain), ('depth_1', plain + more)):
    own = training[depth]
    assert own['model_flops_per_token'] == pytest.approx(6 * products)
    assert own['compiled_flops_per_token'] > own['model_flops_per_token']
    assert own['mfu'] is None  # nobody says what a CPU's peak is
    assert own['step_seconds'] > 0
    assert own['compile_seconds'] > 10 * own['step_seconds']  # apart
  assert training['flops_ratio'] == pytest.approx((plain + more) / plain)
  assert 1 < decoding['tau'] <= 2
  lines = done.stdout.splitlines()
  first = [line.split()[0] for line in lines[1:]]
  assert first == ['training', 'depth', 'depth', 'depth', 'decoding']


@pytest.mark.slow
def test_a_queue_against_batches_in_small(place):
  done = subprocess.run(
    [
      sys.executable,
      f'{ROOT}/benchmarks/throughput.py',
      *('--tiny', '--drafts=2', '--json=throughput.json'),
    ],
    env=environment(place),
    cwd=place,
    capture_output=True,
    text=True,
    timeout=300,
  )
  ended_well(done)
  found = json.loads((place / 'throughput.json').read_text())
  # The script itself compares the texts.
  for name in ('budgets', 'stops'):
    own = found[name]
    assert own['longest'] <= 20 and own['tokens'] > 12 * own['shortest']
    assert own['queue_idle'] < own['batch_idle']
    assert own['batch_seconds'] > 0 and own['queue_seconds'] > 0
  assert found['prefill']['shared_seconds'] > 0
  lines = done.stdout.splitlines()
  assert [line.split(',')[0].strip() for line in lines[1:]] == [
    'budgets',
    'stops',
    '8 samples',
  ]
