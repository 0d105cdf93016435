"""Advantages from comparing the samples of a prompt: one number per sequence.

``scores_N`` is each sequence's reward, ``groups`` says which belong together. A
group of equal scores has advantage exactly 0 in all of them but ``opo``'s and
``rloo``'s groups of one. All return fp32 ``[N]``.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jaxrl_hybrid.algorithms.groups import EPSILON, Groups


def grpo(scores_N: np.ndarray, groups: Groups, *, norm_by_std: bool) -> np.ndarray:
  """Group-relative advantage (Shao et al. 2024, arXiv:2402.03300).

  ``(R - mean_g) / (std_g + 1e-6)`` with the unbiased std (n - 1);
  ``norm_by_std=False`` leaves the division out (Dr.GRPO, arXiv:2503.20783).
  A group of one has advantage 0.
  """
  return _scaled(groups.centred(scores_N), scores_N, groups, norm_by_std)


def grpo_passk(
  scores_N: np.ndarray, groups: Groups, *, norm_by_std: bool
) -> np.ndarray:
  """Only the best sample counts, by its lead (arXiv:2503.19595).

  ``(R_best - R_second) / (std_g + 1e-6)`` for the best of a group, 0 for the others;
  0 for all when two share the first place, and in a group of one.
  """
  scores = np.asarray(scores_N, np.float64)
  best = groups.max(scores)
  is_best = scores >= best
  second = groups.max(np.where(is_best, -np.inf, scores))
  alone = (groups.sum(is_best) == 1) & (groups.sizes > 1) & ~groups.constant(scores)
  lead = np.where(is_best & alone, best - np.where(alone, second, best), 0.0)
  return _scaled(lead, scores, groups, norm_by_std)


def gdpo(
  terms: Mapping[str, np.ndarray],
  weights: Mapping[str, float],
  groups: Groups,
  *,
  norm_by_std: bool,
) -> np.ndarray:
  """Rewards are normalised one by one (GDPO, arXiv:2601.05242).

  ``sum_k w_k GRPO(R_k)``: a reward of small spread keeps its say. The paper whitens
  the sum over the batch (``algorithm.whiten_advantages``).

  Args:
    terms: fp32 ``[N]`` of each reward function.
    weights: of the same names.
    groups: of the N rows.
    norm_by_std: as in ``grpo``.
  """
  total = np.zeros(len(groups.sizes))
  for name, weight in weights.items():
    total += weight * grpo(terms[name], groups, norm_by_std=norm_by_std)
  return total.astype(np.float32)


def group_baseline(scores_N: np.ndarray, groups: Groups) -> np.ndarray:
  """``R - mean_g``: REINFORCE++-baseline (arXiv:2501.03262), which then whitens."""
  return groups.centred(scores_N).astype(np.float32)


def rloo(scores_N: np.ndarray, groups: Groups) -> np.ndarray:
  """Leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740).

  ``R - mean of the others = n / (n - 1) (R - mean_g)``; a group of one keeps R.
  """
  factor = groups.sizes / np.maximum(groups.sizes - 1, 1)
  advantage = factor * groups.centred(scores_N)
  return np.where(groups.sizes > 1, advantage, scores_N).astype(np.float32)


def opo(scores_N: np.ndarray, lengths_N: np.ndarray, groups: Groups) -> np.ndarray:
  """The baseline of least variance, by length (OPO, arXiv:2505.23585).

  ``R - sum_g(length R) / sum_g(length)``.

  Args:
    scores_N: of each sequence.
    lengths_N: its tokens that are in the loss.
    groups: of the N rows.
  """
  weights = np.maximum(lengths_N, EPSILON)
  baseline = groups.sum(weights * scores_N) / groups.sum(weights)
  flat = groups.constant(scores_N)
  return np.where(flat, 0.0, scores_N - baseline).astype(np.float32)


def gpg(scores_N: np.ndarray, groups: Groups) -> np.ndarray:
  """Group policy gradient (Chu et al. 2025, arXiv:2504.02546).

  ``alpha (R - mean_g)``, alpha = rows / rows in groups with a signal: groups of equal
  scores do not make the gradient of the others smaller.
  """
  centred = groups.centred(scores_N)
  with_signal = int((~groups.constant(scores_N)).sum())
  return (centred * len(centred) / max(with_signal, 1)).astype(np.float32)


def _scaled(
  x_N: np.ndarray, scores_N: np.ndarray, groups: Groups, norm_by_std: bool
) -> np.ndarray:
  if norm_by_std:
    x_N = x_N / (groups.std(np.asarray(scores_N, np.float64)) + EPSILON)
  return x_N.astype(np.float32)
