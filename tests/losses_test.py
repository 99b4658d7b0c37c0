"""Targets of every depth, and the fused loss, against loops and plain formulas."""

import dataclasses
import functools
import math
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax import losses, mesh
from mtpjax.fields import ConfigError
from mtpjax.losses import Sums, Targets
from mtpjax.models.trunk import Head

SLOW = pytest.mark.slow
ONE = {}
MESHES = {
  'one device': ONE,
  'fsdp, tensor': {'fsdp': 2, 'tensor': 4},
  'fsdp, context, tensor': {'fsdp': 2, 'context': 2, 'tensor': 2},
  'replica, expert, tensor': {'replica': 2, 'expert': 2, 'tensor': 2},
}


def on(sizes):
  config = mesh.Config(**{'fsdp': 1, **sizes})
  count = math.prod(getattr(config, axis) for axis in mesh.AXES)
  return jax.set_mesh(mesh.make(config, jax.devices()[:count]))


def put(x, spec):
  return jax.device_put(x, jax.NamedSharding(jax.sharding.get_mesh(), spec))


def put_KBT(x):
  return put(x, jax.P(*mesh.ids_KBT, *(None,) * (x.ndim - 3)))


# ------------------------------------------------------------------------------ targets


def packed_rows(rng, count, length):
  """Rows of documents of 1 to 8 tokens, most with padding; tokens, segments, mask."""
  segments = np.zeros((count, length), np.int32)
  for row in segments:
    at, end = 0, rng.integers(length // 2, length + 1)
    for n in range(1, length):
      row[at : min(at + rng.integers(1, 9), end)] = n
      at = int(np.sum(row > 0))
  tokens = rng.integers(0, 4, segments.shape, dtype=np.int32)  # 0 is a token as well
  return tokens, segments, rng.random(segments.shape) < 0.8


def slow_targets(segments, mask, k, whole_path):
  """Whether the pair (i, k) counts, position by position."""
  valid = np.zeros(mask.shape, bool)
  for b, i in np.ndindex(mask.shape):
    j = i + k + 1
    if j >= mask.shape[1] or segments[b, i] == 0 or segments[b, i] != segments[b, j]:
      continue
    valid[b, i] = all(mask[b, i + 1 : j + 1]) if whole_path else mask[b, j]
  return valid


def depth_targets(arrays, depths: Sequence[int] = range(5), whole_path=False):
  arrays = [put(x, mesh.ids_BT) for x in arrays]
  split = functools.partial(losses.depth_targets, depths=depths, whole_path=whole_path)
  return jax.device_get(jax.jit(split)(*arrays))


@pytest.mark.parametrize('sizes', [ONE, {'fsdp': 2, 'context': 4}], ids=['1', '8'])
@pytest.mark.parametrize('whole_path', [False, True])
def test_targets_are_those_of_a_slow_loop(whole_path, sizes):
  rows = packed_rows(np.random.default_rng(1), 32, 12)
  with on(sizes):
    got = depth_targets(rows, whole_path=whole_path)
  tokens, segments, mask = rows
  for k in range(5):
    want = slow_targets(segments, mask, k, whole_path)
    assert 0 < want.sum() < want.size / 2
    np.testing.assert_array_equal(got.valid[k], want)
    for b, i in np.argwhere(want):
      assert got.ids[k, b, i] == tokens[b, i + k + 1]


@pytest.mark.parametrize('sizes', [ONE, {'fsdp': 2, 'context': 4}], ids=['1', '8'])
def test_inputs_are_those_of_a_slow_loop(sizes):
  tokens, segments, _ = packed_rows(np.random.default_rng(2), 16, 12)
  split = jax.jit(functools.partial(losses.depth_inputs, depths=(0, 1, 2, 4)))
  with on(sizes):
    arrays = put(tokens, mesh.ids_BT), put(segments, mesh.ids_BT)
    ids, valid = jax.device_get(split(*arrays))
  for n, k in enumerate((0, 1, 2, 4)):
    for b, i in np.ndindex(tokens.shape):
      inside = i + k < 12 and segments[b, i] != 0
      same = inside and segments[b, i] == segments[b, i + k]
      assert valid[n, b, i] == same
      if inside:
        assert ids[n, b, i] == tokens[b, i + k]


def test_two_documents_of_three_and_four_tokens_give_5_3_1_targets():
  segments = np.array([[1, 1, 1, 2, 2, 2, 2]], np.int32)
  tokens = np.zeros_like(segments)  # a token 0 counts like any other
  with on(ONE):
    got = depth_targets((tokens, segments, segments > 0))
  assert got.valid.sum((1, 2)).tolist() == [5, 3, 1, 0, 0]
  assert got.counts.tolist() == [5, 3, 1, 0, 0]


def test_fill_never_counts_and_its_tokens_do_not_matter():
  segments = np.array([[1, 1, 1, 0, 0, 0, 0], [0] * 7], np.int32)
  everything = np.ones(segments.shape, bool)
  for fill in (0, 9):
    with on(ONE):
      got = depth_targets(
        (np.full(segments.shape, fill, np.int32), segments, everything)
      )
    assert got.counts.tolist() == [2, 1, 0, 0, 0]


def test_a_row_shorter_than_the_depth_has_no_targets():
  ones = np.ones((1, 3), np.int32)
  with on(ONE):
    got = depth_targets((ones, ones, ones > 0), depths=[2, 3, 9])
  assert got.counts.tolist() == [0, 0, 0] and got.ids.shape == (3, 1, 3)


def test_depth_weights_are_powers_of_rho_that_sum_to_one():
  assert losses.depth_weights(4, 1.0) == (0.25,) * 4
  np.testing.assert_allclose(losses.depth_weights(3, 0.5), np.array([4, 2, 1]) / 7)
  np.testing.assert_allclose(losses.depth_weights(2, 3.0), [0.25, 0.75])
  assert losses.depth_weights(1, 0.1) == (1.0,)


def test_weights_divide_by_the_true_counts():
  valid = np.zeros((3, 2, 4), bool)
  valid[0, 0, :3] = valid[1, 1, 2] = True
  with on(ONE):
    got = losses.normalised(
      Targets(jnp.zeros((3, 2, 4), jnp.int32), jnp.asarray(valid)),
      jnp.array([6, 1, 0]),  # of more microbatches than this one
      jnp.array([1.0, 0.2, 0.1]),
    )
  np.testing.assert_allclose(got[0], valid[0] / 6)
  np.testing.assert_allclose(got[1], valid[1] * 0.2)
  assert not np.any(got[2])


def test_sums_add_field_by_field():
  a = Sums(jnp.array([1.0, 2.0]), jnp.array([1.0, 0.0]), jnp.array([3, 4]))
  total = a + Sums(jnp.array([0.5, 0.5]), jnp.array([1.0, 1.0]), jnp.array([1, 0]))
  assert total.nll.tolist() == [1.5, 2.5]
  assert total.correct.tolist() == [2, 1] and total.count.tolist() == [4, 4]


# ----------------------------------------------------------------------- the fused loss


@dataclasses.dataclass
class Case:
  dtype: str = 'float32'
  vocab: int = 64  # of a table of 64
  cap: float | None = None
  z_loss: float = 0.0
  chunk: int = 28
  trains_head: tuple[bool, ...] | None = None
  window: int = 0  # target tokens a position; 0 is one id and cross-entropy
  K: int = 3
  B: int = 4
  T: int = 14
  D: int = 16

  def arrays(self, seed=0):
    """hidden, table, ids, valid and weights, of random numbers."""
    rng = np.random.default_rng(seed)
    rows = (self.K, self.B, self.T)
    shape = (*rows, self.window) if self.window else rows
    hidden = rng.normal(size=(*rows, self.D)).astype(self.dtype)
    table = rng.normal(size=(64, self.D)).astype(self.dtype)
    ids = rng.integers(0, self.vocab, shape, dtype=np.int32)
    valid = rng.random(rows) < 0.6
    weights = (rng.normal(size=rows) * valid).astype(self.dtype)
    return hidden, table, ids, valid, weights

  def loss(self):
    if self.window:
      return mean_over_window
    return functools.partial(losses.cross_entropy, z_loss=self.z_loss)


def mean_over_window(logits, ids):
  """Soft targets: every token of a window is as right as any other."""
  log_p = jax.nn.log_softmax(logits)
  hits = losses.vocabulary(logits)[..., None, :] == ids[..., None]
  share = jnp.mean(hits.astype(logits.dtype), -2)
  value = -jnp.sum(share * log_p, -1)
  best = jnp.argmax(logits, -1)[..., None] == ids
  return value, value, jnp.any(best, -1)


def plain(case, hidden, table, ids, valid, weights):
  """Loss, sums and gradients by their formulas, all logits at once, in float64."""
  h, w, a = (np.asarray(x, np.float64) for x in (hidden, table, weights))
  logits = raw = (h @ w.T)[..., : case.vocab]
  if case.cap is not None:
    logits = case.cap * np.tanh(raw / case.cap)
  top = logits.max(-1, keepdims=True)
  log_z = (top + np.log(np.exp(logits - top).sum(-1, keepdims=True)))[..., 0]
  choices = ids if case.window else ids[..., None]
  share = np.eye(case.vocab)[choices].mean(-2)
  nll = log_z - (share * logits).sum(-1)
  total = (a * (nll + case.z_loss * log_z**2)).sum()
  p = np.exp(logits - log_z[..., None])
  dz = a[..., None] * (p * (1 + 2 * case.z_loss * log_z)[..., None] - share)
  if case.cap is not None:
    dz = dz * (1 - np.tanh(raw / case.cap) ** 2)
  trains = np.array(case.trains_head or (True,) * case.K)
  dw = np.zeros_like(w)
  dw[: case.vocab] = np.einsum('kbtv,kbtd->vd', dz[trains], h[trains])
  correct = (logits.argmax(-1)[..., None] == choices).any(-1)
  sums = (nll * valid).sum((1, 2)), (correct & valid).sum((1, 2)), valid.sum((1, 2))
  return total, sums, dz @ w[: case.vocab], dw


def gradients(case):
  """(hidden, table, ids, valid, weights) -> value and gradients of -2 · fused."""

  def total(hidden, table, ids, valid, weights):
    value, sums = losses.fused(
      hidden,
      Head(table, case.vocab, case.cap),
      Targets(ids, valid),
      weights,
      case.loss(),
      case.chunk,
      case.trains_head,
    )
    return -2 * value, sums

  return jax.value_and_grad(total, (0, 1), has_aux=True)


def placed(arrays):
  hidden, table, *rest = arrays
  return put_KBT(hidden), put(table, mesh.w_VD), *(put_KBT(x) for x in rest)


def close(got, want, tolerance):
  """Errors in units of the tensor's largest entry."""
  np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max())


