"""Built-in reward functions, by name: ``rewards`` in a config may say "gsm8k".

All have the per-sample shape. A row without a usable ground truth raises
``ValueError``, which the runner reports with the sample: a wrong column must not
look like a wrong answer.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from jaxrl_hybrid.rewards import graders

_MAX_SYMBOL_TEXT = 1_000_000  # characters; splitting more takes too long


def exact_match(solution_str: str, ground_truth: Any) -> float:
  """1.0 if completion and ground truth are equal but for outer white space."""
  return float(solution_str.strip() == _truth(ground_truth).strip())


def gsm8k(solution_str: str, ground_truth: Any) -> float:
  """1.0 if the number after ``####``, else the last number, is the right one.

  Args:
    solution_str: the completion.
    ground_truth: a number, or a whole GSM8K answer that ends in ``#### 72``.
  """
  truth = _number(graders.gsm8k_number, ground_truth)
  return float(graders.gsm8k_number(solution_str) == truth)


def boxed_math(solution_str: str, ground_truth: Any) -> float:
  """1.0 if the boxed answer equals the ground truth as number or expression.

  Without a box the last number counts when the ground truth is a number, else
  the last ``$...$`` or line.

  Args:
    solution_str: the completion.
    ground_truth: the answer, or a solution text with the answer in a box.
  """
  truth = _truth(ground_truth)
  boxed_truth = graders.last_boxed(truth)
  truth = truth if boxed_truth is None else boxed_truth
  answer = graders.last_boxed(solution_str)
  if answer is not None:
    return float(graders.same_answer(answer, truth))
  number = graders.parse_number(graders.normalize_math(truth))
  if number is not None:
    return float(graders.last_number(solution_str) == number)
  return float(graders.same_answer(graders.last_expression(solution_str), truth))


def last_number(solution_str: str, ground_truth: Any) -> float:
  """1.0 if the last number of the completion equals the ground truth."""
  truth = _number(graders.parse_number, ground_truth)
  return float(graders.last_number(solution_str) == truth)


def symbol_match(solution_str: str, ground_truth: Any) -> float:
  """Fraction of white-space separated symbols that match position by position.

  Divided by the longer of the two sequences: 1.0 only for the exact sequence.
  A completion of more than a million characters scores 0.0.
  """
  truth = _truth(ground_truth).split()
  if len(solution_str) > _MAX_SYMBOL_TEXT:
    return 0.0
  answer = solution_str.split()
  if answer == truth:
    return 1.0
  matches = sum(a == b for a, b in zip(answer, truth))
  return matches / max(len(answer), len(truth))


def repetition(solution_str: str) -> float:
  """Share of the completion's words that it has said before: a cost, 0.0 to 1.0.

  A completion of more than a million characters has 1.0.
  """
  if len(solution_str) > _MAX_SYMBOL_TEXT:
    return 1.0
  words = solution_str.split()
  return 1.0 - len(set(words)) / len(words) if words else 0.0


BUILTINS: dict[str, Callable[..., float]] = {
  f.__name__: f
  for f in (exact_match, gsm8k, boxed_math, last_number, symbol_match, repetition)
}


def _truth(ground_truth: Any) -> str:
  if ground_truth is None:
    raise ValueError(
      "no ground truth: expected a data column ground_truth, "
      "reward_model.ground_truth or answer"
    )
  return str(ground_truth)


def _number(read: Callable[[str], Fraction | None], ground_truth: Any) -> Fraction:
  number = read(_truth(ground_truth))
  if number is None:
    raise ValueError(f"expected a number as ground truth, got {ground_truth!r:.200}")
  return number
