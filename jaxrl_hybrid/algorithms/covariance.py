"""Policy losses that treat a few tokens of high covariance in another way.

Cui et al. 2025, arXiv:2505.22617: ``cov_t = (A_t - mean A)(log p_t - mean log p)`` is
what drives the entropy down. Which tokens those are is decided on the host, over the
whole global mini-batch and with a seed, before the gradient; so no result depends on
micro-batches or on the mesh.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_hybrid.algorithms.losses import Loss, bounded_log_ratio, clipped
from jaxrl_hybrid.algorithms.registry import register_policy_loss


def covariances(
  log_probs_NR: np.ndarray, advantages_NR: np.ndarray, mask_NR: np.ndarray
) -> np.ndarray:
  """fp64 ``[N, R]``, means over the mask; -inf outside of it."""
  if not mask_NR.any():
    return np.full(mask_NR.shape, -np.inf)
  log_probs, advantages = (
    np.where(mask_NR, x.astype(np.float64), 0.0) for x in (log_probs_NR, advantages_NR)
  )
  centred = lambda x: x - x[mask_NR].mean()
  return np.where(mask_NR, centred(advantages) * centred(log_probs), -np.inf)


def select_clip_cov(
  log_probs: np.ndarray,
  old_log_probs: np.ndarray,
  advantages: np.ndarray,
  mask: np.ndarray,
  rng: np.random.Generator,
  *,
  clip_ratio_low: float,
  clip_ratio_high: float,
  clip_cov_ratio: float,
  clip_cov_lb: float,
  clip_cov_ub: float,
) -> np.ndarray:
  """A random ``clip_cov_ratio`` of all tokens, at least one, of covariance in (lb, ub).

  Tokens that PPO's clip stops anyway are not candidates; fewer candidates than wanted
  are all taken.

  Returns:
    bool ``[N, R]``.
  """
  log_ratio = np.where(mask, log_probs - old_log_probs, 0.0).clip(-20.0, 20.0)
  ratio = np.exp(log_ratio)
  cut = ratio.clip(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
  stopped = -advantages * cut > -advantages * ratio
  cov = covariances(log_probs, advantages, mask)
  candidates = np.flatnonzero((cov > clip_cov_lb) & (cov < clip_cov_ub) & ~stopped)
  wanted = max(int(clip_cov_ratio * mask.sum()), 1)
  chosen = rng.permutation(candidates)[:wanted]
  selected = np.zeros(mask.size, bool)
  selected[chosen] = True
  return selected.reshape(mask.shape)


@register_policy_loss("clip_cov", select=select_clip_cov, per_token=True)
def clip_cov(
  log_probs: jax.Array,
  old_log_probs: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  selected: jax.Array,
  clip_ratio_low: float,
  clip_ratio_high: float,
) -> Loss:
  """PPO's clipped loss; the selected tokens have loss and gradient 0."""
  log_ratio = bounded_log_ratio(log_probs, old_log_probs)
  loss, metrics = clipped(
    log_ratio, advantages, low=clip_ratio_low, high=clip_ratio_high
  )
  loss = jnp.where(selected, 0.0, loss)
  return loss, metrics | {"selected_fraction": selected & mask}


def select_kl_cov(
  log_probs: np.ndarray,
  old_log_probs: np.ndarray,
  advantages: np.ndarray,
  mask: np.ndarray,
  rng: np.random.Generator,
  *,
  kl_cov_ratio: float,
) -> np.ndarray:
  """The ``kl_cov_ratio`` of all tokens, at least one, of the highest covariance.

  Returns:
    bool ``[N, R]``.
  """
  del old_log_probs, rng
  cov = covariances(log_probs, advantages, mask).reshape(-1)
  wanted = min(max(int(kl_cov_ratio * mask.sum()), 1), int(mask.sum()))
  selected = np.zeros(mask.size, bool)
  # Of equal ones the first, whatever the sort does.
  selected[np.argsort(-cov, kind="stable")[:wanted]] = True
  return selected.reshape(mask.shape)


@register_policy_loss("kl_cov", select=select_kl_cov, per_token=True)
def kl_cov(
  log_probs: jax.Array,
  old_log_probs: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  selected: jax.Array,
  ppo_kl_coef: float,
) -> Loss:
  """``-A r``, and for the selected tokens ``+ ppo_kl_coef |log r|``."""
  log_ratio = bounded_log_ratio(log_probs, old_log_probs)
  hold = jnp.where(selected, ppo_kl_coef * jnp.abs(log_ratio), 0.0)
  loss = -advantages * jnp.exp(log_ratio) + hold
  return loss, {"selected_fraction": selected & mask, "ppo_kl": -log_ratio}
