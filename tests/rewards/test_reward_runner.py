"""The runner: values, policies, columns and every kind of callable."""

from __future__ import annotations

import asyncio
import functools
import sys
from typing import Any

import numpy as np
import pytest

from jaxrl_hybrid.errors import ConfigError, RewardError
from jaxrl_hybrid.rewards import RewardResult, RewardRunner, reward_name
from jaxrl_hybrid.types import Prompt


def make_prompts(*rows: dict[str, Any]) -> list[Prompt]:
  return [
    Prompt(np.arange(3, dtype=np.int32), [{"role": "user"}], f"ask {i}", 10 + i, i, row)
    for i, row in enumerate(rows)
  ]


def score(
  functions: Any,
  texts: list[str],
  *,
  columns: list[dict[str, Any]] | None = None,
  weights: list[float] | None = None,
  on_error: str = "raise",
  timeout_s: float = 20.0,
  num_workers: int = 4,
) -> RewardResult:
  functions = functions if isinstance(functions, list) else [functions]
  runner = RewardRunner(
    [(reward_name(f), f) for f in functions],
    weights or [1.0] * len(functions),
    on_error=on_error,
    timeout_s=timeout_s,
    num_workers=num_workers,
  )
  ids = [np.arange(len(t), dtype=np.int32) for t in texts]
  return runner.score(make_prompts(*(columns or [{} for _ in texts])), texts, ids)


def length(solution_str: str) -> float:
  return float(len(solution_str))


def truth(ground_truth: Any, solution_str: str) -> Any:
  return ground_truth


async def slow_length(solution_str: str) -> float:
  await asyncio.sleep(0.2)
  return float(len(solution_str))


class Length:
  """A callable class."""

  def __call__(self, solution_str: str) -> float:
    return float(len(solution_str))


def scaled(solution_str: str, scale: float) -> float:
  return scale * len(solution_str)


def wrapped(solution_str: str) -> Any:
  return slow_length(solution_str)  # an async function behind a plain wrapper


def test_weighted_sum_and_terms():
  result = score(
    [length, lambda completions: [10.0, 20.0]], ["a", "bb"], weights=[2.0, 0.5]
  )
  np.testing.assert_array_equal(result.scores, np.array([7, 14], np.float32))
  assert result.scores.dtype == np.float32
  assert list(result.terms) == ["length", "lambda"]
  np.testing.assert_array_equal(result.terms["lambda"], [10, 20])
  assert result.terms["length"].dtype == np.float32
  assert result.valid.tolist() == [True, True] and result.bad_count == 0
  assert result.metrics == {
    "reward/bad_count": 0.0,
    "reward/length/mean": 1.5,
    "reward/lambda/mean": 15.0,
  }


@pytest.mark.parametrize(
  "function, factor",
  [
    (length, 1),
    (lambda solution_str: len(solution_str), 1),
    (functools.partial(scaled, scale=3.0), 3),
    (Length(), 1),
    (slow_length, 1),
    (wrapped, 1),
    (functools.partial(slow_length), 1),
    (lambda solution_str: np.float32(len(solution_str)), 1),
    (lambda completions: np.array([len(c) for c in completions]), 1),
  ],
)
def test_every_kind_of_callable(function: Any, factor: float):
  texts = ["", "a", "bb", "ccc", "dddd", "eeeee"]
  result = score(function, texts)
  np.testing.assert_array_equal(result.scores, factor * np.arange(6))


def test_zero_false_and_empty_labels_are_kept():
  rows = [{"ground_truth": v} for v in (0.0, 1.0, 0, False)]
  result = score(truth, ["x"] * 4, columns=rows)
  assert result.scores.tolist() == [0, 1, 0, 0]
  assert result.bad_count == 0 and result.valid.all()
  assert result.metrics["reward/truth/mean"] == 0.25

  def is_empty(solution_str, ground_truth):
    return float(ground_truth == "")

  assert score(is_empty, ["x"], columns=[{"ground_truth": ""}]).scores[0] == 1


def test_batched_functions_get_prompts_texts_ids_and_columns():
  seen = {}

  def f(prompts, completions, completion_ids, level, **rest):
    seen.update(locals())
    return [0.0] * len(completions)

  score(f, ["ab", "c"], columns=[{"level": 0, "x": 1}, {"level": 2}])
  assert seen["prompts"] == [[{"role": "user"}]] * 2
  assert seen["completions"] == ["ab", "c"]
  assert seen["completion_ids"] == [[0, 1], [0]]
  assert seen["level"] == [0, 2]
  assert seen["rest"] == {"x": [1, None]}


def test_a_batched_function_that_needs_an_unknown_column():
  with pytest.raises(RewardError, match="'answr'.*did you mean 'answer'"):
    score(
      lambda completions, answr: [0.0],
      ["a"],
      columns=[{"answer": 1}],
      on_error="zero",
    )


def test_further_numbers_of_a_dict_are_logged():
  def f(solution_str):
    numbers = {"score": 1, "format": True, "answer": "text", "odd": float("nan")}
    return numbers if solution_str == "a" else {"score": 0.0, "steps": 4}

  result = score(f, ["a", "b"])
  assert list(result.terms) == ["f", "f/format", "f/steps"]
  np.testing.assert_array_equal(result.terms["f/format"], [1, np.nan])
  np.testing.assert_array_equal(result.terms["f/steps"], [np.nan, 4])
  assert result.scores.tolist() == [1, 0]
  assert result.metrics["reward/f/format/mean"] == 1.0


