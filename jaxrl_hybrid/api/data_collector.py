"""``DataCollector``: prompts in, scored sequences out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_hybrid.api.learning import with_rewards
from jaxrl_hybrid.api.model_wrapper import HFModelWrapper
from jaxrl_hybrid.api.sequences import Sequences


class DataCollector:
  """The rollout of a training loop: an actor and what judges its answers."""

  def __init__(
    self,
    actor: HFModelWrapper,
    reward_fn: Callable[[Sequences], Any],
    max_seq_len: int | None = None,
    num_rollouts_per_prompt: int | None = None,
  ):
    """Keeps the arguments.

    Args:
      actor: generates.
      reward_fn: takes N sequences (``texts``, ``prompts``, ``response(i)``) and
        returns ``[N]`` numbers, or ``[N, R]``, one per token. Of several processes
        each calls it, with the same sequences, and must get the same numbers.
      max_seq_len: most tokens of prompt and answer together; None: they have
        ``data.max_prompt_length`` and ``data.max_response_length`` of the actor.
      num_rollouts_per_prompt: None: ``rollout.n`` of the actor.
    """
    self._actor, self._reward_fn = actor, reward_fn
    self._limits = {"max_seq_len": max_seq_len}
    self._samples = num_rollouts_per_prompt

  def collect(self, prompts: Sequence[Any]) -> Sequences:
    """Samples answers and scores them.

    Args:
      prompts: P strings, lists of messages, or lists of token ids; or what a
        ``DynamicDataSampler`` returned.

    Returns:
      A batch of N = P * num_rollouts_per_prompt rows, prompt by prompt, with
      ``rewards`` and ``scores``; with the scores of each prompt's greedy answer too,
      if the actor's algorithm compares with it.

    Raises:
      DataError: no prompts, too long ones, or rewards that are no finite numbers.
    """
    batch = self._actor.generate_sequences(prompts, n=self._samples, **self._limits)
    batch = with_rewards(batch, self._reward_fn(batch))
    if self._actor.algorithm.needs_greedy_baseline:
      baselines = self._greedy_scores([*batch.prompts[:: len(batch) // len(prompts)]])
      batch = batch.with_fields(
        baseline_scores=np.repeat(baselines, len(batch) // len(prompts))
      )
    return batch

  def _greedy_scores(self, prompts: Sequence[Any]) -> np.ndarray:
    greedy = self._actor.generate_sequences(prompts, greedy=True, **self._limits)
    return with_rewards(greedy, self._reward_fn(greedy)).scores
