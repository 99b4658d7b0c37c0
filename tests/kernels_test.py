"""Attention kernels against a loop in NumPy and against XLA's, on one device and on
eight, and what is lowered for platforms that are not here.

Splash is interpreted on a CPU. What cuDNN computes is known of the same call in XLA.
"""

import functools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import ad_checkpoint
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from updates import on

from mtpjax import config as configs
from mtpjax import fields, flops, mesh, model, saved, step
from mtpjax.data import batches
from mtpjax.drafters import sequential
from mtpjax.fields import ConfigError
from mtpjax.models import attention, kernels, trunk
from mtpjax.models.attention import Rows
from mtpjax.objectives import registers

B, T, H, C = 4, 512, 4, 8
DOCUMENTS = [(100, 29, 71, 258), (512,), (1, 127, 256), (330, 2)]  # the rest is padding
ALONE = [(400,), (512,), (1,), (129,)]


def pretend(kind, platform, **sizes):
  """A mesh of devices that are not here: enough to lower for them."""
  shape = tuple(sizes.get(axis, 1) for axis in mesh.AXES)
  types = (AxisType.Explicit,) * len(mesh.AXES)
  device = AbstractDevice(kind, 1, platform)
  return jax.sharding.use_abstract_mesh(
    AbstractMesh(shape, mesh.AXES, types, abstract_device=device)
  )


TPU = functools.partial(pretend, 'TPU v5 lite', 'tpu')
GPU = functools.partial(pretend, 'NVIDIA H200', 'gpu')


def layout(documents):
  """positions and segments of rows, as the loader lays them out."""
  positions, segments = np.zeros((2, len(documents), T), np.int32)
  for b, lengths in enumerate(documents):
    for n, end in enumerate(np.cumsum(lengths)):
      s = slice(end - lengths[n], end)
      positions[b, s], segments[b, s] = np.arange(lengths[n]), n + 1
  return positions, segments


def numbers(groups):
  """q, k, v and a gradient of the output, which is none of padding."""
  rng = np.random.default_rng(0)
  q, k, v, do = (
    rng.normal(size=(B, T, n, C)).astype(np.float32) for n in (H, groups, groups, H)
  )
  return q * 2, k, v, do


def transcription(documents, q, k, v, do, window=0, cap=None):
  """(output, (dq, dk, dv)), one head of one document at a time."""
  q, k, v, do = (x.astype(np.float64) for x in (q, k, v, do))
  out, dq, dk, dv = (
    np.zeros_like(q),
    np.zeros_like(q),
    np.zeros_like(k),
    np.zeros_like(v),
  )
  for b, lengths in enumerate(documents):
    for n, end in enumerate(np.cumsum(lengths)):
      s = slice(end - lengths[n], end)
      i = np.arange(lengths[n])
      seen = i[None] <= i[:, None]
      if window:
        seen &= i[:, None] - i[None] < window
      for h in range(H):
        g = h * k.shape[2] // H
        score = q[b, s, h] @ k[b, s, g].T / math.sqrt(C)
        slope = np.ones_like(score)
        if cap is not None:
          slope = 1 - np.tanh(score / cap) ** 2
          score = cap * np.tanh(score / cap)
        p = np.where(seen, np.exp(score), 0)
        p /= p.sum(1, keepdims=True)
        out[b, s, h] = p @ v[b, s, g]
        dv[b, s, g] += p.T @ do[b, s, h]
        dp = do[b, s, h] @ v[b, s, g].T
        ds = p * (dp - (dp * p).sum(1, keepdims=True)) * slope / math.sqrt(C)
        dq[b, s, h] = ds @ k[b, s, g]
        dk[b, s, g] += ds.T @ q[b, s, h]
  return out, (dq, dk, dv)


def put(x, spec):
  return jax.device_put(x, jax.NamedSharding(jax.sharding.get_mesh(), spec))


def computed(compute, documents, q, k, v, do):
  """(output, (dq, dk, dv)) of `compute(q, k, v, rows)` on the present mesh."""
  positions, segments = (put(x, mesh.ids_BT) for x in layout(documents))
  rows = Rows(positions, segments, packed=documents is not ALONE)
  keys = P(mesh.BATCH, 'context', mesh.heads_axis(k.shape[2]), None)
  arrays = put(q, mesh.act_BTHC), put(k, keys), put(v, keys)

  @jax.jit
  def run(q, k, v, do, rows):
    out, back = jax.vjp(lambda *x: compute(*x, rows), q, k, v)
    return out, back(do)

  return jax.device_get(run(*arrays, put(do, mesh.act_BTHC), rows))


