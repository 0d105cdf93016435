"""Scores samples with several reward functions; a bad score is never silent."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_hybrid.errors import ConfigError, RewardError
from jaxrl_hybrid.rewards import loading
from jaxrl_hybrid.rewards.early import EarlyScores, Outcomes
from jaxrl_hybrid.rewards.execution import Executor, Failure
from jaxrl_hybrid.types import Prompt
from jaxrl_hybrid.user_files import nearest

_POLICIES = ("raise", "skip", "zero")
_HEAD = 200  # characters of prompt and completion shown in messages
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RewardResult:
  """What the reward functions said about N samples.

  Attributes:
    scores: float32 ``[N]``, weighted sum of the functions.
    terms: float32 ``[N]`` by name: each function unweighted (0 where it was bad),
      and "<name>/<key>" for further numbers of a dict (NaN where not given).
    valid: bool ``[N]``, false where on_error="skip" removes the sample.
    bad_count: number of bad scores, over samples and functions.
    metrics: "reward/bad_count" and "reward/<term>/mean" over valid samples.
  """

  scores: np.ndarray
  terms: dict[str, np.ndarray]
  valid: np.ndarray
  bad_count: int
  metrics: dict[str, float]
  weights: dict[str, float]


@dataclasses.dataclass(frozen=True)
class _Samples:
  prompts: Sequence[Prompt]
  texts: Sequence[str]
  response_ids: Sequence[np.ndarray]
  early: Outcomes


class RewardRunner:
  """Scores samples with a weighted sum of reward functions.

  A score is bad when the function raises, takes longer than timeout_s, or gives
  anything but a finite number (None, NaN, infinity, text, a wrong count).
  """

  def __init__(
    self,
    functions: Sequence[tuple[str, Callable[..., Any]]],
    weights: Sequence[float],
    *,
    on_error: str,
    timeout_s: float,
    num_workers: int,
    given: Sequence[tuple[str, float]] = (),
  ):
    """Checks everything that can be checked before a sample exists.

    Args:
      functions: (name, callable) pairs; callables as in :mod:`loading`. A name
        that is taken gets a suffix: "name_2".
      weights: one finite factor per function.
      on_error: what a bad score does: "raise" stops, "zero" counts as 0, "skip"
        removes the sample.
      timeout_s: seconds for one call (one sample, or one batched call).
      num_workers: calls of a synchronous per-sample function at a time.
      given: (name, weight) of further terms whose scores ``score`` is told.

    Raises:
      ConfigError: an argument is out of range, or a signature is not supported.
    """
    _check_arguments(functions, weights, given, on_error, timeout_s, num_workers)
    self._given = [name for name, _ in given]
    names = _distinct([*self._given, *(name for name, _ in functions)])[len(given) :]
    self._functions = [
      loading.as_reward(function, name) for name, (_, function) in zip(names, functions)
    ]
    self._weights = [float(w) for w in weights] + [float(w) for _, w in given]
    self._on_error = on_error
    self._executor = Executor(timeout_s, num_workers)

  def start(self) -> EarlyScores:
    """Takes samples one by one, before all of them are there."""
    return EarlyScores(self._functions, self._executor)

  def score(
    self,
    prompts: Sequence[Prompt],
    texts: Sequence[str],
    response_ids: Sequence[np.ndarray],
    given: Mapping[str, Sequence[float | Failure]] | None = None,
    early: Outcomes | None = None,
  ) -> RewardResult:
    """Scores N samples.

    Args:
      prompts: the prompt of every sample.
      texts: the N completions.
      response_ids: the N completions as int arrays ``[length]``.
      given: N scores of each given term, or why there is none.
      early: what ``start`` has led to; those calls are not made again.

    Raises:
      RewardError: a score is bad and on_error is "raise", or a batched function
        needs a column that the data do not have.
    """
    assert len(prompts) == len(texts) == len(response_ids)
    samples = _Samples(prompts, texts, response_ids, early or {})
    total, terms = np.zeros(len(prompts)), {}
    bad = np.zeros(len(prompts), np.int64)
    functions = [*self._functions, *(_constant(n, given[n]) for n in self._given)]
    for function, weight in zip(functions, self._weights, strict=True):
      own_terms, failed = self._score_one(function, samples)
      terms.update(own_terms)
      bad[failed] += 1
      total += weight * own_terms[function.name].astype(np.float64)
    self._check_sum(total, samples)
    valid = (bad == 0) | (self._on_error != "skip")
    metrics = {"reward/bad_count": float(bad.sum())}
    for name, values in terms.items():
      values = values[valid & ~np.isnan(values)]
      if values.size:
        metrics[f"reward/{name}/mean"] = float(values.mean(dtype=np.float64))
    scores = total.astype(np.float32)
    weights = {f.name: w for f, w in zip(functions, self._weights, strict=True)}
    return RewardResult(scores, terms, valid, int(bad.sum()), metrics, weights)

  def _check_sum(self, total: np.ndarray, samples: _Samples) -> None:
    """The weights must not push finite scores out of fp32's range."""
    beyond = np.flatnonzero(~(np.abs(total) <= _FLOAT32_MAX))
    if beyond.size:
      raise RewardError(
        f"the weighted sum of sample {beyond[0]} is {total[beyond[0]]:g}; expected a "
        "number that fp32 can hold: change rewards.weights or scale the rewards "
        f"(completion: {samples.texts[beyond[0]][:_HEAD]!r})"
      )

  def _score_one(
    self, function: loading.RewardFunction, samples: _Samples
  ) -> tuple[dict[str, np.ndarray], list[int]]:
    """Returns a function's terms and the samples where it was bad."""
    scores = np.zeros(len(samples.texts), np.float32)
    further: dict[str, np.ndarray] = {}
    failures: dict[int, Failure] = {}
    for i, value in self._values(function, samples):
      score, numbers = _read(value)
      if isinstance(score, Failure):
        if self._on_error == "raise":
          raise RewardError(_message(function, i, score, samples)) from score.cause
        failures[i] = score
        continue
      scores[i] = score
      for key, number in numbers.items():
        term = f"{function.name}/{key}"
        if term not in further:
          further[term] = np.full(len(scores), np.nan, np.float32)
        further[term][i] = number
    if failures:
      first = min(failures)
      _log.warning(
        "%d of %d scores are bad (rewards.on_error=%s), the first: %s",
        len(failures),
        len(scores),
        self._on_error,
        _message(function, first, failures[first], samples),
      )
    return {function.name: scores, **dict(sorted(further.items()))}, list(failures)

  def _values(
    self, function: loading.RewardFunction, samples: _Samples
  ) -> Iterator[tuple[int, Any]]:
    """Yields (sample, what the function gave for it) in any order."""
    count = len(samples.texts)
    if function.batched:
      if count:
        yield from enumerate(self._batched_values(function, samples))
      return
    calls, rows = [], []
    for i, (prompt, text) in enumerate(zip(samples.prompts, samples.texts)):
      if (function.name, i) in samples.early:
        yield i, samples.early[function.name, i]
        continue
      rows.append(i)
      calls.append(functools.partial(function, **arguments(prompt, text)))
    for i, value in self._executor.run(calls, function.is_async):
      yield rows[i], value

  def _batched_values(
    self, function: loading.RewardFunction, samples: _Samples
  ) -> Sequence[Any]:
    columns = _columns(samples)
    missing = sorted(function.required - columns.keys())
    if missing:
      raise RewardError(
        f"reward {function.name!r} takes the parameter {missing[0]!r}: expected a "
        f"data column of this name, got {', '.join(sorted(columns))}"
        f"{nearest(missing[0], columns)}"
      )
    count, call = len(samples.texts), functools.partial(function, **columns)
    ((_, values),) = self._executor.run([call], function.is_async)
    if isinstance(values, Failure):
      return [values] * count
    if _length(values) == count:
      return list(values)
    given = f"{_length(values)} of them" if _length(values) else f"{values!r:.200}"
    return [Failure(f"expected a list of {count} scores, got {given}")] * count


