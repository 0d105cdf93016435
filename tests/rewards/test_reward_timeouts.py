"""Calls that hang, block, refuse to end or run in parallel."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from jaxrl_hybrid.errors import RewardError
from jaxrl_hybrid.rewards import RewardResult, RewardRunner
from jaxrl_hybrid.types import Prompt

HOUR = 3600


def run_on(runner: RewardRunner, texts: Sequence[str]) -> RewardResult:
  ids = np.zeros(1, np.int32)
  prompts = [Prompt(ids, "p", "p", i, i) for i in range(len(texts))]
  return runner.score(prompts, texts, [ids] * len(texts))


def score(
  function: Any,
  texts: Sequence[str],
  *,
  on_error: str = "raise",
  timeout_s: float = 20.0,
  num_workers: int = 4,
) -> RewardResult:
  runner = RewardRunner(
    [("f", function)],
    [1.0],
    on_error=on_error,
    timeout_s=timeout_s,
    num_workers=num_workers,
  )
  return run_on(runner, texts)


async def slow(solution_str: str) -> float:
  await asyncio.sleep(0.2)
  return 1.0


def hang(solution_str: str) -> float:
  if solution_str == "hang":
    time.sleep(HOUR)
  return 1.0


async def hang_async(solution_str: str) -> float:
  if solution_str == "hang":
    await asyncio.sleep(HOUR)
  return 1.0


async def refuse_to_end(solution_str: str) -> float:
  while solution_str == "hang":
    try:
      await asyncio.sleep(HOUR)
    except asyncio.CancelledError:
      pass
  return 1.0


@pytest.mark.parametrize("function", [hang, hang_async, refuse_to_end])
def test_a_hung_call_does_not_stop_the_others(function: Any):
  texts = ["a", "hang", "b", "hang", "c", "d"]
  start = time.perf_counter()
  result = score(function, texts, on_error="skip", timeout_s=0.3, num_workers=2)
  assert time.perf_counter() - start < 3
  assert result.valid.tolist() == [t != "hang" for t in texts]
  assert result.scores.tolist() == [float(t != "hang") for t in texts]
  with pytest.raises(RewardError, match="sample 1 .*rewards.timeout_s=0.3"):
    score(function, texts, timeout_s=0.3)


def test_hung_calls_of_all_workers_are_replaced():
  result = score(
    hang, ["hang"] * 4 + ["a"], on_error="zero", timeout_s=0.1, num_workers=2
  )
  assert result.scores.tolist() == [0, 0, 0, 0, 1]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_hung_batched_call(is_async: bool):
  async def async_hang(completions):
    await asyncio.sleep(HOUR)

  def sync_hang(completions):
    time.sleep(HOUR)

  function = async_hang if is_async else sync_hang
  assert score(function, ["a", "b"], on_error="zero", timeout_s=0.3).bad_count == 2


def test_a_coroutine_that_blocks_the_event_loop_is_abandoned(caplog):
  async def block(solution_str):
    if solution_str == "block":
      time.sleep(HOUR)
    return 1.0

  runner = RewardRunner(
    [("block", block)], [1.0], on_error="zero", timeout_s=0.3, num_workers=1
  )

  def run(*texts: str) -> list[float]:
    return run_on(runner, texts).scores.tolist()

  assert run("a", "block") == [1, 0]
  assert "blocks the event loop" in caplog.text
  assert run("a", "b") == [1, 1]  # in a new loop


def test_timeouts_work_outside_the_main_thread():
  results = []

  def work():
    results.append(score(hang, ["hang", "a"], on_error="zero", timeout_s=0.3))

  thread = threading.Thread(target=work)
  thread.start()
  thread.join(10)
  assert results and results[0].scores.tolist() == [0, 1]


def test_an_exception_of_a_function_is_not_taken_for_the_timeout():
  async def f(solution_str):
    raise TimeoutError("server is busy")

  with pytest.raises(RewardError, match="TimeoutError: server is busy"):
    score(f, ["a"])


def test_calls_run_in_parallel_but_no_more_than_num_workers():
  lock, running, most = threading.Lock(), [0], [0]

  def f(solution_str):
    with lock:
      running[0] += 1
      most[0] = max(most[0], running[0])
    time.sleep(0.05)
    with lock:
      running[0] -= 1
    return 1.0

  score(f, ["a"] * 12, num_workers=3)
  assert most[0] == 3


def test_async_calls_run_concurrently():
  start = time.perf_counter()
  score(slow, ["a"] * 100)
  assert time.perf_counter() - start < 5  # one after the other: 20 s


def test_an_error_cancels_the_calls_that_are_left():
  cancelled = threading.Event()

  async def f(solution_str):
    if solution_str == "bad":
      await asyncio.sleep(0.1)
      raise ValueError
    try:
      await asyncio.sleep(HOUR)
    finally:
      cancelled.set()

  with pytest.raises(RewardError, match="sample 1"):
    score(f, ["a", "bad"])
  assert cancelled.wait(5)


EXIT = """
import asyncio, time
import numpy as np
from jaxrl_hybrid.rewards import RewardRunner
from jaxrl_hybrid.types import Prompt

def sleep(solution_str):
  time.sleep(3600)

async def sleep_in_thread(solution_str):
  await asyncio.to_thread(time.sleep, 3600)

async def block(solution_str):
  time.sleep(3600)

runner = RewardRunner(
  [("a", sleep), ("b", sleep_in_thread), ("c", block)], [1, 1, 1],
  on_error="zero", timeout_s=0.2, num_workers=1)
ids = np.zeros(1, np.int32)
print(runner.score([Prompt(ids, "", "", 0, 0)], ["x"], [ids]).bad_count)
"""


def test_hung_calls_do_not_block_the_exit_of_the_interpreter():
  done = subprocess.run(
    [sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=60
  )
  assert done.stdout.split() == ["3"], done.stderr
  assert done.returncode == 0