def by_splash(window, cap):
  return lambda q, k, v, rows: kernels.splash(q, k, v, rows.segments, window, cap)


def by_xla(window, cap):
  def compute(q, k, v, rows):
    seen = attention.visibility(rows, rows.whole(), window)
    return attention.attend(q, k, v, seen, cap)

  return compute


def by_dot_product(window):
  def compute(q, k, v, rows):
    segments = rows.segments if rows.packed else None
    return kernels.dot_product(q, k, v, segments, window, 'xla')

  return compute


def check(compute, documents, groups, window, cap):
  q, k, v, do = numbers(groups)
  do[layout(documents)[1] == 0] = 0
  out, grads = computed(compute, documents, q, k, v, do)
  want, slopes = transcription(documents, q, k, v, do, window, cap)
  real = layout(documents)[1] > 0
  np.testing.assert_allclose(out[real], want[real], atol=2e-6 * np.abs(want).max())
  for got, slope in zip(grads, slopes, strict=True):
    np.testing.assert_allclose(got, slope, atol=5e-6 * np.abs(slope).max())
  assert np.all(np.isfinite(out))


@pytest.fixture
def small_blocks(monkeypatch):
  """Four blocks of keys a row, two of queries in each of two parts of time: blocks are
  skipped and revisited, and counted within a part."""
  monkeypatch.setattr(kernels, 'LARGEST', kernels.BLOCK)


MESHES = {
  'one device': {},
  'batch, context, tensor': {'fsdp': 2, 'context': 2, 'tensor': 2},
  'tensor': {'replica': 2, 'tensor': 4},  # G = 2 does not divide over it
}
CASES = {'plain': (0, None), 'window, softcap': (40, 1.5)}


@pytest.mark.parametrize(
  ('sizes', 'case'),
  [
    ('one device', 'plain'),
    ('batch, context, tensor', 'plain'),
    ('batch, context, tensor', 'window, softcap'),
    ('tensor', 'window, softcap'),
  ],
)
def test_splash_is_the_loop_over_documents_and_so_are_its_gradients(
  sizes, case, small_blocks
):
  with on(**MESHES[sizes]):
    check(by_splash(*CASES[case]), DOCUMENTS, 2, *CASES[case])


def test_one_block_of_a_single_group_is_the_loop_too():
  with on():
    check(by_splash(200, None), DOCUMENTS, 1, 200, None)


@pytest.mark.parametrize('case', CASES.values(), ids=CASES)
def test_xla_is_the_loop_and_its_padding_is_finite(case):
  with on():
    check(by_xla(*case), DOCUMENTS, 2, *case)


@pytest.mark.parametrize(
  ('sizes', 'documents', 'window'),
  [
    ('one device', DOCUMENTS, 0),
    ('tensor', DOCUMENTS, 40),
    ('one device', ALONE, 40),
    ('tensor', ALONE, 0),
  ],
  ids=['packed', 'packed, 8', 'alone', 'alone, 8'],
)
def test_the_call_that_cudnn_gets_is_the_loop_in_xla(sizes, documents, window):
  with on(**MESHES[sizes]):
    check(by_dot_product(window), documents, 2, window, None)


def test_order_by_index_in_a_segment_is_the_rule_of_visibility():
  positions, segments = layout(DOCUMENTS)
  rows = Rows(jnp.asarray(positions), jnp.asarray(segments))
  index, real = np.arange(T), segments > 0
  same = segments[:, :, None] == segments[:, None]
  for window in (0, 1, 40, T):
    with on():
      got = np.asarray(attention.visibility(rows, rows, window))
    apart = index[:, None] - index[None]
    want = same & (apart >= 0) & (apart < (window or T))
    assert np.array_equal(got[real], want[real])
    # Padding sees all padding where its order is that of its positions, which are 0.
    assert np.array_equal(got[~real], (same & ~real[:, None])[~real])


# ------------------------------------------------------------------------- whole models


def settings(drafter=None, objectives=(), length=T, pack=True, **changes):
  sizes = {
    'vocab': 30,
    'width': 32,
    'layers': 2,
    'heads': 4,
    'kv_heads': 2,
    'ffn': 32,
    'windows': (40, 0),
    'dtype': 'float32',
    **changes,
  }
  return configs.Config(
    data=batches.Config(length=length, batch=B, shards=B, pack=pack),
    trunk=trunk.Config(**sizes),
    drafter=drafter,
    objectives=objectives,
  )


