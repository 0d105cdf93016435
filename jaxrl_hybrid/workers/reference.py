"""The reference policy: frozen weights, log-probs only."""

from __future__ import annotations

from jaxrl_hybrid.models.decoder import Decoder
from jaxrl_hybrid.models.params import Params
from jaxrl_hybrid.parallel import offload
from jaxrl_hybrid.parallel.rules import Layout
from jaxrl_hybrid.types import Batch
from jaxrl_hybrid.workers.scoring import Scorer


class Reference:
  """The initial actor's weights, kept while the actor moves on.

  Args:
    decoder: the actor's.
    weights: the actor's initial weights; shared with it until its first update.
    layout: the training layout.
    temperature: of the log-probs, the rollout's.
    chunk: tokens of a device whose logits exist at a time.
    micro_rows: rows per micro-batch, over all batch shards.
    share_rows: whether sequences may share a row.
    on_host: keep the weights in host memory between uses.
    shared: the weights are the base of the actor's adapters, and stay so.
  """

  def __init__(
    self,
    decoder: Decoder,
    weights: Params,
    layout: Layout,
    *,
    temperature: float,
    chunk: int,
    micro_rows: int,
    share_rows: bool = False,
    on_host: bool = False,
    shared: bool = False,
  ):
    self.shared = shared
    self._on_host = on_host
    self.weights = offload.to_host(weights) if on_host else weights
    self.log_probs = Scorer(
      lambda params, tokens_BT, positions_BT: decoder.token_log_probs(
        params, tokens_BT, positions_BT, temperature=temperature, chunk=chunk
      )[0],
      layout,
      micro_rows=micro_rows,
      share=share_rows,
    )

  def device_weights(self) -> Params:
    """On the device, for as long as the caller keeps them."""
    return offload.to_device(self.weights) if self._on_host else self.weights

  def compute_log_probs(self, batch: Batch) -> Batch:
    """Adds ``ref_log_probs``."""
    return batch.with_fields(ref_log_probs=self.log_probs(self.device_weights(), batch))
