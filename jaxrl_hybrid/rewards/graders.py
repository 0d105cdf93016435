"""Pure string graders: find, normalise and compare answers.

Nothing here evaluates model output. Numbers become exact fractions, every scan
is linear and covers a bounded window, so hostile text costs milliseconds:

* a number longer than 100 digits, or an exponent beyond +-999, is no number;
* first and last numbers are searched in the first or last 100,000 characters;
* a box longer than 10,000 characters is no box.
"""

from __future__ import annotations

import re
from fractions import Fraction

_WINDOW = 100_000  # characters searched for a number
_MAX_BOX = 10_000  # characters inside one box
_MAX_EXPRESSION = 1_000  # longer ones are compared as they are
_MAX_DIGITS = 100
_NUMBER_CHARS = "0123456789.,"

# Every alternative that has consumed a digit run succeeds, so that a search
# never rescans the run: linear time.
_N = (
  r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
  r"|(?<![\w.])\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
)
_TOKEN = re.compile(
  r"(?P<sign>(?<![\w)\]}])[-+])?\$?(?:"
  rf"\\frac\{{\s*(?P<latex_top>[-+]?{_N})\s*\}}\s*\{{\s*(?P<latex_bottom>{_N})\s*\}}"
  rf"|(?P<top>{_N})(?:\s*/\s*(?P<bottom>{_N}))?"
  r")%?",
  re.ASCII,
)
_SPELLINGS = (
  ("\u2212", "-"),
  ("{,}", ","),
  ("\\,", ""),
  ("\\!", ""),
  ("\\$", "$"),
  ("\\%", "%"),
  ("\\dfrac", "\\frac"),
  ("\\tfrac", "\\frac"),
)
_NORMAL_FORMS = (
  (re.compile(r"\\(?:left|right|displaystyle)(?![a-zA-Z])"), ""),
  # A unit: text behind a number or a closing brace, at the end.
  (re.compile(r"(?<=[0-9}])\s*\\(?:text|mbox|mathrm)\{[^{}]*\}$"), ""),
  (re.compile(r"\\(?:text|textbf|mbox|mathrm|mathbf)\{([^{}]*)\}"), r"\1"),
  (re.compile(r"\^\{?\\circ\}?|\\[;: ]|~|\s"), ""),
  (re.compile(r"^[a-zA-Z]="), ""),
  (re.compile(r"\\frac([0-9a-z])([0-9a-z])"), r"\\frac{\1}{\2}"),
  (re.compile(r"\\sqrt([0-9a-z])"), r"\\sqrt{\1}"),
  (re.compile(r"^([0-9a-zA-Z]+)/([0-9a-zA-Z]+)$"), r"\\frac{\1}{\2}"),
)


def parse_number(text: str) -> Fraction | None:
  """Reads a text that is one number and nothing else.

  Understands signs, ``1,000``, ``$5``, ``50%`` (the sign is a unit: 50),
  ``1/2``, ``\\frac{1}{2}``, ``1e3`` and a trailing period.

  Args:
    text: the whole answer, of any length.

  Returns:
    The exact value, or None when the text is anything else.
  """
  if len(text) > _MAX_EXPRESSION:
    return None
  text = _respell(text).rstrip(" .$\t\n").lstrip(" $\t\n")
  match = _TOKEN.fullmatch(text)
  return None if match is None else _value(match)


def first_number(text: str) -> Fraction | None:
  """Returns the first number inside a text, or None without one."""
  head = text
  if len(text) > _WINDOW:
    head = text[:_WINDOW].rstrip(_NUMBER_CHARS)  # the cut may be inside a number
  match = _TOKEN.search(_respell(head))
  return None if match is None else _value(match)


def last_number(text: str) -> Fraction | None:
  """Returns the last number inside a text, or None without one."""
  tail = text
  if len(text) > _WINDOW:
    tail = text[-_WINDOW:].lstrip(_NUMBER_CHARS)  # the cut may be inside a number
  match = None
  for match in _TOKEN.finditer(_respell(tail)):
    pass
  return None if match is None else _value(match)


def gsm8k_number(text: str) -> Fraction | None:
  """Returns the number after the last ``####``, else the last number, else None."""
  _, marker, tail = text.rpartition("####")
  number = first_number(tail) if marker else None
  return last_number(text) if number is None else number


def last_boxed(text: str) -> str | None:
  """Returns what is inside the last ``\\boxed{...}``, nested braces included.

  Returns:
    The stripped content; None without a box, or when its braces do not close.
  """
  start = text.rfind("\\boxed")
  if start < 0:
    return None
  window = text[start + len("\\boxed") :][:_MAX_BOX].lstrip()
  if not window.startswith("{"):
    return None
  depth = 0
  for i, char in enumerate(window):
    depth += (char == "{") - (char == "}")
    if depth == 0:
      return window[1:i].strip()
  return None


def last_expression(text: str) -> str:
  """Returns the last ``$...$``, else the last line that is not empty."""
  tail = text[-_WINDOW:].rstrip()
  before, closing, _ = tail.rpartition("$")
  opening = before.rfind("$")
  if closing and opening >= 0:
    return before[opening + 1 :].strip()
  return tail.rpartition("\n")[2].strip()


def normalize_math(text: str) -> str:
  """Rewrites the spellings of one LaTeX expression into one form.

  Spaces, ``\\left``/``\\right``, degrees, trailing units and periods, ``x=`` and
  the shorthands ``\\frac12``, ``a/b`` go; the structure stays. Texts of more than
  1,000 characters are only stripped.
  """
  if len(text) > _MAX_EXPRESSION:
    return text.strip()
  text = _respell(text).rstrip(" .$\t\n").lstrip(" $\t\n")
  for pattern, replacement in _NORMAL_FORMS:
    text = pattern.sub(replacement, text)
  return text


def same_answer(answer: str, truth: str) -> bool:
  """Whether two expressions are the same number or, else, the same string.

  Numbers are compared exactly (``18.0`` is ``18``, ``0.5`` is ``1/2``), all else
  after :func:`normalize_math`. Two empty strings are not an answer: False.
  """
  answer, truth = normalize_math(answer), normalize_math(truth)
  left, right = parse_number(answer), parse_number(truth)
  if left is not None and right is not None:
    return left == right
  return bool(answer) and answer == truth


def _respell(text: str) -> str:
  for old, new in _SPELLINGS:
    text = text.replace(old, new)
  return text


def _value(match: re.Match[str]) -> Fraction | None:
  top = _fraction(match["latex_top"] or match["top"])
  bottom = _fraction(match["latex_bottom"] or match["bottom"] or "1")
  if top is None or not bottom:
    return None
  return (-top if match["sign"] == "-" else top) / bottom


def _fraction(text: str) -> Fraction | None:
  digits = text.replace(",", "").lower()
  mantissa, _, exponent = digits.partition("e")
  if len(mantissa) > _MAX_DIGITS or len(exponent.lstrip("+-")) > 3:
    return None
  return Fraction(digits)
