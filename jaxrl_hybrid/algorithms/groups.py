"""Statistics of groups: the samples of one draw of a prompt."""

from __future__ import annotations

import numpy as np

EPSILON = 1e-6


class Groups:
  """N rows in groups by draw id; every statistic comes back as one number per row.

  Args:
    draw_ids_N: of each row; equal ids are a group, in any order.
  """

  def __init__(self, draw_ids_N: np.ndarray):
    _, index, counts = np.unique(draw_ids_N, return_inverse=True, return_counts=True)
    self._index, self._counts = index.reshape(-1), counts
    self.sizes = counts[self._index]

  def sum(self, x_N: np.ndarray) -> np.ndarray:
    """fp64 ``[N]``."""
    return np.bincount(self._index, np.asarray(x_N, np.float64))[self._index]

  def mean(self, x_N: np.ndarray) -> np.ndarray:
    """fp64 ``[N]``."""
    return self.sum(x_N) / self.sizes

  def std(self, x_N: np.ndarray) -> np.ndarray:
    """fp64 ``[N]``, unbiased (n - 1); 0 for a group of one."""
    centred = x_N - self.mean(x_N)
    return np.sqrt(self.sum(centred**2) / np.maximum(self.sizes - 1, 1))

  def max(self, x_N: np.ndarray) -> np.ndarray:
    """``[N]``."""
    high = np.full(self._counts.shape, -np.inf)
    np.maximum.at(high, self._index, x_N)
    return high[self._index]

  def constant(self, x_N: np.ndarray) -> np.ndarray:
    """bool ``[N]``: max - min <= 1e-6 max(1, |mean|), so equal up to rounding."""
    x_N = np.asarray(x_N, np.float64)
    spread = self.max(x_N) + self.max(-x_N)
    return spread <= EPSILON * np.maximum(1.0, np.abs(self.mean(x_N)))

  def centred(self, x_N: np.ndarray) -> np.ndarray:
    """fp64 ``x - mean``, exactly 0 where the group is constant."""
    x_N = np.asarray(x_N, np.float64)
    return np.where(self.constant(x_N), 0.0, x_N - self.mean(x_N))

  def column_sum(self, x_NR: np.ndarray) -> np.ndarray:
    """fp64 ``[N, R]``: the sum over a group's rows at each token index."""
    total = np.zeros((len(self._counts), x_NR.shape[1]))
    np.add.at(total, self._index, x_NR)
    return total[self._index]
