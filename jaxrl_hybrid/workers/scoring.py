"""Forward-only passes over a batch, micro-batch by micro-batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_hybrid.models.params import Params
from jaxrl_hybrid.parallel import multihost
from jaxrl_hybrid.parallel.rules import Layout
from jaxrl_hybrid.types import Batch
from jaxrl_hybrid.workers import rows
from jaxrl_hybrid.workers.training import (
  COUNT,
  abstract_batch,
  micro_batch,
  place,
  shared_columns,
)

PerToken = Callable[[Params, jax.Array, jax.Array | None], jax.Array]


class Scorer:
  """Compiled ``(params, batch) -> fp32 [N, R]``.

  Args:
    per_token: ``(params, tokens_BT, positions_BT or None) -> [B, T]``, e.g.
      log-probs or values.
    layout: where the micro-batches go.
    micro_rows: B, over all batch shards.
    share: whether sequences may share a row.
  """

  def __init__(
    self,
    per_token: PerToken,
    layout: Layout,
    *,
    micro_rows: int,
    share: bool = False,
  ):
    self._layout, self._micro_rows, self._share = layout, micro_rows, share
    self._run = jax.jit(
      functools.partial(_map_micro_batches, per_token),
      out_shardings=layout.replicated,
    )

  def lower(self, params: Params, sequences: int, length: int) -> jax.stages.Lowered:
    """The program for so many rows, ahead of time; ``params`` may be shapes."""
    shape = rows.packed_shape(sequences, length, micro_rows=self._micro_rows)
    columns = dict.fromkeys(("tokens", *shared_columns(self._share)), np.int32)
    return self._run.lower(params, abstract_batch(columns, shape, self._layout))

  def __call__(self, params: Params, batch: Batch) -> np.ndarray:
    ids = [batch.sequence(i) for i in range(len(batch))]
    found, places = self._per_token(params, ids)
    return places.unpack(found, batch)

  def at_last_token(self, params: Params, ids: Sequence[np.ndarray]) -> np.ndarray:
    """fp32 ``[N]``: what ``per_token`` gives at the last token of each of N rows."""
    found, places = self._per_token(params, ids)
    last = places.start + np.array([len(x) for x in ids]) - 1
    return found.reshape(-1, found.shape[-1])[places.row, last].astype(np.float32)

  def _per_token(
    self, params: Params, ids: Sequence[np.ndarray]
  ) -> tuple[np.ndarray, rows.Places]:
    packed, places = rows.pack_ids(ids, micro_rows=self._micro_rows, share=self._share)
    batch = place(packed, self._layout, places.micro_batches)
    return multihost.fetch(self._run(params, batch)), places


def _map_micro_batches(
  per_token: PerToken, params: Params, batch: dict[str, jax.Array]
) -> jax.Array:
  """fp32 ``[A, B, T]``; 0 in micro-batches that have no rows."""
  tokens_ABT = batch["tokens"]

  def one(i: jax.Array, found_ABT: jax.Array) -> jax.Array:
    micro = micro_batch(batch, i)
    found_BT = per_token(params, micro["tokens"], micro.get(rows.POSITIONS))
    return found_ABT.at[i].set(found_BT)

  empty = jnp.zeros(tokens_ABT.shape, jnp.float32)
  return jax.lax.fori_loop(0, batch[COUNT], one, empty)
