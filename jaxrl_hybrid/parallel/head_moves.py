"""Where the switch puts attention heads that the two meshes order differently."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_hybrid.models.heads import ABSENT, HeadPlan


@dataclasses.dataclass(frozen=True)
class Move:
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


def moves(
  before: HeadPlan, after: HeadPlan, *, tp: int, head_dim: int
) -> dict[str, Move]:
  """The moves by logical axis; none where all heads keep their places.

  Args:
    before: the heads of the training mesh.
    after: of the generation mesh.
    tp: of generation.
    head_dim: rows per head.
  """
  found = {}
  for axis, order in (("heads", HeadPlan.query_source), ("kv_heads", _key_order)):
    old, new = order(before), order(after)
    if not np.array_equal(old, new):
      options = (_find_move(old, new, parts, head_dim) for parts in (tp, 1))
      found[axis] = next(move for move in options if move is not None)
  return found


def _key_order(plan: HeadPlan) -> np.ndarray:
  """The model's head in each place of the key and value projections."""
  # With replicas their outputs are copied, the projections stay as they are.
  return np.arange(plan.kv_heads) if plan.replicas > 1 else plan.slot_source()


def _find_move(
  old: np.ndarray, new: np.ndarray, parts: int, head_dim: int
) -> Move | None:
  """The move that is the same in each of ``parts`` and crosses none; or None."""
  if len(old) % parts or len(new) % parts:
    return None
  old = np.pad(old.reshape(parts, -1), ((0, 0), (0, 1)), constant_values=ABSENT)
  same = (old[:, :, None] == new.reshape(parts, 1, -1)).all(0)
  return Move(parts, same.argmax(0), head_dim) if same.any(0).all() else None
