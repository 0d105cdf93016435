"""Rewards that start while others still decode give what the plain way gives."""

import threading
import time

import numpy as np
import pytest

from jaxrl_hybrid.errors import RewardError
from jaxrl_hybrid.rewards.runner import RewardRunner, arguments
from jaxrl_hybrid.types import Prompt

TEXTS = ["12", "7", "x", "40", "5"]


def prompts():
  return [
    Prompt(np.array([1]), "p", "p", i, i, {"ground_truth": str(i)})
    for i in range(len(TEXTS))
  ]


def length(data_source, solution_str, ground_truth, extra_info):
  return float(len(solution_str))


async def number(data_source, solution_str, ground_truth, extra_info):
  return {"score": float(solution_str.isdigit()), "truth": float(ground_truth)}


def whole_batch(prompts, completions, completion_ids, **columns):
  return [len(completions)] * len(completions)


def failing(data_source, solution_str, ground_truth, extra_info):
  return float(solution_str)


def make(functions, on_error="raise", timeout_s=5.0):
  named = [(f.__name__, f) for f in functions]
  return RewardRunner(
    named, [1.0] * len(named), on_error=on_error, timeout_s=timeout_s, num_workers=2
  )


def scored(runner, order):
  early = runner.start()
  for rows in order:
    early.add({i: arguments(prompts()[i], TEXTS[i]) for i in rows})
  ids = [np.array([1])] * len(TEXTS)
  return runner.score(prompts(), TEXTS, ids, early=early.outcomes())


@pytest.mark.parametrize("order", [[[3, 1], [0], [2, 4]], [[0, 1]], []])
def test_equal_to_the_plain_way(order):
  runner = make([length, number, whole_batch])
  plain = runner.score(prompts(), TEXTS, [np.array([1])] * 5)
  early = scored(runner, order)
  np.testing.assert_array_equal(early.scores, plain.scores)
  assert early.metrics == plain.metrics
  for name, values in plain.terms.items():
    np.testing.assert_array_equal(early.terms[name], values)


def test_no_call_is_made_twice():
  calls = []

  def count(data_source, solution_str, ground_truth, extra_info):
    calls.append(ground_truth)
    return 1.0

  scored(make([count]), [[0, 1], [2]])
  assert sorted(calls) == ["0", "1", "2", "3", "4"]


def test_a_bad_early_score_follows_the_policy():
  with pytest.raises(RewardError, match="sample 2 .data row 2"):
    scored(make([failing]), [[2, 0]])
  result = scored(make([failing], on_error="skip"), [[2, 0]])
  assert result.valid.tolist() == [True, True, False, True, True]


def test_a_hanging_call_times_out_and_the_others_are_scored():
  release = threading.Event()

  def hangs(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "x":
      release.wait(30)
    return 1.0

  result = scored(make([hangs], on_error="zero", timeout_s=0.3), [[2], [0, 1]])
  release.set()
  assert result.scores.tolist() == [1, 1, 0, 1, 1]


def test_adding_returns_before_the_scores_are_there():
  release = threading.Event()

  def waits(data_source, solution_str, ground_truth, extra_info):
    release.wait(30)
    return 1.0

  early = make([waits]).start()
  start = time.monotonic()
  early.add({0: arguments(prompts()[0], TEXTS[0])})
  assert time.monotonic() - start < 1.0
  release.set()
  assert early.outcomes() == {("waits", 0): 1.0}
