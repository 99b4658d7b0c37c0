"""A run that begins with parameters of another: the trunk restored and the drafter
fresh, the other way round, or all that fits. Where the other kept an average of them,
it is that, as evaluation and sampling have it.

Leaves are named by their place, such as trunk/blocks/w_up or objectives/drafter/w_join.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
from collections.abc import Iterable
from typing import Any

import jax
from etils import epath
from flax import nnx, traverse_util

from mtpjax import checkpoint, fields, paths
from mtpjax.data.tokenizer import Tokenizer
from mtpjax.fields import ConfigError

_SHOWN = 8  # names in a message


@dataclasses.dataclass
class Config:
  """Which checkpoint, and what is not taken from it.

  Attributes:
    checkpoint: a run's directory (its newest step), or checkpoints/STEP of one.
    fresh: patterns of leaves that are initialised all the same, as a shell writes
      them: ('objectives/*',) restores the trunk alone, ('trunk/*',) the rest.
  """

  checkpoint: str
  fresh: tuple[str, ...] = ()


@dataclasses.dataclass
class Plan:
  """What will be read; made, and refused, before anything compiles."""

  directory: epath.Path
  step: int
  restored: list[str]
  fresh: list[str]
  unused: list[str]
  differs: list[str]
  averaged: dict[str, str]  # of what is restored, what there is an average of: dtypes

  def __str__(self) -> str:
    count = f'{len(self.restored)} leaves'
    if self.averaged:
      count += f', the average over training of {len(self.averaged)} of them'
    lines = [
      f'init_from {self.directory}, step {self.step}: {count}',
      f'  fresh here: {_names(self.fresh)}',
      f'  unused there: {_names(self.unused)}',
    ]
    if self.differs:
      lines.append(f'  the trunk was trained with {"; ".join(self.differs)}')
    return '\n'.join(lines)


def plan(
  config: Config,
  abstract: dict,
  tokenizer: Tokenizer,
  conventions: dict[str, Any],
  trunk: Any,
) -> Plan:
  """Compares names, shapes, dtypes, tokenizers and conventions.

  Args:
    abstract: this run's parameters, from `model.init`.
    conventions: this run's, from `config.conventions`.
    trunk: this run's trunk.Config.

  Raises:
    ConfigError: what differs, by name.
    CheckpointError: there is none.
  """
  directory, step = _find(config.checkpoint)
  record = checkpoint.read_record(directory, step)
  metadata = record['metadata']
  field, value = 'init_from.checkpoint', config.checkpoint
  if metadata['tokenizer_fingerprint'] != tokenizer.fingerprint:
    raise ConfigError(
      field,
      value,
      'has another tokenizer, so its ids mean other text',
      'train with that tokenizer, or without init_from',
    )
  have = {
    name.removeprefix('params/'): f'{leaf["dtype"]}{leaf["shape"]}'
    for name, leaf in record['leaves'].items()
    if name.startswith('params/')
  }
  want = {name: f'{x.dtype}{list(x.shape)}' for name, x in _flat(abstract).items()}
  for pattern in config.fresh:
    if not fnmatch.filter(want, pattern):
      fix = fields.suggest(pattern, _prefixes(want))
      raise ConfigError('init_from.fresh', pattern, 'matches no parameter', fix)
  fresh = {n for p in config.fresh for n in fnmatch.filter(want, p)}
  restored = [name for name in want if name in have and name not in fresh]
  if differing := [n for n in restored if want[n] != have[n]]:
    shown = ', '.join(
      f'{n} {have[n]} there, {want[n]} here' for n in differing[:_SHOWN]
    )
    raise ConfigError(
      field,
      value,
      f'does not fit: {shown}',
      'change the config, or name them in init_from.fresh',
    )
  if not restored:
    fix = f'it has {_names(have)}'
    raise ConfigError(field, value, 'has nothing of this model', fix)
  _check_conventions(field, value, restored, metadata['conventions'], conventions)
  saved = fields.from_json(metadata['config']).trunk  # pyright: ignore
  differs = [
    f'{f.name}={getattr(saved, f.name)!r}, not {getattr(trunk, f.name)!r}'
    for f in dataclasses.fields(trunk)
    if f.name not in ('remat', 'attention', 'dtype', 'layers')
    and getattr(saved, f.name) != getattr(trunk, f.name)
  ]
  return Plan(
    directory,
    record['step'],
    restored,
    [name for name in want if name not in restored],
    [name for name in have if name not in restored],
    differs,
    {
      name: record['leaves'][f'ema/{name}']['dtype']
      for name in restored
      if f'ema/{name}' in record['leaves']
    },
  )


def load(plan: Plan, graphdef: Any, params: dict) -> dict:
  """The parameters, those of the plan replaced by the checkpoint's. What is fresh and
  starts as a copy of the trunk's is a copy of this trunk's."""
  flat, wanted = _flat(params), {}
  for name in plan.restored:
    x, dtype = flat[name], plan.averaged.get(name)
    wanted[f'ema/{name}' if dtype else f'params/{name}'] = jax.ShapeDtypeStruct(
      x.shape, dtype or x.dtype, sharding=x.sharding
    )
  saved = checkpoint.Checkpoints(plan.directory)
  restored = saved.restore(_nested(wanted), plan.step, subset=True)
  assert restored is not None  # its record has been read
  found = {}
  for name, x in _flat(restored.state).items():
    name = name.partition('/')[2]
    found[name] = x.astype(flat[name].dtype)
  model = nnx.merge(graphdef, _nested({**flat, **found}))
  model.adopt()
  adopted = _flat(nnx.to_pure_dict(nnx.state(model)))
  return _nested({**adopted, **found})


def _nested(flat: dict[str, Any]) -> dict:
  return traverse_util.unflatten_dict(flat, sep='/')


def _flat(tree: dict) -> dict[str, Any]:
  return traverse_util.flatten_dict(tree, sep='/')


def _find(path: str) -> tuple[epath.Path, int | None]:
  given = paths.at(path)
  if given.name.isdigit() and (given.parent / given.name).is_dir():
    return given.parent, int(given.name)
  return checkpoint.find(path), None


def _check_conventions(field, value, restored: list[str], there: dict, here: dict):
  """A drafter of other choices has the same shapes, and would be silently wrong."""
  parts = {n.split('/')[1] for n in restored if n.startswith('objectives/')}
  for part in sorted(parts):
    old, new = (
      c if part == 'drafter' else c['objectives'].get(part, {}) for c in (there, here)
    )
    new = json.loads(json.dumps(new))  # tuples are lists in a checkpoint
    for name in new:
      # A shared module may go on to more depths than it was trained for, and `detach`
      # says only how it was trained.
      if name in ('objectives', 'depth', 'modules', 'detach'):
        continue
      if old.get(name) != new[name]:
        raise ConfigError(
          field,
          value,
          f'has a {part} with {name}={old.get(name)!r}, not {new[name]!r}',
          f"use the same, or init_from.fresh=('objectives/{part}/*',)",
        )


def _prefixes(names: Iterable[str]) -> list[str]:
  parts = {n.rpartition('/')[0] for n in names}
  return sorted(
    {f'{p}/*' for p in parts if p} | {f'{p.split("/")[0]}/*' for p in parts}
  )


def _names(names: Iterable[str]) -> str:
  names = list(names)
  more = f' and {len(names) - _SHOWN} more' if names[_SHOWN:] else ''
  return (', '.join(names[:_SHOWN]) or 'nothing') + more
