"""The config tree and its one validation. Each dataclass lives beside its class."""

from __future__ import annotations

import dataclasses
import importlib.util
import math

import jax

from mtpjax import (
  acceptance,
  checkpoint,
  fields,
  heldout,
  losses,
  mesh,
  meters,
  model,
  optimizers,
  tuning,
)
from mtpjax import init_from as transfer
from mtpjax.data import batches
from mtpjax.drafters import base
from mtpjax.fields import ConfigError
from mtpjax.models import kernels, trunk


@dataclasses.dataclass
class Config:
  """Everything a run is. Config files return one; flags override its fields."""

  name: str = 'run'
  seed: int = 0
  steps: int = 1000
  log_every: int = 10  # steps between lines of metrics
  data: batches.Config = dataclasses.field(default_factory=batches.Config)
  trunk: trunk.Config = dataclasses.field(default_factory=trunk.Config)
  drafter: base.Config | None = None  # at most one; None is plain pretraining
  objectives: tuple[base.Config, ...] = ()  # further ones, which need not draft
  freeze_trunk: bool = False  # only the objectives train
  tune: tuple[str, ...] = ()  # patterns of what trains, see `tuning`; () is everything
  init_from: transfer.Config | None = None  # parameters of another run to begin with
  loss: losses.Config = dataclasses.field(default_factory=losses.Config)
  optimizer: optimizers.AdamW | optimizers.Muon = dataclasses.field(
    default_factory=optimizers.AdamW
  )
  mesh: mesh.Config = dataclasses.field(default_factory=mesh.Config)
  checkpoint: checkpoint.Config = dataclasses.field(
    default_factory=lambda: checkpoint.Config(every=500)
  )
  guard: meters.Guard = dataclasses.field(default_factory=meters.Guard)
  evaluation: heldout.Config = dataclasses.field(default_factory=heldout.Config)
  decode: acceptance.Config = dataclasses.field(default_factory=acceptance.Config)
  profile: tuple[int, ...] = ()  # (first step, steps) to trace into WORKDIR/profile
  compilation_cache: str | None = None  # a directory that outlives the process
  wandb: str | None = None  # a project of Weights & Biases to log to as well

  def parts(self) -> dict[str, base.Config]:
    """The objectives by name: 'drafter', then each further one by its file's name."""
    found = {} if self.drafter is None else {'drafter': self.drafter}
    for config in self.objectives:
      name = type(config).__module__.rpartition('.')[2].replace(' ', '_')
      same = sum(other == name or other.startswith(f'{name}_') for other in found)
      found[f'{name}_{same + 1}' if same else name] = config
    return found


# A directory goes on after a change of these: they do not change what is learnt.
FREE = (
  *('name', 'log_every', 'mesh', 'checkpoint', 'guard', 'evaluation', 'decode'),
  *('profile', 'compilation_cache', 'wandb', 'trunk.attention'),
)


def finalize(config: Config, vocab: int | None = None) -> Config:
  """Fills in what follows from other fields and refuses what cannot run.

  Called before the data is read and again, with the tokenizer's `vocab`, before
  anything compiles. Needs the mesh to be set (`jax.set_mesh`).

  Raises:
    ConfigError: names the field, its value and a fix.
    DataError: the same, of the data.
  """
  fields.check_types(config)
  for name in ('steps', 'log_every'):
    value = getattr(config, name)
    if not 1 <= value < 2**31:
      raise ConfigError(name, value, 'is out of range', 'use 1 … 2³¹ - 1')
  if not 0 <= config.seed < 2**32:
    raise ConfigError('seed', config.seed, 'is no seed', 'use one in 0 … 2³² - 1')
  config.trunk.finalize(vocab)
  for field, objective in zip(_paths(config), config.parts().values(), strict=True):
    objective.finalize(config.trunk, field)
  _check_needs(config)
  if config.freeze_trunk and not config.parts():
    raise ConfigError(
      'freeze_trunk', True, 'leaves nothing to train', 'set a drafter or False'
    )
  config.loss.finalize()
  config.optimizer.finalize()
  config.checkpoint.finalize()
  config.guard.finalize()
  config.evaluation.finalize()
  config.decode.finalize()
  if config.profile and (len(config.profile) != 2 or min(config.profile) < 1):
    fix = 'use (first step, how many), e.g. (100, 3)'
    raise ConfigError('profile', config.profile, 'is no span of steps', fix)
  if config.profile and sum(config.profile) - 1 > config.steps:
    fix = f'end at step {config.steps}, the last'
    raise ConfigError('profile', config.profile, 'goes beyond training', fix)
  if config.wandb is not None and importlib.util.find_spec('wandb') is None:
    fix = "pip install 'mtpjax[wandb]', or set None"
    raise ConfigError('wandb', config.wandb, 'needs a package that is missing', fix)
  config.data.validate()
  _check_positions(config)
  _check_mesh(config)
  _check_dtype(config.trunk)
  kernels.check(config.trunk, config.data.length, config.data.pack)
  by_name = config.tune or isinstance(config.optimizer, optimizers.Muon)
  if by_name and config.trunk.vocab is not None:
    _check_names(config)
  return config


