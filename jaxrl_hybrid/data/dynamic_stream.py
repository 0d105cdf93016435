"""A stream of prompt batches drawn by weight: by what rows are and what they teach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_hybrid.data.prompts import PromptDataset
from jaxrl_hybrid.data.stream import stages_of
from jaxrl_hybrid.data.weighting import WeightedDraws
from jaxrl_hybrid.errors import DataError
from jaxrl_hybrid.types import Prompt


class DynamicStream:
  """Has the methods of ``PromptStream``; an epoch is as many draws as there are rows.

  Args:
    dataset: the prompts.
    draws: of the rows of ``dataset``.
    batch_size: prompts per ``next``.
    curriculum: as of ``PromptStream``; weights apply to the rows that it allows.

  Raises:
    ConfigError, DataError: as ``PromptStream``; or a stage has no row of a weight
      above 0.
  """

  def __init__(
    self,
    dataset: PromptDataset,
    draws: WeightedDraws,
    *,
    batch_size: int,
    curriculum: tuple[tuple[int, int], ...] = (),
  ):
    self._dataset, self._draws, self._batch_size = dataset, draws, batch_size
    self._curriculum = [[int(step), int(level)] for step, level in curriculum]
    self._eligible = stages_of(dataset, self._curriculum)
    for rows in self._eligible:
      if not draws.weights[rows].any():
        raise DataError(
          f"{dataset.name}: expected a row of a weight above 0 in every stage of the "
          "curriculum, got none in one; change data.sampler.weight_fn"
        )
    self._index = {row.row_id: i for i, row in enumerate(dataset.prompts)}
    self._next_draw_id = 0

  @property
  def epoch(self) -> int:
    """Draws by rows, rounded down."""
    return self._next_draw_id // len(self._dataset)

  def next(self, step: int) -> list[Prompt]:
    """Draws ``batch_size`` prompts; see ``PromptStream.next``."""
    stage = sum(first <= step for first, _ in self._curriculum)
    rows = self._draws.draw(self._batch_size, self._eligible[stage])
    return [self._prompt(row) for row in rows]

  def learn(self, prompts: Sequence[Prompt], scores_N: np.ndarray) -> dict[str, float]:
    """Takes in the scores of N answers to ``prompts``; returns ``data/*`` metrics."""
    weights, rates = self._draws.weights, self._draws.rates
    rows_N = np.array([self._index[p.row_id] for p in prompts], np.int64)
    metrics = {
      "data/effective_rows": float(weights.sum() ** 2 / (weights**2).sum()),
      "data/expected_pass_rate": float(rates.rates[rows_N].mean()),
    }
    rates.learn(rows_N, scores_N)
    return metrics

  def state(self) -> dict[str, Any]:
    """The position of the stream and what it has learned as plain JSON data."""
    return {
      "curriculum": self._curriculum,
      "fingerprint": self._dataset.fingerprint,
      "next_draw_id": self._next_draw_id,
      "sampler": self._draws.state(),
    }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Continues exactly where ``state`` was taken; the batch size may differ.

    Raises:
      DataError: the state is of another data set, sampler or curriculum.
    """
    mine = self.state()
    missing = sorted(mine.keys() - state.keys())
    if missing:
      raise DataError(
        f"state of the data stream lacks {', '.join(missing)}; was it saved with "
        "another data.sampler.name?"
      )
    for key in ("curriculum", "fingerprint"):
      if state[key] != mine[key]:
        raise DataError(
          f"state of the data stream does not fit {self._dataset.name}: {key} was "
          f"{state[key]!r}, now {mine[key]!r}; resume with the same data and settings"
        )
    self._draws.restore(state["sampler"])
    self._next_draw_id = int(state["next_draw_id"])

  def _prompt(self, index: int) -> Prompt:
    row = self._dataset.prompts[index]
    draw_id, self._next_draw_id = self._next_draw_id, self._next_draw_id + 1
    return Prompt(row.ids, row.prompt, row.text, row.row_id, draw_id, dict(row.columns))
