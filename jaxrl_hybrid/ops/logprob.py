"""Log-probabilities of given tokens without ``[tokens, vocab]`` in memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_hybrid.ops.matmul import Weight, product

MASKED = -1e30  # logit of a padded vocabulary column: probability exactly 0


class Scored(NamedTuple):
  """What a decoder says of given tokens.

  Attributes:
    log_probs_BT: of each token given those before.
    entropy_BT: of the distribution that each token was drawn from.
    load: of the experts (``experts.Load``), or None.
    hidden_BTD: final hidden states; position t predicts token t + 1.
    head_VD: LM head.
  """

  log_probs_BT: jax.Array
  entropy_BT: jax.Array
  load: Any
  hidden_BTD: jax.Array
  head_VD: Weight


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
  dense = functools.partial(
    _dense,
    temperature=temperature,
    vocab_size=vocab_size,
    dtype=dtype,
    softcap=softcap,
    collision=collision,
  )
  return in_chunks(dense, (hidden_BTD, targets_BT), (head_VD,), chunk=chunk)


def in_chunks(
  function: Callable[..., Any],
  by_token: tuple[jax.Array, ...],
  whole: tuple[Any, ...],
  *,
  chunk: int,
) -> Any:
  """``function(*by_token, *whole)``, a chunk of positions after the other.

  What the function needs for its gradient is computed again in the backward pass.

  Args:
    function: makes arrays ``[B, T]``.
    by_token: arrays ``[B, T, ...]``, cut along T.
    whole: arguments that every chunk gets.
    chunk: positions at a time.
  """
  length, one_chunk = by_token[0].shape[1], jax.checkpoint(function)
  if length <= chunk:
    return one_chunk(*by_token, *whole)
  padding = -length % chunk
  pad = lambda x: jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
  split = lambda x: jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)
  _, found = jax.lax.scan(
    lambda carry, xs: (carry, one_chunk(*xs, *whole)),
    None,
    tuple(split(pad(x)) for x in by_token),
  )
  join = lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)[:, :length]
  return jax.tree.map(join, found)


def scaled_logits(
  hidden_BTD: jax.Array,
  head_VD: Weight,
  *,
  temperature: float,
  vocab_size: int,
  dtype: jnp.dtype,
  softcap: float | None,
) -> jax.Array:
  """fp32 logits ``[B, T, V]`` by the temperature, padded columns masked."""
  logits_BTV = cap(product(hidden_BTD, head_VD, "btd,vd->btv", dtype), softcap)
  return mask_padded_vocab(logits_BTV / temperature, vocab_size)


def cap(logits: jax.Array, softcap: float | None) -> jax.Array:
  """``c tanh(logits / c)``; no cap where c is None."""
  return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def _dense(hidden_BTD, targets_BT, head_VD, *, collision, **form):
  logits_BTV = scaled_logits(hidden_BTD, head_VD, **form)
  norm_BT = jax.nn.logsumexp(logits_BTV, -1)
  picked_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], -1)[..., 0]
  probs_BTV = jnp.exp(logits_BTV - norm_BT[..., None])
  if collision:
    return picked_BT - norm_BT, jnp.sum(probs_BTV**2, -1)
  entropy_BT = norm_BT - jnp.sum(probs_BTV * logits_BTV, -1)
  return picked_BT - norm_BT, entropy_BT
