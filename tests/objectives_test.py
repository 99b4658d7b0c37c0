"""Token order and the bag of words against loops over one row, one position and one
vocabulary entry at a time."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax import losses, mesh
from mtpjax.drafters.base import Batch
from mtpjax.fields import ConfigError
from mtpjax.losses import Targets
from mtpjax.models import trunk as trunks
from mtpjax.models.attention import Rows
from mtpjax.models.trunk import Head
from mtpjax.objectives import bag, token_order, windows

ONE = {'fsdp': 1}
EIGHT = {'fsdp': 2, 'context': 2, 'tensor': 2}
KINDS = {'token_order': token_order.Config(window=4), 'bag': bag.Config(window=4)}
V, B, T, D = 13, 4, 12, 8


def on(sizes):
  count = math.prod(sizes.values())
  return jax.set_mesh(mesh.make(mesh.Config(**sizes), jax.devices()[:count]))


def put(x, spec):
  return jax.device_put(x, jax.NamedSharding(jax.sharding.get_mesh(), spec))


def packed_rows(seed, count=B, vocab=V):
  """tokens, segments, mask of packed documents; few tokens, so that many repeat."""
  rng = np.random.default_rng(seed)
  segments = np.zeros((count, T), np.int32)
  for row in segments:
    cuts = np.sort(rng.choice(np.arange(1, T), 2, replace=False))
    row[: cuts[0]], row[cuts[0] : cuts[1]], row[cuts[1] :] = 1, 2, rng.choice([0, 3])
  tokens = rng.integers(0, vocab, segments.shape, dtype=np.int32)
  return tokens, segments, rng.random(segments.shape) < 0.75


def targets(config, rows, whole_path=False):
  """The objective's own targets, on the mesh that is set."""
  tokens, segments, mask = (put(x, mesh.ids_BT) for x in rows)

  def run(tokens, segments, mask):
    where = Rows(jnp.zeros_like(tokens), segments)
    batch = Batch(tokens, mask, where, whole_path=whole_path)
    return windows.ahead(batch, config)

  return jax.device_get(jax.jit(run)(tokens, segments, mask))


# ------------------------------------------------------------------------------ oracles


def following(rows, b, i, first, window, whole_path=False):
  """[(distance, token)] of the tokens after i that count, one after another."""
  tokens, segments, mask = rows
  found = []
  for d in range(first, window + 1):
    if i + d >= T or segments[b, i] == 0 or segments[b, i + d] != segments[b, i]:
      break
    asked = mask[b, i + 1 : i + d + 1].all() if whole_path else mask[b, i + d]
    if asked:
      found.append((d, int(tokens[b, i + d])))
  return found


def slow_token_order(scores, near, window):
  """(loss, whether right) at one position."""
  first = {}
  for d, token in near:
    if token not in first:
      first[token] = d
  size = sum(math.exp(window - d) for d in first.values())
  log_z = math.log(sum(math.exp(s) for s in scores))
  loss = 0.0
  for token, d in first.items():
    loss -= math.exp(window - d) / size * (scores[token] - log_z)
  return loss, int(np.argmax(scores)) == near[0][1]


def slow_bag(scores, near, window):
  inside = {token for _, token in near}
  rate = min((window - 1) / len(scores), 0.5)
  loss = 0.0
  for v, score in enumerate(scores):
    p = 1 / (1 + math.exp(-score) * (1 - rate) / rate)
    loss -= math.log(p if v in inside else 1 - p)
  best = sorted(range(len(scores)), key=lambda v: -scores[v])[: len(inside)]
  return loss, set(best) == inside


SLOW = {'token_order': (slow_token_order, 1), 'bag': (slow_bag, 2)}


def slow(name, rows, hidden, table, vocab, weights=None):
  """(Σ weight · loss, Σ loss, right, count) over every position that is a target."""
  one, first = SLOW[name]
  window = KINDS[name].window
  total = summed = right = count = 0
  for b, i in np.ndindex(hidden.shape[1:3]):
    near = following(rows, b, i, first, window)
    if not near:
      continue
    scores = [float(hidden[0, b, i] @ table[v]) for v in range(vocab)]
    value, hit = one(scores, near, window)
    total += value * (1 if weights is None else weights[0, b, i])
    summed, right, count = summed + value, right + hit, count + 1
  return total, summed, right, count


def loss_of(name, vocab=V):
  if name == 'token_order':
    return token_order.loss
  return functools.partial(bag.loss, prior=bag.prior(KINDS['bag'].window, vocab))


# ------------------------------------------------------------------------------ targets


