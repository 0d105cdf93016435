"""Rollout correction: the engine's probabilities are not exactly the trainer's.

With ``l = log p_trainer - log p_engine`` of each token, within +-20: importance
weights make up for the difference, and tokens or sequences that are too far off are
left out of the policy loss. Advantages and values are those of all tokens.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jaxrl_hybrid.types import Batch

LEVELS = ("off", "token", "sequence")
MAX_LOG_RATIO = 20.0
# Of a token k1: l, k2: l^2 / 2, k3: exp(l) - 1 - l; of a sequence their sum, mean or
# largest.
REJECTIONS = (
  *(f"token_k{i}" for i in (1, 2, 3)),
  *(f"seq_{how}_k{i}" for how in ("sum", "mean") for i in (1, 2, 3)),
  *(f"seq_max_k{i}" for i in (2, 3)),
)


@dataclasses.dataclass(frozen=True)
class Correction:
  """What is corrected, and how.

  Attributes:
    rollout_is: ``token``: weights exp(l); ``sequence``: exp of the sum of l, the same
      on all tokens (truncated importance sampling, Yao et al. 2025); ``off``.
    threshold: most of a weight; a larger one is cut.
    lower: if given, a weight outside of [lower, threshold] is 0 instead (IcePop,
      arXiv:2510.18855).
    batch_normalize: divide weights by their mean over the batch.
    rejections: (name of ``REJECTIONS``, threshold): what is left out. Of k1 is left
      out what is beyond +-log(threshold), of the others what is above threshold.
    bypass: the engine's log-probs are the old ones of the policy loss, whose ratio
      then is the correction; the trainer's are computed only if something above
      needs them.
  """

  rollout_is: str = "off"
  threshold: float = 2.0
  lower: float | None = None
  batch_normalize: bool = False
  rejections: tuple[tuple[str, float], ...] = ()
  bypass: bool = False

  @property
  def active(self) -> bool:
    """Whether it compares the trainer's log-probs with the engine's."""
    return self.rollout_is != "off" or bool(self.rejections)

  def correct(self, batch: Batch) -> Batch:
    """Adds ``is_weights``, ``policy_mask`` and ``rollout_corr/*``, as far as asked for.

    Args:
      batch: with ``old_log_probs`` of the trainer, unless nothing needs them; with
        ``bypass`` they are replaced by the engine's.
    """
    if self.active:
      batch = batch.with_fields(metrics=_divergence(batch, _log_ratio(batch)))
    if self.rollout_is != "off":
      batch = self._weigh(batch)
    if self.rejections:
      batch = self._reject(batch)
    if self.bypass:
      batch = batch.with_fields(old_log_probs=batch.rollout_log_probs)
    return batch

  def _weigh(self, batch: Batch) -> Batch:
    log_ratio, mask, metrics = _log_ratio(batch), batch.mask, {}
    if self.rollout_is == "sequence":
      total = np.clip(log_ratio.sum(-1), -MAX_LOG_RATIO, MAX_LOG_RATIO)
      log_ratio = np.where(mask, total[:, None], 0.0)
    raw = np.where(mask, np.exp(log_ratio), 0.0)
    weights = self._bounded(raw)
    if self.batch_normalize:
      mean = _mean(weights, mask, by_row=self.rollout_is == "sequence")
      metrics["rollout_corr/rollout_is_batch_norm_factor"] = mean
      weights = weights / mean if mean > 0 else weights
    return batch.with_fields(
      is_weights=weights.astype(np.float32),
      metrics=metrics | self._statistics(raw[mask], weights[mask]),
    )

  def _reject(self, batch: Batch) -> Batch:
    log_ratio, mask, metrics = _log_ratio(batch), batch.mask, {}
    kept = mask.copy()
    for name, threshold in self.rejections:
      keeps = _keeps(log_ratio, mask, name, threshold)
      metrics[f"rollout_corr/rollout_rs_{name}_masked_fraction"] = _share(~keeps, mask)
      kept &= keeps
    metrics["rollout_corr/rollout_rs_masked_fraction"] = _share(~kept, mask)
    metrics["rollout_corr/rollout_rs_seq_masked_fraction"] = _share(
      ~kept.any(-1), mask.any(-1)
    )
    return batch.with_fields(policy_mask=kept, metrics=metrics)

  def _bounded(self, weights: np.ndarray) -> np.ndarray:
    if self.lower is None:
      return np.minimum(weights, self.threshold)
    inside = (weights >= self.lower) & (weights <= self.threshold)
    return np.where(inside, weights, 0.0)

  def _statistics(self, raw: np.ndarray, weights: np.ndarray) -> dict[str, float]:
    if not weights.size:
      return {}
    low = 1.0 / self.threshold if self.lower is None else self.lower
    squares = float((weights**2).sum())
    found = {
      "mean": weights.mean(),
      "std": weights.std(),
      "max": weights.max(),
      "min": weights.min(),
      "ratio_fraction_high": (raw > self.threshold).mean(),
      "ratio_fraction_low": (raw < low).mean(),
      "eff_sample_size": weights.sum() ** 2 / squares / weights.size if squares else 0,
    }
    return {f"rollout_corr/rollout_is_{k}": float(v) for k, v in found.items()}


def _log_ratio(batch: Batch) -> np.ndarray:
  """fp64 ``[N, R]``: l, 0 outside of the mask."""
  gap = batch.old_log_probs.astype(np.float64) - batch.rollout_log_probs
  return np.where(batch.mask, np.clip(gap, -MAX_LOG_RATIO, MAX_LOG_RATIO), 0.0)


def _keeps(
  log_ratio: np.ndarray, mask: np.ndarray, name: str, threshold: float
) -> np.ndarray:
  """bool ``[N, R]``: what a rejection lets pass."""
  *level, kind = name.split("_")
  statistic = {
    "k1": log_ratio,
    "k2": 0.5 * log_ratio**2,
    "k3": np.exp(log_ratio) - 1.0 - log_ratio,
  }[kind]
  if level[0] == "seq":
    rows = {
      "sum": statistic.sum(-1),
      "mean": statistic.sum(-1) / np.maximum(mask.sum(-1), 1),
      "max": statistic.max(-1),
    }[level[1]]
    statistic = np.broadcast_to(rows[:, None], mask.shape)
  if kind == "k1":
    return np.abs(statistic) <= math.log(threshold)
  return statistic <= threshold


def _divergence(batch: Batch, log_ratio: np.ndarray) -> dict[str, float]:
  """How far engine and trainer are apart, of tokens and of sequences."""
  mask = batch.mask
  rows = mask.any(-1)
  if not rows.any():
    return {}
  counts = mask.sum(-1)[rows]
  per_row = lambda x: np.where(mask, x, 0.0).sum(-1)[rows] / counts
  of = log_ratio[mask]
  sequence = np.clip(log_ratio.sum(-1)[rows], -MAX_LOG_RATIO, MAX_LOG_RATIO)
  training, rollout = -per_row(batch.old_log_probs), -per_row(batch.rollout_log_probs)
  found = {
    "kl": -of.mean(),
    "k3_kl": (np.exp(of) - 1.0 - of).mean(),
    "chi2_token": np.exp(2 * of).mean() - 1.0,
    "chi2_seq": np.exp(2 * sequence).mean() - 1.0,
    "training_ppl": np.exp(training).mean(),
    "rollout_ppl": np.exp(rollout).mean(),
    "log_ppl_diff": (rollout - training).mean(),
    "log_ppl_abs_diff": np.abs(rollout - training).mean(),
  }
  return {f"rollout_corr/{name}": float(value) for name, value in found.items()}


def _mean(x: np.ndarray, mask: np.ndarray, *, by_row: bool) -> float:
  """Over tokens, or over sequences whose tokens have the same number."""
  if by_row:
    rows = mask.any(-1)
    return float(x.max(-1)[rows].mean()) if rows.any() else 0.0
  return float(x[mask].mean()) if mask.any() else 0.0


def _share(x: np.ndarray, mask: np.ndarray) -> float:
  return float(x[mask].mean()) if mask.any() else 0.0
