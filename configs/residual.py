"""The quickstart's task with residual heads on the trunk's last hidden state.

  python -m mtpjax.train --config=configs/residual.py
  python -m mtpjax.train --config=configs/residual.py:medusa

`:medusa` has an unembedding a head, as Cai et al. (2024) publish them; the heads of the
first command share the trunk's. Either starts as the trunk's own next-byte head.

Hardware: 2 CPU cores. Time: about 5 minutes. Expected: on held-out files 1.31 nats a
byte for the next byte, then 2.04, 2.44 and 2.67, and 2.3 tokens a pass; `:medusa` 1.36,
2.14, 2.49, 2.70 and 2.3. `:tiny` takes seconds and shows only that everything runs.
"""

from typing import Literal

from mtpjax import checkpoint, config, optimizers, schedules
from mtpjax.data import batches, sources
from mtpjax.drafters import residual
from mtpjax.models import trunk


def get_config(arg: Literal['', 'medusa', 'tiny'] = '') -> config.Config:
  weight = schedules.Piecewise()
  heads = residual.Config(depth=3, weight=weight)
  if arg == 'medusa':
    heads = residual.Config(depth=3, form='medusa', weight=weight)
  c = config.Config(
    name=f'residual-{arg}' if arg else 'residual',
    steps=800,
    data=batches.Config(source=sources.Stdlib(), length=128, batch=16),
    trunk=trunk.Config(
      width=128, layers=4, heads=4, kv_heads=2, qk_norm=True, remat='none'
    ),
    drafter=heads,
    optimizer=optimizers.AdamW(rate=schedules.WarmupCosine(peak=5e-3, warmup=100)),
    checkpoint=checkpoint.Config(every=250),
  )
  if arg == 'tiny':
    c.steps, c.log_every = 20, 5
    c.data = batches.Config(source=sources.Stdlib(files=20), length=64, batch=8)
    c.trunk = trunk.Config(width=64, layers=2, heads=2)
    c.drafter = residual.Config(depth=2, dropout=0.1, own_head=True)
    c.optimizer.rate.warmup, c.checkpoint.every = 5, 10
  return c
