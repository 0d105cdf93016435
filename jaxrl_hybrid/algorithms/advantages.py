"""Advantage estimators: numpy arrays in, numpy arrays out.

All work on ``[N, R]`` response-aligned arrays and a bool mask; what lies
outside of the mask has no influence. Group estimators take one score per
sequence and the group (draw) id of each.
"""

from __future__ import annotations

import numpy as np

EPSILON = 1e-6


def gae(
  rewards_NR: np.ndarray,
  values_NR: np.ndarray,
  mask_NR: np.ndarray,
  *,
  gamma: float,
  lam: float,
) -> tuple[np.ndarray, np.ndarray]:
  """Generalized advantage estimation (Schulman et al. 2016, arXiv:1506.02438).

  ``delta_t = r_t + gamma V_{t+1} - V_t``, ``A_t = delta_t + gamma lam A_{t+1}``;
  V and A after the last masked token are 0; tokens outside the mask (tool
  output, padding) are skipped: what comes after them is carried through.

  Returns:
    (advantages, returns = advantages + values), fp32, 0 outside of the mask.
  """
  rows, width = rewards_NR.shape
  advantages = np.zeros((rows, width), np.float32)
  next_value, next_advantage = np.zeros(rows), np.zeros(rows)
  for t in reversed(range(width)):
    on = mask_NR[:, t]
    delta = rewards_NR[:, t] + gamma * next_value - values_NR[:, t]
    advantage = delta + gamma * lam * next_advantage
    next_advantage = np.where(on, advantage, next_advantage)
    next_value = np.where(on, values_NR[:, t], next_value)
    advantages[:, t] = np.where(on, advantage, 0.0)
  returns = np.where(mask_NR, advantages + values_NR, 0.0)
  return advantages, returns.astype(np.float32)


def grpo(
  scores_N: np.ndarray, groups_N: np.ndarray, *, norm_by_std: bool
) -> np.ndarray:
  """Group-relative advantage (Shao et al. 2024, arXiv:2402.03300), one per row.

  ``(R - mean_g) / (std_g + 1e-6)`` with the unbiased std (n - 1);
  ``norm_by_std=False`` leaves the division out (Dr.GRPO, arXiv:2503.20783).
  A group of equal scores, or of one, has advantage exactly 0.

  Returns:
    fp32 ``[N]``.
  """
  index, counts = _group_index(groups_N)
  scores = scores_N.astype(np.float64)
  mean = np.bincount(index, scores) / counts
  centred = np.where(_constant(scores, index, mean)[index], 0.0, scores - mean[index])
  if norm_by_std:
    variance = np.bincount(index, centred**2) / np.maximum(counts - 1, 1)
    centred = centred / (np.sqrt(variance) + EPSILON)[index]
  return centred.astype(np.float32)


def remax(
  rewards_NR: np.ndarray, baseline_N: np.ndarray, mask_NR: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """ReMax (Li et al. 2024, arXiv:2310.10505).

  ``A_t = sum_{s>=t} r_s - R_greedy``: returns to go against the reward of the
  greedy completion of the same prompt.

  Returns:
    (advantages, returns to go), fp32, 0 outside of the mask.
  """
  masked = np.where(mask_NR, rewards_NR, 0.0)
  to_go = np.where(mask_NR, np.cumsum(masked[:, ::-1], -1)[:, ::-1], 0.0)
  advantages = np.where(mask_NR, to_go - baseline_N[:, None], 0.0)
  return advantages.astype(np.float32), to_go.astype(np.float32)


def _group_index(groups_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """(index of each row's group ``[N]``, size of each group)."""
  _, index, counts = np.unique(groups_N, return_inverse=True, return_counts=True)
  return index.reshape(-1), counts


def _constant(scores_N, index_N, mean_G) -> np.ndarray:
  """bool per group: max - min <= 1e-6 * max(1, |mean|)."""
  high = np.full(mean_G.shape, -np.inf)
  low = np.full(mean_G.shape, np.inf)
  np.maximum.at(high, index_N, scores_N)
  np.minimum.at(low, index_N, scores_N)
  return high - low <= EPSILON * np.maximum(1.0, np.abs(mean_G))