def check(case, sizes, seed=0):
  arrays = case.arrays(seed)
  with jax.enable_x64(case.dtype == 'float64'), on(sizes):
    out = jax.device_get(jax.jit(gradients(case))(*placed(arrays)))
  (value, sums), (dh, dw) = out
  want, want_sums, want_dh, want_dw = plain(case, *arrays)
  assert dh.dtype == dw.dtype == case.dtype
  tolerance = 5e-6 if case.dtype == 'float32' else 1e-10
  assert value == pytest.approx(-2 * want, rel=tolerance)
  close(sums.nll, want_sums[0], tolerance)
  np.testing.assert_array_equal(sums.correct, want_sums[1])
  np.testing.assert_array_equal(sums.count, want_sums[2])
  close(dh, -2 * want_dh, tolerance)
  close(dw, -2 * want_dw, tolerance)
  return dw


@pytest.mark.parametrize(
  ('dtype', 'name'),
  [
    *[('float64', name) for name in MESHES],
    ('float32', 'one device'),
    ('float32', 'fsdp, context, tensor'),
    pytest.param('float32', 'fsdp, tensor', marks=SLOW),
    pytest.param('float32', 'replica, expert, tensor', marks=SLOW),
  ],
)
def test_fused_is_the_plain_loss(dtype, name):
  sizes = MESHES[name]
  # A table padded from 50 rows, and chunks of 5 (of 4 on half the time) that do not
  # divide 14 (7): the last one is partly fill.
  case = Case(dtype, vocab=50, cap=3.0, z_loss=0.01, trains_head=(True, False, True))
  case.chunk = 5 * case.B // math.prod(sizes.get(x, 1) for x in mesh.BATCH)
  check(case, sizes)


