"""How many rows decode together: as many as are asked for and have room."""

from __future__ import annotations

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrl_hybrid.errors import ConfigError
from jaxrl_hybrid.shapes import round_up

GB = 1e9


def wanted_slots(rows: int, max_rows: int, shards: int) -> int:
  """B: a power of two per shard (at least 2), or ``max_rows``.

  One row alone is slower than two: its products are not matrix products.
  """
  per_shard = 2
  while per_shard * shards < rows:
    per_shard *= 2
  return max(2 * shards, min(per_shard * shards, round_up(max_rows, shards)))


def fitting_slots(wanted: int, *, slot_bytes: int, free: int, shards: int) -> int:
  """``wanted``, halved until the cache fits.

  Args:
    wanted: B.
    slot_bytes: of the cache of one slot, on one device.
    free: bytes for the cache, on one device.
    shards: batch shards.

  Raises:
    ConfigError: not even two slots fit.
  """
  per_shard = wanted // shards
  while per_shard > 2 and per_shard * slot_bytes > free:
    per_shard //= 2
  if per_shard * slot_bytes > free:
    raise ConfigError(
      f"expected room for the KV cache of {per_shard} rows "
      f"({per_shard * slot_bytes / GB:.2f} GB) on each device, got {free / GB:.2f} GB; "
      "shorten data.max_prompt_length or data.max_response_length, raise the "
      "generation mesh's tp (mesh.generation), or offload more (offload.*)"
    )
  return per_shard * shards


def free_bytes(devices: list[jax.Device]) -> int | None:
  """Bytes that are free on the fullest device, of any process; None if unknown."""
  here = jax.process_index()
  free = -1
  for device in devices:
    stats = device.memory_stats() if device.process_index == here else None
    if stats and "bytes_limit" in stats:
      left = stats["bytes_limit"] - stats["bytes_in_use"]
      free = left if free < 0 else min(free, left)
  if jax.process_count() > 1:
    everywhere = multihost_utils.process_allgather(np.array([free], np.int64))
    free = int(np.min(everywhere))
  return None if free < 0 else free
