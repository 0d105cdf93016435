"""Stored parameters in parts that visit the device one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_hybrid.errors import ConfigError
from jaxrl_hybrid.models.params import Params
from jaxrl_hybrid.parallel import abstract
from jaxrl_hybrid.parallel.adapters import AdapterLayout
from jaxrl_hybrid.parallel.weights import WeightLayout


class Chunks:
  """Chunk 0 is what is outside of the layers, the others are groups of layers.

  Group j holds layers ``j g ... j g + g - 1`` of every pipeline stage.
  """

  def __init__(self, layout: WeightLayout | AdapterLayout, layers_per_chunk: int):
    """
    Args:
      layout: of the parameters.
      layers_per_chunk: g, layers of each stage in a group.

    Raises:
      ConfigError: the layers of a stage are no multiple of ``layers_per_chunk``.
    """
    layers, stages = layout.spec.stacked_layers, layout.stages
    if layers % (stages * layers_per_chunk):
      raise ConfigError(
        f"offload.layers_per_chunk: expected a divisor of the {layers} layers / pp="
        f"{stages}, got {layers_per_chunk}; offload of parameters or optimizer also "
        "needs pp to divide the layers"
      )
    self._layout, self._g = layout, layers_per_chunk
    self.groups = layers // (stages * layers_per_chunk)
    shapes = layout.abstract_params()
    stored = layout.stored.shardings(layout.axes, shapes)
    one = jax.eval_shape(self.take, shapes["layers"], jnp.int32(0))
    self._take = jax.jit(
      self.take, out_shardings=layout.stored.shardings(layout.axes["layers"], one)
    )
    self._empty = jax.jit(
      lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes["layers"]),
      out_shardings=stored["layers"],
    )
    self._write = jax.jit(self.write, donate_argnums=0, out_shardings=stored["layers"])

  def __len__(self) -> int:
    return self.groups + 1

  def split(self, params: Params, i: int) -> Params:
    """Chunk i of the whole tree of arrays or shapes."""
    if i == 0:
      return outside(params)
    return abstract.call(self._take, params["layers"], jnp.int32(i - 1))

  def join(self, chunks: Iterable[Params]) -> Params:
    """Chunks on the device -> the whole tree; beyond it one chunk is there."""
    chunks = iter(chunks)
    outer, layers = next(chunks), self._empty()
    for j, chunk in enumerate(chunks):
      layers = self._write(layers, chunk, jnp.int32(j))
      jax.block_until_ready(layers)
    return {**outer, "layers": layers}

  def shapes(self) -> list[Params]:
    """Shapes and shardings of all chunks."""
    whole = self._layout.abstract_params()
    return [self.split(whole, i) for i in range(len(self))]

  def take(self, layers: Any, j: jax.Array) -> Any:
    """Group j of every stage: ``[pp g, ...]``, placed as stored parameters."""

    def one(leaf, axes):
      taken = jax.lax.dynamic_index_in_dim(self._by_slot(leaf), j, 1, keepdims=False)
      return self._layout.stored.constrain(taken.reshape(-1, *leaf.shape[1:]), axes)

    return jax.tree.map(one, layers, self._layout.axes["layers"])

  def write(self, layers: Any, fresh: Any, j: jax.Array) -> Any:
    """Layers, stored ones or weights, with group j replaced."""

    def put(leaf, new):
      new = new.reshape(self._layout.stages, 1, -1, *leaf.shape[1:])
      written = jax.lax.dynamic_update_slice_in_dim(self._by_slot(leaf), new, j, 1)
      return written.reshape(leaf.shape)

    return jax.tree.map(put, layers, fresh)

  def _by_slot(self, leaf: jax.Array) -> jax.Array:
    """``[L, ...] -> [pp, groups, g, ...]``."""
    stages = self._layout.stages
    return leaf.reshape(stages, self.groups, self._g, *leaf.shape[1:])


def outside(tree: Params) -> Params:
  """The tree without its layers."""
  return {name: leaf for name, leaf in tree.items() if name != "layers"}
