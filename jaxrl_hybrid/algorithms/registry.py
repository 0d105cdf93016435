"""Estimators and policy losses by name, those of a user's own file included."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from jaxrl_hybrid.errors import ConfigError

VALUES = "values"  # of a critic: batch.values
GREEDY = "greedy_baseline"  # score of each prompt's greedy completion
COLLISION = "collision"  # sum over the vocabulary of squared probabilities
TERMS = "score_terms"  # each reward function's own score
NEEDS = (VALUES, GREEDY, COLLISION, TERMS)

# Keyword-only parameters that a policy loss may have: keys of the config's ``actor``.
LOSS_KNOBS = (
  "clip_ratio_low",
  "clip_ratio_high",
  "clip_ratio_c",
  "clip_cov_ratio",
  "clip_cov_lb",
  "clip_cov_ub",
  "kl_cov_ratio",
  "ppo_kl_coef",
  "sapo_tau_pos",
  "sapo_tau_neg",
  "dro_beta",
)


@dataclasses.dataclass(frozen=True)
class Estimator:
  """An advantage estimator.

  Attributes:
    function: (batch, algorithm) -> advantages ``[N, R]``, or one per row ``[N]``, or
      (advantages, returns).
    needs: what has to be in the batch beside rewards, of ``NEEDS``.
    min_group_size: samples of a draw below which there is no signal.
  """

  function: Callable[..., Any]
  needs: frozenset[str]
  min_group_size: int


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
  """An unreduced policy loss.

  Attributes:
    function: (log_probs, old_log_probs, advantages, mask, *, knobs) -> (loss,
      metrics), all ``[B, T]``.
    knobs: the keyword-only parameters, of ``LOSS_KNOBS``.
    select: chooses tokens of a whole mini-batch on the host before the gradient:
      (log_probs, old_log_probs, advantages, mask, rng, *, knobs) -> bool ``[N, R]``;
      the loss gets them as the keyword ``selected``.
    select_knobs: of ``select``.
    per_token: whether a token's loss depends on its own numbers alone. If not, every
      row is one sequence; otherwise a row may hold several.
  """

  function: Callable[..., Any]
  knobs: tuple[str, ...]
  select: Callable[..., Any] | None = None
  select_knobs: tuple[str, ...] = ()
  per_token: bool = False


ESTIMATORS: dict[str, Estimator] = {}
POLICY_LOSSES: dict[str, PolicyLoss] = {}


def register_estimator(
  *names: str, needs: tuple[str, ...] = (), min_group_size: int = 1
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
  """Decorator: makes ``function(batch, algorithm)`` an estimator of these names.

  Args:
    *names: for ``algorithm.adv_estimator`` and ``algorithm.name``.
    needs: what the batch must have, of ``NEEDS``.
    min_group_size: samples of each prompt that it compares, at least.

  Raises:
    ConfigError: a name is taken, or ``needs`` is unknown.
  """
  unknown = sorted(set(needs) - set(NEEDS))
  if unknown:
    raise ConfigError(f"register_estimator: needs is of {NEEDS}, got {unknown}")

  def register(function: Callable[..., Any]) -> Callable[..., Any]:
    found = Estimator(function, frozenset(needs), min_group_size)
    _add(ESTIMATORS, names, found)
    return function

  return register


def register_policy_loss(
  *names: str, select: Callable[..., Any] | None = None, per_token: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
  """Decorator: makes a function a policy loss of these names.

  It is called as ``f(log_probs, old_log_probs, advantages, mask, **knobs)`` with
  ``[B, T]`` arrays and those keys of the config's ``actor`` section that are its
  keyword-only parameters, and returns (unreduced loss, {metric: [B, T]}).

  Args:
    *names: for ``actor.policy_loss`` and ``algorithm.name``.
    select, per_token: see ``PolicyLoss``.

  Raises:
    ConfigError: a name is taken, or a keyword is no knob.
  """

  def register(function: Callable[..., Any]) -> Callable[..., Any]:
    knobs = _knobs(function, {"selected"} if select else set())
    chosen = () if select is None else _knobs(select, set())
    _add(POLICY_LOSSES, names, PolicyLoss(function, knobs, select, chosen, per_token))
    return function

  return register


def _knobs(function: Callable[..., Any], beside: set[str]) -> tuple[str, ...]:
  parameters = inspect.signature(function).parameters.values()
  found = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
  unknown = [name for name in found if name not in LOSS_KNOBS and name not in beside]
  if unknown:
    raise ConfigError(
      f"policy loss {function.__name__}: expected keywords of {LOSS_KNOBS}, got "
      f"{unknown}"
    )
  return tuple(name for name in found if name not in beside)


def _add(table: dict[str, Any], names: tuple[str, ...], entry: Any) -> None:
  for name in names:
    if name in table:
      raise ConfigError(f"the name {name!r} is taken; choose another one")
    table[name] = entry
