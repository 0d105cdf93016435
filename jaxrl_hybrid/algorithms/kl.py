"""Estimators of KL(policy || reference) per token, and its coefficient."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

ESTIMATORS = ("k1", "k2", "k3", "abs")
# As a loss: the value of the estimator, the gradient of k2.
LOSSES = (*ESTIMATORS, *(f"{kind}+" for kind in ESTIMATORS))
MAX_LOG_RATIO = 20.0


def kl_estimate(log_probs: jax.Array, ref_log_probs: jax.Array, kind: str) -> jax.Array:
  """Unreduced estimate with ``d = log p - log p_ref`` (J. Schulman 2020).

  k1: d.  k2: d^2 / 2.  k3: exp(-d) + d - 1.  abs: |d|.  Unbiased are k1 and k3;
  as losses, the gradient of k2 is the one of the KL, that of k1 is 0 on
  average. A ``+`` behind it keeps the value and takes k2's gradient.

  Args:
    log_probs: of the sampled tokens under the policy.
    ref_log_probs: under the reference.
    kind: one of ``LOSSES``.
  """
  d = jnp.clip(log_probs - ref_log_probs, -MAX_LOG_RATIO, MAX_LOG_RATIO)
  square = 0.5 * d * d
  if kind.endswith("+"):
    value = kl_estimate(log_probs, ref_log_probs, kind[:-1])
    return square + jax.lax.stop_gradient(value - square)
  if kind == "k1":
    return d
  if kind == "k2":
    return square
  if kind == "k3":
    return jnp.exp(-d) + d - 1.0
  if kind == "abs":
    return jnp.abs(d)
  raise ValueError(f"expected one of {LOSSES}, got {kind!r}")


@dataclasses.dataclass
class KLController:
  """The coefficient of the KL penalty in the reward.

  ``fixed`` keeps it. ``adaptive`` (Ziegler et al. 2019, arXiv:1909.08593):
  ``coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon``.
  """

  kind: str
  coef: float
  target: float
  horizon: int

  def update(self, kl: float, sequences: int) -> None:
    """Adapts to the mean sequence KL of a step of ``sequences`` sequences."""
    if self.kind == "adaptive":
      error = min(max(kl / self.target - 1.0, -0.2), 0.2)
      self.coef *= 1.0 + error * sequences / self.horizon
