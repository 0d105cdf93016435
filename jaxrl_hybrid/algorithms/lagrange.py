"""Safe RLHF: a reward to raise and a cost to keep below a limit (arXiv:2310.12773)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

LEAST = 1e-6  # of lambda, which cannot rise again from 0


@dataclasses.dataclass
class Multiplier:
  """lambda, the price of the cost: it rises while the mean cost is above the limit.

  ``log lambda += lr lambda (mean cost - limit)``: gradient ascent on lambda's share of
  the Lagrangian, in the logarithm, so that it stays above 0.

  Attributes:
    value: lambda; at first its start.
    limit: mean cost of a response that is allowed.
    lr: of the ascent; 0 keeps lambda.
    most: it grows no further.
  """

  value: float
  limit: float
  lr: float
  most: float

  def update(self, costs_N: np.ndarray) -> None:
    """Takes in the costs of the responses of a step."""
    excess = float(np.mean(costs_N, dtype=np.float64)) - self.limit
    step = min(self.lr * self.value * excess, 700.0)  # exp stays finite
    self.value = max(min(self.value * math.exp(step), self.most), LEAST)

  def combine(self, rewards_NR: np.ndarray, costs_NR: np.ndarray) -> np.ndarray:
    """Advantages of both: ``(A_reward - lambda A_cost) / (1 + lambda)``, fp32."""
    found = (rewards_NR - self.value * costs_NR) / (1.0 + self.value)
    return found.astype(np.float32)

  def state(self) -> dict[str, float]:
    """Plain JSON data."""
    return {"value": self.value}

  def restore(self, state: Mapping[str, float]) -> None:
    """Goes on where ``state`` was taken."""
    self.value = state["value"]
