"""The lesson's table: a depth-1 module against a parallel head, on 18 lines of Pushkin.

  python -m mtpjax.train --config=configs/lukomorye.py:sequential
  python -m mtpjax.train --config=configs/lukomorye.py:parallel

The prologue of "Ruslan and Lyudmila" by heart, a character a token, then 50 characters
after "Там ". Hardware: 2 CPU cores. Time: under a minute. Expected: the loss starts
near ln 45 = 3.81; the module is right 96 times in 100 or more, the head at most half as
often. The head is a matrix on what the trunk holds for its next token and does not
change the trunk. One that the trunk learns with (`--config.drafter.detach=`) soon knows
a text by heart as well as the module does. `:tiny` takes seconds.
"""

from pathlib import Path
from typing import Literal

from mtpjax import acceptance, checkpoint, config, optimizers, schedules
from mtpjax.data import batches, sources, tokenizer
from mtpjax.drafters import parallel, sequential
from mtpjax.models import trunk

TEXT = Path(__file__).resolve().with_name('lukomorye.txt')


def get_config(
  arg: Literal['', 'sequential', 'parallel', 'tiny'] = '',
) -> config.Config:
  weight = schedules.Constant(0.3)
  module = sequential.Config(depth=1, weight=weight)
  head = parallel.Config(depth=1, form='linear', detach=('hidden',), weight=weight)
  c = config.Config(
    name=f'lukomorye-{arg}' if arg else 'lukomorye',
    steps=150,
    log_every=1,
    data=batches.Config(
      source=sources.Windows(sources.Text(files=(str(TEXT),)), size=64),
      tokenizer=tokenizer.Characters.Config(),
      length=64,
      batch=32,
    ),
    trunk=trunk.Config(width=64, layers=2, heads=4, vocab_multiple=1, remat='none'),
    drafter=head if arg == 'parallel' else module,
    optimizer=optimizers.AdamW(
      rate=schedules.WarmupCosine(peak=3e-3, warmup=0, last=1.0)
    ),
    checkpoint=checkpoint.Config(every=100),
    decode=acceptance.Config(text='Там ', tokens=50, prompts=0),
  )
  if arg == 'tiny':
    c.steps, c.checkpoint.every = 20, 10
  return c
