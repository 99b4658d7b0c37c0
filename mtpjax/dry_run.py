"""`--dry_run`: what a step takes on this mesh, compiled but not run. Parameters and
batches stay abstract, so a laptop does for any size."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import os
import re
import time
from typing import Any

import jax
from absl import flags
from jaxtyping import PyTree

from mtpjax import config as configs
from mtpjax import flops, mesh, metrics, model, saved, step, terminal, tuning
from mtpjax.data import batches
from mtpjax.fields import ConfigError


def define_flags() -> None:
  """--dry_run, --topology and --json, for a command; a library defines none."""
  flags.DEFINE_bool('dry_run', False, 'compile, say what a step takes, and end')
  flags.DEFINE_string(
    'topology', None, 'what --dry_run compiles for instead: TPUs, v5e:4x4, or cpu:64'
  )
  saved.define_json()
  flags.declare_key_flag('json')


def refuse_flags() -> None:
  """Raises ConfigError where training would not look at what was asked for."""
  for name in ('topology', 'json'):
    if (value := flags.FLAGS[name].value) is not None:
      fix = 'add --dry_run, or leave it out'
      raise ConfigError(f'--{name}', value, 'is of --dry_run alone', fix)


def main(config: configs.Config) -> int:
  out = saved.output()
  devices = None
  if flags.FLAGS.topology is not None:
    devices = topology(flags.FLAGS.topology)
    config.trunk.dtype = config.trunk.dtype or 'bfloat16'
  jax.set_mesh(mesh.make(config.mesh, devices))
  configs.finalize(config)
  if config.trunk.vocab is None:
    data = batches.open_data(config.data, config.seed)
    configs.finalize(config, data.tokenizer.vocab_size)
  terminal.say(f'attention: {configs.attention(config)}')
  terminal.say('compiling the train step; nothing is run or written …')
  found = measure(config)
  if config.parts() and not (config.freeze_trunk or config.tune):
    plain = measure(dataclasses.replace(config, drafter=None, objectives=()))
    found['depth_0'] = plain
    found['mtp_overhead'] = {
      name: _figure(found, name) / max(_figure(plain, name), 1) - 1
      for name in _COMPARED
    }
  terminal.say(table(found))
  if out and jax.process_index() == 0:
    metrics.write_summary(out, found)
  return 0


_COMPARED = {
  'parameters': ('parameters', 'total'),
  'model_flops': ('flops_per_token', 'model'),
  'compiled_flops': ('flops_per_token', 'compiled'),
  'memory': ('memory', 'total'),
  'temporaries': ('memory', 'temporaries'),
}


def _figure(found: dict[str, Any], name: str) -> float:
  kind, key = _COMPARED[name]
  return found[kind][key]


def topology(name: str) -> list[Any]:
  """Devices to compile for that are not here: chips of a TPU slice, or CPUs in place of
  whatever it will be.

  Raises:
    ConfigError: no such slice, or no libtpu.
  """
  version, _, size = name.partition(':')
  fix = 'write a version and its chips, e.g. v5e:4x4, v5p:4x4x4, v6e:8x8 or cpu:64'
  if not re.fullmatch(r'\w+:[1-9]\d*(x[1-9]\d*)*', name, re.ASCII):
    raise ConfigError('--topology', name, 'is no slice', fix)
  if version == 'cpu':
    if not re.fullmatch(r'\d{1,4}', size):  # XLA makes each of them
      raise ConfigError('--topology', name, 'is no number below 10,000', 'use cpu:64')
    try:
      jax.config.update('jax_num_cpu_devices', int(size))
    except RuntimeError:
      fix = 'set XLA_FLAGS=--xla_force_host_platform_device_count='
      problem = 'is too late, since a device is in use'
      raise ConfigError('--topology', name, problem, fix + size) from None
    return jax.devices('cpu')
  if importlib.util.find_spec('libtpu') is None:
    fix = "pip install 'jax[tpu]', or use cpu:NUMBER in their place"
    raise ConfigError('--topology', name, 'needs libtpu, which is missing', fix)
  # Nothing is asked of the cloud, and several may compile at once: no chip is used.
  os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
  os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')
  from jax.experimental import topologies  # it asks for libtpu's plugin

  try:
    return list(topologies.get_topology_desc(name, platform='tpu').devices)
  except (RuntimeError, ValueError) as error:
    said = ' '.join(str(error).split())[:200]
    raise ConfigError('--topology', name, f'is no slice: {said}', fix) from None


def measure(config: configs.Config) -> dict[str, Any]:
  """Of the train step on the mesh that is set.

  Raises:
    ConfigError: the compiler finds too little memory.

  Returns:
    parameters: total, trunk, of each objective by name, trainable.
    memory: bytes of a device. `donated` are those of the old state in which the new one
      is written; `host` is what of it waits in the host's memory; `limit` what the
      device has, if it says so.
    flops_per_token: `model` without recomputation, `compiled` as often as the devices
      really compute, over all tokens of the batch.
    not_counted: custom calls whose products are not known, and how often a device runs
      them in a step.
  """
  graphdef, params, _ = model.init(config.trunk, config.parts(), config.seed)
  init_state = functools.partial(step.init_state, config=config)
  state, own = jax.eval_shape(init_state, params), params.get('objectives', {})
  began = time.monotonic()
  compiled = _compile(graphdef, config, state)
  seconds = time.monotonic() - began
  by_xla: Any = compiled.memory_analysis()
  rest = {name: x for name, x in state.items() if name != 'params'}
  outputs = by_xla.output_size_in_bytes - by_xla.alias_size_in_bytes
  temporaries, code = by_xla.temp_size_in_bytes, by_xla.generated_code_size_in_bytes
  held = by_xla.argument_size_in_bytes  # with the padding of a device's tiles
  asked, done = flops.of_model(config), flops.of_compiled(compiled)
  tokens = config.data.batch * config.data.length
  devices = math.prod(mesh.axis_sizes().values())
  train = tuning.select(params, config.freeze_trunk, config.tune)
  return {
    'name': config.name,
    'parameters': {
      'total': _size(params),
      'trunk': _size(params['trunk']),
      'objectives': {name: _size(x) for name, x in own.items()},
      'trainable': tuning.count(params, train),
    },
    'memory': {
      'parameters': bytes_per_device(params),
      'optimizer': bytes_per_device(rest),
      'batch': bytes_per_device(step.abstract_arrays(config)),
      'temporaries': temporaries,
      'outputs': outputs,
      'code': code,
      'total': held + temporaries + outputs + code,
      'donated': by_xla.alias_size_in_bytes,
      'host': by_xla.host_temp_size_in_bytes,
      'limit': _limit(),
    },
    'flops_per_token': {
      'model': asked.flops / tokens,
      'compiled': done.flops * devices / tokens,
    },
    'not_counted': done.unknown,
    'tokens_per_step': tokens,
    'remat': config.trunk.remat,
    'compile_seconds': seconds,
    'conditions': {
      **metrics.conditions(),
      'device': _device().device_kind,
      'device_count': devices,
      'mesh': mesh.axis_sizes(),
    },
  }


def _compile(graphdef: Any, config: configs.Config, state: Any) -> jax.stages.Compiled:
  try:
    return step.compile_train(graphdef, config, state)
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    said = ' '.join(str(error).partition('RESOURCE_EXHAUSTED:')[2].split())[:200]
    axes = ' × '.join(f'{axis} {n}' for axis, n in mesh.axis_sizes().items())
    fix = 'use more devices, optimizer.accumulate, shorter rows or trunk.remat=full'
    raise ConfigError('mesh', axes, f'has too little memory: {said}', fix) from None


def _device() -> Any:
  return jax.sharding.get_mesh().devices.flat[0]


def _limit() -> int | None:
  if _device() not in jax.local_devices():
    return None
  return (_device().memory_stats() or {}).get('bytes_limit')


def _size(tree: PyTree) -> int:
  return sum(x.size for x in jax.tree.leaves(tree))


def bytes_per_device(tree: PyTree) -> int:
  """Of arrays that may be abstract, with their shardings."""

  def one(x):
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize

  return sum(map(one, jax.tree.leaves(tree)))


def table(found: dict[str, Any]) -> str:
  """The same for people."""
  count, held, per_token = (
    found['parameters'],
    found['memory'],
    found['flops_per_token'],
  )
  conditions = found['conditions']
  axes = ' × '.join(f'{a} {n}' for a, n in conditions['mesh'].items() if n > 1)
  own = ''.join(f' + {n:,} {name}' for name, n in count['objectives'].items())
  some = (
    '' if count['trainable'] == count['total'] else f', {count["trainable"]:,} train'
  )
  kinds = ('parameters', 'optimizer', 'batch', 'temporaries', 'outputs', 'code')
  said = ', '.join(f'{kind} {held[kind] / 2**30:.2f}' for kind in kinds)
  limit = f' of {held["limit"] / 2**30:.1f}' if held['limit'] else ''
  host = f', on the host {held["host"] / 2**30:.2f}' if held['host'] else ''
  again = per_token['compiled'] / per_token['model']
  lines = [
    f'{found["name"]} on {conditions["device_count"]} × {conditions["device"]}'
    f'{f", {axes}" if axes else ""}; compiled in {found["compile_seconds"]:.0f} s',
    f'parameters     {count["total"]:,} = {count["trunk"]:,} trunk{own}{some}',
    f'GiB a device   {held["total"] / 2**30:.2f}{limit}: {said}{host}; '
    f'{held["donated"] / 2**30:.2f} of it updated in place',
    f'FLOPs a token  {per_token["model"]:.4g}, compiled {per_token["compiled"]:.4g} '
    f'({again:.2f} ×: remat {found["remat"]}, and what devices repeat)',
  ]
  if found['not_counted']:
    calls = ', '.join(f'{n:g} × {name}' for name, n in found['not_counted'].items())
    lines.append(f'not counted    {calls}')
  if 'mtp_overhead' in found:
    more = {name: f'{x:+.1%}' for name, x in found['mtp_overhead'].items()}
    lines.append(
      f'over depth 0   FLOPs {more["model_flops"]}, compiled {more["compiled_flops"]}; '
      f'memory {more["memory"]}, temporaries {more["temporaries"]}; '
      f'parameters {more["parameters"]}'
    )
  return '\n'.join(lines)
