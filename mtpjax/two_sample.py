"""Whether two ways to draw tokens draw from one distribution: a test of homogeneity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

LEAST = 5.0  # draws expected of a cell in either sample; rarer cells are pooled
DOUBT = 1e-3  # a p-value below is called a difference


def compare(
  ours: Sequence[Int[np.ndarray, 'N L']], theirs: Sequence[Int[np.ndarray, 'M L']]
) -> dict[str, Any]:
  """Draws of L tokens after each of several prompts, two samples of each.

  Every position's tokens and every pair of neighbours are compared, after all prompts
  together; the least p-value counts, times the number of tests (Bonferroni).

  Returns: n of either sample, p (adjusted), same (p is not below DOUBT), and the tests:
    what, chi2, dof, p (as it is).
  """
  length = ours[0].shape[1]
  high = 2 + max(int(x.max()) for x in (*ours, *theirs))
  readings = {f'token {j + 1}': [j] for j in range(length)}
  readings |= {f'tokens {j + 1}, {j + 2}': [j, j + 1] for j in range(length - 1)}
  tests = []
  for what, places in readings.items():
    total = np.zeros(2)
    for a, b in zip(ours, theirs, strict=True):
      # One number a cell; -1 is where a text had ended.
      weights = high ** np.arange(len(places))
      total += homogeneity(*((x[:, places] + 1) @ weights for x in (a, b)))
    chi2, dof = float(total[0]), int(total[1])
    tests.append({'what': what, 'chi2': chi2, 'dof': dof, 'p': p_value(chi2, dof)})
  p = min(1.0, len(tests) * min(test['p'] for test in tests))
  n = [sum(len(x) for x in sample) for sample in (ours, theirs)]
  return {'n': n, 'p': p, 'same': p >= DOUBT, 'tests': tests}


def homogeneity(
  ours: Int[np.ndarray, ' N'], theirs: Int[np.ndarray, ' M']
) -> tuple[float, int]:
  """Pearson's χ² and its degrees of freedom, rare cells pooled into one."""
  _, inverse = np.unique(np.concatenate([ours, theirs]), return_inverse=True)
  parts = inverse[: len(ours)], inverse[len(ours) :]
  tables = [np.bincount(x, minlength=inverse.max() + 1) for x in parts]
  counts = np.stack(tables).astype(float)
  share = counts.sum(1) / counts.sum()
  rare = counts.sum(0) * share.min() < LEAST
  if rare.any():
    order = np.argsort(counts.sum(0)[~rare])
    cells, pool = counts[:, ~rare][:, order], counts[:, rare].sum(1, keepdims=True)
    if pool.sum() * share.min() < LEAST and cells.size:
      cells, pool = cells[:, 1:], pool + cells[:, :1]
    counts = np.concatenate([cells, pool], 1)
  expected = share[:, None] * counts.sum(0)
  return float(((counts - expected) ** 2 / expected).sum()), counts.shape[1] - 1


def p_value(chi2: float, dof: int) -> float:
  """How often χ² of so many degrees is larger by chance."""
  return float(jax.scipy.special.gammaincc(dof / 2, chi2 / 2)) if dof else 1.0
