"""Decoding speed on one CPU device, everything in one run, side by side.

  python benchmarks/decoding.py [--drafts=3] [--slots=256] [--repeats=7]

A float32 Llama shape of 135 M parameters (30 layers, width 576, V 49,152), batch 1,
greedy, weights at random, and a shared MTP module (`attend: rows`). As its drafts would
never be right, they are replaced, once it has computed them, by the plain text's, up to
a fixed pattern of right ones. Each repeat measures everything once; medians are
printed, compile time apart.

bound       passes/s if the weights were all there is to read: read bandwidth, of two
            threads, over their bytes
T_base      a plain pass, T_verify a pass over drafts + 1 positions with its verdict,
T_draft     proposing and absorbing, each in a loop of its own
S           T_base · τ / (T_draft + T_verify); measured speed-up beside it
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import os
import statistics
import time
from typing import Any

if __name__ == '__main__':
  os.environ['JAX_PLATFORMS'] = 'cpu'

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mtpjax import mesh, model
from mtpjax.drafters import base, sequential
from mtpjax.models import cache, trunk
from mtpjax.sampling import engine, filters
from mtpjax.sampling.drafting import Likeliest

PROMPT, RIGHT = 16, (3, 1, 3, 0, 2, 3)  # tokens; right drafts, by round


class Told(Likeliest):
  """Draws as drafters do, and then says what it is told."""

  def __init__(self, choose: base.Choose, tokens: jax.Array):
    self.choose, self.tokens = choose, tokens

  def __call__(self, logits_BMV, k, above):
    own = self.choose(logits_BMV, k, above)
    told = jnp.where(own.drawn[0] < 0, own.drawn[0], self.tokens[:, k : k + 1])
    return base.Level(cache.whole(told), jnp.zeros_like(told))


@dataclasses.dataclass
class Forced(sequential.Config):
  """A module that drafts as ever, and then proposes what it is told."""

  drafts: bool = True  # False: it computes nothing, which leaves verification alone

  def build(self, trunk, rngs):
    return ForcedModule(self, trunk, rngs)


class ForcedModule(sequential.Sequential):
  config: Any

  def __init__(self, config, trunk, rngs):
    super().__init__(config, trunk, rngs)
    self.text = nnx.Param(jnp.zeros((1, 4096), jnp.int32))
    self.right = nnx.Param(jnp.zeros((1, 4096), jnp.int32))

  def weights(self):
    return {k: v for k, v in super().weights().items() if k not in ('text', 'right')}

  def lay_out(self, params):
    scripts = {name: params[name] for name in ('text', 'right')}
    rest = {k: v for k, v in params.items() if k not in scripts}
    return {**super().lay_out(rest), **scripts}

  def propose(self, trunk, caches, state, draft, choose):
    true = cache.take(cache.whole(self.text[...]), state.length + 1, draft)
    wrong = jnp.arange(draft)[None] >= cache.take(
      cache.whole(self.right[...]), state.length, 1
    )
    tokens = jnp.where(wrong, (true + 1) % 1000, true)

    if self.config.drafts:
      choose = Told(choose, tokens)
      return super().propose(trunk, caches, state, draft, choose)
    return base.chain([tokens[:, k] for k in range(draft)], [None] * draft), state

  def absorb(self, trunk, caches, state, block):
    if self.config.drafts:
      return super().absorb(trunk, caches, state, block)
    return dataclasses.replace(state, length=block.start + block.count)


def sizes() -> trunk.Config:
  config = trunk.Config(
    vocab=49_152, width=576, layers=30, heads=9, kv_heads=3, ffn=1536, tied=True
  )
  config.finalize()
  return config


def bandwidth(buffer: np.ndarray, pool: concurrent.futures.Executor) -> float:
  """Bytes a second that two threads read."""
  halves = np.array_split(buffer, 2)
  began = time.perf_counter()
  for _ in range(2):
    list(pool.map(lambda half: np.dot(half, half), halves))
  return 2 * buffer.nbytes / (time.perf_counter() - began)


class Run:
  """One compiled program, its times and the rounds it took."""

  def __init__(self, f, *args):
    began = time.perf_counter()
    self.args = args
    self.call = jax.jit(f).lower(*args).compile()
    self.compile_seconds = time.perf_counter() - began
    self.temporary = self.call.memory_analysis().temp_size_in_bytes
    self.out = jax.block_until_ready(self.call(*args))
    self.times: list[float] = []

  def measure(self) -> None:
    began = time.perf_counter()
    jax.block_until_ready(self.call(*self.args))
    self.times.append(time.perf_counter() - began)

  @property
  def median(self) -> float:
    return statistics.median(self.times)


def decoding(drafter: Any, K: int, slots: int, text=None, shape=None):
  """(graphdef, weights, state after the prefill, sampling, plan)."""
  shape = shape or sizes()
  graphdef, _, make = model.init(shape, {'drafter': drafter} if drafter else {}, 0)
  params = make()
  if text is not None:
    params['objectives']['drafter'].update(zip(('text', 'right'), text, strict=True))
  weights = engine.lay_out(graphdef, params)
  new = min(slots, 256) - PROMPT
  sampling = filters.arrays([filters.Settings(budget=new)], K)
  plan = engine.Plan(draft=K, slots=slots, chunk=PROMPT)
  prompt = np.random.default_rng(0).integers(0, shape.vocab, (1, slots))
  prompt = prompt.astype(np.int32)
  ids = jax.device_put(prompt, mesh.whole_BT)
  lengths = jax.device_put(np.array([PROMPT], np.int32), mesh.ids_B)

  prefill = functools.partial(engine.prefill, graphdef, plan)
  state = jax.jit(prefill)(weights, ids, lengths, sampling)
  return graphdef, weights, state, sampling, plan


def rounds(drafter: Any, K: int, slots: int, text=None, shape=None) -> Run:
  """The decode after its prefill: all rounds."""
  graphdef, weights, state, sampling, plan = decoding(drafter, K, slots, text, shape)

  def loop(weights, state, sampling):
    state = jax.lax.while_loop(
      lambda s: jnp.any(s.reason == engine.LIVE),
      lambda s: engine.one_round(graphdef, plan, weights, s, sampling),
      state,
    )
    return dataclasses.replace(state, caches=None, drafter=None)

  return Run(loop, weights, state, sampling)


def drafting(drafter: Any, K: int, slots: int, text, count: int) -> Run:
  """Proposing and absorbing alone, `count` times, from one round's features."""
  graphdef, weights, state, _, _ = decoding(drafter, K, slots, text)
  width = sizes().width

  def loop(weights, state):
    m = nnx.merge(graphdef, weights)
    part = m.objectives['drafter']
    hidden = jnp.ones((1, K + 1, width), out_sharding=mesh.act_BTD)
    out = trunk.TrunkOutput(hidden, {}, {})

    def body(carry):
      n, own = carry
      draft, own = part.propose(m.trunk, state.caches, own, K, Likeliest())
      tokens = jnp.pad(cache.whole(draft.tokens), ((0, 0), (0, 1)))
      start = jnp.full_like(state.length, PROMPT) + n % (slots - PROMPT - K)
      block = base.Committed(start, jnp.full_like(start, 2), tokens, out)
      return n + 1, part.absorb(m.trunk, state.caches, own, block)

    return jax.lax.while_loop(lambda c: c[0] < count, body, (0, state.drafter))

  return Run(loop, weights, state)


