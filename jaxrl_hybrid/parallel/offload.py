"""Moving trees between device memory and pinned host memory.

A tree keeps its shardings and only changes the kind of memory: every device's
shard goes to the memory of its own host and back, 54 GB/s each way on an H200.
The moves are asynchronous and run beside programs.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxrl_hybrid.parallel.abstract import is_abstract

HOST, DEVICE = "pinned_host", "device"


def to_host(tree: Any) -> Any:
  """A copy in pinned host memory; drop the original to free the device."""
  return _move(tree, HOST)


def to_device(tree: Any) -> Any:
  """A copy in device memory."""
  return _move(tree, DEVICE)


def is_on_host(tree: Any) -> bool:
  """Whether every leaf is in pinned host memory."""
  return all(x.sharding.memory_kind == HOST for x in jax.tree.leaves(tree))


def _move(tree: Any, kind: str) -> Any:
  shardings = jax.tree.map(lambda x: x.sharding.with_memory_kind(kind), tree)
  if is_abstract(tree):
    moved = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    return jax.tree.map(moved, tree, shardings)
  return jax.device_put(tree, shardings)
