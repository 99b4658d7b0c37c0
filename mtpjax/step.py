"""The training state and the one jitted train step."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from mtpjax import losses, mesh, model, schedules
from mtpjax.drafters.base import Batch
from mtpjax.fields import ConfigError
from mtpjax.models import layers
from mtpjax.models.attention import Rows


@dataclasses.dataclass
class OptimizerConfig:
  """AdamW (Loshchilov & Hutter 2019). Matrices decay; tables, gains, biases do not."""

  rate: schedules.WarmupCosine = dataclasses.field(
    default_factory=schedules.WarmupCosine
  )
  b1: float = 0.9
  b2: float = 0.95
  epsilon: float = 1e-8
  weight_decay: float = 0.1
  clip: float | None = 1.0  # global norm of the gradient; None for no clipping
  accumulate: int = 1  # microbatches a step

  def finalize(self) -> None:
    self.rate.finalize('optimizer.rate')
    for name in ('b1', 'b2'):
      if not 0 <= getattr(self, name) < 1:
        raise ConfigError(
          f'optimizer.{name}', getattr(self, name), 'is not in [0, 1)', 'use e.g. 0.9'
        )
    for name in ('epsilon', 'clip'):
      value = getattr(self, name)
      if value is not None and not value > 0:
        raise ConfigError(
          f'optimizer.{name}', value, 'is not positive', 'use e.g. 1e-8, 1.0'
        )
    if not self.weight_decay >= 0:
      raise ConfigError(
        'optimizer.weight_decay', self.weight_decay, 'is negative', 'use 0 for none'
      )
    if self.accumulate < 1:
      raise ConfigError(
        'optimizer.accumulate', self.accumulate, 'is not positive', 'use at least 1'
      )


class TrainState(TypedDict):
  step: Int[Array, '']  # updates done
  params: PyTree  # {'trunk': …, 'objectives': {name: …}}
  opt: PyTree  # optax's, over the trainable part only


def transformation(config: OptimizerConfig) -> optax.GradientTransformation:
  """AdamW up to the learning rate, which the step applies itself."""

  def decays(params):
    return jax.tree_util.tree_map_with_path(
      lambda path, _: path[-1].key.startswith('w_'), params
    )

  return optax.chain(
    optax.scale_by_adam(config.b1, config.b2, config.epsilon),
    optax.add_decayed_weights(config.weight_decay, mask=decays),
  )


def evaluated(state: TrainState) -> dict:
  """The parameters to evaluate and sample with."""
  return state['params']


def split_frozen(params: dict, freeze_trunk: bool) -> tuple[dict, dict]:
  """(trainable, frozen) parts of the parameters, by their top-level names."""
  frozen = {'trunk': params['trunk']} if freeze_trunk else {}
  return {k: v for k, v in params.items() if k not in frozen}, frozen


def init_state(params: dict, config: OptimizerConfig, freeze_trunk: bool) -> TrainState:
  trainable, _ = split_frozen(params, freeze_trunk)
  return {
    'step': jnp.zeros((), jnp.int32),
    'params': params,
    'opt': transformation(config).init(trainable),
  }


def global_norm(grads: PyTree) -> Float[Array, '']:
  """√Σ g² in float32 or wider, whatever the leaves' dtype."""
  wide = [g.astype(layers.wide(g.dtype)) for g in jax.tree.leaves(grads)]
  return jnp.sqrt(sum(jnp.sum(g * g) for g in wide))


def to_batch(arrays: dict, freeze_trunk: bool) -> Batch:
  """The loader's arrays tokens, positions, segments, mask, all [B, T]."""
  rows = Rows(arrays['positions'], arrays['segments'])
  return Batch(arrays['tokens'], arrays['mask'], rows, whole_path=freeze_trunk)


def put(arrays: dict) -> dict:
  """This process's rows onto the mesh, as part of the global batch."""
  sharding = jax.sharding.NamedSharding(jax.sharding.get_mesh(), mesh.ids_BT)
  return {
    name: jax.make_array_from_process_local_data(sharding, x)
    for name, x in arrays.items()
  }


