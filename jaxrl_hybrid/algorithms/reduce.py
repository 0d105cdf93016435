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


def totals(mask: jax.Array) -> Totals:
  """Totals of a bool mask ``[..., T]`` whose other axes are sequences."""
  return Totals(
    jnp.maximum(jnp.sum(mask), 1).astype(jnp.float32),
    jnp.maximum(jnp.sum(jnp.any(mask, -1)), 1).astype(jnp.float32),
  )


def aggregate(
  loss_BT: jax.Array,
  mask_BT: jax.Array,
  total: Totals,
  *,
  mode: str,
  scale: float = 1.0,
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
    lengths_B = jnp.maximum(jnp.sum(mask_BT, -1), 1)
    return jnp.sum(jnp.sum(loss_BT, -1) / lengths_B) / total.sequences
  raise ValueError(f"expected one of {AGGREGATIONS}, got {mode!r}")


def whiten(x_NT: np.ndarray, mask_NT: np.ndarray) -> np.ndarray:
  """``(x - mean) / sqrt(var + 1e-8)`` over masked tokens, unbiased variance."""
  count = int(mask_NT.sum())
  if count < 2:
    return np.zeros_like(x_NT)
  picked = x_NT[mask_NT].astype(np.float64)
  white = (x_NT - picked.mean()) / np.sqrt(picked.var(ddof=1) + 1e-8)
  return np.where(mask_NT, white, 0.0).astype(np.float32)
