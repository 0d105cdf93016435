"""KL divergence of two policies at every position, over the whole vocabulary."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxrl_hybrid.ops.logprob import in_chunks, scaled_logits
from jaxrl_hybrid.ops.matmul import Weight


def kl_divergence(
  hidden_BTD: jax.Array,
  head_VD: Weight,
  other_BTD: jax.Array,
  other_head_VD: Weight,
  *,
  temperature: float,
  vocab_size: int,
  chunk: int,
  dtype: jnp.dtype = jnp.float32,
  softcap: float | None = None,
) -> jax.Array:
  """fp32 ``[B, T]``: ``sum_v p(v) (log p(v) - log q(v))``, in nats.

  p is the softmax of ``hidden @ head.T / temperature`` and q that of the other
  policy's; both sets of logits exist for ``chunk`` positions at a time, and are
  computed again in the backward pass. Arguments as of ``logprob.token_log_probs``.
  """
  dense = functools.partial(
    _dense,
    temperature=temperature,
    vocab_size=vocab_size,
    dtype=dtype,
    softcap=softcap,
  )
  return in_chunks(
    dense, (hidden_BTD, other_BTD), (head_VD, other_head_VD), chunk=chunk
  )


def _dense(hidden_BTD, other_BTD, head_VD, other_head_VD, **form):
  log_p = jax.nn.log_softmax(scaled_logits(hidden_BTD, head_VD, **form))
  log_q = jax.nn.log_softmax(scaled_logits(other_BTD, other_head_VD, **form))
  return jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1)
