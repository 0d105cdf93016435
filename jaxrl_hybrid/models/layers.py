"""Flax NNX modules: they declare parameters, their logical axes and the math.

Every parameter carries ``logical_axes``, which ``parallel.rules`` maps to mesh
axes. Column-parallel kernels are stored ``[out, in]`` and row-parallel kernels
``[in, out]``, so that the tp-sharded dim always leads: moving weights between
the training and the generation mesh then needs no transposes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_hybrid.models import rope
from jaxrl_hybrid.models.spec import ModelSpec
from jaxrl_hybrid.ops import matmul

# (q_BTHA, k_BTKA, v_BTKA) -> (out_BTHA, what the caller wants to keep)
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


def _same(x: jax.Array) -> jax.Array:
  return x


@dataclasses.dataclass(frozen=True)
class Context:
  """What a forward pass brings to every layer.

  Attributes:
    cos, sin: fp32 rotary tables.
    attend: the attention itself.
    dtype: of the operands of products.
    gather: makes an input of column-parallel products whole along T; its
      gradient is spread again.
    scatter: spreads the output of a row-parallel product; its gradient is made
      whole again (sequence parallelism, arXiv:2205.05198).
  """

  cos: jax.Array
  sin: jax.Array
  attend: Attend
  dtype: jnp.dtype
  gather: Callable[[jax.Array], jax.Array] = _same
  scatter: Callable[[jax.Array], jax.Array] = _same


class Projection(nnx.Module):
  """A linear map whose tp-sharded dim leads.

  ``column``: kernel ``[out, in]``, the output dim carries ``axis``.
  ``row``: kernel ``[in, out]``, the input dim carries ``axis``.
  """

  def __init__(
    self,
    size: int,
    hidden: int,
    axis: str,
    *,
    kind: str,
    bias: bool,
    std: float,
    rngs: nnx.Rngs,
  ):
    self.kind = kind
    self.kernel = nnx.Param(
      std * jax.random.normal(rngs.params(), (size, hidden), jnp.float32),
      logical_axes=(axis, "embed"),
    )
    if bias:
      width, name = (size, axis) if kind == "column" else (hidden, "embed")
      self.bias = nnx.Param(jnp.zeros((width,), jnp.float32), logical_axes=(name,))
    else:
      self.bias = None

  def __call__(self, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    if self.kind == "column":
      out = matmul.product(x, self.kernel.get_value(), "bti,oi->bto", dtype)
    else:
      out = matmul.row_scaled_product(x, self.kernel.get_value(), "bti,io->bto", dtype)
    return out if self.bias is None else out + self.bias[...]


class RMSNorm(nnx.Module):
  """``x / rms(x) * scale`` with fp32 statistics (arXiv:1910.07467)."""

  def __init__(self, width: int, eps: float, axis: str = "embed"):
    self.eps = eps
    self.scale = nnx.Param(jnp.ones((width,), jnp.float32), logical_axes=(axis,))

  def __call__(self, x: jax.Array) -> jax.Array:
    return rms_norm(x, self.scale[...], self.eps)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
  """``x / rms(x) * scale`` over the last axis; fp32."""
  x = x.astype(jnp.float32)
  return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * scale


class Attention(nnx.Module):
  """Grouped-query attention; the caller supplies the attention itself."""

  def __init__(self, spec: ModelSpec, *, rngs: nnx.Rngs):
    self.spec = spec
    width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    std, out_std = _stds(spec)

    def column(size: int, axis: str) -> Projection:
      return Projection(
        size,
        spec.hidden_size,
        axis,
        kind="column",
        bias=spec.qkv_bias,
        std=std,
        rngs=rngs,
      )

    self.q = column(width, "heads")
    self.k = column(kv_width, "kv_heads")
    self.v = column(kv_width, "kv_heads")
    self.o = Projection(
      width,
      spec.hidden_size,
      "heads",
      kind="row",
      bias=spec.out_bias,
      std=out_std,
      rngs=rngs,
    )
    if spec.qk_norm:
      self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps, "head_dim")
      self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps, "head_dim")

  def __call__(self, x_BTD: jax.Array, ctx: Context) -> tuple[jax.Array, Any]:
    rows, length, _ = x_BTD.shape
    heads = lambda flat: flat.reshape(rows, length, -1, self.spec.head_dim)
    q_BTHA, k_BTKA, v_BTKA = (
      heads(projection(x_BTD, ctx.dtype)) for projection in (self.q, self.k, self.v)
    )
    if self.spec.qk_norm:
      q_BTHA, k_BTKA = self.q_norm(q_BTHA), self.k_norm(k_BTKA)
    q_BTHA, k_BTKA = (rope.rotate(x, ctx.cos, ctx.sin) for x in (q_BTHA, k_BTKA))
    out_BTHA, kept = ctx.attend(q_BTHA, k_BTKA, v_BTKA)
    return self.o(out_BTHA.reshape(rows, length, -1), ctx.dtype), kept


class MLP(nnx.Module):
  """SwiGLU (arXiv:2002.05202): ``down(silu(gate(x)) * up(x))``."""

  def __init__(self, spec: ModelSpec, *, rngs: nnx.Rngs):
    std, out_std = _stds(spec)

    def projection(kind: str, std: float) -> Projection:
      return Projection(
        spec.intermediate_size,
        spec.hidden_size,
        "mlp",
        kind=kind,
        bias=spec.mlp_bias,
        std=std,
        rngs=rngs,
      )

    self.gate = projection("column", std)
    self.up = projection("column", std)
    self.down = projection("row", out_std)

  def __call__(self, x_BTD: jax.Array, dtype: jnp.dtype) -> jax.Array:
    inner = jax.nn.silu(self.gate(x_BTD, dtype)) * self.up(x_BTD, dtype)
    return self.down(inner, dtype)


class DecoderLayer(nnx.Module):
  """Pre-norm attention and MLP with residuals.

  Activations are fp32; products round their operands to ``dtype``. An fp32
  residual stream is not rounded at every layer, which would be by far the
  largest difference between the log-probs of trainer and engine.
  """

  def __init__(self, spec: ModelSpec, *, rngs: nnx.Rngs):
    self.attn_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
    self.attn = Attention(spec, rngs=rngs)
    self.mlp_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
    self.mlp = MLP(spec, rngs=rngs)

  def __call__(self, x_BTD: jax.Array, ctx: Context) -> tuple[jax.Array, Any]:
    attended, kept = self.attn(ctx.gather(self.attn_norm(x_BTD)), ctx)
    x_BTD = x_BTD + ctx.scatter(attended)
    fed = self.mlp(ctx.gather(self.mlp_norm(x_BTD)), ctx.dtype)
    return x_BTD + ctx.scatter(fed), kept


class Table(nnx.Module):
  """``[rows, D]`` kernel: token embedding, LM head or value head."""

  def __init__(
    self, rows: int, hidden: int, axis: str | None, *, std: float, rngs: nnx.Rngs
  ):
    self.kernel = nnx.Param(
      std * jax.random.normal(rngs.params(), (rows, hidden), jnp.float32),
      logical_axes=(axis, "embed"),
    )


def _stds(spec: ModelSpec) -> tuple[float, float]:
  """Init scale of inner projections and of those that feed the residual."""
  std = spec.initializer_range
  return std, std / (2 * spec.num_layers) ** 0.5
