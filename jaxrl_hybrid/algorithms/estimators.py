"""The built-in estimators: from the fields of a ``Batch`` to the formulas."""

from __future__ import annotations

import numpy as np

from jaxrl_hybrid.algorithms import advantages, group_advantages
from jaxrl_hybrid.algorithms.groups import Groups
from jaxrl_hybrid.algorithms.presets import Algorithm
from jaxrl_hybrid.algorithms.registry import (
  COLLISION,
  GREEDY,
  TERMS,
  VALUES,
  register_estimator,
)
from jaxrl_hybrid.types import Batch

Arrays = tuple[np.ndarray, np.ndarray]  # (advantages, returns) [N, R]


@register_estimator("gae", needs=(VALUES,))
def gae(batch: Batch, algorithm: Algorithm) -> Arrays:
  """Against a critic's values."""
  return advantages.gae(
    batch.rewards, batch.values, batch.mask, gamma=algorithm.gamma, lam=algorithm.lam
  )


@register_estimator("grpo", min_group_size=2)
def grpo(batch: Batch, algorithm: Algorithm) -> np.ndarray:
  """Against the group, in units of its std."""
  return group_advantages.grpo(*_outcome(batch), norm_by_std=algorithm.norm_adv_by_std)


@register_estimator("grpo_passk", min_group_size=2)
def grpo_passk(batch: Batch, algorithm: Algorithm) -> np.ndarray:
  """The best sample of a group, against the second."""
  return group_advantages.grpo_passk(
    *_outcome(batch), norm_by_std=algorithm.norm_adv_by_std
  )


@register_estimator("gdpo", needs=(TERMS,), min_group_size=2)
def gdpo(batch: Batch, algorithm: Algorithm) -> np.ndarray:
  """Each reward function against the group by itself."""
  return group_advantages.gdpo(
    batch.score_terms,
    batch.score_weights,
    Groups(batch.draw_ids),
    norm_by_std=algorithm.norm_adv_by_std,
  )


@register_estimator("reinforce_plus_plus")
def reinforce_plus_plus(batch: Batch, algorithm: Algorithm) -> np.ndarray:
  """Discounted returns to go, whitened by ``algorithm.whiten_advantages``."""
  return advantages.returns_to_go(batch.rewards, batch.mask, gamma=algorithm.gamma)


@register_estimator("reinforce_plus_plus_baseline", min_group_size=2)
def reinforce_plus_plus_baseline(batch: Batch, algorithm: Algorithm) -> np.ndarray:
  """Against the group's mean, whitened by ``algorithm.whiten_advantages``."""
  del algorithm
  return group_advantages.group_baseline(*_outcome(batch))


@register_estimator("rloo", min_group_size=2)
def rloo(batch: Batch, algorithm: Algorithm) -> np.ndarray:
  """Against the mean of the other samples."""
  del algorithm
  return group_advantages.rloo(*_outcome(batch))


@register_estimator("opo", min_group_size=2)
def opo(batch: Batch, algorithm: Algorithm) -> np.ndarray:
  """Against the group's mean, weighted by length."""
  del algorithm
  scores, groups = _outcome(batch)
  return group_advantages.opo(scores, batch.mask.sum(-1), groups)


@register_estimator("gpg", min_group_size=2)
def gpg(batch: Batch, algorithm: Algorithm) -> np.ndarray:
  """Against the group's mean, groups without a signal made up for."""
  del algorithm
  return group_advantages.gpg(*_outcome(batch))


@register_estimator("remax", needs=(GREEDY,))
def remax(batch: Batch, algorithm: Algorithm) -> Arrays:
  """Against the prompt's greedy completion."""
  del algorithm
  return advantages.remax(batch.rewards, batch.baseline_scores, batch.mask)


@register_estimator("optimal_token_baseline", needs=(COLLISION,), min_group_size=2)
def optimal_token_baseline(batch: Batch, algorithm: Algorithm) -> Arrays:
  """Against the group at every token, weighted by a proxy of the gradient's norm."""
  to_go = advantages.returns_to_go(batch.rewards, batch.mask, gamma=algorithm.gamma)
  found = advantages.optimal_token_baseline(
    to_go,
    batch.old_log_probs,
    batch.collision,
    batch.mask,
    Groups(batch.draw_ids),
    weights_NR=batch.is_weights,
  )
  return found, to_go


def _outcome(batch: Batch) -> tuple[np.ndarray, Groups]:
  """(each sequence's reward ``[N]``, the groups); a masked row counts in its group."""
  scores = np.where(batch.valid_mask, batch.rewards, 0.0).sum(-1, dtype=np.float64)
  return scores, Groups(batch.draw_ids)