def gradients(config):
  """(a function of parameters, arrays and the step, its abstract arguments)."""
  configs.finalize(config)
  graphdef, shapes, _ = model.init(config.trunk, config.parts(), 0)

  def run(params, arrays, now):
    batch = step.to_batch(arrays, config.freeze_trunk, config.data.pack)
    total, _, grads = step.gradients(graphdef, params, batch, config, now)
    return total, grads

  kinds = {'tokens': 'int32', 'positions': 'int32', 'segments': 'int32', 'mask': 'bool'}
  over = jax.NamedSharding(jax.sharding.get_abstract_mesh(), mesh.ids_BT)
  shape = config.data.batch, config.data.length
  arrays = {n: jax.ShapeDtypeStruct(shape, k, sharding=over) for n, k in kinds.items()}
  return run, (shapes, arrays, jax.ShapeDtypeStruct((), 'int32'))


def lowered(config, platform):
  """StableHLO of loss and gradients for a platform that need not be here."""
  run, abstract = gradients(config)
  return jax.jit(run).trace(*abstract).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.slow
def test_a_model_by_splash_has_the_loss_and_gradients_of_one_by_xla(small_blocks):
  positions, segments = layout(DOCUMENTS)
  rng = np.random.default_rng(1)
  arrays = {'positions': positions, 'segments': segments, 'mask': segments > 0}
  arrays['tokens'] = rng.integers(0, 30, segments.shape).astype(np.int32)
  found = {}
  for kernel, sizes in (('xla', {}), ('splash', MESHES['batch, context, tensor'])):
    with on(**sizes):
      config = settings(sequential.Config(depth=2), attention=kernel)
      run, (shapes, *_) = gradients(config)
      values = np.random.default_rng(2)
      params = jax.tree.map(
        lambda x, draw=values: put(
          draw.normal(size=x.shape).astype(x.dtype) * 0.3, x.sharding.spec
        ),
        shapes,
      )
      inputs = {name: put(x, mesh.ids_BT) for name, x in arrays.items()}
      found[kernel] = jax.device_get(jax.jit(run)(params, inputs, jnp.int32(0)))

  def same(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())

  jax.tree.map(same, found['splash'], found['xla'])


SCORES = f'tensor<{B}x{H}x{T}x{T}xf32>'  # of every pair of rows, as XLA forms them
PHASES = ('fwd_segmented_residuals', 'dq_segmented', 'dkv_segmented')


def test_for_a_tpu_trunk_and_drafter_are_lowered_to_splash():
  with TPU(fsdp=2, tensor=2, context=2):
    config = settings(sequential.Config(), dtype='bfloat16')
    text = lowered(config, 'tpu')
    assert configs.attention(config) == 'splash'
  assert text.count('tpu_custom_call') >= 2 * len(PHASES)  # for each of two windows
  assert all(f'splash_mha_{phase}' in text for phase in PHASES)
  assert SCORES not in text


@pytest.mark.parametrize(
  ('pack', 'kind'), [(False, 'fmhaSoftmax'), (True, 'fmhaScaleBiasSoftmax')]
)
def test_for_a_gpu_the_call_is_cudnns(pack, kind, monkeypatch):
  monkeypatch.setattr(fused_attention_stablehlo, 'check_cudnn_version', lambda: 91300)
  monkeypatch.setattr(kernels, 'platform', lambda: 'gpu')
  with on(fsdp=2, tensor=2):
    config = settings(pack=pack, dtype='bfloat16', attention='cudnn')
    text = lowered(config, 'cuda')
    assert configs.attention(config) == 'cudnn'
  assert f'__cudnn${kind}"' in text or f'@__cudnn${kind}(' in text
  assert f'__cudnn${kind}Backward' in text


@pytest.mark.parametrize(
  ('parts', 'said', 'trunk_calls', 'scores'),
  [
    ({'drafter': sequential.Config(attend='rows')}, 'splash (xla in drafter)', True, T),
    (
      {'objectives': (registers.Config(),)},
      'xla (objectives[0] gives rows an order of their own)',
      False,
      2 * T,
    ),
  ],
)
def test_rows_that_no_kernel_knows_go_through_xla_and_that_is_said(
  parts, said, trunk_calls, scores
):
  with TPU():
    config = settings(**parts, windows=(0,), remat='none')
    text = lowered(config, 'tpu')
    assert configs.attention(config) == said
  assert ('tpu_custom_call' in text) == trunk_calls
  assert SCORES.replace(str(T), str(scores)) in text


