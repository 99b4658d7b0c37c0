"""Dense trunks from 135M to 70B in published shapes, each with one DeepSeek-V3 module,
and Meta's 7B with four parallel heads; with meshes for TPU slices and GPU nodes.

  python -m mtpjax.train --config=configs/presets.py:8b-v5p-64 --dry_run
  python -m mtpjax.train --config=configs/presets.py:1b --config.mesh.tensor=2

`:8b-v5p-64` is a size on 64 chips of a kind (Google's own v5p names count cores, twice
as many); `:8b` alone takes all devices there are, as rows of the batch. No argument is
1b. Shapes are SmolLM2's (135m, 360m), Llama 3.2's (1b, 3b), Llama 2's (7b), Llama 3's
(8b, 70b) and Qwen3's (14b, 32b). `:7b_n4` is Gloeckle et al. 2024: the trunk gives up
three layers for three more heads, so it has as many parameters as 7b. Steps are 20
tokens a parameter (Hoffmann et al. 2022). The data is what `python -m
mtpjax.data.prepare --output=data/prepared` wrote, by a tokenizer of at most the shape's
vocabulary; `--config.data.source.directory` is another place.

Hardware: as the name says; `--dry_run` takes any size on a CPU. Time: weeks for the
large ones. Expected: parameters as published, states and activations with room in the
chips' memory (both tested); none has been trained yet. `:tiny` takes seconds and shows
only that everything runs.
"""

import dataclasses
from typing import Literal, cast

from mtpjax import checkpoint, config, mesh, optimizers, schedules
from mtpjax.data import batches, prepared, sources
from mtpjax.drafters import parallel, sequential
from mtpjax.models import trunk

Size = Literal['135m', '360m', '1b', '3b', '7b', '7b_n4', '8b', '14b', '32b', '70b']


def shape(size: Size) -> trunk.Config:
  smollm2 = trunk.Config(vocab=49_152, rope_theta=1e5, norm_epsilon=1e-5, tied=True)
  llama3 = trunk.Config(vocab=128_256, rope_theta=5e5, norm_epsilon=1e-5, kv_heads=8)
  qwen3 = trunk.Config(
    vocab=151_936, rope_theta=1e6, kv_heads=8, head_width=128, qk_norm=True
  )
  new = dataclasses.replace
  match size:
    case '135m':
      return new(smollm2, width=576, layers=30, heads=9, kv_heads=3, ffn=1536)
    case '360m':
      return new(smollm2, width=960, layers=32, heads=15, kv_heads=5, ffn=2560)
    case '1b':
      return new(llama3, width=2048, layers=16, heads=32, ffn=8192, tied=True)
    case '3b':
      return new(llama3, width=3072, layers=28, heads=24, ffn=8192, tied=True)
    case '7b' | '7b_n4':
      return trunk.Config(
        vocab=32_000, norm_epsilon=1e-5, width=4096, layers=32, heads=32, ffn=11_008
      )
    case '8b':
      return new(llama3, width=4096, layers=32, heads=32, ffn=14_336)
    case '14b':
      return new(qwen3, width=5120, layers=40, heads=40, ffn=17_408)
    case '32b':
      return new(qwen3, width=5120, layers=64, heads=64, ffn=25_600)
    case '70b':
      return new(llama3, width=8192, layers=80, heads=64, ffn=28_672)


@dataclasses.dataclass
class Run:
  """Rows of a batch, tokens of a row, peak rate, steps."""

  batch: int
  length: int
  peak: float
  steps: int


RUNS: dict[Size, Run] = {
  '135m': Run(512, 2048, 3e-3, 2_600),
  '360m': Run(512, 2048, 2e-3, 7_000),
  '1b': Run(512, 4096, 1e-3, 12_000),
  '3b': Run(512, 4096, 6e-4, 31_000),
  '7b': Run(512, 4096, 3e-4, 64_000),
  '7b_n4': Run(512, 4096, 3e-4, 64_000),
  '8b': Run(512, 8192, 3e-4, 38_000),
  '14b': Run(512, 8192, 3e-4, 70_000),
  '32b': Run(1024, 8192, 2e-4, 78_000),
  '70b': Run(1024, 8192, 1.5e-4, 168_000),
}

