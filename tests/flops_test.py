"""Counted operations: against XLA's own count where there is no loop, and against what
the equations say by hand."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mtpjax import config as configs
from mtpjax import flops, losses, mesh, meters, model, step
from mtpjax.drafters import parallel, sequential
from mtpjax.models import trunk

B, T, V = 8, 64, 192
L, D, H, G, C, F = 3, 32, 4, 2, 8, 96


def settings(drafter=None, remat: Any = 'none', **changes):
  config = configs.Config(drafter=drafter, **changes)
  config.trunk = trunk.Config(
    vocab=V, width=D, layers=L, heads=H, kv_heads=G, ffn=F, remat=remat
  )
  config.data.length, config.data.batch = T, B
  return config


@functools.cache
def compiled(drafter: str, remat: str) -> flops.Count:
  """Of the whole train step on one device."""
  config = settings(DRAFTERS[drafter](), remat)
  with one_device():
    configs.finalize(config)
    graphdef, params, _ = model.init(config.trunk, config.parts(), 0)
    state = jax.eval_shape(lambda params: step.init_state(params, config), params)
    return flops.of_compiled(step.compile_train(graphdef, config, state))


def asked(drafter, **changes) -> flops.Count:
  config = settings(drafter, **changes)
  with one_device():
    return flops.of_model(configs.finalize(config))


def one_device():
  return jax.set_mesh(mesh.make(mesh.Config(fsdp=1), jax.devices()[:1]))


DRAFTERS = {
  'none': lambda: None,
  'sequential, shared': lambda: sequential.Config(share=True),
  'sequential, unshared': lambda: sequential.Config(share=False),
  'parallel': parallel.Config,
}

# By hand, of one token, forward: two operations for each weight that multiplies it, and
# two products of T positions by C in each head.
PROJECTIONS = 2 * (D * H * C + 2 * D * G * C + H * C * D + 3 * D * F)
BLOCK = PROJECTIONS + 2 * 2 * T * H * C
HEAD = 2 * D * V
JOIN = 2 * 2 * D * D
# The backward pass has two products for each of the forward one.
TRUNK = 3 * (L * BLOCK + HEAD)
DEPTH = {
  'sequential, shared': 3 * (BLOCK + JOIN + HEAD),
  'sequential, unshared': 3 * (BLOCK + JOIN + HEAD),
  'parallel': 3 * (BLOCK + HEAD),
}


def slow(*cases):
  return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


FIRST, *MORE = DEPTH.items()


@pytest.mark.parametrize(('drafter', 'more'), [FIRST, *slow(*MORE)])
def test_compiled_overhead_of_depth_1_is_that_of_the_equations(drafter, more):
  plain, own = compiled('none', 'none'), compiled(drafter, 'none')
  assert plain.unknown == own.unknown == {}
  assert plain.flops / (B * T) == pytest.approx(TRUNK, rel=0.003)
  assert own.flops / plain.flops - 1 == pytest.approx(more / TRUNK, rel=0.03)
  assert more / TRUNK > 0.3  # large enough to tell


@pytest.mark.parametrize('drafter', ['none', FIRST[0], *slow(['parallel'])])
def test_what_is_asked_for_is_what_is_compiled_where_nothing_is_done_twice(drafter):
  assert asked(DRAFTERS[drafter]()).flops == pytest.approx(
    compiled(drafter, 'none').flops, rel=0.003
  )


@pytest.mark.slow
def test_full_remat_compiles_another_forward_pass_of_all_blocks_but_the_head():
  again = B * T * (L + 1) * BLOCK + B * T * JOIN
  drafter = 'sequential, shared'
  own, plain = compiled(drafter, 'full').flops, compiled(drafter, 'none').flops
  # A layer's last product is nothing that its backward pass reads; the module has a
  # norm behind it.
  unneeded = B * T * L * 2 * D * F
  assert own - plain == pytest.approx(again - unneeded, rel=0.003)


@pytest.mark.parametrize('depth', [1, 3])
@pytest.mark.parametrize(
  ('drafter', 'each'),
  [
    (lambda depth: sequential.Config(depth), BLOCK + JOIN),
    (lambda depth: sequential.Config(depth, share=False), BLOCK + JOIN),
    (lambda depth: parallel.Config(depth, form='linear'), 2 * D * D),
  ],
)
def test_a_model_asks_for_each_depth_whatever_remat_and_microbatches(
  drafter, each, depth
):
  own = asked(drafter(depth), remat='full').flops / (B * T)
  assert own == pytest.approx(TRUNK + 3 * depth * (each + HEAD), rel=1e-6)


def test_a_frozen_trunk_is_asked_for_no_gradient():
  own = asked(sequential.Config(), freeze_trunk=True).flops / (B * T)
  forward, trained = L * BLOCK, 3 * (BLOCK + JOIN)
  # What joins is trained through its norms too. The head is not: logits and the
  # gradient of what they are made of, at both depths.
  heads = 2 * 2 * HEAD
  assert own == pytest.approx(forward + trained + heads, rel=1e-6)


# ----------------------------------------------------------------------------- counters


def layers(x, w, loop):
  def one(x, w):
    return jnp.tanh(x @ w), None

  if loop:
    return lax.scan(one, x, w)[0]
  for each in w:
    x, _ = one(x, each)
  return x


def test_loops_count_as_often_as_they_run_and_else_as_xla_counts():
  x, w = jnp.ones((16, 32)), jnp.ones((5, 32, 32))
  truth = 5 * 2 * 16 * 32 * 32
  by_xla = {}
  for loop in (False, True):
    run = jax.jit(functools.partial(layers, loop=loop)).lower(x, w).compile()
    assert flops.of_compiled(run) == flops.Count(truth)
    traced = jax.make_jaxpr(functools.partial(layers, loop=loop))(x, w)
    assert flops.of_jaxpr(traced.jaxpr) == flops.Count(truth)
    cost: Any = run.cost_analysis()
    by_xla[loop] = cost['flops']
  # XLA counts the elementwise too, and a loop's body once.
  assert by_xla[False] == pytest.approx(truth, rel=0.05)
  assert by_xla[True] < truth / 3


def test_batches_branches_calls_and_loops_without_end():
  a, b = jnp.ones((3, 8, 16)), jnp.ones((3, 16, 4))
  product, more = 3 * 2 * 8 * 16 * 4, 3 * 2 * 8 * 4 * 4

  def branches(a, b):
    return lax.cond(a[0, 0, 0] > 0, lambda: a @ b, lambda: (a @ b) @ jnp.ones((4, 4)))

  def endless(a, b):
    return lax.while_loop(
      lambda x: x.sum() < 1e9, lambda x: x @ jnp.ones((4, 4)), a @ b
    )

  for f, truth, unknown in (
    (jnp.matmul, product, {}),
    (branches, product + more, {}),
    (jax.checkpoint(jax.jit(jnp.matmul)), product, {}),
    (endless, product + more, {'a loop of unknown length': 1}),
  ):
    own = flops.of_jaxpr(jax.make_jaxpr(f)(a, b).jaxpr)
    assert own == flops.Count(truth, unknown), f
    run = jax.jit(f).lower(a, b).compile()
    assert flops.of_compiled(run) == flops.Count(truth, unknown), f


@pytest.mark.parametrize('groups', [1, 2])
@pytest.mark.parametrize('strides', [1, 2])
def test_convolutions_count_what_meets_the_input(strides, groups):
  x, w = jnp.ones((2, 9, 4)), jnp.ones((3, 4 // groups, 6))

  def f(x, w):
    return lax.conv_general_dilated(
      x,
      w,
      (strides,),
      [(1, 1)],
      feature_group_count=groups,
      dimension_numbers=('NWC', 'WIO', 'NWC'),
    )

  starts = range(-1, 9 - 1, strides)
  taps = sum(0 <= s + k < 9 for s in starts for k in range(3))
  truth = 2 * 2 * taps * (4 // groups) * 6
  text = (
    'ENTRY %main (x: f32[2,9,4], w: f32[3,4,6]) -> f32[2,9,6] {\n'
    '  %x = f32[2,9,4]{2,1,0:T(8,128)} parameter(0)\n'
    f'  %w = f32[3,{4 // groups},6]{{2,1,0}} parameter(1)\n'
    f'  ROOT %c = f32[2,{len(starts)},6]{{2,1,0}} convolution(%x, %w), '
    f'window={{size=3 stride={strides} pad=1_1}}, dim_labels=b0f_0io->b0f, '
    f'feature_group_count={groups}\n'
    '}\n'
  )
  assert flops.of_hlo(text).flops == truth
  whole = flops.of_jaxpr(jax.make_jaxpr(f)(x, w).jaxpr).flops
  assert whole == 2 * 2 * len(starts) * 3 * (4 // groups) * 6  # its padding too


def test_a_batched_product_as_a_tpu_writes_it():
  # Each of the 8 matrices meets its own: one tap inside, the others in the holes.
  text = (
    'ENTRY %main (a: bf16[8,16,32], b: bf16[8,32,64]) -> bf16[8,16,64] {\n'
    '  %a = bf16[8,16,32]{2,1,0} parameter(0)\n'
    '  %b = bf16[8,32,64]{2,1,0} parameter(1)\n'
    '  ROOT %c = bf16[8,16,64]{2,1,0} convolution(%a, %b), window={size=8 stride=7 '
    'pad=0_0 lhs_dilate=8}, dim_labels=0bf_0io->0bf\n'
    '}\n'
  )
  assert flops.of_hlo(text).flops == 8 * 2 * 16 * 32 * 64


def test_custom_calls_count_or_are_named():
  calls = [
    'bf16[64,48]{1,0}, s8[4096]{0}) custom-call(%a, %b), custom_call_target='
    '"__cublas$lt$matmul", backend_config={"gemm_backend_config":{'
    '"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
    '"rhs_contracting_dimensions":["0"]}}}',
    'bf16[2,64,4,8]{3,1,2,0}, u8[0]{0}) custom-call(%a, %b), custom_call_target='
    '"__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config":'
    '{"intermediate_tensor_shape":{"element_type":"BF16",'
    '"dimensions":["2","4","64","64"]}}}',
    'bf16[2,64,4,8]{3,1,2,0}, u8[0]{0}) custom-call(%a, %b), custom_call_target='
    '"__cudnn$fmhaSoftmaxBackward", backend_config={"cudnn_fmha_backend_config":'
    '{"intermediate_tensor_shape":{"dimensions":["2","4","64","64"]}}}',
    'f32[8]{0}, f32[8]{0}) custom-call(%a), custom_call_target="tpu_custom_call", '
    'frontend_attributes={kernel_metadata={\n"x":"{}"\n}}, '
    'backend_config={"custom_call_config":{"body":"","cost_estimate":'
    '{"flops":"1000","transcendentals":"0"}}}',
    'f32[8]{0}, f32[8]{0}) custom-call(%a), custom_call_target="tpu_custom_call"',
    'f32[8]{0}, s32[8]{0}) custom-call(%a), custom_call_target="TopK"',
  ]
  for kernel in ('fwd_segmented_residuals', 'dkv_no_residuals', 'dq_no_residuals'):
    calls.append(
      'f32[64,8]{0}, bf16[2,4,64,8]{0}) custom-call(%a), custom_call_target='
      '"tpu_custom_call", operand_layout_constraints={s8[1,1,1]{2,1,0}, '
      'bf16[2,4,64,8]{3,2,1,0}, bf16[2,2,64,8]{3,2,1,0}, bf16[2,2,64,8]{3,2,1,0}, '
      's32[64,128]{1,0}}, frontend_attributes={kernel_metadata={\n"x":"{}"\n}}, '
      f'metadata={{op_name="jit(step)/splash_mha_{kernel}/pallas_call"}}'
    )
  body = ''.join(f'  %c.{n} = ({call}\n' for n, call in enumerate(calls))
  text = (
    '%body (a: bf16[64,32]) -> bf16[64,32] {\n'
    '  %a = bf16[64,32]{1,0} parameter(0)\n'
    '  %b = bf16[32,48]{1,0} parameter(1)\n'
    f'{body}'
    '}\n\n'
    'ENTRY %main (x: (s32[], bf16[64,32])) -> (s32[], bf16[64,32]) {\n'
    '  %x = (s32[], bf16[64,32]{1,0}) parameter(0)\n'
    '  ROOT %w = (s32[], /*index=1*/bf16[64,32]{1,0}) while(%x), condition=%body, '
    'body=%body, backend_config={"known_trip_count":{"n":"3"}}\n'
    '}\n'
  )
  gemm, forward, backward = 2 * 64 * 32 * 48, 2, 5
  # Splash has a kernel for keys and values and one for queries: two products twice.
  splash = forward + 4 + 3
  attention = (forward + backward + splash) * 2 * (2 * 64 * 4) * 64 * 8
  each = gemm + attention + 1000
  # Body and condition are the same here.
  assert flops.of_hlo(text) == flops.Count(2 * 3 * each, {'tpu_custom_call': 2 * 3})


@pytest.mark.parametrize(('limit', 'direction'), [(5, 'LT'), (None, 'LT'), (5, 'GT')])
def test_a_loop_without_its_length_has_that_of_its_counter(limit, direction):
  number = (
    'f32[] parameter(1)' if limit is None else f's32[]{{:T(128)}} constant({limit})'
  )
  text = (
    '%body (p: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {\n'
    '  %p = (s32[]{:T(128)}, f32[8,8]{1,0:T(8,128)}) parameter(0)\n'
    '  %x = f32[8,8]{1,0} get-tuple-element(%p), index=1\n'
    '  ROOT %d = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}\n'
    '}\n\n'
    '%condition (p: (s32[], f32[8,8])) -> pred[] {\n'
    '  %p = (s32[]{:T(128)}, f32[8,8]{1,0:T(8,128)}) parameter(0)\n'
    f'  %n = {number}\n'
    '  %i = s32[]{:T(128)} get-tuple-element(%p), index=0\n'
    f'  ROOT %lt = pred[]{{:T(512)}} compare(%i, %n), direction={direction}\n'
    '}\n\n'
    'ENTRY %main (x: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {\n'
    '  %x = (s32[], f32[8,8]{1,0}) parameter(0)\n'
    '  ROOT %w = (s32[], f32[8,8]{1,0}) while(%x), condition=%condition, body=%body\n'
    '}\n'
  )
  known = limit if direction == 'LT' else None
  unknown = {} if known else {'a loop of unknown length': 1}
  assert flops.of_hlo(text) == flops.Count((known or 1) * 2 * 8**3, unknown)


# ---------------------------------------------------------------------------------- mfu


@pytest.mark.parametrize(
  ('kind', 'teraflops'),
  [
    ('TPU v4', 275),
    ('TPU v5 lite', 197),
    ('TPU v5', 459),
    ('TPU v5p', 459),
    ('TPU v6 lite', 918),
    ('NVIDIA A100-SXM4-80GB', 312),
    ('NVIDIA H100 80GB HBM3', 989),
    ('NVIDIA H100 PCIe', 756),
    ('NVIDIA H200', 989),
    ('NVIDIA H100 80GB HBM3 MIG 1g.10gb', None),
    ('cpu', None),
  ],
)
def test_peaks_are_by_the_longest_name(kind, teraflops):
  assert flops.peak(kind) == (teraflops and teraflops * 1e12)


def test_mfu_is_said_where_the_peak_is_known(monkeypatch):
  config = settings(sequential.Config(), remat='full')
  with jax.set_mesh(mesh.make(mesh.Config(fsdp=4, tensor=2))):
    configs.finalize(config)
    assert flops.full_speed(config) is None
    monkeypatch.setitem(flops.PEAK, 'cpu', 1e12)
    full = flops.full_speed(config)
  assert full is not None
  assert full == pytest.approx(8e12 / (TRUNK + DEPTH['sequential, shared']), rel=1e-6)
  clock = itertools.count(step=2.0)
  monkeypatch.setattr('time.monotonic', lambda: next(clock))
  meter, none = meters.Training(), np.zeros(1)
  sums = {'next': losses.Sums(none, none, none + 1)}
  out = {'loss': 1.0, 'grad_norm': 1.0, 'lambda': {}, 'rate': 0.1, 'sums': sums}
  assert 'mfu' not in meter.add(1, out, tokens=10**6)
  meter.full_speed = full
  line = meter.flush()
  assert line['mfu'] == pytest.approx(line['tokens_per_second'] / full)
  assert meter.mfu(2 * full) == {'mfu': 2.0}
  assert meter.mfu(None) == {}
