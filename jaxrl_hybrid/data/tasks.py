"""Procedural data: rows made from a seed instead of read from a file.

A reference such as ``task:arithmetic?digits=1,2&n=2000&split=train&seed=0`` can
stand wherever a data path can. Which split a problem belongs to depends on the
problem only, never on the seed, so train and eval are disjoint for all seeds.

  symbols     "copy c a d :" -> "c a d"; plain-string prompts.
              n, seed, split, min, max (symbols per prompt), symbols (size of the
              alphabet, up to 26), ops (copy, reverse or copy,reverse).
  arithmetic  "What is 3 + 4?" -> "7"; chat prompts.
              n (rows per level), seed, split, digits (1, 2 or 1,2).
"""

from __future__ import annotations

import difflib
import string
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jaxrl_hybrid.errors import DataError

PREFIX = "task:"  # what tells a reference from a file path

_MARKER = ":"  # ends a prompt of the symbols task
_OPERATIONS: dict[str, Callable[[list[str]], list[str]]] = {
  "copy": list,
  "reverse": lambda symbols: symbols[::-1],
}
_SPLITS = ("train", "eval")
_HELD_OUT = 5  # one problem in five is held out for eval
_SPLIT_SEED = 20_240  # fixed: the seed of a task must not move the split
_MAX_TRIES = 1_000  # rejections in a row before a split counts as empty

_DEFAULTS: dict[str, dict[str, Any]] = {
  "symbols": {
    "n": 1000,
    "seed": 0,
    "split": "train",
    "min": 2,
    "max": 4,
    "symbols": 10,
    "ops": ("copy",),
  },
  "arithmetic": {"n": 1000, "seed": 0, "split": "train", "digits": (1,)},
}


def reference_rows(reference: str) -> list[dict[str, Any]]:
  """Makes the rows of a reference such as ``task:symbols?n=100&ops=copy``.

  Raises:
    DataError: unknown task or parameter (with the nearest name), or bad value.
  """
  name, params = _parse(reference)
  return task_rows(name, **params)


def task_rows(name: str, **params: Any) -> list[dict[str, Any]]:
  """Makes the rows of a task; the same arguments give the same rows.

  Args:
    name: ``symbols`` or ``arithmetic``.
    **params: see the module docstring; text as in a reference is fine too.

  Returns:
    Rows with the columns ``prompt``, ``ground_truth`` (str), ``data_source`` (the
    task's name) and ``level`` (number of symbols, or of digits).

  Raises:
    DataError: unknown task or parameter (with the nearest name), or bad value.
  """
  values = _complete(name, params)
  make = {"symbols": _symbols_rows, "arithmetic": _arithmetic_rows}[name]
  return make(values)


def task_symbols(name: str, **params: Any) -> tuple[str, ...]:
  """The words of a task's prompts and answers, for ``symbol_tokenizer``.

  Args:
    name: a task's name, or a whole reference ``task:symbols?...``.
    **params: as in ``task_rows``; they win over those of the reference.

  Raises:
    DataError: as ``task_rows``, or a task whose prompts are chats in prose.
  """
  if name.startswith(PREFIX):
    name, from_reference = _parse(name)
    params = {**from_reference, **params}
  values = _complete(name, params)
  if name != "symbols":
    raise DataError(
      f"task {name!r} has chat prompts in prose and no fixed vocabulary; use the "
      "tokenizer of a model, or task:symbols"
    )
  return (*values["ops"], _MARKER, *_alphabet(values))


def _parse(reference: str) -> tuple[str, dict[str, str]]:
  """Splits a reference into the task's name and its parameters as text."""
  name, _, query = reference.removeprefix(PREFIX).partition("?")
  params: dict[str, str] = {}
  for part in filter(None, query.split("&")):
    key, equals, value = part.partition("=")
    if not equals or not value or key in params:
      raise DataError(
        f"{reference}: got {part!r}, expected each parameter once as key=value, "
        "joined by '&'"
      )
    params[key] = value
  return name, params


def _complete(name: str, params: dict[str, Any]) -> dict[str, Any]:
  """Checks the parameters, gives them their types and adds the defaults."""
  if name not in _DEFAULTS:
    raise DataError(f"unknown task {name!r}{_nearest(name, _DEFAULTS)}")
  defaults = _DEFAULTS[name]
  values = dict(defaults)
  for key, value in params.items():
    if key not in defaults:
      raise DataError(
        f"task {name!r} has no parameter {key!r}{_nearest(key, defaults)}"
      )
    values[key] = _typed(f"task {name!r}: {key}", value, defaults[key])
  _require(values["n"] >= 1, name, "n", values["n"], "at least 1")
  _require(values["seed"] >= 0, name, "seed", values["seed"], "0 or more")
  _require(values["split"] in _SPLITS, name, "split", values["split"], "train or eval")
  if name == "symbols":
    _check_symbols(values)
  else:
    digits = values["digits"]
    good = bool(digits) and set(digits) <= {1, 2} and len(set(digits)) == len(digits)
    _require(good, name, "digits", digits, "1, 2 or 1,2")
  return values


