"""Shards of stacked parameters, filled from stored tensors by threads."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jaxrl_hybrid.models.hf.names import Leaf
from jaxrl_hybrid.models.hf.stored import StoredTensor

PIECE_BYTES = 4 << 20  # read and converted at a time, by one thread
AHEAD = 16  # pieces that the kernel is asked to read ahead
THREADS = min(8, 2 * (os.cpu_count() or 1))
_ALIGNMENT = 64  # of host arrays that JAX's CPU devices take without a copy

Ranges = tuple[range, ...]


class ShardReader(contextlib.AbstractContextManager):
  """Reads leaves; between the file and a device lies at most one shard.

  On accelerators it is one layer of it.

  Args:
    dtype: of the parameters.
    limit: bytes of shards that may be on their way to devices: those of the
      largest shard. Smaller ones overlap with the reading of the next.
  """

  def __init__(self, dtype: np.dtype, *, limit: int):
    self._dtype, self._limit = np.dtype(dtype), limit
    self._pool = ThreadPoolExecutor(THREADS)
    self._uploads: collections.deque[tuple[int, list[jax.Array]]] = collections.deque()

  def __exit__(self, *exc: object) -> None:
    self._pool.shutdown(cancel_futures=True)

  def read(
    self,
    leaf: Leaf,
    tensors: np.ndarray,
    shape: tuple[int, ...],
    sharding: Sharding,
    dtype: np.dtype | None = None,
  ) -> jax.Array:
    """One leaf of this shape in ``sharding``, of another dtype if one is given.

    ``tensors`` are its ``StoredTensor``s, in an array shaped as its leading dims.
    Rows that they do not have are zeros.
    """
    dtype = dtype or self._dtype
    devices: dict[Ranges, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
      ranges = tuple(range(*i.indices(n)) for i, n in zip(index, shape, strict=True))
      devices.setdefault(ranges, []).append(device)
    sequential = _reads_most_columns(leaf, tensors.flat[0], list(devices))
    arrays = []
    for ranges, holders in devices.items():
      places = [
        SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        for device in holders
      ]
      parts = _parts(leaf, ranges, places[0])
      uploaded = []
      for part, following in itertools.zip_longest(parts, parts[1:]):
        if following and sequential:
          _look_ahead(leaf, tensors, following)
        uploaded.append(self._upload(leaf, tensors, part, places, dtype, sequential))
      arrays += map(_join, zip(*uploaded, strict=True))
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)

  def _upload(
    self,
    leaf: Leaf,
    tensors: np.ndarray,
    ranges: Ranges,
    places: list[SingleDeviceSharding],
    dtype: np.dtype,
    sequential: bool,
  ) -> list[jax.Array]:
    """A part of a leaf on each of the devices that hold it."""
    size = math.prod(map(len, ranges)) * dtype.itemsize
    self._wait_for_room(size, self._limit // (4 if _is_accelerator(places[0]) else 1))
    part = _zeros(tuple(map(len, ranges)), dtype)
    self._fill(pieces(leaf, tensors, ranges, part), sequential)
    uploaded = [jax.device_put(part, place) for place in places]
    self._uploads.append((size, uploaded))
    return uploaded

  def _wait_for_room(self, size: int, limit: int) -> None:
    while self._uploads and sum(n for n, _ in self._uploads) + size > limit:
      jax.block_until_ready(self._uploads.popleft()[1])

  def _fill(self, found: Iterator[Piece], sequential: bool) -> None:
    running: collections.deque[Future[None]] = collections.deque()
    for piece in found:
      if piece.columns is None or sequential:
        piece.tensor.prefetch(piece.rows)
      running.append(self._pool.submit(piece.copy))
      if len(running) > AHEAD:
        running.popleft().result()
    for future in running:
      future.result()


@dataclasses.dataclass(frozen=True)
class Piece:
  """Some rows of one tensor and where they go; ``columns`` None: all."""

  tensor: StoredTensor
  rows: range
  columns: range | None
  out: np.ndarray

  def copy(self) -> None:
    """Reads and converts."""
    self.tensor.read_rows(self.rows, self.columns, self.out)


def pieces(
  leaf: Leaf, tensors: np.ndarray, ranges: Ranges, shard: np.ndarray
) -> Iterator[Piece]:
  """What of which tensor goes where in the shard that ``ranges`` of the leaf are."""
  lead, inner = ranges[: leaf.lead], ranges[leaf.lead :]
  inner = inner[::-1] if leaf.transposed else inner
  for place in np.ndindex(*map(len, lead)):
    tensor = tensors[tuple(r[i] for r, i in zip(lead, place, strict=True))]
    out = shard[place].T if leaf.transposed else shard[place]
    first, end, _ = leaf.rows.indices(tensor.shape[0])
    start, stop = (min(first + i, end) for i in (inner[0].start, inner[0].stop))
    columns = inner[1] if inner[1:] and len(inner[1]) < tensor.shape[1] else None
    width = tensor.row_bytes() if columns is None else tensor.column_bytes(columns)
    step = max(1, PIECE_BYTES // width)
    for row in range(start, stop, step):
      rows = range(row, min(row + step, stop))
      yield Piece(tensor, rows, columns, out[row - start : rows.stop - start])


def _reads_most_columns(
  leaf: Leaf, tensor: StoredTensor, shards: Sequence[Ranges]
) -> bool:
  """Whether this process needs at least half of each row of the tensors.

  Then rows are worth reading ahead as a whole, for the shards to come; else a
  process that needs a few columns must not ask for the rest.
  """
  if len(tensor.shape) < 2:
    return True
  parts = {ranges[leaf.lead + (not leaf.transposed)] for ranges in shards}
  return 2 * sum(map(len, parts)) >= tensor.shape[1]


def _parts(leaf: Leaf, ranges: Ranges, place: SingleDeviceSharding) -> list[Ranges]:
  """A shard as it goes to its device: to an accelerator layer by layer.

  What is on its way there exists twice on the host, in the driver's staging too.
  """
  if not leaf.lead or not _is_accelerator(place):
    return [ranges]
  return [(range(i, i + 1), *ranges[1:]) for i in ranges[0]]


def _look_ahead(leaf: Leaf, tensors: np.ndarray, ranges: Ranges) -> None:
  """The disk is not to wait while a part goes to its device."""
  nowhere = np.empty(tuple(map(len, ranges)), np.uint8)  # never touched
  for piece in itertools.islice(pieces(leaf, tensors, ranges, nowhere), 2 * AHEAD):
    piece.tensor.prefetch(piece.rows)


def _is_accelerator(place: SingleDeviceSharding) -> bool:
  (device,) = place.device_set
  return device.platform != "cpu" and place.memory_kind in (None, "device")


def _join(parts: Sequence[jax.Array]) -> jax.Array:
  return parts[0] if len(parts) == 1 else _concatenate(parts)


@jax.jit
def _concatenate(parts: Sequence[jax.Array]) -> jax.Array:
  return jnp.concatenate(parts)


def _zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
  size = math.prod(shape) * dtype.itemsize
  raw = np.zeros(size + _ALIGNMENT, np.uint8)
  start = -raw.ctypes.data % _ALIGNMENT
  return raw[start : start + size].view(dtype).reshape(shape)
