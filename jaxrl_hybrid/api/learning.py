"""What a batch learns from: rewards and advantages as a caller hands them over."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxrl_hybrid.algorithms.presets import Algorithm
from jaxrl_hybrid.api.sequences import numbers
from jaxrl_hybrid.errors import DataError
from jaxrl_hybrid.types import Batch
from jaxrl_hybrid.workers.reward import on_last_token


def with_rewards(batch: Batch, rewards: Any) -> Batch:
  """Adds ``rewards`` ``[N, R]`` and their sums, ``scores`` ``[N]``.

  Args:
    batch: N sequences.
    rewards: ``[N]``, for the last token of each sequence, or ``[N, R]``, per token.

  Raises:
    DataError: rewards of another shape, or not finite.
  """
  rewards = numbers(rewards, "rewards")
  if rewards.shape not in ((len(batch),), batch.response_ids.shape):
    raise DataError(
      f"rewards: expected shape ({len(batch)},) or {batch.response_ids.shape}, got "
      f"{rewards.shape}"
    )
  per_token = on_last_token(rewards, batch) if rewards.ndim == 1 else rewards
  if not np.isfinite(per_token[batch.valid_mask]).all():
    raise DataError("rewards: expected finite numbers, got some that are not")
  scores = np.where(batch.valid_mask, per_token, 0.0).sum(-1).astype(np.float32)
  return batch.with_fields(rewards=per_token, scores=scores)


def check_needs(batch: Batch, algorithm: Algorithm, name: str) -> None:
  """Whether the batch has what the caller alone can give an algorithm of this name.

  Raises:
    DataError: greedy baselines or the scores of each reward function are missing.
  """
  if algorithm.needs_terms and not batch.score_terms:
    raise DataError(
      f"{name}: expected score_terms and score_weights in the batch "
      "(batch.with_fields), one per reward function, got none"
    )
  if algorithm.needs_greedy_baseline and batch.baseline_scores is None:
    raise DataError(
      f"{name}: expected baseline_scores in the batch, as DataCollector adds them, got "
      "none"
    )


def with_advantages(batch: Batch, advantages: Batch | np.ndarray | None) -> Batch:
  """The batch with ``advantages``: its own, or those beside it.

  Args:
    batch: N sequences.
    advantages: what ``compute_advantages`` returned, or an array ``[N]`` or
      ``[N, R]``; None: the batch has them.

  Raises:
    DataError: there are none, they are not finite, or of other sequences.
  """
  if isinstance(advantages, Batch):
    same = advantages.response_ids.shape == batch.response_ids.shape
    if not same or (advantages.response_ids != batch.response_ids).any():
      raise DataError("advantages: expected those of the same sequences, got others")
    batch = advantages
  elif advantages is not None:
    found, shape = numbers(advantages, "advantages"), batch.response_ids.shape
    if found.shape not in (shape, shape[:1]):
      raise DataError(
        f"advantages: expected shape {shape} or {shape[:1]}, got {found.shape}"
      )
    if found.ndim == 1:
      found = np.where(batch.mask, found[:, None], np.float32(0))
    if not np.isfinite(found[batch.mask]).all():
      raise DataError("advantages: expected finite numbers, got some that are not")
    batch = batch.with_fields(advantages=found)
  if batch.advantages is None:
    raise DataError(
      "update_policy: expected advantages, in the batch or beside it, got none"
    )
  return batch
