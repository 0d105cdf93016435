"""``CriticWarmupScheduler``: the critic first, then both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl_hybrid.algorithms.warmup import CriticWarmup
from jaxrl_hybrid.api.model_wrapper import HFModelWrapper


class CriticWarmupScheduler:
  """Lets a critic learn alone before it judges: ``trainer.step(batch, scheduler)``.

  In the first ``warmup_steps`` steps the critic alone learns, to predict the rewards
  to go. After them the actor learns as well, and the critic's share in the
  advantages grows from 0 to 1 until ``full_steps``: formula and counts are those of
  ``algorithms.warmup``. In a config: ``critic.warmup`` and ``critic.full_steps``.
  """

  def __init__(
    self,
    critic: HFModelWrapper,
    warmup_steps: int,
    full_steps: int,
    *,
    explained_variance: float | None = None,
  ):
    """
    Args:
      critic: the trainer's.
      warmup_steps: >= 0.
      full_steps: >= ``warmup_steps``, counted from the first step too.
      explained_variance: in (0, 1]: the warm-up ends after a step whose values
        explained so much of the variance of the rewards to go.

    Raises:
      ConfigError: steps or variance out of range.
    """
    self.critic = critic
    self._warmup = CriticWarmup(warmup_steps, full_steps, explained_variance)
    self._step = 0

  @property
  def step(self) -> int:
    """Steps begun so far."""
    return self._step

  @property
  def share(self) -> float:
    """The critic's share in the advantages of the step that was begun last."""
    return self._warmup.share(self._step)

  @property
  def actor_learns(self) -> bool:
    """Whether the actor is updated in the step that was begun last."""
    return self._warmup.actor_learns(self._step)

  def begin_step(self) -> None:
    """Counts a step; ``Trainer.step`` does it."""
    self._step += 1

  def look(self, explained_variance: float) -> None:
    """Tells how well the values of this step explained its rewards to go."""
    self._warmup.look(self._step, explained_variance)

  def state(self) -> dict[str, Any]:
    """As plain JSON data."""
    return {"step": self._step, **self._warmup.state()}

  def restore(self, state: Mapping[str, Any]) -> None:
    """Continues from a ``state``."""
    self._step = int(state["step"])
    self._warmup.restore(state)
