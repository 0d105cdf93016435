"""Policy and value losses, unreduced: ``[B, T]`` in, ``[B, T]`` out."""

from __future__ import annotations

import jax
import jax.numpy as jnp

MAX_LOG_RATIO = 20.0
Metrics = dict[str, jax.Array]


def vanilla(
  log_probs: jax.Array,
  old_log_probs: jax.Array,
  advantages: jax.Array,
  *,
  clip_ratio_low: float,
  clip_ratio_high: float,
  clip_ratio_c: float,
) -> tuple[jax.Array, Metrics]:
  """PPO's clipped loss (arXiv:1707.06347) with dual clip (arXiv:1912.09729).

  ``r = exp(clip(log p - log p_old, +-20))``,
  ``loss = max(-A r, -A clip(r, 1 - low, 1 + high))``, and for A < 0 at most
  ``-A c``.

  Returns:
    (loss, {pg_clipfrac, pg_clipfrac_lower, ppo_kl}), all unreduced.
  """
  log_ratio = jnp.clip(log_probs - old_log_probs, -MAX_LOG_RATIO, MAX_LOG_RATIO)
  ratio = jnp.exp(log_ratio)
  plain = -advantages * ratio
  clipped = -advantages * jnp.clip(ratio, 1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
  worse = jnp.maximum(plain, clipped)
  bound = -advantages * clip_ratio_c
  loss = jnp.where(advantages < 0, jnp.minimum(worse, bound), worse)
  metrics = {
    "pg_clipfrac": clipped > plain,
    "pg_clipfrac_lower": (advantages < 0) & (worse > bound),
    "ppo_kl": -log_ratio,
  }
  return loss, metrics


def value_loss(
  values: jax.Array, returns: jax.Array, old_values: jax.Array, *, cliprange: float
) -> tuple[jax.Array, Metrics]:
  """``0.5 max((V - R)^2, (V_clipped - R)^2)``, V within cliprange of V_old.

  Returns:
    (loss, {vf_clipfrac}), unreduced.
  """
  near_old = old_values + jnp.clip(values - old_values, -cliprange, cliprange)
  plain, clipped = (values - returns) ** 2, (near_old - returns) ** 2
  return 0.5 * jnp.maximum(plain, clipped), {"vf_clipfrac": clipped > plain}


POLICY_LOSSES = {"vanilla": vanilla}
