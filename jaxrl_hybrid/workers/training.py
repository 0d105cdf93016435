"""One optimizer step over micro-batches, shared by actor and critic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_hybrid.algorithms import reduce
from jaxrl_hybrid.models.params import Params
from jaxrl_hybrid.parallel import multihost
from jaxrl_hybrid.parallel.rules import Layout
from jaxrl_hybrid.workers.adapted import AdaptedStore, Frozen
from jaxrl_hybrid.workers.rows import POSITIONS
from jaxrl_hybrid.workers.stores import (
  RESIDENT,
  AnyLayout,
  Offload,
  ResidentStore,
  Store,
  StreamedStore,
)

# A metric is (sum, weight), reduced once over all micro-batches; weight 0 makes
# it a plain sum.
Means = dict[str, tuple[jax.Array, jax.Array]]
Maxima = dict[str, jax.Array]
COUNT = "micro_batches"  # of a batch: int32, how many of its A are not empty
DROPOUT = "dropout"  # of a batch: uint32 [A], a seed for each micro-batch
# (params, micro-batch, totals, *given) -> (this micro-batch's share of the loss,
# metrics); what is given is the same for all micro-batches, and has no gradient.
LossFn = Callable[..., tuple[jax.Array, tuple[Means, Maxima]]]


class TrainState:
  """A trained model: its gradient program and the store of its parameters.

  ``updates`` counts the optimizer steps.
  """

  def __init__(
    self,
    params: Params,
    optimizer: optax.GradientTransformation,
    layout: AnyLayout,
    loss_fn: LossFn,
    *,
    clip_grad: float = math.inf,
    where: Offload = RESIDENT,
    frozen: Frozen | None = None,
    seed: int = 0,
  ):
    """
    Args:
      params: stored parameters (``WeightLayout.stored``), or stored adapters.
      optimizer: works on each leaf by itself.
      layout: of parameters and weights.
      loss_fn: of the weights.
      clip_grad: largest global norm of a gradient.
      where: what lives in host memory.
      frozen: what adapters belong to, with an ``AdapterLayout``.
      seed: of dropout, together with the number of the update.
    """
    self.updates = 0
    self._layout, self._seed = layout, seed
    self._drops = frozen is not None and layout.lora.dropout > 0
    self.gradients = jax.jit(
      _make_gradients(layout, loss_fn), out_shardings=(None, layout.train.replicated)
    )
    self.store: Store
    if where.streams:
      self.store = StreamedStore(params, optimizer, layout, clip_grad, where)
    else:
      self.store = ResidentStore(params, optimizer, layout, clip_grad)
    if frozen is not None:
      self.store = AdaptedStore(self.store, frozen, layout)

  @property
  def weights(self) -> Params:
    """What programs compute with."""
    return self.store.weights

  def lower(
    self, batch: dict[str, jax.ShapeDtypeStruct], *given: Any
  ) -> jax.stages.Lowered:
    """The gradient program ahead of time."""
    batch = batch | self._seeds(batch)
    return self.gradients.lower(self.store.weights, batch, *given)

  def gradient_shapes(self, batch: dict[str, jax.ShapeDtypeStruct], *given: Any) -> Any:
    """(gradients, metrics) of a batch as shapes with shardings."""
    _, metrics = jax.eval_shape(self.gradients, self.store.weights, batch, *given)
    scalar = lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=self._layout.train.replicated
    )
    return self._layout.abstract_params(), jax.tree.map(scalar, metrics)

  def step(
    self,
    packed: dict[str, np.ndarray],
    micro_batches: int | None = None,
    given: tuple[Any, ...] = (),
  ) -> Callable[[], dict[str, float]]:
    """Applies one update; returns a function that waits for its metrics.

    Args:
      packed: ``[A, B, T]`` arrays.
      micro_batches: of the A those that have rows, the first ones; default all.
      given: more arguments of the loss, on the device.
    """
    batch = place(packed, self._layout.train, micro_batches) | self._seeds(packed)
    grads, metrics = self.gradients(self.store.weights, batch, *given)
    self.store.apply(grads, metrics)
    self.updates += 1
    return lambda: {k: float(v) for k, v in multihost.fetch(metrics).items()}

  def _seeds(self, batch: dict[str, Any]) -> dict[str, Any]:
    """Of each micro-batch of the next update, or nothing without dropout."""
    if not self._drops:
      return {}
    source = np.random.SeedSequence((self._seed, self.updates))
    seeds_A = source.generate_state(batch["mask"].shape[0], np.uint32)
    return {DROPOUT: multihost.put(seeds_A, self._layout.train.replicated)}


def place(
  packed: dict[str, np.ndarray], layout: Layout, micro_batches: int | None = None
) -> dict[str, jax.Array]:
  """``[A, B, T]`` arrays onto the mesh, B split over the batch axes, and ``COUNT``."""
  placed = {
    name: multihost.put(x, layout.sharding((None, "batch", None), x.shape))
    for name, x in packed.items()
  }
  if micro_batches is None:
    micro_batches = len(next(iter(packed.values())))
  count = multihost.put(np.array(micro_batches, np.int32), layout.replicated)
  return placed | {COUNT: count}


def micro_batch(batch: dict[str, jax.Array], i: jax.Array) -> dict[str, jax.Array]:
  """The i-th micro-batch of what ``place`` returns."""
  pick = lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False)
  return {name: pick(x) for name, x in batch.items() if name != COUNT}


def shared_columns(share: bool) -> tuple[str, ...]:
  """What a batch has more when its sequences share rows."""
  return (POSITIONS,) if share else ()


def abstract_batch(
  columns: dict[str, Any], shape: tuple[int, int, int], layout: Layout
) -> dict[str, jax.ShapeDtypeStruct]:
  """What ``place`` returns for columns of these dtypes, as shapes."""
  sharding = layout.sharding((None, "batch", None), shape)
  count = jax.ShapeDtypeStruct((), np.int32, sharding=layout.replicated)
  return {
    name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    for name, dtype in columns.items()
  } | {COUNT: count}


def masked(x_BT: jax.Array, mask_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
  """A per-token metric as (sum, weight) over the mask."""
  x_BT = jnp.where(mask_BT, x_BT.astype(jnp.float32), 0.0)
  return jnp.sum(x_BT), jnp.sum(mask_BT).astype(jnp.float32)


def mini_batches(
  sequences: int, mini_rows: int, epochs: int, *, key: tuple[int, ...]
) -> Iterator[np.ndarray]:
  """Row indices of each mini-batch of each epoch, shuffled by ``key``.

  A single mini-batch keeps the order; groups of a draw may be split.
  """
  for epoch in range(epochs):
    order = np.arange(sequences)
    if sequences > mini_rows:
      order = np.random.default_rng((*key, epoch)).permutation(sequences)
    for start in range(0, sequences, mini_rows):
      yield order[start : start + mini_rows]


def summarize(updates: list[dict[str, float]]) -> dict[str, float]:
  """Means over the updates of a step; maxima for ``*_max``."""
  return {
    name: (max if name.endswith("_max") else _mean)(
      [metrics[name] for metrics in updates]
    )
    for name in updates[0]
  }


def _mean(values: list[float]) -> float:
  return sum(values) / len(values)


def _make_gradients(layout: AnyLayout, loss_fn: LossFn) -> Any:
  """(weights, [A, B, T] batch, *given) -> gradients of stored parameters, metrics."""

  def gradients(weights: Params, batch: dict[str, jax.Array], *given: Any) -> Any:
    total = reduce.totals(batch["mask"], batch.get(POSITIONS))

    def accumulate(i: jax.Array, so_far: Any) -> Any:
      loss, means, maxima, grads = so_far
      micro = micro_batch(batch, i)
      loss_of = lambda trainable: loss_fn(trainable, micro, total, *given)
      seed = {"seed": micro[DROPOUT]} if DROPOUT in micro else {}
      (more, (more_means, more_maxima)), grads = layout.value_and_grad(
        loss_of, weights, grads, **seed
      )
      add = lambda a, b: jax.tree.map(lambda x, y: x + y, a, b)
      maxima = jax.tree.map(jnp.maximum, maxima, more_maxima)
      return loss + more, add(means, more_means), maxima, grads

    forward = lambda weights: loss_fn(weights, micro_batch(batch, 0), total, *given)
    shape, (means, maxima) = jax.eval_shape(forward, weights)
    blank = lambda tree, x: jax.tree.map(lambda s: jnp.full(s.shape, x, s.dtype), tree)
    start = (blank(shape, 0), blank(means, 0), blank(maxima, -jnp.inf))
    loss, means, maxima, grads = jax.lax.fori_loop(
      0, batch[COUNT], accumulate, (*start, layout.zeros(weights))
    )
    grads = layout.strip(grads)
    metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
    for name, (total_sum, weight) in means.items():
      metrics[name] = total_sum / jnp.maximum(weight, 1.0)
    metrics |= maxima
    finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
    return grads, metrics | {"skipped_updates": ~finite}

  return gradients
