"""Joins projections of one input while the switch moves them (``models.fused``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxrl_hybrid.models import fused
from jaxrl_hybrid.models.params import Params
from jaxrl_hybrid.parallel.rules import Axes, Layout

# (array, its logical axes) -> one array or more, where generation wants them
Arrive = Callable[[jax.Array, Axes], list[jax.Array]]
Parts = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Joiner:
  """Which leaves become one, and at which point of the way.

  Attributes:
    source: where the leaves are.
    target: the generation layout.
    kinds: what becomes one, of ``fused.PARTS``.
    moved: logical axes whose rows change places on the way.
  """

  source: Layout
  target: Layout
  kinds: frozenset[str]
  moved: frozenset[str]

  def split(
    self, tree: Params, axes: Params
  ) -> tuple[list[tuple[Parts, tuple[Axes, ...]]], Any]:
    """(the leaves and their axes, by what becomes one; the joined tree's structure).

    Args:
      tree: of a layer, of stacked ones, or of what is outside of the stack.
      axes: the logical axes of its leaves.
    """
    leaves, structure = jax.tree.flatten(self._together(tree), is_leaf=_is_tuple)
    names = structure.flatten_up_to(self._together(axes))
    pairs = zip(leaves, names, strict=True)
    return [x if _is_tuple(x[0]) else ((x[0],), (x[1],)) for x in pairs], structure

  def axes(self, axes: Params) -> Params:
    """Logical axes of the joined tree."""
    return fused.map_parts(axes, self.kinds, lambda parts: _joined(parts[0]))

  def join(
    self, parts: Sequence[jax.Array], axes: Sequence[Axes], arrive: Arrive
  ) -> list[jax.Array]:
    """Brings parts to where generation wants them, as one.

    Joined before they arrive, nothing but a device's own rows is copied. That
    needs rows that stay in order and parts that training splits alike.
    """
    if len(parts) == 1:
      return arrive(parts[0], axes[0])
    row = _row_dim(axes[0])
    groups = {_shards(self.source, x, names) for x, names in zip(parts, axes)}
    wanted = _shards(self.target, parts[0], axes[0])
    stays = not any(names[row] in self.moved for names in axes)
    if stays and len(groups) == 1 and max(groups) % wanted == 0:
      joined = fused.join_rows(parts, groups=max(groups), axis=row)
      return arrive(joined, _joined(axes[0]))
    arrived = zip(*(arrive(x, names) for x, names in zip(parts, axes)), strict=True)
    return [self._join_arrived(together, axes[0]) for together in arrived]

  def _join_arrived(self, parts: Parts, axes: Axes) -> jax.Array:
    axes = axes[-parts[0].ndim :]  # without the stack, if that was taken apart
    groups = _shards(self.target, parts[0], axes)
    joined = fused.join_rows(parts, groups=groups, axis=_row_dim(axes))
    return self.target.constrain(joined, _joined(axes))

  def _together(self, tree: Params) -> Params:
    """A tuple in place of leaves that become one."""
    return fused.map_parts(tree, self.kinds, lambda parts: parts)


def _row_dim(axes: Axes) -> int:
  return 1 if axes[0] == "layers" else 0


def _joined(axes: Axes) -> Axes:
  row = _row_dim(axes)
  return (*axes[: row + 1], None, *axes[row + 1 :])


def _shards(layout: Layout, x: jax.Array, axes: Axes) -> int:
  """Into how many parts the rows are split."""
  row = _row_dim(axes)
  return x.shape[row] // layout.sharding(axes, x.shape).shard_shape(x.shape)[row]


def _is_tuple(x: Any) -> bool:
  return isinstance(x, tuple)
