"""The metrics file of a run: one JSON object per step."""

from __future__ import annotations

import json
import logging
import math
import numbers
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

STEP_KEY = "training/global_step"
METRICS_FILE = "metrics.jsonl"

_log = logging.getLogger(__name__)


class MetricsWriter:
  """Appends one JSON object per step to ``<run_dir>/metrics.jsonl``.

  Every line is on disk when ``write`` returns. NaN and infinity have no JSON: the
  key is kept, with null.
  """

  def __init__(self, run_dir: str | Path):
    self.path = Path(run_dir) / METRICS_FILE
    self.path.parent.mkdir(parents=True, exist_ok=True)
    _drop_torn_line(self.path)
    self._file = self.path.open("a", encoding="utf-8")

  def write(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Appends the metrics of one step."""
    numbers_by_name = {k: _json_number(v) for k, v in metrics.items()}
    row = {STEP_KEY: int(step)} | numbers_by_name | {STEP_KEY: int(step)}
    self._file.write(json.dumps(row, allow_nan=False) + "\n")
    self._file.flush()

  def rewind(self, step: int) -> None:
    """Drops the lines of later steps, as after resuming from ``step``."""
    text = self.path.read_text(encoding="utf-8", errors="replace")
    lines = [line + "\n" for line in text.split("\n") if line]
    kept = [line for line in lines if (s := _step_of(line)) is not None and s <= step]
    if len(kept) == len(lines):
      return
    partial = self.path.with_suffix(".jsonl.partial")
    partial.write_text("".join(kept), encoding="utf-8")
    self._file.close()
    os.replace(partial, self.path)
    self._file = self.path.open("a", encoding="utf-8")

  def close(self) -> None:
    """Closes the file; a second call does nothing."""
    self._file.close()

  def __enter__(self) -> MetricsWriter:
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
  ) -> None:
    self.close()


def _drop_torn_line(path: Path) -> None:
  """Cuts off what a killed process wrote after the last newline."""
  if not path.exists():
    return
  data = path.read_bytes()
  whole = data.rfind(b"\n") + 1
  if whole < len(data):
    _log.warning("%s: dropped its last line, which was cut off", path)
    os.truncate(path, whole)


def _step_of(line: str) -> int | None:
  """Returns the step of a line; None if it is not one of ours."""
  try:
    step = json.loads(line)[STEP_KEY]
  except (ValueError, KeyError, TypeError):
    _log.warning("dropped an unreadable line of metrics: %.80s", line)
    return None
  return step if isinstance(step, int) else None


def _json_number(value: Any) -> int | float | None:
  if isinstance(value, numbers.Integral):  # numpy's integers too
    return int(value)
  number = float(value)
  return number if math.isfinite(number) else None
