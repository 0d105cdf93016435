"""Checksums of parameter trees: exact, independent of how they are sharded."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_UNSIGNED = {2: jnp.uint16, 4: jnp.uint32}


def of_stack(tree: Any, rows: Any | None = None) -> jax.Array:
  """uint32 ``[L]``: a checksum of each layer of a tree of ``[L, ...]`` leaves.

  ``sum_i s(bits_i) * f(leaf, i) mod 2^32`` over all elements i of a layer, with s
  a scrambling that keeps 0 and f a hash of the place, odd: a changed bit, two
  swapped rows or two swapped leaves show, and the sum does not depend on the order
  of the terms. Zeros do not count, so padding is invisible.

  Without s, numbers whose low bits are all zero (bfloat16 ones held in float32)
  would count with their few high bits only, and two changed signs not at all.

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
  for axis in range(2, leaf.ndim):
    place = jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
    index = index * jnp.uint32(leaf.shape[axis]) + place
  factor = (_scramble(index) ^ _scramble(jnp.uint32(salt + 1))) | jnp.uint32(1)
  terms = _scramble(bits) * factor
  return jnp.sum(terms, tuple(range(1, leaf.ndim)), dtype=jnp.uint32)


def _scramble(x: jax.Array) -> jax.Array:
  """A bijection of uint32 with 0 -> 0: the last step of MurmurHash3."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
  return x ^ (x >> 16)
