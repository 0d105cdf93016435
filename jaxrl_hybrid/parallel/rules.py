"""Logical axis names to mesh axes: the only place where the two meet."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_hybrid.models.heads import HeadPlan
from jaxrl_hybrid.parallel.mesh import MICRO_DP

MeshAxes = str | tuple[str, ...] | None
Axes = tuple[str | None, ...]  # a logical name for each dim of an array


@dataclasses.dataclass(frozen=True)
class Rules:
  """Mesh axes of each logical axis; None means replicated.

  A dim over tp and another axis lists tp first: only then does each training
  shard lie inside its generation shard.
  """

  batch: MeshAxes = "dp"
  seq: MeshAxes = None
  layers: MeshAxes = "pp"
  heads: MeshAxes = "tp"
  kv_heads: MeshAxes = "tp"
  mlp: MeshAxes = "tp"
  expert: MeshAxes = "tp"
  expert_mlp: MeshAxes = None
  vocab: MeshAxes = ("tp", "pp")
  embed: MeshAxes = None
  head_dim: MeshAxes = None

  def mesh_axes(self, name: str | None) -> tuple[str, ...]:
    """The mesh axes of one logical axis."""
    axes = getattr(self, name) if name else None
    return (axes,) if isinstance(axes, str) else axes or ()


def train_rules(heads: HeadPlan, *, sequence_parallel: bool = False) -> Rules:
  """Rules of what a training program computes with."""
  return Rules(
    kv_heads=None if heads.replicas > 1 else "tp",
    seq="tp" if sequence_parallel else None,
  )


def stored_rules(*, divisible_layers: bool) -> Rules:
  """Rules of fp32 parameters, moments and gradients: spread over dp as well.

  Layers that pp does not divide are not spread over stages but inside.
  """
  inner = ("tp", "dp") if divisible_layers else ("tp", "pp", "dp")
  return Rules(
    layers="pp" if divisible_layers else None,
    heads=inner,
    kv_heads=inner,
    mlp=inner,
    expert=inner,
    vocab=("tp", "pp", "dp"),
  )


def generation_rules(heads: HeadPlan) -> Rules:
  """Rules of the generation mesh."""
  return Rules(
    batch=("dp", *MICRO_DP),
    kv_heads=None if heads.replicas > 1 else "tp",
    vocab="tp",
  )


@dataclasses.dataclass(frozen=True)
class Layout:
  """A mesh and its rules: how one phase places arrays."""

  mesh: Mesh
  rules: Rules

  def sharding(self, axes: Axes, shape: tuple[int, ...]) -> NamedSharding:
    """Sharding of one array: of each dim's mesh axes the longest prefix fits.

    A dim that the first axis does not divide is replicated.
    """
    return NamedSharding(
      self.mesh,
      PartitionSpec(
        *(self._fitting(name, size) for name, size in zip(axes, shape, strict=True))
      ),
    )

  def shardings(self, axes_tree: Any, like: Any) -> Any:
    """Shardings of a tree of arrays or shapes by a tree of logical axes."""
    return jax.tree.map(lambda x, axes: self.sharding(axes, x.shape), like, axes_tree)

  def constrain(self, x: jax.Array, axes: Axes) -> jax.Array:
    """``with_sharding_constraint`` by logical axes."""
    return jax.lax.with_sharding_constraint(x, self.sharding(axes, x.shape))

  @property
  def replicated(self) -> NamedSharding:
    """The sharding of scalars and small tables."""
    return NamedSharding(self.mesh, PartitionSpec())

  @property
  def batch_shards(self) -> int:
    """Into how many parts the batch axis is split."""
    return math.prod(self.mesh.shape[a] for a in self.rules.mesh_axes("batch"))

  def _fitting(self, name: str | None, size: int) -> tuple[str, ...] | None:
    fitting: tuple[str, ...] = ()
    for axis in self.rules.mesh_axes(name):
      if size % (
        math.prod(self.mesh.shape[a] for a in fitting) * self.mesh.shape[axis]
      ):
        break
      fitting = (*fitting, axis)
    return fitting or None
