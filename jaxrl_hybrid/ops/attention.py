"""Attention behind one name: ``xla`` everywhere, ``cudnn`` where it works.

Rows are left-aligned, so a causal mask alone keeps real tokens from seeing
padding; decoding masks the cache by length.
"""

from __future__ import annotations

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp

from jaxrl_hybrid.errors import ConfigError
from jaxrl_hybrid.ops.matmul import backward_dtype

IMPLEMENTATIONS = ("auto", "xla", "cudnn")


# What cuDNN takes at most, per head.
CUDNN_HEAD_DIM = 256


@dataclasses.dataclass(frozen=True)
class Form:
  """Which attention a layer has.

  Attributes:
    scale: on query-key products; None: 1 / sqrt(A).
    softcap: c in ``c tanh(logits / c)``; None: no cap.
    window: keys that a query sees, its own included; None: all before it.
  """

  scale: float | None = None
  softcap: float | None = None
  window: int | None = None


def causal(
  q_BTHA: jax.Array,
  k_BTKA: jax.Array,
  v_BTKE: jax.Array,
  *,
  dtype: jnp.dtype,
  implementation: str,
  form: Form = Form(),
  positions_BT: jax.Array | None = None,
) -> jax.Array:
  """Causal attention of whole left-aligned rows, operands in ``dtype``.

  With ``positions_BT`` a row holds several sequences, each of which begins at a
  position 0 and sees nothing of the others. The backward pass runs in
  ``ops.matmul.backward_dtype``. fp32 in and out, ``[B, T, H, E]``.
  """
  width, v_width = q_BTHA.shape[-1], v_BTKE.shape[-1]
  if v_width < width:  # implementations want them alike
    v_BTKE = jnp.pad(v_BTKE, [(0, 0)] * 3 + [(0, width - v_width)])
  sequence_BT = None if positions_BT is None else sequence_ids(positions_BT)
  out = _causal(q_BTHA, k_BTKA, v_BTKE, sequence_BT, dtype, implementation, form)
  return out[..., :v_width]


def sequence_ids(positions_BT: jax.Array) -> jax.Array:
  """int32 ``[B, T]``: 1, 2, ... for the sequences of a row."""
  return jnp.cumsum(positions_BT == 0, -1, dtype=jnp.int32)


def cached(
  q_B1HA: jax.Array,
  k_BSKA: jax.Array,
  v_BSKA: jax.Array,
  lengths_B: jax.Array,
  *,
  implementation: str,
  form: Form = Form(),
) -> jax.Array:
  """One fp32 query per row over the first ``lengths_B`` (> 0) slots; fp32 out."""
  if form.window or form.softcap or q_B1HA.shape[-1] > CUDNN_HEAD_DIM:
    implementation = "xla"
  # Not ones_like: under vmap cuDNN wants both lengths batched alike.
  ones = jnp.minimum(lengths_B, 1) if implementation == "cudnn" else None
  q, k, v = _operands((q_B1HA, k_BSKA, v_BSKA), k_BSKA.dtype, implementation)
  if form.window or form.softcap:
    slots_1S = jnp.arange(k.shape[1])[None]
    seen_BS = slots_1S < lengths_B[:, None]
    if form.window:
      seen_BS &= slots_1S >= lengths_B[:, None] - form.window
    return _explicit(q, k, v, seen_BS[:, None, None], form)
  return jax.nn.dot_product_attention(
    q,
    k,
    v,
    scale=form.scale,
    key_value_seq_lengths=lengths_B,
    query_seq_lengths=ones,
    implementation=implementation,
  ).astype(jnp.float32)


def extended(
  q_BCHA: jax.Array,
  k_BSKA: jax.Array,
  v_BSKA: jax.Array,
  start: jax.Array,
  *,
  implementation: str,
  form: Form = Form(),
) -> jax.Array:
  """C fp32 queries per row at positions from ``start`` on, each over the slots up to
  its own; fp32 out."""
  if form.softcap or q_BCHA.shape[-1] > CUDNN_HEAD_DIM:
    implementation = "xla"
  positions_C1 = start + jnp.arange(q_BCHA.shape[1])[:, None]
  slots_1S = jnp.arange(k_BSKA.shape[1])[None]
  seen_CS = slots_1S <= positions_C1
  if form.window:
    seen_CS &= slots_1S > positions_C1 - form.window
  q, k, v = _operands((q_BCHA, k_BSKA, v_BSKA), k_BSKA.dtype, implementation)
  return _explicit(q, k, v, seen_CS[None, None], form, implementation)


