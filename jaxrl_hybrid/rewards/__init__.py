"""Reward functions: loading, grading and running them."""

from jaxrl_hybrid.rewards.loading import RewardFunction, load_reward, reward_name
from jaxrl_hybrid.rewards.runner import RewardResult, RewardRunner

__all__ = [
  "RewardFunction",
  "RewardResult",
  "RewardRunner",
  "load_reward",
  "reward_name",
]
