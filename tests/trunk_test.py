"""The trunk against a transcription in NumPy that knows one document and one head."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from updates import on

from mtpjax import losses, mesh
from mtpjax.fields import ConfigError
from mtpjax.models.attention import Rows
from mtpjax.models.trunk import Config, Needs

T = 16
DOCUMENTS = [(7, 5), (16,), (1, 1, 14), (3, 9)]  # lengths by row; what is left is fill


def every_option(**changes):
  """Five layers of a pattern of two, with everything on that can be."""
  options = {
    'vocab': 30,
    'vocab_multiple': 8,
    'width': 16,
    'layers': 5,
    'heads': 4,
    'kv_heads': 2,
    'head_width': 6,
    'ffn': 24,
    'tied': True,
    'qk_norm': True,
    'qkv_bias': True,
    'windows': (3, 0),
    'attention_softcap': 2.0,
    'logit_softcap': 4.0,
    'rope_theta': 100.0,
    'remat': 'none',
    'dtype': 'float64',
    'param_dtype': 'float64',
  }
  config = Config(**{**options, **changes})
  config.finalize()
  return config


def plain(**changes):
  off = dict.fromkeys(('tied', 'qk_norm', 'qkv_bias'), False)
  caps = dict.fromkeys(('attention_softcap', 'logit_softcap', 'kv_heads'))
  return every_option(**{**off, **caps, 'windows': (0,), 'layers': 2, **changes})


# ---------------------------------------------------------------- the same, transcribed


def rms_norm(x, gain, epsilon=1e-6):
  return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + epsilon) * gain


def rotate(x, position, theta):
  """One head's vector, its two halves paired."""
  half = len(x) // 2
  y = np.zeros_like(x)
  for n in range(half):
    angle = position * theta ** (-n / half)
    y[n] = x[n] * math.cos(angle) - x[n + half] * math.sin(angle)
    y[n + half] = x[n + half] * math.cos(angle) + x[n] * math.sin(angle)
  return y


def cap(x, at):
  return x if at is None else at * np.tanh(x / at)


def heads(w, h, name, config):
  """[T, N, C]: projection, bias, norm and positions, in this order."""
  x = np.einsum('td,dnc->tnc', h, w[f'w_{name}'])
  if config.qkv_bias:
    x = x + w[f'bias_{name}']
  if name == 'value':
    return x
  if config.qk_norm:
    x = rms_norm(x, w[f'gain_{name}'])
  if config.learned_positions is not None:
    return x
  rows = [[rotate(v, i, config.rope_theta) for v in row] for i, row in enumerate(x)]
  return np.array(rows)


def attention(q, k, v, window, config):
  """[T, H, C], one query of one head at a time."""
  out = np.zeros_like(q)
  for i, h in np.ndindex(q.shape[:2]):
    g = h * k.shape[1] // q.shape[1]
    first = max(0, i + 1 - window) if window else 0
    score = k[first : i + 1, g] @ q[i, h] / math.sqrt(q.shape[2])
    p = np.exp(cap(score, config.attention_softcap))
    out[i, h] = p / p.sum() @ v[first : i + 1, g]
  return out


def transcription(w, tokens, config):
  """(streams after 0..L layers, keys and values by layer, logits) of one document."""
  x = w['embedding'][tokens]
  if config.learned_positions is not None:
    x = x + w['places'][: len(x)]
  streams, keys = [x], []
  for n in range(config.layers):
    b = {name: stack[n] for name, stack in w['blocks'].items()}
    h = rms_norm(x, b['gain_attention'])
    q, k, v = (heads(b, h, name, config) for name in ('query', 'key', 'value'))
    o = attention(q, k, v, config.windows[n % len(config.windows)], config)
    x = x + np.einsum('thc,hcd->td', o, b['w_mix'])
    h = rms_norm(x, b['gain_ffn'])
    gate = h @ b['w_gate']
    x = x + (gate / (1 + np.exp(-gate)) * (h @ b['w_up'])) @ b['w_down']
    streams.append(x)
    keys.append((k, v))
  table = w['embedding' if config.tied else 'unembedding']
  logits = cap(
    rms_norm(x, w['gain_final']) @ table[: config.vocab].T, config.logit_softcap
  )
  return streams, keys, logits