@pytest.mark.parametrize('chunk', [1, pytest.param(28, marks=SLOW), 10_000])
def test_the_chunk_size_changes_nothing(chunk):
  check(Case(chunk=chunk), ONE)


@pytest.mark.parametrize('name', ['one device', 'fsdp, context, tensor'])
def test_a_loss_of_ones_own_gets_its_targets_and_gradients(name):
  check(Case(window=5, chunk=12), MESHES[name])


def test_no_gradient_reaches_a_head_that_no_depth_trains():
  dw = check(Case(trains_head=(False,) * 3), MESHES['fsdp, tensor'])
  assert not np.any(dw)


def test_without_a_gradient_the_value_and_sums_are_the_same():
  case = Case(vocab=50, cap=3.0, z_loss=0.01)
  arrays = case.arrays()
  with on(ONE):
    hidden, table, ids, valid, weights = placed(arrays)
    head, targets = Head(table, 50, 3.0), Targets(ids, valid)
    run = jax.jit(lambda h, a: losses.fused(h, head, targets, a, case.loss(), 28))
    value, sums = jax.device_get(run(hidden, weights))
  want, want_sums, _, _ = plain(case, *arrays)
  assert value == pytest.approx(want, rel=5e-6)
  close(sums.nll, want_sums[0], 5e-6)
  np.testing.assert_array_equal(sums.correct, want_sums[1])


