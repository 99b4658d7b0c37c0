"""Floating-point operations of a step: those that it asks for, those that its compiled
program does, and how many a device can do.

Counted are matrix products and convolutions, two operations for each multiply and add;
everything elementwise is not. Attention counts as if every position looked at every
other of its row, which a causal kernel spares about half of.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from mtpjax import model, step

# Dense bfloat16 FLOP/s by the data sheets, of devices whose `device_kind` begins so.
PEAK = {
  'TPU v4': 275e12,
  'TPU v4 lite': 138e12,
  'TPU v5 lite': 197e12,
  'TPU v5e': 197e12,
  'TPU v5': 459e12,
  'TPU v5p': 459e12,
  'TPU v6 lite': 918e12,
  'TPU v6e': 918e12,
  'NVIDIA A100': 312e12,
  'NVIDIA H100': 989e12,
  'NVIDIA H100 PCIe': 756e12,
  'NVIDIA H100 NVL': 835e12,
  'NVIDIA H200': 989e12,
  'NVIDIA H200 NVL': 835e12,
}


def peak(kind: str) -> float | None:
  """bfloat16 FLOP/s of one device, by its `device_kind`; None if it is not known."""
  names = [name for name in PEAK if kind.startswith(name) and 'MIG' not in kind]
  return PEAK[max(names, key=len)] if names else None


def full_speed(config: Any) -> float | None:
  """Tokens a second at which every device would be at its peak: MFU is the share of it
  that is reached. None where the peak is not known. Needs the mesh to be set."""
  one = peak(jax.devices()[0].device_kind)
  if one is None:
    return None
  tokens = config.data.batch * config.data.length
  return one * jax.device_count() * tokens / of_model(config).flops


@dataclasses.dataclass
class Count:
  """Operations, and how often something was run whose operations are not known."""

  flops: int = 0
  unknown: dict[str, int] = dataclasses.field(default_factory=dict)

  def add(self, other: Count, times: int = 1) -> None:
    self.flops += times * other.flops
    for name, count in other.unknown.items():
      self.unknown[name] = self.unknown.get(name, 0) + times * count

  @classmethod
  def largest(cls, counts: list[Count]) -> Count:
    return max(counts, key=lambda count: count.flops, default=cls())


# --------------------------------------------------------------------------- asked for


def of_model(config: Any) -> Count:
  """One step's products over the global batch, nothing computed twice: the model FLOPs
  that MFU divides by. Needs the mesh to be set."""
  config = copy.deepcopy(config)
  config.trunk.remat, config.optimizer.accumulate = 'none', 1
  config.trunk.attention = 'xla'  # other kernels hide their products
  graphdef, params, _ = model.init(config.trunk, config.parts(), config.seed)

  def gradients(params, arrays):
    batch = step.to_batch(arrays, config.freeze_trunk)
    return step.gradients(graphdef, params, batch, config, jnp.zeros((), jnp.int32))

  return of_jaxpr(jax.make_jaxpr(gradients)(params, step.abstract_arrays(config)).jaxpr)


def of_jaxpr(jaxpr: core.Jaxpr) -> Count:
  """What a traced function asks for, over all devices."""
  total = Count()
  for eqn in jaxpr.eqns:
    name, params = eqn.primitive.name, eqn.params
    # Arrays, as those of products are.
    read: list[Any] = [x.aval for x in eqn.invars]
    made: list[Any] = [x.aval for x in eqn.outvars]
    if name == 'dot_general':
      contracted = params['dimension_numbers'][0][0]
      deep = math.prod(read[0].shape[d] for d in contracted)
      total.flops += 2 * made[0].size * deep
    elif name == 'conv_general_dilated':
      outputs = read[1].shape[params['dimension_numbers'].rhs_spec[0]]
      total.flops += 2 * made[0].size * read[1].size // outputs
    elif name == 'cond':
      total.add(Count.largest([of_jaxpr(x) for x in _jaxprs(params)]))
    elif name == 'pallas_call':
      total.add(Count(unknown={name: 1}))
    else:
      inner = Count()
      for each in _jaxprs(params):
        inner.add(of_jaxpr(each))
      if name == 'while' and inner.flops:
        total.add(Count(unknown={'a loop of unknown length': 1}))
      times = params['length'] if name == 'scan' else 1
      if name == 'shard_map':
        times = math.prod(params['mesh'].shape[x] for x in params['manual_axes'])
      total.add(inner, times)
  return total


def _jaxprs(params: dict[str, Any]) -> Iterator[core.Jaxpr]:
  for value in params.values():
    for one in value if isinstance(value, tuple | list) else (value,):
      if isinstance(one, core.ClosedJaxpr):
        yield one.jaxpr
      elif isinstance(one, core.Jaxpr):
        yield one


# ---------------------------------------------------------------------------- compiled


@dataclasses.dataclass
class _Instruction:
  name: str
  shape: tuple[int, ...]  # of its first array
  opcode: str
  inside: str  # the parentheses
  rest: str  # attributes

  @property
  def operands(self) -> list[str]:
    return re.findall(r'%([\w.\-]+)', self.inside)

  def names(self, *attributes: str) -> list[str]:
    """Computations that attributes name."""
    found = []
    for attribute in attributes:
      for group in re.findall(rf'\b{attribute}=(\{{[^}}]*\}}|%?[\w.\-]+)', self.rest):
        found += re.findall(r'[\w.\-]+', group)
    return found

  def numbers(self, attribute: str) -> list[int]:
    found = re.search(rf'\b{attribute}=\{{([\d,]*)\}}', self.rest)
    return [int(x) for x in found[1].split(',') if x] if found else []


# Custom calls that multiply nothing.
_NO_PRODUCTS = re.compile(
  'Sharding|SPMD|TopK|AllocateBuffer|Move|Pin|Place|threefry|Concat|Slice|Assume|Rng|'
  'Sort|Collective',
  re.IGNORECASE,
)


def of_compiled(compiled: jax.stages.Compiled) -> Count:
  """What one device does: whatever is computed again, on several devices, or in every
  iteration of a loop counts as often as it runs."""
  return of_hlo(compiled.as_text() or '')


def of_hlo(text: str) -> Count:
  """The same of an optimised HLO module."""
  entry, lines = '', {}
  body: list[str] = []
  for line in text.splitlines():
    if head := re.match(r'(ENTRY )?%?([\w.\-]+) \(.*\{$', line):
      entry, body = (head[2] if head[1] else entry), lines.setdefault(head[2], [])
    elif line.startswith('  ') and ' = ' in line:
      body.append(line)
    elif body and line != '}':
      body[-1] += line  # metadata of a kernel has lines of its own
  bodies = {name: [_parse(line) for line in own] for name, own in lines.items()}

  @functools.cache
  def count(name: str) -> Count:
    total, shapes = Count(), {}
    for one in bodies[name]:
      shapes[one.name] = one.shape
      opcode = one.opcode.removesuffix('-start')
      if opcode in ('dot', 'ragged-dot'):
        lhs = shapes[one.operands[0]]
        deep = math.prod(lhs[d] for d in one.numbers('lhs_contracting_dims'))
        total.flops += 2 * math.prod(one.shape) * deep
      elif opcode == 'convolution':
        total.flops += _convolution(one, *(shapes[x] for x in one.operands[:2]))
      elif opcode == 'custom-call':
        total.add(_custom_call(one, shapes))
      elif opcode == 'while':
        inner = Count()
        for each in one.names('body', 'condition'):
          inner.add(count(each))
        times = _trips(one, bodies[one.names('condition')[0]])
        if times is None and inner.flops:
          inner.add(Count(unknown={'a loop of unknown length': 1}))
        total.add(inner, times or 1)
      elif opcode == 'conditional':
        branches = 'branch_computations', 'true_computation', 'false_computation'
        total.add(Count.largest([count(each) for each in one.names(*branches)]))
      else:
        # Reductions and the like have a `to_apply` too: it is for scalars.
        calls = one.names('calls', *(('to_apply',) if opcode == 'call' else ()))
        for each in calls:
          total.add(count(each))
    return total

  return count(entry)


def _trips(loop: _Instruction, condition: list[_Instruction]) -> int | None:
  """By the annotation, or by the limit that a counter, which JAX starts at 0, is
  compared with."""
  if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
    return int(known[1])
  last = condition[-1]
  limits = [
    one.inside
    for one in condition
    if one.opcode == 'constant' and one.name in last.operands[1:]
  ]
  if last.opcode == 'compare' and 'direction=LT' in last.rest and limits:
    return int(limits[0]) if limits[0].isdigit() else None
  return None


def _parse(line: str) -> _Instruction:
  name, rest = line.strip().removeprefix('ROOT ').split(' = ', 1)
  end = _closing(rest, 0) + 1 if rest[0] == '(' else rest.index(' ')
  array = re.search(r'\w\[([\d,]*)\]', rest[:end])
  shape = tuple(int(x) for x in array[1].split(',') if x) if array else ()
  opened = rest.index('(', end)
  closed = _closing(rest, opened)
  opcode, inside = rest[end:opened].strip(), rest[opened + 1 : closed]
  return _Instruction(name.lstrip('%'), shape, opcode, inside, rest[closed:])


def _closing(text: str, at: int) -> int:
  """Where the parenthesis that opens there closes."""
  depth = 0
  for found in re.finditer(r'[()]', text[at:]):
    depth += 1 if found[0] == '(' else -1
    if depth == 0:
      return at + found.start()
  return len(text)


def _custom_call(one: _Instruction, shapes: dict[str, tuple[int, ...]]) -> Count:
  found = re.search(r'custom_call_target="([^"]*)"', one.rest)
  target, size = (found[1] if found else '?'), math.prod(one.shape)
  if estimate := re.search(r'"cost_estimate":\s*\{[^}]*?"flops":\s*"?(\d+)', one.rest):
    return Count(int(estimate[1]))  # the kernel's own word
  if 'matmul' in target or 'gemm' in target:
    dims = re.search(r'"lhs_contracting_dimensions":(\[[^\]]*\])', one.rest)
    if dims:
      lhs = shapes[one.operands[0]]
      return Count(2 * size * math.prod(lhs[int(d)] for d in json.loads(dims[1])))
  if target.startswith('__cudnn$fmha'):
    dims = re.search(
      r'"intermediate_tensor_shape":.*?"dimensions":(\[[^\]]*\])', one.rest
    )
    if dims:
      # Forward two products; backward five, one of them again. The first result is
      # shaped as the queries are.
      products = 5 if 'Backward' in target else 2
      return Count(2 * products * size * int(json.loads(dims[1])[-1]))
  if splash := re.search(r'splash_mha_(fwd|dkv|dq)', one.name + one.rest):
    products = {'fwd': 2, 'dkv': 4, 'dq': 3}[splash[1]]
    given = re.search(r'operand_layout_constraints=\{(.*?)\}, \w+=', one.rest)
    arrays = re.findall(r'f\d+\[([\d,]+)\]', given[1] if given else '')
    if len(arrays) > 1:  # queries and keys come first
      q, k = ([int(n) for n in x.split(',')] for x in arrays[:2])
      return Count(2 * products * math.prod(q) * k[-2])
  return Count() if _NO_PRODUCTS.search(target) else Count(unknown={target: 1})


def _convolution(
  one: _Instruction, lhs: tuple[int, ...], kernel: tuple[int, ...]
) -> int:
  """On a TPU products are convolutions too, batch dimensions being spatial ones."""
  labels = re.search(r'dim_labels=(\w+)_(\w+)->(\w+)', one.rest)
  assert labels is not None, one
  found = re.search(r'window=\{([^}]*)\}', one.rest)
  window = dict(re.findall(r'(\w+)=([\w\-]+)', found[1])) if found else {}
  spatial = sorted(set(labels[1]) - set('bf'))
  positions = 1

  def each(name: str, n: int, default: str) -> list[int]:
    parts = window[name].split('x') if name in window else [default] * len(spatial)
    return [int(x) for x in parts[n].split('_')]

  for n, label in enumerate(spatial):
    size = lhs[labels[1].index(label)]
    (stride,), (spread,), (gap,) = (
      each(name, n, '1') for name in ('stride', 'lhs_dilate', 'rhs_dilate')
    )
    outputs = np.arange(one.shape[labels[3].index(label)])
    taps = np.arange(each('size', n, '1')[0])
    at = outputs[:, None] * stride + taps * gap - each('pad', n, '0_0')[0]
    # Only what meets the input, not its padding or the holes between, is computed.
    inside = (at >= 0) & (at < (size - 1) * spread + 1) & (at % spread == 0)
    positions *= int(inside.sum())
  features = kernel[labels[2].index('i')] * kernel[labels[2].index('o')]
  groups = re.search(r'batch_group_count=(\d+)', one.rest)
  rows = lhs[labels[1].index('b')] // (int(groups[1]) if groups else 1)
  return 2 * rows * features * positions
