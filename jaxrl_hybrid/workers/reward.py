"""The reward worker: decodes responses and turns scores into token rewards."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np

from jaxrl_hybrid.errors import RewardError
from jaxrl_hybrid.rewards.runner import RewardResult, RewardRunner
from jaxrl_hybrid.runtime import processes
from jaxrl_hybrid.types import STOP, Batch
from jaxrl_hybrid.workers.reward_model import NAME, RewardModel


class RewardWorker:
  """Scores finished sequences: functions on the host of process 0, and a model.

  ``model`` is the reward model, if there is one.
  """

  def __init__(
    self,
    tokenizer: Any,
    runner: RewardRunner,
    *,
    min_group_size: int = 1,
    skip_special_tokens: bool = True,
  ):
    """Keeps the arguments.

    Args:
      tokenizer: has ``decode(ids, skip_special_tokens=...)`` as in transformers.
      runner: the reward functions.
      min_group_size: samples that a draw needs; a draw that falls below it
        because samples were removed is removed as a whole.
      skip_special_tokens: reward functions see the text without EOS, padding and
        other special strings; False shows all of them but the EOS that ended it.
    """
    self._tokenizer = tokenizer
    self._runner = runner
    self._min_group_size = min_group_size
    self._skip_special_tokens = skip_special_tokens
    self.model: RewardModel | None = None

  def with_model(self, model: RewardModel) -> RewardWorker:
    """The same worker with the reward model that its runner has a term for."""
    worker = copy.copy(self)
    worker.model = model
    return worker

  def score(self, batch: Batch) -> RewardResult:
    """Decodes and scores all N rows; removes none.

    Raises:
      RewardError: a reward function failed and ``rewards.on_error`` is "raise".
    """
    return self._score(batch, self._texts(batch))

  def compute_rewards(self, batch: Batch) -> Batch:
    """Adds texts, scores, score_terms, rewards ``[N, R]`` and metrics.

    The score sits on the last valid token, EOS included. Rows without a valid
    score are removed, with their whole draw when fewer than min_group_size stay.

    Args:
      batch: N finished sequences of at least one response token each.

    Returns:
      The batch of the rows that are left, in their order.

    Raises:
      RewardError: a reward function failed and ``rewards.on_error`` is "raise",
        or no row is left.
    """
    texts = self._texts(batch)
    result = self._score(batch, texts)
    kept = np.flatnonzero(self._kept(batch.draw_ids, result.valid))
    if not kept.size:
      raise RewardError(
        f"expected at least one sample with a valid score, got none of {len(batch)} "
        f"({result.bad_count} bad scores, groups need {self._min_group_size} samples);"
        " mend the reward function, or set rewards.on_error=zero"
      )
    scored = batch.with_fields(
      texts=texts,
      scores=result.scores,
      score_terms=result.terms,
      rewards=on_last_token(result.scores, batch),
    ).select(kept)
    removed = {"reward/removed_count": float(len(batch) - kept.size)}
    return scored.with_fields(
      metrics={**result.metrics, **removed, **_statistics(result.scores[kept])}
    )

  def _score(self, batch: Batch, texts: list[str]) -> RewardResult:
    ids = [batch.response(i) for i in range(len(batch))]
    given = {NAME: self.model.score(batch, texts)} if self.model else None
    score = lambda: self._runner.score(batch.prompts, texts, ids, given)
    found = processes.from_primary(lambda: dataclasses.asdict(score()))
    return RewardResult(**found)

  def _texts(self, batch: Batch) -> list[str]:
    skip = self._skip_special_tokens
    return decode_responses(batch, self._tokenizer, skip_special_tokens=skip)

  def _kept(self, draw_ids: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Returns bool ``[N]``: valid, and in a draw that is still large enough."""
    broken = np.unique(draw_ids[~valid])
    draws, counts = np.unique(draw_ids[valid], return_counts=True)
    small = draws[counts < self._min_group_size]
    return valid & ~np.isin(draw_ids, np.intersect1d(broken, small))


def _statistics(scores: np.ndarray) -> dict[str, float]:
  return {
    "critic/rewards/mean": float(scores.mean(dtype=np.float64)),
    "critic/rewards/max": float(scores.max()),
    "critic/rewards/min": float(scores.min()),
  }


def decode_responses(
  batch: Batch, tokenizer: Any, *, skip_special_tokens: bool
) -> list[str]:
  """The N completions as text, without the EOS that ended them."""
  texts = []
  for i, reason in enumerate(batch.finish_reasons):
    ids = batch.response(i)
    if reason == STOP:
      # The tokenizer does not know every EOS id of a generation config as
      # special, and would print it.
      ids = ids[:-1]
    texts.append(
      tokenizer.decode(ids.tolist(), skip_special_tokens=skip_special_tokens)
    )
  return texts


def on_last_token(scores: np.ndarray, batch: Batch) -> np.ndarray:
  """Scores ``[N]`` as token rewards ``[N, R]``: on the last valid token."""
  lengths = np.asarray(batch.response_lengths)
  assert (lengths > 0).all(), "a response has at least one token"
  rewards = np.zeros(batch.response_ids.shape, np.float32)
  rewards[np.arange(len(lengths)), lengths - 1] = scores
  return rewards