def _explicit(
  q_BTHA, k_BSKA, v_BSKA, seen_B1TS, form: Form, implementation: str = "xla"
) -> jax.Array:
  """Attention with its logits written out: where they are capped."""
  if form.softcap is None:
    return jax.nn.dot_product_attention(
      q_BTHA,
      k_BSKA,
      v_BSKA,
      mask=seen_B1TS,
      scale=form.scale,
      implementation=implementation,
    ).astype(jnp.float32)
  rows, length, heads, width = q_BTHA.shape
  q = q_BTHA.reshape(rows, length, k_BSKA.shape[2], -1, width)
  scale = width**-0.5 if form.scale is None else form.scale
  logits = jnp.einsum(
    "btkga,bska->bkgts", q, k_BSKA, preferred_element_type=jnp.float32
  )
  logits = form.softcap * jnp.tanh(logits * scale / form.softcap)
  logits = jnp.where(seen_B1TS[:, None], logits, -jnp.inf)
  weights = jax.nn.softmax(logits, -1).astype(v_BSKA.dtype)
  out = jnp.einsum(
    "bkgts,bska->btkga", weights, v_BSKA, preferred_element_type=jnp.float32
  )
  return out.reshape(rows, length, heads, -1)


def _operands(arrays, dtype, implementation):
  """Rounded to ``dtype``; XLA's CPU products do not take float16 itself."""
  arrays = [x.astype(dtype) for x in arrays]
  if implementation == "xla" and dtype == jnp.float16:
    arrays = [x.astype(jnp.float32) for x in arrays]
  return arrays


def _attend(q, k, v, sequence_BT, dtype, implementation, form):
  if form.softcap:
    implementation = "xla"
  q, k, v = _operands((q, k, v), dtype, implementation)
  if form.softcap or sequence_BT is not None:
    behind = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])
    seen = ((behind >= 0) & (behind < (form.window or q.shape[1])))[None]
    if sequence_BT is not None:
      seen &= sequence_BT[:, :, None] == sequence_BT[:, None]
    return _explicit(q, k, v, seen[:, None], form, implementation)
  return jax.nn.dot_product_attention(
    q,
    k,
    v,
    scale=form.scale,
    is_causal=True,
    local_window_size=(form.window - 1, 0) if form.window else None,
    implementation=implementation,
  ).astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _causal(q, k, v, sequence_BT, dtype, implementation, form):
  return _attend(q, k, v, sequence_BT, dtype, implementation, form)


def _causal_forward(q, k, v, sequence_BT, dtype, implementation, form):
  low = backward_dtype(dtype)
  attend = functools.partial(
    _attend,
    sequence_BT=sequence_BT,
    dtype=dtype,
    implementation=implementation,
    form=form,
  )
  if low == dtype:
    return jax.vjp(attend, q, k, v)
  # Another format backward: its own forward pass is part of the backward pass.
  half = tuple(x.astype(low) for x in (q, k, v))
  return attend(q, k, v), (half, sequence_BT)


def _causal_backward(dtype, implementation, form, residuals, cotangent):
  if callable(residuals):
    return *residuals(cotangent), None
  half, sequence_BT = residuals
  low = backward_dtype(dtype)
  _, vjp = jax.vjp(
    lambda *x: _attend(*x, sequence_BT, low, implementation, form),
    *(x.astype(jnp.float32) for x in half),
  )
  return *vjp(cotangent), None


_causal.defvjp(_causal_forward, _causal_backward)


@functools.lru_cache
def choose(
  requested: str,
  *,
  dtype: jnp.dtype,
  head_dim: int,
  softcap: bool = False,
  platform: str | None = None,
) -> str:
  """Resolves ``auto`` by a probe on the device, and logs what and why.

  Args:
    requested: one of ``IMPLEMENTATIONS``.
    dtype: of the operands.
    head_dim: A.
    softcap: whether logits are capped.
    platform: of the devices; there is no probe if it is not this process's.

  Raises:
    ConfigError: cuDNN is asked for and does not work.
  """
  if requested == "xla":
    return requested
  reason = "cuDNN does not cap logits" if softcap else ""
  reason = reason or _why_not_cudnn(dtype, head_dim, platform or jax.default_backend())
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
