"""Remat policies: the same gradients, less memory; and what a step does with the state
that it is given."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax import config as configs
from mtpjax import mesh, model, step
from mtpjax.drafters import sequential
from mtpjax.models import trunk

POLICIES = ('none', 'dots', 'offload', 'full')
B, T = 8, 32


def settings(remat: Any):
  config = configs.Config(drafter=sequential.Config(depth=2))
  config.trunk = trunk.Config(
    vocab=64, width=32, layers=12, heads=2, ffn=96, remat=remat
  )
  config.data.length, config.data.batch = T, B
  return configs.finalize(config)


def arrays():
  ids = np.random.default_rng(0).integers(0, 64, (B, T)).astype(np.int32)
  at = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
  segments = np.where(at < 20, 1, 2).astype(np.int32)
  return step.put(
    {
      'tokens': ids,
      'positions': np.where(at < 20, at, at - 20),
      'segments': segments,
      'mask': np.ones((B, T), bool),
    }
  )


@pytest.fixture(scope='module')
def ran():
  """{policy: (loss, gradients, bytes of temporaries)}."""
  found = {}
  with jax.set_mesh(mesh.make(mesh.Config(fsdp=1), jax.devices()[:1])):
    for remat in POLICIES:
      config = settings(remat)
      graphdef, _, make = model.init(config.trunk, config.parts(), 0)

      def run(params, arrays, graphdef=graphdef, config=config):
        batch = step.to_batch(arrays, False)
        value, _, grads = step.gradients(
          graphdef, params, batch, config, jnp.zeros((), jnp.int32)
        )
        return value, grads

      params, given = make(), arrays()
      compiled = jax.jit(run).lower(params, given).compile()
      memory: Any = compiled.memory_analysis()
      out = jax.device_get(compiled(params, given))
      found[remat] = *out, memory.temp_size_in_bytes
  return found


@pytest.mark.slow
@pytest.mark.parametrize('remat', POLICIES[1:])
def test_a_policy_changes_no_gradient(ran, remat):
  loss, grads, _ = ran[remat]
  assert loss == pytest.approx(ran['none'][0], rel=1e-6)
  close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=1e-6)
  jax.tree.map(close, grads, ran['none'][1])


@pytest.mark.slow
def test_what_is_not_kept_takes_no_memory(ran):
  memory = {remat: own[2] for remat, own in ran.items()}
  assert memory['none'] > 1.3 * memory['dots'] > 1.3 * 1.3 * memory['full']
  # A CPU's memory is the host's: there is nowhere else to go.
  assert memory['offload'] == pytest.approx(memory['dots'], rel=0.02)


def test_a_step_writes_the_new_state_into_the_old_one():
  with jax.set_mesh(mesh.make(mesh.Config(fsdp=1), jax.devices()[:1])):
    config = configs.Config()
    config.trunk = trunk.Config(vocab=64, width=16, layers=1, heads=2, ffn=32)
    config.data.length, config.data.batch = T, B
    configs.finalize(config)
    graphdef, _, make = model.init(config.trunk, config.parts(), 0)
    state = jax.jit(lambda p: step.init_state(p, config))(make())
    compiled = step.compile_train(graphdef, config, state)
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    memory: Any = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == held
    new, _ = compiled(state, arrays())
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    assert not any(x.is_deleted() for x in jax.tree.leaves(new))