# (replica, fsdp, tensor, microbatches). A replica of GPUs is a node or several, one of
# TPUs a slice, of v6e at most 256 chips. Tensor parallelism stays within a node.
Split = tuple[int, int, int, int]
SMALL: dict[str, Split] = {
  'v5p-8': (1, 8, 1, 4),
  'v6e-8': (1, 8, 1, 8),
  'h100-8': (1, 8, 1, 4),
  'h200-8': (1, 8, 1, 4),
}
SEVEN: dict[str, Split] = {
  'v5p-64': (1, 64, 1, 1),
  'v6e-128': (1, 128, 1, 2),
  'h100-64': (8, 8, 1, 4),
  'h200-32': (4, 8, 1, 4),
}
MESHES: dict[Size, dict[str, Split]] = {
  '135m': SMALL,
  '360m': SMALL,
  '1b': {
    'v5p-16': (1, 16, 1, 4),
    'v6e-32': (1, 32, 1, 8),
    'h100-8': (1, 8, 1, 16),
    'h200-8': (1, 8, 1, 8),
  },
  '3b': {
    'v5p-32': (1, 32, 1, 4),
    'v6e-64': (1, 64, 1, 8),
    'h100-16': (2, 8, 1, 16),
    'h200-16': (2, 8, 1, 8),
  },
  '7b': SEVEN,
  '7b_n4': SEVEN,
  '8b': {
    'v5p-64': (1, 64, 1, 4),
    'v6e-128': (1, 128, 1, 4),
    'h100-64': (8, 8, 1, 8),
    'h200-32': (4, 8, 1, 8),
  },
  '14b': {
    'v5p-128': (1, 128, 1, 2),
    'v6e-256': (1, 256, 1, 2),
    'h100-128': (4, 32, 1, 4),
    'h200-64': (4, 16, 1, 4),
  },
  '32b': {
    'v5p-256': (1, 256, 1, 2),
    'v6e-256': (1, 128, 2, 8),
    'h100-256': (4, 64, 1, 4),
    'h200-128': (4, 32, 1, 4),
  },
  '70b': {
    'v5p-512': (1, 512, 1, 2),
    'v6e-512': (2, 64, 4, 8),
    'h100-512': (8, 8, 8, 16),
    'h200-256': (4, 8, 8, 16),
  },
}


# fmt: off
def get_config(arg: Literal[
  '', 'tiny',
  '135m', '135m-v5p-8', '135m-v6e-8', '135m-h100-8', '135m-h200-8',
  '360m', '360m-v5p-8', '360m-v6e-8', '360m-h100-8', '360m-h200-8',
  '1b', '1b-v5p-16', '1b-v6e-32', '1b-h100-8', '1b-h200-8',
  '3b', '3b-v5p-32', '3b-v6e-64', '3b-h100-16', '3b-h200-16',
  '7b', '7b-v5p-64', '7b-v6e-128', '7b-h100-64', '7b-h200-32',
  '7b_n4', '7b_n4-v5p-64', '7b_n4-v6e-128', '7b_n4-h100-64', '7b_n4-h200-32',
  '8b', '8b-v5p-64', '8b-v6e-128', '8b-h100-64', '8b-h200-32',
  '14b', '14b-v5p-128', '14b-v6e-256', '14b-h100-128', '14b-h200-64',
  '32b', '32b-v5p-256', '32b-v6e-256', '32b-h100-256', '32b-h200-128',
  '70b', '70b-v5p-512', '70b-v6e-512', '70b-h100-512', '70b-h200-256',
] = '') -> config.Config:
  # fmt: on
  name, _, chips = ('1b' if arg in ('', 'tiny') else arg).partition('-')
  size = cast(Size, name)
  run = RUNS[size]
  c = config.Config(
    name=f'presets-{arg}' if arg else 'presets',
    steps=run.steps,
    data=batches.Config(
      source=prepared.Prepared('data/prepared'),
      length=run.length,
      batch=run.batch,
      shards=512,  # as many processes as may be
    ),
    trunk=shape(size),
    # λ 0.3, then 0.1.
    drafter=sequential.Config(depth=1, weight=schedules.Piecewise()),
    optimizer=optimizers.AdamW(
      rate=schedules.WarmupCosine(peak=run.peak, warmup=min(2000, run.steps // 10))
    ),
    checkpoint=checkpoint.Config(every=1000),
  )
  if size == '7b_n4':
    # All four heads weigh the same; head 1 is the next token's.
    c.drafter = parallel.Config(
      depth=3, match_parameters=True, weight=schedules.Constant(3.0)
    )
  if chips:
    replica, fsdp, tensor, c.optimizer.accumulate = MESHES[size][chips]
    c.mesh = mesh.Config(replica=replica, fsdp=fsdp, tensor=tensor)
  if arg == 'tiny':
    c.steps, c.log_every = 20, 5
    c.data = batches.Config(source=sources.Stdlib(files=20), length=64, batch=8)
    c.trunk = trunk.Config(width=64, layers=2, heads=2, kv_heads=1, tied=True)
    c.optimizer.rate.warmup, c.checkpoint.every = 5, 10
  return c
