"""Compiled temporary memory of the whole train step, by MTP depth.

  python benchmarks/memory_by_depth.py [--layers=12,24] [--devices=1,8]

D 512, F 1536, V 32,768, 8 × 512 tokens, full remat. Compiles only; nothing runs, so any
CPU does. Prints one table: temp_size_in_bytes at each depth, and its ratio to depth 1.
"""

import argparse
import os
from typing import Any


def temporary_bytes(layers: int, drafter: Any, devices: int) -> int:
  import jax

  from mtpjax import config as configs
  from mtpjax import mesh, model, step
  from mtpjax.models import trunk

  config = configs.Config(
    trunk=trunk.Config(
      vocab=32_768, width=512, layers=layers, heads=8, ffn=1536, remat='full'
    ),
    drafter=drafter,
  )
  config.data.length, config.data.batch = 512, 8
  with jax.set_mesh(mesh.make(config.mesh, jax.devices()[:devices])):
    configs.finalize(config)
    graphdef, params, _ = model.init(config.trunk, config.parts(), 0)
    state = jax.eval_shape(lambda params: step.init_state(params, config), params)
    compiled = step.compile_train(graphdef, config, state)
  return compiled.memory_analysis().temp_size_in_bytes


def drafters() -> dict[str, Any]:
  from mtpjax.drafters import parallel, sequential

  return {
    'shared': lambda depth: sequential.Config(depth=depth),
    'shared, rows': lambda depth: sequential.Config(depth=depth, attend='rows'),
    'unshared': lambda depth: sequential.Config(depth=depth, share=False),
    'parallel': lambda depth: parallel.Config(depth=depth),
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--layers', default='12,24')
  parser.add_argument('--devices', default='1,8')
  parser.add_argument('--only', help='one drafter by its name in the table')
  args = parser.parse_args()
  os.environ['JAX_PLATFORMS'] = 'cpu'
  os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'

  print(f'{"drafter":>14} layers devices {"depth 1":>9} {"depth 4":>9}  ratio')
  for name, make in drafters().items():
    if args.only and name != args.only:
      continue
    for devices in map(int, args.devices.split(',')):
      for layers in map(int, args.layers.split(',')):
        one, four = (temporary_bytes(layers, make(d), devices) for d in (1, 4))
        row = f'{layers:6} {devices:7} {one / 2**20:6.0f} MB {four / 2**20:6.0f} MB'
        print(f'{name:>14} {row}  {four / one:.3f}', flush=True)


if __name__ == '__main__':
  main()
