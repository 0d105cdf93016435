"""Choosing the next token: no sort over the vocabulary anywhere.

One uniform number per row and inverse CDF in two levels (blocks, then inside a
block), so a token depends only on the row's own key and logits, not on the
batch. top-k and top-p keep what is at least a threshold, found exactly by
bisection on the bit pattern of fp32 (order-preserving for non-negative floats).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

BLOCK = 256  # vocabulary entries per block of the two-level search
BITS_OF_ONE = 0x3F800000  # 1.0 as fp32: probabilities and bits order alike


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How tokens are drawn.

  Attributes:
    temperature: 0 is greedy; log-probs are then at temperature 1.
    top_k: keep the k most probable tokens (ties kept); -1 keeps all.
    top_p: keep the smallest set of most probable tokens whose mass reaches
      top_p (ties kept); 1.0 keeps all.
  """

  temperature: float = 1.0
  top_k: int = -1
  top_p: float = 1.0

  @property
  def greedy(self) -> bool:
    """Whether the most probable token is always taken."""
    return self.temperature == 0.0


def sample(
  logits_BV: jax.Array, uniform_B: jax.Array, sampling: Sampling
) -> tuple[jax.Array, jax.Array]:
  """Returns (token int32 ``[B]``, log-prob fp32 ``[B]``).

  The log-prob is at the temperature and before top-k / top-p.

  Args:
    logits_BV: fp32, padded columns masked.
    uniform_B: fp32 in [0, 1), one per row.
    sampling: what to draw from.
  """
  scaled_BV = logits_BV / (sampling.temperature or 1.0)
  log_probs_BV = jax.nn.log_softmax(scaled_BV, -1)
  if sampling.greedy:
    tokens_B = jnp.argmax(logits_BV, -1).astype(jnp.int32)
  else:
    probs_BV = _restrict(jnp.exp(log_probs_BV), sampling)
    tokens_B = inverse_cdf(probs_BV, uniform_B)
  log_probs_B = jnp.take_along_axis(log_probs_BV, tokens_B[:, None], -1)[:, 0]
  return tokens_B, log_probs_B


def inverse_cdf(weights_BV: jax.Array, uniform_B: jax.Array) -> jax.Array:
  """Index drawn in proportion to non-negative weights; int32 ``[B]``.

  An index of weight 0 is never returned unless all weights are 0.
  """
  rows, vocab = weights_BV.shape
  block = min(BLOCK, vocab)
  blocks_BNC = jnp.pad(weights_BV, ((0, 0), (0, -vocab % block))).reshape(
    rows, -1, block
  )
  mass_BN = blocks_BNC.sum(-1)
  which_B, rest_B = _search(mass_BN, uniform_B)
  inner_BC = jnp.take_along_axis(blocks_BNC, which_B[:, None, None], 1)[:, 0]
  inner_B, _ = _search(inner_BC, rest_B)
  return (which_B * block + inner_B).astype(jnp.int32)


def row_keys(
  key: jax.Array, draw_ids_B: jax.Array, sample_ids_B: jax.Array
) -> jax.Array:
  """One key per row from (seed, draw id, sample id)."""
  fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
  return jax.vmap(jax.random.fold_in)(fold(key, draw_ids_B), sample_ids_B)


def uniforms(keys_B: jax.Array, position: jax.Array) -> jax.Array:
  """fp32 ``[B]`` in [0, 1) for one response position."""
  fold = jax.vmap(jax.random.fold_in, in_axes=(0, None))
  return jax.vmap(lambda k: jax.random.uniform(k, (), jnp.float32))(
    fold(keys_B, position)
  )


def _search(weights_BN, uniform_B):
  """First index whose cumulated weight exceeds uniform * total, and the place
  of that point inside the index's own weight, again in [0, 1)."""
  cumulated_BN = jnp.cumsum(weights_BN, -1)
  point_B = uniform_B * cumulated_BN[:, -1]
  index_B = jnp.sum(cumulated_BN <= point_B[:, None], -1)
  last_B = weights_BN.shape[-1] - 1 - jnp.argmax(weights_BN[:, ::-1] > 0, -1)
  index_B = jnp.minimum(index_B, last_B)
  pick = lambda x: jnp.take_along_axis(x, index_B[:, None], -1)[:, 0]
  weight_B = pick(weights_BN)
  before_B = pick(cumulated_BN) - weight_B
  place_B = (point_B - before_B) / jnp.maximum(weight_B, 1e-38)
  return index_B, jnp.clip(place_B, 0.0, 1.0 - 2.0**-24)


def _restrict(probs_BV: jax.Array, sampling: Sampling) -> jax.Array:
  if 0 < sampling.top_k < probs_BV.shape[-1]:
    count = lambda kept_BV: jnp.sum(kept_BV, -1) >= sampling.top_k
    probs_BV = _keep_top(probs_BV, count)
  if sampling.top_p < 1.0:
    total_B = probs_BV.sum(-1)
    mass = lambda kept_BV: (
      jnp.sum(jnp.where(kept_BV, probs_BV, 0.0), -1) >= sampling.top_p * total_B
    )
    probs_BV = _keep_top(probs_BV, mass)
  return probs_BV


def _keep_top(probs_BV, enough) -> jax.Array:
  """Zeroes all below the greatest threshold at which ``enough`` is kept."""
  bits_BV = jax.lax.bitcast_convert_type(probs_BV, jnp.int32)

  def halve(_, bounds):
    low_B, high_B = bounds  # enough at low, not enough at high
    middle_B = low_B + (high_B - low_B) // 2
    ok_B = enough(bits_BV >= middle_B[:, None])
    return jnp.where(ok_B, middle_B, low_B), jnp.where(ok_B, high_B, middle_B)

  rows = probs_BV.shape[0]
  low_B = jnp.zeros((rows,), jnp.int32)
  high_B = jnp.full((rows,), BITS_OF_ONE + 2**12, jnp.int32)
  low_B, _ = jax.lax.fori_loop(0, 31, halve, (low_B, high_B))
  return jnp.where(bits_BV >= low_B[:, None], probs_BV, 0.0)
