"""Arrays over the devices of several processes.

Every process runs the same program on the same host values; it holds the shards
of its own devices only. What the host reads is replicated, so each process reads
its own copy.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec, Sharding


def is_primary() -> bool:
  """Whether this is process 0: the one that writes, prints and calls rewards."""
  return jax.process_index() == 0


def put(x: np.ndarray, sharding: Sharding) -> jax.Array:
  """A host array, equal in all processes, as one array of this sharding.

  A process copies its own shards only.
  """
  if sharding.is_fully_addressable:
    return jax.device_put(x, sharding)
  return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def fetch(tree: Any) -> Any:
  """Host copies (numpy) of arrays that a program has replicated."""
  for leaf in jax.tree.leaves(tree):
    assert leaf.is_fully_addressable or leaf.is_fully_replicated, (
      f"the host cannot read {leaf.sharding} of {leaf.shape}: compile the program "
      "with replicated out_shardings"
    )
  return jax.device_get(tree)


def gather(x: jax.Array, index: tuple[int, ...] = ()) -> np.ndarray:
  """A host copy of ``x[index]``; all processes call it together.

  Args:
    x: any sharding; every device needs room for all that is copied.
    index: along the leading axes.
  """
  everywhere = None
  if not x.is_fully_addressable:
    everywhere = NamedSharding(x.sharding.mesh, PartitionSpec())
  elif not index:
    return jax.device_get(x)
  places = tuple(np.int32(i) for i in index)
  return fetch(_item_program(everywhere)(x, places))


def barrier(name: str) -> None:
  """Waits until every process has come here; ``name`` must be the same in all."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)


@functools.lru_cache(maxsize=4)
def _item_program(sharding: Sharding | None) -> Any:
  return jax.jit(_item, out_shardings=sharding)


def _item(x: jax.Array, index: tuple[jax.Array, ...]) -> jax.Array:
  for i in index:
    x = jax.lax.dynamic_index_in_dim(x, i, keepdims=False)
  return x