# ------------------------------------------------------------------------------ helpers


def put(x, spec=mesh.ids_BT):
  return jax.device_put(x, jax.NamedSharding(jax.sharding.get_mesh(), spec))


def build(config):
  """(graphdef, the shapes of its parameters), no value computed."""

  def make(key):
    return config.build(nnx.Rngs(params=key))

  key = jax.random.key(0)
  shapes = jax.eval_shape(lambda key: nnx.to_pure_dict(nnx.state(make(key))), key)
  return nnx.graphdef(nnx.eval_shape(make, key)), shapes


def random_like(shapes):
  """Gains around one, biases and matrices around zero; the same on every mesh."""
  rng = np.random.default_rng(0)

  def one(path, shape):
    value = rng.normal(size=shape.shape) * 0.3 + path[-1].key.startswith('gain')
    return put(value.astype(shape.dtype), shape.sharding.spec)

  return jax.tree_util.tree_map_with_path(one, shapes)


def packed():
  """tokens, and the rows they stand in."""
  tokens, positions, segments = (np.zeros((len(DOCUMENTS), T), np.int32) for _ in '123')
  tokens[:] = np.random.default_rng(1).integers(0, 30, tokens.shape)
  for b, s, n in spans():
    positions[b, s], segments[b, s] = np.arange(s.stop - s.start), n + 1
  return put(tokens), Rows(put(positions), put(segments))


def spans():
  """(row, slice, number) of each document."""
  for b, lengths in enumerate(DOCUMENTS):
    for n, end in enumerate(np.cumsum(lengths)):
      yield b, slice(end - lengths[n], end), n


def forward(config, needs):
  """(parameters, output, logits) on the present mesh, as NumPy arrays."""
  graphdef, shapes = build(config)
  params = random_like(shapes)

  @jax.jit
  def run(params, tokens, rows):
    made = nnx.merge(graphdef, params)
    out = made(tokens, rows, needs)
    return out, losses.head_logits(made.final_norm(out.hidden), made.head())

  return jax.device_get((params, *run(params, *packed())))


def check(config, tolerance, taps=(), kv_layers=()):
  w, out, logits = forward(config, Needs(taps=taps, kv_layers=kv_layers))
  assert set(out.taps) == set(taps) and set(out.keys) == set(kv_layers)
  tokens = np.asarray(packed()[0])

  def same(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max())

  for b, s, _ in spans():  # each document alone
    streams, keys, want = transcription(w, tokens[b, s], config)
    same(out.hidden[b, s], streams[-1])
    same(logits[b, s, : config.vocab], want)
    for n in taps:
      same(out.taps[n][b, s], streams[n])
    for n in kv_layers:
      same(out.keys[n][0][b, s], keys[n][0])
      same(out.keys[n][1][b, s], keys[n][1])
  assert np.all(np.isfinite(out.hidden)) and np.all(logits[..., config.vocab :] < -1e29)


# -------------------------------------------------------------------------------- tests

MESHES = {
  'one device': {},
  'fsdp, tensor': {'fsdp': 2, 'tensor': 4},
  'fsdp, context, tensor': {'fsdp': 2, 'context': 2, 'tensor': 2},
  'replica, expert, tensor': {'replica': 2, 'expert': 2, 'tensor': 2},
}


@pytest.mark.parametrize('sizes', MESHES.values(), ids=MESHES)
def test_packed_rows_are_the_transcription_of_each_document(sizes):
  with jax.enable_x64(True), on(**sizes):
    check(every_option(), 1e-10, taps=(0, 2, 5), kv_layers=(1, 4))


def test_a_plain_trunk_is_its_transcription():
  with jax.enable_x64(True), on():
    check(plain(), 1e-10, taps=(1,))


@pytest.mark.parametrize('sizes', [{}, MESHES['fsdp, context, tensor']], ids=['1', '8'])
def test_learned_positions_are_added_once_and_nothing_turns(sizes):
  with jax.enable_x64(True), on(**sizes):
    check(plain(learned_positions=T), 1e-10, taps=(0,), kv_layers=(1,))


