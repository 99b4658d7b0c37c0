"""The model's parts once more, in NumPy and float64: one row, one head at a time."""

import zlib

import jax
import numpy as np


def widen(tree):
  return jax.tree.map(lambda x: np.asarray(x, np.float64), jax.device_get(tree))


def filled(abstract, seed=0, plain=False):
  """Parameters for these shapes; no gain is one and no bias zero, so that all matter.

  Much quicker than compiling a model's own initialisation, and the same for a
  parameter whatever else there is. `plain`: gains are one.
  """

  def one(path, x):
    name = path[-1].key
    number = zlib.crc32(jax.tree_util.keystr(path).encode())
    rng = np.random.default_rng([seed, number])
    if name.startswith(('gain', 'bias')):
      value = rng.uniform(0.4, 1.4, x.shape) * rng.choice([-1, 1], x.shape)
      value = np.full(x.shape, float(name.startswith('gain'))) if plain else value
    elif name.startswith('w_'):
      value = rng.normal(size=x.shape) * 0.25
    else:
      value = rng.normal(size=x.shape) * 0.5
    sharding = jax.NamedSharding(jax.sharding.get_mesh(), x.sharding.spec)
    return jax.device_put(value.astype(x.dtype), sharding)

  return jax.tree_util.tree_map_with_path(one, abstract)


def at(w, n):
  """Layer, depth or module `n` of stacked arrays."""
  return jax.tree.map(lambda x: x[n], w)


def norm(x, gain, epsilon=1e-6):
  return x / np.sqrt(np.mean(x * x) + epsilon) * gain


def rope(x, position, theta):
  """x: [C]."""
  half = len(x) // 2
  turned = np.empty_like(x)
  for c in range(half):
    angle = position * theta ** (-c / half)
    a, b = x[c], x[c + half]
    turned[c] = a * np.cos(angle) - b * np.sin(angle)
    turned[c + half] = b * np.cos(angle) + a * np.sin(angle)
  return turned


def project(w, x, position, config, names=('query', 'key', 'value')):
  """Queries [H, C], keys and values [G, C] of one row of the residual stream."""
  h, out = norm(x, w['gain_attention']), []
  for name in names:
    heads = []
    for n in range(w[f'w_{name}'].shape[1]):
      y = h @ w[f'w_{name}'][:, n]
      if config.qkv_bias:
        y = y + w[f'bias_{name}'][n]
      if name != 'value':
        if config.qk_norm:
          y = norm(y, w[f'gain_{name}'])
        if config.learned_positions is None:
          y = rope(y, position, config.rope_theta)
      heads.append(y)
    out.append(np.stack(heads))
  return out


def look(q, keys, values, cap=None):
  """One query [H, C] over a list of keys [G, C]."""
  H, C = q.shape
  out = np.zeros_like(q)
  for head in range(H):
    group = head * len(keys[0]) // H
    scores = np.array([q[head] @ k[group] for k in keys]) * C**-0.5
    if cap is not None:
      scores = cap * np.tanh(scores / cap)
    p = np.exp(scores - scores.max())
    for weight, v in zip(p / p.sum(), values, strict=True):
      out[head] += weight * v[group]
  return out


def swiglu(w, h):
  gate = h @ w['w_gate']
  return (h @ w['w_up'] * gate / (1 + np.exp(-gate))) @ w['w_down']


def finish(w, x, o):
  """The rest of a block: `o` is what attention saw."""
  x = x + np.einsum('HC,HCD->D', o, w['w_mix'])
  return x + swiglu(w, norm(x, w['gain_ffn']))


def block(w, xs, config, window):
  """One document's rows, in order, positions from 0."""
  rows = [project(w, x, i, config) for i, x in enumerate(xs)]
  out = []
  for i, x in enumerate(xs):
    first = max(0, i - window + 1) if window else 0
    _, keys, values = zip(*rows[first : i + 1], strict=True)
    out.append(finish(w, x, look(rows[i][0], keys, values, config.attention_softcap)))
  return out


def documents(segments_T):
  """Where each document of one row is: its indices."""
  for segment in sorted(set(segments_T.tolist()) - {0}):
    yield np.flatnonzero(segments_T == segment)


def log_softmax(h, w_VD, vocab, cap=None):
  z = h @ w_VD[:vocab].T
  if cap is not None:
    z = cap * np.tanh(z / cap)
  largest = z.max(-1, keepdims=True)
  return z - largest - np.log(np.exp(z - largest).sum(-1, keepdims=True))
