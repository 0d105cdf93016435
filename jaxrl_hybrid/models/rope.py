"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864) and scalings."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_hybrid.models.spec import RopeSpec


def inverse_frequencies(
  rope: RopeSpec, head_dim: int, length: int = 0
) -> tuple[np.ndarray, float]:
  """Returns (inv_freq float32 ``[A/2]``, factor on cos and sin).

  ``inv_freq_i = theta^(-2i/A)``, then changed by the scaling:
    linear: divided by ``factor``.
    dynamic: theta grows with ``length`` beyond the trained context (NTK-aware;
      bloc97, emozilla 2023).
    longrope: divided by ``long_factor`` if ``length`` is beyond the original
      context, else by ``short_factor`` (Ding et al. 2024, arXiv:2402.13753).
    llama3: long wavelengths divided by ``factor``, short ones kept, a linear
      blend between (Llama 3.1 model card).
    yarn: blend of both by wavelength, and a factor on the attention
      (Peng et al. 2023, arXiv:2309.00071).

  Args:
    rope: the embedding.
    head_dim: A, the rotated width.
    length: of the longest sequence.
  """
  if rope.kind == "dynamic":
    rope = dataclasses.replace(rope, theta=_dynamic_theta(rope, head_dim, length))
  inv_freq = rope.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
  if rope.kind == "longrope":
    inv_freq, attention_factor = _longrope(rope, inv_freq, length)
  else:
    scaled = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}
    inv_freq, attention_factor = scaled.get(rope.kind, _default)(
      rope, inv_freq, head_dim
    )
  return inv_freq.astype(np.float32), attention_factor


def cos_sin(
  rope: RopeSpec, head_dim: int, positions_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns fp32 cos and sin ``[B, T, A/2]`` at the given positions.

  Without ``rope.length`` the longest sequence is taken to be T.
  """
  length = rope.length or positions_BT.shape[-1]
  inv_freq, factor = inverse_frequencies(rope, head_dim, length)
  angles = positions_BT[..., None].astype(jnp.float32) * inv_freq
  return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(
  x_BTHA: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool = False
) -> jax.Array:
  """Rotates the pairs of each head, in fp32; keeps the dtype.

  Dimensions beyond twice the tables' width stay as they are. Interleaved pairs
  come out half-split, which no product of queries and keys notices.
  """
  width = 2 * cos.shape[-1]
  x, rest = x_BTHA[..., :width].astype(jnp.float32), x_BTHA[..., width:]
  if interleaved:
    first, second = x[..., 0::2], x[..., 1::2]
  else:
    first, second = jnp.split(x, 2, axis=-1)
  cos, sin = cos[:, :, None], sin[:, :, None]
  rotated = jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )
  return jnp.concatenate([rotated.astype(x_BTHA.dtype), rest], axis=-1)


def _default(rope, inv_freq, head_dim):
  del rope, head_dim
  return inv_freq, 1.0


def _linear(rope, inv_freq, head_dim):
  del head_dim
  return inv_freq / rope.option("factor"), 1.0


def _dynamic_theta(rope: RopeSpec, head_dim: int, length: int) -> float:
  trained, factor = rope.option("max_positions"), rope.option("factor")
  ratio = factor * max(length, trained) / trained - (factor - 1)
  return rope.theta * ratio ** (head_dim / (head_dim - 2))


def _longrope(rope: RopeSpec, inv_freq: np.ndarray, length: int):
  most = rope.option("max_positions")
  original = rope.option("original_max_position_embeddings", most)
  name = "long_factor" if length > original else "short_factor"
  given = rope.option("attention_factor")
  if given is None:
    factor = rope.option("factor", most / original)
    given = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
  return inv_freq / np.array(rope.option(name)), given


def _llama3(rope, inv_freq, head_dim):
  del head_dim
  factor = rope.option("factor")
  low, high = rope.option("low_freq_factor"), rope.option("high_freq_factor")
  context = rope.option("original_max_position_embeddings")
  wavelength = 2 * math.pi / inv_freq
  keep = np.clip((context / wavelength - low) / (high - low), 0.0, 1.0)
  return (1 - keep) * inv_freq / factor + keep * inv_freq, 1.0


def _yarn(rope, inv_freq, head_dim):
  context = rope.option(
    "original_max_position_embeddings", rope.option("max_positions")
  )
  factor = rope.option("factor", rope.option("max_positions") / context)

  def dim_of(rotations: float) -> float:
    return (
      head_dim
      * math.log(context / (rotations * 2 * math.pi))
      / (2 * math.log(rope.theta))
    )

  low = dim_of(rope.option("beta_fast", 32))
  high = dim_of(rope.option("beta_slow", 1))
  if rope.option("truncate", True):
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, head_dim - 1)
  ramp = (np.arange(head_dim // 2) - low) / max(high - low, 1e-3)
  interpolate = np.clip(ramp, 0.0, 1.0)
  scaled = inv_freq / factor * interpolate + inv_freq * (1 - interpolate)
  return scaled, _yarn_attention_factor(rope, factor)


def _yarn_attention_factor(rope: RopeSpec, factor: float) -> float:
  given = rope.option("attention_factor")
  if given is not None:
    return given

  def mscale(scale: float, weight: float = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

  weight, weight_all = rope.option("mscale"), rope.option("mscale_all_dim")
  if weight and weight_all:
    return mscale(factor, weight) / mscale(factor, weight_all)
  return mscale(factor)
