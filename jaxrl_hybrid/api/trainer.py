"""``Trainer``: what an actor and a critic do with a collected batch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxrl_hybrid.api.critic_warmup import CriticWarmupScheduler
from jaxrl_hybrid.api.model_wrapper import HFModelWrapper
from jaxrl_hybrid.errors import ConfigError, DataError
from jaxrl_hybrid.types import Batch
from jaxrl_hybrid.workers.style_loss import StyleConstraint

OPTIMIZERS = ("adamw",)


class Trainer:
  """The learning half of a training loop.

  batch = collector.collect(prompts)
  batch = trainer.compute_advantages(batch)
  losses = trainer.step(batch)
  """

  def __init__(
    self,
    actor: HFModelWrapper,
    critic: HFModelWrapper | None = None,
    *,
    optimizer: str = "adamw",
    lr: float | None = None,
    grad_clip: float | None = None,
    ppo_epochs: int | None = None,
    critic_lr: float | None = None,
    reference: HFModelWrapper | None = None,
    style: StyleConstraint | None = None,
    config: Mapping[str, Any] | None = None,
  ):
    """Configures both models; one that was used already starts with new moments.

    Args:
      actor: learns from advantages, by ``algorithm.name`` of its config.
      critic: estimates them; None: with an algorithm that needs none.
      optimizer: of both.
      lr: of both, unless ``critic_lr`` is given; None: as their configs say.
      grad_clip: largest global norm of a gradient; None: as their configs say.
      ppo_epochs: passes over a batch; None: as their configs say.
      critic_lr: of the critic.
      reference: what ``actor.use_kl_loss`` keeps the actor near to.
      style: a loss beside the actor's; what it is compared with is the actor as it is
        now.
      config: more keys of ``jaxrl_hybrid.config.base``, for both.

    Raises:
      ConfigError: a wrong value, or models that the algorithm has no use for.
    """
    if optimizer not in OPTIMIZERS:
      raise ConfigError(f"optimizer: expected one of {OPTIMIZERS}, got {optimizer!r}")
    shared = dict(config or {})
    if ppo_epochs is not None:
      shared["actor.ppo_epochs"] = ppo_epochs
    own = _optim("actor", lr, grad_clip)
    if style is not None:
      own["actor.style"] = dataclasses.asdict(style)
    actor.configure(shared | own)
    if critic is not None:
      critic_lr = lr if critic_lr is None else critic_lr
      critic.configure(shared | _optim("critic", critic_lr, grad_clip))
    self._actor, self._critic, self._reference = actor, critic, reference
    self._check_roles()

  def compute_advantages(self, batch: Batch) -> Batch:
    """Adds ``advantages`` and ``returns``, and a critic's ``values``.

    Raises:
      DataError: the batch has no rewards.
    """
    if batch.rewards is None:
      raise DataError("expected a batch with rewards, as DataCollector collects it")
    judge = self._actor if self._critic is None else self._critic
    return judge.compute_advantages(batch, batch.rewards)

  def step(
    self, batch: Batch, critic_scheduler: CriticWarmupScheduler | None = None
  ) -> dict[str, float]:
    """One training step: all epochs and mini-batches of critic and actor.

    Args:
      batch: of ``compute_advantages``.
      critic_scheduler: says who learns, and how much of the advantages, which it
        makes anew, is the critic's.

    Returns:
      ``actor_loss`` (nan while the critic alone learns), with a critic
      ``critic_loss``, ``reward`` (the mean score), and all metrics of both by the
      names of a run's metrics.jsonl.

    Raises:
      DataError: the batch has no advantages.
      ConfigError: the scheduler is of another critic.
    """
    if batch.advantages is None:
      raise DataError("expected a batch of compute_advantages, got one without")
    scheduler, actor_learns = critic_scheduler, True
    if scheduler is not None:
      batch, actor_learns = self._begin(batch, scheduler)
    if self._reference is not None:
      batch = self._reference.compute_ref_log_probs(batch)
    metrics = dict(batch.metrics)
    if self._critic is not None:
      metrics |= self._critic.update(batch)
    if actor_learns:
      metrics |= self._actor.update_policy(batch)
    if scheduler is not None:
      metrics["critic/share"] = scheduler.share
      scheduler.look(metrics.get("critic/vf_explained_var", 0.0))
    return _losses(metrics) | {"reward": float(batch.scores.mean())} | metrics

  def _begin(
    self, batch: Batch, scheduler: CriticWarmupScheduler
  ) -> tuple[Batch, bool]:
    """The batch with the advantages of this step, and whether the actor learns."""
    if scheduler.critic is not self._critic:
      raise ConfigError("critic_scheduler: expected one of the trainer's own critic")
    scheduler.begin_step()
    batch = self._critic.estimate_advantages(batch, critic_share=scheduler.share)
    return batch, scheduler.actor_learns

  def _check_roles(self) -> None:
    name = self._actor.config.algorithm.name
    if self._actor.algorithm.needs_critic and self._critic is None:
      raise ConfigError(
        f"critic: algorithm.name={name!r} of the actor's config needs one, got none; "
        'for an algorithm without: HFModelWrapper(..., config={"algorithm.name": '
        '"grpo", "rollout.n": 8})'
      )
    if self._critic is not None and not self._actor.algorithm.needs_critic:
      raise ConfigError(f"critic: expected none with algorithm.name={name!r}, got one")
    if self._reference is not None and not self._actor.config.actor.use_kl_loss:
      raise ConfigError(
        'reference: expected none without config={"actor.use_kl_loss": True}, got one'
      )


def _optim(role: str, lr: float | None, clip: float | None) -> dict[str, float]:
  keys = {f"{role}.optim.lr": lr, f"{role}.optim.clip_grad": clip}
  return {key: float(value) for key, value in keys.items() if value is not None}


def _losses(metrics: Mapping[str, float]) -> dict[str, float]:
  found = {"actor_loss": metrics.get("actor/loss", math.nan)}
  if "critic/vf_loss" in metrics:
    found["critic_loss"] = metrics["critic/vf_loss"]
  return found
