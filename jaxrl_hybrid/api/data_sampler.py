"""``DynamicDataSampler``: the prompts of a data file, drawn by weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_hybrid.data import files, weighting
from jaxrl_hybrid.data.prompts import prompt_of
from jaxrl_hybrid.errors import DataError
from jaxrl_hybrid.types import Batch, Prompt


class DynamicDataSampler:
  """Draws more of the rows that teach most.

      batch = collector.collect(prompts=sampler.sample(batch_size=128))
      sampler.learn(batch)

  A row's weight is ``difficulty_weight_fn(row) * domain_boost[row["domain"]]``, times
  a factor that ``learn`` makes small for prompts that are always or never answered
  rightly (``data.weighting.PassRates``). ``data.sampler`` is the same in a config.
  """

  def __init__(
    self,
    dataset_path: str | Path,
    difficulty_weight_fn: Callable[[Mapping[str, Any]], float] | None = None,
    domain_boost: Mapping[str, float] | None = None,
    *,
    prompt_key: str = "prompt",
    domain_key: str = "domain",
    seed: int = 0,
    pass_score: float = 1.0,
    floor: float = 0.1,
    decay: float = 0.5,
  ):
    """Reads the rows and weighs them.

    Args:
      dataset_path: as of ``data.train_files``: jsonl, json, parquet, a saved folder or
        ``task:NAME``.
      difficulty_weight_fn: takes a row, returns a number >= 0; None: 1 for all.
      domain_boost: factors of domains; 1 for those that are not there.
      prompt_key: the column that holds the prompt, a string or a list of messages.
      domain_key: the column that names the domain.
      seed: the same seed draws the same rows.
      pass_score: the least score of a right answer.
      floor: the least factor of a row that teaches nothing, in (0, 1].
      decay: how much of what was learned of a row stays when it is drawn again.

    Raises:
      DataError: no such file, a row without a prompt, or a wrong weight.
      ConfigError: a value out of its range, or a domain that no row has.
    """
    self._rows = files.read_rows(dataset_path)
    self._key = prompt_key
    self._columns: dict[int, dict[str, Any]] = {}  # of rows that were drawn
    for i, row in enumerate(self._rows):
      try:
        prompt_of(row, prompt_key)
      except DataError as error:
        raise DataError(f"{dataset_path}, row {i} (counted from 0): {error}") from error
    base = weighting.base_weights(
      self._rows,
      difficulty_weight_fn,
      domain_boost or {},
      domain_key=domain_key,
      name=str(dataset_path),
    )
    rates = weighting.PassRates(
      len(base), pass_score=pass_score, floor=floor, decay=decay
    )
    self._draws = weighting.WeightedDraws(base, rates, seed=seed)

  def __len__(self) -> int:
    return len(self._rows)

  @property
  def weights(self) -> np.ndarray:
    """fp64 ``[rows]``, as the next ``sample`` uses them."""
    return self._draws.weights

  def sample(self, batch_size: int) -> list[Prompt]:
    """Draws prompts, each row at most once unless there are too few.

    Returns:
      What ``collect`` takes; ``prompt``, ``row_id`` and ``columns`` are the row's.

    Raises:
      DataError: ``batch_size`` < 1.
    """
    if batch_size < 1:
      raise DataError(f"batch_size: expected at least 1, got {batch_size}")
    return [self._prompt(int(row)) for row in self._draws.draw(batch_size)]

  def learn(self, batch: Batch) -> None:
    """Takes in the scores of a batch that was collected from ``sample``.

    Raises:
      DataError: the batch has no scores, or is of other prompts.
    """
    if batch.scores is None:
      raise DataError("expected a batch with scores, as DataCollector collects it")
    rows_N = np.array([prompt.row_id for prompt in batch.prompts], np.int64)
    for prompt in batch.prompts:
      if prompt.columns is not self._columns.get(prompt.row_id):
        raise DataError("expected a batch of prompts that sample returned, got others")
    self._draws.rates.learn(rows_N, batch.scores)

  def state(self) -> dict[str, Any]:
    """What the next samples depend on, as plain JSON data."""
    return self._draws.state()

  def restore(self, state: Mapping[str, Any]) -> None:
    """Continues exactly where ``state`` was taken.

    Raises:
      DataError: the state is of other rows or weights.
    """
    self._draws.restore(state)

  def _prompt(self, row: int) -> Prompt:
    if row not in self._columns:
      columns = {k: v for k, v in self._rows[row].items() if k != self._key}
      self._columns[row] = columns
    not_yet = np.zeros(0, np.int32)  # the actor's tokenizer makes ids of the prompt
    prompt = self._rows[row][self._key]
    return Prompt(not_yet, prompt, "", row, row, self._columns[row])