BAD = [None, float("nan"), float("inf"), -float("inf"), "1.0", 1e39, [1.0], {"x": 1}]


@pytest.mark.parametrize("bad", BAD, ids=repr)
@pytest.mark.parametrize("is_batched", [False, True])
def test_bad_values(bad: Any, is_batched: bool):
  if is_batched:
    function = lambda completions: [1.0, bad, 3.0]
  else:
    function = truth
  rows = [{"ground_truth": v} for v in (1.0, bad, 3.0)]
  run = functools.partial(score, function, ["x", "yy", "z"], columns=rows)
  zero = run(on_error="zero")
  assert zero.scores.tolist() == [1, 0, 3]
  assert zero.valid.all() and zero.bad_count == 1
  skip = run(on_error="skip")
  assert skip.valid.tolist() == [True, False, True] and skip.bad_count == 1
  assert skip.metrics["reward/bad_count"] == 1
  assert skip.metrics[f"reward/{reward_name(function)}/mean"] == 2.0
  with pytest.raises(RewardError) as caught:
    run(on_error="raise")
  message = str(caught.value)
  for part in (reward_name(function), "sample 1", "row 11", "'ask 1'", "'yy'"):
    assert part in message
  assert "rewards.on_error=skip" in message and "rewards.on_error=zero" in message


def test_three_of_four_bad_are_counted():
  rows = [{"answer": v} for v in (1.0, float("nan"), None, float("inf"))]
  result = score(truth, ["x"] * 4, columns=rows, on_error="skip")
  assert result.bad_count == 3
  assert np.isfinite(result.scores).all()


def one_fails(solution_str: str) -> float:
  if solution_str == "bad":
    raise KeyError("no such tool")
  return 1.0


async def one_fails_async(solution_str: str) -> float:
  return one_fails(solution_str)


def one_exits(solution_str: str) -> float:
  if solution_str == "bad":
    sys.exit(3)
  return 1.0


@pytest.mark.parametrize("function", [one_fails, one_fails_async, one_exits])
def test_a_function_that_raises_for_one_sample(function: Any, caplog):
  texts = ["a", "bad", "c"]
  with pytest.raises(RewardError, match="sample 1 .*(KeyError|SystemExit)") as caught:
    score(function, texts)
  assert isinstance(caught.value.__cause__, (KeyError, SystemExit))
  assert score(function, texts, on_error="zero").scores.tolist() == [1, 0, 1]
  assert "1 of 3 scores are bad" in caplog.text
  skip = score(function, texts, on_error="skip")
  assert skip.valid.tolist() == [True, False, True]


@pytest.mark.parametrize(
  "function",
  [
    lambda completions: [1.0],
    lambda completions: [1.0] * 4,
    lambda completions: [],
    lambda completions: 1.0,
    lambda completions: None,
    lambda completions: "abc",
    lambda completions: (1.0 for _ in completions),
    lambda completions: 1 / 0,
  ],
)
def test_a_batched_function_that_fails_as_a_whole(function: Any):
  texts = ["a", "b", "c"]
  with pytest.raises(RewardError, match="whole batch.*(expected|ZeroDivision)"):
    score(function, texts)
  assert score(function, texts, on_error="zero").bad_count == 3
  assert not score(function, texts, on_error="skip").valid.any()


def test_equal_names_become_distinct():
  functions = [length, length, lambda solution_str: 5.0]
  runner = RewardRunner(
    [("length", f) for f in functions],
    [1.0, 1.0, 1.0],
    on_error="raise",
    timeout_s=5,
    num_workers=1,
  )
  result = runner.score(make_prompts({}), ["ab"], [np.zeros(2, np.int32)])
  assert {k: v.tolist() for k, v in result.terms.items()} == {
    "length": [2],
    "length_2": [2],
    "length_3": [5],
  }
  assert result.scores.tolist() == [9]


@pytest.mark.parametrize(
  "change, part",
  [
    ({"functions": []}, "at least one"),
    ({"weights": [1.0, 2.0]}, r"\(1\), got 2"),
    ({"weights": [float("nan")]}, "finite"),
    ({"on_error": "skipp"}, "did you mean 'skip'"),
    ({"timeout_s": 0.0}, "rewards.timeout_s"),
    ({"num_workers": 0}, "rewards.num_workers"),
    ({"functions": [("f", lambda text: 0.0)]}, "solution_str"),
  ],
)
def test_wrong_arguments(change: dict[str, Any], part: str):
  arguments = {
    "functions": [("length", length)],
    "weights": [1.0],
    "on_error": "raise",
    "timeout_s": 1.0,
    "num_workers": 1,
  }
  with pytest.raises(ConfigError, match=part):
    RewardRunner(**{**arguments, **change})


def test_no_samples():
  result = score([length, lambda completions: [1.0]], [])
  assert result.scores.shape == (0,) and result.metrics == {"reward/bad_count": 0.0}
