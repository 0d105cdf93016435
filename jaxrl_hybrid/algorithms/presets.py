"""Algorithms by name: each is a set of defaults that a config may override."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl_hybrid.algorithms.correction import Correction
from jaxrl_hybrid.algorithms.registry import (
  COLLISION,
  ESTIMATORS,
  GREEDY,
  POLICY_LOSSES,
  TERMS,
  VALUES,
)

# Keys are dotted config keys whose base value is None ("as the algorithm says").
PLAIN: dict[str, Any] = {
  "algorithm.adv_estimator": "grpo",
  "algorithm.whiten_advantages": False,
  "algorithm.norm_adv_by_std_in_grpo": True,
  "actor.policy_loss": "vanilla",
  "actor.loss_agg_mode": "token-mean",
  "actor.clip_ratio_low": 0.2,
  "actor.clip_ratio_high": 0.2,
  "actor.clip_ratio_c": 3.0,
  "algorithm.filter_groups.enable": False,
  "algorithm.use_cost": False,
}


def _preset(**changes: Any) -> dict[str, Any]:
  """``PLAIN`` with other values, by the last parts of its keys."""
  by_last = {key.rsplit(".", 1)[-1]: key for key in PLAIN}
  return PLAIN | {by_last[name]: value for name, value in changes.items()}


PRESETS: dict[str, dict[str, Any]] = {
  # Schulman et al. 2017, with a critic and GAE.
  "ppo": _preset(adv_estimator="gae", whiten_advantages=True),
  # Dai et al. 2024: PPO with a cost below a limit; any estimator can have one.
  "safe_rlhf": _preset(adv_estimator="gae", whiten_advantages=True, use_cost=True),
  # Li et al. 2024: the greedy completion's reward replaces the critic.
  "remax": _preset(adv_estimator="remax"),
  # Shao et al. 2024: the group replaces the critic.
  "grpo": _preset(),
  # Liu et al. 2025: GRPO without its two biases, of length and of difficulty.
  "dr_grpo": _preset(
    norm_adv_by_std_in_grpo=False, loss_agg_mode="seq-mean-token-sum-norm"
  ),
  # Yu et al. 2025: clip-higher and dynamic sampling; overlong shaping, whose buffer
  # depends on the task, is rewards.overlong_buffer.
  "dapo": _preset(clip_ratio_high=0.28, enable=True),
  "grpo_passk": _preset(adv_estimator="grpo_passk"),
  "gdpo": _preset(adv_estimator="gdpo", whiten_advantages=True),
  "rloo": _preset(adv_estimator="rloo"),
  "opo": _preset(adv_estimator="opo"),
  "otb": _preset(adv_estimator="optimal_token_baseline"),
  "gpg": _preset(adv_estimator="gpg", policy_loss="gpg"),
  "reinforce_plus_plus": _preset(
    adv_estimator="reinforce_plus_plus", whiten_advantages=True
  ),
  "reinforce_plus_plus_baseline": _preset(
    adv_estimator="reinforce_plus_plus_baseline", whiten_advantages=True
  ),
  # Zheng et al. 2025: the ratio of the sequence; its clip range is this narrow.
  "gspo": _preset(
    policy_loss="gspo",
    loss_agg_mode="seq-mean-token-mean",
    clip_ratio_low=3e-4,
    clip_ratio_high=4e-4,
  ),
  # MiniMax 2025: no lower bound; the upper one, 5, is that of arXiv:2510.13786.
  "cispo": _preset(policy_loss="cispo", clip_ratio_low=1.0, clip_ratio_high=4.0),
  "sapo": _preset(policy_loss="sapo", loss_agg_mode="seq-mean-token-mean"),
  # Qi et al. 2026: bounds on probabilities; the ratio is truncated at 20.
  "dppo": _preset(
    policy_loss="dppo_tv",
    clip_ratio_low=0.15,
    clip_ratio_high=0.15,
    clip_ratio_c=20.0,
  ),
}


def names() -> list[str]:
  """What ``algorithm.name`` may be: presets, then estimators and losses by name."""
  return sorted({*PRESETS, *ESTIMATORS, *POLICY_LOSSES})


def preset(name: str) -> Mapping[str, Any]:
  """The defaults of a name; an estimator's or a loss's own name is GRPO with it."""
  if name in PRESETS:
    return PRESETS[name]
  changes = {}
  if name in ESTIMATORS:
    changes["adv_estimator"] = name
  if name in POLICY_LOSSES:
    changes["policy_loss"] = name
  assert changes, name
  return _preset(**changes)


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """What ``compute_advantages`` needs to know, resolved.

  Attributes:
    adv_estimator: key of ``registry.ESTIMATORS``.
    gamma, lam: discount and GAE's lambda.
    norm_adv_by_std: GRPO divides by the group's std.
    whiten_advantages: over all tokens of the batch.
    use_kl_in_reward: subtract ``coef * kl`` from each token's reward.
    kl_penalty: estimator of that KL.
    correction: of the rollout.
  """

  adv_estimator: str
  gamma: float
  lam: float
  norm_adv_by_std: bool
  whiten_advantages: bool
  use_kl_in_reward: bool
  kl_penalty: str
  correction: Correction = Correction()

  @property
  def needs_critic(self) -> bool:
    """Whether values are part of the estimator."""
    return self._needs(VALUES)

  @property
  def needs_greedy_baseline(self) -> bool:
    """Whether each prompt's greedy completion is scored too."""
    return self._needs(GREEDY)

  @property
  def needs_collision(self) -> bool:
    """Whether the sums of squared probabilities are part of the estimator."""
    return self._needs(COLLISION)

  def recomputes_old_log_probs(self, updates: int) -> bool:
    """Whether the trainer's log-probs are computed before the update.

    Args:
      updates: optimizer steps that a batch is for.
    """
    if self.correction.active:
      return True
    wanted = self.needs_old_log_probs or updates > 1
    return wanted and not self.correction.bypass

  @property
  def needs_old_log_probs(self) -> bool:
    """Whether advantages look at them."""
    return self.use_kl_in_reward or self.needs_collision

  @property
  def needs_terms(self) -> bool:
    """Whether it looks at each reward function by itself, not at their sum."""
    return self._needs(TERMS)

  @property
  def min_group_size(self) -> int:
    """Samples per draw below which the estimator has no signal."""
    return ESTIMATORS[self.adv_estimator].min_group_size

  def _needs(self, what: str) -> bool:
    return what in ESTIMATORS[self.adv_estimator].needs
