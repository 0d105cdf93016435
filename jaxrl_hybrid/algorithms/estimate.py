"""From a scored ``Batch`` to advantages: the step between reward and update."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxrl_hybrid.algorithms import advantages, reduce
from jaxrl_hybrid.algorithms import kl as kl_lib
from jaxrl_hybrid.algorithms.presets import Algorithm
from jaxrl_hybrid.types import Batch

Arrays = tuple[np.ndarray, np.ndarray]  # (advantages, returns) [N, R]


def _gae(batch: Batch, algorithm: Algorithm) -> Arrays:
  return advantages.gae(
    batch.rewards, batch.values, batch.mask, gamma=algorithm.gamma, lam=algorithm.lam
  )


def _grpo(batch: Batch, algorithm: Algorithm) -> Arrays:
  outcome = np.where(batch.valid_mask, batch.rewards, 0.0).sum(-1)
  per_row = advantages.grpo(
    outcome, batch.draw_ids, norm_by_std=algorithm.norm_adv_by_std
  )
  spread = np.where(batch.mask, per_row[:, None], np.float32(0))
  return spread, spread


def _remax(batch: Batch, algorithm: Algorithm) -> Arrays:
  del algorithm
  return advantages.remax(batch.rewards, batch.baseline_scores, batch.mask)


ESTIMATORS: dict[str, Callable[[Batch, Algorithm], Arrays]] = {
  "gae": _gae,
  "grpo": _grpo,
  "remax": _remax,
}


def compute_advantages(
  batch: Batch, algorithm: Algorithm, kl_controller: kl_lib.KLController
) -> Batch:
  """Adds ``advantages`` and ``returns`` (and the KL in the reward, if asked).

  Needs ``rewards``; ``values`` for gae, ``baseline_scores`` for remax,
  ``old_log_probs`` and ``ref_log_probs`` for the KL in the reward.
  """
  if algorithm.use_kl_in_reward:
    batch = _penalize(batch, algorithm, kl_controller)
  found, returns = ESTIMATORS[algorithm.adv_estimator](batch, algorithm)
  if algorithm.whiten_advantages:
    found = reduce.whiten(found, batch.mask)
  return batch.with_fields(
    advantages=found,
    returns=returns,
    metrics=_statistics(batch, advantages=found, returns=returns),
  )


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
