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
    rows, head = self.config.attend == 'rows', trunk.head()
    kept, tokens, q = list(state.caches), [], []
    hidden, ids = state.hidden, state.tokens
    for k in range(draft):
      if not rows:
        N = len(kept)
        if k > 0:
          # A slice of a batch of one loses its sharding on jax 0.12.
          both = cache.whole(ids[:, 1:]), cache.whole(tokens[-1][:, None])
          ids = jnp.concatenate(both, 1)
        out, hidden, kept[k] = self._extend(
          trunk, kept[k], hidden, ids, state.length - N, step=k, before=N
        )
        ready = cache.whole(out)[:, -1]
        if self.config.hidden_source == 'trunk':
          hidden = state.hidden
      elif k == 0:
        ready = state.ready
      else:
        if self.config.hidden_source == 'trunk':
          hidden = state.first[:, None]
        out, hidden, kept[0] = self._extend(
          trunk, kept[0], hidden, tokens[-1][:, None], state.length - 1 + k, step=k
        )
        ready = cache.whole(out)[:, 0]
      token, chances = choose(losses.head_logits(ready, head), k)
      tokens.append(token)
      q.append(chances)
    return base.chain(tokens, q), dataclasses.replace(state, caches=kept)

  def _extend(self, trunk, kept, h_BTD, ids_BT, start_B, step: int, before: int = 0):
    """New rows of one depth after those in its cache: as `module`."""
    w = blocks.unstack(self.weights())[0 if self.config.share else step]
    e = trunk.embed(jax.reshard(ids_BT, mesh.ids_BT))
    positions = cache.positions(start_B, ids_BT.shape[1])
    look = cache.look_at_cache(kept, start_B, self.sizes, self.window, before)
    return self.module(w, jax.reshard(h_BTD, mesh.act_BTD), e, positions, look)


def _row(x: jax.Array, index_B: jax.Array) -> jax.Array:
  """x[b, index[b]] of [B, T, …]."""
  return cache.take(x, index_B, 1)[:, 0]
