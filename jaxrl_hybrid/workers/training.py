"""One optimizer step over micro-batches, shared by actor and critic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_hybrid.algorithms import reduce
from jaxrl_hybrid.models.params import Params
from jaxrl_hybrid.parallel.rules import Layout

# A metric is (sum, weight), reduced once over all micro-batches; weight 0 makes
# it a plain sum.
Means = dict[str, tuple[jax.Array, jax.Array]]
Maxima = dict[str, jax.Array]
# (params, micro-batch, totals) -> (this micro-batch's share of the loss, metrics)
LossFn = Callable[[Params, dict, reduce.Totals], tuple[jax.Array, tuple[Means, Maxima]]]


class TrainState:
  """fp32 parameters and optimizer state, sharded alike, replaced by each step.

  ``updates`` counts the optimizer steps.
  """

  def __init__(
    self,
    params: Params,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    loss_fn: LossFn,
  ):
    self.params = params
    self.updates = 0
    self._layout = layout
    self.opt_state = jax.jit(
      optimizer.init, out_shardings=_opt_shardings(optimizer, params, layout)
    )(params)
    shardings = jax.tree.map(lambda x: x.sharding, (params, self.opt_state))
    self._step = jax.jit(
      _make_step(optimizer, loss_fn),
      donate_argnums=(0, 1),
      out_shardings=(*shardings, None),
    )

  def step(self, packed: dict[str, np.ndarray]) -> Callable[[], dict[str, float]]:
    """Applies one update; returns a function that waits for its metrics."""
    batch = place(packed, self._layout)
    self.params, self.opt_state, metrics = self._step(
      self.params, self.opt_state, batch
    )
    self.updates += 1
    return lambda: {k: float(v) for k, v in jax.device_get(metrics).items()}


def place(packed: dict[str, np.ndarray], layout: Layout) -> dict[str, jax.Array]:
  """``[A, B, T]`` arrays onto the mesh, B split over the batch axes."""
  sharding = layout.sharding((None, "batch", None))
  return jax.device_put(packed, sharding)


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


def _make_step(optimizer: optax.GradientTransformation, loss_fn: LossFn) -> Any:
  """An update; one whose loss or gradient is not finite changes nothing."""

  def step(params: Params, opt_state: Any, batch: dict[str, jax.Array]) -> Any:
    total = reduce.totals(batch["mask"])

    def accumulate(grads, micro):
      (loss, aux), new = jax.value_and_grad(loss_fn, has_aux=True)(params, micro, total)
      return jax.tree.map(jnp.add, grads, new), (loss, aux)

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    grads, (loss, (means, maxima)) = jax.lax.scan(accumulate, zeros, batch)
    metrics = {"loss": jnp.sum(loss), "grad_norm": optax.tree.norm(grads)}
    for name, (total_sum, weight) in means.items():
      metrics[name] = jnp.sum(total_sum) / jnp.maximum(jnp.sum(weight), 1.0)
    metrics |= {name: jnp.max(x) for name, x in maxima.items()}
    finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
    metrics["skipped_updates"] = ~finite
    updates, new_state = optimizer.update(grads, opt_state, params)
    new_params = optax.apply_updates(params, updates)
    keep = lambda new, old: jnp.where(finite, new, old)
    params, opt_state = jax.tree.map(keep, (new_params, new_state), (params, opt_state))
    return params, opt_state, metrics

  return step


def _opt_shardings(optimizer, params: Params, layout: Layout) -> Any:
  """Moments are sharded like their parameters, counters replicated."""
  abstract = jax.eval_shape(optimizer.init, params)
  return optax.tree.map_params(
    optimizer,
    lambda _, p: p.sharding,
    abstract,
    params,
    transform_non_params=lambda _: layout.replicated,
  )
