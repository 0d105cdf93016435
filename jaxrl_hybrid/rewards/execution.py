"""Runs many calls in parallel, each with a timeout.

Python cannot stop a thread, so a call that hangs is abandoned: it keeps its
daemon thread, which blocks neither other calls nor the exit of the interpreter.
No signals are used; they work in the main thread only. One limit is left: native
code that holds the interpreter lock (a runaway regular expression) stops all
threads, this module's clock included.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import inspect
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_GRACE_S = 1.0  # for an event loop to report its timeouts before it counts as stuck


@dataclasses.dataclass(frozen=True)
class Failure:
  """Takes the place of a call's value: why there is none.

  Attributes:
    reason: text for a message.
    cause: the exception that the call raised, if it raised one.
  """

  reason: str
  cause: BaseException | None = None


class Executor:
  """Runs synchronous calls in daemon threads, asynchronous ones in one loop."""

  def __init__(self, timeout_s: float, num_workers: int):
    """Keeps the limits.

    Args:
      timeout_s: seconds for one call, from its start.
      num_workers: synchronous calls at a time; asynchronous ones all start at once.
    """
    self._timeout_s = timeout_s
    self._num_workers = num_workers
    self._loop: asyncio.AbstractEventLoop | None = None

  def run(
    self, calls: Sequence[Callable[[], Any]], is_async: bool
  ) -> Iterator[tuple[int, Any]]:
    """Yields (index, value or Failure) of every call as they finish.

    Closing the iterator early starts no further calls.

    Args:
      calls: functions without arguments.
      is_async: calling them gives coroutines.
    """
    if is_async:
      return self._run_async(calls)
    return _run_threads(calls, self._num_workers, self._timeout_s)

  def _run_async(self, calls: Sequence[Callable[[], Any]]) -> Iterator[tuple[int, Any]]:
    if self._loop is None:
      self._loop = _new_loop()
      _start(self._loop.run_forever)
    finished: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    left: dict[int, concurrent.futures.Future[None]] = {}
    for i, call in enumerate(calls):
      bounded = _bounded(call, self._timeout_s, lambda v, i=i: finished.put((i, v)))
      left[i] = asyncio.run_coroutine_threadsafe(bounded, self._loop)
    deadline = time.monotonic() + self._timeout_s + _GRACE_S
    try:
      while left:
        i, outcome = finished.get(timeout=max(0.0, deadline - time.monotonic()))
        if left.pop(i, None) is not None:  # else it came after its timeout
          yield i, outcome
    except queue.Empty:
      # The next use gets a new loop, this one stays behind with its thread.
      self._loop = None
      blocked = _timeout(self._timeout_s, "; a coroutine blocks the event loop")
      yield from [(i, blocked) for i in left]
    finally:
      for future in left.values():
        future.cancel()


def _run_threads(
  calls: Sequence[Callable[[], Any]], num_workers: int, timeout_s: float
) -> Iterator[tuple[int, Any]]:
  """Runs calls in num_workers daemon threads; yields (index, outcome).

  A thread whose call runs out of time is left behind and replaced.
  """
  finished: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
  waiting = collections.deque(range(len(calls)))
  started: dict[int, float] = {}
  left = set(range(len(calls)))

  def work() -> None:
    while waiting:
      try:
        i = waiting.popleft()
      except IndexError:  # another thread was faster
        return
      started[i] = time.monotonic()
      finished.put((i, _attempt(calls[i])))
      if i not in left:  # too late: a replacement is at work
        return

  for _ in range(min(num_workers, len(calls))):
    _start(work)
  check_at = time.monotonic() + timeout_s
  try:
    while left:
      try:
        i, outcome = finished.get(timeout=max(0.0, check_at - time.monotonic()))
        if i in left:
          yield i, outcome
          left.discard(i)
      except queue.Empty:
        now = time.monotonic()
        running = {i: t + timeout_s for i, t in list(started.items()) if i in left}
        for i in [i for i, deadline in running.items() if deadline <= now]:
          left.discard(i)
          del running[i]
          _start(work)
          yield i, _timeout(timeout_s)
        check_at = min(running.values(), default=now + timeout_s)
  finally:
    waiting.clear()


def _attempt(call: Callable[[], Any]) -> Any:
  """Calls, in this thread; a wrapped async function's coroutine is run, too."""
  try:
    value = call()
    if inspect.iscoroutine(value):
      with asyncio.Runner(loop_factory=_new_loop) as runner:
        value = runner.run(value)
    return value
  except BaseException as error:  # a grader that calls exit() is bad, not the end
    return _raised(error)


async def _bounded(
  call: Callable[[], Any], timeout_s: float, report: Callable[[Any], None]
) -> None:
  """Awaits a call and reports its outcome the moment it is known."""

  async def work() -> None:
    try:
      report(await call())
    except (Exception, asyncio.CancelledError) as error:
      report(_raised(error))

  task = asyncio.ensure_future(work())
  try:
    # Not wait_for: that waits for a cancelled task, which may refuse to end.
    await asyncio.wait({task}, timeout=timeout_s)
  finally:
    if not task.done():
      report(_timeout(timeout_s))
      task.cancel()


class _DaemonExecutor(concurrent.futures.ThreadPoolExecutor):
  """Runs ``asyncio.to_thread`` calls without keeping the interpreter alive.

  The base class joins its threads at exit, so a hung call would block it.
  """

  def submit(
    self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
  ) -> concurrent.futures.Future[Any]:
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def work() -> None:
      if not future.set_running_or_notify_cancel():
        return
      try:
        future.set_result(fn(*args, **kwargs))
      except BaseException as error:
        future.set_exception(error)

    _start(work)
    return future


def _new_loop() -> asyncio.AbstractEventLoop:
  loop = asyncio.new_event_loop()
  loop.set_default_executor(_DaemonExecutor())
  return loop


def _start(work: Callable[[], Any]) -> None:
  threading.Thread(target=work, daemon=True, name="reward").start()


def _timeout(timeout_s: float, why: str = "") -> Failure:
  return Failure(f"no result after rewards.timeout_s={timeout_s:g} seconds{why}")


def _raised(error: BaseException) -> Failure:
  return Failure(f"it raised {type(error).__name__}: {error}", error)
