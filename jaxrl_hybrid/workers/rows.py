"""From ragged host rows to static device arrays, and back.

Sequences of a batch share device rows where that saves rows: longest first, each into
the first row with room (first-fit decreasing; at most 11/9 of the fewest rows
possible, Dósa 2007). ``positions`` start anew at every sequence of a row, and tell
sequences apart (``ops.attention``). If sharing saves next to nothing every sequence
has a row of its own and there are no ``positions``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl_hybrid.shapes import bucket, round_up
from jaxrl_hybrid.types import Batch

POSITIONS = "positions"
# Sharing must save this part of the rows: it costs attention a mask.
WORTHWHILE = 0.05


@dataclasses.dataclass(frozen=True)
class Places:
  """Where N sequences stand in device rows.

  Attributes:
    row, start: int ``[N]``, the row and the first position of each sequence.
    used: rows that have a sequence.
    shape: (A, B, T): A micro-batches of B rows of T tokens.
    shared: whether a row has more than one sequence.
  """

  row: np.ndarray
  start: np.ndarray
  used: int
  shape: tuple[int, int, int]
  shared: bool

  @property
  def micro_batches(self) -> int:
    """Those that are not empty; they come first."""
    return -(-self.used // self.shape[1])

  def unpack(self, packed_ABT: np.ndarray, batch: Batch) -> np.ndarray:
    """The response positions of a packed array: ``[N, R]``, 0 beyond a row."""
    flat = np.asarray(packed_ABT).reshape(-1, packed_ABT.shape[-1])
    source, target = self.responses(batch)
    out = np.zeros(batch.response_ids.shape, flat.dtype)
    out[source] = flat[target]
    return out

  def responses(self, batch: Batch) -> tuple[tuple, tuple]:
    """Index pairs (n, r) and (device row, position) of all valid response tokens."""
    n, r = np.nonzero(batch.valid_mask)
    return (n, r), (self.row[n], self.start[n] + batch.prompt_lengths[n] + r)


def place(lengths: np.ndarray, *, micro_rows: int, share: bool) -> Places:
  """Places for sequences of these lengths, in rows as long as the longest needs."""
  shape = packed_shape(len(lengths), int(lengths.max()), micro_rows=micro_rows)
  if share:
    row, start = _first_fit(lengths, shape[2])
    used = int(row.max()) + 1
    if used <= (1 - WORTHWHILE) * len(lengths):
      return Places(row, start, used, shape, shared=True)
  apart = np.arange(len(lengths))
  return Places(apart, np.zeros_like(apart), len(apart), shape, shared=False)


def pack(
  batch: Batch,
  columns: Mapping[str, np.ndarray],
  *,
  micro_rows: int,
  share: bool = False,
  real: bool = False,
) -> tuple[dict[str, np.ndarray], Places]:
  """Rows as ``[A, B, T]`` arrays: A micro-batches of B rows of T tokens.

  Args:
    batch: N rows; filler rows (length 0, mask false) complete the last
      micro-batch.
    columns: response-aligned ``[N, R]`` arrays to move along; each response
      index r goes to the place of its token.
    micro_rows: B.
    share: whether sequences may share a row.
    real: whether padding is to be told from tokens.

  Returns:
    ({``tokens`` int32, ``mask`` bool (tokens in the loss), ``positions`` int32 if
    rows are shared, ``real`` bool if asked for, and the columns, 0 where there is no
    response token}, the places).
  """
  ids = [batch.sequence(i) for i in range(len(batch))]
  packed, places = pack_ids(ids, micro_rows=micro_rows, share=share)
  rows, length = places.shape[0] * places.shape[1], places.shape[2]
  if real:
    packed["real"] = np.zeros((rows, length), bool)
    packed["real"][_tokens(places, [len(x) for x in ids])] = True
  source, target = places.responses(batch)
  for name, column in {"mask": batch.mask, **columns}.items():
    packed[name] = np.zeros((rows, length), column.dtype)
    packed[name][target] = column[source]
  return {name: x.reshape(places.shape) for name, x in packed.items()}, places


def pack_ids(
  sequences: Sequence[np.ndarray], *, micro_rows: int, share: bool = False
) -> tuple[dict[str, np.ndarray], Places]:
  """Whole sequences as ``tokens`` (and ``positions``) int32 ``[A, B, T]``."""
  lengths = np.array([len(ids) for ids in sequences])
  places = place(lengths, micro_rows=micro_rows, share=share)
  rows, length = places.shape[0] * places.shape[1], places.shape[2]
  index = _tokens(places, lengths)
  tokens = np.zeros((rows, length), np.int32)
  tokens[index] = np.concatenate(sequences)
  packed = {"tokens": tokens}
  if places.shared:
    packed[POSITIONS] = _positions(places, lengths, tokens.shape)
  return {name: x.reshape(places.shape) for name, x in packed.items()}, places


def join(
  first: tuple[dict[str, np.ndarray], Places],
  more: tuple[dict[str, np.ndarray], Places],
) -> tuple[dict[str, np.ndarray], int]:
  """Two packed batches of the same B as one; a column of one is 0 in the other.

  Args:
    first, more: as ``pack`` returns them; ``more`` has no shared rows.

  Returns:
    (the arrays, how many of their micro-batches, the first ones, are not empty).
  """
  (packed, places), (others, other_places) = first, more
  width = max(places.shape[2], other_places.shape[2])
  if places.shared:
    positions = np.arange(other_places.shape[2], dtype=np.int32)
    others = others | {POSITIONS: np.broadcast_to(positions, other_places.shape)}
  used, count = places.micro_batches, other_places.micro_batches
  joined = {}
  for name in packed | others:
    dtype = (packed if name in packed else others)[name].dtype
    parts = [np.zeros((*p.shape[:2], width), dtype) for p in (places, other_places)]
    for part, source in zip(parts, (packed, others), strict=True):
      if name in source:
        part[..., : source[name].shape[2]] = source[name]
    joined[name] = np.concatenate([parts[0][:used], parts[1], parts[0][used:]])
  return joined, used + count


def packed_shape(
  sequences: int, length: int, *, micro_rows: int
) -> tuple[int, int, int]:
  """(A, B, T) for so many sequences of at most ``length`` tokens."""
  rows = round_up(sequences, micro_rows)
  return rows // micro_rows, micro_rows, bucket(length)


def _first_fit(lengths: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
  """(row, start) of each sequence, rows of ``width`` tokens."""
  room = np.full(len(lengths), width)
  row, start = np.zeros_like(lengths), np.zeros_like(lengths)
  for i in np.argsort(-lengths, kind="stable"):
    row[i] = np.argmax(room >= lengths[i])
    start[i] = width - room[row[i]]
    room[row[i]] -= lengths[i]
  return row, start


def _tokens(places: Places, lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
  """Index of all tokens, sequence by sequence."""
  row = np.repeat(places.row, lengths)
  offset = np.concatenate([np.arange(length) for length in lengths])
  return row, np.repeat(places.start, lengths) + offset


def _positions(
  places: Places, lengths: np.ndarray, shape: tuple[int, int]
) -> np.ndarray:
  """Counted from each sequence's first token; what pads a row counts by itself."""
  end = np.zeros(shape[0], np.int32)
  np.maximum.at(end, places.row, (places.start + lengths).astype(np.int32))
  positions = np.arange(shape[1], dtype=np.int32) - end[:, None]
  positions += np.where(positions < 0, end[:, None], 0)
  index = _tokens(places, lengths)
  positions[index] = index[1] - np.repeat(places.start, lengths)
  return positions
