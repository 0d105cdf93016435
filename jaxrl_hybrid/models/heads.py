"""Attention heads laid out so that tensor parallelism divides them.

A model has H query heads in K groups. A mesh with tp devices per model wants
key/value *slots* in a multiple of tp, each serving the same number of query
heads. Where tp does not divide K, a slot is a key/value head, one of several
copies of it, or nothing (zero weights). Query heads that are not there have
zero rows in the output projection, so the function does not change. Parameters
are stored as the model has them; the padding exists only in what programs
compute with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

ABSENT = -1  # in a source index: a head of zeros


@dataclasses.dataclass(frozen=True)
class HeadPlan:
  """The slots of one mesh.

  Attributes:
    heads: H, query heads of the model.
    kv_heads: K, key/value heads of the model.
    slots: key/value slots, a multiple of tp.
    group: query heads per slot.
    replicas: slots per key/value head. With more than one the key and value
      projections stay as they are and their outputs are copied into the slots.
    norms: whether queries and keys have norms as wide as all their heads.
  """

  heads: int
  kv_heads: int
  slots: int
  group: int
  replicas: int
  norms: bool = False

  @property
  def pads_weights(self) -> bool:
    """Whether the projections computed with differ from the stored ones."""
    moved = lambda source, n: not np.array_equal(source, np.arange(n))
    if moved(self.query_source(), self.heads):
      return True
    return self.replicas == 1 and moved(self.slot_source(), self.kv_heads)

  def query_source(self) -> np.ndarray:
    """int ``[slots * group]``: the model's query head of each one, or ABSENT."""
    per_head = self.heads // self.kv_heads
    head, replica = np.divmod(np.arange(self.slots), self.replicas)
    within = replica[:, None] * self.group + np.arange(self.group)
    there = (head[:, None] < self.kv_heads) & (within < per_head)
    return np.where(there, head[:, None] * per_head + within, ABSENT).reshape(-1)

  def slot_source(self) -> np.ndarray:
    """int ``[slots]``: the model's key/value head of each slot, or ABSENT."""
    head = np.arange(self.slots) // self.replicas
    return np.where(head < self.kv_heads, head, ABSENT)

  def fill_slots(self, kv_BTKA: jax.Array) -> jax.Array:
    """Key or value heads as projected -> one per slot."""
    if self.replicas == 1:
      return kv_BTKA
    # What an absent slot holds does not matter: no query head there has output.
    return kv_BTKA[:, :, np.maximum(self.slot_source(), 0)]


def plan_heads(heads: int, kv_heads: int, tp: int, *, norms: bool = False) -> HeadPlan:
  """The plan with the fewest slots (they are the KV cache), then query heads."""
  per_head = heads // kv_heads
  options = [
    HeadPlan(heads, kv_heads, -(-kv_heads * r // tp) * tp, -(-per_head // r), r, norms)
    for r in range(1, per_head + 1)
  ]
  return min(options, key=lambda p: (p.slots, p.slots * p.group, p.replicas))


def pad_heads(layers: dict, plan: HeadPlan, head_dim: int) -> dict:
  """Attention projections of stacked layers, as ``plan`` wants them.

  Some projections may be absent.
  """
  if not plan.pads_weights:
    return layers
  return _rearrange(layers, plan, lambda x, n, source: _take(x, source, head_dim))


def unpad_heads(layers: dict, plan: HeadPlan, head_dim: int) -> dict:
  """The inverse of ``pad_heads``; what belongs to absent heads is dropped."""
  if not plan.pads_weights:
    return layers

  def pick(x: jax.Array, n: int, source: np.ndarray) -> jax.Array:
    return _take(
      x, np.array([np.flatnonzero(source == i)[0] for i in range(n)]), head_dim
    )

  return _rearrange(layers, plan, pick)


def logical_rows(layers: dict, plan: HeadPlan, head_dim: int) -> dict:
  """For each leaf of stacked padded layers the model's index of every row.

  Rows of absent heads, all zeros, get index 0.
  """
  rows = jax.tree.map(lambda x: np.arange(x.shape[1]), layers)
  if not plan.pads_weights:
    return rows
  of_head = lambda source: (
    np.maximum(source, 0)[:, None] * head_dim + np.arange(head_dim)
  )
  move = lambda _, n, source: of_head(source).reshape(-1)
  return _rearrange(rows, plan, move)


def _rearrange(
  layers: dict, plan: HeadPlan, move: Callable[[jax.Array, int, np.ndarray], jax.Array]
) -> dict:
  query = lambda x: move(x, plan.heads, plan.query_source())
  slot = lambda x: move(x, plan.kv_heads, plan.slot_source())
  if plan.replicas > 1:
    slot = lambda x: x
  attn = {**layers["attn"]}
  moved = [("q", query), ("k", slot), ("v", slot)]
  if plan.norms:
    moved += [("q_norm", query), ("k_norm", slot)]
  for name, of_heads in moved:
    if name in attn:
      attn[name] = {key: of_heads(leaf) for key, leaf in attn[name].items()}
  if "o" in attn:
    attn["o"] = {**attn["o"], "kernel": query(attn["o"]["kernel"])}
  return {**layers, "attn": attn}


def _take(x: jax.Array, source: np.ndarray, head_dim: int) -> jax.Array:
  """Heads ``source`` of axis 1 of a stacked leaf, zeros where ABSENT."""
  by_head = x.reshape(x.shape[0], -1, head_dim, *x.shape[2:])
  absent = jnp.zeros_like(by_head[:, :1])
  taken = jnp.concatenate([by_head, absent], 1)[:, source]
  return taken.reshape(x.shape[0], -1, *x.shape[2:])
