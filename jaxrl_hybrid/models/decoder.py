"""One decoder for all families: training forward, prefill and decode step.

Trainer and engine run the same layer code; they differ in who attends to what
and in the layout of the layers: stacked and scanned for training, a list and
unrolled for generation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_hybrid.models import layers, rope, staged
from jaxrl_hybrid.models import params as params_lib
from jaxrl_hybrid.models.heads import HeadPlan
from jaxrl_hybrid.models.params import Params
from jaxrl_hybrid.models.spec import ModelSpec
from jaxrl_hybrid.ops import attention, experts, logprob, matmul
from jaxrl_hybrid.parallel import pipeline

# (k_BSKA, v_BSKA) of one layer, or what latent attention has in their place; with
# generation stages of one layer of each, stacked on a leading axis
KVCache = tuple[jax.Array, ...]
# (array, logical axis of each dim) -> the array with its sharding pinned
Constrain = Callable[[jax.Array, tuple[str | None, ...]], jax.Array]
# (tree of one layer or of what is outside of the layers, layer=bool) -> the tree
# as products use it
Use = Callable[..., Params]
Mixture = Callable[..., jax.Array]  # experts.batched_mixture

REMAT = ("none", "full", "stage")


def _as_is(params: Params, *, layer: bool) -> Params:
  del layer
  return params


@dataclasses.dataclass(frozen=True)
class Decoder:
  """The static part of a model: what is baked into a compiled program.

  Attributes:
    spec: sizes and switches.
    dtype: of the operands of products; activations between them are fp32.
    attention: ``xla`` or ``cudnn``.
    constrain: pins activations to mesh axes.
    remat: ``full`` recomputes each layer in the backward pass, ``stage`` also
      each tick of the pipeline.
    heads: the attention heads of the weights, if they differ from the model's.
    use: places weights where they are used.
    stages: pp; of a generation decoder p_g.
    microbatches: of the pipeline, in training.
    mixture: runs the experts of each token.
  """

  spec: ModelSpec
  dtype: jnp.dtype
  attention: str
  constrain: Constrain
  remat: str = "full"
  heads: HeadPlan | None = None
  use: Use = _as_is
  stages: int = 1
  microbatches: int = 1
  mixture: Mixture = experts.batched_mixture

  def hidden(
    self,
    params: Params,
    tokens_BT: jax.Array,
    positions_BT: jax.Array | None = None,
  ) -> jax.Array:
    """Final normed hidden states ``[B, T, D]`` of left-aligned rows.

    ``positions_BT``: of rows with several sequences, each from position 0 on.
    """
    return self._hidden(params, tokens_BT, positions_BT, None)[0]

  def _hidden(
    self,
    params: Params,
    tokens_BT: jax.Array,
    positions_BT: jax.Array | None,
    real_BT: jax.Array | None,
  ) -> tuple[jax.Array, experts.Load | None]:
    """``hidden``, and for ``real_BT`` tokens the load of each layer's experts."""
    positions_1T = jnp.arange(tokens_BT.shape[1])[None]
    x_BTD = self._embed(params, tokens_BT)

    def apply(x_BTD, positions_BT, layer_params, local, *, dense=False):
      def attend(q, k, v, **_):
        return self._causal(q, *self._slots(k, v), local, positions_BT), None

      positions = positions_1T if positions_BT is None else positions_BT
      context = dataclasses.replace(
        self._context(positions, local, attend),
        gather=self._sequence(None),
        scatter=self._sequence("seq"),
      )
      layer = params_lib.bind_layer(self.spec, layer_params, dense=dense)
      x_BTD, _, routing = layer(x_BTD, context)
      load = None if real_BT is None or dense else experts.load_of(routing, real_BT)
      return self._pin(x_BTD), load

    def one(x_BTD, positions_BT, layer_params, local):
      layer_params = self.use(layer_params, layer=True)
      applied = functools.partial(apply, x_BTD, positions_BT, layer_params)
      return self._by_kind(local, applied)

    dense = functools.partial(apply, local=self.spec.is_local(0), dense=True)
    if self.remat != "none":
      one = jax.checkpoint(one, prevent_cse=False)
      dense = jax.checkpoint(dense, prevent_cse=False)
    for layer_params in params_lib.dense_layers(params):
      x_BTD, _ = dense(x_BTD, positions_BT, layer_params)

    def body(positions_BT, carry, xs):
      x_BTD, slots = carry
      (values, local), i = xs
      mine = None
      if slots is not None:
        mine, slots = matmul.take_slots(slots, i)
      x_BTD, load = one(x_BTD, positions_BT, matmul.join_slots(values, mine), local)
      return (x_BTD, slots), load

    def stage(layers, x_BTD, positions_BT, slots):
      count = jax.tree.leaves(layers)[0].shape[0]
      step = functools.partial(body, positions_BT)
      return jax.lax.scan(step, (x_BTD, slots), (layers, jnp.arange(count)))

    values, slots, seeds = matmul.split_slots(params["layers"])
    local_L = self.spec.local_stack(jax.tree.leaves(values)[0].shape[0])
    (x_BTD, slots), load_L = self._run(
      stage, (values, jnp.asarray(local_L)), x_BTD, positions_BT, slots
    )
    if slots is not None:
      x_BTD = matmul.start_from(x_BTD, slots, seeds)
    return self._norm(params, x_BTD), load_L

  def prefill(
    self, params: Params, tokens_BP: jax.Array
  ) -> tuple[jax.Array, list[KVCache]]:
    """Hidden states ``[B, P, D]`` and each layer's keys and values of P."""
    positions_1P = jnp.arange(tokens_BP.shape[1])[None]
    x_BTD = self._embed(params, tokens_BP)

    def one(layer_params, kept, x_BTD, active, local, *, dense=False):
      def apply(local):
        def attend(q, k, v, *, keep=None, **_):
          k, v = self._slots(k, v)
          return self._causal(q, k, v, local), (k, v) if keep is None else keep

        layer = params_lib.bind_layer(self.spec, layer_params, dense=dense)
        return layer(x_BTD, self._context(positions_1P, local, attend))[:2]

      x_BTD, cache = self._by_kind(local, apply)
      cache = tuple(x.astype(self.dtype) for x in cache)
      if kept is not None:
        cache = jax.tree.map(functools.partial(jnp.where, active), cache, kept)
      # The cache now: XLA may merge the projections of queries, keys and values and
      # then hold the merged fp32 result of every layer until the last one is done.
      return jax.lax.optimization_barrier((self._pin(x_BTD), cache))

    caches = [None] * self.spec.dense_layers
    caches += [self._empty_cache(*tokens_BP.shape)] * len(params["layers"])
    return self._through(one, params, caches, x_BTD)

  def extend(
    self,
    params: Params,
    tokens_BC: jax.Array,
    start: jax.Array,
    caches: Sequence[KVCache],
  ) -> list[KVCache]:
    """Caches with C tokens more per row, at positions ``start`` to ``start`` + C - 1.

    What the caches have before ``start`` is attended to: ``prefill`` in parts.
    """
    assert self.spec.knows_length, "the rope needs ModelSpec.for_length"
    positions_1C = start + jnp.arange(tokens_BC.shape[1])[None]
    x_BTD = self._embed(params, tokens_BC)

    def one(layer_params, cache, x_BTD, active, local, *, dense=False):
      def write(cache_BSKA, new_BCKA):
        updated = jax.lax.dynamic_update_slice_in_dim(
          cache_BSKA, new_BCKA.astype(self.dtype), start, 1
        )
        return updated if active is None else jnp.where(active, updated, cache_BSKA)

      look = functools.partial(attention.extended, start=start)
      layer = params_lib.bind_layer(self.spec, layer_params, dense=dense)
      x_BTD, cache = self._cached(layer, cache, x_BTD, positions_1C, local, write, look)
      return jax.lax.optimization_barrier((self._pin(x_BTD), cache))

    return self._through(one, params, caches, x_BTD)[1]

  def decode(
    self,
    params: Params,
    tokens_B: jax.Array,
    positions_B: jax.Array,
    caches: Sequence[KVCache],
  ) -> tuple[jax.Array, list[KVCache]]:
    """One token per row: hidden ``[B, D]``, caches with the token written."""
    assert self.spec.knows_length, "the rope needs ModelSpec.for_length"
    x_BTD = self._embed(params, tokens_B[:, None])
    rows = jnp.arange(tokens_B.shape[0])

    def one(layer_params, cache, x_BTD, active, local, *, dense=False):
      # A stage whose turn it is not looks at next to nothing.
      lengths_B = positions_B + 1
      if active is not None:
        lengths_B = jnp.where(active, lengths_B, 1)

      def write(cache_BSKA, new_B1KA):
        new_BKA = new_B1KA[:, 0].astype(self.dtype)
        if active is not None:
          new_BKA = jnp.where(active, new_BKA, cache_BSKA[rows, positions_B])
        return cache_BSKA.at[rows, positions_B].set(new_BKA)

      look = functools.partial(attention.cached, lengths_B=lengths_B)
      layer = params_lib.bind_layer(self.spec, layer_params, dense=dense)
      x_BTD, cache = self._cached(
        layer, cache, x_BTD, positions_B[:, None], local, write, look
      )
      return self._pin(x_BTD), cache

    hidden_B1D, caches = self._through(one, params, caches, x_BTD)
    return hidden_B1D[:, 0], caches

  def head(self, params: Params) -> matmul.Weight:
    """LM head ``[V, D]``; the embedding when tied."""
    tied = self.spec.tie_word_embeddings
    return params["embed" if tied else "lm_head"]["kernel"]

  def logits(self, params: Params, hidden_BD: jax.Array) -> jax.Array:
    """fp32 logits ``[B, V]``, padded vocabulary columns masked."""
    logits_BV = matmul.product(hidden_BD, self.head(params), "bd,vd->bv", self.dtype)
    logits_BV = logprob.cap(logits_BV, self.spec.logit_softcap)
    return logprob.mask_padded_vocab(logits_BV, self.spec.vocab_size)

  def token_log_probs(
    self,
    params: Params,
    tokens_BT: jax.Array,
    positions_BT: jax.Array | None = None,
    *,
    temperature: float,
    chunk: int,
  ) -> tuple[jax.Array, jax.Array]:
    """fp32 (log-prob, entropy) ``[B, T]`` of each token given those before.

    Index t belongs to token t; index 0 is 0, nothing predicts it. Neither does
    anything the first token of each sequence of a shared row, whose numbers have no
    meaning.
    """
    return self.score(
      params, tokens_BT, temperature=temperature, chunk=chunk, positions_BT=positions_BT
    )[:2]

  def score(
    self,
    params: Params,
    tokens_BT: jax.Array,
    *,
    temperature: float,
    chunk: int,
    positions_BT: jax.Array | None = None,
    real_BT: jax.Array | None = None,
    collision: bool = False,
  ) -> tuple[jax.Array, jax.Array, experts.Load | None]:
    """``token_log_probs``, or of p^2 for the entropy, and experts' load ``[L, E]``."""
    params = self._outer(params)
    hidden_BTD, load_L = self._hidden(params, tokens_BT, positions_BT, real_BT)
    hidden_BTD = self.constrain(hidden_BTD, ("batch", None, None))
    log_probs, entropy = logprob.token_log_probs(
      hidden_BTD[:, :-1],
      self.head(params),
      tokens_BT[:, 1:],
      temperature=temperature,
      vocab_size=self.spec.vocab_size,
      chunk=chunk,
      dtype=self.dtype,
      softcap=self.spec.logit_softcap,
      collision=collision,
    )
    return _shift_right(log_probs), _shift_right(entropy), load_L

  def scores(
    self, params: Params, tokens_BT: jax.Array, positions_BT: jax.Array | None = None
  ) -> jax.Array:
    """fp32 scores ``[B, T]``: index t is that of the sequence up to token t."""
    params = self._outer(params)
    hidden_BTD = self.hidden(params, tokens_BT, positions_BT)
    return jnp.einsum("btd,d->bt", hidden_BTD, params["value_head"]["kernel"][0])

  def values(
    self, params: Params, tokens_BT: jax.Array, positions_BT: jax.Array | None = None
  ) -> jax.Array:
    """fp32 values ``[B, T]``: index t is the value before token t."""
    return _shift_right(self.scores(params, tokens_BT, positions_BT)[:, :-1])

  def _cached(self, layer, cache, x_BTD, positions_BT, local, write, look):
    """A layer that writes keys and values and then looks at them: (x, cache)."""

    def apply(local):
      def attend(q, k, v, *, v_dim=None, **_):
        new = self._slots(*(x for x in (k, v) if x is not None))
        kept = tuple(write(old, x) for old, x in zip(cache, new, strict=True))
        form = self._form(local)
        out = look(q, kept[0], kept[-1], implementation=self.attention, form=form)
        return out[..., :v_dim], kept

      context = self._context(positions_BT, local, attend)
      return layer(x_BTD, dataclasses.replace(context, decoding=True))[:2]

    return self._by_kind(local, apply)

  def _run(self, stage: pipeline.Stage, values, x_BTD, positions_BT, slots):
    """((x, slots), load); stages of a pipeline do not tell their load."""
    if self.stages == 1:
      return stage(values, x_BTD, positions_BT, slots)
    unloaded = lambda *args: stage(*args)[0]
    if self.remat == "stage":
      unloaded = jax.checkpoint(unloaded, prevent_cse=False)
    return pipeline.run(
      unloaded,
      values,
      x_BTD,
      positions_BT,
      slots,
      stages=self.stages,
      microbatches=self.microbatches,
      pin=self._pin,
      pin_stages=lambda x: self.constrain(x, ("layers", "batch", "seq", None)),
    ), None

  def _outer(self, params: Params) -> Params:
    """What is outside of the layers, placed for use."""
    outer = {name: leaf for name, leaf in params.items() if name != "layers"}
    return {**self.use(outer, layer=False), "layers": params["layers"]}

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

  def _through(self, one, params, caches, x_BTD):
    """All layers of a generation model: (normed hidden states, caches)."""
    first, rest = [], caches[self.spec.dense_layers :]
    for i, layer_params in enumerate(params_lib.dense_layers(params)):
      # In front of those with experts; they are on every stage.
      local = self.spec.is_local(i)
      x_BTD, cache = one(layer_params, caches[i], x_BTD, None, local, dense=True)
      first.append(cache)
    kinds = self.spec.local_entries(len(rest), self.stages)
    x_BTD, rest = staged.through(
      one, params["layers"], rest, kinds, x_BTD, stages=self.stages
    )
    return self._norm(params, x_BTD), first + rest

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

  def _sequence(self, axis: str | None) -> Callable[[jax.Array], jax.Array]:
    """Pins T to an axis, and T of the gradient to the other one."""
    pin = lambda axis: lambda x: self.constrain(x, ("batch", axis, None))
    return layers.two_way(pin(axis), pin("seq" if axis is None else None))

  def _empty_cache(self, rows: int, length: int) -> KVCache | None:
    """What stages that did not run yet have in place of keys and values."""
    if self.stages == 1:
      return None
    axes = ("layers", "batch", None, "heads", None)
    shape = (self.stages, rows, length)
    return tuple(
      self.constrain(jnp.zeros((*shape, *dims), self.dtype), axes)
      for dims in self.cache_dims()
    )

  def cache_dims(self) -> list[tuple[int, int]]:
    """(heads, width) of what is cached of a token: keys and values, or a latent."""
    if self.spec.latent:
      return [(1, self.spec.latent.kv_rank + self.spec.latent.rope_dim)]
    heads = self.heads.slots if self.heads else self.spec.num_kv_heads
    return [(heads, self.spec.head_dim)] * 2

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


def _shift_right(x_BT: jax.Array) -> jax.Array:
  return jnp.pad(x_BT, ((0, 0), (1, 0)))
