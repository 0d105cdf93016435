"""What a run prints: one line per step, a progress bar, tables of samples."""

from __future__ import annotations

import shutil
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from typing import TextIO

from tqdm import tqdm

_COLUMNS = 100  # where there is no terminal to ask
_GAP = "  "

STEP_TIME = "timing_s/step"
# (text around the number, metric, format); the line is these in this order.
_STEP_FIELDS = (
  ("{} s", STEP_TIME, ".2f"),
  ("reward {}", "critic/rewards/mean", ".3f"),
  ("loss {}", "actor/loss", ".3f"),
  ("entropy {}", "actor/entropy", ".3f"),
  ("kl {}", "actor/ppo_kl", ".4f"),
  ("gap {}", "rollout_train_logprob_diff_mean", ".1e"),
  ("grad {}", "actor/grad_norm", ".2f"),
  ("lr {}", "actor/lr", ".1e"),
  ("{} tok/s", "perf/throughput", ",.0f"),
)
# Appended only at the steps that evaluate.
_EVAL_FIELDS = (
  ("eval reward {}", "eval/reward", ".3f"),
  ("eval exact {}", "eval/exact_match", ".3f"),
  ("eval stopped {}", "eval/stopped", ".3f"),
)


class Console:
  """Prints the progress of a run; on a terminal, above a bar at the bottom."""

  def __init__(self, total_steps: int, *, stream: TextIO | None = None):
    """Does not print yet.

    Args:
      total_steps: number of the last step.
      stream: where to print; ``sys.stdout`` if None.
    """
    self._total = total_steps
    self._stream = sys.stdout if stream is None else stream
    self._is_terminal = self._stream.isatty()
    self._bar: tqdm | None = None

  def write(self, text: str) -> None:
    """Prints text, above the bar if there is one."""
    encoding = getattr(self._stream, "encoding", None) or "utf-8"
    # A model may write what the terminal cannot show; that must not end a run.
    text = text.encode(encoding, "backslashreplace").decode(encoding)
    if self._bar is not None:
      tqdm.write(text, file=self._stream)
    else:
      print(text, file=self._stream, flush=True)

  def step_line(self, step: int, metrics: Mapping[str, float]) -> None:
    """Prints one line about a finished step and moves the bar."""
    if self._is_terminal and self._bar is None:
      # Made at the first step: the time left is right after a resume, too.
      self._bar = tqdm(
        total=self._total,
        initial=step,
        file=self._stream,
        unit="step",
        dynamic_ncols=True,
        leave=False,
      )
    parts = [f"step {step}/{self._total}"]
    if STEP_TIME in metrics:  # else only an evaluation, before the first step
      parts += [_field(*field, metrics) for field in _STEP_FIELDS]
    parts += [_field(*field, metrics) for field in _EVAL_FIELDS if field[1] in metrics]
    self.write(" | ".join(parts))
    if self._bar is not None:
      self._bar.update(step - self._bar.n)

  def samples_table(
    self, rows: Sequence[tuple[str, str, str | None, float]], title: str
  ) -> None:
    """Prints (prompt, completion, answer, reward) rows as an aligned table."""
    width = _COLUMNS
    if self._is_terminal:
      width = shutil.get_terminal_size((_COLUMNS, 24)).columns
    self.write("\n".join([title, *_table(rows, width)]))

  def close(self) -> None:
    """Takes the bar away; a second call does nothing."""
    if self._bar is not None:
      self._bar.close()
      self._bar = None


def _field(text: str, name: str, spec: str, metrics: Mapping[str, float]) -> str:
  value = metrics.get(name)
  return text.format("-" if value is None else format(float(value), spec))


def _table(rows: Sequence[tuple[str, str, str | None, float]], width: int) -> list[str]:
  cells = [("prompt", "completion", "answer", "reward")]
  for prompt, completion, answer, reward in rows:
    shown = "-" if answer is None else _visible(str(answer))
    cells.append((_visible(prompt), _visible(completion), shown, f"{reward:.3f}"))
  widths = _column_widths(cells, width)
  lines = []
  for row in cells:
    left = [_pad(_shorten(c, w), w) for c, w in zip(row[:3], widths, strict=True)]
    lines.append(_GAP.join([*left, row[3].rjust(_reward_width(cells))]))
  lines.insert(1, "-" * _width(lines[0]))
  return lines


def _reward_width(cells: Sequence[tuple[str, ...]]) -> int:
  return max(len(row[3]) for row in cells)


def _column_widths(cells: Sequence[tuple[str, ...]], width: int) -> list[int]:
  """Returns the widths of the three text columns.

  The answer gets at most a fifth. Prompt and completion share the rest; what one
  of them does not need goes to the other.
  """
  prompt, completion, answer = (max(_width(row[i]) for row in cells) for i in range(3))
  free = max(width - _reward_width(cells) - 3 * len(_GAP), 24)
  answer = min(answer, max(free // 5, 6))
  free -= answer
  half = free // 2
  prompt = min(prompt, max(half, free - completion))
  return [prompt, min(completion, free - prompt), answer]


def _visible(text: str) -> str:
  """Escapes newlines and everything else that would not print."""
  return "".join(
    c if c.isprintable() else c.encode("unicode_escape").decode() for c in text
  )


def _width(text: str) -> int:
  """Returns the columns that a terminal needs for a text."""
  return sum(
    0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF")
    for c in text
  )


def _pad(text: str, width: int) -> str:
  return text + " " * (width - _width(text))


def _shorten(text: str, width: int) -> str:
  """Cuts the middle out of a text that is wider than ``width``."""
  if _width(text) <= width:
    return text
  keep = width - len("...")
  head = _prefix(text, keep - keep // 2)
  tail = _prefix(text[::-1], keep // 2)[::-1]
  return f"{head}...{tail}"


def _prefix(text: str, width: int) -> str:
  """Returns the longest start of a text that fits into ``width`` columns."""
  used = 0
  for i, char in enumerate(text):
    used += _width(char)
    if used > width:
      return text[:i]
  return text
