"""Path-star: what next-token training cannot plan, and a wider horizon can (Bachmann &
Nagarajan 2024; semantics of the task in `mtpjax/data/tasks.py`).

  python -m mtpjax.train --config=configs/papers/path_star.py:parallel

A graph of two paths of three labels; the answer's second label has to be planned. By
`:ntp`, next token alone; `:parallel`, two of Meta's heads; `:sequential`, a DeepSeek-V3
module; `:order`, token order; `:bag`, future bag of words. Hardware: 2 CPU cores. Time:
under 8 minutes each. Expected: `:ntp` answers half of the graphs and stays there; the
others nearly all within 500 steps. `:tiny` takes seconds and shows only that
everything runs.
"""

from typing import Literal

from mtpjax import acceptance, checkpoint, config, heldout, optimizers, schedules
from mtpjax.data import batches, tasks
from mtpjax.drafters import parallel, sequential
from mtpjax.models import trunk
from mtpjax.objectives import bag, token_order


def get_config(
  arg: Literal['', 'ntp', 'parallel', 'sequential', 'order', 'bag', 'tiny'] = '',
) -> config.Config:
  task = tasks.PathStar(paths=2, length=3, labels=10)
  if arg == 'tiny':
    task.heldout = 64
  weight = schedules.Constant(1.0)
  c = config.Config(
    name=f'path_star-{arg}' if arg else 'path_star',
    steps=4000 if arg == 'ntp' else 1500,
    log_every=50,
    data=batches.Config(source=task, length=task.size, batch=256),
    # Positions as in the paper's GPT-2: with rotary ones, for which "the label before
    # the goal" is a single head, next-token training finds paths of three too.
    trunk=trunk.Config(
      width=64,
      layers=3,
      heads=2,
      vocab_multiple=1,
      learned_positions=32,
      remat='none',
    ),
    optimizer=optimizers.AdamW(
      rate=schedules.WarmupConstant(peak=3e-3, warmup=100), weight_decay=0.01
    ),
    checkpoint=checkpoint.Config(every=1000),
    evaluation=heldout.Config(every=250),
    decode=acceptance.Config(prompts=64, tokens=task.length),
  )
  if arg in ('', 'parallel', 'tiny'):
    c.drafter = parallel.Config(depth=1, weight=weight)
  elif arg == 'sequential':
    c.drafter = sequential.Config(depth=1, weight=weight)
  elif arg == 'order':
    c.objectives = (token_order.Config(window=task.length, weight=weight),)
  elif arg == 'bag':
    c.objectives = (bag.Config(window=task.length, weight=weight),)
  if arg == 'tiny':
    c.steps, c.log_every, c.data.batch = 20, 5, 32
    c.optimizer.rate.warmup, c.evaluation.every, c.checkpoint.every = 5, 10, 10
  return c
