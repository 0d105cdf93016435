"""Log-probabilities of given tokens without ``[tokens, vocab]`` in memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_hybrid.ops.matmul import Kernel, Weight, backward_dtype, product

# (array, logical axis of each dim) -> the array with its sharding pinned
Pin = Callable[[jax.Array, tuple[str | None, ...]], jax.Array]
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


def positions(rows: int, tokens: int, shards: int = 1) -> int:
  """Positions along T of which ``rows / shards`` rows have at most ``tokens``."""
  return max(1, tokens * shards // rows)


@dataclasses.dataclass(frozen=True)
class _Form:
  """What is the same for every token; arguments of ``token_log_probs``."""

  temperature: float
  vocab_size: int
  dtype: jnp.dtype
  softcap: float | None
  collision: bool
  chunk: int
  shards: int
  pin: Pin | None

  def logits(self, hidden_BTD: jax.Array, head_VD: jax.Array) -> jax.Array:
    return scaled_logits(
      hidden_BTD,
      head_VD,
      temperature=self.temperature,
      vocab_size=self.vocab_size,
      dtype=self.dtype,
      softcap=self.softcap,
    )

  def before_scaling(self, d_BTV: jax.Array, logits_BTV: jax.Array) -> jax.Array:
    """The gradient of the product from that of its scaled logits."""
    d_BTV /= self.temperature
    if self.softcap is None:
      return d_BTV
    tanh_BTV = jnp.clip(logits_BTV * self.temperature / self.softcap, -1.0, 1.0)
    return d_BTV * (1 - tanh_BTV**2)

  def add_gradient(self, so_far_GVD, d_BTV: jax.Array, hidden_BTD: jax.Array):
    """Adds the head's gradient, of each batch shard by itself."""
    split = lambda x: x.reshape(self.shards, -1, *x.shape[1:])
    return self.pinned(
      so_far_GVD
      + jnp.einsum(
        "gbtv,gbtd->gvd",
        split(d_BTV),
        split(hidden_BTD),
        preferred_element_type=jnp.float32,
      )
    )

  def pinned(self, x_GVD: jax.Array) -> jax.Array:
    return x_GVD if self.pin is None else self.pin(x_GVD, ("batch", "vocab", None))


