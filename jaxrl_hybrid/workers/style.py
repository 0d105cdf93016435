"""The frozen reference of a style loss: what an update is given of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_hybrid.algorithms import reduce
from jaxrl_hybrid.errors import ConfigError
from jaxrl_hybrid.models.decoder import Decoder
from jaxrl_hybrid.models.params import Params
from jaxrl_hybrid.ops.logprob import Scored
from jaxrl_hybrid.parallel import multihost
from jaxrl_hybrid.parallel.rules import Layout
from jaxrl_hybrid.types import Batch, Prompt
from jaxrl_hybrid.workers import rows
from jaxrl_hybrid.workers.reference import Reference
from jaxrl_hybrid.workers.style_loss import (
  EMBEDDING,
  ActorOutputs,
  OutputForm,
  StyleConstraint,
)
from jaxrl_hybrid.workers.training import abstract_batch, place

TOKENS, AT = "style_tokens", "style_at"


class StyleTeacher:
  """What the loss of a mini-batch needs beside the actor's own columns.

  Args:
    constraint: the loss.
    given: the reference's weights on the device, or the anchor with ``embedding``.
    styled: ids of a prompt with the style in front.
    reference: whose weights they are.
    longest: most tokens that the model reads.
    micro_rows: rows per micro-batch, over all batch shards.
  """

  def __init__(
    self,
    constraint: StyleConstraint,
    given: Callable[[], Any],
    styled: Callable[[Prompt], np.ndarray],
    reference: Reference | None = None,
    *,
    longest: float,
    micro_rows: int,
  ):
    self.constraint, self.given, self.reference = constraint, given, reference
    self._styled, self._longest, self._micro_rows = styled, longest, micro_rows

  def columns(self, mini: Batch) -> dict[str, np.ndarray]:
    """``[N, R]``: where in the styled row the state before each token is."""
    if self.constraint.method == EMBEDDING:
      return {}
    starts_N = np.array([len(ids) for ids in self._prompts(mini)], np.int32)
    width = mini.response_ids.shape[1]
    return {AT: starts_N[:, None] - 1 + np.arange(width, dtype=np.int32)}

  def packed(
    self, mini: Batch, *, micro_batches: int | None = None
  ) -> dict[str, np.ndarray]:
    """``[A, B, U]``: the styled prompts with the actor's responses.

    Args:
      mini: rows that share none.
      micro_batches: A, if more than these rows need; the others come behind.

    Raises:
      ConfigError: the model does not read so many tokens.
    """
    if self.constraint.method == EMBEDDING:
      return {}
    whole = [
      np.concatenate([ids, mini.response(i)])
      for i, ids in enumerate(self._prompts(mini))
    ]
    most = max(map(len, whole))
    if most > self._longest:
      raise ConfigError(
        f"actor.style.reference_texts: with them a row has {most} tokens, but the "
        f"model reads {self._longest}; shorten them or data.max_response_length"
      )
    packed, _ = rows.pack_ids(whole, micro_rows=self._micro_rows)
    tokens = packed["tokens"]
    more = 0 if micro_batches is None else micro_batches - len(tokens)
    return {TOKENS: np.pad(tokens, ((0, more), (0, 0), (0, 0)))}

  def abstract(
    self, shape: tuple[int, int, int], longer: tuple[int, int, int], layout: Layout
  ) -> dict[str, jax.ShapeDtypeStruct]:
    """``columns`` at ``[A, B, T]`` and ``packed`` at ``[A, B, U]``, as shapes."""
    if self.constraint.method == EMBEDDING:
      return {}
    at = abstract_batch({AT: np.int32}, shape, layout)
    return at | abstract_batch({TOKENS: np.int32}, longer, layout)

  def _prompts(self, mini: Batch) -> list[np.ndarray]:
    found: dict[int, np.ndarray] = {}
    for prompt in mini.prompts:
      if prompt.draw_id not in found:
        found[prompt.draw_id] = self._styled(prompt)
    return [found[prompt.draw_id] for prompt in mini.prompts]


def outputs_of(
  decoder: Decoder,
  scored: Scored,
  micro: dict[str, jax.Array],
  total: reduce.Totals,
  given: Any,
  *,
  form: OutputForm,
) -> ActorOutputs:
  """The outputs of a micro-batch; ``given`` are the reference's weights or anchor."""
  teacher = head = None
  if TOKENS in micro:
    known = decoder.score(
      given, micro[TOKENS], temperature=form.temperature, chunk=form.chunk
    )
    teacher = jnp.take_along_axis(known.hidden_BTD, micro[AT][..., None], 1)
    head, given = known.head_VD, None
  return ActorOutputs(
    hidden_BTD=jnp.pad(scored.hidden_BTD[:, :-1], ((0, 0), (1, 0), (0, 0))),
    head_VD=scored.head_VD,
    mask_BT=micro["mask"],
    total=total,
    teacher_BTD=teacher,
    teacher_head_VD=head,
    anchor_D=given,
    form=form,
  )


def anchor_of(
  decoder: Decoder,
  weights: Params,
  texts: Sequence[np.ndarray],
  layout: Layout,
  *,
  micro_rows: int,
) -> jax.Array:
  """fp32 ``[D]``: the mean over texts of their mean final hidden states.

  Args:
    decoder: of the reference.
    weights: its weights.
    texts: token ids of each.
    layout: the training layout.
    micro_rows: rows per micro-batch, over all batch shards.
  """
  packed, _ = rows.pack_ids(texts, micro_rows=micro_rows)
  tokens = packed["tokens"]
  lengths = np.zeros(tokens.shape[:2], np.int32)
  lengths.reshape(-1)[: len(texts)] = [len(ids) for ids in texts]

  def mean(weights: Params, tokens_ABT: jax.Array, lengths_AB: jax.Array) -> jax.Array:
    def one(xs):
      tokens_BT, lengths_B = xs
      hidden_BTD = decoder.score(
        weights, tokens_BT, temperature=1.0, chunk=tokens_BT.shape[1]
      ).hidden_BTD.astype(jnp.float32)
      mask_BT = jnp.arange(tokens_BT.shape[1]) < lengths_B[:, None]
      mean_BD = jnp.einsum("btd,bt->bd", hidden_BTD, mask_BT.astype(jnp.float32))
      return jnp.sum(mean_BD / jnp.maximum(lengths_B, 1)[:, None], 0)

    return jnp.sum(jax.lax.map(one, (tokens_ABT, lengths_AB)), 0) / len(texts)

  program = jax.jit(mean, out_shardings=layout.replicated)
  on_mesh = place({TOKENS: tokens}, layout)[TOKENS]
  return program(weights, on_mesh, multihost.put(lengths, layout.replicated))
