"""Advantages with a number of their own for every token.

All work on ``[N, R]`` response-aligned arrays and a bool mask; what lies outside of
the mask (padding, tool output) has no influence and is carried over.
"""

from __future__ import annotations

import numpy as np

from jaxrl_hybrid.algorithms.groups import Groups


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


def returns_to_go(
  rewards_NR: np.ndarray, mask_NR: np.ndarray, *, gamma: float
) -> np.ndarray:
  """``G_t = r_t + gamma G_{t+1}`` over the tokens of the mask, 0 elsewhere: fp32.

  REINFORCE++ (Hu 2025, arXiv:2501.03262) whitens it over the batch.
  """
  rows, width = rewards_NR.shape
  found, following = np.zeros((rows, width), np.float32), np.zeros(rows)
  for t in reversed(range(width)):
    on = mask_NR[:, t]
    following = np.where(on, rewards_NR[:, t] + gamma * following, following)
    found[:, t] = np.where(on, following, 0.0)
  return found


def remax(
  rewards_NR: np.ndarray, baseline_N: np.ndarray, mask_NR: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """ReMax (Li et al. 2024, arXiv:2310.10505).

  ``A_t = sum_{s>=t} r_s - R_greedy``: returns to go against the reward of the
  greedy completion of the same prompt.

  Returns:
    (advantages, returns to go), fp32, 0 outside of the mask.
  """
  to_go = returns_to_go(rewards_NR, mask_NR, gamma=1.0)
  advantages = np.where(mask_NR, to_go - baseline_N[:, None], 0.0)
  return advantages.astype(np.float32), to_go


def optimal_token_baseline(
  returns_NR: np.ndarray,
  log_probs_NR: np.ndarray,
  collision_NR: np.ndarray,
  mask_NR: np.ndarray,
  groups: Groups,
  *,
  weights_NR: np.ndarray | None = None,
) -> np.ndarray:
  """The baseline of least variance for every token (OTB, arXiv:2602.07078).

  ``A_t = G_t - sum_g(G_t W_t) / sum_g(W_t)`` over the rows that have a token t, with
  the gradient-norm proxy ``W_t = sum_{s<=t} (1 - 2 p_s + sum_v p_v^2) w_s^2``. The
  part of a row beyond all others of its group is its own baseline: advantage 0.

  Args:
    returns_NR: G, returns to go.
    log_probs_NR: log p of each token.
    collision_NR: the sum of squared probabilities over the vocabulary there.
    mask_NR: tokens in the loss.
    groups: of the N rows.
    weights_NR: importance weights w of the rollout correction; None: 1.

  Returns:
    fp32 ``[N, R]``, 0 outside of the mask.
  """
  proxy = 1.0 - 2.0 * np.exp(np.where(mask_NR, log_probs_NR, 0.0)) + collision_NR
  if weights_NR is not None:
    proxy = proxy * weights_NR**2
  # A token of probability 1 has no gradient; the floor keeps W above 0.
  proxy = np.where(mask_NR, np.maximum(proxy, 1e-8), 0.0)
  energy = np.where(mask_NR, np.cumsum(proxy, -1, dtype=np.float64), 0.0)
  to_go = np.where(mask_NR, returns_NR, 0.0)
  total = groups.column_sum(energy)
  baseline = groups.column_sum(energy * to_go) / np.where(total > 0, total, 1.0)
  return np.where(mask_NR, to_go - baseline, 0.0).astype(np.float32)
