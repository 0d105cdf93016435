"""The decoder with keys and values kept: prefill and decode step.

Layers are a list here and unrolled: each has arrays of its own, which a step
reads and a cache that it writes in place.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxrl_hybrid.models import params as params_lib
from jaxrl_hybrid.models import staged
from jaxrl_hybrid.models.params import Params
from jaxrl_hybrid.models.transformer import Transformer
from jaxrl_hybrid.ops import attention

# (k_BSKA, v_BSKA) of one layer, or what latent attention has in their place; with
# generation stages of one layer of each, stacked on a leading axis
KVCache = tuple[jax.Array, ...]


class CachedTransformer(Transformer):
  """What generation runs."""

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
