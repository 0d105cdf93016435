"""Checksums of parameter trees: exact, independent of how they are sharded."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

_STEP = 2654435761  # odd, so that every position has another odd factor mod 2^32
_UNSIGNED = {2: jnp.uint16, 4: jnp.uint32}


def of_stack(tree: Any) -> jax.Array:
  """uint32 ``[L]``: a checksum of each layer of a tree of ``[L, ...]`` leaves.

  ``sum_i bits_i * f(leaf, i) mod 2^32`` over all elements i of a layer, with a
  different odd f at every place: a changed bit, two swapped rows or two swapped
  leaves show, and the sum does not depend on the order of the terms.
  """
  leaves = jax.tree.leaves(tree)
  return sum(
    (_of_leaf(leaf, salt) for salt, leaf in enumerate(leaves)),
    jnp.zeros(leaves[0].shape[0], jnp.uint32),
  )


def _of_leaf(leaf: jax.Array, salt: int) -> jax.Array:
  unsigned = _UNSIGNED[leaf.dtype.itemsize]
  bits = jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)
  index = jnp.full((), salt * 40503 + 1, jnp.uint32)
  for axis in range(1, leaf.ndim):
    place = jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
    index = index * jnp.uint32(leaf.shape[axis]) + place
  factor = index * jnp.uint32(2 * _STEP % 2**32) + jnp.uint32(1)
  return jnp.sum(bits * factor, tuple(range(1, leaf.ndim)), dtype=jnp.uint32)