def test_one_layer_of_a_longer_pattern_in_float32_is_its_transcription():
  with on():
    kind = {'dtype': 'float32', 'param_dtype': 'float32'}
    check(plain(layers=1, windows=(2, 0, 0), kv_heads=1, **kind), 1e-5)


NEEDS = Needs(taps=(1, 2), kv_layers=(0,))


def objective(config, needs=NEEDS):
  """(params, batch) -> a number that everything needed has a part in."""
  graphdef, shapes = build(config)

  def run(params, tokens, rows):
    out = nnx.merge(graphdef, params)(tokens, rows, needs)
    parts = jax.tree.leaves(out)
    return sum(jnp.mean(jnp.sin(x * (n + 1))) for n, x in enumerate(parts))

  return jax.jit(jax.value_and_grad(run)), random_like(shapes)


@pytest.fixture(scope='module')
def plain_gradient():
  """((value, gradient) of three layers without remat, slope along `way`, way)."""
  with jax.enable_x64(True), on():
    run, params = objective(every_option(layers=3))
    rng, step, batch = np.random.default_rng(2), 1e-6, packed()
    way = jax.tree.map(lambda p: rng.normal(size=p.shape), params)

    def moved(by):
      return float(run(jax.tree.map(lambda p, d: p + by * d, params, way), *batch)[0])

    slope = (moved(step) - moved(-step)) / (2 * step)
    return jax.device_get(run(params, *batch)), slope, way


def test_the_gradient_is_the_slope(plain_gradient):
  (_, grads), slope, way = plain_gradient
  pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(way), strict=True)
  assert sum(np.sum(g * d) for g, d in pairs) == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize(
  'remat', ['full', pytest.param('dots', marks=pytest.mark.slow)]
)
def test_remat_changes_no_gradient(remat, plain_gradient):
  with jax.enable_x64(True), on():
    run, params = objective(every_option(layers=3, remat=remat))
    got = jax.device_get(run(params, *packed()))
  close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12)
  jax.tree.map(close, got, plain_gradient[0])


def test_taps_cost_their_own_memory_and_not_that_of_every_layer():
  config = plain(layers=12, remat='full', dtype='float32', param_dtype='float32')
  with on():
    temporary = {}
    for taps in ((), (3, 6, 9)):
      run, params = objective(config, Needs(taps=taps))
      ids = put(np.zeros((8, 64), np.int32))
      compiled = run.lower(params, ids, Rows(ids, ids)).compile()
      memory = compiled.memory_analysis()
      assert memory is not None
      temporary[taps] = memory.temp_size_in_bytes
  stream = 8 * 64 * config.width * 4
  # A stream a tap; kept by every layer it were 36.
  assert temporary[3, 6, 9] - temporary[()] < 6 * stream


def test_the_sizes_that_follow_from_others_are_filled_in():
  config = Config(width=96, heads=6)
  config.finalize(vocab=70)
  assert (config.vocab, config.kv_heads, config.head_width) == (70, 6, 16)
  assert (config.ffn, config.padded_vocab) == (256, 128)
  assert [Config(windows=(4, 0)).window(n) for n in range(3)] == [4, 0, 4]


@pytest.mark.parametrize(
  ('changes', 'field'),
  [
    ({'width': 0}, 'width'),
    ({'heads': 3}, 'heads'),
    ({'kv_heads': 3}, 'kv_heads'),
    ({'head_width': 5}, 'head_width'),
    ({'vocab': 10}, 'vocab'),
    ({'windows': ()}, 'windows'),
    ({'windows': (-1,)}, 'windows'),
    ({'logit_softcap': 0.0}, 'logit_softcap'),
  ],
)
def test_a_trunk_that_cannot_be_built_is_refused_by_its_field(changes, field):
  with pytest.raises(ConfigError) as error:
    Config(**{'width': 16, 'heads': 4, **changes}).finalize(vocab=30)
  assert error.value.field == f'trunk.{field}'
