"""Policy losses with a ratio of each token, and the value loss.

Unreduced: ``[B, T]`` in, ``[B, T]`` out. ``r = exp(clip(log p - log p_old, +-20))``;
knobs are keys of the config's ``actor``. What is outside of the mask has no meaning.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_hybrid.algorithms.registry import register_policy_loss

MAX_LOG_RATIO = 20.0
Metrics = dict[str, jax.Array]
Loss = tuple[jax.Array, Metrics]


@register_policy_loss("vanilla", per_token=True)
def vanilla(
  log_probs: jax.Array,
  old_log_probs: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  clip_ratio_low: float,
  clip_ratio_high: float,
  clip_ratio_c: float,
) -> Loss:
  """PPO's clipped loss (arXiv:1707.06347) with dual clip (arXiv:1912.09729).

  ``loss = max(-A r, -A clip(r, 1 - low, 1 + high))``, and for A < 0 at most ``-A c``.
  A high above low is DAPO's clip-higher (arXiv:2503.14476).

  Returns:
    (loss, {pg_clipfrac, pg_clipfrac_lower, ppo_kl}), all unreduced.
  """
  del mask
  log_ratio = bounded_log_ratio(log_probs, old_log_probs)
  return clipped(
    log_ratio, advantages, low=clip_ratio_low, high=clip_ratio_high, dual=clip_ratio_c
  )


@register_policy_loss("gpg", "reinforce", per_token=True)
def reinforce(
  log_probs: jax.Array,
  old_log_probs: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
) -> Loss:
  """``-A log p``: the policy gradient itself (Williams 1992; GPG, arXiv:2504.02546)."""
  del mask
  log_ratio = bounded_log_ratio(log_probs, old_log_probs)
  return -advantages * log_probs, {"ppo_kl": -log_ratio}


@register_policy_loss("cispo", per_token=True)
def cispo(
  log_probs: jax.Array,
  old_log_probs: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  clip_ratio_low: float,
  clip_ratio_high: float,
) -> Loss:
  """``-sg(clip(r, 1 - low, 1 + high)) A log p`` (MiniMax-M1, arXiv:2506.13585).

  Clips the weight of a token, not its gradient: every token goes on learning.
  """
  del mask
  log_ratio = bounded_log_ratio(log_probs, old_log_probs)
  ratio = jnp.exp(log_ratio)
  weight = jnp.clip(ratio, 1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
  loss = -jax.lax.stop_gradient(weight) * advantages * log_probs
  return loss, {"pg_clipfrac": weight != ratio, "ppo_kl": -log_ratio}


@register_policy_loss("sapo", per_token=True)
def sapo(
  log_probs: jax.Array,
  old_log_probs: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  sapo_tau_pos: float,
  sapo_tau_neg: float,
) -> Loss:
  """A soft gate in place of the clip (SAPO, arXiv:2511.20347).

  ``-A sigmoid(tau (r - 1)) 4 / tau``, tau_pos for A > 0, else tau_neg.
  """
  del mask
  log_ratio = bounded_log_ratio(log_probs, old_log_probs)
  tau = jnp.where(advantages > 0, sapo_tau_pos, sapo_tau_neg)
  gate = jax.nn.sigmoid(tau * (jnp.exp(log_ratio) - 1.0)) * 4.0 / tau
  return -advantages * gate, {"ppo_kl": -log_ratio}


@register_policy_loss("dppo_tv", per_token=True)
def dppo_tv(
  log_probs: jax.Array,
  old_log_probs: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  clip_ratio_low: float,
  clip_ratio_high: float,
  clip_ratio_c: float,
) -> Loss:
  """A bound on the change of probability (DPPO, arXiv:2602.04879).

  ``-A sg(min(r, c)) log p`` where the token's total variation permits it: for A > 0
  while ``p - p_old <= high``, else while ``p - p_old >= -low``; 0 elsewhere.
  """
  del mask
  change = jnp.exp(log_probs) - jnp.exp(old_log_probs)
  inside = jnp.where(
    advantages > 0, change <= clip_ratio_high, change >= -clip_ratio_low
  )
  return _divergence_bounded(
    log_probs, old_log_probs, advantages, inside, most=clip_ratio_c
  )


@register_policy_loss("dppo_kl", per_token=True)
def dppo_kl(
  log_probs: jax.Array,
  old_log_probs: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  clip_ratio_low: float,
  clip_ratio_high: float,
  clip_ratio_c: float,
) -> Loss:
  """``dppo_tv`` with a bound on KL(p_old || p) of "this token or another one".

  ``p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))``; a token that moves
  back towards p_old is always inside.
  """
  del mask
  p = jnp.clip(jnp.exp(log_probs), 1e-7, 1.0 - 1e-7)
  old = jnp.clip(jnp.exp(old_log_probs), 1e-7, 1.0 - 1e-7)
  divergence = old * jnp.log(old / p) + (1 - old) * jnp.log((1 - old) / (1 - p))
  bound = jnp.where(advantages > 0, clip_ratio_high, clip_ratio_low)
  returning = jnp.where(advantages > 0, p <= old, p >= old)
  return _divergence_bounded(
    log_probs,
    old_log_probs,
    advantages,
    returning | (divergence <= bound),
    most=clip_ratio_c,
  )


@register_policy_loss("dro", per_token=True)
def dro(
  log_probs: jax.Array,
  old_log_probs: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  dro_beta: float,
) -> Loss:
  """``-(A log p - beta / 2 (log r)^2)``: a quadratic hold (DRO, arXiv:2405.19107)."""
  del mask
  log_ratio = bounded_log_ratio(log_probs, old_log_probs)
  loss = -(advantages * log_probs - 0.5 * dro_beta * log_ratio**2)
  return loss, {"ppo_kl": -log_ratio}


def clipped(
  log_ratio: jax.Array,
  advantages: jax.Array,
  *,
  low: float,
  high: float,
  dual: float | None = None,
) -> Loss:
  """PPO's clipped loss of a log-ratio; ``dual`` bounds it at ``-A dual`` for A < 0."""
  ratio = jnp.exp(log_ratio)
  plain = -advantages * ratio
  cut = -advantages * jnp.clip(ratio, 1.0 - low, 1.0 + high)
  loss = worse = jnp.maximum(plain, cut)
  metrics = {"pg_clipfrac": cut > plain, "ppo_kl": -log_ratio}
  if dual is not None:
    bound = -advantages * dual
    loss = jnp.where(advantages < 0, jnp.minimum(worse, bound), worse)
    metrics["pg_clipfrac_lower"] = (advantages < 0) & (worse > bound)
  return loss, metrics


def bounded_log_ratio(log_probs: jax.Array, old_log_probs: jax.Array) -> jax.Array:
  """``log p - log p_old`` within +-20, so that its exp is finite."""
  return jnp.clip(log_probs - old_log_probs, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def _divergence_bounded(log_probs, old_log_probs, advantages, inside, *, most) -> Loss:
  log_ratio = bounded_log_ratio(log_probs, old_log_probs)
  weight = jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_ratio), most))
  loss = jnp.where(inside, -advantages * weight * log_probs, 0.0)
  return loss, {"pg_clipfrac": ~inside, "ppo_kl": -log_ratio}


def value_loss(
  values: jax.Array, returns: jax.Array, old_values: jax.Array, *, cliprange: float
) -> Loss:
  """``0.5 max((V - R)^2, (V_clipped - R)^2)``, V within cliprange of V_old.

  Returns:
    (loss, {vf_clipfrac}), unreduced.
  """
  near_old = old_values + jnp.clip(values - old_values, -cliprange, cliprange)
  plain, near = (values - returns) ** 2, (near_old - returns) ** 2
  return 0.5 * jnp.maximum(plain, near), {"vf_clipfrac": near > plain}