def script(tokens: np.ndarray, K: int) -> jax.Array:
  """What a forced module proposes: the text, and how many drafts of a round are it."""
  text = np.zeros((2, 1, 4096), np.int32)
  text[0, :, : tokens.shape[1]] = tokens
  text[1] = np.resize(np.minimum(RIGHT, K), 4096)
  return jnp.asarray(text)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--drafts', type=int, default=3)
  parser.add_argument('--slots', type=int, default=256)
  parser.add_argument('--repeats', type=int, default=7)
  parser.add_argument(
    '--lengths', default='1024,4096', help='longer buffers to compare'
  )
  args = parser.parse_args()
  K, slots = args.drafts, args.slots
  jax.set_mesh(mesh.make(mesh.Config(fsdp=1), jax.devices()[:1]))

  plain = rounds(None, 0, slots)
  tokens = np.asarray(plain.out.tokens)[:, : slots + K + 1]
  text = script(tokens, K)
  real = Forced(depth=max(K, 1), attend='rows')
  verify = rounds(dataclasses.replace(real, drafts=False), K, slots, text)
  drafted = rounds(real, K, slots, text)
  draft = drafting(real, K, slots, text, 64)
  np.testing.assert_array_equal(drafted.out.tokens[:, :slots], tokens[:, :slots])
  longer = {S: rounds(None, 0, S) for S in map(int, args.lengths.split(',')) if S}

  weights = [
    x for n, x in plain.args[0].items() if n != 'objectives' for x in jax.tree.leaves(x)
  ]
  size = sum(x.nbytes for x in weights)
  buffer, reads = np.ones(2**27, np.float32), []
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    bandwidth(buffer, pool)
    for _ in range(args.repeats):
      for run in (plain, verify, drafted, draft):
        reads.append(bandwidth(buffer, pool))
        run.measure()
  for run in longer.values():
    run.measure()

  passes = {run: int(run.out.rounds.sum()) for run in (plain, verify, drafted)}
  base_s, verify_s = plain.median / passes[plain], verify.median / passes[verify]
  draft_s = draft.median / 64
  state = drafted.out
  tau = 1 + int(np.sum(state.accepted)) / passes[drafted]
  bound = statistics.median(reads) / size
  speed = plain.median / drafted.median
  predicted = base_s * tau / (draft_s + verify_s)
  rows = [
    ('read bandwidth, two threads', f'{statistics.median(reads) / 1e9:.1f} GB/s'),
    ('weights', f'{size / 1e6:.0f} MB'),
    ('bound', f'{bound:.1f} passes/s'),
    ('plain', f'{1 / base_s:.1f} passes/s, {1 / base_s / bound:.2f} of the bound'),
    ('T_base', f'{base_s * 1e3:.1f} ms'),
    (
      f'T_verify, {K + 1} positions',
      f'{verify_s * 1e3:.1f} ms, {verify_s / base_s:.2f} of one',
    ),
    (f'T_draft, {K} drafts', f'{draft_s * 1e3:.1f} ms'),
    ('τ, as told', f'{tau:.3f}'),
    ('S', f'{predicted:.3f}'),
    ('measured speed-up', f'{speed:.3f}, {speed / predicted:.2f} of S'),
    ('temporary memory, plain', f'{plain.temporary / 2**20:.1f} MB'),
    ('temporary memory, drafting', f'{drafted.temporary / 2**20:.1f} MB'),
    *(
      (
        f'a plain pass over {S} slots',
        f'{run.median / int(run.out.rounds.sum()) * 1e3:.1f} ms',
      )
      for S, run in longer.items()
    ),
    (
      'compiling, plain and drafting',
      f'{plain.compile_seconds:.1f}, {drafted.compile_seconds:.1f} s',
    ),
  ]
  for name, value in rows:
    print(f'{name:32} {value}', flush=True)


if __name__ == '__main__':
  main()
