"""The training state and the one jitted train step."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping
from typing import Any, NotRequired, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree, Shaped

from mtpjax import losses, mesh, model, optimizers, tuning
from mtpjax.drafters.base import Batch
from mtpjax.models import layers
from mtpjax.models.attention import Rows


class TrainState(TypedDict):
  step: Int[Array, '']  # batches seen
  params: PyTree  # {'trunk': …, 'objectives': {name: …}}
  opt: PyTree  # optax's, over what trains
  ema: NotRequired[PyTree]  # of what trains, see `averaged`; with optimizer.ema
  spike: NotRequired[PyTree]  # statistics; with optimizer.skip


def init_state(params: dict, config: Any) -> TrainState:
  selection = tuning.select(params, config.freeze_trunk, config.tune)
  trainable, _ = tuning.split(params, selection)
  optimizer = config.optimizer
  state: TrainState = {
    'step': jnp.zeros((), jnp.int32),
    'params': params,
    'opt': optimizer.build().init(trainable),
  }
  if optimizer.ema is not None:
    # A copy: a buffer that is in the state twice cannot be donated.
    state['ema'] = jax.tree.map(jnp.copy, optimizers.wide(trainable))
  if optimizer.skip is not None:
    state['spike'] = optimizer.skip.init()
  return state


def averaged(
  ema: PyTree, params: PyTree, decay: float, count: Int[Array, '']
) -> PyTree:
  """The exponentially weighted mean of the parameters after each update, without bias:
  ē_n = Σ_i d^(n-i) p_i / Σ_i d^(n-i), so the first is p_1 and the start has no part.

  Args:
    ema: ē_(n-1), float32 or wider.
    count: n, updates applied, this one included.
  """
  part = (1 - decay) / -jnp.expm1(count * math.log(decay))
  # In this form what does not move stays as it is, bit for bit.
  return jax.tree.map(
    lambda e, p: e + part.astype(e.dtype) * (p.astype(e.dtype) - e), ema, params
  )


def evaluated(state: Mapping[str, Any], like: dict | None = None) -> dict:
  """The parameters to evaluate and sample with: the average if there is one.

  Args:
    like: the parameters' dtypes, if `state` does not hold all of them.
  """
  if 'ema' not in state:
    return state['params']
  own, _ = tuning.split(like or state['params'], tuning.flat(state['ema']))
  ema = jax.tree.map(lambda e, p: e.astype(p.dtype), state['ema'], own)
  return tuning.merge(state['params'], ema)


def to_evaluate(params: dict, config: Any) -> dict:
  """What of a saved state `evaluated` needs, given abstract parameters."""
  if config.optimizer.ema is None:
    return {'params': params}
  selection = tuning.select(params, config.freeze_trunk, config.tune)
  own, rest = tuning.split(params, selection)
  return {'params': rest, 'ema': jax.eval_shape(optimizers.wide, own)}


def global_norm(grads: PyTree) -> Float[Array, '']:
  """√Σ g² in float32 or wider, whatever the leaves' dtype."""
  wide = jax.tree.leaves(optimizers.wide(grads))
  return jnp.sqrt(sum(jnp.sum(g * g) for g in wide))


def to_batch(arrays: dict, freeze_trunk: bool, packed: bool = True) -> Batch:
  """The loader's arrays tokens, positions, segments, mask, all [B, T]."""
  rows = Rows(arrays['positions'], arrays['segments'], packed=packed)
  return Batch(arrays['tokens'], arrays['mask'], rows, whole_path=freeze_trunk)


def rows_held(
  batch: int, devices: Collection[Any] | None = None
) -> Int[np.ndarray, ' R']:
  """Which rows of a global batch these devices (default: this process's) hold any part
  of, ascending. Where 'tensor' or 'context' spans processes, several hold the same."""
  sharding = jax.NamedSharding(jax.sharding.get_mesh(), mesh.ids_B)
  devices = sharding.addressable_devices if devices is None else devices
  places = sharding.devices_indices_map((batch,))
  held = [np.arange(batch)[places[device]] for device in devices]
  return np.unique(np.concatenate(held))


def part_held(
  x: Shaped[np.ndarray, 'R T'], held: Int[np.ndarray, ' R'], place: Any
) -> Shaped[np.ndarray, 'r t']:
  """The rows and slots at `place` of the global batch; x is its rows `held`."""
  rows, slots = place
  first = np.searchsorted(held, rows.start or 0)
  count = len(held) if rows.stop is None else rows.stop - (rows.start or 0)
  return x[first : first + count, slots]


