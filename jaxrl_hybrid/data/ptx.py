"""Prompts with their answers, which the actor keeps predicting while it learns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl_hybrid.data.prompts import PromptDataset
from jaxrl_hybrid.data.stream import PromptStream
from jaxrl_hybrid.errors import DataError
from jaxrl_hybrid.types import STOP, Batch


class AnsweredStream:
  """An endless, resumable stream of batches of answered prompts.

  Args:
    dataset: the prompts; each row has its answer in a column.
    tokenizer: encodes the answers.
    eos_id: ends each of them.
    key: of that column.
    batch_size: rows per ``next``.
    max_length: most tokens of an answer; a longer one is cut.
    seed, shuffle: as of ``PromptStream``.

  Raises:
    DataError: a row's answer is no text.
  """

  def __init__(
    self,
    dataset: PromptDataset,
    tokenizer: Any,
    *,
    eos_id: int,
    key: str,
    batch_size: int,
    max_length: int,
    seed: int,
    shuffle: bool,
  ):
    self._prompts = PromptStream(
      dataset, batch_size=batch_size, seed=seed, shuffle=shuffle
    )
    texts = [
      _answer(row.columns, key, dataset.name, row.row_id) for row in dataset.prompts
    ]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    self._answers = {
      row.row_id: np.array([*ids, eos_id][:max_length], np.int32)
      for row, ids in zip(dataset.prompts, encoded, strict=True)
    }

  def next(self) -> Batch:
    """The next answered prompts; they have no rewards and no log-probs."""
    prompts = self._prompts.next(0)
    answers = [self._answers[prompt.row_id] for prompt in prompts]
    lengths = np.array([len(ids) for ids in answers], np.int32)
    ids_NR = np.zeros((len(answers), lengths.max()), np.int32)
    for row, ids in zip(ids_NR, answers, strict=True):
      row[: len(ids)] = ids
    return Batch(
      prompts=prompts,
      sample_ids=np.zeros(len(prompts), np.int32),
      response_ids=ids_NR,
      response_lengths=lengths,
      finish_reasons=[STOP] * len(prompts),
      rollout_log_probs=np.zeros(ids_NR.shape, np.float32),
    )

  def state(self) -> dict[str, Any]:
    """The position of the stream as plain JSON data."""
    return self._prompts.state()

  def restore(self, state: Mapping[str, Any]) -> None:
    """Continues exactly where ``state`` was taken.

    Raises:
      DataError: it is of other data.
    """
    self._prompts.restore(state)


def _answer(columns: Mapping[str, Any], key: str, name: str, row: int) -> str:
  answer = columns.get(key)
  if not isinstance(answer, str) or not answer:
    raise DataError(
      f"{name}, row {row}: expected a text in column {key!r} (data.ptx_key), got "
      f"{answer!r:.80}; columns are {', '.join(columns) or 'none'}"
    )
  return answer
