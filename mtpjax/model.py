"""A trunk and its objectives as one model, and the one loss that training and
evaluation share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from mtpjax import losses
from mtpjax.drafters import base
from mtpjax.drafters.base import Batch
from mtpjax.losses import Sums, Targets
from mtpjax.models import trunk as trunks
from mtpjax.models.trunk import Needs

NEXT = 'next'  # the next token's own name among the objectives


class Model(nnx.Module):
  """A trunk and its objectives by name."""

  def __init__(
    self, trunk: trunks.Config, objectives: Mapping[str, base.Config], rngs: nnx.Rngs
  ):
    configs = list(objectives.values())
    gives = [config.needs(trunk).layers_given_up for config in configs]
    given_up = max(gives, default=0)
    # Each numbers layers as if only its own were given up; all get the same trunk.
    needs = [
      config.needs(dataclasses.replace(trunk, layers=trunk.layers - given_up + own))
      for config, own in zip(configs, gives, strict=True)
    ]
    self.needs = Needs(
      taps=tuple(sorted({t for n in needs for t in n.taps})),
      kv_layers=tuple(sorted({t for n in needs for t in n.kv_layers})),
      layers_given_up=given_up,
    )
    sizes = dataclasses.replace(trunk, layers=trunk.layers - given_up)
    self.trunk = sizes.build(rngs)
    self.objectives = nnx.Dict(
      {name: config.build(sizes, rngs) for name, config in objectives.items()}
    )
    self.adopt()

  def adopt(self) -> None:
    """Gives each objective what starts as a copy of the trunk's."""
    for part in self.objectives.values():
      part.adopt(self.trunk)

  def parts(self) -> list[tuple[int, str, base.Objective]]:
    """Objectives in a fixed order, each with a number for its random stream."""
    return [(n, name, self.objectives[name]) for n, name in enumerate(self.objectives)]


def prepare(
  model: Model, batch: Batch, key: Key[Array, '']
) -> tuple[Batch, dict[str, Targets]]:
  """The batch as all objectives want it, and everybody's targets: no forward pass."""
  for n, _, objective in model.parts():
    batch = objective.prepare(batch, jax.random.fold_in(key, n))
  targets, drawn = {NEXT: batch.targets([0])}, {}
  for n, name, objective in model.parts():
    fold = jax.random.fold_in(key, n)
    drawn[name] = objective.draw(batch, fold)
    own = dataclasses.replace(batch, drawn=drawn[name])
    targets[name] = objective.targets(own, fold)
  return dataclasses.replace(batch, drawn=drawn), targets


def lambdas(model: Model, fraction: Float[Array, '']) -> dict[str, Float[Array, '']]:
  """λ of every objective at this fraction of training."""
  return {name: part.config.weight(fraction) for _, name, part in model.parts()}


def depth_weights(
  model: Model, fraction: Float[Array, ''], trains_trunk: bool, dtype
) -> dict[str, Float[Array, ' K']]:
  """What each depth's mean weighs in the total: 1 for the next token, λ·w_k beyond."""
  weights = {NEXT: jnp.full((1,), float(trains_trunk), dtype)}
  for name, value in lambdas(model, fraction).items():
    config = model.objectives[name].config
    each = jnp.asarray(losses.depth_weights(config.depth, config.rho), dtype)
    if config.curriculum is not None:
      each = jnp.where(config.curriculum(fraction, config.depth), each, 0)
      total = jnp.sum(each)
      each = each / jnp.where(total > 0, total, 1)
    weights[name] = value.astype(dtype) * each
  return weights


