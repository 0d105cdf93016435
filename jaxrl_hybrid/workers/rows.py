"""From ragged host rows to static device arrays, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl_hybrid.shapes import bucket, round_up
from jaxrl_hybrid.types import Batch


def pack(
  batch: Batch,
  columns: Mapping[str, np.ndarray],
  *,
  micro_rows: int,
  real: bool = False,
) -> dict[str, np.ndarray]:
  """Rows as ``[A, B, T]`` arrays: A micro-batches of B rows of T tokens.

  Args:
    batch: N rows; filler rows (length 0, mask false) complete the last
      micro-batch.
    columns: response-aligned ``[N, R]`` arrays to move along; each response
      index r goes to position ``prompt_length + r``.
    micro_rows: B.
    real: whether padding is to be told from tokens.

  Returns:
    ``tokens`` int32, ``mask`` bool (tokens in the loss), ``real`` bool if asked for,
    and the columns, 0 where there is no response token.
  """
  totals = batch.prompt_lengths + batch.response_lengths
  shape = packed_shape(len(batch), int(totals.max()), micro_rows=micro_rows)
  rows, length = shape[0] * shape[1], shape[2]
  tokens = np.zeros((rows, length), np.int32)
  for i, prompt in enumerate(batch.prompts):
    tokens[i, : len(prompt.ids)] = prompt.ids
  source, target = _response_index(batch)
  tokens[target] = batch.response_ids[source]
  packed = {"tokens": tokens}
  if real:
    packed["real"] = np.zeros((rows, length), bool)
    packed["real"][: len(totals)] = np.arange(length) < totals[:, None]
  for name, column in {"mask": batch.mask, **columns}.items():
    packed[name] = np.zeros((rows, length), column.dtype)
    packed[name][target] = column[source]
  return {name: x.reshape(shape) for name, x in packed.items()}


def pack_ids(rows: Sequence[np.ndarray], *, micro_rows: int) -> np.ndarray:
  """Whole rows of token ids as int32 ``[A, B, T]``, padded on the right."""
  longest = max(len(ids) for ids in rows)
  shape = packed_shape(len(rows), longest, micro_rows=micro_rows)
  tokens = np.zeros((shape[0] * shape[1], shape[2]), np.int32)
  for row, ids in zip(tokens, rows, strict=False):
    row[: len(ids)] = ids
  return tokens.reshape(shape)


def packed_shape(
  sequences: int, length: int, *, micro_rows: int
) -> tuple[int, int, int]:
  """(A, B, T) for so many sequences of at most ``length`` tokens."""
  rows = round_up(sequences, micro_rows)
  return rows // micro_rows, micro_rows, bucket(length)


def unpack(packed_ABT: np.ndarray, batch: Batch) -> np.ndarray:
  """The response positions of a packed array: ``[N, R]``, 0 beyond a row."""
  flat = np.asarray(packed_ABT).reshape(-1, packed_ABT.shape[-1])
  source, target = _response_index(batch)
  out = np.zeros(batch.response_ids.shape, flat.dtype)
  out[source] = flat[target]
  return out


def _response_index(batch: Batch) -> tuple[tuple, tuple]:
  """Index pairs (row, r) and (row, prompt_length + r) of all valid tokens."""
  row, r = np.nonzero(batch.valid_mask)
  return (row, r), (row, batch.prompt_lengths[row] + r)
