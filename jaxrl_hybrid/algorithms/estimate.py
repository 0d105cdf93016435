"""From a scored ``Batch`` to advantages: the step between reward and update."""

from __future__ import annotations

import numpy as np

from jaxrl_hybrid.algorithms import kl as kl_lib
from jaxrl_hybrid.algorithms import reduce
from jaxrl_hybrid.algorithms.lagrange import Multiplier
from jaxrl_hybrid.algorithms.presets import Algorithm
from jaxrl_hybrid.algorithms.registry import ESTIMATORS
from jaxrl_hybrid.algorithms.warmup import take_over
from jaxrl_hybrid.errors import ConfigError, NumericsError
from jaxrl_hybrid.types import Batch

Arrays = tuple[np.ndarray, np.ndarray]  # (advantages, returns) [N, R]


def compute_advantages(
  batch: Batch,
  algorithm: Algorithm,
  kl_controller: kl_lib.KLController,
  *,
  critic_share: float = 1.0,
  multiplier: Multiplier | None = None,
) -> Batch:
  """Adds ``advantages`` and ``returns`` (and the KL in the reward, if asked).

  Needs ``rewards``, what the estimator needs (``registry.NEEDS``), and
  ``old_log_probs`` and ``ref_log_probs`` for the KL in the reward.

  Args:
    batch: a scored batch.
    algorithm: how.
    kl_controller: of the KL in the reward; it adapts.
    critic_share: that of ``warmup.take_over``.
    multiplier: of the costs, if there are any: ``cost_returns`` are added too.

  Raises:
    ConfigError: an estimator gives arrays of another shape.
    NumericsError: it gives numbers that are not finite.
  """
  if algorithm.use_kl_in_reward:
    batch = _penalize(batch, algorithm, kl_controller)
  found, returns = estimate(batch, algorithm, critic_share=critic_share)
  if multiplier is not None:
    own = batch.with_fields(
      scores=batch.costs, rewards=batch.token_costs, values=batch.cost_values
    )
    costs, cost_returns = estimate(own, algorithm, critic_share=critic_share)
    batch = batch.with_fields(cost_returns=cost_returns)
    found = multiplier.combine(found, costs)
  if algorithm.whiten_advantages:
    found = reduce.whiten(found, batch.mask)
  return batch.with_fields(
    advantages=found,
    returns=returns,
    metrics=_statistics(batch, advantages=found, returns=returns),
  )


def estimate(
  batch: Batch, algorithm: Algorithm, *, critic_share: float = 1.0
) -> Arrays:
  """(advantages, returns) ``[N, R]`` of the estimator, 0 outside of the mask.

  Raises:
    ConfigError, NumericsError: as ``compute_advantages``.
  """
  name = algorithm.adv_estimator
  found = ESTIMATORS[name].function(batch, algorithm)
  both = found if isinstance(found, tuple) else (found, found)
  advantages, returns = (_per_token(x, batch, name) for x in both)
  if critic_share == 1.0:
    return advantages, returns
  return take_over(
    advantages,
    returns,
    batch.rewards,
    batch.mask,
    gamma=algorithm.gamma,
    share=critic_share,
  )


def _per_token(x: np.ndarray, batch: Batch, name: str) -> np.ndarray:
  """fp32 ``[N, R]``: a number of a row is that of all of its tokens."""
  x, mask = np.asarray(x), batch.mask
  if x.shape not in (mask.shape, mask.shape[:1]):
    raise ConfigError(
      f"advantage estimator {name!r}: expected an array of shape {mask.shape} or "
      f"{mask.shape[:1]}, got {x.shape}"
    )
  spread = x[:, None] if x.ndim == 1 else x
  found = np.where(mask, spread, 0.0).astype(np.float32)
  if not np.isfinite(found).all():
    raise NumericsError(
      f"advantage estimator {name!r} gives numbers that are not finite"
    )
  return found


def _penalize(batch: Batch, algorithm: Algorithm, controller) -> Batch:
  kl = np.asarray(
    kl_lib.kl_estimate(batch.old_log_probs, batch.ref_log_probs, algorithm.kl_penalty)
  )
  kl = np.where(batch.mask, kl, 0.0).astype(np.float32)
  mean_kl = float(kl.sum(-1).mean())
  metrics = {
    "actor/reward_kl_penalty": mean_kl,
    "actor/reward_kl_penalty_coeff": controller.coef,
  }
  batch = batch.with_fields(
    rewards=batch.rewards - controller.coef * kl, metrics=metrics
  )
  controller.update(mean_kl, len(batch))
  return batch


def _statistics(batch: Batch, **arrays: np.ndarray) -> dict[str, float]:
  if batch.values is not None:
    arrays["values"] = batch.values
  metrics = {}
  for name, array in arrays.items():
    picked = array[batch.mask]
    if picked.size:
      metrics |= {
        f"critic/{name}/mean": float(picked.mean()),
        f"critic/{name}/max": float(picked.max()),
        f"critic/{name}/min": float(picked.min()),
      }
  if batch.values is not None and batch.mask.any():
    variance = float(returns_variance := arrays["returns"][batch.mask].var())
    error = (arrays["returns"] - batch.values)[batch.mask].var()
    metrics["critic/vf_explained_var"] = (
      float(1.0 - error / variance) if returns_variance > 1e-12 else 0.0
    )
  return metrics
