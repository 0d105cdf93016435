"""Generation with the layers spread over stages (p_g > 1).

Each stage holds the weights and the KV cache of its own layers. Tokens go from
stage to stage: at tick t only stage t does work that counts, the others' is
dropped, so a token takes as long as with one stage; what is gained is memory,
1 / p_g of the weights and of the cache on each device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

# (layer, cache, x_BTD, whether this stage's turn it is or None, kind of the layer)
# -> (x_BTD, cache)
One = Callable[[Any, Any, jax.Array, jax.Array | None, Any], tuple[jax.Array, Any]]


def through(
  one: One,
  layers: Sequence[Any],
  caches: Sequence[Any],
  kinds: Sequence[Any],
  x_BTD: jax.Array,
  *,
  stages: int,
) -> tuple[jax.Array, list[Any]]:
  """Applies all layers in order.

  Args:
    one: applies a layer; where it is not its turn it keeps the cache.
    layers: with stages > 1 each one is a stack of a layer of every stage, sharded
      over the generation mesh's pp axis; stage s has layers s n ... s n + n - 1.
    caches: one per entry of ``layers``, stacked alike.
    kinds: one per entry, handed to ``one``; with stages > 1 ``[stages]`` each.
    x_BTD: embedded tokens.
    stages: p_g.
  """
  if stages == 1:
    updated = []
    for layer, cache, kind in zip(layers, caches, kinds, strict=True):
      x_BTD, cache = one(layer, cache, x_BTD, None, kind)
      updated.append(cache)
    return x_BTD, updated
  every_stage = jax.vmap(one, spmd_axis_name="pp")
  turns = jnp.arange(stages)
  state = jnp.where((turns == 0)[:, None, None, None], x_BTD[None], 0.0)
  for tick in range(stages):
    updated = []
    for layer, cache, kind in zip(layers, caches, kinds, strict=True):
      state, cache = every_stage(layer, cache, state, turns == tick, kind)
      updated.append(cache)
    caches = updated
    state = jnp.roll(state, 1, axis=0)
  return state[0], list(caches)
