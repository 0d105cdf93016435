"""Finds reward functions by reference and recognises their shape.

Two shapes, each sync or async:

* per sample: ``compute_score(data_source, solution_str, ground_truth,
  extra_info=None)`` returns a number, or a dict with "score"; it may take any of
  these four parameters as long as ``solution_str`` is one of them;
* batched: ``f(prompts, completions, completion_ids, **columns)`` returns one
  number per completion; it may take any data column by name as long as
  ``completions`` is one of the parameters.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_hybrid import user_files
from jaxrl_hybrid.errors import ConfigError
from jaxrl_hybrid.rewards.builtin import BUILTINS
from jaxrl_hybrid.user_files import nearest

PER_SAMPLE = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCHED = ("prompts", "completions", "completion_ids")
_SHAPES = (
  "compute_score(data_source, solution_str, ground_truth, extra_info=None) or "
  "f(prompts, completions, completion_ids, **columns)"
)


@dataclasses.dataclass(frozen=True)
class RewardFunction:
  """A reward function whose shape is known.

  Attributes:
    name: how metrics and messages call it.
    function: the user's callable.
    batched: one call for all samples, or one call per sample.
    is_async: calling it gives a coroutine.
    accepted: the keywords that it takes; None takes all.
    required: the keywords that it cannot go without.
    bound: the keywords that a partial has set; a column never overwrites them.
  """

  name: str
  function: Callable[..., Any]
  batched: bool
  is_async: bool
  accepted: frozenset[str] | None
  required: frozenset[str]
  bound: frozenset[str] = frozenset()

  def __call__(self, /, **available: Any) -> Any:
    """Calls the function with those of the given keywords that it accepts."""
    names = available.keys() - self.bound
    if self.accepted is not None:
      names &= self.accepted
    return self.function(**{k: available[k] for k in names})


def load_reward(reference: str) -> RewardFunction:
  """Loads the reward function that a config names.

  Args:
    reference: a built-in name, ``path/to/file.py:function`` or
      ``package.module:function``.

  Raises:
    ConfigError: nothing is found there, or its signature has neither shape.
  """
  if ":" in reference:
    return as_reward(load_object(reference, "reward"), reference.rpartition(":")[2])
  if reference not in BUILTINS:
    raise ConfigError(
      "reward: expected a built-in name, 'path/to/file.py:function' or "
      f"'package.module:function', got {reference!r}; built-in are "
      f"{', '.join(sorted(BUILTINS))}{nearest(reference, BUILTINS)}"
    )
  return as_reward(BUILTINS[reference], reference)


def load_object(reference: str, what: str) -> Any:
  """What a config names in the user's own code.

  Args:
    reference: ``path/to/file.py:name`` or ``package.module:name``.
    what: how messages call it, such as a config key.

  Raises:
    ConfigError: nothing is found there.
  """
  place, colon, attribute = reference.rpartition(":")
  if not colon:
    raise ConfigError(
      f"{what}: expected 'path/to/file.py:function' or 'package.module:function', got "
      f"{reference!r}"
    )
  module = user_files.load(place, what)
  if not hasattr(module, attribute):
    public = [k for k, v in vars(module).items() if callable(v) and k[0] != "_"]
    raise ConfigError(
      f"{what} {reference!r}: expected a function {attribute!r} in {place}, got "
      f"{', '.join(public[:20]) or 'no function at all'}{nearest(attribute, public)}"
    )
  return getattr(module, attribute)


def as_reward(function: Callable[..., Any], name: str | None = None) -> RewardFunction:
  """Recognises the shape of a callable by its signature.

  Args:
    function: any callable, or a RewardFunction, which is only renamed.
    name: its name in metrics; None takes :func:`reward_name`.

  Raises:
    ConfigError: it is not callable, is a class, or has neither shape.
  """
  if isinstance(function, RewardFunction):
    return dataclasses.replace(function, name=name or function.name)
  name = name or reward_name(function)
  if not callable(function) or inspect.isclass(function):
    what = "the class" if inspect.isclass(function) else "the object"
    raise ConfigError(
      f"reward {name!r}: expected a function or a callable instance, got {what} "
      f"{function!r:.200}"
    )
  bound = function.keywords if isinstance(function, functools.partial) else {}
  accepted, required, takes_all = _keywords(function, name)
  batched = "completions" in accepted
  if not batched:
    _check_per_sample(name, accepted, required)
  return RewardFunction(
    name=name,
    function=function,
    batched=batched,
    is_async=_is_async(function),
    accepted=None if takes_all else frozenset(accepted),
    required=frozenset(required),
    bound=frozenset(bound),
  )


def reward_name(function: Callable[..., Any]) -> str:
  """Names any callable: functions, partials, lambdas, instances, methods."""
  if isinstance(function, RewardFunction):
    return function.name
  if isinstance(function, functools.partial):
    return reward_name(function.func)
  name = getattr(function, "__name__", None)
  return name.strip("<>") if isinstance(name, str) else type(function).__name__


def sample_arguments(columns: Mapping[str, Any], text: str) -> dict[str, Any]:
  """Maps a row's columns to the keywords of a per-sample function.

  The ground truth is the column ground_truth, else
  ``reward_model["ground_truth"]``, else answer, else None; a value that is there
  is kept, falsy or not. extra_info is the column of this name when it is a
  dict, else a dict of the columns that are not mapped to another keyword.

  Args:
    columns: all columns of the row but the prompt.
    text: the completion.
  """
  nested = columns.get("reward_model")
  truth, used = None, {"data_source"}
  if "ground_truth" in columns:
    truth, used = columns["ground_truth"], used | {"ground_truth"}
  elif isinstance(nested, Mapping) and "ground_truth" in nested:
    truth, used = nested["ground_truth"], used | {"reward_model"}
  elif "answer" in columns:
    truth, used = columns["answer"], used | {"answer"}
  extra = columns.get("extra_info")
  if not isinstance(extra, Mapping):
    extra = {k: v for k, v in columns.items() if k not in used}
  return {
    "data_source": columns.get("data_source", ""),
    "solution_str": text,
    "ground_truth": truth,
    "extra_info": dict(extra),  # samples of a draw share the row
  }


def _keywords(
  function: Callable[..., Any], name: str
) -> tuple[list[str], set[str], bool]:
  """Returns accepted names, required names, and whether **kwargs is there."""
  try:
    parameters = inspect.signature(function).parameters.values()
  except (TypeError, ValueError) as error:
    raise ConfigError(
      f"reward {name!r}: expected a signature {_SHAPES}, got a callable without one"
    ) from error
  accepted, required, takes_all = [], set(), False
  for p in parameters:
    takes_all |= p.kind is p.VAR_KEYWORD
    if p.kind is p.POSITIONAL_ONLY and p.default is p.empty:
      raise ConfigError(
        f"reward {name!r}: expected parameters that can be passed by name "
        f"({_SHAPES}), got the positional-only {p.name!r}"
      )
    if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
      accepted.append(p.name)
      if p.default is p.empty:
        required.add(p.name)
  return accepted, required, takes_all


def _check_per_sample(name: str, accepted: list[str], required: set[str]) -> None:
  unknown = sorted(required - set(PER_SAMPLE))
  if "solution_str" in accepted and not unknown:
    return
  hints = [nearest(p, (*PER_SAMPLE, *BATCHED)) for p in unknown or accepted]
  raise ConfigError(
    f"reward {name!r}: expected a signature {_SHAPES}, got the parameters "
    f"({', '.join(accepted)}){''.join(hints)}"
  )


def _is_async(function: Callable[..., Any]) -> bool:
  while isinstance(function, functools.partial):
    function = function.func
  call = getattr(function, "__call__", None)
  return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
