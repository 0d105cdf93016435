"""Endless, resumable stream of prompt batches."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_hybrid.data.prompts import PromptDataset
from jaxrl_hybrid.errors import ConfigError, DataError
from jaxrl_hybrid.types import Prompt

logger = logging.getLogger(__name__)


class PromptStream:
  """Draws batches of prompts, pass after pass over the data set.

  Every pass is a permutation keyed by (seed, epoch, stage). Passes follow each
  other without a gap: a batch may hold the end of one and the start of the next,
  so no row is left out and a row can stand twice in a batch, under two draw ids.
  A change of the curriculum's stage starts a new pass.
  """

  def __init__(
    self,
    dataset: PromptDataset,
    *,
    batch_size: int,
    seed: int,
    shuffle: bool,
    curriculum: tuple[tuple[int, int], ...] = (),
  ):
    """Checks everything that could fail later.

    Args:
      dataset: the prompts.
      batch_size: prompts per ``next``.
      seed: 0 or more; keys the permutations.
      shuffle: False keeps the data set's order in every pass.
      curriculum: (first_step, max_level) pairs, first steps rising; from then on
        only rows with ``level`` <= max_level are drawn, before the first all are.

    Raises:
      ConfigError: a bad batch size, seed or curriculum.
      DataError: a row without an integer ``level``, or a stage without rows.
    """
    if batch_size < 1 or seed < 0:
      raise ConfigError(f"{batch_size=}, {seed=}; expected at least 1 and 0")
    self._dataset = dataset
    self._batch_size = batch_size
    self._settings = {
      "seed": int(seed),
      "shuffle": bool(shuffle),
      "curriculum": [[int(step), int(level)] for step, level in curriculum],
    }
    self._eligible = stages_of(dataset, self._settings["curriculum"])
    self._stage = 0
    self._epoch = 0
    self._position = 0  # in the permutation of this epoch and stage
    self._next_draw_id = 0
    self._order = self._permutation()
    self._wrap_logged = False

  @property
  def epoch(self) -> int:
    """Number of completed passes; stage changes abandon a pass uncounted."""
    return self._epoch

  def next(self, step: int) -> list[Prompt]:
    """Draws ``batch_size`` prompts with new, rising draw ids.

    Args:
      step: the training step; only the curriculum looks at it. Several batches
        may be drawn for one step.
    """
    first_steps = [first for first, _ in self._settings["curriculum"]]
    stage = sum(first <= step for first in first_steps)
    if stage != self._stage:
      self._stage, self._position = stage, 0
      self._order = self._permutation()
    self._log_wrap()
    return [self._draw() for _ in range(self._batch_size)]

  def learn(self, prompts: Sequence[Prompt], scores_N: np.ndarray) -> dict[str, float]:
    """Nothing: every row comes once in a pass, however it is answered."""
    del prompts, scores_N
    return {}

  def state(self) -> dict[str, Any]:
    """The position of the stream as plain JSON data."""
    return {
      **self._settings,
      "curriculum": [list(pair) for pair in self._settings["curriculum"]],
      "count": len(self._dataset),
      "fingerprint": self._dataset.fingerprint,
      "stage": self._stage,
      "epoch": self._epoch,
      "position": self._position,
      "next_draw_id": self._next_draw_id,
    }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Continues exactly where ``state`` was taken; the batch size may differ.

    Raises:
      DataError: the state is incomplete, or of another data set, seed, shuffle or
        curriculum. The stream is then unchanged.
    """
    mine = self.state()
    missing = sorted(mine.keys() - state.keys())
    if missing:
      raise DataError(f"state of the data stream lacks {', '.join(missing)}")
    for key in ("count", "fingerprint", *self._settings):
      if state[key] != mine[key]:
        raise DataError(
          f"state of the data stream does not fit {self._dataset.name}: {key} was "
          f"{state[key]!r}, now {mine[key]!r}; resume with the same data and settings"
        )
    self._stage = int(state["stage"])
    self._epoch = int(state["epoch"])
    self._position = int(state["position"])
    self._next_draw_id = int(state["next_draw_id"])
    self._order = self._permutation()

  def _draw(self) -> Prompt:
    row = self._dataset.prompts[self._order[self._position]]
    prompt = Prompt(
      row.ids, row.prompt, row.text, row.row_id, self._next_draw_id, dict(row.columns)
    )
    self._next_draw_id += 1
    self._position += 1
    if self._position == len(self._order):
      self._epoch, self._position = self._epoch + 1, 0
      self._order = self._permutation()
    return prompt

  def _permutation(self) -> np.ndarray:
    rows = self._eligible[self._stage]
    if not self._settings["shuffle"]:
      return rows
    key = np.random.SeedSequence((self._settings["seed"], self._epoch, self._stage))
    return np.random.Generator(np.random.Philox(key)).permutation(rows)

  def _log_wrap(self) -> None:
    if len(self._order) < self._batch_size and not self._wrap_logged:
      self._wrap_logged = True
      logger.warning(
        "%s: %d rows for a batch of %d; the batch wraps around into the next epoch, "
        "so rows repeat in it (said once)",
        self._dataset.name,
        len(self._order),
        self._batch_size,
      )


def stages_of(dataset: PromptDataset, curriculum: list[list[int]]) -> list[np.ndarray]:
  """Row indices that may be drawn, per stage; stage 0 is before the first pair.

  Raises:
    ConfigError, DataError: as ``PromptStream``.
  """
  everything = np.arange(len(dataset))
  if not curriculum:
    return [everything]
  steps = [step for step, _ in curriculum]
  if any(a >= b for a, b in zip(steps, steps[1:], strict=False)):
    raise ConfigError(f"curriculum first steps {steps}: expected rising numbers")
  levels = _levels(dataset)
  stages = [everything, *(everything[levels <= top] for _, top in curriculum)]
  for rows, (step, top) in zip(stages[1:], curriculum, strict=True):
    if not len(rows):
      raise DataError(
        f"{dataset.name}: no row for curriculum step {step}, level <= {top}; the "
        f"lowest level is {levels.min()}"
      )
  return stages


def _levels(dataset: PromptDataset) -> np.ndarray:
  """int64 ``[rows]``: the ``level`` column."""
  levels = []
  for row in dataset.prompts:
    level = row.columns.get("level")
    if not isinstance(level, int) or isinstance(level, bool):
      raise DataError(
        f"{dataset.name}, row {row.row_id}: a curriculum needs an integer column "
        f"'level', got {level!r}; columns are {', '.join(row.columns) or 'none'}; "
        'add the column, or switch the curriculum off: --config.data.curriculum="()"'
      )
    levels.append(level)
  return np.array(levels, np.int64)
