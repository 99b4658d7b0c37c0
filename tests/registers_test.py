"""Registers against a trunk transcribed in NumPy: one document, one row at a time."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from probes import oracle

from mtpjax import mesh, model
from mtpjax.drafters.base import Batch
from mtpjax.fields import ConfigError
from mtpjax.models import trunk as trunks
from mtpjax.models.attention import Rows
from mtpjax.objectives import registers

V, B, T = 11, 6, 10
LENGTHS = ((4, 6), (10,), (1, 3, 5), (7,), (2, 2, 6), (9, 1))
CONFIG = registers.Config(farthest=3)


def sizes():
  config = trunks.Config(
    vocab=V,
    vocab_multiple=4,
    width=8,
    layers=3,
    heads=2,
    kv_heads=1,
    ffn=12,
    qk_norm=True,
    windows=(3, 0),
    rope_theta=10.0,
    remat='none',
    dtype='float64',
    param_dtype='float64',
  )
  config.finalize()
  return config


def arrays():
  """tokens, positions, segments, mask of packed rows."""
  rng = np.random.default_rng(4)
  tokens = rng.integers(0, V, (B, T), dtype=np.int32)
  positions, segments = (np.zeros((B, T), np.int32) for _ in range(2))
  for b, row in enumerate(LENGTHS):
    start = 0
    for n, length in enumerate(row, 1):
      segments[b, start : start + length] = n
      positions[b, start : start + length] = np.arange(length)
      start += length
  return tokens, positions, segments, (rng.random((B, T)) < 0.8) & (segments > 0)


def batch(whole_path=False):
  where = jax.NamedSharding(jax.sharding.get_mesh(), mesh.ids_BT)
  tokens, positions, segments, mask = (jax.device_put(x, where) for x in arrays())
  return Batch(tokens, mask, Rows(positions, segments), whole_path=whole_path)


def on(**axes):
  config = mesh.Config(**{'fsdp': 1, **axes})
  count = int(np.prod(list(axes.values())))
  return jax.set_mesh(mesh.make(config, jax.devices()[:count]))


def inserted(key=0, whole_path=False, config=CONFIG):
  """The batch with its registers, and their targets."""

  @jax.jit
  def run(batch):
    part = registers.Registers(config, V)
    batch = part.prepare(batch, jax.random.key(key))
    return batch, part.targets(batch, jax.random.key(9))

  return jax.device_get(run(batch(whole_path)))


def distances(found):
  """d of each row."""
  gap = found.rows.positions[:, T:] - found.rows.positions[:, :T] + 1
  assert (gap == gap[:, :1]).all()
  return gap[:, 0]


# -------------------------------------------------------------------------- the layers


def finals():
  """(batch with registers, final-normed hidden [B, 2T, D], without registers [B, T, D],
  parameters)."""
  with jax.enable_x64(True), on(fsdp=1):
    config = sizes()
    graphdef, abstract, _ = model.init(config, {'registers': CONFIG}, 0)
    params = oracle.filled(abstract)

    @jax.jit
    def run(params, batch):
      whole = nnx.merge(graphdef, params)
      more, _ = model.prepare(whole, batch, jax.random.key(1))
      outs = [whole.trunk(x.tokens, x.rows) for x in (more, batch)]
      return more, *(whole.trunk.final_norm(x.hidden) for x in outs)

    return *jax.device_get(run(params, batch())), oracle.widen(params['trunk'])


def one_register(w, config, layers, i, d, x):
  """Its residual stream through all layers; `layers[n]` are the ordinary tokens' keys
  and values of layer n."""
  for n, rows in enumerate(layers):
    own = oracle.at(w['blocks'], n)
    q, k, v = oracle.project(own, x, i + d - 1, config)
    window = config.windows[n % len(config.windows)]
    first = max(0, i - window + 1) if window else 0
    keys, values = zip(*rows[first : i + 1], (k, v), strict=True)
    x = oracle.finish(own, x, oracle.look(q, keys, values))
  return oracle.norm(x, w['gain_final'])


def test_registers_and_tokens_are_those_of_a_trunk_of_one_row_at_a_time():
  found, got, without, w = finals()
  config, (tokens, _, segments, _) = sizes(), arrays()
  np.testing.assert_allclose(got[:, :T], without, rtol=0, atol=1e-13)
  d = distances(found)
  assert len(set(d)) == 3
  for b in range(B):
    for at in oracle.documents(segments[b]):
      xs = [w['embedding'][t] for t in tokens[b, at]]
      layers = []
      for n in range(config.layers):
        own = oracle.at(w['blocks'], n)
        rows = [oracle.project(own, x, i, config) for i, x in enumerate(xs)]
        layers.append([(k, v) for _, k, v in rows])
        window = config.windows[n % len(config.windows)]
        xs = oracle.block(own, xs, config, window)
      for i, (index, x) in enumerate(zip(at, xs, strict=True)):
        want = oracle.norm(x, w['gain_final'])
        np.testing.assert_allclose(got[b, index], want, atol=1e-11)
        want = one_register(w, config, layers, i, d[b], w['embedding'][V])
        np.testing.assert_allclose(got[b, T + index], want, atol=1e-11)


# -------------------------------------------------------------- targets, and what d is


@pytest.mark.parametrize('axes', [{'fsdp': 1}, {'fsdp': 2, 'context': 2}])
@pytest.mark.parametrize('whole_path', [False, True])
def test_each_register_predicts_the_token_d_ahead_of_its_own(whole_path, axes):
  with on(**axes):
    found, targets = inserted(whole_path=whole_path)
  tokens, positions, segments, mask = arrays()
  np.testing.assert_array_equal(found.tokens[:, :T], tokens)
  np.testing.assert_array_equal(found.rows.positions[:, :T], positions)
  np.testing.assert_array_equal(found.mask, np.pad(mask, ((0, 0), (0, T))))
  assert (found.tokens[:, T:] == V).all()
  assert targets.are_tokens and not targets.valid[0, :, :T].any()
  d = distances(found)
  for b, i in np.ndindex(B, T):
    j = i + d[b]
    inside = j < T and segments[b, i] == segments[b, min(j, T - 1)] != 0
    asked = inside and (mask[b, i + 1 : j + 1].all() if whole_path else mask[b, j])
    assert targets.valid[0, b, T + i] == asked
    if asked:
      assert targets.ids[0, b, T + i] == tokens[b, j]
  assert targets.valid.sum() > 5


def test_next_tokens_keep_their_targets():
  with on(fsdp=1):

    @jax.jit
    def run(batch):
      more = registers.Registers(CONFIG, V).prepare(batch, jax.random.key(0))
      return batch.targets([0]), more.targets([0])

    plain, more = jax.device_get(run(batch()))
  np.testing.assert_array_equal(
    more.valid, np.pad(plain.valid, ((0, 0),) * 2 + ((0, T),))
  )
  np.testing.assert_array_equal(more.ids[plain.valid.nonzero()], plain.ids[plain.valid])


def test_d_is_uniform_and_drawn_for_each_row_and_step():
  with on(fsdp=1):
    part = registers.Registers(dataclasses.replace(CONFIG, farthest=4), V)

    plain = batch()

    @jax.jit
    def run(key):
      rows = part.prepare(plain, key).rows
      return rows.positions[:, T] - rows.positions[:, 0] + 1

    drawn = np.array([run(jax.random.key(n)) for n in range(200)])
  counts = np.bincount(drawn.ravel(), minlength=5)
  assert counts[0] == 0 and len(counts) == 5
  expected = drawn.size / 4
  assert ((counts[1:] - expected) ** 2 / expected).sum() < 16.3  # p = .001, 3 degrees
  assert len(np.unique(drawn, axis=0)) > 100


# ------------------------------------------------------------------------------- config


@pytest.mark.parametrize(
  ('changes', 'field', 'fix'),
  [
    ({'farthest': 0}, 'f.farthest', 'use at least 1'),
    ({'depth': 2}, 'f.depth', 'set f.farthest'),
  ],
)
def test_senseless_registers_are_refused_by_their_field(changes, field, fix):
  with pytest.raises(ConfigError, match=fix) as error:
    registers.Config(**changes).finalize(sizes(), 'f')
  assert error.value.field == field


def test_registers_need_a_spare_row_of_the_table():
  trunk = trunks.Config(vocab=32, vocab_multiple=16)
  registers.Config().finalize(trunks.Config(), 'f')  # a vocabulary not known yet
  with pytest.raises(ConfigError, match='does not divide 32, such as 24') as error:
    registers.Config().finalize(trunk, 'f')
  assert error.value.field == 'trunk.vocab_multiple'
  trunk.vocab_multiple = 24
  registers.Config().finalize(trunk, 'f')


def test_registers_of_registers_are_refused():
  with on(fsdp=1), pytest.raises(ConfigError, match='leave one out'):
    part = registers.Registers(CONFIG, V)
    once = part.prepare(batch(), jax.random.key(0))
    part.prepare(once, jax.random.key(0))


def test_the_weight_is_that_of_the_paper():
  assert float(CONFIG.weight(jnp.float32(0.5))) == pytest.approx(0.3 / 0.7)
  told = CONFIG.conventions()
  assert (told['kind'], told['modules'], told['farthest']) == ('registers', 1, 3)