@pytest.mark.parametrize('sizes', [ONE, EIGHT], ids=['1', '8'])
@pytest.mark.parametrize('whole_path', [False, True])
@pytest.mark.parametrize('name', KINDS)
def test_windows_are_those_of_a_slow_loop(name, whole_path, sizes):
  config, rows = KINDS[name], packed_rows(0, 8)
  first = SLOW[name][1]
  with on(sizes):
    got = targets(config, rows, whole_path)
  assert got.ids.shape == (1, 8, T, config.window - first + 1)
  assert not got.are_tokens
  for b, i in np.ndindex(8, T):
    near = dict(following(rows, b, i, first, config.window, whole_path))
    want = [near.get(d, -1) for d in range(first, config.window + 1)]
    assert got.ids[0, b, i].tolist() == want
    assert got.valid[0, b, i] == bool(near)
  assert 0 < got.valid.sum() < got.valid.size


def test_before_an_answer_only_the_answers_tokens_are_looked_for():
  """A row of path-star: graph, start 3, goal 4, '=', then the path 3 5 4."""
  tokens = np.array([[3, 5, 7, 5, 4, 8, 3, 4, 9, 3, 5, 4]], np.int32)
  rows = tokens, np.ones_like(tokens), np.arange(T)[None] >= 9
  with on(ONE):
    order = targets(token_order.Config(window=3), rows)
    words = targets(bag.Config(window=3), rows)
  at = {i: x.tolist() for i, x in enumerate(order.ids[0, 0]) if order.valid[0, 0, i]}
  assert at == {
    6: [-1, -1, 3],
    7: [-1, 3, 5],
    8: [3, 5, 4],
    9: [5, 4, -1],
    10: [4, -1, -1],
  }
  at = {i: x.tolist() for i, x in enumerate(words.ids[0, 0]) if words.valid[0, 0, i]}
  # The last position but one has a next token and an empty bag: it is no target.
  assert at == {6: [-1, 3], 7: [3, 5], 8: [5, 4], 9: [4, -1]}


# ------------------------------------------------------------------------------- losses


def test_token_order_of_a_window_by_hand():
  """Window 3, tokens 2 0 2: token 2 is 1 ahead, 0 is 2 ahead; e²: e¹ of the mass."""
  logits = np.array([0.5, 9.0, 1.0, -1.0], np.float32)
  with on(ONE):
    place = functools.partial(put, spec=jax.P(None, None))
    run = jax.jit(token_order.loss)
    out = jax.device_get(run(place(logits[None]), place(np.array([[2, 0, 2]]))))
    right = jax.device_get(run(place(-logits[None]), place(np.array([[-1, 3, 0]]))))
  log_p = logits - np.log(np.exp(logits.astype(np.float64)).sum())
  want = -(math.e * log_p[2] + log_p[0]) / (math.e + 1)
  assert out[0][0] == pytest.approx(want, rel=1e-6) and out[1][0] == out[0][0]
  assert not out[2][0]
  assert right[2][0]  # the nearest that counts, though not the next


def test_the_bag_of_a_window_by_hand():
  """Three of four entries; the order, and how often, do not matter."""
  logits = np.array([2.0, -1.0, 0.5, 1.0], np.float32)
  with on(ONE):
    place = functools.partial(put, spec=jax.P(None, None))
    run = jax.jit(functools.partial(bag.loss, prior=-0.5))
    first = jax.device_get(run(place(logits[None]), place(np.array([[0, 3, 3]]))))
    again = jax.device_get(run(place(logits[None]), place(np.array([[3, -1, 0]]))))
    wrong = jax.device_get(run(place(logits[None]), place(np.array([[0, 2, -1]]))))
    level = jax.device_get(run(place(0 * logits[None]), place(np.array([[0, 1, 2]]))))
  p = 1 / (1 + np.exp(-(logits.astype(np.float64) - 0.5)))
  want = -math.log(p[0] * (1 - p[1]) * (1 - p[2]) * p[3])
  assert first[0][0] == pytest.approx(want, rel=1e-6)
  assert again[0][0] == first[0][0] and first[2][0] and not wrong[2][0]
  assert not level[2][0]  # scores that are all alike know nothing


def arrays(seed, vocab, table_rows):
  rng = np.random.default_rng(seed)
  rows = packed_rows(seed, B, vocab)
  hidden = rng.normal(size=(1, B, T, D))
  table = rng.normal(size=(table_rows, D)) * 0.7
  for b, i in np.ndindex(B, T):  # here and there a good guess
    if rng.random() < 0.5:
      for _, token in following(rows, b, i, 2, 4):
        hidden[0, b, i] += 2 * table[token]
  weights = rng.normal(size=(1, B, T))
  return rows, hidden, table, weights


