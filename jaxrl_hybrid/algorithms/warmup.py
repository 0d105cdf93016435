"""A critic that learns before the actor does, and takes over step by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl_hybrid.algorithms.advantages import gae
from jaxrl_hybrid.errors import ConfigError


class CriticWarmup:
  """Which steps train the critic alone, and its share in the advantages of others.

  Steps count from 1. Steps 1 ... s train the critic alone, s being ``warmup_steps``;
  the actor's first step is s + 1. The critic's share in step k is

      w = 0 for k <= s,   min(1, (k - s) / (full_steps - warmup_steps)) after it

  so that it has 1/n of the say in step s + 1, and all of it n steps after the
  warm-up, at ``full_steps``. See ``take_over`` for what the share is of.
  """

  def __init__(
    self,
    warmup_steps: int,
    full_steps: int,
    explained_variance: float | None = None,
  ):
    """
    Args:
      warmup_steps: >= 0, in which only the critic learns.
      full_steps: >= ``warmup_steps``, after which advantages are all the critic's.
      explained_variance: the warm-up ends early after a step whose values explained
        this part of the returns' variance; the take-over is as long as before.

    Raises:
      ConfigError: steps or variance out of range.
    """
    if not 0 <= warmup_steps <= full_steps:
      raise ConfigError(
        "critic warm-up: expected 0 <= warmup_steps <= full_steps, got "
        f"{warmup_steps=}, {full_steps=}"
      )
    if explained_variance is not None and not 0 < explained_variance <= 1:
      raise ConfigError(
        f"critic warm-up: expected explained_variance in (0, 1], got "
        f"{explained_variance}"
      )
    self._last, self._length = warmup_steps, full_steps - warmup_steps
    self._enough = explained_variance

  @property
  def is_used(self) -> bool:
    """Whether any step differs from plain training."""
    return self._last > 0 or self._length > 0

  def actor_learns(self, step: int) -> bool:
    """Whether the actor is updated in this step."""
    return step > self._last

  def share(self, step: int) -> float:
    """w, the critic's share in the advantages of this step."""
    if step <= self._last:
      return 0.0
    return min(1.0, (step - self._last) / self._length) if self._length else 1.0

  def look(self, step: int, explained_variance: float) -> None:
    """Ends the warm-up after this step if its values were good enough."""
    if self._enough is not None and not self.actor_learns(step):
      if explained_variance >= self._enough:
        self._last = step

  def state(self) -> dict[str, Any]:
    """As plain JSON data."""
    return {"last": self._last}

  def restore(self, state: Mapping[str, Any]) -> None:
    """Continues from a ``state``."""
    self._last = int(state["last"])


def take_over(
  advantages_NR: np.ndarray,
  returns_NR: np.ndarray,
  rewards_NR: np.ndarray,
  mask_NR: np.ndarray,
  *,
  gamma: float,
  share: float,
) -> tuple[np.ndarray, np.ndarray]:
  """Estimates of which a critic has only a share w in [0, 1].

  ``A = w A_gae + (1 - w) (G - b)`` and ``R = w R_gae + (1 - w) G``: G are the
  discounted rewards to go and b their mean over all masked tokens. At w = 0 the
  critic regresses rewards, and none of its values is in the advantages.

  Returns:
    (advantages, returns), fp32, 0 outside of the mask.
  """
  to_go, _ = gae(rewards_NR, np.zeros_like(rewards_NR), mask_NR, gamma=gamma, lam=1.0)
  baseline = to_go[mask_NR].mean() if mask_NR.any() else 0.0
  plain = np.where(mask_NR, to_go - baseline, 0.0)
  mix = lambda critic, without: share * critic + (1.0 - share) * without
  advantages, returns = mix(advantages_NR, plain), mix(returns_NR, to_go)
  return advantages.astype(np.float32), returns.astype(np.float32)
