"""``StyleConstraint``: a loss that pulls the actor toward a style."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_hybrid.algorithms import reduce
from jaxrl_hybrid.errors import ConfigError
from jaxrl_hybrid.ops.divergence import kl_divergence
from jaxrl_hybrid.ops.logprob import positions
from jaxrl_hybrid.ops.matmul import Weight

DISTILL, EMBEDDING = METHODS = ("distill", "embedding")


@dataclasses.dataclass(frozen=True)
class OutputForm:
  """The static part of ``ActorOutputs``; names as in config and ``ops.logprob``.

  Attributes:
    chunk: tokens of a device whose logits exist at a time.
    shards: parts of a program's rows that are on devices of their own.
  """

  temperature: float
  vocab_size: int
  chunk: int
  shards: int
  dtype: Any
  softcap: float | None
  loss_agg_mode: str
  loss_scale_factor: float


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=(
    "hidden_BTD",
    "head_VD",
    "mask_BT",
    "total",
    "teacher_BTD",
    "teacher_head_VD",
    "anchor_D",
  ),
  meta_fields=("form",),
)
@dataclasses.dataclass(frozen=True)
class ActorOutputs:
  """What a style loss looks at: B rows of a mini-batch.

  Attributes:
    hidden_BTD: final hidden states of the actor; index t is before token t.
    head_VD: the actor's LM head.
    mask_BT: bool, response tokens in the loss.
    total: of the whole mini-batch.
    teacher_BTD: the same of the reference that reads the style before the prompt, with
      ``distill``.
    teacher_head_VD: the reference's LM head.
    anchor_D: what texts of the style look like to the reference, with ``embedding``.
    form: what is not an array.
  """

  hidden_BTD: jax.Array
  head_VD: Weight
  mask_BT: jax.Array
  total: reduce.Totals
  teacher_BTD: jax.Array | None
  teacher_head_VD: Weight | None
  anchor_D: jax.Array | None
  form: OutputForm


@dataclasses.dataclass(frozen=True)
class StyleConstraint:
  """A differentiable loss toward a style that texts describe or show.

  ``distill`` (context distillation, Askell et al. 2021, arXiv:2112.00861): the KL
  divergence from the actor to the frozen reference that is told the texts,
  ``KL(actor(.|x, y<t) || reference(.|texts, x, y<t))`` at every response token, over
  the whole vocabulary. ``embedding``: ``1 - cos(e, a)`` of each response, e the mean of
  the actor's final hidden states and a that of the reference over the texts; for
  samples of a style that no instruction describes.

      style_loss = StyleConstraint(reference_texts=["Be brief."], weight=0.3)
      trainer = Trainer(actor, critic, style=style_loss)
      total_loss = actor_loss + critic_loss + style_loss.compute(actor_outputs)

  Attributes:
    reference_texts: instructions, or with ``embedding`` samples.
    weight: of the loss beside the policy's.
    method: ``distill`` or ``embedding``.
  """

  reference_texts: Sequence[str]
  weight: float = 0.3
  method: str = DISTILL

  def __post_init__(self) -> None:
    """Checks the arguments; raises a ConfigError."""
    texts = self.reference_texts
    good = not isinstance(texts, str) and all(isinstance(x, str) for x in texts)
    if not good or not texts or not all(x.strip() for x in texts):
      raise ConfigError(
        f"reference_texts: expected a list of texts, none of them empty, got {texts!r}"
      )
    if not 0 < self.weight < math.inf:
      raise ConfigError(f"weight: expected > 0 and finite, got {self.weight}")
    if self.method not in METHODS:
      raise ConfigError(f"method: expected one of {METHODS}, got {self.method!r}")
    object.__setattr__(self, "reference_texts", tuple(texts))

  def compute(self, actor_outputs: ActorOutputs) -> jax.Array:
    """fp32 ``[]``: these rows' share of the loss, times the weight.

    It is reduced as the policy's loss is (``actor.loss_agg_mode``, over the totals of
    the mini-batch), and differentiable in the actor's arrays alone.

    Args:
      actor_outputs: of ``HFModelWrapper.outputs``, or inside of an update.
    """
    return self.reduce(self.per_token(actor_outputs), actor_outputs)

  def per_token(self, outputs: ActorOutputs) -> jax.Array:
    """fp32 ``[B, T]``, unreduced and without the weight."""
    if self.method == EMBEDDING:
      return _distance(outputs)
    form = outputs.form
    return kl_divergence(
      outputs.hidden_BTD,
      outputs.head_VD,
      *jax.lax.stop_gradient((outputs.teacher_BTD, outputs.teacher_head_VD)),
      temperature=form.temperature,
      vocab_size=form.vocab_size,
      chunk=positions(len(outputs.mask_BT), form.chunk, form.shards),
      dtype=form.dtype,
      softcap=form.softcap,
    )

  def reduce(self, loss_BT: jax.Array, outputs: ActorOutputs) -> jax.Array:
    """The loss of ``per_token``."""
    form = outputs.form
    return self.weight * reduce.aggregate(
      loss_BT,
      outputs.mask_BT,
      outputs.total,
      mode=form.loss_agg_mode,
      scale=form.loss_scale_factor,
    )


def _distance(outputs: ActorOutputs) -> jax.Array:
  """1 - cos of each row's mean hidden state and the anchor, on all of its tokens."""
  hidden_BTD = outputs.hidden_BTD.astype(jnp.float32)
  mask_BT1 = outputs.mask_BT[..., None]
  mean_BD = jnp.sum(jnp.where(mask_BT1, hidden_BTD, 0.0), 1)
  mean_BD /= jnp.maximum(jnp.sum(mask_BT1, 1), 1)
  anchor_D = jax.lax.stop_gradient(outputs.anchor_D)
  norm_B = jnp.sqrt(jnp.sum(mean_BD**2, -1) + 1e-12)  # rows without tokens: 0 / 0
  cosine_B = mean_BD @ anchor_D / norm_B / jnp.linalg.norm(anchor_D)
  return jnp.broadcast_to(1.0 - cosine_B[:, None], outputs.mask_BT.shape)
