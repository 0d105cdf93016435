"""Pipeline parallelism in one program: all stages work on their own microbatch.

The layers are a stack sharded over pp. A tick applies every stage at once
(``vmap`` over the stage axis, which is the pp axis) and passes the results to
the next stage (``roll``, a neighbour permute). After M + pp - 1 ticks all M
microbatches have passed all stages (GPipe, arXiv:1811.06965); differentiating
the scan runs the pipeline backwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# (one stage's layers stacked, x_BTD, what else belongs to its rows, slots)
# -> (x_BTD, slots)
Stage = Callable[[Any, jax.Array, Any, Any], tuple[jax.Array, Any]]
Pin = Callable[[jax.Array], jax.Array]


def run(
  stage: Stage,
  layers: Any,
  x_BTD: jax.Array,
  rows_BT: Any,
  slots: Any,
  *,
  stages: int,
  microbatches: int,
  pin: Pin,
  pin_stages: Pin,
) -> tuple[jax.Array, Any]:
  """All layers applied to ``[B, T, D]``; ``stage(layers, x, rows, slots)`` for pp = 1.

  Args:
    stage: applies a stack of layers.
    layers: tree of ``[L, ...]``, L a multiple of ``stages``, sharded over pp.
    x_BTD: rows; microbatch m takes rows m, m + M, ..., so each one is spread
      over dp like the whole.
    rows_BT: tree of ``[B, ...]`` that every stage gets of its microbatch; may be empty.
    slots: None, or a tree of ``[L, ...]`` that every stage hands on, tick by tick.
    stages: pp.
    microbatches: M, a divisor of B.
    pin: places ``[b, T, D]`` of one microbatch.
    pin_stages: places ``[pp, b, T, D]``, one microbatch per stage.
  """
  rows, *rest = x_BTD.shape
  split = lambda x: x.reshape(stages, x.shape[0] // stages, *x.shape[1:])
  by_stage = jax.tree.map(split, layers)
  by_microbatch = lambda x: x.reshape(
    rows // microbatches, microbatches, *x.shape[1:]
  ).swapaxes(0, 1)
  inputs, belonging = by_microbatch(x_BTD), jax.tree.map(by_microbatch, rows_BT)
  every_stage = jax.vmap(stage, spmd_axis_name="pp")
  is_first = (jnp.arange(stages) == 0)[:, None, None, None]

  def tick(carry, i):
    state, slots = carry
    # The first stage repeats the last microbatch while the pipeline drains.
    fresh = jax.lax.dynamic_index_in_dim(
      inputs, jnp.minimum(i, microbatches - 1), keepdims=False
    )
    state = pin_stages(jnp.where(is_first, pin(fresh)[None], state))
    where = jnp.clip(i - jnp.arange(stages), 0, microbatches - 1)
    here = jax.tree.map(lambda x: x[where], belonging)
    done, slots = every_stage(by_stage, state, here, slots)
    done = pin_stages(done)
    return (pin_stages(jnp.roll(done, 1, axis=0)), slots), pin(done[-1])

  empty = jnp.zeros((stages, rows // microbatches, *rest), x_BTD.dtype)
  (_, slots), outputs = jax.lax.scan(
    tick,
    (pin_stages(empty), jax.tree.map(split, slots)),
    jnp.arange(microbatches + stages - 1),
  )
  slots = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), slots)
  return outputs[stages - 1 :].swapaxes(0, 1).reshape(x_BTD.shape), slots