def put(arrays: dict, batch: int | None = None) -> dict:
  """The loader's arrays onto the mesh.

  Args:
    batch: rows of the global batch, of which `arrays` have those of `rows_held`; None
      if they have them all.
  """
  sharding = jax.sharding.NamedSharding(jax.sharding.get_mesh(), mesh.ids_BT)
  if batch is None:
    return {name: jax.device_put(x, sharding) for name, x in arrays.items()}
  held = rows_held(batch)
  return {
    name: jax.make_array_from_callback(
      (batch, *x.shape[1:]), sharding, functools.partial(part_held, x, held)
    )
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
  """(total loss, sums by objective, gradients of what trains; zero for layers of a
  stack that do not).

  The counts that the depths' means divide by are those of the whole batch, taken from
  the masks before any forward pass, so accumulation changes nothing but rounding.
  """
  selection = tuning.select(params, config.freeze_trunk, config.tune)
  trainable, frozen = tuning.split(params, selection)
  key = jax.random.fold_in(jax.random.key(config.seed), step)
  whole = nnx.merge(graphdef, params)
  batch, targets = model.prepare(whole, batch, key)
  counts = {name: t.counts for name, t in targets.items()}
  dtype = layers.wide(config.trunk.param_dtype)
  fraction = (step / config.steps).astype(dtype)
  weights = model.depth_weights(whole, fraction, not config.freeze_trunk, dtype)

  def total(trainable, batch, targets, key):
    merged = nnx.merge(graphdef, tuning.merge(frozen, trainable))
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
    return value, sums, tuning.only(selection, grads)
  parts = (microbatches(batch, N, 0), microbatches(targets, N, 1))

  def body(carry, xs):
    index, batch, targets = xs
    out = one(trainable, batch, targets, jax.random.fold_in(key, index))
    return jax.tree.map(jnp.add, carry, out), None

  first = jax.tree.map(lambda x: x[0], parts)
  out = one(trainable, *first, jax.random.fold_in(key, 0))
  rest = jax.tree.map(lambda x: x[1:], parts)
  ((value, sums), grads), _ = jax.lax.scan(body, out, (jnp.arange(1, N), *rest))
  return value, sums, tuning.only(selection, grads)


def train_step(
  graphdef: Any, config: Any, state: TrainState, arrays: dict
) -> tuple[TrainState, dict]:
  """One update. Returns the new state and metrics as (sum, count) and scalars."""
  step, optimizer = state['step'], config.optimizer
  batch = to_batch(arrays, config.freeze_trunk, config.data.pack)
  value, sums, grads = gradients(graphdef, state['params'], batch, config, step)
  norm = global_norm(grads)
  grads = optimizers.wide(grads)
  if optimizer.clip is not None:
    scale = jnp.minimum(1.0, optimizer.clip / jnp.maximum(norm, 1e-12))
    grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
  rate = optimizer.rate(step, config.steps)
  selection = tuning.select(state['params'], config.freeze_trunk, config.tune)
  before, frozen = tuning.split(state['params'], selection)
  wide = optimizers.wide(before)
  updates, opt = optimizer.build().update(grads, state['opt'], wide)
  trainable = jax.tree.map(
    lambda p, u, old: (p - rate.astype(u.dtype) * u).astype(old.dtype),
    wide,
    updates,
    before,
  )
  trainable = tuning.only(selection, trainable, before)
  new: TrainState = {'step': step + 1, 'params': state['params'], 'opt': opt}
  metrics = {
    'loss': value,
    'sums': sums,
    'lambda': model.lambdas(nnx.merge(graphdef, state['params']), step / config.steps),
    'rate': rate,
    'grad_norm': norm,
    'tokens': jnp.count_nonzero(arrays['segments']),  # over all processes
  }
  if 'stop' in arrays:  # see `processes.Stop`
    metrics['stop'] = jnp.max(arrays['stop'])
  skip, applied = jnp.zeros((), bool), step + 1
  if optimizer.skip is not None:
    assert 'spike' in state
    skip, spike = optimizer.skip(state['spike'], loss=value, grad_norm=norm)
    trainable = optimizers.chosen(skip, before, trainable)
    new['opt'] = optimizers.chosen(skip, state['opt'], opt)
    new['spike'], applied = spike, step + 1 - spike['skipped']
    metrics['skipped'] = skip.astype(jnp.int32)
  if optimizer.ema is not None:
    assert 'ema' in state
    ema = averaged(state['ema'], trainable, optimizer.ema, applied)
    new['ema'] = optimizers.chosen(skip, state['ema'], ema)
  new['params'] = tuning.merge(frozen, trainable)
  return new, metrics


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
  batch = to_batch(arrays, config.freeze_trunk, config.data.pack)
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


def compile_train(
  graphdef: Any, config: Any, state: TrainState, more: Mapping[str, Any] | None = None
) -> jax.stages.Compiled:
  """(state, arrays) -> (state, metrics), compiled; the state is donated.

  Args:
    state: real or abstract, with shardings.
    more: further arrays that the step is given.
  """
  step = functools.partial(train_step, graphdef, config)
  arrays = {**abstract_arrays(config), **(more or {})}
  return jax.jit(step, donate_argnums=0).lower(state, arrays).compile()


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
