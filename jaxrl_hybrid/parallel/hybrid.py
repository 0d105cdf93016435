"""The 3D-HybridEngine: from the training layout to the generation layout.

Training keeps the layers stacked ``[L, ...]`` and sharded over the training
mesh; generation wants a list of layers on the generation mesh (HybridFlow §5,
arXiv:2409.19256). The switch gathers inside micro-DP groups and nowhere else, a
few layers at a time, so that it needs next to no memory beyond its result:
call j of one compiled program takes the j-th layer of every pipeline stage.
There is no way back to compute: the training weights stay where they are and
the copy is dropped.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_hybrid.errors import SwitchError
from jaxrl_hybrid.models import heads as heads_lib
from jaxrl_hybrid.models.heads import ABSENT, HeadPlan
from jaxrl_hybrid.models.params import Params
from jaxrl_hybrid.parallel import abstract, digest, multihost
from jaxrl_hybrid.parallel.mesh import MICRO_DP_TP
from jaxrl_hybrid.parallel.rules import Axes, Layout, Rules
from jaxrl_hybrid.parallel.weights import WeightLayout, drop_stack, plan_heads


@dataclasses.dataclass(frozen=True)
class _Move:
  """New places for the heads of a projection, dim 0.

  Attributes:
    parts: equal parts that no head leaves. With as many as generation's tp every
      device moves its own heads; with one all of them are gathered before.
    index: for each head of a new part its place in the old part, behind which
      there is one more head, of zeros.
    head_dim: rows per head.
  """

  parts: int
  index: np.ndarray
  head_dim: int

  def __call__(self, x: jax.Array) -> jax.Array:
    by_head = x.reshape(self.parts, -1, self.head_dim, *x.shape[1:])
    zeros = jnp.zeros_like(by_head[:, :1])
    moved = jnp.concatenate([by_head, zeros], 1)[:, self.index]
    return moved.reshape(-1, *x.shape[1:])


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
    self._moves = _moves(source, target.mesh.shape["tp"], self.heads)
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
    leaves, structure = jax.tree.flatten(layers)
    names = structure.flatten_up_to(self.source.axes["layers"])
    arrived, matrices = [], []
    for leaf, axes in zip(leaves, names, strict=True):
      if leaf.ndim == 3 and len(matrices) > 1:
        # One is gathered while the one before is taken apart. Without this, XLA
        # gathers all of them first, which takes the memory of the whole slot.
        j, _ = jax.lax.optimization_barrier((j, matrices[-2]))
      arrived.append(self._slot_of_leaf(leaf, j, axes))
      if leaf.ndim == 3 and self.source.stages > 1:
        matrices.append(arrived[-1])
    return [structure.unflatten(stage) for stage in zip(*arrived, strict=True)]

  def _slot_of_leaf(self, leaf: jax.Array, j: jax.Array, axes: Axes) -> list[jax.Array]:
    """Over pp first: that stack is taken apart by a copy, so it had better be small.

    Gathered over tp afterwards, each layer lands where it stays.
    """
    split = leaf.reshape(self.source.stages, -1, *leaf.shape[1:])
    leaf = jax.lax.dynamic_index_in_dim(split, j, 1, keepdims=False)
    leaf = self.source.placed.constrain(leaf, axes)
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
    return jax.tree.map(self.target.constrain, outside, self._outer_axes)

  @property
  def _layer_axes(self) -> Any:
    return drop_stack(self.source.axes["layers"])

  @property
  def _outer_axes(self) -> Any:
    return _outside(self.source.axes)

  def _outer_shardings(self) -> Any:
    shapes = _outside(self.source.abstract_weights())
    return self.target.shardings(self._outer_axes, shapes)

  def _slot_shardings(self) -> Any:
    layers = self.source.abstract_weights()["layers"]
    entries = jax.eval_shape(self._slot, layers, jnp.int32(0))
    axes = self._layer_axes if self.stages == 1 else self.source.axes["layers"]
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
      stack = self._stack(layer)
      rows = heads_lib.logical_rows(stack, self.heads, spec.head_dim)
      return digest.of_stack(stack, rows)

    outer = jax.tree.map(lambda x: x[None], _outside(copy))
    by_layer = jnp.stack([one(layer) for layer in copy["layers"]], 1).reshape(-1)
    return jnp.concatenate([by_layer[: spec.stacked_layers], digest.of_stack(outer)])


def _outside(tree: Params) -> Params:
  return {name: leaf for name, leaf in tree.items() if name != "layers"}


def _moves(source: WeightLayout, tp: int, heads: HeadPlan) -> dict[str, _Move]:
  """The moves by logical axis; none where all heads keep their places."""
  found = {}
  for axis, order in (("heads", HeadPlan.query_source), ("kv_heads", _key_order)):
    old, new = order(source.heads), order(heads)
    if not np.array_equal(old, new):
      moves = (_find_move(old, new, n, source.spec.head_dim) for n in (tp, 1))
      found[axis] = next(move for move in moves if move is not None)
  return found


def _key_order(plan: HeadPlan) -> np.ndarray:
  """The model's head in each place of the key and value projections."""
  # With replicas their outputs are copied, the projections stay as they are.
  return np.arange(plan.kv_heads) if plan.replicas > 1 else plan.slot_source()


def _find_move(
  old: np.ndarray, new: np.ndarray, parts: int, head_dim: int
) -> _Move | None:
  """The move that is the same in each of ``parts`` and crosses none; or None."""
  if len(old) % parts or len(new) % parts:
    return None
  old = np.pad(old.reshape(parts, -1), ((0, 0), (0, 1)), constant_values=ABSENT)
  same = (old[:, :, None] == new.reshape(parts, 1, -1)).all(0)
  return _Move(parts, same.argmax(0), head_dim) if same.any(0).all() else None
