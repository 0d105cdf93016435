"""Built-in reward functions: right, wrong, hostile, and missing ground truths."""

from __future__ import annotations

import time
from typing import Any

import pytest

from jaxrl_hybrid.rewards.builtin import BUILTINS

GSM8K_ANSWERS = [  # invented, in the style of the data set
  ("Tom has 4*3=<<4*3=12>>12 pens.\nHe lends 5, so 12-5=<<12-5=7>>7.\n#### 7", 7),
  ("A ticket is $250 and 6 tickets are 6*250=$<<6*250=1500>>1,500.\n#### 1,500", 1500),
  ("It fell by 20-23=<<20-23=-3>>-3 degrees.\n#### -3", -3),
]

TABLE: list[tuple[str, str, Any, float]] = [
  ("exact_match", " yes\n", "yes", 1.0),
  ("exact_match", "yes.", "yes", 0.0),
  ("exact_match", "0", 0, 1.0),
  ("exact_match", " ", "", 1.0),
  ("exact_match", "no", "", 0.0),
  ("gsm8k", "1+1=2\n#### 72", "72", 1.0),
  ("gsm8k", "so 72 in all", 72, 1.0),
  ("gsm8k", "#### 72.0", "72", 1.0),
  ("gsm8k", "#### 71, not 72", "72", 0.0),
  ("gsm8k", "#### 0", 0, 1.0),
  ("gsm8k", "", 0, 0.0),
  ("boxed_math", "\\boxed{\\frac{1}{2}}", "0.5", 1.0),
  ("boxed_math", "\\boxed{1} or \\boxed{2}", "1", 0.0),
  ("boxed_math", "\\boxed{\\frac{x}{2}}", "\\dfrac{x}{2}", 1.0),
  ("boxed_math", "\\boxed{4}", "We get $2+2=\\boxed{4}$.", 1.0),
  ("boxed_math", "it is 1,000.", "1000", 1.0),
  ("boxed_math", "it is 5 but 6", "5", 0.0),
  ("boxed_math", "so the answer is $x+1$.", "x + 1", 1.0),
  ("boxed_math", "\\boxed{} 5", "5", 0.0),
  ("boxed_math", "\\boxed{", "5", 0.0),
  ("last_number", "3 + 4 = 7", "7", 1.0),
  ("last_number", "7 is 3 + 4", "7", 0.0),
  ("last_number", "50%", 50.0, 1.0),
  ("last_number", "nothing", 0, 0.0),
  ("symbol_match", "a b c", "a b c", 1.0),
  ("symbol_match", "a x c", "a b c", 2 / 3),
  ("symbol_match", "a b c d", "a b c", 3 / 4),
  ("symbol_match", "a", "a b c", 1 / 3),
  ("symbol_match", "b c a", "a b c", 0.0),
  ("symbol_match", "", "a", 0.0),
  ("symbol_match", "abc", "a b c", 0.0),
]


@pytest.mark.parametrize("name, text, truth, score", TABLE)
def test_table(name: str, text: str, truth: Any, score: float):
  assert BUILTINS[name](solution_str=text, ground_truth=truth) == score


@pytest.mark.parametrize("answer, number", GSM8K_ANSWERS)
def test_gsm8k_reads_whole_answers(answer: str, number: int):
  gsm8k = BUILTINS["gsm8k"]
  assert gsm8k(answer, answer) == 1.0
  assert gsm8k(f"I think {number}.", answer) == 1.0
  assert gsm8k(f"#### {number + 1}", answer) == 0.0


GRADERS = sorted(set(BUILTINS) - {"repetition"})  # those that have a right answer


@pytest.mark.parametrize("name", GRADERS)
def test_a_missing_ground_truth_is_an_error_not_a_wrong_answer(name: str):
  with pytest.raises(ValueError, match="ground_truth"):
    BUILTINS[name]("5", None)


@pytest.mark.parametrize("name", ["gsm8k", "last_number"])
def test_a_ground_truth_without_a_number_is_an_error(name: str):
  with pytest.raises(ValueError, match="'blue'"):
    BUILTINS[name]("5", "blue")


@pytest.mark.parametrize("name", GRADERS)
@pytest.mark.parametrize(
  "unit, count",
  [
    ("__import__('os').system('touch pwned') ", 1),
    ("9**9**8 ", 1),
    ("1", 10**8),
    ("1 ", 5 * 10**7),
    ("\\boxed{", 10**7),
  ],
)
def test_hostile_completions_score_zero_quickly(
  name: str, unit: str, count: int, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  text = unit * count
  start = time.perf_counter()
  assert BUILTINS[name](text, "72") == 0.0
  assert time.perf_counter() - start < 1
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  "text,share",
  [("", 0.0), ("a b c", 0.0), ("a a", 0.5), ("a b a\na", 0.5), ("x " * 10**6, 1.0)],
)
def test_repetition_is_the_share_of_words_said_before(text, share):
  assert BUILTINS["repetition"](text) == share