def token_log_probs(
  hidden_BTD: jax.Array,
  head_VD: jax.Array | Kernel,
  targets_BT: jax.Array,
  *,
  temperature: float,
  vocab_size: int,
  chunk: int,
  dtype: jnp.dtype = jnp.float32,
  softcap: float | None = None,
  collision: bool = False,
  shards: int = 1,
  pin: Pin | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Returns fp32 (log-prob of the target ``[B, T]``, entropy ``[B, T]``).

  ``log softmax(hidden @ head.T / temperature)`` over the un-padded vocabulary,
  in chunks of ``chunk`` positions along T whose logits are computed again in
  the backward pass. The entropy is that of the same distribution, in nats.

  With z the scaled logits, p their softmax and E the mean of z under p, the
  gradients that the backward pass starts from are ``1[v = target] - p_v`` of the
  log-prob, ``p_v (E - z_v)`` of the entropy and ``2 p_v (p_v - sum p^2)`` of the sum
  of squares, rounded to ``ops.matmul.backward_dtype`` for its products.

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
    shards: parts of B on devices of their own. The head's gradient is summed over
      them once, not chunk by chunk.
    pin: places an array by logical axes.
  """
  value, slot = head_VD, None
  if isinstance(head_VD, Kernel):
    value, slot = head_VD.value, head_VD.slot
  form = _Form(
    temperature,
    vocab_size,
    jnp.dtype(dtype),
    softcap,
    collision,
    min(chunk, hidden_BTD.shape[1]),
    shards,
    pin,
  )
  return _scored(hidden_BTD, value, slot, targets_BT, form)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _scored(hidden_BTD, value_VD, slot_VD, targets_BT, form):
  return _score_forward(hidden_BTD, value_VD, slot_VD, targets_BT, form)[0]


def _score_forward(hidden_BTD, value_VD, slot_VD, targets_BT, form: _Form):
  def score(_, chunk):
    hidden, targets = chunk
    logits_BTV = form.logits(hidden, value_VD)
    norm_BT = jax.nn.logsumexp(logits_BTV, -1)
    probs_BTV = jnp.exp(logits_BTV - norm_BT[..., None])
    hit_BTV = jnp.arange(logits_BTV.shape[-1]) == targets[..., None]
    picked_BT = jnp.sum(jnp.where(hit_BTV, logits_BTV, 0.0), -1)
    if form.collision:
      second_BT = jnp.sum(probs_BTV**2, -1)
    else:
      second_BT = norm_BT - jnp.sum(probs_BTV * logits_BTV, -1)
    return None, (picked_BT - norm_BT, second_BT, norm_BT)

  _, found = _scan_chunks(score, None, (hidden_BTD, targets_BT), form.chunk)
  log_probs_BT, second_BT, norm_BT = found
  has_slot = None if slot_VD is None else ()
  kept = hidden_BTD, value_VD, has_slot, targets_BT, second_BT, norm_BT
  return (log_probs_BT, second_BT), kept


def _score_backward(form: _Form, kept, cotangents):
  hidden_BTD, value_VD, has_slot, targets_BT, second_BT, norm_BT = kept
  low = backward_dtype(form.dtype)
  head_VD = value_VD.astype(low)

  def pull_back(so_far_GVD, chunk):
    hidden, targets, second, norm, of_log_prob, of_second = (
      x if x.ndim == 3 else x[..., None] for x in chunk
    )
    logits_BTV = form.logits(hidden, value_VD)
    probs_BTV = jnp.exp(logits_BTV - norm)
    hit_BTV = jnp.arange(logits_BTV.shape[-1]) == targets
    if form.collision:
      second_BTV = 2 * probs_BTV * (probs_BTV - second)
    else:
      second_BTV = probs_BTV * (norm - second - logits_BTV)
    d_BTV = of_log_prob * (hit_BTV - probs_BTV) + of_second * second_BTV
    d_BTV = form.before_scaling(d_BTV, logits_BTV).astype(low)
    d_hidden = jnp.einsum("btv,vd->btd", d_BTV, head_VD).astype(hidden.dtype)
    seen = hidden.astype(form.dtype).astype(low)
    return form.add_gradient(so_far_GVD, d_BTV, seen), d_hidden

  empty = form.pinned(jnp.zeros((form.shards, *value_VD.shape), jnp.float32))
  chunks = hidden_BTD, targets_BT, second_BT, norm_BT, *cotangents
  d_head_GVD, d_hidden_BTD = _scan_chunks(pull_back, empty, chunks, form.chunk)
  d_head_VD = jnp.sum(d_head_GVD, 0)
  if has_slot is None:
    return d_hidden_BTD, d_head_VD.astype(value_VD.dtype), None, None
  return d_hidden_BTD, None, d_head_VD, None


_scored.defvjp(_score_forward, _score_backward)


def _scan_chunks(function: Callable[..., Any], start: Any, by_token: Any, chunk: int):
  """``lax.scan`` over chunks of positions of ``[B, T, ...]`` arrays."""
  length = by_token[0].shape[1]
  if length == chunk:
    return function(start, by_token)
  padding = -length % chunk
  pad = lambda x: jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
  split = lambda x: jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)
  last, found = jax.lax.scan(function, start, tuple(split(pad(x)) for x in by_token))
  join = lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])
  return last, jax.tree.map(lambda x: join(x)[:, :length], found)


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
  one_chunk = jax.checkpoint(function)
  step = lambda _, chunk: (None, one_chunk(*chunk, *whole))
  length = by_token[0].shape[1]
  return _scan_chunks(step, None, by_token, min(chunk, length))[1]


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