@pytest.mark.parametrize('sizes', [ONE, EIGHT], ids=['1', '8'])
@pytest.mark.parametrize('name', KINDS)
def test_loss_figures_and_gradients_are_those_of_loops(name, sizes):
  """The fused loss over chunks that do not divide the row, a padded table included."""
  vocab, chunk = V, 5 * B // math.prod(sizes.get(x, 1) for x in mesh.BATCH)
  rows, hidden, table, weights = arrays(1, vocab, 16)
  rng = np.random.default_rng(2)
  with jax.enable_x64(True), on(sizes):
    found = targets(KINDS[name], rows)
    used = np.where(found.valid, weights, 0)

    def total(hidden, table, ids, valid, used):
      head = Head(table, vocab)
      where = Targets(ids, valid, are_tokens=False)
      return losses.fused(hidden, head, where, used, loss_of(name), chunk)

    inputs = (
      put(hidden, mesh.act_KBTD),
      put(table, mesh.w_VD),
      put(found.ids, jax.P(*mesh.ids_KBT, None)),
      put(found.valid, mesh.ids_KBT),
      put(used, mesh.ids_KBT),
    )
    run = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))
    (value, sums), (dh, dw) = jax.device_get(run(*inputs))
  want, summed, right, count = slow(name, rows, hidden, table, vocab, weights)
  assert value == pytest.approx(want, rel=1e-11)
  assert sums.nll[0] == pytest.approx(summed, rel=1e-11)
  assert (sums.correct[0], sums.count[0]) == (right, count)
  assert 0 < right < count

  def along(step, h, w):
    moved = hidden + step * h, table + step * w
    return slow(name, rows, *moved, vocab, weights)[0]

  assert not dw[vocab:].any() and not dh[~found.valid].any()
  for n in range(4):
    h, w = rng.normal(size=hidden.shape), rng.normal(size=table.shape)
    h, w = (h * (n != 1), w * (n != 2))
    slope = (along(1e-5, h, w) - along(-1e-5, h, w)) / 2e-5
    assert (dh * h).sum() + (dw * w).sum() == pytest.approx(slope, rel=1e-6)


def test_an_untrained_bag_costs_what_its_size_costs_whatever_the_vocabulary():
  """Scores of zero: W - 1 of V entries, each with its own rate, in place of V·log 2."""
  for vocab in (64, 4096):
    with on(ONE):
      ids = np.arange(7)[None].astype(np.int32)
      logits = put(np.zeros((1, vocab), np.float32), jax.P(None, None))
      loss = functools.partial(bag.loss, prior=bag.prior(8, vocab))
      value = jax.jit(loss)(logits, put(ids, jax.P(None, None)))[0][0]
    rate = 7 / vocab
    want = -(7 * math.log(rate) + (vocab - 7) * math.log1p(-rate))
    assert float(value) == pytest.approx(want, rel=1e-5)
  assert bag.prior(9, 8) == 0.0


@pytest.mark.parametrize('sizes', [ONE, EIGHT], ids=['1', '8'])
@pytest.mark.parametrize('name', KINDS)
def test_a_vocabulary_exists_for_one_chunk_at_a_time(name, sizes):
  # 1088 = 64 · 17: no other buffer has a multiple of it, or of its half.
  vocab, rows, chunk = 1088, 32, 4 * B
  with on(sizes):

    def total(hidden, table, ids, used):
      where = Targets(ids, used != 0, are_tokens=False)
      head = Head(table, vocab)
      loss = loss_of(name, vocab)
      return losses.fused(hidden, head, where, used, loss, chunk)[0]

    shapes = ((1, B, rows, D), 'f', mesh.act_KBTD), ((vocab, D), 'f', mesh.w_VD)
    ids = (1, B, rows, 11), 'i', jax.P(*mesh.ids_KBT, None)
    where = jax.sharding.get_mesh()
    inputs = [
      jax.ShapeDtypeStruct(shape, kind, sharding=jax.NamedSharding(where, spec))
      for shape, kind, spec in (*shapes, ids, ((1, B, rows), 'f', mesh.ids_KBT))
    ]
    compiled = jax.jit(jax.grad(total, (0, 1))).lower(*inputs).compile()
  text = compiled.as_text() or ''
  found = re.findall(r'\b(?:f|bf|s|u|pred)\d*\[([\d,]+)\]', text)
  counts = {int(np.prod([int(n) for n in shape.split(',')])) for shape in found}
  own = vocab // sizes.get('tensor', 1)
  assert max(n // own for n in counts if n % own == 0) == chunk > 11


# ------------------------------------------------------------------------------- config


@pytest.mark.parametrize(
  ('config', 'field', 'fix'),
  [
    (token_order.Config(window=0), 'f.window', 'use at least 1'),
    (bag.Config(window=1), 'f.window', 'use at least 2'),
    (bag.Config(depth=2), 'f.depth', 'set f.window'),
    (token_order.Config(depth=3), 'f.depth', 'set f.window'),
  ],
)
def test_a_senseless_window_is_refused_by_its_field(config, field, fix):
  with pytest.raises(ConfigError, match=fix) as error:
    config.finalize(trunks.Config(), 'f')
  assert error.value.field == field


def test_the_least_windows_are_taken_and_told():
  for config, kind in (
    (token_order.Config(window=1), 'token_order'),
    (bag.Config(window=2), 'bag'),
  ):
    config.finalize(trunks.Config(), 'f')
    told = {'kind': kind, 'modules': 1, 'depth': 1, 'window': config.window}
    assert config.conventions() == told
    assert float(config.weight(jnp.float32(0.4))) == 1.0
