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
      elif field.name in ("prompts", "finish_reasons", "texts"):
        changed[field.name] = None if value is None else [value[i] for i in rows]
    changed["score_terms"] = {k: v[rows] for k, v in self.score_terms.items()}
    return dataclasses.replace(self, **changed)
