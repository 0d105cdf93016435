"""Policy losses with one ratio for a whole sequence; unreduced, ``[B, T]``.

A row is never split over micro-batches, so these need no totals. Aggregate them by
``seq-mean-token-mean``: every sequence counts the same.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_hybrid.algorithms.losses import Loss, bounded_log_ratio, clipped
from jaxrl_hybrid.algorithms.registry import register_policy_loss

MAX_LOG_SEQUENCE_RATIO = 10.0


@register_policy_loss("gspo")
def gspo(
  log_probs: jax.Array,
  old_log_probs: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  clip_ratio_low: float,
  clip_ratio_high: float,
) -> Loss:
  """PPO's clip on the sequence's ratio (GSPO, arXiv:2507.18071, GSPO-token).

  ``s = exp(mean_t log r_t)``, of which every token has its own gradient:
  ``log s_t = sg(log s - log p_t) + log p_t``, at most 10.
  """
  log_ratio = bounded_log_ratio(log_probs, old_log_probs)
  mean_B1 = _row_mean(log_ratio, mask)
  own = jax.lax.stop_gradient(mean_B1 - log_probs) + log_probs
  own = jnp.minimum(own, MAX_LOG_SEQUENCE_RATIO)
  loss, metrics = clipped(own, advantages, low=clip_ratio_low, high=clip_ratio_high)
  return loss, metrics | {"ppo_kl": -log_ratio}


@register_policy_loss("geo_mean")
def geo_mean(
  log_probs: jax.Array,
  old_log_probs: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  clip_ratio_low: float,
  clip_ratio_high: float,
) -> Loss:
  """The geometric mean of clipped ratios (GMPO, arXiv:2507.20673).

  ``-mean_t(A) exp(mean_t l_t)``; l_t is log r_t, or for A > 0 (A < 0) at most high (at
  least -low), and the worse of the two. The same number on all tokens of a row.
  """
  log_ratio = bounded_log_ratio(log_probs, old_log_probs)
  sign = jnp.sign(advantages)
  bounded = jnp.clip(log_ratio, -clip_ratio_low, clip_ratio_high)
  worse = sign * jnp.minimum(sign * log_ratio, sign * bounded)
  ratio_B1 = jnp.exp(_row_mean(worse, mask))
  loss = jnp.broadcast_to(-_row_mean(advantages, mask) * ratio_B1, log_probs.shape)
  return loss, {"pg_clipfrac": worse != log_ratio, "ppo_kl": -log_ratio}


def _row_mean(x_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
  """``[B, 1]``: the mean over the mask; 0 for a row without."""
  count = jnp.maximum(jnp.sum(mask_BT, -1, keepdims=True), 1)
  return jnp.sum(jnp.where(mask_BT, x_BT, 0.0), -1, keepdims=True) / count
