"""One decoder for all families: training forward, prefill and decode step.

Trainer and engine run the same layer code; they differ in who attends to what
and in the layout of the layers: stacked and scanned for training, a list and
unrolled for generation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxrl_hybrid.models import layers, rope, staged
from jaxrl_hybrid.models import params as params_lib
from jaxrl_hybrid.models.heads import HeadPlan
from jaxrl_hybrid.models.params import Params
from jaxrl_hybrid.models.spec import ModelSpec
from jaxrl_hybrid.ops import attention, logprob, matmul
from jaxrl_hybrid.parallel import pipeline

# (k_BSKA, v_BSKA) of one layer; with generation stages of one layer of each,
# stacked on a leading axis
KVCache = tuple[jax.Array, jax.Array]
# (array, logical axis of each dim) -> the array with its sharding pinned
Constrain = Callable[[jax.Array, tuple[str | None, ...]], jax.Array]

# (tree of one layer or of what is outside of the layers, layer=bool) -> the tree
# as products use it
Use = Callable[..., Params]

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

  def hidden(self, params: Params, tokens_BT: jax.Array) -> jax.Array:
    """Final normed hidden states ``[B, T, D]`` of left-aligned rows."""
    positions_1T = jnp.arange(tokens_BT.shape[1])[None]
    x_BTD, cos, sin = self._embed(params, tokens_BT, positions_1T)

    def attend(q, k, v):
      return self._causal(q, *self._slots(k, v)), None

    context = layers.Context(
      cos, sin, attend, self.dtype, self._sequence(None), self._sequence("seq")
    )

    def one(x_BTD, layer_params):
      layer_params = self.use(layer_params, layer=True)
      layer = params_lib.bind_layer(self.spec, layer_params)
      x_BTD, _ = layer(x_BTD, context)
      return self._pin(x_BTD)

    if self.remat != "none":
      one = jax.checkpoint(one, prevent_cse=False)

    def body(carry, xs):
      x_BTD, slots = carry
      values, i = xs
      mine = None
      if slots is not None:
        mine, slots = matmul.take_slots(slots, i)
      return (one(x_BTD, matmul.join_slots(values, mine)), slots), None

    def stage(values, x_BTD, slots):
      count = jax.tree.leaves(values)[0].shape[0]
      return jax.lax.scan(body, (x_BTD, slots), (values, jnp.arange(count)))[0]

    values, slots, seeds = matmul.split_slots(params["layers"])
    x_BTD, slots = self._run(stage, values, x_BTD, slots)
    if slots is not None:
      x_BTD = matmul.start_from(x_BTD, slots, seeds)
    return self._norm(params, x_BTD)

  def prefill(
    self, params: Params, tokens_BP: jax.Array
  ) -> tuple[jax.Array, list[KVCache]]:
    """Hidden states ``[B, P, D]`` and each layer's keys and values of P."""
    positions_1P = jnp.arange(tokens_BP.shape[1])[None]
    x_BTD, cos, sin = self._embed(params, tokens_BP, positions_1P)

    def one(layer_params, kept, x_BTD, active):
      def attend(q, k, v):
        k, v = self._slots(k, v)
        cache = (k.astype(self.dtype), v.astype(self.dtype))
        if kept is not None:
          cache = jax.tree.map(functools.partial(jnp.where, active), cache, kept)
        return self._causal(q, k, v), cache

      layer = params_lib.bind_layer(self.spec, layer_params)
      x_BTD, cache = layer(x_BTD, layers.Context(cos, sin, attend, self.dtype))
      # The cache now: XLA may merge the projections of queries, keys and values and
      # then hold the merged fp32 result of every layer until the last one is done.
      return jax.lax.optimization_barrier((self._pin(x_BTD), cache))

    caches = [self._empty_cache(*tokens_BP.shape)] * len(params["layers"])
    x_BTD, caches = staged.through(
      one, params["layers"], caches, x_BTD, stages=self.stages
    )
    return self._norm(params, x_BTD), caches

  def decode(
    self,
    params: Params,
    tokens_B: jax.Array,
    positions_B: jax.Array,
    caches: Sequence[KVCache],
  ) -> tuple[jax.Array, list[KVCache]]:
    """One token per row: hidden ``[B, D]``, caches with the token written."""
    x_BTD, cos, sin = self._embed(params, tokens_B[:, None], positions_B[:, None])
    rows = jnp.arange(tokens_B.shape[0])

    def one(layer_params, cache, x_BTD, active):
      # A stage whose turn it is not looks at next to nothing.
      lengths_B = positions_B + 1
      if active is not None:
        lengths_B = jnp.where(active, lengths_B, 1)

      def write(cache_BSKA, new_BKA):
        new_BKA = new_BKA.astype(self.dtype)
        if active is not None:
          new_BKA = jnp.where(active, new_BKA, cache_BSKA[rows, positions_B])
        return cache_BSKA.at[rows, positions_B].set(new_BKA)

      def attend(q, k, v):
        k, v = self._slots(k, v)
        k_BSKA, v_BSKA = write(cache[0], k[:, 0]), write(cache[1], v[:, 0])
        out = attention.cached(
          q, k_BSKA, v_BSKA, lengths_B, implementation=self.attention
        )
        return out, (k_BSKA, v_BSKA)

      layer = params_lib.bind_layer(self.spec, layer_params)
      x_BTD, cache = layer(x_BTD, layers.Context(cos, sin, attend, self.dtype))
      return self._pin(x_BTD), cache

    x_BTD, caches = staged.through(
      one, params["layers"], caches, x_BTD, stages=self.stages
    )
    return self._norm(params, x_BTD)[:, 0], caches

  def head(self, params: Params) -> matmul.Weight:
    """LM head ``[V, D]``; the embedding when tied."""
    tied = self.spec.tie_word_embeddings
    return params["embed" if tied else "lm_head"]["kernel"]

  def logits(self, params: Params, hidden_BD: jax.Array) -> jax.Array:
    """fp32 logits ``[B, V]``, padded vocabulary columns masked."""
    logits_BV = matmul.product(hidden_BD, self.head(params), "bd,vd->bv", self.dtype)
    return logprob.mask_padded_vocab(logits_BV, self.spec.vocab_size)

  def token_log_probs(
    self, params: Params, tokens_BT: jax.Array, *, temperature: float, chunk: int
  ) -> tuple[jax.Array, jax.Array]:
    """fp32 (log-prob, entropy) ``[B, T]`` of each token given those before.

    Index t belongs to token t; index 0 is 0, nothing predicts it.
    """
    params = self._outer(params)
    hidden_BTD = self.hidden(params, tokens_BT)
    hidden_BTD = self.constrain(hidden_BTD, ("batch", None, None))
    log_probs, entropy = logprob.token_log_probs(
      hidden_BTD[:, :-1],
      self.head(params),
      tokens_BT[:, 1:],
      temperature=temperature,
      vocab_size=self.spec.vocab_size,
      chunk=chunk,
      dtype=self.dtype,
    )
    return _shift_right(log_probs), _shift_right(entropy)

  def values(self, params: Params, tokens_BT: jax.Array) -> jax.Array:
    """fp32 values ``[B, T]``: index t is the value before token t."""
    params = self._outer(params)
    hidden_BTD = self.hidden(params, tokens_BT)
    values_BT = jnp.einsum("btd,d->bt", hidden_BTD, params["value_head"]["kernel"][0])
    return _shift_right(values_BT[:, :-1])

  def _run(self, stage: pipeline.Stage, values, x_BTD, slots):
    if self.stages == 1:
      return stage(values, x_BTD, slots)
    if self.remat == "stage":
      stage = jax.checkpoint(stage, prevent_cse=False)
    return pipeline.run(
      stage,
      values,
      x_BTD,
      slots,
      stages=self.stages,
      microbatches=self.microbatches,
      pin=self._pin,
      pin_stages=lambda x: self.constrain(x, ("layers", "batch", "seq", None)),
    )

  def _outer(self, params: Params) -> Params:
    """What is outside of the layers, placed for use."""
    outer = {name: leaf for name, leaf in params.items() if name != "layers"}
    return {**self.use(outer, layer=False), "layers": params["layers"]}

  def _embed(self, params, tokens_BT, positions_BT):
    x_BTD = matmul.lookup(params["embed"]["kernel"], tokens_BT, self.dtype)
    cos, sin = rope.cos_sin(self.spec.rope, self.spec.head_dim, positions_BT)
    return self._pin(x_BTD), cos, sin

  def _slots(self, *kv_BTKA):
    if self.heads is None:
      return kv_BTKA
    fill = lambda x: self.constrain(
      self.heads.fill_slots(x), ("batch", None, "heads", None)
    )
    return tuple(fill(x) for x in kv_BTKA)

  def _sequence(self, axis: str | None) -> Callable[[jax.Array], jax.Array]:
    """Pins T to an axis, and T of the gradient to the other one."""
    pin = lambda x, axis: self.constrain(x, ("batch", axis, None))

    @jax.custom_vjp
    def move(x):
      return pin(x, axis)

    move.defvjp(
      lambda x: (pin(x, axis), None),
      lambda _, ct: (pin(ct, "seq" if axis is None else None),),
    )
    return move

  def _empty_cache(self, rows: int, length: int) -> KVCache | None:
    """What stages that did not run yet have in place of keys and values."""
    if self.stages == 1:
      return None
    heads = self.heads.slots if self.heads else self.spec.num_kv_heads
    shape = (self.stages, rows, length, heads, self.spec.head_dim)
    empty = self.constrain(
      jnp.zeros(shape, self.dtype), ("layers", "batch", None, "heads", None)
    )
    return empty, empty

  def _causal(self, q_BTHA, k_BTKA, v_BTKA):
    return attention.causal(
      q_BTHA, k_BTKA, v_BTKA, dtype=self.dtype, implementation=self.attention
    )

  def _norm(self, params, x_BTD):
    return layers.rms_norm(x_BTD, params["norm"]["scale"], self.spec.rms_norm_eps)

  def _pin(self, x_BTD):
    return self.constrain(x_BTD, ("batch", "seq", None))


def _shift_right(x_BT: jax.Array) -> jax.Array:
  return jnp.pad(x_BT, ((0, 0), (1, 0)))
