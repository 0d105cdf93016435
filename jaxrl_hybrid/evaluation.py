"""Greedy evaluation on held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jaxrl_hybrid.types import STOP, Batch, Prompt
from jaxrl_hybrid.workers.reward import RewardWorker

# One sample as the user sees it: prompt, completion, answer, reward.
Sample = tuple[str, str, str | None, float]


def evaluate(
  generate: Callable[[Sequence[Prompt]], Batch],
  reward: RewardWorker,
  prompts: Sequence[Prompt],
) -> tuple[dict[str, float], list[Sample]]:
  """Scores one completion per prompt.

  Args:
    generate: greedy generation.
    reward: scores; a failing reward follows ``rewards.on_error``, skipped
      samples do not count.
    prompts: at least one.

  Returns:
    (``eval/*`` metrics, all samples). ``eval/exact_match`` is there when rows
    have a ground truth; ``eval/reward/level_K`` when rows have several levels.
  """
  batch = reward.compute_rewards(generate(prompts))
  samples = to_samples(batch)
  stopped = [reason == STOP for reason in batch.finish_reasons]
  metrics = {
    "eval/reward": float(batch.scores.mean()),
    "eval/response_length/mean": float(batch.response_lengths.mean()),
    "eval/stopped": float(np.mean(stopped)),
    "eval/samples": float(len(batch)),
  }
  exact = [
    text.strip() == answer for _, text, answer, _ in samples if answer is not None
  ]
  if exact:
    metrics["eval/exact_match"] = float(np.mean(exact))
  return metrics | _by_level(batch), samples


def to_samples(batch: Batch) -> list[Sample]:
  """The rows of a scored batch as the user sees them."""
  return [
    (_shown(prompt), text, _answer(prompt), float(score))
    for prompt, text, score in zip(
      batch.prompts, batch.texts, batch.scores, strict=True
    )
  ]


def _shown(prompt: Prompt) -> str:
  """A chat's last message; the template around it is the same for all."""
  return prompt.text if isinstance(prompt.prompt, str) else prompt.prompt[-1]["content"]


def _answer(prompt: Prompt) -> str | None:
  columns = prompt.columns
  nested = columns.get("reward_model")
  if isinstance(nested, dict) and "ground_truth" in nested:
    columns = nested
  answer = columns.get("ground_truth", columns.get("answer"))
  return None if answer is None else str(answer).strip()


def _by_level(batch: Batch) -> dict[str, float]:
  values = [prompt.columns.get("level") for prompt in batch.prompts]
  if not all(isinstance(value, int | str) for value in values):
    return {}
  levels = np.array([str(value) for value in values])
  found = sorted(set(levels.tolist()))
  if len(found) < 2:
    return {}
  return {
    f"eval/reward/level_{level}": float(batch.scores[levels == level].mean())
    for level in found
  }
