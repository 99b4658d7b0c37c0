"""The quickstart's task with Meta's parallel heads (Gloeckle et al. 2024).

  python -m mtpjax.train --config=configs/parallel.py

Hardware: 2 CPU cores. Time: about 4 minutes. Expected: on held-out files 1.48 nats a
byte for the next byte, then 2.06, 2.41 and 2.62, each head having to guess what the
chained module of the quickstart reads. `:linear`, `:causal` and `:anticausal` are the
paper's other heads. `:tiny` takes seconds.
"""

from typing import Literal

from mtpjax import checkpoint, config, optimizers, schedules
from mtpjax.data import batches, sources
from mtpjax.drafters import parallel
from mtpjax.models import trunk


def get_config(
  arg: Literal['', 'linear', 'causal', 'anticausal', 'tiny'] = '',
) -> config.Config:
  c = config.Config(
    name=f'parallel-{arg}' if arg else 'parallel',
    steps=800,
    data=batches.Config(source=sources.Stdlib(), length=128, batch=16),
    trunk=trunk.Config(
      width=128, layers=7, heads=4, kv_heads=2, qk_norm=True, remat='none'
    ),
    # The trunk gives up three of its seven layers for the three extra heads. All heads
    # weigh the same in the paper: λ is their number.
    drafter=parallel.Config(
      depth=3, match_parameters=True, weight=schedules.Constant(3.0)
    ),
    optimizer=optimizers.AdamW(rate=schedules.WarmupCosine(peak=5e-3, warmup=100)),
    checkpoint=checkpoint.Config(every=250),
  )
  if arg in ('linear', 'causal', 'anticausal'):
    # Only a head that is a layer can take the place of one.
    c.drafter = parallel.Config(
      depth=3,
      form=arg,
      match_parameters=arg == 'causal',
      weight=schedules.Constant(3.0),
    )
  if arg == 'tiny':
    c.steps, c.log_every = 20, 5
    c.data = batches.Config(source=sources.Stdlib(files=20), length=64, batch=8)
    c.trunk = trunk.Config(width=64, layers=4, heads=2)
    c.drafter = parallel.Config(depth=2, match_parameters=True)
    c.optimizer.rate.warmup, c.checkpoint.every = 5, 10
  return c
