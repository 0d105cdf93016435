"""The grouped products of ``ops.grouped`` as Triton kernels, for NVIDIA GPUs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

LEAST, MOST = 16, 128  # rows of a tile


def times(
  x: jax.Array,
  kernel_EID: jax.Array,
  sizes_E: jax.Array,
  *,
  contract: int,
  interpret: bool = False,
) -> jax.Array:
  """See ``ops.grouped.times``; ``interpret`` runs the kernel without a GPU."""
  rows, inner = x.shape
  groups, width = kernel_EID.shape[0], kernel_EID.shape[2 - contract]
  tile_m = _tile_rows(rows, groups)
  # Measured on an H200: wide tiles for many rows, long ones for few.
  tile_k = _side(inner, 128 if tile_m == LEAST else 64)
  tile_n = _side(width, 256 if tile_m == MOST else 128)
  group_T, row_T, end_T = _tiles(sizes_E, rows, tile_m)
  kernel = functools.partial(
    _times_kernel,
    tiles=(tile_m, tile_k, tile_n),
    sizes=(inner, width),
    contract=contract,
    precision=_precision(x.dtype),
  )
  out = pl.pallas_call(
    kernel,
    out_shape=jax.ShapeDtypeStruct((rows, width), jnp.float32),
    grid=(pl.cdiv(width, tile_n), group_T.shape[0]),
    compiler_params=plgpu.CompilerParams(
      num_warps=8 if tile_m == MOST else 4, num_stages=4 if tile_m == LEAST else 3
    ),
    interpret=interpret,
    name="grouped_times",
  )(group_T, row_T, end_T, x, kernel_EID)
  real = jnp.arange(rows) < jnp.sum(sizes_E)
  return jnp.where(real[:, None], out, 0.0)


def outer_products(
  of_i: jax.Array, of_d: jax.Array, sizes_E: jax.Array, *, interpret: bool = False
) -> jax.Array:
  """See ``ops.grouped.outer_products``."""
  (rows, side_i), side_d = of_i.shape, of_d.shape[1]
  groups = sizes_E.shape[0]
  tile_m = min(64, _tile_rows(rows, groups))
  tile_i, tile_d = _side(side_i, 128), _side(side_d, 128)
  ends_E = jnp.cumsum(sizes_E).astype(jnp.int32)
  kernel = functools.partial(
    _outer_kernel,
    tiles=(tile_m, tile_i, tile_d),
    sizes=(side_i, side_d),
    precision=_precision(of_i.dtype),
  )
  return pl.pallas_call(
    kernel,
    out_shape=jax.ShapeDtypeStruct((groups, side_i, side_d), jnp.float32),
    grid=(pl.cdiv(side_d, tile_d), pl.cdiv(side_i, tile_i), groups),
    compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=3),
    interpret=interpret,
    name="grouped_outer_products",
  )(ends_E - sizes_E.astype(jnp.int32), ends_E, of_i, of_d)


def _times_kernel(
  group_ref, row_ref, end_ref, x_ref, kernel_ref, out_ref, **static
) -> None:
  """One tile of rows times one tile of columns of its group's matrix."""
  (tile_m, tile_k, tile_n), (inner, width) = static["tiles"], static["sizes"]
  tile = pl.program_id(1)
  first, row, end = pl.program_id(0) * tile_n, row_ref[tile], end_ref[tile]
  group = group_ref[tile]
  real_m = _below(row, tile_m, end)
  real_n = _below(first, tile_n, width)

  @pl.when(row < end)
  def _():
    def add(step, total):
      k = step * tile_k
      real_k = _below(k, tile_k, inner)
      x = _load(x_ref.at[pl.ds(row, tile_m), pl.ds(k, tile_k)], real_m, real_k)
      ks, ns = pl.ds(k, tile_k), pl.ds(first, tile_n)
      if static["contract"]:
        matrix = _load(kernel_ref.at[group, ns, ks], real_n, real_k)
      else:
        matrix = _load(kernel_ref.at[group, ks, ns], real_k, real_n)
      return total + plgpu.dot(
        x,
        matrix,
        trans_b=bool(static["contract"]),
        precision=static["precision"],
      )

    zeros = jnp.zeros((tile_m, tile_n), jnp.float32)
    total = jax.lax.fori_loop(0, pl.cdiv(inner, tile_k), add, zeros)
    place = out_ref.at[pl.ds(row, tile_m), pl.ds(first, tile_n)]
    plgpu.store(place, total, mask=real_m[:, None] & real_n[None])


def _outer_kernel(start_ref, end_ref, i_ref, d_ref, out_ref, **static) -> None:
  """One tile of one group's matrix, summed over the group's rows."""
  (tile_m, tile_i, tile_d), (side_i, side_d) = static["tiles"], static["sizes"]
  group = pl.program_id(2)
  start, end = start_ref[group], end_ref[group]
  first_i, first_d = pl.program_id(1) * tile_i, pl.program_id(0) * tile_d
  real_i = _below(first_i, tile_i, side_i)
  real_d = _below(first_d, tile_d, side_d)

  def add(step, total):
    row = start + step * tile_m
    real_m = _below(row, tile_m, end)
    rows = pl.ds(row, tile_m)
    of_i = _load(i_ref.at[rows, pl.ds(first_i, tile_i)], real_m, real_i)
    of_d = _load(d_ref.at[rows, pl.ds(first_d, tile_d)], real_m, real_d)
    return total + plgpu.dot(of_i, of_d, trans_a=True, precision=static["precision"])

  zeros = jnp.zeros((tile_i, tile_d), jnp.float32)
  total = jax.lax.fori_loop(0, pl.cdiv(end - start, tile_m), add, zeros)
  place = out_ref.at[group, pl.ds(first_i, tile_i), pl.ds(first_d, tile_d)]
  plgpu.store(place, total, mask=real_i[:, None] & real_d[None])


def _load(ref, real_rows: jax.Array, real_columns: jax.Array) -> jax.Array:
  return plgpu.load(ref, mask=real_rows[:, None] & real_columns[None], other=0.0)


def _below(first: jax.Array | int, count: int, end: jax.Array | int) -> jax.Array:
  return first + jnp.arange(count) < end


def _tiles(
  sizes_E: jax.Array, rows: int, tile_m: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """int32 (group, first row, end of the group's rows) of as many tiles as can be.

  Those that are not needed have first row = end.
  """
  sizes_E = sizes_E.astype(jnp.int32)
  groups = sizes_E.shape[0]
  most = min(pl.cdiv(rows, tile_m) + groups, rows)
  tiles_E = -(-sizes_E // tile_m)
  last_E = jnp.cumsum(tiles_E)
  tile_T = jnp.arange(most, dtype=jnp.int32)
  group_T = jnp.minimum(jnp.searchsorted(last_E, tile_T, side="right"), groups - 1)
  group_T = group_T.astype(jnp.int32)
  end_T = jnp.cumsum(sizes_E)[group_T]
  nth_T = tile_T - (last_E - tiles_E)[group_T]
  row_T = end_T - sizes_E[group_T] + nth_T * tile_m
  return group_T, jnp.where(tile_T < last_E[-1], row_T, end_T), end_T


def _tile_rows(rows: int, groups: int) -> int:
  share = max(1, rows // groups)
  return min(MOST, max(LEAST, 1 << (share - 1).bit_length()))


def _side(size: int, most: int) -> int:
  return min(most, max(LEAST, 1 << (size - 1).bit_length()))


def _precision(dtype: jnp.dtype) -> jax.lax.Precision:
  """fp32 operands are not to be rounded to TF32."""
  exact = dtype == jnp.float32
  return jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT
