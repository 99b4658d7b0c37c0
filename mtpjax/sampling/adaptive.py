"""How many tokens a row should draft, from how its own drafts have fared.

Only judged drafts count: the length of a draft is fixed before its tokens are drawn, so
that every rule stays exact.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mtpjax.models.attention import Leaf

# What a row begins with, and goes back to while it drafts nothing, so that it tries
# again: as if it had seen this many drafts, this share of them right.
PRIOR, BELIEF = 2.0, 0.8
MEMORY = 0.9  # of earlier rounds, a round


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pace:
  """Drafts that were judged and that were accepted, the last rounds most: [B]."""

  judged: Leaf
  accepted: Leaf

  def after(self, count_B: Int[Array, ' B'], accepted_B: Int[Array, ' B']) -> Pace:
    """Once more, with so many proposed and accepted: none is judged after a refusal."""
    judged = jnp.minimum(accepted_B + 1, count_B)
    return Pace(
      MEMORY * self.judged + judged.astype(jnp.float32),
      MEMORY * self.accepted + accepted_B.astype(jnp.float32),
    )

  @property
  def acceptance(self) -> Float[Array, ' B']:
    """Of one draft, those before it accepted."""
    return (PRIOR * BELIEF + self.accepted) / (PRIOR + self.judged)


def length(
  acceptance_B: Float[Array, ' B'], cost: float, longest: int
) -> Int[Array, ' B']:
  """The draft length k with the most tokens for its time, (1 + a + … + a^k) / (1 + ck);
  the shortest of several.

  Args:
    cost: c, what one more draft costs to make and to verify, as a share of a plain
      pass.
  """
  k = jnp.arange(longest + 1)
  tokens = jnp.cumsum(acceptance_B[:, None] ** k[None], 1)
  return jnp.argmax(tokens / (1 + cost * k)[None], 1).astype(jnp.int32)


def sizes(longest: int) -> list[int]:
  """Draft lengths that are compiled for: 0, 1, 2, 4, … and the longest."""
  found = [0]
  while found[-1] < longest:
    found.append(min(max(1, 2 * found[-1]), longest))
  return found
