"""The reward worker: decodes responses and turns scores into token rewards."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_hybrid.algorithms.filtering import overlong_penalty
from jaxrl_hybrid.errors import RewardError
from jaxrl_hybrid.parallel.multihost import is_primary
from jaxrl_hybrid.rewards.early import EarlyScores, Outcomes
from jaxrl_hybrid.rewards.runner import RewardResult, RewardRunner, arguments
from jaxrl_hybrid.rollout.completions import Completions
from jaxrl_hybrid.runtime import processes
from jaxrl_hybrid.types import STOP, Batch, Prompt
from jaxrl_hybrid.workers.reward_model import NAME, RewardModel

OVERLONG = "overlong"  # of its term


class Watch:
  """Scores rows as the engine ends them: ``Engine.generate``'s ``on_finished``.

  Args:
    prompts: of every row.
    early: takes samples, on process 0; None elsewhere.
    decode: (ids, finish reason) -> text.
  """

  def __init__(
    self,
    prompts: Sequence[Prompt],
    early: EarlyScores | None,
    decode: Callable[[np.ndarray, str], str],
  ):
    self._prompts, self._early, self._decode = prompts, early, decode
    self.texts: dict[int, str] = {}

  def __call__(self, rows: Sequence[int], completions: Completions) -> None:
    """Decodes rows and has them scored; returns at once."""
    for i in rows:
      ids = completions.ids[i, : completions.lengths[i]]
      self.texts[i] = self._decode(ids, completions.reason(i))
    if self._early is not None:
      self._early.add({i: arguments(self._prompts[i], self.texts[i]) for i in rows})

  def outcomes(self) -> Outcomes:
    """Waits for what was started."""
    return {} if self._early is None else self._early.outcomes()


@dataclasses.dataclass(frozen=True)
class Overlong:
  """One more term of the reward, for responses close to the limit.

  Attributes:
    longest: tokens of the longest response.
    buffer: tokens before it where the penalty begins.
    factor: of the penalty at ``longest``.
  """

  longest: int
  buffer: int
  factor: float


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
    overlong: Overlong | None = None,
  ):
    """Keeps the arguments.

    Args:
      tokenizer: has ``decode(ids, skip_special_tokens=...)`` as in transformers.
      runner: the reward functions.
      min_group_size: samples that a draw needs; a draw that falls below it
        because samples were removed is removed as a whole.
      skip_special_tokens: reward functions see the text without EOS, padding and
        other special strings; False shows all of them but the EOS that ended it.
      overlong: the term of this name that the runner is given, if there is one.
    """
    self._tokenizer = tokenizer
    self._runner = runner
    self._min_group_size = min_group_size
    self._skip_special_tokens = skip_special_tokens
    self._overlong = overlong
    self.model: RewardModel | None = None

  def with_model(self, model: RewardModel) -> RewardWorker:
    """The same worker with the reward model that its runner has a term for."""
    worker = copy.copy(self)
    worker.model = model
    return worker

  def watch(self, prompts: Sequence[Prompt]) -> Watch:
    """Starts to score rows whose ``prompts`` these are, as they end."""
    early = self._runner.start() if is_primary() else None
    return Watch(prompts, early, self._decode)

  def score(self, batch: Batch) -> RewardResult:
    """Decodes and scores all N rows; removes none.

    Raises:
      RewardError: a reward function failed and ``rewards.on_error`` is "raise".
    """
    return self._score(batch, self._texts(batch))

  def compute_rewards(self, batch: Batch, watch: Watch | None = None) -> Batch:
    """Adds texts, scores, score_terms, rewards ``[N, R]`` and metrics.

    The score sits on the last valid token, EOS included. Rows without a valid
    score are removed, with their whole draw when fewer than min_group_size stay.

    Args:
      batch: N finished sequences of at least one response token each.
      watch: has seen the same rows end, in the same places.

    Returns:
      The batch of the rows that are left, in their order.

    Raises:
      RewardError: a reward function failed and ``rewards.on_error`` is "raise",
        or no row is left.
    """
    texts, result, kept = self._judge(batch, watch)
    scored = batch.with_fields(
      texts=texts,
      scores=result.scores,
      score_terms=result.terms,
      score_weights=result.weights,
      rewards=on_last_token(result.scores, batch),
    ).select(kept)
    removed = {"reward/removed_count": float(len(batch) - kept.size)}
    return scored.with_fields(
      metrics={**result.metrics, **removed, **_statistics(result.scores[kept])}
    )

  def compute_costs(self, batch: Batch) -> Batch:
    """Adds costs ``[N]`` and token_costs ``[N, R]``, which are to be low: ``cost/*``.

    Everything else is as of ``compute_rewards``.
    """
    _, result, kept = self._judge(batch, None)
    metrics = {
      name.replace("reward/", "cost/", 1): value
      for name, value in result.metrics.items()
    }
    metrics["cost/removed_count"] = float(len(batch) - kept.size)
    metrics["cost/mean"] = float(result.scores[kept].mean(dtype=np.float64))
    return batch.with_fields(
      costs=result.scores,
      token_costs=on_last_token(result.scores, batch),
      metrics=metrics,
    ).select(kept)

  def _judge(
    self, batch: Batch, watch: Watch | None
  ) -> tuple[list[str], RewardResult, np.ndarray]:
    """(texts, what they got, the rows that stay)."""
    if watch is not None and len(watch.texts) == len(batch):
      texts = [watch.texts[i] for i in range(len(batch))]
    else:
      texts = self._texts(batch)
    result = self._score(batch, texts, watch)
    kept = np.flatnonzero(self._kept(batch.draw_ids, result.valid))
    if not kept.size:
      raise RewardError(
        f"expected at least one sample with a valid score, got none of {len(batch)} "
        f"({result.bad_count} bad scores, groups need {self._min_group_size} samples);"
        " mend the reward function, or set rewards.on_error=zero"
      )
    return texts, result, kept

  def _score(
    self, batch: Batch, texts: list[str], watch: Watch | None = None
  ) -> RewardResult:
    ids = [batch.response(i) for i in range(len(batch))]
    given = self._given(batch, texts)

    def score() -> RewardResult:
      early = watch.outcomes() if watch else None
      return self._runner.score(batch.prompts, texts, ids, given, early)

    found = processes.from_primary(lambda: dataclasses.asdict(score()))
    return RewardResult(**found)

  def _given(self, batch: Batch, texts: list[str]) -> dict[str, Sequence[Any]]:
    """N scores of each term that is no function."""
    given: dict[str, Sequence[Any]] = {}
    if self.model:
      given[NAME] = self.model.score(batch, texts)
    if self._overlong:
      penalty = overlong_penalty(
        batch.response_lengths, **dataclasses.asdict(self._overlong)
      )
      given[OVERLONG] = penalty.tolist()
    return given

  def _texts(self, batch: Batch) -> list[str]:
    skip = self._skip_special_tokens
    return decode_responses(batch, self._tokenizer, skip_special_tokens=skip)

  def _decode(self, ids: np.ndarray, reason: str) -> str:
    skip = self._skip_special_tokens
    return decode_response(ids, reason, self._tokenizer, skip_special_tokens=skip)

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
  return [
    decode_response(
      batch.response(i), reason, tokenizer, skip_special_tokens=skip_special_tokens
    )
    for i, reason in enumerate(batch.finish_reasons)
  ]


def decode_response(
  ids: np.ndarray, reason: str, tokenizer: Any, *, skip_special_tokens: bool
) -> str:
  """One completion as text, without the EOS that ended it."""
  if reason == STOP:
    # The tokenizer does not know every EOS id of a generation config as special,
    # and would print it.
    ids = ids[:-1]
  return tokenizer.decode(ids.tolist(), skip_special_tokens=skip_special_tokens)


def on_last_token(scores: np.ndarray, batch: Batch) -> np.ndarray:
  """Scores ``[N]`` as token rewards ``[N, R]``: on the last valid token."""
  lengths = np.asarray(batch.response_lengths)
  assert (lengths > 0).all(), "a response has at least one token"
  rewards = np.zeros(batch.response_ids.shape, np.float32)
  rewards[np.arange(len(lengths)), lengths - 1] = scores
  return rewards