def _check_symbols(values: dict[str, Any]) -> None:
  low, high, ops = values["min"], values["max"], values["ops"]
  _require(low >= 1, "symbols", "min", low, "at least 1")
  _require(high >= low, "symbols", "max", high, f"at least min={low}")
  size = values["symbols"]
  _require(1 <= size <= 26, "symbols", "symbols", size, "from 1 to 26")
  for op in ops:
    if op not in _OPERATIONS:
      raise DataError(f"task 'symbols': unknown op {op!r}{_nearest(op, _OPERATIONS)}")
  good = bool(ops) and len(set(ops)) == len(ops)
  _require(good, "symbols", "ops", ops, "each operation once")


def _typed(what: str, value: Any, default: Any) -> Any:
  """Converts ``value`` to the type of ``default``; a tuple splits at commas."""
  if isinstance(default, tuple):
    if isinstance(value, str):
      items: Iterable[Any] = value.split(",")
    else:
      items = value if isinstance(value, list | tuple) else (value,)
    return tuple(_typed(what, item, default[0]) for item in items)
  if isinstance(default, str):
    return str(value)
  try:
    return int(str(value))
  except ValueError:
    raise DataError(f"{what}={value!r}, expected a whole number") from None


def _require(good: bool, task: str, key: str, value: Any, expected: str) -> None:
  if not good:
    if isinstance(value, tuple):
      value = ",".join(map(str, value))
    raise DataError(f"task {task!r}: {key}={value}, expected {expected}")


def _nearest(name: str, known: Iterable[str]) -> str:
  names = list(known)
  close = difflib.get_close_matches(name, names, 1)
  hint = f"; did you mean {close[0]!r}?" if close else ""
  return f"{hint} (known: {', '.join(names)})"


def _rng(*key: int) -> np.random.Generator:
  return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


def _alphabet(values: dict[str, Any]) -> str:
  return string.ascii_lowercase[: values["symbols"]]


def _symbols_rows(values: dict[str, Any]) -> list[dict[str, Any]]:
  split = values["split"]
  rng = _rng(values["seed"], _SPLITS.index(split))
  rows: list[dict[str, Any]] = []
  tries = 0
  while len(rows) < values["n"]:
    row = _symbols_row(rng, values)
    # A hash of the text splits evenly, whatever the alphabet or the operation.
    held_out = zlib.crc32(row["prompt"].encode()) % _HELD_OUT == 0
    if held_out == (split == "eval"):
      rows.append(row)
      tries = 0
    else:
      tries += 1
    if tries == _MAX_TRIES:
      raise DataError(
        f"task 'symbols': too few distinct problems for split={split}; raise max "
        "or symbols"
      )
  return rows


def _symbols_row(rng: np.random.Generator, values: dict[str, Any]) -> dict[str, Any]:
  level = int(rng.integers(values["min"], values["max"] + 1))
  op = values["ops"][int(rng.integers(len(values["ops"])))]
  letters = _alphabet(values)
  chosen = [letters[i] for i in rng.integers(len(letters), size=level)]
  return {
    "prompt": " ".join([op, *chosen, _MARKER]),
    "ground_truth": " ".join(_OPERATIONS[op](chosen)),
    "data_source": "symbols",
    "level": level,
  }


def _arithmetic_rows(values: dict[str, Any]) -> list[dict[str, Any]]:
  rows = []
  for digits in values["digits"]:
    pairs = _pairs(digits, values["split"])
    rng = _rng(values["seed"], _SPLITS.index(values["split"]), digits)
    # Whole shuffled passes: every pair is used before one is used again.
    passes = -(-values["n"] // len(pairs))
    order = np.concatenate([rng.permutation(len(pairs)) for _ in range(passes)])
    rows += [_arithmetic_row(*pairs[i], digits) for i in order[: values["n"]]]
  return rows


def _pairs(digits: int, split: str) -> list[tuple[int, int]]:
  """All pairs of ``digits``-digit numbers that belong to ``split``."""
  numbers = range(10) if digits == 1 else range(10, 100)
  pairs = [(a, b) for a in numbers for b in numbers]
  order = _rng(_SPLIT_SEED, digits).permutation(len(pairs))
  held_out = len(pairs) // _HELD_OUT
  chosen = order[:held_out] if split == "eval" else order[held_out:]
  return [pairs[i] for i in chosen]


def _arithmetic_row(a: int, b: int, digits: int) -> dict[str, Any]:
  return {
    "prompt": [{"role": "user", "content": f"What is {a} + {b}?"}],
    "ground_truth": str(a + b),
    "data_source": "arithmetic",
    "level": digits,
  }
