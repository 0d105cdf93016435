"""Forward-only passes over a batch, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxrl_hybrid.models.params import Params
from jaxrl_hybrid.parallel import multihost
from jaxrl_hybrid.parallel.rules import Layout
from jaxrl_hybrid.types import Batch
from jaxrl_hybrid.workers import rows
from jaxrl_hybrid.workers.training import abstract_batch, place


class Scorer:
  """Compiled ``(params, batch) -> fp32 [N, R]``.

  Args:
    per_token: ``(params, tokens_BT) -> [B, T]``, e.g. log-probs or values.
    layout: where the micro-batches go.
    micro_rows: B, over all batch shards.
  """

  def __init__(
    self,
    per_token: Callable[[Params, jax.Array], jax.Array],
    layout: Layout,
    *,
    micro_rows: int,
  ):
    self._layout, self._micro_rows = layout, micro_rows
    self._run = jax.jit(
      lambda params, tokens_ABT: jax.lax.map(
        lambda tokens_BT: per_token(params, tokens_BT), tokens_ABT
      ),
      out_shardings=layout.replicated,
    )

  def lower(self, params: Params, sequences: int, length: int) -> jax.stages.Lowered:
    """The program for so many rows, ahead of time; ``params`` may be shapes."""
    shape = rows.packed_shape(sequences, length, micro_rows=self._micro_rows)
    tokens = abstract_batch({"tokens": np.int32}, shape, self._layout)["tokens"]
    return self._run.lower(params, tokens)

  def __call__(self, params: Params, batch: Batch) -> np.ndarray:
    tokens = rows.pack(batch, {}, micro_rows=self._micro_rows)["tokens"]
    return rows.unpack(self._per_token(params, tokens), batch)

  def at_last_token(self, params: Params, ids: Sequence[np.ndarray]) -> np.ndarray:
    """fp32 ``[N]``: what ``per_token`` gives at the last token of each of N rows."""
    tokens = rows.pack_ids(ids, micro_rows=self._micro_rows)
    found = self._per_token(params, tokens)
    found = found.reshape(-1, found.shape[-1])
    return np.array([row[len(x) - 1] for row, x in zip(found, ids)], np.float32)

  def _per_token(self, params: Params, tokens_ABT: np.ndarray) -> np.ndarray:
    tokens = place({"tokens": tokens_ABT}, self._layout)["tokens"]
    return multihost.fetch(self._run(params, tokens))
