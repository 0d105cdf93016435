"""Products of groups of rows, each group with its own matrix.

Rows are sorted by group. A product works on tiles, each a few rows of one group,
so work grows with the rows there are and a group without rows costs nothing.
On NVIDIA GPUs a tile is a program of a Triton kernel; elsewhere tiles are the
steps of a loop. ``jax.lax.ragged_dot`` would do the same, but XLA runs it as one
dense product per group, of all rows, on CPUs and GPUs alike.

Dims: M rows, E groups, I and D the sides of a matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_hybrid.ops import grouped_triton
from jaxrl_hybrid.ops.matmul import Kernel, Weight, backward_dtype

TILE = 128  # rows at most


def grouped_product(
  x: jax.Array, kernel: Weight, *, down: bool, sizes_E: jax.Array, dtype: jnp.dtype
) -> jax.Array:
  """Rows of group e times matrix e, operands in ``dtype``; fp32.

  Args:
    x: ``[M, I]`` (``down``) or ``[M, D]``, the rows of group 0 first.
    kernel: ``[E, I, D]``.
    down: contract I instead of D.
    sizes_E: rows of each group; rows beyond their sum give zeros.
    dtype: of the operands; the backward pass has ``backward_dtype``.
  """
  if isinstance(kernel, Kernel):
    return _grouped(x, kernel.value, kernel.slot, sizes_E, down, dtype)
  return _grouped(x, kernel, None, sizes_E, down, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _grouped(x, kernel, slot, sizes_E, down, dtype):
  return _grouped_forward(x, kernel, slot, sizes_E, down, dtype)[0]


def _grouped_forward(x, kernel, slot, sizes_E, down, dtype):
  x = x.astype(dtype)
  out = times(x, kernel.astype(dtype), sizes_E, contract=0 if down else 1)
  return out, (x, kernel, None if slot is None else (), sizes_E)


def _grouped_backward(down, dtype, residuals, cotangent):
  x, kernel, slot, sizes_E = residuals
  low = backward_dtype(dtype)
  x, cotangent = x.astype(low), cotangent.astype(low)
  dx = times(cotangent, kernel.astype(low), sizes_E, contract=1 if down else 0)
  of_i, of_d = (x, cotangent) if down else (cotangent, x)
  dkernel = outer_products(of_i, of_d, sizes_E)
  if slot is None:
    return dx, dkernel.astype(kernel.dtype), None, None
  return dx, None, dkernel, None


_grouped.defvjp(_grouped_forward, _grouped_backward)


def times(
  x: jax.Array, kernel_EID: jax.Array, sizes_E: jax.Array, *, contract: int
) -> jax.Array:
  """fp32 ``[M, D]`` (``contract=0``: I) or ``[M, I]`` (``contract=1``: D).

  Both operands have one dtype; rows beyond the groups' are zeros.
  """
  loop = functools.partial(_times, contract=contract)
  kernel = functools.partial(grouped_triton.times, contract=contract)
  return jax.lax.platform_dependent(x, kernel_EID, sizes_E, cuda=kernel, default=loop)


def outer_products(of_i: jax.Array, of_d: jax.Array, sizes_E: jax.Array) -> jax.Array:
  """fp32 ``[E, I, D]``: the sum over each group's rows of their outer products.

  Args:
    of_i: ``[M, I]``.
    of_d: ``[M, D]``.
    sizes_E: rows of each group.
  """
  return jax.lax.platform_dependent(
    of_i, of_d, sizes_E, cuda=grouped_triton.outer_products, default=_outer_products
  )


def _times(x, kernel_EID, sizes_E, *, contract: int) -> jax.Array:
  rows, width = x.shape[0], kernel_EID.shape[2 - contract]

  def one(out, group, row, taken):
    matrix = jax.lax.dynamic_index_in_dim(kernel_EID, group, keepdims=False)
    product = jax.lax.dot_general(
      *taken,
      matrix,
      (((1,), (contract,)), ((), ())),
      preferred_element_type=jnp.float32,
    )
    # Rows behind the group's are zeros here; the next tile writes theirs.
    return jax.lax.dynamic_update_slice_in_dim(out, product, row, 0)

  size = _tile_rows(rows, kernel_EID.shape[0])
  out = jnp.zeros((rows + size, width), jnp.float32)
  return _for_tiles(one, out, (x,), sizes_E, size)[:rows]


def _outer_products(of_i, of_d, sizes_E) -> jax.Array:
  rows, groups = of_i.shape[0], sizes_E.shape[0]

  def one(out, group, row, taken):
    del row
    product = jax.lax.dot_general(
      *taken, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    return out.at[group].add(product)

  out = jnp.zeros((groups, of_i.shape[1], of_d.shape[1]), jnp.float32)
  return _for_tiles(one, out, (of_i, of_d), sizes_E, _tile_rows(rows, groups))


def _for_tiles(
  one: Callable[..., jax.Array],
  out: jax.Array,
  operands: tuple[jax.Array, ...],
  sizes_E: jax.Array,
  size: int,
) -> jax.Array:
  """Folds ``one(out, group, first row, rows of each operand)`` over all tiles.

  A tile is at most ``size`` rows of a single group, filled up with zeros.
  """
  ends_E = jnp.cumsum(sizes_E)
  tiles_E = -(-sizes_E // size)
  last_E = jnp.cumsum(tiles_E)
  padded = [jnp.pad(x, ((0, size), (0, 0))) for x in operands]

  def step(b, out):
    group = jnp.searchsorted(last_E, b, side="right")
    nth = b - (last_E[group] - tiles_E[group])
    row = ends_E[group] - sizes_E[group] + nth * size
    real = jnp.arange(size) < ends_E[group] - row
    taken = [jax.lax.dynamic_slice_in_dim(x, row, size) for x in padded]
    return one(out, group, row, [jnp.where(real[:, None], x, 0) for x in taken])

  return jax.lax.fori_loop(0, last_E[-1], step, out)


def _tile_rows(rows: int, groups: int) -> int:
  """Rows of a tile: about a group's, a power of two from 8 to TILE."""
  share = max(1, rows // max(groups, 1))
  return min(TILE, max(8, 1 << (share - 1).bit_length()))
