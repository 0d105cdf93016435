"""What trainer and engine share of a decoder: the static part, and its pieces."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_hybrid.models import layers, rope
from jaxrl_hybrid.models.heads import HeadPlan
from jaxrl_hybrid.models.params import Params
from jaxrl_hybrid.models.spec import ModelSpec
from jaxrl_hybrid.ops import attention, experts, logprob, matmul

# (array, logical axis of each dim) -> the array with its sharding pinned
Constrain = Callable[[jax.Array, tuple[str | None, ...]], jax.Array]

# (tree of one layer or of what is outside of the layers, layer=bool) -> the tree
# as products use it
Use = Callable[..., Params]
Mixture = Callable[..., jax.Array]  # experts.batched_mixture


def _as_is(params: Params, *, layer: bool) -> Params:
  del layer
  return params


@dataclasses.dataclass(frozen=True)
class Transformer:
  """The static part of a model: what is baked into a compiled program.

  Attributes:
    spec: sizes and switches.
    dtype: of the operands of products; activations between them are fp32.
    attention: ``xla`` or ``cudnn``.
    constrain: pins activations to mesh axes.
    remat: of ``decoder.REMAT``.
    inner: of what column-parallel products give in training.
    heads: the attention heads of the weights, if they differ from the model's.
    use: places weights where they are used.
    stages: pp; of a generation decoder p_g.
    microbatches: of the pipeline, in training.
    mixture: runs the experts of each token.
    batch_shards: parts of a program's rows that are on devices of their own.
  """

  spec: ModelSpec
  dtype: jnp.dtype
  attention: str
  constrain: Constrain
  remat: str = "full"
  inner: jnp.dtype = jnp.float32
  heads: HeadPlan | None = None
  use: Use = _as_is
  stages: int = 1
  microbatches: int = 1
  mixture: Mixture = experts.batched_mixture
  batch_shards: int = 1

  def head(self, params: Params) -> matmul.Weight:
    """LM head ``[V, D]``; the embedding when tied."""
    tied = self.spec.tie_word_embeddings
    return params["embed" if tied else "lm_head"]["kernel"]

  def logits(self, params: Params, hidden_BD: jax.Array) -> jax.Array:
    """fp32 logits ``[B, V]``, padded vocabulary columns masked."""
    logits_BV = matmul.product(hidden_BD, self.head(params), "bd,vd->bv", self.dtype)
    logits_BV = logprob.cap(logits_BV, self.spec.logit_softcap)
    return logprob.mask_padded_vocab(logits_BV, self.spec.vocab_size)

  def cache_dims(self) -> list[tuple[int, int]]:
    """(heads, width) of what is cached of a token: keys and values, or a latent."""
    if self.spec.latent:
      return [(1, self.spec.latent.kv_rank + self.spec.latent.rope_dim)]
    heads = self.heads.slots if self.heads else self.spec.num_kv_heads
    return [(heads, self.spec.head_dim)] * 2

  def _embed(self, params: Params, tokens_BT: jax.Array) -> jax.Array:
    x_BTD = matmul.lookup(params["embed"]["kernel"], tokens_BT, self.dtype)
    return self._pin(x_BTD * self.spec.embed_scale)

  def _context(self, positions_BT, local: bool, attend) -> layers.Context:
    spec = self.spec
    of_layer = spec.local_rope if local and spec.local_rope else spec.rope
    cos, sin = rope.cos_sin(of_layer, spec.rope_dim, positions_BT)
    return layers.Context(cos, sin, attend, self.dtype, mixture=self.mixture)

  def _by_kind(self, local: bool | jax.Array, apply: Callable[[bool], Any]) -> Any:
    """``apply(local)`` with a Python bool: one of two branches if it is traced."""
    if isinstance(local, bool):
      return apply(local)
    if not self.spec.mixes_windows:
      return apply(self.spec.is_local(0))
    return jax.lax.cond(local, lambda: apply(True), lambda: apply(False))

  def _form(self, local: bool) -> attention.Form:
    return attention.Form(
      scale=self.spec.attention_scale,
      softcap=self.spec.attention_softcap,
      window=self.spec.window if local else None,
    )

  def _slots(self, *kv_BTKA):
    if self.heads is None:
      return kv_BTKA
    axes = ("batch", None, "heads", None)
    return tuple(self.constrain(self.heads.fill_slots(x), axes) for x in kv_BTKA)

  def _causal(self, q, k, v, local: bool, positions_BT: jax.Array | None = None):
    return attention.causal(
      q,
      k,
      v,
      dtype=self.dtype,
      implementation=self.attention,
      form=self._form(local),
      positions_BT=positions_BT,
    )

  def _norm(self, params, x_BTD):
    scale, spec = params["norm"]["scale"], self.spec
    return layers.rms_norm(x_BTD, scale, spec.rms_norm_eps, offset=spec.norm_offset)

  def _pin(self, x_BTD):
    return self.constrain(x_BTD, ("batch", "seq", None))
