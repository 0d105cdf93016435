"""The reference policy: frozen weights, log-probs only."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_hybrid.models.decoder import Decoder
from jaxrl_hybrid.models.params import Params, compute_copy
from jaxrl_hybrid.parallel.rules import Layout
from jaxrl_hybrid.types import Batch
from jaxrl_hybrid.workers.scoring import Scorer


class Reference:
  """A copy of the initial actor in the compute dtype.

  Args:
    decoder: the actor's.
    params: the actor's initial parameters; they are copied.
    layout: the training layout.
    temperature: of the log-probs, the rollout's.
    chunk: positions whose logits exist at a time.
    micro_rows: rows per micro-batch, over all batch shards.
  """

  def __init__(
    self,
    decoder: Decoder,
    params: Params,
    layout: Layout,
    *,
    temperature: float,
    chunk: int,
    micro_rows: int,
  ):
    shardings = jax.tree.map(lambda x: x.sharding, params)
    # Donation of the actor's parameters must not take leaves that need no cast.
    copy = lambda params: jax.tree.map(jnp.copy, compute_copy(params, decoder.dtype))
    self._params = jax.jit(copy, out_shardings=shardings)(params)
    self._log_probs = Scorer(
      lambda params, tokens_BT: decoder.token_log_probs(
        params, tokens_BT, temperature=temperature, chunk=chunk
      )[0],
      layout,
      micro_rows=micro_rows,
    )

  def compute_log_probs(self, batch: Batch) -> Batch:
    """Adds ``ref_log_probs``."""
    return batch.with_fields(ref_log_probs=self._log_probs(self._params, batch))