@pytest.mark.parametrize(('remat', 'kept'), [('full', 0), ('dots', 2)])
def test_where_products_are_kept_so_is_what_the_kernels_gradient_needs(
  remat, kept, capsys
):
  q, k, v, _ = numbers(2)
  with on():
    positions, segments = (put(x, mesh.ids_BT) for x in layout(DOCUMENTS))
    rows = Rows(positions, segments)
    arrays = [put(x, mesh.act_BTHC) for x in (q, k, v)]
    run = jax.checkpoint(
      lambda q, k, v: by_splash(0, None)(q, k, v, rows), policy=trunk.REMAT[remat]
    )
    ad_checkpoint.print_saved_residuals(run, *arrays)
  # The output and its logarithmic sum, so that the kernel need not run forward again.
  assert capsys.readouterr().out.count('output of shard_map') == kept


def test_a_kernel_changes_no_model_flops():
  with on():
    counts = [
      flops.of_model(configs.finalize(settings(attention=kernel, pack=False)))
      for kernel in ('xla', 'splash')
    ]
  assert counts[0] == counts[1] and not counts[1].unknown


# ------------------------------------------------------------------------------ choices


@pytest.mark.parametrize(
  ('devices', 'changes', 'said'),
  [
    (on, {}, 'xla'),
    (on, {'attention': 'splash'}, 'splash (interpreted, for tests: slow)'),
    (TPU, {}, 'splash'),
    (TPU, {'attention': 'xla'}, 'xla'),
    (
      TPU,
      {'length': 200},
      'xla (splash reads rows in blocks of 128, and data.len',
    ),
    (GPU, {'pack': False, 'dtype': 'bfloat16'}, 'cudnn'),
    (GPU, {'dtype': 'bfloat16'}, 'xla (cudnn knows no documents: data.pack=False'),
    (GPU, {'pack': False}, 'xla (cudnn has no float32'),
  ],
)
def test_the_platform_chooses_and_what_it_lacks_is_said(devices, changes, said):
  with devices():
    config = configs.finalize(settings(**changes))
    assert configs.attention(config).startswith(said)


def test_a_saved_run_has_the_kernel_of_where_it_is_opened(monkeypatch):
  found = {'config': fields.to_json(settings(attention='cudnn'))}
  monkeypatch.setattr(saved, 'named', lambda: None)
  monkeypatch.setattr(saved, 'read_metadata', lambda *_: found)
  no_step = types.SimpleNamespace(FLAGS=types.SimpleNamespace(step=None))
  monkeypatch.setattr(saved, 'flags', no_step)
  assert saved.config().trunk.attention is None


@pytest.mark.parametrize(
  ('devices', 'changes', 'said'),
  [
    (on, {'attention': 'cudnn'}, 'needs an NVIDIA GPU'),
    (TPU, {'attention': 'splash', 'length': 200}, 'a multiple of 128, such as 256'),
    (
      functools.partial(TPU, context=2),
      {'attention': 'splash', 'length': 384},
      'a multiple of 256, such as 512',
    ),
    (GPU, {'attention': 'cudnn'}, "trunk.dtype='bfloat16'"),
    (GPU, {'attention': 'cudnn', 'head_width': 260}, 'trunk.head_width=260'),
    (GPU, {'attention': 'cudnn', 'attention_softcap': 5.0}, 'attention_softcap=None'),
    (GPU, {'attention': 'cudnn', 'length': 255}, '256, or no packing'),
    (functools.partial(GPU, context=2), {'attention': 'cudnn'}, 'mesh.context=1'),
  ],
)
def test_a_kernel_that_cannot_is_refused_by_name(devices, changes, said):
  changes = {'dtype': 'bfloat16', **changes}
  if said.startswith('trunk.dtype'):
    changes['dtype'] = 'float32'
  with devices(), pytest.raises(ConfigError) as error:
    configs.finalize(settings(**changes))
  assert error.value.field == 'trunk.attention' and said in str(error.value)
  assert "or trunk.attention='xla'" in error.value.fix
