"""Checksums of parameter trees: exact, independent of how they are sharded."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_STEP = 2654435761  # odd, so that every position has another odd factor mod 2^32
_UNSIGNED = {2: jnp.uint16, 4: jnp.uint32}


def of_stack(tree: Any, rows: Any | None = None) -> jax.Array:
  """uint32 ``[L]``: a checksum of each layer of a tree of ``[L, ...]`` leaves.

  ``sum_i bits_i * f(leaf, i) mod 2^32`` over all elements i of a layer, with a
  different odd f at every place: a changed bit, two swapped rows or two swapped
  leaves show, and the sum does not depend on the order of the terms. Zeros do
  not count, so padding is invisible.

  Args:
    tree: leaves of 16 or 32 bits.
    rows: for each leaf the index of every row of axis 1; default 0, 1, ...
  """
  leaves = jax.tree.leaves(tree)
  if rows is None:
    rows = [np.arange(leaf.shape[1]) for leaf in leaves]
  return sum(
    (
      _of_leaf(leaf, index, salt)
      for salt, (leaf, index) in enumerate(
        zip(leaves, jax.tree.leaves(rows), strict=True)
      )
    ),
    jnp.zeros(leaves[0].shape[0], jnp.uint32),
  )


def _of_leaf(leaf: jax.Array, rows: np.ndarray, salt: int) -> jax.Array:
  unsigned = _UNSIGNED[leaf.dtype.itemsize]
  bits = jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)
  index = jnp.asarray(rows, jnp.uint32).reshape(1, -1, *[1] * (leaf.ndim - 2))
  index = index + jnp.uint32(salt * 40503)
  for axis in range(2, leaf.ndim):
    place = jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
    index = index * jnp.uint32(leaf.shape[axis]) + place
  factor = index * jnp.uint32(2 * _STEP % 2**32) + jnp.uint32(1)
  return jnp.sum(bits * factor, tuple(range(1, leaf.ndim)), dtype=jnp.uint32)
