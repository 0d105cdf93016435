"""The 3D-HybridEngine: from the training layout to the generation layout.

Training keeps the layers stacked ``[L, ...]`` and sharded over the training
mesh; generation wants a list of layers on the generation mesh (HybridFlow §5,
arXiv:2409.19256). The switch gathers inside micro-DP groups and nowhere else, a
few layers at a time, so that it needs next to no memory beyond its result:
call j of one compiled program takes the j-th layer of every pipeline stage.
Projections of one input become one on the way (``joining``).
There is no way back to compute: the training weights stay where they are and
the copy is dropped.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_hybrid.errors import SwitchError
from jaxrl_hybrid.models import fused
from jaxrl_hybrid.models import heads as heads_lib
from jaxrl_hybrid.models.fused import GATE_UP, QKV
from jaxrl_hybrid.models.params import Params
from jaxrl_hybrid.parallel import abstract, digest, head_moves, multihost
from jaxrl_hybrid.parallel.joining import Joiner
from jaxrl_hybrid.parallel.mesh import MICRO_DP_TP
from jaxrl_hybrid.parallel.rules import Axes, Layout, Rules
from jaxrl_hybrid.parallel.weights import WeightLayout, drop_stack, plan_heads


class HybridEngine:
  """Compiled switch of one model's weights, with a version counter."""

  def __init__(self, source: WeightLayout, target: Layout):
    """
    Args:
      source: the weights as training holds them.
      target: the generation layout.
    """
    self.version = 0
    self.source, self.target = source, target
    self.heads = plan_heads(source.spec, target.mesh)
    tp, head_dim = target.mesh.shape["tp"], source.spec.head_dim
    self._moves = head_moves.moves(source.heads, self.heads, tp=tp, head_dim=head_dim)
    self._joiner = Joiner(
      source.placed,
      target,
      # Replicas of key and value heads share projections that tp does not split.
      kinds=frozenset({GATE_UP} if self.heads.replicas > 1 else {GATE_UP, QKV}),
      moved=frozenset(self._moves),
    )
    self._expected: jax.Array | None = None
    self._found: jax.Array | None = None
    self.switch_outer = jax.jit(self._outer, out_shardings=self._outer_shardings())
    self.switch_slot = jax.jit(self._slot, out_shardings=self._slot_shardings())
    self._digest_source = jax.jit(
      self._digest_of_source, out_shardings=source.train.replicated
    )
    self._digest_target = jax.jit(
      self._digest_of_target, out_shardings=target.replicated
    )

  @property
  def dtype(self) -> jnp.dtype:
    """Of the kernels of both copies."""
    return self.source.dtype

  def to_generation(self, weights: Params) -> tuple[Params, int]:
    """Returns the generation copy and its version (counts the switches).

    The copy's checksum is on its way; ``verify`` waits for it.
    """
    self.version += 1
    copy = self.copy(weights)
    self._expected = self._digest_source(weights)
    self._found = self._digest_target(copy)
    return copy, self.version

  def copy(self, weights: Params) -> Params:
    """The generation copy; ``weights`` may be shapes."""
    layers = weights["layers"]
    stages = [
      abstract.call(self.switch_slot, layers, jnp.int32(j))
      for j in range(self._layers_per_stage)
    ]
    by_stage = [layer for stage in zip(*stages, strict=True) for layer in stage]
    outer = abstract.call(self.switch_outer, _outside(weights))
    if self.stages == 1:
      by_stage = by_stage[: self.source.spec.stacked_layers]  # without the padding
    return {**outer, "layers": by_stage}

  def verify(self) -> None:
    """Compares the checksums of both sides of the last switch.

    Raises:
      SwitchError: a layer arrived changed.
    """
    if self._expected is None:
      return
    expected, found = multihost.fetch((self._expected, self._found))
    self._expected = self._found = None
    wrong = [str(i) for i in (expected != found).nonzero()[0]]
    if wrong:
      outside = len(expected) - 1
      raise SwitchError(
        f"weights changed on the way to generation (version {self.version}): "
        f"checksums of layers {', '.join(wrong)} differ ({outside} stands for "
        "embedding, norm and head); expected equal ones. The run stops before it "
        "learns from wrong samples; resume from the last checkpoint"
      )

  @property
  def stages(self) -> int:
    """p_g: with more than one an entry of the copy's layers is a stack of them."""
    return self.target.mesh.shape["pp"]

  @property
  def _layers_per_stage(self) -> int:
    return self.source.padded_layers // self.source.stages

  def _slot(self, layers: Any, j: jax.Array) -> list[Any]:
    """Layer j of every training stage, as a list.

    With p_g > 1 an entry is a stack of p_g layers, one of each generation stage.
    """
    leaves, structure = self._joiner.split(layers, self.source.axes["layers"])
    arrived, matrices = [], []
    for parts, axes in leaves:
      is_matrix = parts[0].ndim == 3
      if is_matrix and len(matrices) > 1:
        # One is gathered while the one before is taken apart. Without this, XLA
        # gathers all of them first, which takes the memory of the whole slot.
        j, _ = jax.lax.optimization_barrier((j, matrices[-2]))
      picked = [self._pick(x, j, names) for x, names in zip(parts, axes, strict=True)]
      arrived.append(self._joiner.join(picked, axes, self._arrive))
      if is_matrix and self.source.stages > 1:
        matrices.append(arrived[-1])
    return [structure.unflatten(stage) for stage in zip(*arrived, strict=True)]

  def _pick(self, leaf: jax.Array, j: jax.Array, axes: Axes) -> jax.Array:
    """Layer j of every training stage, stacked."""
    split = leaf.reshape(self.source.stages, -1, *leaf.shape[1:])
    leaf = jax.lax.dynamic_index_in_dim(split, j, 1, keepdims=False)
    return self.source.placed.constrain(leaf, axes)

  def _arrive(self, leaf: jax.Array, axes: Axes) -> list[jax.Array]:
    """The layers of a stack, each where generation wants it.

    Over pp first: that stack is taken apart by a copy, so it had better be small.
    Gathered over tp afterwards, each layer lands where it stays.
    """
    move, target = self._moves.get(axes[1]), axes[1:]
    if move and move.parts == 1:
      target = (None,) * len(target)
    if self.stages == 1:
      leaf = self.source.placed.constrain(leaf, (None, *axes[1:]))
      entries = [self.target.constrain(x, target) for x in leaf]
    else:
      leaf = leaf.reshape(self.stages, -1, *leaf.shape[1:])
      leaf = self._between.constrain(leaf, ("layers", None, *axes[1:]))
      entries = [
        self.target.constrain(leaf[:, k], ("layers", *target))
        for k in range(leaf.shape[1])
      ]
      move = move and jax.vmap(move)
    return [move(x) for x in entries] if move else entries

  @property
  def _between(self) -> Layout:
    """Whole along a generation stage, otherwise as in training."""
    inner = ("tp", MICRO_DP_TP) if self.source.zero == 1 else ("tp", MICRO_DP_TP, "dp")
    kv = self.source.placed.rules.kv_heads and inner
    return Layout(self.target.mesh, Rules(heads=inner, kv_heads=kv, mlp=inner))

  def _stack(self, layer: Any) -> Any:
    """An entry of the copy's layers as a stack of p_g layers."""
    return layer if self.stages > 1 else jax.tree.map(lambda x: x[None], layer)

  def _outer(self, outside: Params) -> Params:
    leaves, structure = self._joiner.split(outside, _outside(self.source.axes))
    place = lambda x, axes: [self.target.constrain(x, axes)]
    return structure.unflatten(
      [self._joiner.join(parts, axes, place)[0] for parts, axes in leaves]
    )

  def _outer_shardings(self) -> Any:
    shapes = jax.eval_shape(self._outer, _outside(self.source.abstract_weights()))
    axes = self._joiner.axes(_outside(self.source.axes))
    return self.target.shardings(axes, shapes)

  def _slot_shardings(self) -> Any:
    layers = self.source.abstract_weights()["layers"]
    entries = jax.eval_shape(self._slot, layers, jnp.int32(0))
    axes = self._joiner.axes(self.source.axes["layers"])
    axes = drop_stack(axes) if self.stages == 1 else axes
    return [self.target.shardings(axes, entry) for entry in entries]

  def _digest_of_source(self, weights: Params) -> jax.Array:
    spec = self.source.spec
    layers = weights["layers"]
    rows = heads_lib.logical_rows(layers, self.source.heads, spec.head_dim)
    found = digest.of_stack(layers, rows)[: spec.stacked_layers]
    outer = jax.tree.map(lambda x: x[None], _outside(weights))
    return jnp.concatenate([found, digest.of_stack(outer)])

  def _digest_of_target(self, copy: Params) -> jax.Array:
    spec = self.source.spec

    def one(layer):
      stack = fused.separate(self._stack(layer), axis=1)
      rows = heads_lib.logical_rows(stack, self.heads, spec.head_dim)
      return digest.of_stack(stack, rows)

    outer = jax.tree.map(lambda x: x[None], fused.separate(_outside(copy)))
    by_layer = jnp.stack([one(layer) for layer in copy["layers"]], 1).reshape(-1)
    return jnp.concatenate([by_layer[: spec.stacked_layers], digest.of_stack(outer)])


def _outside(tree: Params) -> Params:
  return {name: leaf for name, leaf in tree.items() if name != "layers"}