def test_masked_targets_change_no_loss_bit_for_bit():
  """One row of 12 tokens, the first 4 prompt and the last 4 padding."""
  place = np.arange(12)[None]
  case = Case(K=3, B=1, T=12, chunk=5, z_loss=0.01)
  hidden, table, _, _, _ = case.arrays()
  tokens = (place * 5 % 64).astype(np.int32)
  with on(ONE):
    rows = tokens, (place < 8).astype(np.int32), (place >= 4) & (place < 8)
    targets = depth_targets(rows, depths=range(3))
    assert targets.counts.tolist() == [4, 4, 4]
    weights = np.array([1, 0.2, 0.1], np.float32)[:, None, None] * targets.valid / 4
    run = jax.jit(gradients(case))

    def at(hidden, ids):
      arrays = placed((hidden, table, ids, targets.valid, weights))
      return jax.device_get(run(*arrays))

    noise = np.random.default_rng(1).normal(size=hidden.shape).astype(np.float32)
    masked = np.where(targets.valid[..., None], hidden, 1e3 * noise)
    before = at(hidden, targets.ids)
    after = at(masked, np.where(targets.valid, targets.ids, 63))
    seen = at(hidden + targets.valid[..., None] * np.float32(1e-2), targets.ids)
  jax.tree.map(np.testing.assert_array_equal, before, after)
  assert seen[0][0] != before[0][0]
  _, (dh, _) = before
  assert np.array_equal(np.any(dh != 0, -1), targets.valid)


def test_a_depth_without_targets_contributes_nothing_and_stays_finite():
  case = Case()
  hidden, table, ids, valid, weights = case.arrays()
  with on(ONE):
    run = jax.jit(gradients(case))
    for empty in ([1], [0, 1, 2]):
      kept = np.ones((3, 1, 1), bool)
      kept[empty] = False
      arrays = hidden, table, ids, valid & kept, weights * kept
      out = jax.device_get(run(*placed(arrays)))
      (value, sums), (dh, dw) = out
      assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(out))
      assert value == pytest.approx(-2 * plain(case, *arrays)[0], rel=5e-6, abs=1e-12)
      assert not np.any(sums.nll[empty]) and not np.any(dh[empty])
      assert np.any(dw) == (len(empty) < 3)


