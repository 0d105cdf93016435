"""Flax NNX modules: they declare parameters, their logical axes and the math.

Every parameter carries ``logical_axes``, which ``parallel.rules`` maps to mesh
axes. Column-parallel kernels are stored ``[out, in]`` and row-parallel kernels
``[in, out]``, so that the tp-sharded dim always leads: moving weights between
the training and the generation mesh then needs no transposes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_hybrid.models.spec import ModelSpec
from jaxrl_hybrid.ops import matmul


def _same(x: jax.Array) -> jax.Array:
  return x


def two_way(
  forward: Callable[[jax.Array], jax.Array], back: Callable[[jax.Array], jax.Array]
) -> Callable[[jax.Array], jax.Array]:
  """``forward``, a change of place alone, whose gradient goes through ``back``."""

  @jax.custom_vjp
  def move(x):
    return forward(x)

  move.defvjp(lambda x: (forward(x), None), lambda _, ct: (back(ct),))
  return move


class Attend(Protocol):
  """The attention itself.

  ``(q_BTHA, k_BTKA, v_BTKE) -> (out_BTHE, what the caller wants to keep)``. What
  goes into a cache is ``keep``, by default keys and values. Without values the
  first ``v_dim`` numbers of a key are its value.
  """

  def __call__(
    self,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    *,
    keep: tuple[jax.Array, ...] | None = None,
    v_dim: int | None = None,
  ) -> tuple[jax.Array, Any]: ...


@dataclasses.dataclass(frozen=True)
class Context:
  """What a forward pass brings to every layer.

  Attributes:
    cos, sin: fp32 rotary tables.
    attend: the attention.
    dtype: of the operands of products.
    inner: of what column-parallel products give.
    decoding: one token per row, which attends to what a cache holds.
    gather: makes an input of column-parallel products whole along T; its
      gradient is spread again.
    scatter: spreads the output of a row-parallel product; its gradient is made
      whole again (sequence parallelism, arXiv:2205.05198).
    mixture: runs the experts of each token (``ops.experts``).
  """

  cos: jax.Array
  sin: jax.Array
  attend: Attend
  dtype: jnp.dtype
  inner: jnp.dtype = jnp.float32
  decoding: bool = False
  gather: Callable[[jax.Array], jax.Array] = _same
  scatter: Callable[[jax.Array], jax.Array] = _same
  mixture: Callable[..., jax.Array] | None = None


class Projection(nnx.Module):
  """A linear map whose tp-sharded dim leads.

  ``column``: kernel ``[out, in]``, the output dim carries ``axis``.
  ``row``: kernel ``[in, out]``, the input dim carries ``axis``; what comes in may
  be beyond float16's range unless it is ``bounded``.
  """

  def __init__(
    self,
    size: int,
    hidden: int,
    axis: str | None,
    *,
    kind: str,
    bias: bool,
    std: float,
    bounded: bool = False,
    rngs: nnx.Rngs,
  ):
    self.kind, self.bounded = kind, bounded
    self.kernel = nnx.Param(
      std * jax.random.normal(rngs.params(), (size, hidden), jnp.float32),
      logical_axes=(axis, "embed"),
    )
    if bias:
      width, name = (size, axis) if kind == "column" else (hidden, "embed")
      self.bias = nnx.Param(jnp.zeros((width,), jnp.float32), logical_axes=(name,))
    else:
      self.bias = None

  def __call__(
    self, x: jax.Array, dtype: jnp.dtype, inner: jnp.dtype = jnp.float32
  ) -> jax.Array:
    """Operands in ``dtype``; what a column-parallel product gives in ``inner``."""
    if self.kind == "column":
      out = matmul.product(x, self.kernel.get_value(), "bti,oi->bto", dtype, inner)
    else:
      product = matmul.product if self.bounded else matmul.row_scaled_product
      out = product(x, self.kernel.get_value(), "bti,io->bto", dtype)
    return out if self.bias is None else out + self.bias[...]


class RMSNorm(nnx.Module):
  """``x / rms(x) * (scale + offset)`` with fp32 statistics (arXiv:1910.07467).

  ``width`` is what the mean is over, also where x is padded with zeros.
  """

  def __init__(
    self, width: int, eps: float, axis: str = "embed", *, offset: float = 0.0
  ):
    self.width, self.eps, self.offset = width, eps, offset
    self.scale = nnx.Param(
      jnp.full((width,), 1.0 - offset, jnp.float32), logical_axes=(axis,)
    )

  def __call__(self, x: jax.Array) -> jax.Array:
    scale = self.scale[...]
    return rms_norm(x, scale, self.eps, offset=self.offset, width=self.width)


def rms_norm(
  x: jax.Array,
  scale: jax.Array,
  eps: float,
  *,
  offset: float = 0.0,
  width: int | None = None,
) -> jax.Array:
  """``x / rms(x) * (scale + offset)`` over the last axis; fp32."""
  x = x.astype(jnp.float32)
  mean_square = jnp.sum(x * x, -1, keepdims=True) / (width or x.shape[-1])
  return x * jax.lax.rsqrt(mean_square + eps) * (scale + offset)


class Table(nnx.Module):
  """``[rows, D]`` kernel: token embedding, LM head or value head."""

  def __init__(
    self, rows: int, hidden: int, axis: str | None, *, std: float, rngs: nnx.Rngs
  ):
    self.kernel = nnx.Param(
      std * jax.random.normal(rngs.params(), (rows, hidden), jnp.float32),
      logical_axes=(axis, "embed"),
    )


def stds(spec: ModelSpec) -> tuple[float, float]:
  """Init scale of inner projections and of those that feed the residual."""
  std = spec.initializer_range
  return std, std / (2 * spec.num_layers) ** 0.5


def norm(spec: ModelSpec, width: int, axis: str = "embed") -> RMSNorm:
  """A norm as the model's are."""
  return RMSNorm(width, spec.rms_norm_eps, axis, offset=spec.norm_offset)
