"""Tensors in safetensors files, read by byte range.

The header is JSON with the place of every tensor; it is checked before a byte of
data is read. Data are read with ``preadv`` and not mapped, so that a process asks
the disk for the bytes of its own shards only, threads read side by side, and what
was read does not count as the process's memory.
Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl_hybrid.errors import ModelError

# Little-endian, as every platform that JAX runs on.
FLOAT_DTYPES = {
  "F64": jnp.float64,
  "F32": jnp.float32,
  "F16": jnp.float16,
  "BF16": jnp.bfloat16,
}
_MAX_HEADER = 100_000_000  # bytes, the format's own limit
_staging = threading.local()


class TensorFile:
  """An open safetensors file; reading is safe in threads.

  Attributes:
    path: of the file.
    tensors: name -> ``StoredTensor``.

  Raises:
    ModelError: not there, truncated, or not a consistent safetensors file.
  """

  def __init__(self, path: Path):
    self.path = path
    try:
      self._fd = os.open(path, os.O_RDONLY)
    except OSError as error:
      raise self._unreadable(error.strerror) from error
    try:
      self.tensors = self._read_header()
    except ModelError:
      self.close()
      raise

  def close(self) -> None:
    """Closes the file; its tensors cannot be read any more."""
    os.close(self._fd)

  def read_into(self, buffer: np.ndarray, offset: int) -> None:
    """Fills a contiguous uint8 array with the bytes from ``offset`` on."""
    done = 0
    while done < buffer.nbytes:
      got = os.preadv(self._fd, [memoryview(buffer)[done:]], offset + done)
      if not got:
        raise self._unreadable(f"ends at byte {offset + done}: it was cut meanwhile")
      done += got

  def prefetch(self, offset: int, size: int) -> None:
    """Asks the kernel to read ahead; returns at once."""
    if hasattr(os, "posix_fadvise"):
      os.posix_fadvise(self._fd, offset, size, os.POSIX_FADV_WILLNEED)

  def _read_header(self) -> dict[str, StoredTensor]:
    size = os.fstat(self._fd).st_size
    length = int.from_bytes(os.pread(self._fd, 8, 0), "little")
    if not 2 <= length <= min(size - 8, _MAX_HEADER):
      raise self._unreadable(f"its {size} bytes do not hold a header")
    try:
      entries = json.loads(
        os.pread(self._fd, length, 8), object_pairs_hook=self._unique
      )
      entries.pop("__metadata__", None)
      tensors = {
        name: StoredTensor(
          self,
          name,
          entry["dtype"],
          tuple(map(int, entry["shape"])),
          8 + length + entry["data_offsets"][0],
          entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in entries.items()
      }
    except (ValueError, LookupError, TypeError, AttributeError) as error:
      raise self._unreadable(f"its header is damaged: {error!r}") from error
    self._check_places(tensors, 8 + length, size)
    return tensors

  def _unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
      names = [name for name, _ in pairs]
      twice = next(name for name in names if names.count(name) > 1)
      raise self._unreadable(f"its header names {twice} twice")
    return found

  def _check_places(
    self, tensors: dict[str, StoredTensor], start: int, size: int
  ) -> None:
    """Every byte behind the header belongs to exactly one tensor."""
    end = start
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
      if tensor.offset != end or tensor.nbytes < 0 or min(tensor.shape, default=0) < 0:
        raise self._unreadable(
          f"{tensor.name} {list(tensor.shape)} is said to begin at byte "
          f"{tensor.offset}, expected {end}"
        )
      if tensor.kind in FLOAT_DTYPES and tensor.nbytes != tensor.row_bytes(0):
        raise self._unreadable(
          f"{tensor.name} is said to have {tensor.nbytes} bytes; expected "
          f"{tensor.row_bytes(0)} of {tensor.kind} {list(tensor.shape)}"
        )
      end += tensor.nbytes
      if end > size:
        raise self._unreadable(
          f"truncated: {tensor.name} ends at byte {end}, the file at {size}"
        )
    if end != size:
      raise self._unreadable(f"{size - end} bytes behind the last tensor")

  def _unreadable(self, reason: object) -> ModelError:
    return ModelError(f"{self.path}: not a readable safetensors file: {reason}")


@dataclasses.dataclass(frozen=True)
class StoredTensor:
  """One tensor of a file, not read yet.

  Attributes:
    file: that holds it.
    name: of the tensor.
    kind: dtype as the format spells it, e.g. BF16.
    shape: of the tensor.
    offset: first byte in the file.
    nbytes: size in bytes.
  """

  file: TensorFile
  name: str
  kind: str
  shape: tuple[int, ...]
  offset: int
  nbytes: int

  @property
  def dtype(self) -> np.dtype:
    """Of a float tensor."""
    return jnp.dtype(FLOAT_DTYPES[self.kind])

  def row_bytes(self, axis: int = 1) -> int:
    """Bytes of a slice of all dims from ``axis`` on."""
    return math.prod(self.shape[axis:]) * self.dtype.itemsize

  def column_bytes(self, columns: range) -> int:
    """Bytes of some columns of one row."""
    return len(columns) * self.dtype.itemsize

  def read(self) -> np.ndarray:
    """The whole tensor."""
    out = np.empty(self.shape, self.dtype)
    self.file.read_into(out.reshape(-1).view(np.uint8), self.offset)
    return out

  def prefetch(self, rows: range) -> None:
    """Asks the kernel to read these rows ahead; returns at once."""
    size = self.row_bytes()
    self.file.prefetch(self.offset + rows.start * size, len(rows) * size)

  def read_rows(self, rows: range, columns: range | None, out: np.ndarray) -> None:
    """Copies a part into ``out``, converted to its dtype.

    Args:
      rows: of dim 0.
      columns: of dim 1; None: all.
      out: the part's shape, any strides.
    """
    if columns is None and out.dtype == self.dtype and out.flags.c_contiguous:
      flat = out.reshape(-1).view(np.uint8)
      self.file.read_into(flat, self.offset + rows.start * self.row_bytes())
      return
    width = self.row_bytes() if columns is None else self.column_bytes(columns)
    buffer = _stage(len(rows) * width)
    if columns is None:
      self.file.read_into(buffer, self.offset + rows.start * width)
    else:
      left = self.offset + columns.start * self.dtype.itemsize
      for out_row, row in zip(buffer.reshape(-1, width), rows, strict=True):
        self.file.read_into(out_row, left + row * self.row_bytes())
    stored = buffer.view(self.dtype).reshape(out.shape)
    if out.dtype != self.dtype and not out.flags.c_contiguous:
      # To transpose and to convert at once is several times slower.
      out, stored = out.T, np.ascontiguousarray(stored.T)
    out[...] = stored


def _stage(size: int) -> np.ndarray:
  """A thread's own buffer, kept for its next piece."""
  if getattr(_staging, "buffer", np.empty(0)).nbytes < size:
    _staging.buffer = np.empty(size, np.uint8)
  return _staging.buffer[:size]