def _constant(name: str, scores: Sequence[float | Failure]) -> loading.RewardFunction:
  """A reward function whose scores are known."""
  return loading.as_reward(lambda completions: list(scores), name)


def _length(values: Any) -> int | None:
  """Returns the length of a list, array or alike; None of anything else."""
  if isinstance(values, (str, bytes, Mapping)):
    return None
  try:
    return len(values)
  except TypeError:
    return None


def _read(value: Any) -> tuple[float | Failure, dict[str, float]]:
  """Splits a returned value into the score and further numbers to log."""
  if isinstance(value, Failure):
    return value, {}
  further: dict[str, float] = {}
  if isinstance(value, Mapping):
    if "score" not in value:
      return Failure(f"expected a dict with 'score', got keys {list(value)}"), {}
    numbers = {str(k): _finite(v) for k, v in value.items() if k != "score"}
    further = {k: v for k, v in numbers.items() if v is not None}
    value = value["score"]
  score = _finite(value)
  if score is None:
    return Failure(f"expected a finite number, got {value!r:.200}"), {}
  return score, further


def _finite(value: Any) -> float | None:
  """Returns a number that float32 can hold, or None."""
  if isinstance(value, (str, bytes)) or getattr(value, "ndim", 0):
    return None
  try:
    number = float(value)
  except (TypeError, ValueError, OverflowError):
    return None
  return number if abs(number) <= _FLOAT32_MAX else None


