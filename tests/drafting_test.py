"""What a drafter proposes round by round is what its teacher-forced heads say."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mtpjax import losses, mesh, model
from mtpjax.drafters import base, parallel, residual, sequential
from mtpjax.models import block as blocks
from mtpjax.models import cache, trunk
from mtpjax.models.attention import Rows
from mtpjax.sampling import drafting

SIZES: dict[str, Any] = {'width': 16, 'layers': 2, 'heads': 4, 'kv_heads': 2, 'ffn': 32}
LENGTHS = np.array([1, 2, 5, 7])  # of the prompts, the shortest first
COMMITS = [
  [0, 1, 3, 2],
  [3, 0, 2, 3],
  [1, 1, 0, 3],
  [0, 3, 3, 0],
]  # accepted drafts, by round
K, V = 3, 50
DRAFTERS = {
  'depth': sequential.Config(depth=K),
  'depth, unshared': sequential.Config(depth=K, share=False, chain_norm='pre'),
  'depth, trunk hidden': sequential.Config(
    depth=K, hidden_source='trunk', zero_first_embedding=True
  ),
  'rows': sequential.Config(depth=K, attend='rows', zero_first_embedding=True),
  'rows, trunk hidden, pre': sequential.Config(
    depth=K, attend='rows', hidden_source='trunk', hidden_norm='pre'
  ),
  'parallel': parallel.Config(depth=K),
  'parallel, linear': parallel.Config(depth=K, form='linear'),
  'parallel, causal': parallel.Config(depth=K, form='causal'),
  'parallel, anticausal': parallel.Config(depth=K, form='anticausal'),
  'residual': residual.Config(depth=K, own_head=True),
  'residual, medusa': residual.Config(depth=K, form='medusa', layers=2),
  'residual, one head': residual.Config(depth=K, form='medusa', own_head=False),
}


def build(drafter: base.Config, windows=(0,), **changes):
  """(model, its weights a layer each) with all parameters away from their start."""
  sizes = trunk.Config(vocab=V, windows=windows, **{**SIZES, **changes})
  sizes.finalize()
  graphdef, _, make = model.init(sizes, {'drafter': drafter}, 3)
  noise = iter(jax.random.split(jax.random.key(1), 99))
  params = jax.tree.map(lambda p: p + 0.1 * _normal(next(noise), p), make())
  return graphdef, params


def _normal(key, p):
  spec = jax.typeof(p).sharding.spec
  return jax.random.normal(key, p.shape, out_sharding=spec)


def teacher_forced(graphdef, params, tokens):
  """Logits of every depth at every row, [K, B, T, V], from whole rows."""
  m = nnx.merge(graphdef, params)
  B, T = tokens.shape
  positions = jnp.broadcast_to(jnp.arange(T)[None], (B, T), out_sharding=mesh.ids_BT)
  batch = base.Batch(
    tokens, jnp.ones_like(tokens, bool), Rows(positions, jnp.ones_like(tokens))
  )
  out = m.trunk(batch.tokens, batch.rows, m.needs)
  found = m.objectives['drafter'].predict(m.trunk, out, batch, 0, None)
  return losses.head_logits(found.hidden, found.head or m.trunk.head())


class Seen(drafting.Likeliest):
  """Keeps the logits it was given."""

  def __init__(self):
    self.seen = []

  def __call__(self, logits_BMV, k, above):
    self.seen.append(logits_BMV)
    return super().__call__(logits_BMV, k, above)


def one_round(graphdef, params, text, caches, state, start, count, width, draft):
  """Reads `width` tokens from `start` on, `count` of them kept, and drafts after them.

  Returns: trunk caches, drafter state, drafts [B, K] and their logits [B, K, V].
  """
  m = nnx.merge(graphdef, params)
  part, layers = m.objectives['drafter'], blocks.unstack(blocks.arrays(m.trunk.blocks))
  x = m.trunk.embed(jax.reshard(cache.take(text, start, width), mesh.ids_BT))
  out, caches = trunk.extend(layers, x, start, caches, m.trunk.config, m.needs)
  block = base.Committed(start, count, cache.take(text, start + 1, width), out)
  state = part.absorb(m.trunk, caches, state, block)
  choose = Seen()
  proposed, state = part.propose(m.trunk, caches, state, draft, choose)
  return caches, state, proposed.tokens, jnp.concatenate(choose.seen, 1)


def rounds(graphdef, params, text, draft):
  """(last committed position, drafts, logits) of every round along the text [B, T]."""
  part = nnx.merge(graphdef, params).objectives['drafter']
  B, T = text.shape
  caches = [cache.empty(part.sizes, B, T + draft + 1) for _ in range(part.sizes.layers)]
  state = part.init_state(base.Room(B, T + 9, 8, draft))
  step = jax.jit(
    functools.partial(one_round, graphdef, draft=draft), static_argnames='width'
  )
  start, found = np.zeros(B, np.int32), []
  for count, width in [(LENGTHS, 8), *((np.array(a) + 1, K + 1) for a in COMMITS)]:
    put = functools.partial(jax.device_put, device=mesh.ids_B)
    count = count.astype(np.int32)
    caches, state, drafts, logits = step(
      params, text, caches, state, put(start), put(count), width=width
    )
    start = start + count
    found.append((start, np.asarray(drafts), np.asarray(logits)))
  return found


@pytest.fixture(scope='module')
def text():
  return np.random.default_rng(0).integers(0, V, (4, 40)).astype(np.int32)


def on_mesh(**sizes):
  count = int(np.prod(list(sizes.values())))
  return jax.set_mesh(mesh.make(mesh.Config(**sizes), jax.devices()[:count]))


@pytest.mark.parametrize(
  'name, windows, axes',
  [
    ('depth', (0,), {}),
    ('depth, unshared', (4,), {}),
    ('rows', (4,), {}),
    ('parallel', (0, 4), {}),
    ('parallel, linear', (4,), {}),
    ('parallel, causal', (4, 0), {}),
    ('parallel, anticausal', (0,), {}),
    ('residual', (0,), {}),
    ('residual, medusa', (0,), {}),
    *(
      pytest.param(*case, marks=pytest.mark.slow)
      for case in [
        ('depth, trunk hidden', (0,), {}),
        ('rows, trunk hidden, pre', (0,), {}),
        ('depth', (4,), {'fsdp': 2, 'tensor': 2}),
        ('rows', (0,), {'fsdp': 2, 'tensor': 4}),
        ('parallel', (0,), {'fsdp': 4, 'tensor': 2}),
        ('parallel, causal', (0,), {'fsdp': 2, 'tensor': 2}),
        ('residual, one head', (0,), {}),
        ('residual', (0,), {'fsdp': 4, 'tensor': 2}),
        ('residual, medusa', (0,), {'fsdp': 2, 'tensor': 4}),
      ]
    ),
  ],
)
def test_drafts_equal_teacher_forced_logits_after_every_round(
  name, windows, axes, text
):
  with on_mesh(**{'fsdp': 1, **axes}):
    # Anticausal heads each read a layer of their own.
    deep = {'layers': K + 1} if name == 'parallel, anticausal' else {}
    graphdef, params = build(dataclasses.replace(DRAFTERS[name]), windows, **deep)
    ids = jax.device_put(text, mesh.ids_BT)
    forced = jax.jit(functools.partial(teacher_forced, graphdef))
    for start, drafts, logits in rounds(graphdef, params, ids, K):
      # The true text up to the last committed token, then what was drafted.
      follow = text.copy()
      for row, n in enumerate(start):
        follow[row, n + 1 : n + 1 + K] = drafts[row]
      wanted = np.asarray(forced(params, jax.device_put(follow, mesh.ids_BT)))
      for row, n in enumerate(start):
        np.testing.assert_allclose(
          logits[row], wanted[:, row, n - 1], atol=3e-5, err_msg=f'{row} at {n}'
        )
