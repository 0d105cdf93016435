"""Attention behind one name: ``xla`` everywhere, ``cudnn`` where it works.

Rows are left-aligned, so a causal mask alone keeps real tokens from seeing
padding; decoding masks the cache by length.
"""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp

IMPLEMENTATIONS = ("auto", "xla", "cudnn")


def causal(q_BTHA: jax.Array, k_BTKA: jax.Array, v_BTKA: jax.Array, *,
           implementation: str) -> jax.Array:
  """Causal attention of whole left-aligned rows; returns ``[B, T, H, A]``."""
  return jax.nn.dot_product_attention(
      q_BTHA, k_BTKA, v_BTKA, is_causal=True, implementation=implementation)


def cached(q_B1HA: jax.Array, k_BSKA: jax.Array, v_BSKA: jax.Array,
           lengths_B: jax.Array, *, implementation: str) -> jax.Array:
  """One query per row over the first ``lengths_B`` cache slots."""
  ones = jnp.ones_like(lengths_B) if implementation == "cudnn" else None
  return jax.nn.dot_product_attention(
      q_B1HA, k_BSKA, v_BSKA, key_value_seq_lengths=lengths_B,
      query_seq_lengths=ones, implementation=implementation)


def choose(requested: str, *, dtype: jnp.dtype, head_dim: int) -> str:
  """Resolves ``auto`` by a probe on the device, and logs what and why."""
  if requested != "auto":
    return requested
  reason = _why_not_cudnn(dtype, head_dim)
  choice = "xla" if reason else "cudnn"
  logging.info("attention: %s (%s)", choice, reason or "cuDNN probe passed")
  return choice


def _why_not_cudnn(dtype: jnp.dtype, head_dim: int) -> str:
  if jax.default_backend() != "gpu":
    return f"the backend is {jax.default_backend()}"
  if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
    return f"cuDNN has no {jnp.dtype(dtype).name}"
  if head_dim % 8:
    return f"head_dim {head_dim} is not a multiple of 8"
  try:
    _probe(dtype, head_dim)
  except Exception as error:  # whatever cuDNN says, the other path is right
    return f"the cuDNN probe failed: {str(error).splitlines()[0]}"
  return ""


def _probe(dtype: jnp.dtype, head_dim: int) -> None:
  x = jnp.ones((2, 64, 2, head_dim), dtype)
  grad = jax.grad(
      lambda q: causal(q, x, x, implementation="cudnn").astype(jnp.float32).sum())
  lengths = jnp.array([3, 64], jnp.int32)
  one = cached(x[:, :1], x, x, lengths, implementation="cudnn")
  if not (jnp.isfinite(jax.jit(grad)(x)).all() and jnp.allclose(one, 1.0)):
    raise ValueError("wrong numbers from the probe")
