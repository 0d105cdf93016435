"""Strings that end a response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

# A token has at least one byte of text, but for special ones; a few of those and a
# character that a window cuts may come in between.
_MARGIN = 8


class StopStrings:
  """Finds where a response first contains one of several strings.

  Args:
    tokenizer: has ``decode(ids, skip_special_tokens=...)`` as in transformers.
    strings: not empty ones.
  """

  def __init__(self, tokenizer: Any, strings: Sequence[str]):
    self._tokenizer, self._strings = tokenizer, tuple(strings)
    self._window = max(len(s.encode()) for s in strings) + _MARGIN

  def first(self, ids: np.ndarray, checked: int) -> int | None:
    """How many tokens a row keeps: up to the one that completes a stop string.

    Args:
      ids: of the response.
      checked: tokens in front, which complete none.

    Returns:
      the number of tokens, or None if there is no stop string.
    """
    start = max(0, checked - self._window)
    if not self._complete(ids[start:]):
      return None
    low, high = checked, len(ids)  # none in the first low, one in the first high
    while high - low > 1:
      middle = (low + high) // 2
      if self._complete(ids[start:middle]):
        high = middle
      else:
        low = middle
    return high

  def _complete(self, ids: np.ndarray) -> bool:
    text = self._tokenizer.decode(ids.tolist(), skip_special_tokens=True)
    return any(s in text for s in self._strings)
