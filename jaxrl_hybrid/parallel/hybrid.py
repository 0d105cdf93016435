"""The 3D-HybridEngine: from the training layout to the generation layout.

Training keeps the layers stacked ``[L, ...]`` and sharded over the training
mesh; generation wants a list of layers in the compute dtype on the generation
mesh. ``HybridEngine`` compiles that switch once: cast first, then gather inside
micro-DP groups, then unstack. There is no way back to compute: the training
parameters stay where they are and the copy is dropped.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_hybrid.models.params import Params, compute_copy
from jaxrl_hybrid.parallel.rules import Layout


class HybridEngine:
  """Compiled switch of one model's parameters, with a version counter."""

  def __init__(
    self, axes: Params, generation: Layout, dtype: jnp.dtype, num_layers: int
  ):
    """
    Args:
      axes: logical axes of the training tree.
      generation: target layout.
      dtype: of the generation copy's kernels.
      num_layers: L.
    """
    self.version = 0
    self.dtype = dtype
    stacked = generation.shardings(axes)

    def switch(params: Params) -> Params:
      params = compute_copy(params, dtype)
      # The gather happens on the whole stack: slicing a sharded stack first
      # would cost a collective per layer.
      params = jax.device_put(params, stacked)
      return _unstack(params, num_layers)

    self._switch = jax.jit(
      switch, out_shardings=_unstacked_shardings(axes, generation, num_layers)
    )

  def to_generation(self, params: Params) -> tuple[Params, int]:
    """Returns the generation copy and its version (counts the switches)."""
    self.version += 1
    return self._switch(params), self.version


def _unstack(params: Params, num_layers: int) -> Params:
  pick = lambda i: jax.tree.map(lambda leaf: leaf[i], params["layers"])
  return {**params, "layers": [pick(i) for i in range(num_layers)]}


def _unstacked_shardings(axes: Params, layout: Layout, num_layers: int) -> Any:
  is_axes = lambda x: isinstance(x, tuple)
  layer = jax.tree.map(lambda names: names[1:], axes["layers"], is_leaf=is_axes)
  return layout.shardings({**axes, "layers": [layer] * num_layers})
