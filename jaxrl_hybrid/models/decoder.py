"""One decoder for all families: the training forward, log-probs and values.

Trainer and engine (``cached``) run the same layer code (``transformer``); they differ
in who attends to what and in the layout of the layers: stacked and scanned for
training, a list and unrolled for generation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_hybrid.models import layers
from jaxrl_hybrid.models import params as params_lib
from jaxrl_hybrid.models.cached import CachedTransformer
from jaxrl_hybrid.models.params import Params
from jaxrl_hybrid.ops import experts, logprob, matmul
from jaxrl_hybrid.parallel import pipeline

# What the backward pass of a layer finds, and what it computes again:
#   none      everything                  nothing
#   products  results of products, and    what goes by element
#             of cuDNN's attention
#   attention results of cuDNN's          everything else
#             attention
#   full      the input of the layer      everything
#   stage     the input of each stage     everything, and stages twice
#             of a pipeline
REMAT = ("none", "products", "attention", "full", "stage")


class Decoder(CachedTransformer):
  """One model, for training, scoring and generation; see ``Transformer``."""

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
        inner=self.inner,
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
      again = functools.partial(
        jax.checkpoint, prevent_cse=False, policy=_KEEPS.get(self.remat)
      )
      one, dense = again(one), again(dense)
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
  ) -> logprob.Scored:
    """``token_log_probs`` and what they are of; or sums of p^2 for the entropy."""
    params = self._outer(params)
    hidden_BTD, load = self._hidden(params, tokens_BT, positions_BT, real_BT)
    hidden_BTD = self.constrain(hidden_BTD, ("batch", None, None))
    both = logprob.token_log_probs(
      hidden_BTD,
      self.head(params),
      jnp.roll(tokens_BT, -1, axis=1),
      temperature=temperature,
      vocab_size=self.spec.vocab_size,
      chunk=logprob.positions(len(tokens_BT), chunk, self.batch_shards),
      dtype=self.dtype,
      softcap=self.spec.logit_softcap,
      collision=collision,
      shards=self.batch_shards,
      pin=self.constrain,
    )
    return logprob.Scored(*map(_shift_right, both), load, hidden_BTD, self.head(params))

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
    return _shift_right(self.scores(params, tokens_BT, positions_BT))

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

  def _sequence(self, axis: str | None) -> Callable[[jax.Array], jax.Array]:
    """Pins T to an axis, and T of the gradient to the other one."""
    pin = lambda axis: lambda x: self.constrain(x, ("batch", axis, None))
    return layers.two_way(pin(axis), pin("seq" if axis is None else None))


def _is_attention(primitive: Any, *_: Any, **__: Any) -> bool:
  return "dot_product_attention_fwd" in primitive.name


def _is_product(primitive: Any, *given: Any, **params: Any) -> bool:
  """Attention's own products have two dims of batch, rows and heads."""
  if primitive is not jax.lax.dot_general_p:
    return _is_attention(primitive)
  return len(params["dimension_numbers"][1][0]) < 2


_KEEPS = {"products": _is_product, "attention": _is_attention}


def _shift_right(x_BT: jax.Array) -> jax.Array:
  return jnp.pad(x_BT[:, :-1], ((0, 0), (1, 0)))
