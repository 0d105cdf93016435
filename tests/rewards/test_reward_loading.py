"""References, names, shapes and the mapping from columns to arguments."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import pytest

from jaxrl_hybrid.errors import ConfigError
from jaxrl_hybrid.rewards import load_reward, reward_name
from jaxrl_hybrid.rewards.loading import as_reward, sample_arguments


def per_sample(data_source, solution_str, ground_truth, extra_info=None) -> float:
  return 1.0


def batched(prompts, completions, completion_ids, **columns) -> list[float]:
  return [0.0] * len(completions)


async def asynchronous(solution_str) -> float:
  return 0.5


class Scorer:
  """A callable class."""

  def __call__(self, solution_str: str) -> float:
    return 2.0

  def method(self, completions) -> list[float]:
    return []


class AsyncScorer:
  """A callable class with an async call."""

  async def __call__(self, completions) -> list[float]:
    return []


FILE = """
calls = []

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
  calls.append(solution_str)
  return len(calls)

def how_often(completions):
  return [len(calls)] * len(completions)

scorer = lambda solution_str: 3.0
"""


@pytest.fixture(name="file")
def _file(tmp_path: pathlib.Path) -> pathlib.Path:
  path = tmp_path / "my_reward.py"
  path.write_text(FILE)
  return path


def test_builtin_by_name():
  reward = load_reward("gsm8k")
  assert reward.name == "gsm8k" and not reward.batched
  assert reward(solution_str="#### 5", ground_truth=5, data_source="x") == 1.0


def test_file_by_path(file: pathlib.Path):
  reward = load_reward(f"{file}:compute_score")
  assert (reward.name, reward.batched, reward.is_async) == (
    "compute_score",
    False,
    False,
  )
  assert reward(data_source="", solution_str="", ground_truth=None) == 1


def test_functions_of_one_file_share_its_state(file: pathlib.Path):
  load_reward(f"{file}:compute_score")(
    data_source="", solution_str="a", ground_truth=None
  )
  assert load_reward(f"{file}:how_often")(completions=["b", "c"]) == [1, 1]


def test_a_lambda_in_a_file_is_named_by_its_reference(file: pathlib.Path):
  assert load_reward(f"{file}:scorer").name == "scorer"


def test_module_by_name():
  reward = load_reward("jaxrl_hybrid.rewards.builtin:boxed_math")
  assert reward.name == "boxed_math"


@pytest.mark.parametrize(
  "reference, parts",
  [
    ("gsm8", ["'gsm8'", "'gsm8k'", "path/to/file.py:function"]),
    ("{dir}/my_rewards.py:f", ["does not exist", "'my_reward.py'"]),
    ("{dir}/my_reward.py:compute_scores", ["'compute_score'", "how_often"]),
    ("no_such_package.x:f", ["no_such_package.x", "ModuleNotFoundError"]),
    ("jaxrl_hybrid.rewards.builtin:gsm8", ["'gsm8k'"]),
    ("{dir}/broken.py:f", ["broken.py", "ZeroDivisionError"]),
    ("{dir}/exits.py:f", ["exits.py", "SystemExit"]),
  ],
)
def test_a_wrong_reference_says_what_is_near(file, reference: str, parts: list[str]):
  (file.parent / "broken.py").write_text("1 / 0")
  (file.parent / "exits.py").write_text("import sys; sys.exit(0)")
  with pytest.raises(ConfigError) as caught:
    load_reward(reference.format(dir=file.parent))
  assert all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize(
  "function, name, is_batched, is_async",
  [
    (per_sample, "per_sample", False, False),
    (batched, "batched", True, False),
    (asynchronous, "asynchronous", False, True),
    (functools.partial(per_sample, extra_info={}), "per_sample", False, False),
    (functools.partial(asynchronous), "asynchronous", False, True),
    (functools.partial(Scorer()), "Scorer", False, False),
    (lambda solution_str, **kw: 0.0, "lambda", False, False),
    (Scorer(), "Scorer", False, False),
    (Scorer().method, "method", True, False),
    (AsyncScorer(), "AsyncScorer", True, True),
  ],
)
def test_names_and_shapes(function: Any, name: str, is_batched: bool, is_async: bool):
  reward = as_reward(function)
  assert reward.name == reward_name(function) == name
  assert (reward.batched, reward.is_async) == (is_batched, is_async)


@pytest.mark.parametrize(
  "function, part",
  [
    (lambda text: 0.0, "(text)"),
    (lambda solution, ground_truth: 0.0, "'solution_str'"),
    (lambda completion: [0.0], "'completions'"),
    (lambda solution_str, answer_key: 0.0, "answer_key"),
    (lambda solution_str, /: 0.0, "positional-only"),
    (lambda **anything: 0.0, "compute_score("),
    (lambda: 0.0, "compute_score("),
    (Scorer, "the class"),
    (3, "the object 3"),
  ],
)
def test_other_shapes_are_refused_when_loaded(function: Any, part: str):
  with pytest.raises(ConfigError) as caught:
    as_reward(function)
  assert part in str(caught.value)


def test_only_accepted_keywords_are_passed():
  everything = {"data_source": "d", "solution_str": "s", "ground_truth": "g"}
  assert as_reward(lambda solution_str: solution_str)(**everything) == "s"
  takes_all = as_reward(lambda solution_str, **rest: (solution_str, rest))
  assert takes_all(**everything) == ("s", {"data_source": "d", "ground_truth": "g"})


def test_what_a_partial_binds_is_not_overwritten():
  bound = functools.partial(lambda solution_str, **kw: kw, ground_truth="mine")
  given = {"solution_str": "s", "ground_truth": "row", "data_source": "d"}
  assert as_reward(bound)(**given) == {"ground_truth": "mine", "data_source": "d"}


@pytest.mark.parametrize(
  "columns, truth, extra",
  [
    ({"ground_truth": 0, "answer": 5}, 0, {"answer": 5}),
    ({"ground_truth": "", "reward_model": {"ground_truth": 1}}, "", None),
    ({"reward_model": {"ground_truth": 0.0}, "answer": 5}, 0.0, {"answer": 5}),
    ({"reward_model": {"style": "rule"}, "answer": 0}, 0, None),
    ({"answer": "x", "level": 3, "data_source": "d"}, "x", {"level": 3}),
    ({"level": 3}, None, {"level": 3}),
    ({"answer": 1, "extra_info": {"index": 7}}, 1, {"index": 7}),
    ({"answer": 1, "extra_info": None, "level": 2}, 1, None),
  ],
)
def test_columns_become_arguments(columns: dict, truth: Any, extra: dict | None):
  arguments = sample_arguments(columns, "text")
  assert arguments["solution_str"] == "text"
  assert arguments["data_source"] == columns.get("data_source", "")
  assert arguments["ground_truth"] == truth
  assert type(arguments["ground_truth"]) is type(truth)
  assert isinstance(arguments["extra_info"], dict)
  if extra is not None:
    assert arguments["extra_info"] == extra


def test_samples_cannot_change_the_row():
  columns = {"extra_info": {"index": 7}}
  sample_arguments(columns, "")["extra_info"].clear()
  assert columns == {"extra_info": {"index": 7}}
