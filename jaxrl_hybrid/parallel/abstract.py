"""Building a run without arrays: the same code on shapes.

``plan`` constructs the roles of a run from ``ShapeDtypeStruct`` leaves and
compiles their programs; nothing is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax


def is_abstract(tree: Any) -> bool:
  """Whether a tree has shapes in place of arrays."""
  return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree))


def call(program: Callable[..., Any], *args: Any) -> Any:
  """``program(*args)``; on shapes the shapes of its result, shardings included.

  Args:
    program: jitted, with out_shardings.
    *args: arrays or shapes.
  """
  return jax.eval_shape(program, *args) if is_abstract(args) else program(*args)


def device_bytes(tree: Any, *, memory_kind: str = "device") -> int:
  """Bytes of a tree's shards on the device that holds most, in one kind of memory."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
    if (x.sharding.memory_kind or "device") == memory_kind
  )
