"""Wall time of the phases of a step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Timers:
  """``with timers("gen"): ...`` adds up seconds by phase."""

  def __init__(self) -> None:
    self._start = time.perf_counter()
    self._seconds: dict[str, float] = {}

  @contextlib.contextmanager
  def __call__(self, phase: str) -> Iterator[None]:
    """Times the block as part of ``phase``."""
    start = time.perf_counter()
    try:
      yield
    finally:
      elapsed = time.perf_counter() - start
      self._seconds[phase] = self._seconds.get(phase, 0.0) + elapsed

  def metrics(self) -> dict[str, float]:
    """``timing_s/*`` of the phases and of the whole step so far."""
    total = time.perf_counter() - self._start
    return {f"timing_s/{phase}": s for phase, s in self._seconds.items()} | {
      "timing_s/step": total,
      "timing_s/other": total - sum(self._seconds.values()),
    }
