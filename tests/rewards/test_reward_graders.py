"""Graders against a table of hand-written pairs, and against hostile text."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest

from jaxrl_hybrid.rewards import graders

PARSED = [
  ("1,000", Fraction(1000)),
  ("12,345,678.5", Fraction(24691357, 2)),
  ("1{,}000", Fraction(1000)),
  ("1\\,000", Fraction(1000)),
  ("$5", Fraction(5)),
  ("\\$5.50", Fraction(11, 2)),
  ("-$5", Fraction(-5)),
  ("$5$", Fraction(5)),
  ("-0.5", Fraction(-1, 2)),
  ("\u22123", Fraction(-3)),
  ("+7", Fraction(7)),
  (".25", Fraction(1, 4)),
  ("50%", Fraction(50)),
  ("50\\%", Fraction(50)),
  ("1/2", Fraction(1, 2)),
  ("-3 / 4", Fraction(-3, 4)),
  ("\\frac{1}{2}", Fraction(1, 2)),
  ("-\\dfrac{3}{4}", Fraction(-3, 4)),
  ("\\frac{-3}{4}", Fraction(-3, 4)),
  ("18.0", Fraction(18)),
  (" 72.\n", Fraction(72)),
  ("1e3", Fraction(1000)),
  ("1e-07", Fraction(1, 10**7)),
  ("0", Fraction(0)),
  ("", None),
  ("abc", None),
  ("5 apples", None),
  ("1 2", None),
  ("1/0", None),
  ("9**9**9", None),
  ("1e999999999", None),
  ("1" * 200, None),
]

LAST = [
  ("The answer is 42.", Fraction(42)),
  ("First 3, then 4", Fraction(4)),
  ("I have 3 apples and 1,000 pears.", Fraction(1000)),
  ("10-4=6", Fraction(6)),
  ("5-3", Fraction(3)),
  ("7 - 10 = -3", Fraction(-3)),
  ("x=-5", Fraction(-5)),
  ("it costs $18.50!", Fraction(37, 2)),
  ("about 50% of them", Fraction(50)),
  ("so 1/2.", Fraction(1, 2)),
  ("so \\(\\frac{3}{8}\\) holds", Fraction(3, 8)),
  ("**12**", Fraction(12)),
  ("1, 2, 3", Fraction(3)),
  ("<<16-3-4=9>>9", Fraction(9)),
  ("version 1.2.3", Fraction(3)),
  ("none", None),
  ("", None),
]

BOXED = [
  ("\\boxed{5}", "5"),
  ("so \\boxed{\\frac{1}{2}} it is", "\\frac{1}{2}"),
  ("\\boxed{1} no, \\boxed{2}", "2"),
  ("\\boxed{\\{1, \\{2\\}\\}}", "\\{1, \\{2\\}\\}"),
  ("\\boxed {7}", "7"),
  ("\\boxed{}", ""),
  ("\\boxed{5", None),
  ("\\boxed", None),
  ("5", None),
]

SAME = [
  ("0.5", "\\frac{1}{2}", True),
  ("18.0", "18", True),
  ("1,000", "1000", True),
  ("\\frac12", "1/2", True),
  ("\\dfrac{x}{2}", "x/2", True),
  ("x = 5", "5", True),
  ("5\\text{ cm}", "5", True),
  ("90^\\circ", "90", True),
  ("\\left( 1, 2 \\right)", "(1,2)", True),
  ("\\text{Evelyn}", "Evelyn", True),
  ("\\sqrt2", "\\sqrt{2}", True),
  ("2\\sqrt{3}.", "2\\sqrt{3}", True),
  ("0.33", "1/3", False),
  ("-5", "5", False),
  ("(1,2)", "(2,1)", False),
  ("x^2", "x^3", False),
  ("5", "\\sqrt{5}", False),
  ("", "", False),
]


@pytest.mark.parametrize("text, number", PARSED, ids=lambda v: str(v)[:20])
def test_parse_number(text: str, number: Fraction | None):
  assert graders.parse_number(text) == number


@pytest.mark.parametrize("text, number", LAST)
def test_last_number(text: str, number: Fraction | None):
  assert graders.last_number(text) == number


def test_first_number_is_not_the_last():
  text = "First 1,250 then 4"
  assert graders.first_number(text) == 1250
  assert graders.last_number(text) == 4
  assert graders.first_number("no number") is None


@pytest.mark.parametrize("text, content", BOXED)
def test_last_boxed(text: str, content: str | None):
  assert graders.last_boxed(text) == content


@pytest.mark.parametrize("answer, truth, same", SAME)
def test_same_answer(answer: str, truth: str, same: bool):
  assert graders.same_answer(answer, truth) is same
  assert graders.same_answer(truth, answer) is same


@pytest.mark.parametrize(
  "text, number",
  [
    ("1+1=2\n#### 42", 42),
    ("#### 1\n#### 42 apples, 7 left", 42),
    ("the answer is 42 ####", 42),
    ("only 41 and 42", 42),
    ("#### $1,000", 1000),
    ("#### none", None),
  ],
)
def test_gsm8k_number(text: str, number: int | None):
  assert graders.gsm8k_number(text) == number


def test_last_expression_prefers_dollars_over_the_last_line():
  assert graders.last_expression("so $a$ and $x+1$ is it\nbye") == "x+1"
  assert graders.last_expression("one\n\n x+2 \n\n") == "x+2"
  assert graders.last_expression("costs $5") == "costs $5"


def test_a_number_cut_by_the_window_is_not_reported_in_part():
  long = " " * 99_998
  assert graders.last_number("123" + long) is None  # "23" would be in the window
  assert graders.first_number(long + "123") is None


HOSTILE = [  # (start, what is repeated, how often); built in the test, they are large
  ("9**9**9", "", 0),
  ("__import__('os').system('touch pwned')", "", 0),
  ("1e9999999999", "", 0),
  ("", "1", 10**8),
  ("", "1 ", 5 * 10**7),
  ("", "1,111", 10**7),
  ("", "1", 99_999),
  ("", "1,", 49_999),
  ("", "-1/", 33_000),
  ("", "1.", 49_999),
  ("1", " ", 99_998),
  ("", "\\frac{1}{", 9_999),
  ("", "\\text{", 166),
  ("", "\\frac{", 10**7),
  ("", "#", 10**8),
  ("", "{", 10**8),
  ("\\boxed{", "{", 10**8),
  ("", "\\boxed{", 10**7),
  ("", "$", 10**8),
  ("", " ", 10**8),
  ("", "-", 10**8),
  ("", ".", 10**8),
]
FUNCTIONS = [
  graders.parse_number,
  graders.first_number,
  graders.last_number,
  graders.gsm8k_number,
  graders.last_boxed,
  graders.last_expression,
  graders.normalize_math,
]


@pytest.mark.parametrize("start, unit, count", HOSTILE)
def test_hostile_text_takes_less_than_a_second(start: str, unit: str, count: int):
  text = start + unit * count
  for grade in FUNCTIONS:
    begin = time.perf_counter()
    grade(text)
    assert time.perf_counter() - begin < 1, grade.__name__
