"""From ``actor.style`` of a config to the loss, and to the reference behind it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from jaxrl_hybrid.data.styled import StyledPrompts
from jaxrl_hybrid.data.template import PromptEncoder
from jaxrl_hybrid.errors import ConfigError
from jaxrl_hybrid.models.decoder import Decoder
from jaxrl_hybrid.parallel import abstract
from jaxrl_hybrid.run_plan import Plan
from jaxrl_hybrid.workers.reference import Reference
from jaxrl_hybrid.workers.style import StyleTeacher, anchor_of
from jaxrl_hybrid.workers.style_loss import DISTILL, StyleConstraint


def constraint_of(config: ConfigDict) -> StyleConstraint | None:
  """The style loss of a config, if it has texts.

  Raises:
    ConfigError: a wrong value.
  """
  style = config.actor.style
  if not style.reference_texts:
    return None
  return StyleConstraint(style.reference_texts, style.weight, style.method)


def make_teacher(
  plan: Plan, decoder: Decoder, reference: Reference, encoder: PromptEncoder | None
) -> StyleTeacher:
  """What the actor's updates are given of the style.

  Args:
    plan: of the run; it has a style.
    decoder: of the reference.
    reference: the actor as it is now, frozen; its weights may be shapes.
    encoder: of the prompts.

  Raises:
    ConfigError: there is no tokenizer.
  """
  constraint = constraint_of(plan.config)
  if encoder is None:
    raise ConfigError(
      "actor.style.reference_texts: expected a model with a tokenizer, got none"
    )
  shared = dict(longest=plan.longest_row, micro_rows=plan.sizes.micro_sequences)
  if constraint.method == DISTILL:
    prompts = StyledPrompts(encoder, constraint.reference_texts)
    return StyleTeacher(
      constraint, reference.device_weights, prompts.ids, reference, **shared
    )
  texts = list(constraint.reference_texts)
  anchor = jax.ShapeDtypeStruct(
    (plan.source.spec.hidden_size,), jnp.float32, sharding=plan.train_layout.replicated
  )
  if not abstract.is_abstract(reference.weights):
    anchor = anchor_of(
      decoder,
      reference.device_weights(),
      encoder.tokenize(texts, texts),
      plan.train_layout,
      micro_rows=plan.sizes.micro_sequences,
    )
  return StyleTeacher(constraint, lambda: anchor, lambda prompt: prompt.ids, **shared)


def extra_tokens(config: ConfigDict, encoder: PromptEncoder, row: object) -> int:
  """How many tokens the style adds to a prompt, told by one row of the data."""
  constraint = constraint_of(config)
  if constraint is None or constraint.method != DISTILL:
    return 0
  styled = StyledPrompts(encoder, constraint.reference_texts).ids(row)
  return len(styled) - len(row.ids)
