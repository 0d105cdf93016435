"""Log-probabilities of given tokens without ``[tokens, vocab]`` in memory."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxrl_hybrid.ops.matmul import Weight, product

MASKED = -1e30  # logit of a padded vocabulary column: probability exactly 0


def mask_padded_vocab(logits: jax.Array, vocab_size: int) -> jax.Array:
  """Sets the columns from ``vocab_size`` on to ``MASKED``."""
  if logits.shape[-1] == vocab_size:
    return logits
  return jnp.where(jnp.arange(logits.shape[-1]) < vocab_size, logits, MASKED)


def token_log_probs(
  hidden_BTD: jax.Array,
  head_VD: Weight,
  targets_BT: jax.Array,
  *,
  temperature: float,
  vocab_size: int,
  chunk: int,
  dtype: jnp.dtype = jnp.float32,
  softcap: float | None = None,
  collision: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """Returns fp32 (log-prob of the target ``[B, T]``, entropy ``[B, T]``).

  ``log softmax(hidden @ head.T / temperature)`` over the un-padded vocabulary,
  in chunks of ``chunk`` positions along T whose logits are computed again in
  the backward pass. The entropy is that of the same distribution, in nats.

  Args:
    hidden_BTD: final hidden states; position t predicts ``targets_BT[:, t]``.
    head_VD: LM head, V padded or not.
    targets_BT: int32 ids < vocab_size (ids of padding only need be in range).
    temperature: > 0.
    vocab_size: un-padded vocabulary size.
    chunk: positions at a time.
    dtype: of the product's operands; logits are fp32.
    softcap: c in ``c tanh(logits / c)``, before the temperature.
    collision: the sum of squared probabilities in the entropy's place.
  """
  length = hidden_BTD.shape[1]
  one_chunk = jax.checkpoint(
    functools.partial(
      _dense,
      temperature=temperature,
      vocab_size=vocab_size,
      dtype=dtype,
      softcap=softcap,
      collision=collision,
    )
  )
  if length <= chunk:
    return one_chunk(hidden_BTD, head_VD, targets_BT)
  padding = -length % chunk
  hidden = jnp.pad(hidden_BTD, ((0, 0), (0, padding), (0, 0)))
  targets = jnp.pad(targets_BT, ((0, 0), (0, padding)))
  split = lambda x: jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)
  _, (log_probs, entropy) = jax.lax.scan(
    lambda carry, xs: (carry, one_chunk(xs[0], head_VD, xs[1])),
    None,
    (split(hidden), split(targets)),
  )
  join = lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)[:, :length]
  return join(log_probs), join(entropy)


def cap(logits: jax.Array, softcap: float | None) -> jax.Array:
  """``c tanh(logits / c)``; no cap where c is None."""
  return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def _dense(
  hidden_BTD,
  head_VD,
  targets_BT,
  *,
  temperature,
  vocab_size,
  dtype,
  softcap,
  collision,
):
  logits_BTV = cap(product(hidden_BTD, head_VD, "btd,vd->btv", dtype), softcap)
  logits_BTV = mask_padded_vocab(logits_BTV / temperature, vocab_size)
  norm_BT = jax.nn.logsumexp(logits_BTV, -1)
  picked_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], -1)[..., 0]
  probs_BTV = jnp.exp(logits_BTV - norm_BT[..., None])
  if collision:
    return picked_BT - norm_BT, jnp.sum(probs_BTV**2, -1)
  entropy_BT = norm_BT - jnp.sum(probs_BTV * logits_BTV, -1)
  return picked_BT - norm_BT, entropy_BT
