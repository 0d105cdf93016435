"""DAPO's dynamic sampling and overlong shaping (Yu et al. 2025, arXiv:2503.14476)."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

import numpy as np

from jaxrl_hybrid.algorithms.groups import Groups
from jaxrl_hybrid.errors import ConfigError
from jaxrl_hybrid.types import Batch

PREFIX = "training/filter_groups/"


@dataclasses.dataclass(frozen=True)
class GroupFilter:
  """Samples until enough groups are mixed: those where not all did equally well.

  Attributes:
    metric: the reward function whose scores are compared; empty: the whole score.
    max_batches: most batches that are sampled for one step.
  """

  metric: str
  max_batches: int

  def collect(self, sample: Callable[[], Batch]) -> Batch:
    """The first mixed groups of several scored batches, as many as one batch has.

    With fewer after ``max_batches``, those that there are, and a warning; with none at
    all the last batch as it is, whose advantages are 0.

    Args:
      sample: gives scored batches, with new draw ids each time.

    Raises:
      ConfigError: there is no such reward function.
    """
    kept: list[Batch] = []
    found = wanted = sampled = 0
    for count in range(1, self.max_batches + 1):
      batch = sample()
      wanted = wanted or len(np.unique(batch.draw_ids))
      sampled += len(batch)
      kept.append(batch.select(np.flatnonzero(self._is_mixed(batch))))
      found += len(np.unique(kept[-1].draw_ids))
      if found >= wanted:
        break
    else:
      logging.warning(
        "algorithm.filter_groups: %d of %d groups are mixed after %d batches; the step "
        "goes on with %s",
        *(found, wanted, count, "these" if found else "the last batch as it is"),
      )
    result = Batch.concat(kept)
    evicted = sampled - len(result)
    if not found:
      result, evicted = batch.with_fields(metrics=result.metrics), 0
    draws = np.unique(result.draw_ids)[:wanted]
    chosen = result.select(np.flatnonzero(np.isin(result.draw_ids, draws)))
    return chosen.with_fields(
      metrics={
        f"{PREFIX}gen_batches": float(count),
        f"{PREFIX}mixed_share": found / (count * wanted),
        f"{PREFIX}evicted_samples": float(evicted),
        f"{PREFIX}discarded_surplus_samples": float(len(result) - len(chosen)),
      }
    )

  def _is_mixed(self, batch: Batch) -> np.ndarray:
    """bool ``[N]``."""
    scores = batch.scores
    if self.metric:
      if self.metric not in batch.score_terms:
        raise ConfigError(
          f"algorithm.filter_groups.metric: expected one of "
          f"{sorted(batch.score_terms)}, got {self.metric!r}"
        )
      scores = batch.score_terms[self.metric]
    return ~Groups(batch.draw_ids).constant(scores)


def overlong_penalty(
  lengths_N: np.ndarray, *, longest: int, buffer: int, factor: float
) -> np.ndarray:
  """fp32 ``[N]`` of penalties for responses that come close to the limit.

  0 up to ``longest - buffer`` tokens, then falling in a line to ``-factor`` at
  ``longest``.

  Args:
    lengths_N: of the responses, in tokens.
    longest: the limit.
    buffer: length of the part before it that is punished.
    factor: at the limit.
  """
  beyond = np.clip(lengths_N - (longest - buffer), 0, buffer)
  return (-factor * beyond / buffer).astype(np.float32)
