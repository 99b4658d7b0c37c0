"""Sequential MTP modules: DeepSeek-V3's, and the shared, multi-step form of FastMTP,
Qwen3-Next, MiMo and Nemotron.

Depth k combines the hidden state of depth k-1 with the embedding of t[i+k]:
x_i = W [N_e(e(t_{i+k})) ; N_h(h^{k-1}_i)], one block, N_out, the trunk's embedding and
head (DeepSeek-V3, arXiv 2412.19437, equations 21 to 23).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from mtpjax import losses, mesh
from mtpjax.drafters import base
from mtpjax.fields import ConfigError
from mtpjax.models import attention, cache, layers
from mtpjax.models import block as blocks
from mtpjax.models import trunk as trunks
from mtpjax.models.attention import Leaf

MAX_REUSED = 16  # drafts of a reused module, which may go on beyond what it was trained


@dataclasses.dataclass
class Config(base.Config):
  share: bool = True  # one module repeated, or one a depth
  hidden_norm: Literal['pre', 'post'] = 'post'  # trunk hidden before / after its norm
  chain_norm: Literal['pre', 'post'] = 'post'  # the chained hidden before / after N_out
  hidden_source: Literal['chained', 'trunk'] = 'chained'  # h^{k-1}, or h^0 every time
  concat: Literal['embed_hidden', 'hidden_embed'] = 'embed_hidden'
  # 'depth': each depth has its own keys and values over the rows. 'rows': step k is a
  # row at position i+k-1 that sees step 1's rows up to i and its own earlier steps, as
  # vLLM, SGLang and EAGLE serve a module that is reused.
  attend: Literal['depth', 'rows'] = 'depth'
  detach: tuple[str, ...] = ()  # of 'hidden', 'embedding', 'head': no gradient into it
  zero_first_embedding: bool = False  # of a row at position 0, as serving engines do
  # 'trunk': the kind of the trunk's last layer, its window included. 'dense': a plain
  # dense block that attends to everything.
  block: Literal['trunk', 'dense'] = 'trunk'

  def finalize(self, trunk: trunks.Config, field: str) -> None:
    super().finalize(trunk, field)
    base.check_detach(self.detach, ('hidden', 'embedding', 'head'), field)
    if self.attend == 'rows' and not self.share and self.depth > 1:
      raise ConfigError(
        f'{field}.attend',
        self.attend,
        f'with {field}.share=False has no engine and no meaning: the rows of one cache '
        'would come from different modules',
        f"use {field}.share=True or {field}.attend='depth'",
      )

  def kernels(self):
    return 'trunk' if self.attend == 'rows' else 'all'

  def build(self, trunk: trunks.Config, rngs: nnx.Rngs) -> Sequential:
    return Sequential(self, trunk, rngs)

  def conventions(self) -> dict[str, Any]:
    shared = ['embedding', 'head', *(['module'] if self.share else [])]
    return {
      **super().conventions(),
      'modules': 1 if self.share else self.depth,
      'shared': shared,
      'teacher_forcing_inputs': 'depth k at position i reads the true token t[i+k]',
    }


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
  """What the module remembers of the committed rows.

  Attributes:
    caches: keys and values, one for each depth (`attend: depth`) or one in all.
    length: rows the trunk has features for, int [B].
    hidden: of the last rows, [B, N, D]; N is the draft length and it is the trunk's
      (`depth`), or N is 1 and it is what step 1 made of it, to chain (`rows`).
    ready: for the head, the first draft's hidden [B, D] (`rows`), else None.
    tokens: after each of those rows, int [B, N].
    first: the trunk's hidden of the last row, [B, D].
  """

  caches: Leaf
  length: Leaf
  hidden: Leaf
  ready: Leaf
  tokens: Leaf
  first: Leaf


class Sequential(base.Drafter):
  config: Config

  def __init__(self, config: Config, trunk: trunks.Config, rngs: nnx.Rngs):
    super().__init__(config)
    self.sizes = trunk
    self.window = trunk.window(trunk.layers - 1) if config.block == 'trunk' else 0
    count, D = (1 if config.share else config.depth), trunk.width
    dtype = trunk.param_dtype

    def gains():
      return blocks.constant(1.0, (count, D), mesh.stacked(mesh.gain), dtype)

    self.gain_embedding = gains()
    self.gain_hidden = gains()
    self.w_join = blocks.normal(
      rngs,
      (count, 2, D, D),
      (2 * D) ** -0.5,
      mesh.stacked(mesh.stacked(mesh.w_DD)),
      dtype,
    )
    self.block = blocks.Blocks(trunk, count, rngs)
    self.gain_out = gains()

  def weights(self) -> dict:
    """Parameters by name, stacked over modules."""
    return blocks.arrays(self)

  def first_hidden(self, trunk: trunks.Trunk, hidden_BTD):
    """h^0: what depth 1 takes of the trunk."""
    if self.config.hidden_norm == 'post':
      hidden_BTD = trunk.final_norm(hidden_BTD)
    if 'hidden' in self.config.detach:
      hidden_BTD = jax.lax.stop_gradient(hidden_BTD)
    return hidden_BTD

  def module(self, w: dict, h_BTD, e_BTD, positions_BT, look):
    """One depth of one module: (hidden for the head, hidden to chain, kept by `look`).

    Args:
      h_BTD: hidden of the depth before.
      e_BTD: embedding of the token to condition on.
      positions_BT: rotary positions of the rows.
    """
    config, eps = self.config, self.sizes.norm_epsilon
    if config.zero_first_embedding:
      e_BTD = jnp.where((positions_BT == 0)[..., None], 0, e_BTD)
    e = layers.norm(e_BTD, w['gain_embedding'], eps)
    h = layers.norm(h_BTD, w['gain_hidden'], eps)
    pair = (e, h) if config.concat == 'embed_hidden' else (h, e)
    x = layers.linear(pair[0], w['w_join'][0], 'D,DE->E')
    x = x + layers.linear(pair[1], w['w_join'][1], 'D,DE->E')
    x = jax.reshard(x, mesh.act_BTD)
    x, kept = blocks.block(w['block'], x, positions_BT, self.sizes, look)
    out = layers.norm(x, w['gain_out'], eps)
    return out, (out if config.chain_norm == 'post' else x), kept

  def predict(self, trunk, out, batch, step, key) -> base.Predictions:
    config, K = self.config, self.config.depth
    rows = batch.rows
    tokens_KBT, _ = losses.depth_inputs(batch.tokens, rows.segments, range(1, K + 1))
    h0 = self.first_hidden(trunk, out.hidden)
    table = trunk.embedding[...]
    if 'embedding' in config.detach:
      table = jax.lax.stop_gradient(table)
    w = self.weights()
    one = jax.tree.map(lambda a: a[0], w)
    earlier = self._no_steps(h0) if config.attend == 'rows' else None

    def body(carry, xs):
      h, earlier = carry
      ids, index, own = xs
      e = layers.embed(table, ids, h.dtype)
      positions = rows.positions
      if config.attend == 'depth':
        look = blocks.look_at_rows(rows, self.sizes, self.window)
      else:
        positions = positions + index
        look = self._look_at_steps(rows, index, earlier)
      h = h0 if config.hidden_source == 'trunk' else h
      w = one if config.share else own
      y, h, kept = self.module(w, h, e, positions, look)
      return (h, kept if config.attend == 'rows' else None), y

    if self.sizes.remat != 'none':
      body = jax.checkpoint(
        body, policy=trunks.REMAT[self.sizes.remat], prevent_cse=K == 1
      )
    xs = (tokens_KBT, jnp.arange(K), None if config.share else w)
    _, hidden_KBTD = jax.lax.scan(body, (h0, earlier), xs)
    return base.Predictions(hidden_KBTD, trains_head='head' not in config.detach)

  def _no_steps(self, h_BTD):
    """Room for every step's keys and values: two arrays [B, T, K, G, C]."""
    B, T, _ = h_BTD.shape
    G, C = self.sizes.kv_heads, self.sizes.head_width
    assert G is not None and C is not None
    spec = jax.P(mesh.BATCH, 'context', None, mesh.heads_axis(G), None)
    room = jnp.zeros((B, T, self.config.depth, G, C), h_BTD.dtype, out_sharding=spec)
    return room, room

  def _look_at_steps(self, rows: attention.Rows, index, earlier):
    """`attend: rows` for step `index` (from 0): step 0's rows up to i, and i's own."""

    def look(q, k, v):
      put = jax.lax.dynamic_update_index_in_dim
      keys, values = (put(a, x, index, 2) for a, x in zip(earlier, (k, v), strict=True))
      seen = attention.visibility(rows, rows.whole(), self.window, ahead=index)
      step = jnp.arange(self.config.depth)
      mine = (step > 0) & (step <= index)
      if self.window:
        mine &= index - step < self.window
      o = attention.attend(
        q,
        keys[:, :, 0],
        values[:, :, 0],
        seen,
        self.sizes.attention_softcap,
        own=(keys, values, mine),
      )
      return o, (keys, values)

    return look

  # --- Drafting

  @property
  def max_draft(self) -> int:
    return MAX_REUSED if self.config.attend == 'rows' else self.config.depth

  def lay_out(self, params: dict) -> dict:
    own = {n: tuple(a) for n, a in params.items() if n not in ('block', 'w_join')}
    joins = (
      tuple(layers.OutputsFirst.of(a, 1) for a in two) for two in params['w_join']
    )
    return {**own, 'w_join': tuple(joins), 'block': blocks.lay_out(params['block'])}

  def init_state(self, room: base.Room) -> State:
    D, rows = self.sizes.width, self.config.attend == 'rows'
    count, before = (1, 0) if rows else (room.draft, room.draft)
    shape, spec = (room.batch, count, D), P(mesh.BATCH, None, None)
    act = jnp.zeros(shape, self.sizes.dtype, out_sharding=spec)
    ids = jnp.zeros(shape[:2], jnp.int32, out_sharding=mesh.whole_BT)
    last = act[:, 0]
    # `depth` recomputes its last rows each round, from positions before 0 on at first.
    size = (room.length + before, self.window, room.block + before, room.cache)
    return State(
      [cache.empty(self.sizes, room.batch, *size) for _ in range(count)],
      jax.reshard(jnp.zeros((room.batch,), jnp.int32), mesh.ids_B),
      act,
      last if rows else None,
      ids,
      last,
    )

  def absorb(self, trunk, caches, state: State, block: base.Committed) -> State:
    h_BTD = self.first_hidden(trunk, block.out.hidden)
    length = block.start + block.count
    first = cache.keep(state.first, _row(h_BTD, block.count - 1), block.count)
    if self.config.attend == 'rows':
      out, chained, kept = self._extend(
        trunk, state.caches[0], h_BTD, block.tokens, block.start, step=0
      )
      last = block.count - 1
      hidden, ready, tokens = (
        cache.keep(old, new, block.count)
        for old, new in (
          (state.hidden, _row(chained, last)[:, None]),
          (state.ready, _row(out, last)),
          (state.tokens, _row(block.tokens, last)[:, None]),
        )
      )
      return State([kept], length, hidden, ready, tokens, first)
    N = len(state.caches)
    hidden = jnp.concatenate([state.hidden, cache.whole(h_BTD)], 1)
    tokens = jnp.concatenate([state.tokens, cache.whole(block.tokens)], 1)
    kept = list(state.caches)
    h = hidden
    for k in range(N):
      # Past the last committed token there is none: those rows are redone in `propose`.
      ids = jnp.pad(tokens[:, k:], ((0, 0), (0, k)))
      _, h, kept[k] = self._extend(
        trunk, kept[k], h, ids, block.start - N, step=k, before=N
      )
      h = hidden if self.config.hidden_source == 'trunk' else h
    return State(
      kept,
      length,
      cache.take(hidden, block.count, N),
      None,
      cache.take(tokens, block.count, N),
      first,
    )

  def propose(
    self, trunk, caches, state: State, draft: int, choose: base.Choose
  ) -> tuple[base.Draft, State]:
    by = self._by_rows if self.config.attend == 'rows' else self._by_depth
    levels, kept = by(trunk, state, draft, choose)
    return choose.draft(levels), dataclasses.replace(state, caches=kept)

  def _by_rows(self, trunk, state: State, draft: int, choose: base.Choose):
    """One cache: a node's row stands at its position, behind the rows of those before
    it."""
    kept, hidden, ready = state.caches[0], state.hidden, state.ready[:, None]
    levels: list[base.Level] = []
    for k in range(draft):
      above = levels[-1] if levels else None
      if above:
        if self.config.hidden_source == 'trunk':
          hidden = cache.pick(state.first[:, None], jnp.zeros_like(above.parents))
        else:
          hidden = cache.pick(hidden, above.parents)
        wide = [level.tokens.shape[1] for level in levels]
        at = [m for m, w in enumerate(wide) for _ in range(w)]
        branches = None
        if max(wide) > 1:
          places = _places(state.length, at)
          seen = base.lineage(levels)[:, -wide[-1] :]
          branches = cache.Branches(state.length, places[:, -wide[-1] :], places, seen)
        first = state.length + sum(wide[:-1])
        out, hidden, kept = self._extend(
          trunk, kept, hidden, above.tokens, first, step=k, branches=branches
        )
        ready = cache.whole(out)
      levels.append(choose(losses.head_logits(ready, trunk.head()), k, above))
    return levels, [kept]

  def _by_depth(self, trunk, state: State, draft: int, choose: base.Choose):
    """A cache a depth. Depth k + 1, k from 0, has rows for the last N - k committed
    tokens and for every node so far, each made of what the depth before made of the
    token before it."""
    kept, N = list(state.caches), len(state.caches)
    start, hidden = state.length - N, state.hidden
    levels: list[base.Level] = []
    for k in range(draft):
      above, M = levels[-1] if levels else None, N - k
      tokens = cache.whole(state.tokens[:, k:])
      wide = [level.tokens.shape[1] for level in levels]
      branches = None
      if above:
        tokens = jnp.concatenate([tokens, *(level.tokens for level in levels)], 1)
        at = [*range(M), *(M + m for m, w in enumerate(wide) for _ in range(w))]
        if self.config.hidden_source == 'trunk':
          hidden = cache.pick(state.hidden, _same(at, tokens))
        else:
          parents = [
            level.parents + 1 + sum(wide[:m]) for m, level in enumerate(levels[1:])
          ]
          parents = [jnp.zeros_like(levels[0].parents), *parents]
          before = [_same(range(M), tokens), *(M + p for p in parents)]
          hidden = cache.pick(hidden, jnp.concatenate(before, 1))
        if max(wide) > 1:
          places = _places(start, at)
          seen = _after(M, base.lineage(levels))
          branches = cache.Branches(start, places, places, seen)
      out, hidden, kept[k] = self._extend(
        trunk, kept[k], hidden, tokens, start, step=k, before=N, branches=branches
      )
      ready = cache.whole(cache.whole(out)[:, -(wide[-1] if wide else 1) :])
      levels.append(choose(losses.head_logits(ready, trunk.head()), k, above))
    return levels, kept

  def _extend(
    self,
    trunk,
    kept,
    h_BTD,
    ids_BT,
    start_B,
    step: int,
    before: int = 0,
    branches: cache.Branches | None = None,
  ):
    """New rows of one depth after those in its cache: as `module`."""
    w = blocks.unstack(self.weights())[0 if self.config.share else step]
    e = trunk.embed(jax.reshard(ids_BT, mesh.ids_BT))
    positions = cache.positions(start_B, ids_BT.shape[1])
    positions = branches.positions if branches else positions
    look = cache.look_at_cache(kept, start_B, self.sizes, self.window, before, branches)
    return self.module(w, jax.reshard(h_BTD, mesh.act_BTD), e, positions, look)


def _same(values, like: jax.Array) -> jax.Array:
  """The same numbers in every row, [B, n]."""
  rows = jnp.broadcast_to(jnp.asarray(list(values))[None], (len(like), len(values)))
  return cache.whole(rows)


def _places(first_B: jax.Array, at: list[int]) -> jax.Array:
  """Positions first + at, sharded as rows of tokens are."""
  return jax.reshard(first_B[:, None] + jnp.asarray(at)[None], mesh.ids_BT)


def _after(count: int, seen_BRR: jax.Array) -> jax.Array:
  """The same behind `count` rows in line, which the others see."""
  B, R, _ = seen_BRR.shape
  line = jnp.tril(jnp.ones((count, count + R), bool))
  above = jnp.broadcast_to(line[None], (B, count, count + R))
  left = jnp.ones((B, R, count), bool)
  below = jnp.concatenate([cache.whole(left), cache.whole(seen_BRR)], 2)
  return jnp.concatenate([cache.whole(above), below], 1)


def _row(x: jax.Array, index_B: jax.Array) -> jax.Array:
  """x[b, index[b]] of [B, T, …]."""
  return cache.take(x, index_B, 1)[:, 0]
