"""What commands say to people, from the first process alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax

from mtpjax.metrics import Progress


def say(text: str) -> None:
  if jax.process_index() == 0:
    print(text, flush=True)


def watch(items: Iterable[Any], total: int, what: str = 'batch') -> Iterator[Any]:
  """The items, with progress."""
  with Progress(total, what=what) as progress:
    for done, item in enumerate(items, 1):
      yield item
      progress.update(done)
