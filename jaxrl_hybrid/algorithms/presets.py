"""Algorithms by name: each is a set of defaults that a config may override."""

from __future__ import annotations

import dataclasses
from typing import Any

# Keys are dotted config keys whose base value is None ("as the algorithm says").
PRESETS: dict[str, dict[str, Any]] = {
  # Schulman et al. 2017, with a critic and GAE.
  "ppo": {
    "algorithm.adv_estimator": "gae",
    "algorithm.whiten_advantages": True,
    "algorithm.norm_adv_by_std_in_grpo": True,
    "actor.policy_loss": "vanilla",
    "actor.loss_agg_mode": "token-mean",
  },
  # Shao et al. 2024: the group replaces the critic.
  "grpo": {
    "algorithm.adv_estimator": "grpo",
    "algorithm.whiten_advantages": False,
    "algorithm.norm_adv_by_std_in_grpo": True,
    "actor.policy_loss": "vanilla",
    "actor.loss_agg_mode": "token-mean",
  },
  # Li et al. 2024: the greedy completion's reward replaces the critic.
  "remax": {
    "algorithm.adv_estimator": "remax",
    "algorithm.whiten_advantages": False,
    "algorithm.norm_adv_by_std_in_grpo": True,
    "actor.policy_loss": "vanilla",
    "actor.loss_agg_mode": "token-mean",
  },
}


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """What ``compute_advantages`` needs to know, resolved.

  Attributes:
    adv_estimator: key of ``estimate.ESTIMATORS``.
    gamma, lam: discount and GAE's lambda.
    norm_adv_by_std: GRPO divides by the group's std.
    whiten_advantages: over all tokens of the batch.
    use_kl_in_reward: subtract ``coef * kl`` from each token's reward.
    kl_penalty: estimator of that KL.
  """

  adv_estimator: str
  gamma: float
  lam: float
  norm_adv_by_std: bool
  whiten_advantages: bool
  use_kl_in_reward: bool
  kl_penalty: str

  @property
  def needs_critic(self) -> bool:
    """Whether values are part of the estimator."""
    return self.adv_estimator == "gae"

  @property
  def needs_greedy_baseline(self) -> bool:
    """Whether each prompt's greedy completion is scored too."""
    return self.adv_estimator == "remax"

  @property
  def min_group_size(self) -> int:
    """Samples per draw below which the estimator has no signal."""
    return 2 if self.adv_estimator == "grpo" else 1