def attention(config: Config) -> str:
  """Which kernel computes attention, where another does, and why: for people."""
  parts = dict(zip(_paths(config), config.parts().values(), strict=True))
  for path, part in parts.items():
    if part.kernels() == 'none':
      return f'xla ({path} gives rows an order of their own)'
  kernel, why = kernels.choose(config.trunk, config.data.length, config.data.pack)
  own = [path for path, part in parts.items() if part.kernels() == 'trunk']
  if own and kernel != 'xla':
    why = '; '.join([*([why] if why else []), f'xla in {", ".join(own)}'])
  return f'{kernel} ({why})' if why else kernel


def _paths(config: Config) -> list[str]:
  """Where `Config.parts` are in the tree, as `fields.override` writes it."""
  drafter = [] if config.drafter is None else ['drafter']
  return drafter + [f'objectives[{n}]' for n in range(len(config.objectives))]


def _check_needs(config: Config) -> None:
  """Layers are numbered as in `model.Model`, once all that are given up are gone."""
  sizes, parts = config.trunk, config.parts()
  gives = {name: part.needs(sizes).layers_given_up for name, part in parts.items()}
  left = sizes.layers - max(gives.values(), default=0)
  for path, (name, part) in zip(_paths(config), parts.items(), strict=True):
    needs = part.needs(dataclasses.replace(sizes, layers=left + gives[name]))
    for field, numbers, limit in (
      ('taps', needs.taps, left),
      ('kv_layers', needs.kv_layers, left - 1),
    ):
      for number in numbers:
        if not 0 <= number <= limit:
          raise ConfigError(
            f'{path}.{field}',
            number,
            f'is no layer of a trunk of {left}',
            f'use 0 … {limit}',
          )


def _check_positions(config: Config) -> None:
  """A table of positions must reach as far as rows and decodes do."""
  count, length, decode = (
    config.trunk.learned_positions,
    config.data.length,
    config.decode,
  )
  if count is None:
    return
  decoded = min(decode.prompt_tokens, length) + decode.tokens
  for field, needed in (('data.length', length), ('decode.tokens', decoded)):
    if needed > count:
      raise ConfigError(
        'trunk.learned_positions',
        count,
        f'ends before the {needed} positions that {field} needs',
        f'use at least {needed}',
      )


def _check_mesh(config: Config) -> None:
  """Every sharded length must divide over its axes."""
  sizes = config.trunk
  rows = config.optimizer.accumulate
  checks = [
    ('data.batch', config.data.batch, mesh.BATCH, rows, 'optimizer.accumulate × '),
    ('data.length', config.data.length, ('context',), 1, ''),
    ('trunk.width', sizes.width, mesh.STORED, 1, ''),
    ('trunk.width', sizes.width, ('tensor',), 1, ''),
    ('trunk.heads', sizes.heads, ('tensor',), 1, ''),
    ('trunk.ffn', sizes.ffn, ('tensor',), 1, ''),
    ('trunk.vocab_multiple', sizes.vocab_multiple, ('tensor',), 1, ''),
  ]
  for field, value, axes, times, said in checks:
    divisor = mesh.axis_size(*axes) * times
    if value % divisor:
      whole = math.lcm(divisor, config.data.shards if field == 'data.batch' else 1)
      over = said + ' × '.join(f'mesh.{axis}' for axis in axes)
      raise ConfigError(
        field,
        value,
        f'does not divide by {over} = {divisor}',
        f'use a multiple, such as {-(-value // whole) * whole}',
      )


def _check_dtype(sizes: trunk.Config) -> None:
  for field in ('dtype', 'param_dtype'):
    if getattr(sizes, field) == 'float64' and not jax.config.read('jax_enable_x64'):
      raise ConfigError(
        f'trunk.{field}', 'float64', 'is off in JAX', 'set JAX_ENABLE_X64=1'
      )


def _check_names(config: Config) -> None:
  """What is said of parameters by name must fit those that there are."""
  _, params, _ = model.init(config.trunk, config.parts(), 0)
  selection = tuning.select(params, config.freeze_trunk, config.tune)
  own, _ = tuning.split(params, selection)
  jax.eval_shape(config.optimizer.build().init, own)


def conventions(config: Config) -> dict:
  """What somebody must know to run a checkpoint elsewhere: `kind`, `modules` and every
  choice of the drafter, and under `objectives` those of each other one, by name."""
  found = {name: part.conventions() for name, part in config.parts().items()}
  drafter = found.pop('drafter', {'kind': None, 'modules': 0, 'shared': []})
  return {**drafter, 'objectives': found}
