"""What an algorithm needs, and what contradicts it or has no effect."""

from __future__ import annotations

import logging
import math

from ml_collections import ConfigDict

from jaxrl_hybrid.algorithms.correction import REJECTIONS
from jaxrl_hybrid.algorithms.registry import ESTIMATORS, GREEDY, TERMS
from jaxrl_hybrid.errors import ConfigError

NO_RATIO = ("reinforce", "gpg")  # policy losses that do not look at the old log-probs


def check_algorithm(config: ConfigDict) -> None:
  """What the advantage estimator and the policy loss need and do not use."""
  algorithm = config.algorithm
  estimator = ESTIMATORS[algorithm.adv_estimator]
  if config.rollout.n < estimator.min_group_size:
    raise ConfigError(
      f"rollout.n: algorithm {algorithm.name!r} compares the samples of a prompt "
      f"and needs rollout.n >= {estimator.min_group_size}, got {config.rollout.n}; set "
      "--config.rollout.n=8 or use --config.algorithm.name=ppo or remax"
    )
  check_correction(config)
  _check_filter(config)
  if config.algorithm.use_cost and estimator.needs & {GREEDY, TERMS}:
    raise ConfigError(
      f"algorithm.use_cost: {algorithm.adv_estimator} looks at scores that costs do "
      "not have; expected an estimator such as gae, grpo, rloo"
    )
  if TERMS in estimator.needs:
    _check_terms(config)
  if config.actor.use_kl_loss and config.actor.kl_loss_type == "k1":
    logging.warning(
      "actor.kl_loss_type=k1: its gradient is 0 on average, so the loss holds nothing; "
      "k2, k3 and k1+ (the value of k1 with the gradient of k2) do"
    )
  if config.actor.router_aux_loss_coef and config.mesh.train[0] > 1:
    raise ConfigError(
      "actor.router_aux_loss_coef: expected 0 with pp > 1 (stages of a pipeline do not "
      f"tell the load of their experts), got {config.actor.router_aux_loss_coef} and "
      f"mesh.train={tuple(config.mesh.train)}"
    )


def check_correction(config: ConfigDict) -> None:
  """Thresholds of the rollout correction, and what corrects twice."""
  section, where = config.algorithm.rollout_correction, "algorithm.rollout_correction"
  names, bounds = section.rollout_rs, section.rollout_rs_threshold
  upper, lower = section.rollout_is_threshold, section.rollout_is_lower
  if not 0 <= (lower or 0) < upper < math.inf:
    raise ConfigError(
      f"{where}: expected 0 <= rollout_is_lower < rollout_is_threshold, got {lower} "
      f"and {upper}"
    )
  unknown = [name for name in names if name not in REJECTIONS]
  if unknown or len(set(names)) < len(names):
    raise ConfigError(
      f"{where}.rollout_rs: expected different names of {REJECTIONS}, got "
      f"{tuple(names)}"
    )
  least = [1 if name.endswith("k1") else 0 for name in names]
  if len(bounds) != len(names) or not all(
    isinstance(bound, int | float) and low < bound < math.inf
    for low, bound in zip(least, bounds)
  ):
    raise ConfigError(
      f"{where}.rollout_rs_threshold: expected a number for each of {tuple(names)}, "
      "> 1 for k1 (ratios up to it and its inverse pass) and > 0 for k2, k3, got "
      f"{tuple(bounds)}"
    )
  loss = config.actor.policy_loss
  if section.bypass_mode and section.rollout_is != "off" and loss not in NO_RATIO:
    raise ConfigError(
      f"{where}: with bypass_mode the ratio of actor.policy_loss={loss} corrects "
      f"already; expected rollout_is=off, or one of {NO_RATIO}, got "
      f"rollout_is={section.rollout_is}"
    )


def _check_filter(config: ConfigDict) -> None:
  section = config.algorithm.filter_groups
  if section.max_num_gen_batches < 1:
    raise ConfigError(
      "algorithm.filter_groups.max_num_gen_batches: expected >= 1, got "
      f"{section.max_num_gen_batches}"
    )
  if section.enable and config.rollout.n < 2:
    raise ConfigError(
      "algorithm.filter_groups: a group of one sample is never mixed; expected "
      f"rollout.n >= 2, got {config.rollout.n}"
    )
  longest, buffer = config.data.max_response_length, config.rewards.overlong_buffer
  if not 0 <= buffer <= longest:
    raise ConfigError(
      "rewards.overlong_buffer: expected 0 (off) to "
      f"data.max_response_length={longest}, got {buffer}"
    )


def _check_terms(config: ConfigDict) -> None:
  """An estimator that reads each reward function's score sees nothing else."""
  algorithm = config.algorithm
  for key, off in (
    ("use_kl_in_reward", False),
    ("normalize_rewards", False),
    ("reward_clip", None),
  ):
    if algorithm[key] != off:
      raise ConfigError(
        f"algorithm.{key}: {algorithm.adv_estimator} looks at each reward function by "
        f"itself, where this has no effect; expected {off}, got {algorithm[key]}"
      )
