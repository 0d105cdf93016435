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

BLOCK = 256  # vocabulary entries per block of the two-level search, at most
SMALLEST_BLOCK = 32
BITS_OF_ONE = 0x3F800000  # 1.0 as fp32: probabilities and bits order alike


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How tokens are drawn.

  Attributes:
    temperature: 0 is greedy; log-probs are then at temperature 1.
    top_k: keep the k most probable tokens (ties kept); -1 keeps all.
    top_p: keep the smallest set of most probable tokens whose mass reaches
      top_p (ties kept); 1.0 keeps all.
    min_p: keep tokens of at least min_p times the largest probability
      (arXiv:2407.01082), after the other two; 0.0 keeps all.
    repetition_penalty: logits of tokens that the prompt or the response has are
      divided by it if positive, else multiplied (arXiv:1909.05858); 1.0 is off.
      Log-probs do not know of it.
  """

  temperature: float = 1.0
  top_k: int = -1
  top_p: float = 1.0
  min_p: float = 0.0
  repetition_penalty: float = 1.0

  @property
  def greedy(self) -> bool:
    """Whether the most probable token is always taken."""
    return self.temperature == 0.0

  @property
  def penalizes(self) -> bool:
    """Whether the tokens a row already has matter."""
    return self.repetition_penalty != 1.0

  @property
  def restricts(self) -> bool:
    """Whether some tokens are never drawn."""
    return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


def sample(
  logits_BV: jax.Array,
  uniform_B: jax.Array,
  sampling: Sampling,
  seen_BV: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Returns (token int32 ``[B]``, log-prob fp32 ``[B]``).

  The log-prob is at the temperature and before penalty, top-k, top-p and min-p.

  Args:
    logits_BV: fp32, padded columns masked.
    uniform_B: fp32 in [0, 1), one per row.
    sampling: what to draw from.
    seen_BV: bool, the tokens that a penalty is for.
  """
  scaled_BV = logits_BV / (sampling.temperature or 1.0)
  largest_B1 = jnp.max(scaled_BV, -1, keepdims=True)
  # Not normalised: what needs no divisions over the vocabulary does none.
  weights_BV = jnp.exp(scaled_BV - largest_B1)
  mass_BN = _mass(weights_BV)
  total_B = jnp.sum(mass_BN, -1)
  scores_BV = scaled_BV
  if sampling.penalizes:
    scores_BV = _penalize(scaled_BV, seen_BV, sampling.repetition_penalty)
    weights_BV = jnp.exp(scores_BV - jnp.max(scores_BV, -1, keepdims=True))
  if sampling.greedy:
    tokens_B = jnp.argmax(scores_BV, -1)
  elif sampling.penalizes or sampling.restricts:
    tokens_B = inverse_cdf(_restrict(weights_BV, sampling), uniform_B)
  else:
    tokens_B = inverse_cdf(weights_BV, uniform_B, mass_BN)
  tokens_B = tokens_B.astype(jnp.int32)
  picked_B = jnp.take_along_axis(scaled_BV, tokens_B[:, None], -1)[:, 0]
  return tokens_B, picked_B - largest_B1[:, 0] - jnp.log(total_B)


def inverse_cdf(
  weights_BV: jax.Array, uniform_B: jax.Array, mass_BN: jax.Array | None = None
) -> jax.Array:
  """Index drawn in proportion to non-negative weights; int32 ``[B]``.

  An index of weight 0 is never returned unless all weights are 0. ``mass_BN`` are
  the sums of blocks, if they are known.
  """
  blocks_BNC = _blocks(weights_BV)
  block = blocks_BNC.shape[-1]
  mass_BN = _mass(weights_BV) if mass_BN is None else mass_BN
  which_B, rest_B = _search(mass_BN, uniform_B)
  inner_BC = jnp.take_along_axis(blocks_BNC, which_B[:, None, None], 1)[:, 0]
  inner_B, _ = _search(inner_BC, rest_B)
  return (which_B * block + inner_B).astype(jnp.int32)


def _mass(weights_BV: jax.Array) -> jax.Array:
  """Sums of blocks. XLA would make their sum from the weights, reading them again."""
  return jax.lax.optimization_barrier(_blocks(weights_BV).sum(-1))


def _blocks(weights_BV: jax.Array) -> jax.Array:
  rows, vocab = weights_BV.shape
  block = block_size(vocab)
  padded_BV = jnp.pad(weights_BV, ((0, 0), (0, -vocab % block)))
  return padded_BV.reshape(rows, -1, block)


def block_size(vocab: int) -> int:
  """Entries per block: a divisor, so that no copy pads the weights, if there is one."""
  if vocab <= BLOCK:
    return vocab
  divisors = [c for c in range(SMALLEST_BLOCK, BLOCK + 1) if vocab % c == 0]
  return max(divisors, default=BLOCK)


def row_keys(
  key: jax.Array, draw_ids_B: jax.Array, sample_ids_B: jax.Array
) -> jax.Array:
  """One key per row from (seed, draw id, sample id)."""
  fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
  return jax.vmap(jax.random.fold_in)(fold(key, draw_ids_B), sample_ids_B)


def uniforms(keys_B: jax.Array, positions_B: jax.Array) -> jax.Array:
  """fp32 ``[B]`` in [0, 1), each for one response position of its row."""

  def one(key: jax.Array, position: jax.Array) -> jax.Array:
    return jax.random.uniform(jax.random.fold_in(key, position), (), jnp.float32)

  return jax.vmap(one)(keys_B, jnp.broadcast_to(positions_B, keys_B.shape))


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


def _penalize(scaled_BV, seen_BV, penalty: float) -> jax.Array:
  # A temperature above 0 does not change a sign: before or after it is the same.
  less = jnp.where(scaled_BV > 0, scaled_BV / penalty, scaled_BV * penalty)
  return jnp.where(seen_BV, less, scaled_BV)


def _restrict(weights_BV: jax.Array, sampling: Sampling) -> jax.Array:
  """Zeroes what is never drawn; the largest weight is 1."""
  if 0 < sampling.top_k < weights_BV.shape[-1]:
    count = lambda kept_BV: jnp.sum(kept_BV, -1) >= sampling.top_k
    weights_BV = _keep_top(weights_BV, count)
  if sampling.top_p < 1.0:
    total_B = weights_BV.sum(-1)
    mass = lambda kept_BV: (
      jnp.sum(jnp.where(kept_BV, weights_BV, 0.0), -1) >= sampling.top_p * total_B
    )
    weights_BV = _keep_top(weights_BV, mass)
  if sampling.min_p > 0.0:
    weights_BV = jnp.where(weights_BV >= sampling.min_p, weights_BV, 0.0)
  return weights_BV


def _keep_top(weights_BV, enough) -> jax.Array:
  """Zeroes all below the greatest threshold at which ``enough`` is kept."""
  bits_BV = jax.lax.bitcast_convert_type(weights_BV, jnp.int32)

  def halve(_, bounds):
    low_B, high_B = bounds  # enough at low, not enough at high
    middle_B = low_B + (high_B - low_B) // 2
    ok_B = enough(bits_BV >= middle_B[:, None])
    return jnp.where(ok_B, middle_B, low_B), jnp.where(ok_B, high_B, middle_B)

  rows = weights_BV.shape[0]
  low_B = jnp.zeros((rows,), jnp.int32)
  high_B = jnp.full((rows,), BITS_OF_ONE + 2**12, jnp.int32)
  low_B, _ = jax.lax.fori_loop(0, 31, halve, (low_B, high_B))
  return jnp.where(bits_BV >= low_B[:, None], weights_BV, 0.0)
