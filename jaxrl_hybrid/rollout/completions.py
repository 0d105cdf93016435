"""What the engine produces, and how it is put together from decode calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxrl_hybrid.rollout.pool import FULL, RUNNING, STOPPED
from jaxrl_hybrid.rollout.stop import StopStrings
from jaxrl_hybrid.types import LENGTH, STOP, STOP_STRING

_REASONS = {RUNNING: "", STOPPED: STOP, FULL: LENGTH}
_CUT = 3  # how a row stands, beside those of the device: a stop string ended it
_REASONS[_CUT] = STOP_STRING


@dataclasses.dataclass(frozen=True)
class Completions:
  """Rows ordered prompt by prompt, n each.

  Attributes:
    ids: int32 ``[N, R]``, right-padded with 0.
    lengths: int32 ``[N]``, the EOS included.
    log_probs: float32 ``[N, R]`` at the temperature, full vocabulary.
    finish: int8 ``[N]``; see ``reason``.
  """

  ids: np.ndarray
  lengths: np.ndarray
  log_probs: np.ndarray
  finish: np.ndarray

  @property
  def stopped(self) -> np.ndarray:
    """bool ``[N]``, whether an EOS or a stop string ended the row."""
    return (self.finish == STOPPED) | (self.finish == _CUT)

  def reason(self, row: int) -> str:
    """STOP, STOP_STRING or LENGTH; empty while the row goes on."""
    return _REASONS[int(self.finish[row])]


class Writer:
  """Appends what decode calls tell to the rows that the slots belong to.

  ``limits`` ``[N]``: most tokens of each row.
  """

  def __init__(self, limits: np.ndarray):
    shape = (len(limits), int(limits.max()))
    self._ids = np.zeros(shape, np.int32)
    self._log_probs = np.zeros(shape, np.float32)
    self._lengths = np.zeros(shape[:1], np.int32)
    self._finish = np.full(shape[:1], RUNNING, np.int8)

  def append(self, rows_B: np.ndarray, told: Mapping[str, np.ndarray]) -> np.ndarray:
    """Adds the tokens of one decode call.

    Args:
      rows_B: the row of each slot, negative if it has none.
      told: as ``pool.Programs.decode`` returns it.

    Returns:
      the slots whose rows have ended.
    """
    count_B = np.where(rows_B >= 0, told["count"], 0)
    steps, slots = np.nonzero(np.arange(len(told["ids"]))[:, None] < count_B)
    rows = rows_B[slots]
    places = self._lengths[rows] + steps
    self._ids[rows, places] = told["ids"][steps, slots]
    self._log_probs[rows, places] = told["log_probs"][steps, slots]
    busy = rows_B >= 0
    self._lengths[rows_B[busy]] += count_B[busy]
    self._finish[rows_B[busy]] = told["finish"][busy]
    return np.flatnonzero(busy & (told["finish"] != RUNNING))

  def cut(self, row: int, added: int, stop: StopStrings) -> bool:
    """Ends a row at a stop string, if its last ``added`` tokens complete one."""
    length = int(self._lengths[row])
    kept = stop.first(self._ids[row, :length], length - added)
    if kept is None:
      return False
    self._ids[row, kept:length] = 0
    self._log_probs[row, kept:length] = 0.0
    self._lengths[row] = kept
    self._finish[row] = _CUT
    return True

  def view(self) -> Completions:
    """All rows as they are now; not a copy."""
    return Completions(self._ids, self._lengths, self._log_probs, self._finish)

  def trimmed(self) -> Completions:
    """All rows, as wide as the longest."""
    used = int(self._lengths.max())
    return Completions(
      self._ids[:, :used], self._lengths, self._log_probs[:, :used], self._finish
    )
