"""The data that flows between workers, and the axis glossary.

AXIS GLOSSARY (suffixes of array names, e.g. ``logits_BTV``):

  N  rows (sequences) on the host        B  rows in one device program
  T  token positions of a row: prompt, then response, then right padding
  R  response positions; index 0 is the first response token
  P  positions of a padded prompt        S  slots of a KV cache
  L  layers                              D  model width
  F  MLP width                           V  vocabulary (padded for tp)
  H  query heads                         K  key/value heads (H = K * G)
  A  width of one head

Conventions, everywhere:

* Rows are left-aligned: prompt, response, right padding; positions are 0..n-1.
* Masks come from lengths, never from ``ids != pad``.
* A log-prob or value at index t belongs to token t (predicted at t-1).
* EOS is part of the response. A scalar reward sits on the last valid token.
* Log-probs are fp32, at the rollout temperature, over the whole un-padded
  vocabulary, before top-k / top-p.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

STOP = "stop"  # finish reason: an EOS id was sampled
STOP_STRING = "stop_string"  # finish reason: the text has a string of rollout.stop
LENGTH = "length"  # finish reason: max_response_length was reached
LISTS = ("prompts", "finish_reasons", "texts")  # fields with an item for each row


@dataclasses.dataclass(frozen=True)
class Prompt:
  """One draw of one data row.

  Attributes:
    ids: int32 ``[P]``, the token ids that the model sees; none before a tokenizer has
      read the prompt.
    prompt: the row's prompt as given: a string or a list of messages.
    text: the prompt as the model sees it (after the chat template).
    row_id: index of the row in the data set; for statistics only.
    draw_id: unique counter of the data stream; groups are formed by it.
    columns: all other columns of the row, handed to the reward functions.
  """

  ids: np.ndarray
  prompt: Any
  text: str
  row_id: int
  draw_id: int
  columns: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Batch:
  """N finished sequences on the host; each step of the dataflow adds fields.

  Per-token fields are ``[N, R]``, right-padded; what is beyond a row's length
  has no meaning. Per-sequence fields are ``[N]``.
  """

  prompts: Sequence[Prompt]
  sample_ids: np.ndarray  # int32 [N], 0..n-1 within a draw
  response_ids: np.ndarray  # int32 [N, R]
  response_lengths: np.ndarray  # int32 [N], EOS included
  finish_reasons: Sequence[str]  # STOP | STOP_STRING | LENGTH
  rollout_log_probs: np.ndarray  # float32 [N, R], by the engine
  weight_version: int = 0  # of the weights that generated this
  loss_mask: np.ndarray | None = None  # bool [N, R]; None: all valid tokens
  texts: Sequence[str] | None = None  # completions as the reward saw them
  old_log_probs: np.ndarray | None = None  # float32 [N, R], by the trainer
  ref_log_probs: np.ndarray | None = None  # float32 [N, R]
  is_weights: np.ndarray | None = None  # float32 [N, R], factors of the policy loss
  policy_mask: np.ndarray | None = None  # bool [N, R], of ``mask``; None: all of it
  collision: np.ndarray | None = None  # float32 [N, R], sum of squared probabilities
  values: np.ndarray | None = None  # float32 [N, R]
  scores: np.ndarray | None = None  # float32 [N], weighted sum of rewards
  score_terms: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
  score_weights: dict[str, float] = dataclasses.field(default_factory=dict)
  baseline_scores: np.ndarray | None = None  # float32 [N], ReMax's greedy
  rewards: np.ndarray | None = None  # float32 [N, R], per token
  costs: np.ndarray | None = None  # float32 [N], Safe RLHF's; as scores
  token_costs: np.ndarray | None = None  # float32 [N, R], as rewards
  cost_values: np.ndarray | None = None  # float32 [N, R]
  cost_returns: np.ndarray | None = None  # float32 [N, R]
  advantages: np.ndarray | None = None  # float32 [N, R]
  returns: np.ndarray | None = None  # float32 [N, R]
  metrics: dict[str, float] = dataclasses.field(default_factory=dict)

  def __len__(self) -> int:
    return len(self.prompts)

  @property
  def draw_ids(self) -> np.ndarray:
    """int64 ``[N]``."""
    return np.array([p.draw_id for p in self.prompts], np.int64)

  @property
  def prompt_lengths(self) -> np.ndarray:
    """int32 ``[N]``."""
    return np.array([len(p.ids) for p in self.prompts], np.int32)

  @property
  def valid_mask(self) -> np.ndarray:
    """bool ``[N, R]``, true on response tokens, from lengths."""
    width = self.response_ids.shape[1]
    return np.arange(width)[None] < self.response_lengths[:, None]

  @property
  def mask(self) -> np.ndarray:
    """bool ``[N, R]``, true on tokens that enter losses and advantages."""
    if self.loss_mask is None:
      return self.valid_mask
    return self.valid_mask & self.loss_mask

  def response(self, i: int) -> np.ndarray:
    """int32 ``[length]``: row i's response without padding."""
    return self.response_ids[i, : self.response_lengths[i]]

  def sequence(self, i: int) -> np.ndarray:
    """int32 ``[length]``: row i's prompt and response."""
    return np.concatenate([self.prompts[i].ids, self.response(i)])

  def with_fields(self, **fields: Any) -> Batch:
    """Returns a copy with fields set; metrics are merged, not replaced."""
    if "metrics" in fields:
      fields["metrics"] = {**self.metrics, **fields["metrics"]}
    return dataclasses.replace(self, **fields)

  def select(self, rows: Sequence[int] | np.ndarray) -> Batch:
    """Returns the batch of the given rows, in the given order."""
    rows = np.asarray(rows, np.int64)
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if isinstance(value, np.ndarray):
        changed[field.name] = value[rows]
      elif field.name in LISTS:
        changed[field.name] = None if value is None else [value[i] for i in rows]
    changed["score_terms"] = {k: v[rows] for k, v in self.score_terms.items()}
    return dataclasses.replace(self, **changed)

  @classmethod
  def concat(cls, parts: Sequence[Batch]) -> Batch:
    """The rows of several batches; a field must be in all of them or in none.

    Metrics are means over the parts that have them, ``*_count`` their sums.
    """
    width = max(part.response_ids.shape[1] for part in parts)
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
      values = [getattr(part, field.name) for part in parts]
      if isinstance(values[0], np.ndarray):
        changed[field.name] = np.concatenate([_widened(x, width) for x in values])
      elif (
        field.name in ("prompts", "finish_reasons", "texts") and values[0] is not None
      ):
        changed[field.name] = [item for value in values for item in value]
    changed["score_terms"] = {
      name: np.concatenate([part.score_terms[name] for part in parts])
      for name in parts[0].score_terms
      if all(name in part.score_terms for part in parts)
    }
    changed["metrics"] = _merged([part.metrics for part in parts])
    return dataclasses.replace(parts[0], **changed)


def _widened(x: np.ndarray, width: int) -> np.ndarray:
  if x.ndim == 1:
    return x
  return np.pad(x, [(0, 0), (0, width - x.shape[1])])


def _merged(parts: Sequence[dict[str, float]]) -> dict[str, float]:
  found: dict[str, float] = {}
  for name in dict.fromkeys(name for metrics in parts for name in metrics):
    values = [metrics[name] for metrics in parts if name in metrics]
    found[name] = sum(values) / (1 if name.endswith("_count") else len(values))
  return found