def loss(
  model: Model,
  batch: Batch,
  targets: dict[str, Targets],
  counts: dict[str, Int[Array, ' K']],
  weights: dict[str, Float[Array, ' K']],
  config: losses.Config,
  step: Int[Array, ''],
  key: Key[Array, ''] | None,
  freeze_trunk: bool = False,
) -> tuple[Float[Array, ''], dict[str, Sums]]:
  """The differentiable total, and each objective's sums by depth.

  Args:
    batch: as `prepare` returned it.
    counts: valid targets of each depth over everything that this total is part of: all
      microbatches, all processes.
    weights: what each depth's mean weighs, see `depth_weights`.
    key: None in evaluation.
    freeze_trunk: the trunk's head is not trained, so its gradient is not formed.
  """
  trunk = model.trunk
  out = trunk(batch.tokens, batch.rows, model.needs)
  predicted = {NEXT: base.Predictions(trunk.final_norm(out.hidden)[None])}
  for n, name, objective in model.parts():
    fold = None if key is None else jax.random.fold_in(key, n)
    own = dataclasses.replace(batch, drawn=batch.drawn[name])
    predicted[name] = objective.predict(trunk, out, own, step, fold)
    sizes = (len(predicted[name].hidden), len(targets[name].valid), len(weights[name]))
    if len(set(sizes)) > 1:
      raise ValueError(
        f'{name}: predictions, targets and config.depth are {sizes} depths; they must '
        'be equally many'
      )

  entropy = functools.partial(losses.cross_entropy, z_loss=config.z_loss)
  # All that share the trunk's head, the plain loss and its rows go through in one call;
  # a depth with a head of its own goes alone.
  rows = predicted[NEXT].hidden.shape[1:]
  together = [
    n
    for n, p in predicted.items()
    if p.head is None and p.loss is None and p.hidden.shape[1:] == rows
  ]
  calls: list[tuple[list[str], int | None]] = [(together, None)]
  for n, p in predicted.items():
    if n not in together:
      apart = range(len(p.hidden)) if isinstance(p.head, tuple) else (None,)
      calls += [([n], k) for k in apart]
  total, found = jnp.zeros((), weights[NEXT].dtype), {n: [] for n in predicted}
  for names, k in calls:
    first = predicted[names[0]]
    own = first.head[k or 0] if isinstance(first.head, tuple) else first.head
    hidden = [_depth(predicted[n].hidden, k) for n in names]
    part, part_sums = losses.fused(
      _join(hidden),
      own or trunk.head(),
      jax.tree.map(lambda *x: _join(x), *[_depth(targets[n], k) for n in names]),
      _join(
        [_depth(losses.normalised(targets[n], counts[n], weights[n]), k) for n in names]
      ),
      first.loss or entropy,
      config.chunk_tokens,
      tuple(
        predicted[n].trains_head and not (freeze_trunk and predicted[n].head is None)
        for n, h in zip(names, hidden, strict=True)
        for _ in range(len(h))
      ),
    )
    total = total + part
    start = 0
    for name, h in zip(names, hidden, strict=True):
      end = start + len(h)
      found[name].append(jax.tree.map(lambda x, a=start, b=end: x[a:b], part_sums))
      start = end
  joined = {n: jax.tree.map(lambda *x: _join(x), *own) for n, own in found.items()}
  return total, joined


def _depth(tree, k: int | None):
  """Depth `k` alone of arrays [K, ...]; None is all of them."""
  return tree if k is None else jax.tree.map(lambda x: x[k : k + 1], tree)


def _join(arrays):
  return arrays[0] if len(arrays) == 1 else jnp.concatenate(list(arrays))


def init(
  trunk: trunks.Config, objectives: Mapping[str, base.Config], seed: int
) -> tuple[Any, Any, Any]:
  """(graphdef, abstract parameters, a function that makes the parameters).

  Parameters are a pure nested dict of arrays, created in their sharded place.
  """

  def build(key):
    return Model(trunk, objectives, nnx.Rngs(params=key))

  def parameters(key):
    return nnx.to_pure_dict(nnx.state(build(key)))

  # Nothing runs yet: the mesh may be of devices that are only compiled for.
  key = jax.eval_shape(lambda: jax.random.key(seed))
  graphdef = nnx.graphdef(nnx.eval_shape(build, key))
  # LLVM would spend seconds on code that runs once.
  options = {'xla_backend_optimization_level': 0} if _on_cpu() else None
  make = jax.jit(parameters, compiler_options=options)
  return graphdef, jax.eval_shape(parameters, key), lambda: make(jax.random.key(seed))


def _on_cpu() -> bool:
  return jax.default_backend() == 'cpu'
