"""A batch on its way, round by round as somebody asks."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from mtpjax.sampling.jobs import Generation, Job
from mtpjax.sampling.state import LIVE, State


class Run:
  """Begins with the prefill.

  Args:
    call: runs an engine's function by name on the job.
    fetch: brings its state to the host.

  Attributes:
    rows, slots: of the buffers.
    done: whether all rows had ended when it was last fetched.
  """

  def __init__(
    self, call: Callable[..., State], fetch: Callable[[State], State], job: Job
  ):
    self._call, self._fetch, self._job = call, fetch, job
    self.rows, self.slots = job.sizes
    self.done = False
    self._state = call('prefill', job.prompts, job.lengths, job.sampling)

  def go_on(self, rounds: int = 2**31 - 1) -> None:
    """So many rounds in one call of the device, or until all rows have ended."""
    self._state = self._call(
      'rounds', self._state, np.int32(rounds), self._job.sampling
    )

  def wait(self) -> None:
    """Until the device is there."""
    jax.block_until_ready(self._state)

  def fetch(self) -> Generation:
    """What there is by now."""
    host = self._fetch(self._state)
    self.done = bool((host.reason != LIVE).all())
    return self._job.generation(host)
