"""The critic: a value for every token, learned from returns."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import optax

from jaxrl_hybrid.algorithms import losses, reduce
from jaxrl_hybrid.algorithms.running import RunningMoments
from jaxrl_hybrid.models.decoder import Decoder
from jaxrl_hybrid.models.params import Params
from jaxrl_hybrid.types import Batch
from jaxrl_hybrid.workers import rows
from jaxrl_hybrid.workers.adapted import Frozen
from jaxrl_hybrid.workers.scoring import Scorer
from jaxrl_hybrid.workers.stores import RESIDENT, AnyLayout, Offload
from jaxrl_hybrid.workers.training import TrainState, masked, mini_batches, summarize


@dataclasses.dataclass(frozen=True)
class CriticSettings:
  """What the value update needs to know; names as in the config."""

  cliprange_value: float
  loss_agg_mode: str
  loss_scale_factor: float
  ppo_epochs: int
  mini_rows: int
  micro_rows: int
  share_rows: bool
  seed: int
  normalize_values: bool = False


class Critic:
  """A decoder with a value head, its optimizer and its compiled programs.

  ``name`` is that of its metrics.

  With ``normalize_values`` the head gives values at mean 0 and std 1 of all returns
  so far (``moments``); values, returns and their loss are told in the rewards' units
  outside of this class, and the loss in the head's.
  """

  def __init__(
    self,
    decoder: Decoder,
    params: Params,
    layout: AnyLayout,
    settings: CriticSettings,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    *,
    clip_grad: float = math.inf,
    where: Offload = RESIDENT,
    frozen: Frozen | None = None,
    name: str = "critic",
  ):
    self.name = name
    self.state = TrainState(
      params,
      optimizer,
      layout,
      _make_loss(decoder, settings),
      clip_grad=clip_grad,
      where=where,
      frozen=frozen,
      seed=settings.seed,
    )
    self._schedule = schedule
    self._settings = settings
    self.moments = RunningMoments()
    self.values = Scorer(
      decoder.values,
      layout.train,
      micro_rows=settings.micro_rows,
      share=settings.share_rows,
    )

  def compute_values(self, batch: Batch) -> Batch:
    """Adds ``values``: index t is the value before response token t."""
    values = self.values(self.state.weights, batch)
    self.state.store.rest()
    if self._settings.normalize_values:
      values = self.moments.denormalize(values)
    return batch.with_fields(values=values)

  def update(self, batch: Batch) -> dict[str, float]:
    """Runs all epochs and mini-batches; returns ``<name>/*`` metrics."""
    settings, pending = self._settings, []
    targets = {"returns": batch.returns, "old_values": batch.values}
    if settings.normalize_values:
      self.moments.update(batch.returns[batch.mask])
      targets = {name: self.moments.normalize(x) for name, x in targets.items()}
    lr = self._schedule(self.state.updates)
    for chosen in mini_batches(
      len(batch),
      settings.mini_rows,
      settings.ppo_epochs,
      key=(settings.seed, self.state.updates),
    ):
      columns = {name: x[chosen] for name, x in targets.items()}
      packed, places = rows.pack(
        batch.select(chosen),
        columns,
        micro_rows=settings.micro_rows,
        share=settings.share_rows,
      )
      pending.append(self.state.step(packed, places.micro_batches))
    metrics = summarize([wait() for wait in pending]) | {"lr": float(lr)}
    self.state.store.rest()
    return {f"{self.name}/{name}": value for name, value in metrics.items()}


def _make_loss(decoder: Decoder, settings: CriticSettings):
  def loss_fn(params: Params, micro: dict[str, np.ndarray], total: reduce.Totals):
    mask_BT, positions_BT = micro["mask"], micro.get(rows.POSITIONS)
    values_BT = decoder.values(params, micro["tokens"], positions_BT)
    loss_BT, extra = losses.value_loss(
      values_BT,
      micro["returns"],
      micro["old_values"],
      cliprange=settings.cliprange_value,
    )
    loss = reduce.aggregate(
      loss_BT,
      mask_BT,
      total,
      mode=settings.loss_agg_mode,
      scale=settings.loss_scale_factor,
      positions_BT=positions_BT,
    )
    means = {name: masked(x_BT, mask_BT) for name, x_BT in extra.items()}
    means |= {"vpred_mean": masked(values_BT, mask_BT), "vf_loss": (loss, 0.0)}
    return loss, (means, {})

  return loss_fn
