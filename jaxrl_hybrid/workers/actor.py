"""The actor: generates, scores its own tokens, and learns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_hybrid.algorithms import kl, reduce
from jaxrl_hybrid.algorithms.presets import Algorithm
from jaxrl_hybrid.algorithms.registry import POLICY_LOSSES
from jaxrl_hybrid.models.decoder import Decoder
from jaxrl_hybrid.models.params import Params
from jaxrl_hybrid.ops import experts
from jaxrl_hybrid.rollout.engine import OnFinished
from jaxrl_hybrid.types import Batch, Prompt
from jaxrl_hybrid.workers import rows
from jaxrl_hybrid.workers.adapted import Frozen
from jaxrl_hybrid.workers.generator import Generator, RolloutSettings
from jaxrl_hybrid.workers.scoring import Scorer
from jaxrl_hybrid.workers.stores import RESIDENT, AnyLayout, Offload
from jaxrl_hybrid.workers.style import StyleTeacher, outputs_of
from jaxrl_hybrid.workers.style_loss import ActorOutputs, OutputForm, StyleConstraint
from jaxrl_hybrid.workers.training import (
  Maxima,
  TrainState,
  masked,
  micro_batch,
  mini_batches,
  place,
  summarize,
)

GAP_MEAN = "rollout_train_logprob_diff_mean"
GAP_MAX = "rollout_train_logprob_diff_max"


@dataclasses.dataclass(frozen=True)
class ActorSettings:
  """What the policy update needs to know; names as in the config."""

  policy_loss: str
  loss_agg_mode: str
  loss_scale_factor: float
  clip_ratio_low: float
  clip_ratio_high: float
  clip_ratio_c: float
  entropy_coeff: float
  use_kl_loss: bool
  kl_loss_coef: float
  kl_loss_type: str
  router_aux_loss_coef: float
  ppo_epochs: int
  temperature: float
  logprob_chunk: int
  mini_rows: int
  micro_rows: int
  share_rows: bool
  seed: int
  bypass: bool = False  # old log-probs are the engine's
  ptx_coef: float = 0.0  # of the loss of answers that are given
  style: StyleConstraint | None = None
  # Of some policy losses only.
  clip_cov_ratio: float = 2e-4
  clip_cov_lb: float = 1.0
  clip_cov_ub: float = 5.0
  kl_cov_ratio: float = 2e-4
  ppo_kl_coef: float = 0.1
  sapo_tau_pos: float = 1.0
  sapo_tau_neg: float = 1.05
  dro_beta: float = 0.1

  def form(self, decoder: Decoder) -> OutputForm:
    """Of what the style loss looks at."""
    return OutputForm(
      temperature=self.temperature,
      vocab_size=decoder.spec.vocab_size,
      chunk=self.logprob_chunk,
      shards=decoder.batch_shards,
      dtype=decoder.dtype,
      softcap=decoder.spec.logit_softcap,
      loss_agg_mode=self.loss_agg_mode,
      loss_scale_factor=self.loss_scale_factor,
    )

  def knobs(self, names: Sequence[str]) -> dict[str, float]:
    """Keyword arguments of a policy loss that asks for these."""
    return {name: getattr(self, name) for name in names}


class Actor:
  """The policy: parameters, optimizer, generator and compiled programs."""

  def __init__(
    self,
    decoder: Decoder,
    params: Params,
    layout: AnyLayout,
    generator: Generator,
    settings: ActorSettings,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    *,
    clip_grad: float = math.inf,
    where: Offload = RESIDENT,
    frozen: Frozen | None = None,
  ):
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
    self.teacher: StyleTeacher | None = None  # of settings.style
    self._layout, form = layout.train, settings.form(decoder)

    def outputs(params: Params, micro: dict, given: Any) -> ActorOutputs:
      scored = decoder.score(
        params, micro["tokens"], temperature=form.temperature, chunk=form.chunk
      )
      total = reduce.totals(micro["mask"])
      return outputs_of(decoder, scored, micro, total, given, form=form)

    self._outputs = jax.jit(outputs)
    self.generator = generator
    self._settings = settings
    self._loss = POLICY_LOSSES[settings.policy_loss]
    self.log_probs = self._scorer(decoder, layout, 0)
    # Compiled only for an estimator that asks for it.
    self.collision = self._scorer(decoder, layout, 1, collision=True)

  def _scorer(
    self, decoder: Decoder, layout: AnyLayout, which: int, **options: bool
  ) -> Scorer:
    """Of one of the results of ``decoder.score``."""
    settings = self._settings
    return Scorer(
      lambda params, tokens_BT, positions_BT: decoder.score(
        params,
        tokens_BT,
        positions_BT=positions_BT,
        temperature=settings.temperature,
        chunk=settings.logprob_chunk,
        **options,
      )[which],
      layout.train,
      micro_rows=settings.micro_rows,
      share=settings.share_rows,
    )

  def generate_sequences(
    self,
    prompts: Sequence[Prompt],
    *,
    greedy: bool = False,
    on_finished: OnFinished | None = None,
    settings: RolloutSettings | None = None,
  ) -> Batch:
    """n samples per prompt, or one greedy completion.

    ``on_finished`` is told the rows that have ended while others still decode;
    ``settings`` are those of this call, if they differ from the generator's.
    """
    return self.generator.generate(
      self.state.weights,
      prompts,
      greedy=greedy,
      on_finished=on_finished,
      settings=settings,
    )

  def release_generation_weights(self) -> None:
    """Frees the generation copy; the next generation makes a new one."""
    self.generator.drop_weights()

  def compute_log_probs(self, batch: Batch) -> Batch:
    """Adds ``old_log_probs`` by the training forward pass, and their gap."""
    old = self.log_probs(self.state.weights, batch)
    gap = np.abs(old - batch.rollout_log_probs)[batch.mask]
    metrics = (
      {GAP_MEAN: float(gap.mean()), GAP_MAX: float(gap.max())} if gap.size else {}
    )
    return batch.with_fields(old_log_probs=old, metrics=metrics)

  def compute_old_log_probs(self, batch: Batch, algorithm: Algorithm) -> Batch:
    """Adds ``old_log_probs`` if anything needs them, and the rollout correction."""
    updates = self.updates_per_batch(len(batch))
    if algorithm.recomputes_old_log_probs(updates):
      batch = self.compute_log_probs(batch)
    return algorithm.correction.correct(batch)

  def compute_collision(self, batch: Batch) -> Batch:
    """Adds ``collision``, sums over the vocabulary of squared probabilities."""
    return batch.with_fields(collision=self.collision(self.state.weights, batch))

  def update_policy(
    self, batch: Batch, *, answered: Callable[[], Batch] | None = None
  ) -> dict[str, float]:
    """Runs all epochs and mini-batches; returns ``actor/*`` metrics.

    Args:
      batch: with advantages. Without ``old_log_probs`` it must be one single update:
        then the old log-probs are the current ones, exactly.
      answered: gives, for each update, responses to learn as they are, with the
        weight ``ptx_coef``.
    """
    assert batch.old_log_probs is not None or self.updates_per_batch(len(batch)) == 1, (
      "several updates of a batch need its old_log_probs"
    )
    if batch.policy_mask is not None:
      batch = batch.with_fields(loss_mask=batch.policy_mask)
    self.release_generation_weights()
    settings, pending = self._settings, []
    lr = self._schedule(self.state.updates)
    for chosen in mini_batches(
      len(batch),
      settings.mini_rows,
      settings.ppo_epochs,
      key=(settings.seed, self.state.updates),
    ):
      mini = batch.select(chosen)
      options = dict(
        micro_rows=settings.micro_rows, real=settings.router_aux_loss_coef > 0
      )
      columns = self._columns(mini, first=not pending)
      packed, places = rows.pack(mini, columns, share=self.shares_rows, **options)
      count = places.micro_batches
      if answered is not None:
        more = _as_given(answered(), options)
        packed, count = rows.join((packed, places), more)
      given = ()
      if self.teacher is not None:
        packed |= self.teacher.packed(mini, micro_batches=len(packed["tokens"]))
        given = (self.teacher.given(),)
      pending.append(self.state.step(packed, count, given))
    updates = [wait() for wait in pending]
    metrics = summarize(updates) | {"lr": float(lr)}
    # Before the first update trainer and engine have the same weights.
    gap = {k: updates[0][k] for k in (GAP_MEAN, GAP_MAX) if k in metrics}
    return {f"actor/{k}": v for k, v in metrics.items() if k not in gap} | gap

  def _columns(self, mini: Batch, *, first: bool) -> dict[str, np.ndarray]:
    """``[N, R]`` arrays that the loss of a mini-batch needs."""
    names = ["advantages", "old_log_probs", "ref_log_probs", "is_weights"]
    if GAP_MEAN not in mini.metrics:  # else it is known
      names.append("rollout_log_probs")
    found = {name: getattr(mini, name) for name in names}
    if self.teacher is not None:
      found |= self.teacher.columns(mini)
    if self._loss.select:
      found["selected"] = self._select(mini, first=first)
    return {name: column for name, column in found.items() if column is not None}

  def _select(self, mini: Batch, *, first: bool) -> np.ndarray:
    """Tokens that the policy loss treats in another way: bool ``[N, R]``.

    Chosen of the whole mini-batch by the log-probs of the current weights, which take
    a forward pass of their own, except that of the first update are the old ones if
    these are the trainer's.
    """
    current = old = mini.old_log_probs
    if old is None or not first or self._settings.bypass:
      current = self.log_probs(self.state.weights, mini)
    rng = np.random.default_rng((self._settings.seed, self.state.updates))
    return self._loss.select(
      current,
      current if old is None else old,
      mini.advantages,
      mini.mask,
      rng,
      **self._settings.knobs(self._loss.select_knobs),
    )

  @property
  def shares_rows(self) -> bool:
    """Whether several sequences may share a row of an update."""
    return self._settings.share_rows and self._loss.per_token and self.teacher is None

  def outputs(self, batch: Batch) -> ActorOutputs:
    """What the style loss looks at, of all rows at once."""
    packed, _ = rows.pack(
      batch, self.teacher.columns(batch), micro_rows=self._settings.micro_rows
    )
    packed |= self.teacher.packed(batch)
    together = {k: x.reshape(1, -1, x.shape[-1]) for k, x in packed.items()}
    micro = micro_batch(place(together, self._layout), 0)
    return self._outputs(self.state.weights, micro, self.teacher.given())

  def updates_per_batch(self, sequences: int) -> int:
    """How many optimizer steps ``update_policy`` makes of so many sequences."""
    per_epoch = -(-sequences // self._settings.mini_rows)
    return per_epoch * self._settings.ppo_epochs


def _as_given(batch: Batch, options: dict[str, Any]) -> Any:
  """Packed rows that are in no policy loss; ``ptx`` is 1 / all of their tokens."""
  mask = batch.valid_mask
  weights = (mask / mask.sum()).astype(np.float32)
  outside = batch.with_fields(loss_mask=np.zeros_like(mask))
  return rows.pack(outside, {"ptx": weights}, **options)


def _make_loss(decoder: Decoder, settings: ActorSettings) -> Any:
  policy_loss = POLICY_LOSSES[settings.policy_loss]
  knobs, style = settings.knobs(policy_loss.knobs), settings.style
  form = settings.form(decoder)

  def loss_fn(params: Params, micro: dict, total: reduce.Totals, *given: Any):
    mask_BT, positions_BT = micro["mask"], micro.get(rows.POSITIONS)
    scored = decoder.score(
      params,
      micro["tokens"],
      temperature=settings.temperature,
      chunk=settings.logprob_chunk,
      positions_BT=positions_BT,
      real_BT=micro.get("real"),
    )
    log_probs_BT, entropy_BT, load_L = scored[:3]
    old_BT = micro.get("old_log_probs", jax.lax.stop_gradient(log_probs_BT))
    chosen = {"selected": micro["selected"]} if policy_loss.select else {}
    loss_BT, extra = policy_loss.function(
      log_probs_BT, old_BT, micro["advantages"], mask_BT, **knobs, **chosen
    )
    if "is_weights" in micro:
      loss_BT *= micro["is_weights"]
    share = lambda x_BT: reduce.aggregate(
      x_BT,
      mask_BT,
      total,
      mode=settings.loss_agg_mode,
      scale=settings.loss_scale_factor,
      positions_BT=positions_BT,
    )
    means = {name: masked(x_BT, mask_BT) for name, x_BT in extra.items()}
    means |= {"entropy": masked(entropy_BT, mask_BT)}
    loss = pg_loss = share(loss_BT)
    if settings.entropy_coeff:
      loss -= settings.entropy_coeff * share(entropy_BT)
    if settings.use_kl_loss:
      kl_BT = kl.kl_estimate(
        log_probs_BT, micro["ref_log_probs"], settings.kl_loss_type
      )
      loss += settings.kl_loss_coef * share(kl_BT)
      means["kl_loss"] = masked(kl_BT, mask_BT)
    if "ptx" in micro:
      ptx_loss = -jnp.sum(log_probs_BT * micro["ptx"])
      loss += settings.ptx_coef * ptx_loss
      means["ptx_loss"] = (ptx_loss, 0.0)
    if style is not None:
      outputs = outputs_of(decoder, scored, micro, total, *given, form=form)
      style_BT = style.per_token(outputs)
      loss += style.reduce(style_BT, outputs)
      means["style_loss"] = masked(style_BT, mask_BT)
    if load_L is not None:
      tokens = jnp.sum(mask_BT).astype(jnp.float32)
      balance = experts.balance_loss(load_L)
      loss += settings.router_aux_loss_coef * balance * tokens / total.tokens
      means["router_aux_loss"] = (balance * tokens, tokens)
    maxima: Maxima = {}
    if "rollout_log_probs" in micro:
      means[GAP_MEAN], maxima[GAP_MAX] = _rollout_gap(
        log_probs_BT, micro["rollout_log_probs"], mask_BT
      )
    means["pg_loss"] = (pg_loss, 0.0)
    return loss, (means, maxima)

  return loss_fn


def _rollout_gap(log_probs_BT, rollout_log_probs_BT, mask_BT):
  """|trainer - engine| log-prob: its (sum, weight) and its maximum."""
  gap_BT = jnp.abs(log_probs_BT - rollout_log_probs_BT)
  return masked(gap_BT, mask_BT), jnp.max(jnp.where(mask_BT, gap_BT, 0.0))
