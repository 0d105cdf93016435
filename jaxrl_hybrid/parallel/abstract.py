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


class HostShape(jax.ShapeDtypeStruct):
  """The shape of an array in pinned host memory.

  Devices that are not there forget the memory kind of a sharding, so the kind
  is part of the type here.
  """


def device_bytes(tree: Any) -> int:
  """Bytes of a tree's shards on one device (the one that holds most)."""
  return sum(_shard_bytes(x) for x in jax.tree.leaves(tree) if not is_on_host(x))


def host_bytes(tree: Any) -> int:
  """Bytes of a tree's shards in pinned host memory, per device."""
  return sum(_shard_bytes(x) for x in jax.tree.leaves(tree) if is_on_host(x))


def is_on_host(x: Any) -> bool:
  """Whether an array, or the shape of one, is in pinned host memory."""
  return isinstance(x, HostShape) or x.sharding.memory_kind == "pinned_host"


def _shard_bytes(x: Any) -> int:
  return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
