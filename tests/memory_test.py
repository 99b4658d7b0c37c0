"""What depth costs in memory, from the compiled train step. Nothing runs."""

import importlib.util
import pathlib

import pytest

BENCHMARK = pathlib.Path(__file__).parents[1] / 'benchmarks' / 'memory_by_depth.py'


def benchmark():
  spec = importlib.util.spec_from_file_location('memory_by_depth', BENCHMARK)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.mark.slow
def test_four_depths_of_a_shared_module_take_at_most_12_percent_more_than_one():
  made = benchmark()
  shared = made.drafters()['shared']
  one, two, four = (made.temporary_bytes(12, shared(n), 1) for n in (1, 2, 4))
  assert four <= 1.12 * min(one, two)