def microbatches(tree: PyTree, count: int, axis: int) -> PyTree:
  """[..., B, ...] -> [count, ..., B/count, ...]: row n goes to microbatch n % count, so
  that every device keeps its own rows."""

  def split(x):
    spec = jax.typeof(x).sharding.spec
    shape = (*x.shape[:axis], x.shape[axis] // count, count, *x.shape[axis + 1 :])
    x = x.reshape(shape, out_sharding=jax.P(*spec[: axis + 1], None, *spec[axis + 1 :]))
    return jnp.moveaxis(x, axis + 1, 0)

  return jax.tree.map(split, tree)


def gradients(
  graphdef: Any,
  params: dict,
  batch: Batch,
  config: Any,
  step: Int[Array, ''],
) -> tuple[Float[Array, ''], dict[str, losses.Sums], PyTree]:
  """(total loss, sums by objective, gradients of the trainable part).

  The counts that the depths' means divide by are those of the whole batch, taken from
  the masks before any forward pass, so accumulation changes nothing but rounding.
  """
  trainable, frozen = split_frozen(params, config.freeze_trunk)
  key = jax.random.fold_in(jax.random.key(config.seed), step)
  whole = nnx.merge(graphdef, params)
  batch, targets = model.prepare(whole, batch, key)
  counts = {name: t.counts for name, t in targets.items()}
  dtype = layers.wide(config.trunk.param_dtype)
  fraction = (step / config.steps).astype(dtype)
  weights = model.depth_weights(whole, fraction, not config.freeze_trunk, dtype)

  def total(trainable, batch, targets, key):
    merged = nnx.merge(graphdef, {**frozen, **trainable})
    return model.loss(
      merged,
      batch,
      targets,
      counts,
      weights,
      config.loss,
      step,
      key,
      freeze_trunk=config.freeze_trunk,
    )

  one = jax.value_and_grad(total, has_aux=True)
  N = config.optimizer.accumulate
  if N == 1:
    (value, sums), grads = one(trainable, batch, targets, key)
    return value, sums, grads
  parts = (microbatches(batch, N, 0), microbatches(targets, N, 1))

  def body(carry, xs):
    index, batch, targets = xs
    out = one(trainable, batch, targets, jax.random.fold_in(key, index))
    return jax.tree.map(jnp.add, carry, out), None

  first = jax.tree.map(lambda x: x[0], parts)
  out = one(trainable, *first, jax.random.fold_in(key, 0))
  rest = jax.tree.map(lambda x: x[1:], parts)
  ((value, sums), grads), _ = jax.lax.scan(body, out, (jnp.arange(1, N), *rest))
  return value, sums, grads


def train_step(
  graphdef: Any, config: Any, state: TrainState, arrays: dict
) -> tuple[TrainState, dict]:
  """One update. Returns the new state and metrics as (sum, count) and scalars."""
  step, optimizer = state['step'], config.optimizer
  value, sums, grads = gradients(
    graphdef, state['params'], to_batch(arrays, config.freeze_trunk), config, step
  )
  norm = global_norm(grads)
  if optimizer.clip is not None:
    scale = jnp.minimum(1.0, optimizer.clip / jnp.maximum(norm, 1e-12))
    grads = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
  rate = optimizer.rate(step, config.steps)
  trainable, frozen = split_frozen(state['params'], config.freeze_trunk)
  updates, opt = transformation(optimizer).update(grads, state['opt'], trainable)
  trainable = jax.tree.map(
    lambda p, u: (p - rate.astype(u.dtype) * u).astype(p.dtype), trainable, updates
  )
  metrics = {
    'loss': value,
    'sums': sums,
    'lambda': model.lambdas(nnx.merge(graphdef, state['params']), step / config.steps),
    'rate': rate,
    'grad_norm': norm,
  }
  params = {**frozen, **trainable}
  return {'step': step + 1, 'params': params, 'opt': opt}, metrics


def eval_step(
  graphdef: Any,
  config: Any,
  bytes_V: Int[Array, ' V'],
  params: dict,
  arrays: dict,
) -> tuple[dict[str, losses.Sums], dict[str, Int[Array, ' K']]]:
  """(sums, bytes of the valid targets), by objective, over one batch of held-out rows:
  the loss of training, without gradient or randomness.

  Args:
    bytes_V: UTF-8 bytes of each token.
  """
  merged = nnx.merge(graphdef, params)
  batch = to_batch(arrays, config.freeze_trunk)
  batch, targets = model.prepare(merged, batch, jax.random.key(config.seed))
  counts = {name: t.counts for name, t in targets.items()}
  end = jnp.ones((), layers.wide(config.trunk.param_dtype))
  weights = model.depth_weights(merged, end, True, end.dtype)
  step = jnp.asarray(config.steps, jnp.int32)
  _, sums = model.loss(
    merged, batch, targets, counts, weights, config.loss, step, key=None
  )
  lengths = {}
  for name, target in targets.items():
    if target.are_tokens and getattr(target.ids, 'shape', None) == target.valid.shape:
      spec = jax.typeof(target.ids).sharding.spec
      each = bytes_V.at[target.ids].get(out_sharding=spec)
      lengths[name] = jnp.sum(jnp.where(target.valid, each, 0), (1, 2))
  return sums, lengths


def compile_train(graphdef: Any, config: Any, state: TrainState) -> jax.stages.Compiled:
  """(state, arrays) -> (state, metrics), compiled; the state is donated.

  Args:
    state: real or abstract, with shardings.
  """
  step = functools.partial(train_step, graphdef, config)
  return jax.jit(step, donate_argnums=0).lower(state, abstract_arrays(config)).compile()


def compile_eval(
  graphdef: Any, config: Any, params: dict, bytes_per_token: Int[np.ndarray, ' V']
) -> jax.stages.Compiled:
  """(params, arrays) -> (sums, bytes), compiled."""
  step = functools.partial(eval_step, graphdef, config, jnp.asarray(bytes_per_token))
  return jax.jit(step).lower(params, abstract_arrays(config)).compile()


def abstract_arrays(config: Any) -> dict:
  """Shapes and shardings of the loader's global batch."""
  shape = (config.data.batch, config.data.length)
  sharding = jax.NamedSharding(jax.sharding.get_mesh(), mesh.ids_BT)
  kinds = {'tokens': 'int32', 'positions': 'int32', 'segments': 'int32', 'mask': 'bool'}
  return {
    name: jax.ShapeDtypeStruct(shape, kind, sharding=sharding)
    for name, kind in kinds.items()
  }
