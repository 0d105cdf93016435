"""The cost of a response: scored, valued and kept below its limit (Safe RLHF)."""

from __future__ import annotations

from jaxrl_hybrid.algorithms.lagrange import Multiplier
from jaxrl_hybrid.types import Batch
from jaxrl_hybrid.workers.critic import Critic
from jaxrl_hybrid.workers.reward import RewardWorker


class Constraint:
  """What Safe RLHF adds to an algorithm.

  Args:
    scorer: of the costs.
    critic: of the costs; None: the estimator needs no values.
    multiplier: the price of the cost.
  """

  def __init__(
    self, scorer: RewardWorker, critic: Critic | None, multiplier: Multiplier
  ):
    self._scorer = scorer
    self.critic, self.multiplier = critic, multiplier

  def compute_costs(self, batch: Batch) -> Batch:
    """Adds ``costs`` and ``token_costs``, and moves the multiplier.

    Raises:
      RewardError: as ``RewardWorker.compute_rewards``.
    """
    batch = self._scorer.compute_costs(batch)
    self.multiplier.update(batch.costs)
    return batch.with_fields(metrics={"cost/multiplier": self.multiplier.value})

  def compute_values(self, batch: Batch) -> Batch:
    """Adds ``cost_values``, if there is a critic."""
    if self.critic is None:
      return batch
    values = self.critic.compute_values(batch).values
    return batch.with_fields(cost_values=values)

  def update(self, batch: Batch) -> dict[str, float]:
    """The critic learns ``cost_returns``; returns ``cost_critic/*`` metrics."""
    if self.critic is None:
      return {}
    own = batch.with_fields(values=batch.cost_values, returns=batch.cost_returns)
    return self.critic.update(own)
