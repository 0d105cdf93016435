"""Advantage estimators, losses and what goes with them: pure arrays in, arrays out.

Everything is found by name. A file of the user's own adds names with
``register_estimator`` and ``register_policy_loss`` (docs/algorithms.md).
"""

# Importing these modules registers what they define.
from jaxrl_hybrid.algorithms import (
  covariance,
  estimators,
  losses,
  sequence_losses,
)
from jaxrl_hybrid.algorithms.groups import Groups
from jaxrl_hybrid.algorithms.registry import register_estimator, register_policy_loss

__all__ = [
  "Groups",
  "covariance",
  "estimators",
  "losses",
  "register_estimator",
  "register_policy_loss",
  "sequence_losses",
]
