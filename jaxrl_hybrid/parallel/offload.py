"""Moving trees between device memory and pinned host memory.

A tree keeps its shardings and only changes the kind of memory: every device's
shard goes to the memory of its own host and back, 54 GB/s each way on an H200.
The moves are asynchronous and run beside programs.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxrl_hybrid.parallel import abstract


def to_host(tree: Any) -> Any:
  """A copy in pinned host memory; drop the original to free the device."""
  if abstract.is_abstract(tree):
    return _as_type(tree, abstract.HostShape)
  return _move(tree, "pinned_host")


def to_device(tree: Any) -> Any:
  """A copy in device memory."""
  if abstract.is_abstract(tree):
    return _as_type(tree, jax.ShapeDtypeStruct)
  return _move(tree, "device")


def is_on_host(tree: Any) -> bool:
  """Whether every leaf is in pinned host memory."""
  return all(abstract.is_on_host(x) for x in jax.tree.leaves(tree))


def _move(tree: Any, kind: str) -> Any:
  shardings = jax.tree.map(lambda x: x.sharding.with_memory_kind(kind), tree)
  return jax.device_put(tree, shardings)


def _as_type(tree: Any, kind: type[jax.ShapeDtypeStruct]) -> Any:
  convert = lambda x: kind(x.shape, x.dtype, sharding=x.sharding)
  return jax.tree.map(convert, tree)