def test_four_uneven_microbatches_give_main_plus_lambda_mtp():
  """400 targets, main mean 2.0, MTP mean 3.0, λ 0.1: 2.3 however they are dealt."""
  rng = np.random.default_rng(3)

  def given(logits, values):
    return values + 0 * jnp.sum(logits, -1), values, values > 0

  valid = np.zeros((2, 4, 100), bool)
  for k, counts in enumerate(([100, 70, 30, 0], [6, 0, 50, 100])):
    for b, count in enumerate(counts):
      valid[k, b, rng.permutation(100)[:count]] = True
  values = rng.normal(size=valid.shape).astype(np.float32)
  for k, mean in enumerate((2.0, 3.0)):
    values[k] += mean - values[k][valid[k]].mean()

  @jax.jit
  def one(values, valid, counts):
    targets = Targets(values, valid)
    weights = losses.normalised(targets, counts, jnp.array([1.0, 0.1]))
    hidden, head = jnp.ones((*values.shape, 4)), Head(jnp.ones((8, 4)), 8)
    return losses.fused(hidden, head, targets, weights, given, 64)

  with on(ONE):
    split = [[np.array(x[:, b : b + 1]) for x in (values, valid)] for b in range(4)]
    parts = [one(*part, valid.sum((1, 2), dtype=np.int32)) for part in split]
  sums = functools.reduce(Sums.__add__, [part[1] for part in parts])
  assert float(sum(part[0] for part in parts)) == pytest.approx(2.3, rel=1e-5)
  assert sums.count.tolist() == [200, 156]
  np.testing.assert_allclose(sums.nll / sums.count, [2, 3], rtol=1e-5)


# ------------------------------------------------------------------------ its footprint


def rows_of_logits(compiled, vocab):
  """The most rows, with the vocabulary on the other side, of any buffer."""
  shapes = re.findall(r'\b(?:f|bf|s|u|pred)\d*\[([\d,]+)\]', compiled.as_text())
  sizes = {int(np.prod([int(n) for n in shape.split(',')])) for shape in shapes}
  return max(size // vocab for size in sizes if size % vocab == 0)


@pytest.mark.parametrize('name', ['one device', 'fsdp, context, tensor'])
def test_logits_of_only_one_chunk_ever_exist(name):
  sizes = MESHES[name]
  # 1088 = 64 · 17: no other buffer has a multiple of it, or of its half.
  case, V = Case(vocab=1080, z_loss=0.01, cap=5.0, chunk=16, T=32, D=8), 1088
  arrays = case.arrays()
  with on(sizes):
    hidden, _, *rest = placed(arrays)
    table = put(np.zeros((V, case.D), np.float32), mesh.w_VD)
    compiled = jax.jit(gradients(case)).lower(hidden, table, *rest).compile()
    # One chunk's logits; the table and its gradient are smaller.
    assert rows_of_logits(compiled, V // sizes.get('tensor', 1)) == case.chunk > case.D
    if sizes is ONE:  # the plain form is caught
      simple = jax.jit(lambda h, w: jax.nn.logsumexp(h @ w.T, -1))
      whole = simple.lower(hidden, table).compile()
      assert rows_of_logits(whole, V) == case.K * case.B * case.T


# ------------------------------------------------------------------------------- config


@pytest.mark.parametrize(
  ('config', 'field'),
  [
    (losses.Config(chunk_tokens=0), 'loss.chunk_tokens'),
    (losses.Config(z_loss=-1e-4), 'loss.z_loss'),
    (losses.Config(z_loss=float('nan')), 'loss.z_loss'),
  ],
)
def test_a_senseless_loss_is_refused_by_its_field(config, field):
  losses.Config().finalize()
  with pytest.raises(ConfigError) as error:
    config.finalize()
  assert error.value.field == field
