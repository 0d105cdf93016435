"""Logical axis names to mesh axes: the only place where the two meet."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_hybrid.parallel.mesh import MICRO_DP

MeshAxes = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class Rules:
  """Mesh axes of each logical axis; None means replicated."""

  batch: MeshAxes = "dp"
  layers: MeshAxes = "pp"
  heads: MeshAxes = "tp"
  kv_heads: MeshAxes = "tp"
  mlp: MeshAxes = "tp"
  vocab: MeshAxes = "tp"
  embed: MeshAxes = None
  head_dim: MeshAxes = None

  def partition(self, axes: tuple[str | None, ...]) -> PartitionSpec:
    """The PartitionSpec of an array with these logical axes."""
    return PartitionSpec(*(axis and getattr(self, axis) for axis in axes))


TRAIN = Rules()
GENERATION = Rules(batch=("dp", *MICRO_DP))


@dataclasses.dataclass(frozen=True)
class Layout:
  """A mesh and its rules: how one phase places arrays."""

  mesh: Mesh
  rules: Rules

  def sharding(self, axes: tuple[str | None, ...]) -> NamedSharding:
    """Sharding of one array by its logical axes."""
    return NamedSharding(self.mesh, self.rules.partition(axes))

  def shardings(self, axes_tree: Any) -> Any:
    """Shardings of a tree whose leaves are tuples of logical axes."""
    return jax.tree.map(
      self.sharding, axes_tree, is_leaf=lambda x: isinstance(x, tuple)
    )

  def constrain(self, x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    """``with_sharding_constraint`` by logical axes."""
    return jax.lax.with_sharding_constraint(x, self.sharding(axes))

  @property
  def replicated(self) -> NamedSharding:
    """The sharding of scalars and small tables."""
    return self.sharding(())

  @property
  def batch_shards(self) -> int:
    """Into how many parts the batch axis is split."""
    batch = self.rules.batch
    names = (batch,) if isinstance(batch, str) else batch
    return math.prod(self.mesh.shape[name] for name in names)
