"""Models of objectives as unlike as can be, a few steps of training, and what the first
of them computed.

The probes are written against the contract alone; the others are ours.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from probes import block_diffusion, kv_sharing, oracle

from mtpjax import config as configs
from mtpjax import losses, mesh, model, optimizers, schedules, step
from mtpjax.data import batches
from mtpjax.drafters import parallel, residual, sequential
from mtpjax.models import trunk as trunks
from mtpjax.objectives import bag, registers, token_order

V, B, T = 29, 4, 12
LENGTHS = ((7, 5), (12,), (3, 1, 6), (4, 7))
WEIGHT = schedules.Constant(0.5)
PROBES = {
  'sequential': sequential.Config(depth=2, attend='rows', weight=WEIGHT),
  'block_diffusion': block_diffusion.Config(depth=3, rho=0.7, weight=WEIGHT),
  'kv_sharing': kv_sharing.Config(depth=2, rho=0.5, weight=WEIGHT),
  'token_order': token_order.Config(window=4, weight=WEIGHT),
  'bag': bag.Config(window=4, weight=WEIGHT),
  'parallel': parallel.Config(depth=2, form='causal', weight=WEIGHT),
  'residual': residual.Config(depth=2, form='medusa', rho=0.5, weight=WEIGHT),
  'registers': registers.Config(weight=WEIGHT),
}
OWN = [name for name in PROBES if name != 'registers']  # with parameters of their own


def settings(names=tuple(PROBES), freeze_trunk=False, accumulate=1):
  config = configs.Config(
    steps=50,
    data=batches.Config(length=T, batch=B, shards=B),
    trunk=trunks.Config(
      vocab=V,
      vocab_multiple=16,
      width=16,
      layers=2,
      heads=2,
      ffn=32,
      embed_std=0.5,
      remat='none',
    ),
    objectives=tuple(copy.deepcopy(PROBES[name]) for name in names),
    freeze_trunk=freeze_trunk,
    loss=losses.Config(chunk_tokens=8),
    optimizer=optimizers.AdamW(
      rate=schedules.WarmupCosine(peak=1e-2, warmup=0),
      weight_decay=0.0,
      clip=None,
      accumulate=accumulate,
    ),
  )
  return configs.finalize(config)


def arrays():
  """Packed rows of a sequence in which each token follows from the one before."""
  rng = np.random.default_rng(3)
  shape = (B, T)
  found = {name: np.zeros(shape, np.int32) for name in ('tokens', 'positions')}
  found['segments'] = np.zeros(shape, np.int32)
  for b, row in enumerate(LENGTHS):
    start = 0
    for n, length in enumerate(row):
      token = rng.integers(V)
      for i in range(length):
        found['tokens'][b, start + i] = token
        found['positions'][b, start + i] = i
        found['segments'][b, start + i] = n + 1
        token = (2 * token + 1) % V
      start += length
  # Some tokens are read, never predicted.
  found['mask'] = (found['segments'] != 0) & (rng.random(shape) < 0.85)
  return found


@dataclasses.dataclass
class Run:
  """A few steps of training.

  `states` and `metrics` are those after each step, `seen` what the model computed in
  the first, if watched: each objective's predictions, head and random choices.
  """

  config: Any
  states: list
  metrics: list
  seen: Any
  again: Callable  # (tokens) -> what the first step sees of other tokens

  @property
  def gradients(self):
    """Of the first step: Adam's first moment."""
    moment = self.states[1]['opt'][0].mu
    return jax.tree.map(lambda m: m / (1 - self.config.optimizer.b1), moment)

  def mean(self, name, at):
    """Nats a target of each depth at that step."""
    sums = self.metrics[at]['sums'][name]
    return sums.nll / sums.count

  def overall(self, name, at):
    """The same over all depths: few anchors are far from their document's end."""
    sums = self.metrics[at]['sums'][name]
    return sums.nll.sum() / sums.count.sum()


def look(graphdef, config, params, arrays, at):
  """What the first step sees, outside of its gradient."""
  whole = nnx.merge(graphdef, params)
  key = jax.random.fold_in(jax.random.key(config.seed), at)
  batch = step.to_batch(arrays, config.freeze_trunk)
  batch, targets = model.prepare(whole, batch, key)
  out = whole.trunk(batch.tokens, batch.rows, whole.needs)
  seen = {'batch': batch, 'counts': {k: t.counts for k, t in targets.items()}}
  seen['next'] = {'hidden': whole.trunk.final_norm(out.hidden)[None]}
  for _, name, part in whole.parts():
    own = dataclasses.replace(batch, drawn=batch.drawn[name])
    predicted = part.predict(whole.trunk, out, own, at, None)
    seen[name] = {'hidden': predicted.hidden, 'drawn': own.drawn}
    if predicted.head is not None:
      own = isinstance(predicted.head, tuple)
      heads = predicted.head if own else (predicted.head,) * len(predicted.hidden)
      seen[name]['w_KVD'] = jnp.stack([head.w_VD for head in heads])
  return seen


def train(steps=6, watch=True, **changes):
  config = settings(**changes)
  graphdef, abstract, _ = model.init(config.trunk, config.parts(), config.seed)
  params = oracle.filled(abstract, plain=True)
  state = step.init_state(params, config)
  batch = step.put(arrays())

  where = jax.tree.map(lambda x: x.sharding, state)

  @jax.jit
  def both(state, batch):
    seen = None
    if watch:
      seen = look(graphdef, config, state['params'], batch, state['step'])
    return *step.train_step(graphdef, config, state, batch), seen

  states, metrics, first = [jax.device_get(state)], [], None
  for _ in range(steps):
    state, metric, seen = both(state, batch)
    states.append(jax.device_get(state))
    metrics.append(jax.device_get(metric))
    first = jax.device_get(seen) if first is None else first

  def again(tokens):
    with jax.set_mesh(batch['tokens'].sharding.mesh):
      other = step.put({**arrays(), 'tokens': tokens})
      return jax.device_get(both(jax.device_put(states[0], where), other)[2])

  return Run(config, states, metrics, first, again)


def on_one_device(**changes):
  with jax.set_mesh(mesh.make(mesh.Config(), jax.devices()[:1])):
    return train(**changes)
