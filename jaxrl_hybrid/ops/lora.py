"""Low-rank adapters (LoRA, arXiv:2106.09685): ``W + scale b a^T``, W frozen.

Without dropout the forward pass multiplies with the merged weight, rounded as
the rollout engine holds it, so that adapters put no gap between the log-probs of
trainer and engine; merging costs about ``rank / tokens`` of the product. The
gradients of the adapters take the short way, through the rank. With dropout
(gradient passes only) x reaches the adapters through a mask and the two products
are apart.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_hybrid.ops import matmul


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted(matmul.Composite):
  """A frozen kernel and its adapter, of one layer or stacked ``[L, ...]``.

  Attributes:
    value: ``[out, in]``, or ``[in, out]`` if ``row``.
    a: fp32 ``[in, r]``.
    b: fp32 ``[out, r]``.
    seed: uint32, of the dropout; None: no dropout.
    scale: factor on the adapter's product.
    rate: of inputs that the adapter does not see.
    row: whether the kernel is row-parallel.
  """

  value: jax.Array
  a: jax.Array
  b: jax.Array
  seed: jax.Array | None
  scale: float = dataclasses.field(metadata=dict(static=True))
  rate: float = dataclasses.field(metadata=dict(static=True))
  row: bool = dataclasses.field(metadata=dict(static=True))

  def merged(self) -> jax.Array:
    """The weight with its adapter, in the kernel's shape and dtype."""
    return merge(self.value, self.a, self.b, scale=self.scale, row=self.row)

  def product(self, x: jax.Array, equation: str, dtype: jnp.dtype) -> jax.Array:
    """``einsum(equation, x, W + scale b a^T)``; fp32 out."""
    if self.seed is None:
      static = (self.scale, self.row, equation, dtype)
      return _product(x, self.value, self.a, self.b, *static)
    key = jax.random.key(self.seed)
    kept = jax.random.bernoulli(key, 1.0 - self.rate, x.shape)
    seen = jnp.where(kept, x / (1.0 - self.rate), 0.0)
    out = matmul.product(x, self.value, equation, dtype)
    return out + self.scale * _through_rank(seen, self.a, self.b, equation, dtype)


def merge(
  value: jax.Array, a: jax.Array, b: jax.Array, *, scale: float, row: bool
) -> jax.Array:
  """``value + scale b a^T`` (transposed if ``row``), rounded once to value's dtype."""
  equation = "...ir,...or->...io" if row else "...ir,...or->...oi"
  # Engine and trainer must round alike: no shortened fp32 product.
  delta = jnp.einsum(equation, a, b, precision=jax.lax.Precision.HIGHEST)
  return (value.astype(jnp.float32) + scale * delta).astype(value.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def _product(x, value, a, b, scale, row, equation, dtype):
  return _forward(x, value, a, b, scale, row, equation, dtype)[0]


def _forward(x, value, a, b, scale, row, equation, dtype):
  merged = merge(value, a, b, scale=scale, row=row)
  return matmul.product(x, merged, equation, dtype), (x.astype(dtype), value, a, b)


def _backward(
  scale: float,
  row: bool,
  equation: str,
  dtype: jnp.dtype,
  residuals: Any,
  cotangent: jax.Array,
):
  x, value, a, b = residuals
  x = x.astype(jnp.float32)
  merged = merge(value, a, b, scale=scale, row=row)
  of_x = jax.vjp(lambda x: matmul.product(x, merged, equation, dtype), x)[1]
  of_adapter = jax.vjp(lambda a, b: _through_rank(x, a, b, equation, dtype), a, b)[1]
  return *of_x(cotangent), None, *of_adapter(scale * cotangent)


_product.defvjp(_forward, _backward)


def _through_rank(x, a, b, equation, dtype):
  """``x a b^T`` by way of ``[..., r]``; fp32."""
  of_x, of_kernel, of_out = matmul.terms(equation)
  (i,), (o,) = set(of_kernel) & set(of_x), set(of_kernel) & set(of_out)
  inner = of_x.replace(i, "z")
  low = matmul.product(x, a, f"{of_x},{i}z->{inner}", dtype)
  return matmul.row_scaled_product(low, b, f"{inner},{o}z->{of_out}", dtype)
