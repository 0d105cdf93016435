"""Running mean and variance, and the rewards that are scaled by them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxrl_hybrid.types import Batch

EPSILON = 1e-8


@dataclasses.dataclass
class RunningMoments:
  """Mean and variance of all numbers seen so far (Chan et al. 1979).

  Attributes:
    count: how many there were.
    mean: of them.
    m2: sum of squared distances from the mean.
  """

  count: float = 0.0
  mean: float = 0.0
  m2: float = 0.0

  def update(self, x: np.ndarray) -> None:
    """Takes in any number of numbers."""
    x = np.asarray(x, np.float64).reshape(-1)
    if not x.size:
      return
    total = self.count + x.size
    gap = float(x.mean()) - self.mean
    self.m2 += float(((x - x.mean()) ** 2).sum()) + gap**2 * self.count * x.size / total
    self.mean += gap * x.size / total
    self.count = total

  @property
  def std(self) -> float:
    """Unbiased; 1 before there are two different numbers."""
    variance = self.m2 / (self.count - 1) if self.count > 1 else 0.0
    return float(np.sqrt(variance)) if variance > EPSILON else 1.0

  def normalize(self, x: np.ndarray) -> np.ndarray:
    """fp32 ``(x - mean) / std``."""
    return ((x - self.mean) / self.std).astype(np.float32)

  def denormalize(self, x: np.ndarray) -> np.ndarray:
    """fp32 ``x std + mean``."""
    return (x * self.std + self.mean).astype(np.float32)

  def state(self) -> dict[str, float]:
    """Plain JSON data."""
    return dataclasses.asdict(self)

  def restore(self, state: Mapping[str, float]) -> None:
    """Goes on where ``state`` was taken."""
    self.count, self.mean, self.m2 = (state[k] for k in ("count", "mean", "m2"))


@dataclasses.dataclass
class RewardShaper:
  """Rewards as advantages see them; ``scores`` stay as they were given.

  Attributes:
    normalize: to mean 0 and std 1 of all scores so far, those of this step included.
    clip: then to [-clip, clip]; None: not.
    moments: of the scores, if ``normalize``.
  """

  normalize: bool
  clip: float | None
  moments: RunningMoments = dataclasses.field(default_factory=RunningMoments)

  def shape(self, batch: Batch) -> Batch:
    """The batch with ``rewards`` whose one number per row, the score, is shaped.

    So are ReMax's ``baseline_scores``.
    """
    if not self.normalize and self.clip is None:
      return batch
    if self.normalize:
      self.moments.update(batch.scores)
    shaped = self._shape(batch.scores)
    baseline = batch.baseline_scores
    if baseline is not None:
      baseline = self._shape(baseline)
    rewards, rows = batch.rewards.copy(), np.arange(len(batch))
    rewards[rows, batch.response_lengths - 1] += shaped - batch.scores
    return batch.with_fields(
      rewards=rewards,
      baseline_scores=baseline,
      metrics={"critic/shaped_rewards/mean": float(shaped.mean())},
    )

  def _shape(self, scores_N: np.ndarray) -> np.ndarray:
    if self.normalize:
      scores_N = self.moments.normalize(scores_N)
    return scores_N if self.clip is None else np.clip(scores_N, -self.clip, self.clip)
