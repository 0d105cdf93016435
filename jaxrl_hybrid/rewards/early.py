"""Rewards of rows that have ended, while others still decode."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_hybrid.rewards.execution import Executor
from jaxrl_hybrid.rewards.loading import RewardFunction

# (name of the function, sample) -> what it gave, or a Failure
Outcomes = Mapping[tuple[str, int], Any]
_Calls = list[tuple[tuple[str, int], Callable[[], Any]]]


class EarlyScores:
  """Calls per-sample reward functions in a thread of its own.

  Batched functions want all samples and are not called here. At most as many calls
  run at a time as the executor has workers, with its timeouts.

  Args:
    functions: all reward functions of the run.
    executor: runs them.
  """

  def __init__(self, functions: Sequence[RewardFunction], executor: Executor):
    self._functions = [f for f in functions if not f.batched]
    self._executor = executor
    self._outcomes: dict[tuple[str, int], Any] = {}
    self._waiting: queue.SimpleQueue[tuple[bool, _Calls] | None] = queue.SimpleQueue()
    self._thread: threading.Thread | None = None

  def add(self, arguments: Mapping[int, Mapping[str, Any]]) -> None:
    """Keyword arguments of samples, by sample; returns at once."""
    if not self._functions:
      return
    if self._thread is None:
      self._thread = threading.Thread(target=self._work, daemon=True, name="rewards")
      self._thread.start()
    for function in self._functions:
      calls = [
        ((function.name, i), functools.partial(function, **kwargs))
        for i, kwargs in arguments.items()
      ]
      self._waiting.put((function.is_async, calls))

  def outcomes(self) -> Outcomes:
    """Waits for all that were added."""
    if self._thread is not None:
      self._waiting.put(None)
      self._thread.join()
      self._thread = None
    return self._outcomes

  def _work(self) -> None:
    while (part := self._waiting.get()) is not None:
      is_async, calls = part
      for i, outcome in self._executor.run([call for _, call in calls], is_async):
        self._outcomes[calls[i][0]] = outcome
