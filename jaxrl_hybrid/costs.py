"""Safe RLHF's second side: costs are scored, valued and learned as rewards are.

So their config is the run's config with ``cost.*`` in the place of ``rewards.*``,
``reward_model`` and ``critic.path``, and everything that is made of those is made
again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ml_collections import ConfigDict

from jaxrl_hybrid import config_checks as checks
from jaxrl_hybrid.errors import ConfigError, JaxrlError


def cost_config(config: ConfigDict) -> ConfigDict:
  """A resolved config as the cost's side reads it."""
  own, cost = config.copy_and_resolve_references(), config.cost
  with own.unlocked():
    own.rewards.functions, own.rewards.weights = cost.functions, cost.weights
    own.rewards.overlong_buffer = 0
    own.reward_model = cost.model.copy_and_resolve_references()
    if not config.critic.share_base:
      own.critic.path = cost.critic_path or cost.model.path
  return own


@contextlib.contextmanager
def naming_cost() -> Iterator[None]:
  """Errors of the cost's side say so."""
  try:
    yield
  except JaxrlError as error:
    raise type(error)(
      f"cost (cost.functions, cost.model and cost.critic_path are its "
      f"rewards.functions, reward_model and critic.path): {error}"
    ) from error


def check_cost(config: ConfigDict) -> None:
  """Of an algorithm with a cost: what it is, and numbers in their bounds.

  Raises:
    ConfigError: there is none, or something is out of bounds.
  """
  if not config.algorithm.use_cost:
    return
  own = cost_config(config)
  if not own.rewards.functions and not checks.has_reward_model(own):
    raise ConfigError(
      f"algorithm {config.algorithm.name!r} keeps a cost below a limit; expected "
      "cost.functions (and cost.weights) or cost.model.path, got neither; for example "
      '--config.cost.functions="(\'repetition\',)" --config.cost.weights="(1.0,)" '
      "--config.cost.limit=0.2"
    )
  with naming_cost():
    checks.check_rewards(own)
    checks.check_reward_model(own)
  cost = config.cost
  numbers = (cost.limit, cost.multiplier, cost.multiplier_lr, cost.multiplier_max)
  finite = all(abs(x) < float("inf") for x in numbers)
  if not (finite and 0 < cost.multiplier <= cost.multiplier_max):
    raise ConfigError(
      "cost: expected a finite limit and 0 < multiplier <= multiplier_max, got "
      f"{cost.limit}, {cost.multiplier} and {cost.multiplier_max}"
    )
  if cost.multiplier_lr < 0:
    raise ConfigError(f"cost.multiplier_lr: expected >= 0, got {cost.multiplier_lr}")