def _message(
  function: loading.RewardFunction, i: int, failure: Failure, samples: _Samples
) -> str:
  prompt = samples.prompts[i]
  scope = " (one call for the whole batch)" if function.batched else ""
  return (
    f"reward {function.name!r} failed on sample {i} (data row {prompt.row_id}, draw "
    f"{prompt.draw_id}){scope}: {failure.reason}\n"
    f"  prompt: {prompt.text[:_HEAD]!r}\n"
    f"  completion: {samples.texts[i][:_HEAD]!r}\n"
    "Mend the function or the data, or set rewards.on_error=skip (drops the sample) "
    "or rewards.on_error=zero (counts as score 0)."
  )


def arguments(prompt: Prompt, text: str) -> dict[str, Any]:
  """What a per-sample reward function is called with."""
  return loading.sample_arguments(prompt.columns, text)


def _columns(samples: _Samples) -> dict[str, list[Any]]:
  """All data columns as lists over samples; None where a row lacks one."""
  names = dict.fromkeys(k for p in samples.prompts for k in p.columns)
  columns = {k: [p.columns.get(k) for p in samples.prompts] for k in names}
  return {
    **columns,
    "prompts": [p.prompt for p in samples.prompts],
    "completions": list(samples.texts),
    "completion_ids": [np.asarray(ids).tolist() for ids in samples.response_ids],
  }


def _distinct(names: Sequence[str]) -> list[str]:
  """Appends _2, _3, ... to names that are taken."""
  result: list[str] = []
  for name in names:
    candidate, count = name, 1
    while candidate in result:
      count += 1
      candidate = f"{name}_{count}"
    result.append(candidate)
  return result


def _check_arguments(
  functions: Sequence[Any],
  weights: Sequence[float],
  given: Sequence[tuple[str, float]],
  on_error: str,
  timeout_s: float,
  num_workers: int,
) -> None:
  if not functions and not given:
    raise ConfigError("rewards: expected at least one reward function, got none")
  if len(weights) != len(functions):
    raise ConfigError(
      f"rewards: expected one weight per function ({len(functions)}), got "
      f"{len(weights)}"
    )
  weights = [*weights, *(weight for _, weight in given)]
  if not all(math.isfinite(w) for w in weights):
    raise ConfigError(f"rewards: expected finite weights, got {weights}")
  if on_error not in _POLICIES:
    raise ConfigError(
      f"rewards.on_error: expected {', '.join(_POLICIES)}, got {on_error!r}"
      f"{nearest(str(on_error), _POLICIES)}"
    )
  if not timeout_s > 0:
    raise ConfigError(f"rewards.timeout_s: expected more than 0, got {timeout_s}")
  if num_workers < 1:
    raise ConfigError(f"rewards.num_workers: expected 1 or more, got {num_workers}")
