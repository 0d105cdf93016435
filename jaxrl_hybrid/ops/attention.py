"""Attention behind one name: ``xla`` everywhere, ``cudnn`` where it works.

Rows are left-aligned, so a causal mask alone keeps real tokens from seeing
padding; decoding masks the cache by length.
"""

from __future__ import annotations

import functools
import logging

import jax
import jax.numpy as jnp

from jaxrl_hybrid.errors import ConfigError
from jaxrl_hybrid.ops.matmul import backward_dtype

IMPLEMENTATIONS = ("auto", "xla", "cudnn")


def causal(
  q_BTHA: jax.Array,
  k_BTKA: jax.Array,
  v_BTKA: jax.Array,
  *,
  dtype: jnp.dtype,
  implementation: str,
) -> jax.Array:
  """Causal attention of whole left-aligned rows, operands in ``dtype``.

  The backward pass runs in ``ops.matmul.backward_dtype``. fp32 in and out,
  ``[B, T, H, A]``.
  """
  return _causal(q_BTHA, k_BTKA, v_BTKA, dtype, implementation)


def cached(
  q_B1HA: jax.Array,
  k_BSKA: jax.Array,
  v_BSKA: jax.Array,
  lengths_B: jax.Array,
  *,
  implementation: str,
) -> jax.Array:
  """One fp32 query per row over the first ``lengths_B`` (> 0) slots; fp32 out."""
  # Not ones_like: under vmap cuDNN wants both lengths batched alike.
  ones = jnp.minimum(lengths_B, 1) if implementation == "cudnn" else None
  q, k, v = _operands((q_B1HA, k_BSKA, v_BSKA), k_BSKA.dtype, implementation)
  return jax.nn.dot_product_attention(
    q,
    k,
    v,
    key_value_seq_lengths=lengths_B,
    query_seq_lengths=ones,
    implementation=implementation,
  ).astype(jnp.float32)


def _operands(arrays, dtype, implementation):
  """Rounded to ``dtype``; XLA's CPU products do not take float16 itself."""
  arrays = [x.astype(dtype) for x in arrays]
  if implementation == "xla" and dtype == jnp.float16:
    arrays = [x.astype(jnp.float32) for x in arrays]
  return arrays


def _attend(q, k, v, dtype, implementation):
  q, k, v = _operands((q, k, v), dtype, implementation)
  return jax.nn.dot_product_attention(
    q, k, v, is_causal=True, implementation=implementation
  ).astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _causal(q, k, v, dtype, implementation):
  return _attend(q, k, v, dtype, implementation)


def _causal_forward(q, k, v, dtype, implementation):
  low = backward_dtype(dtype)
  if low == dtype:
    return jax.vjp(lambda *x: _attend(*x, dtype, implementation), q, k, v)
  # Another format backward: its own forward pass is part of the backward pass.
  half = tuple(x.astype(low) for x in (q, k, v))
  return _attend(q, k, v, dtype, implementation), half


def _causal_backward(dtype, implementation, residuals, cotangent):
  if callable(residuals):
    return residuals(cotangent)
  low = backward_dtype(dtype)
  _, vjp = jax.vjp(
    lambda *x: _attend(*x, low, implementation),
    *(x.astype(jnp.float32) for x in residuals),
  )
  return vjp(cotangent)


_causal.defvjp(_causal_forward, _causal_backward)


@functools.lru_cache
def choose(
  requested: str, *, dtype: jnp.dtype, head_dim: int, platform: str | None = None
) -> str:
  """Resolves ``auto`` by a probe on the device, and logs what and why.

  Args:
    requested: one of ``IMPLEMENTATIONS``.
    dtype: of the operands.
    head_dim: A.
    platform: of the devices; there is no probe if it is not this process's.

  Raises:
    ConfigError: cuDNN is asked for and does not work.
  """
  if requested == "xla":
    return requested
  reason = _why_not_cudnn(dtype, head_dim, platform or jax.default_backend())
  if requested == "cudnn" and reason:
    raise ConfigError(f"model.attention=cudnn does not work here: {reason}; use auto")
  choice = "xla" if reason else "cudnn"
  logging.info("attention: %s (%s)", choice, reason or "cuDNN works here")
  return choice


def _why_not_cudnn(dtype: jnp.dtype, head_dim: int, platform: str) -> str:
  if platform not in ("gpu", "cuda"):
    return f"the platform is {platform}"
  if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
    return f"cuDNN has no {jnp.dtype(dtype).name}"
  if head_dim % 8:
    return f"head_dim {head_dim} is not a multiple of 8"
  if jax.default_backend() != "gpu":
    return ""  # compiled for a GPU that is not there
  try:
    _probe(dtype, head_dim)
  except Exception as error:  # whatever cuDNN says, the other path is right
    return f"the cuDNN probe failed: {str(error).splitlines()[0]}"
  return ""


def _probe(dtype: jnp.dtype, head_dim: int) -> None:
  x = jnp.ones((2, 64, 2, head_dim), jnp.float32)
  grad = jax.grad(lambda q: causal(q, x, x, dtype=dtype, implementation="cudnn").sum())
  cache, lengths = x.astype(dtype), jnp.array([3, 64], jnp.int32)
  one = cached(x[:, :1], cache, cache, lengths, implementation="cudnn")
  if not (jnp.isfinite(jax.jit(grad)(x)).all() and jnp.allclose(one, 1.0)):
    raise ValueError("wrong numbers from the probe")
