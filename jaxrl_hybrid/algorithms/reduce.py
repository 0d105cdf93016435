"""Reductions whose denominators are totals of the whole global mini-batch.

A micro-batch contributes its numerator over those totals, so the sum over
micro-batches is the loss of the mini-batch: micro-batch size, packing and mesh
never change the gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

AGGREGATIONS = (
  "token-mean",
  "token-sum",
  "seq-mean-token-sum",
  "seq-mean-token-sum-norm",
  "seq-mean-token-mean",
)


class Totals(NamedTuple):
  """Totals of a global mini-batch, at least 1 each (an all-masked batch has
  numerator 0, hence loss 0).

  Attributes:
    tokens: number of tokens in the loss.
    sequences: number of sequences with at least one such token.
  """

  tokens: jax.Array
  sequences: jax.Array


def totals(mask: jax.Array, positions: jax.Array | None = None) -> Totals:
  """Totals of a bool mask ``[..., T]``.

  Its rows are sequences, or hold several, each from a position 0 on.
  """
  count = jnp.where(mask, sequence_sums(mask.astype(jnp.float32), positions), jnp.inf)
  return Totals(
    jnp.maximum(jnp.sum(mask), 1).astype(jnp.float32),
    jnp.maximum(jnp.round(jnp.sum(1.0 / count)), 1.0),
  )


def sequence_sums(x: jax.Array, positions: jax.Array | None = None) -> jax.Array:
  """``[..., T]`` -> at every token the sum over its own sequence."""
  if positions is None:
    return jnp.broadcast_to(jnp.sum(x, -1, keepdims=True), x.shape)
  width = x.shape[-1]
  ids = jnp.cumsum(positions == 0, -1) - 1

  def one(x_T: jax.Array, ids_T: jax.Array) -> jax.Array:
    return jax.ops.segment_sum(x_T, ids_T, num_segments=width)[ids_T]

  flat = jax.vmap(one)(x.reshape(-1, width), ids.reshape(-1, width))
  return flat.reshape(x.shape)


def aggregate(
  loss_BT: jax.Array,
  mask_BT: jax.Array,
  total: Totals,
  *,
  mode: str,
  scale: float = 1.0,
  positions_BT: jax.Array | None = None,
) -> jax.Array:
  """A micro-batch's share of the mini-batch loss (verl's ``agg_loss`` modes).

  token-mean: sum over tokens / tokens.  token-sum: sum over tokens.
  seq-mean-token-sum: mean over sequences of token sums; ``-norm``: that / scale.
  seq-mean-token-mean: mean over sequences of token means.

  Args:
    loss_BT: unreduced loss.
    mask_BT: bool, true where a token counts.
    total: of the global mini-batch.
    mode: one of ``AGGREGATIONS``.
    scale: divisor of ``seq-mean-token-sum-norm`` (Dr.GRPO's constant length).
    positions_BT: of rows that hold several sequences.
  """
  loss_BT = jnp.where(mask_BT, loss_BT, 0.0)
  if mode == "token-mean":
    return jnp.sum(loss_BT) / total.tokens
  if mode == "token-sum":
    return jnp.sum(loss_BT)
  if mode == "seq-mean-token-sum":
    return jnp.sum(loss_BT) / total.sequences
  if mode == "seq-mean-token-sum-norm":
    return jnp.sum(loss_BT) / total.sequences / scale
  if mode == "seq-mean-token-mean":
    count_BT = sequence_sums(mask_BT.astype(jnp.float32), positions_BT)
    return jnp.sum(loss_BT / jnp.maximum(count_BT, 1.0)) / total.sequences
  raise ValueError(f"expected one of {AGGREGATIONS}, got {mode!r}")


def whiten(x_NT: np.ndarray, mask_NT: np.ndarray) -> np.ndarray:
  """``(x - mean) / sqrt(var + 1e-8)`` over masked tokens, unbiased variance."""
  count = int(mask_NT.sum())
  if count < 2:
    return np.zeros_like(x_NT)
  picked = x_NT[mask_NT].astype(np.float64)
  white = (x_NT - picked.mean()) / np.sqrt(picked.var(ddof=1) + 1e-8)
  return np.where(mask_NT, white, 0.0).astype(np.float32)
