"""Matrix products with 16-bit operands: forward in one format, backward in bf16.

The forward pass of trainer and engine should round as little as 16 bits allow:
float16 has three more mantissa bits than bfloat16, which makes the log-prob gap
between the two about eight times smaller (compare Qi et al. 2025,
arXiv:2510.26788). Gradients need bfloat16's range. So activations are fp32
between products, each product rounds its operands to ``dtype``, and its
backward pass rounds them to bfloat16; float32 is left alone in both.
Weights are arrays, a ``Kernel`` whose gradient is fp32 whatever it holds, or
``Composite``.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp

# Operands above this would come near float16's largest number, 65,504.
SAFE = 2.0**14


def backward_dtype(dtype: jnp.dtype) -> jnp.dtype:
  """The format of the backward pass: bfloat16 for both 16-bit formats."""
  return jnp.dtype(jnp.float32 if dtype == jnp.float32 else jnp.bfloat16)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Kernel:
  """A weight of which a gradient is wanted, without rounding the gradient.

  The gradient of a 16-bit array is 16-bit. So it is taken with respect to
  ``slot``, fp32 zeros of the same shape that no forward pass reads. With a
  ``seed`` (stacked layers only) the gradient is added to it.
  """

  value: jax.Array
  slot: jax.Array
  seed: jax.Array | None = None


class Composite(abc.ABC):
  """A weight made of several arrays, which knows its own product."""

  @abc.abstractmethod
  def product(self, x: jax.Array, equation: str, dtype: jnp.dtype) -> jax.Array:
    """As the function ``product``."""


Weight = jax.Array | Kernel | Composite


@jax.custom_vjp
def take_slots(slots: Any, layer: jax.Array) -> tuple[Any, Any]:
  """(one layer's slots, ``slots``) of a tree of stacks.

  A scan over layers hands ``slots`` from layer to layer. Backwards each layer
  adds its gradient in place to what arrives, so that gradients accumulate over
  layers, pipeline ticks and micro-batches in one buffer: a scan over slices of
  ``slots`` would make a second one.
  """
  pick = lambda stack: jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False)
  return jax.tree.map(pick, slots), slots


def _take_forward(slots, layer):
  return take_slots(slots, layer), layer


def _take_backward(layer, cotangents):
  of_layer, arriving = cotangents
  return jax.tree.map(lambda a, d: a.at[layer].add(d), arriving, of_layer), None


take_slots.defvjp(_take_forward, _take_backward)


@jax.custom_vjp
def start_from(x: jax.Array, slots: Any, seeds: Any) -> jax.Array:
  """``x``; backwards the gradient of ``slots`` starts as ``seeds``."""
  del slots, seeds
  return x


start_from.defvjp(lambda x, _, seeds: (x, seeds), lambda seeds, ct: (ct, seeds, None))


def split_slots(tree: Any) -> tuple[Any, Any, Any]:
  """Trees of values, slots and seeds; slots are None without a ``Kernel``."""
  is_kernel = lambda x: isinstance(x, Kernel)
  if not any(map(is_kernel, jax.tree.leaves(tree, is_leaf=is_kernel))):
    return tree, None, None
  pick = lambda name: jax.tree.map(lambda k: getattr(k, name), tree, is_leaf=is_kernel)
  return pick("value"), pick("slot"), pick("seed")


def join_slots(values: Any, slots: Any) -> Any:
  """Values, each with its slot if there are any."""
  return values if slots is None else jax.tree.map(Kernel, values, slots)


def product(
  x: jax.Array,
  kernel: Weight,
  equation: str,
  dtype: jnp.dtype,
  out: jnp.dtype = jnp.float32,
) -> jax.Array:
  """``einsum(equation, x, kernel)`` with operands in ``dtype``; sums are fp32.

  Args:
    x: activations, fp32.
    kernel: weights; the gradient of an array has its dtype.
    equation: einsum of two operands, every index in exactly two of the terms.
    dtype: float32, bfloat16 or float16.
    out: what the sums are rounded to.
  """
  if isinstance(kernel, Composite):
    return kernel.product(x, equation, dtype).astype(out)
  if isinstance(kernel, Kernel):
    return _product(x, kernel.value, kernel.slot, equation, dtype, out)
  return _product(x, kernel, None, equation, dtype, out)


def terms(equation: str) -> tuple[str, str, str]:
  """The indices of (activations, weight, result) of an equation."""
  of_x, of_kernel, of_out = re.split("[,>]", equation.replace("->", ">"))
  return of_x, of_kernel, of_out


def lookup(table: Weight, indices: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """Rows ``table[indices]`` rounded to ``dtype``, in fp32 as is their gradient."""
  if isinstance(table, Kernel):
    return _lookup(table.value, table.slot, indices, dtype)
  return table[indices].astype(dtype).astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _product(x, kernel, slot, equation, dtype, out):
  return _forward(x, kernel, slot, equation, dtype, out)[0]


def _forward(x, kernel, slot, equation, dtype, out):
  x = x.astype(dtype)
  found = jnp.einsum(equation, x, kernel.astype(dtype), preferred_element_type=out)
  return found, (x, kernel, None if slot is None else ())


def _backward(equation, dtype, out, residuals, cotangent):
  del out
  x, kernel, slot = residuals
  low = backward_dtype(dtype)
  of_x, of_kernel, of_out = terms(equation)
  cotangent = cotangent.astype(low)
  dx = jnp.einsum(f"{of_out},{of_kernel}->{of_x}", cotangent, kernel.astype(low))
  dkernel = jnp.einsum(
    f"{of_out},{of_x}->{of_kernel}",
    cotangent,
    x.astype(low),
    preferred_element_type=jnp.float32,
  )
  dx = dx.astype(jnp.float32)
  if slot is None:
    return dx, dkernel.astype(kernel.dtype), None
  return dx, None, dkernel


_product.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _lookup(table, slot, indices, dtype):
  del slot
  return table[indices].astype(dtype).astype(jnp.float32)


def _lookup_forward(table, slot, indices, dtype):
  return _lookup(table, slot, indices, dtype), (table, indices)


def _lookup_backward(dtype, residuals, cotangent):
  del dtype
  table, indices = residuals
  zeros = jnp.zeros(table.shape, jnp.float32)
  return None, zeros.at[indices].add(cotangent), None


_lookup.defvjp(_lookup_forward, _lookup_backward)


def row_scaled_product(
  x: jax.Array, kernel: Weight, equation: str, dtype: jnp.dtype
) -> jax.Array:
  """``product`` of activations without a bound (the MLP's inner ones).

  In float16, rows with entries beyond ``SAFE`` are scaled down by a power of two
  and the result is scaled back, so that nothing overflows.
  """
  if dtype != jnp.float16:
    return product(x, kernel, equation, dtype)
  scale = row_scales(x, dtype)
  return product(x / scale, kernel, equation, dtype) * scale


def row_scales(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """Powers of two ``[..., 1]`` by which rows of x may be divided not to overflow."""
  if dtype != jnp.float16:
    return jnp.ones((*x.shape[:-1], 1), jnp.float32)
  largest = jax.lax.stop_gradient(jnp.max(jnp.abs(x), -1, keepdims=True))
  # The power of two at or above: where mantissa bits are set they carry into the
  # exponent. XLA repeats this where it is used; logarithms it would not.
  bits = jax.lax.bitcast_convert_type(jnp.maximum(largest / SAFE, 1.0), jnp.int32)
  return jax.lax.bitcast_convert_type((bits + 0x7FFFFF) & ~0x7FFFFF, jnp.float32)
