"""Where fp32 parameters and optimizer moments live, and how an update reaches them.

``ResidentStore`` keeps them on the device and updates all at once.
``StreamedStore`` keeps them in chunks of a few layers, on the host where asked:
12 bytes a parameter, six times the weights. Chunks visit the device one after
the other; while one is updated the next is on its way in and the one before on
its way out. Gradients and weights stay on the device.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from jaxrl_hybrid.models.params import Params
from jaxrl_hybrid.parallel import abstract, offload
from jaxrl_hybrid.parallel.adapters import AdapterLayout
from jaxrl_hybrid.parallel.rules import Layout
from jaxrl_hybrid.parallel.weights import WeightLayout
from jaxrl_hybrid.workers.chunks import Chunks, outside


@dataclasses.dataclass(frozen=True)
class Offload:
  """What lives in pinned host memory between its uses.

  Attributes:
    optimizer: the moments.
    params: the fp32 parameters.
    weights: what programs compute with, between the phases that use it.
    layers_per_chunk: layers of each pipeline stage that are updated at a time.
  """

  optimizer: bool = False
  params: bool = False
  weights: bool = False
  layers_per_chunk: int = 1

  @property
  def streams(self) -> bool:
    """Whether updates go chunk by chunk."""
    return self.optimizer or self.params or self.weights


RESIDENT = Offload()
AnyLayout = WeightLayout | AdapterLayout


class Store(Protocol):
  """Stored parameters, moments, and the weights made from them.

  ``weights`` are on the device; ``held_weights`` is where they are now;
  ``renewed_weights`` are those that are not there while an update makes new ones.
  """

  weights: Params
  held_weights: Params
  renewed_weights: Params
  params: Any
  opt_state: Any

  def apply(self, grads: Params, metrics: dict[str, jax.Array]) -> None:
    """One optimizer step; ``metrics`` has grad_norm and skipped_updates."""

  def whole_params(self) -> Params:
    """Stored parameters as one tree."""

  def rest(self) -> None:
    """Called after a phase: the weights are not needed for a while."""

  def lower_update(self, grads: Params, metrics: Any) -> jax.stages.Lowered:
    """The (largest) update program ahead of time."""

  def visiting_bytes(self) -> int:
    """Bytes per device of what an update brings from the host at a time."""


class ResidentStore:
  """Everything on the device, updated by one program."""

  def __init__(
    self,
    params: Params,
    optimizer: optax.GradientTransformation,
    layout: AnyLayout,
    clip_grad: float,
  ):
    self._params = params
    self._weights: Params | None = None
    shardings = opt_shardings(optimizer, params, layout.train)
    init = jax.jit(optimizer.init, out_shardings=shardings)
    self.opt_state = abstract.call(init, params)
    self._prepare = jax.jit(
      layout.prepare, out_shardings=shardings_of(layout.abstract_weights())
    )
    self.update = jax.jit(
      functools.partial(_update, optimizer, clip_grad),
      donate_argnums=(0, 1),
      out_shardings=(shardings_of(params), shardings),
    )

  @property
  def params(self) -> Params:
    """Stored parameters; setting them makes new weights."""
    return self._params

  @params.setter
  def params(self, params: Params) -> None:
    self._params, self._weights = params, None

  @property
  def weights(self) -> Params:
    """What programs compute with, made once per update."""
    if self._weights is None:
      self._weights = abstract.call(self._prepare, self._params)
    return self._weights

  def apply(self, grads: Params, metrics: dict[str, jax.Array]) -> None:
    """One optimizer step."""
    self._weights = None
    self._params, self.opt_state = self.update(
      self._params, self.opt_state, grads, metrics
    )

  def whole_params(self) -> Params:
    """The same as ``params``."""
    return self._params

  @property
  def held_weights(self) -> Params:
    """Always on the device."""
    return self.weights

  @property
  def renewed_weights(self) -> Params:
    """All of them."""
    return self.weights

  def rest(self) -> None:
    """Nothing: weights stay."""

  def lower_update(self, grads: Params, metrics: Any) -> jax.stages.Lowered:
    """The update ahead of time."""
    return self.update.lower(self._params, self.opt_state, grads, metrics)

  def visiting_bytes(self) -> int:
    """Nothing visits."""
    return 0


class StreamedStore:
  """Parameters and moments in chunks, some or all of them on the host."""

  def __init__(
    self,
    params: Params,
    optimizer: optax.GradientTransformation,
    layout: AnyLayout,
    clip_grad: float,
    where: Offload,
  ):
    self._layout, self._where = layout, where
    self._chunks = Chunks(layout, where.layers_per_chunk)
    self._prepare = jax.jit(
      layout.prepare, out_shardings=shardings_of(layout.abstract_weights())
    )
    self._weights = abstract.call(self._prepare, params)
    self.rest()
    self._params, self._opt_state = [], []
    for i in range(len(self._chunks)):
      chunk = self._chunks.split(params, i)
      shardings = opt_shardings(optimizer, chunk, layout.train)
      init = jax.jit(optimizer.init, out_shardings=shardings)
      # Adapters may have nothing outside of the layers: ask the whole tree.
      planned = abstract.is_abstract(params)
      moments = jax.eval_shape(init, chunk) if planned else init(chunk)
      if i < 2:  # the layer groups are alike
        self._compile(i, chunk, shardings, optimizer, clip_grad)
      self._params.append(self._park(chunk, where.params))
      self._opt_state.append(self._park(moments, where.optimizer))

  def _compile(self, i, chunk, shardings, optimizer, clip_grad) -> None:
    update = functools.partial(_update, optimizer, clip_grad)
    of_params = shardings_of(chunk)
    if i == 0:

      def update_outer(params, opt_state, grads, metrics):
        params, opt_state = update(params, opt_state, grads, metrics)
        return params, opt_state, self._layout.prepare_outer(params)

      self.update_outer = jax.jit(
        update_outer,
        donate_argnums=(0, 1),
        out_shardings=(of_params, shardings, outside(self._weight_shardings())),
      )
      return

    def update_group(params, opt_state, layers, grads, metrics, j):
      grads = self._chunks.take(grads, j)
      params, opt_state = update(params, opt_state, grads, metrics)
      fresh = self._layout.prepare_layers(params)
      return params, opt_state, self._chunks.write(layers, fresh, j)

    self.update_group = jax.jit(
      update_group,
      donate_argnums=(0, 1, 2),
      out_shardings=(of_params, shardings, self._weight_shardings()["layers"]),
    )

  @property
  def params(self) -> list[Params]:
    """The chunks, where they live."""
    return self._params

  @params.setter
  def params(self, chunks: list[Params]) -> None:
    self._weights = None
    self._params = [self._park(chunk, self._where.params) for chunk in chunks]
    self._weights = self._prepare(self.whole_params())
    self.rest()

  @property
  def weights(self) -> Params:
    """What programs compute with, on the device."""
    if offload.is_on_host(self._weights):
      self._weights = offload.to_device(self._weights)
    return self._weights

  @property
  def opt_state(self) -> list[Any]:
    """Moments of each chunk, where they live."""
    return self._opt_state

  @opt_state.setter
  def opt_state(self, states: list[Any]) -> None:
    self._opt_state = [self._park(state, self._where.optimizer) for state in states]

  def apply(self, grads: Params, metrics: dict[str, jax.Array]) -> None:
    """One optimizer step, chunk by chunk."""
    # Chunks must not arrive beside the temporaries of the gradient program.
    jax.block_until_ready(grads)
    weights, self._weights = self.weights, None
    outer, layers = outside(weights), weights["layers"]
    del weights
    arriving = self._fetch(0)
    for i in range(len(self._chunks)):
      params, opt_state = arriving
      if i == 0:
        del outer
        params, opt_state, outer = self.update_outer(
          params, opt_state, outside(grads), metrics
        )
      else:
        params, opt_state, layers = self.update_group(
          params, opt_state, layers, grads["layers"], metrics, jnp.int32(i - 1)
        )
      arriving = self._fetch(i + 1) if i + 1 < len(self._chunks) else None
      self._params[i] = self._park(params, self._where.params)
      self._opt_state[i] = self._park(opt_state, self._where.optimizer)
      if i > 0:
        # The host must not run ahead: three chunks on the device are enough.
        jax.block_until_ready((self._params[i - 1], self._opt_state[i - 1]))
    self._weights = {**outer, "layers": layers}

  def rest(self) -> None:
    """Parks the weights, if they are to live on the host."""
    if self._where.weights:
      self._weights = offload.to_host(self._weights)

  def whole_params(self) -> Params:
    """Stored parameters as one tree on the device; for export and evaluation."""
    return self._chunks.join(map(offload.to_device, self._params))

  @property
  def held_weights(self) -> Params:
    """On the host or on the device."""
    return self._weights

  @property
  def renewed_weights(self) -> Params:
    """None: updates write into them."""
    return {}

  def lower_update(self, grads: Params, metrics: Any) -> jax.stages.Lowered:
    """The update of one group of layers ahead of time."""
    layers = self.weights["layers"]
    return self.update_group.lower(
      *self._fetch(1), layers, grads["layers"], metrics, jnp.int32(0)
    )

  def visiting_bytes(self) -> int:
    """The most that is on the device at once of what lives on the host.

    One chunk is updated, the next one arrives, the one before leaves.
    """
    sizes = [
      abstract.host_bytes(params) + abstract.host_bytes(moments)
      for params, moments in zip(self._params, self._opt_state, strict=True)
    ]
    return max(sum(sizes[i : i + 3]) for i in range(len(sizes)))

  def _fetch(self, i: int) -> tuple[Params, Any]:
    """Chunk i on the device; its host copy stays until the new one is there."""
    params, opt_state = self._params[i], self._opt_state[i]
    if self._where.params:
      params = offload.to_device(params)
    if self._where.optimizer:
      opt_state = offload.to_device(opt_state)
    return params, opt_state

  def _park(self, tree: Any, on_host: bool) -> Any:
    return offload.to_host(tree) if on_host else tree

  def _weight_shardings(self) -> Any:
    return shardings_of(self._layout.abstract_weights())


def opt_shardings(
  optimizer: optax.GradientTransformation, params: Params, layout: Layout
) -> Any:
  """Moments are sharded like their parameters, counters replicated."""
  shapes = jax.eval_shape(optimizer.init, params)
  return optax.tree.map_params(
    optimizer,
    lambda _, p: p.sharding,
    shapes,
    params,
    transform_non_params=lambda _: layout.replicated,
  )


def shardings_of(tree: Any) -> Any:
  """The shardings of a tree of arrays or abstract arrays."""
  return jax.tree.map(lambda x: x.sharding, tree)


def _update(
  optimizer: optax.GradientTransformation,
  clip_grad: float,
  params: Params,
  opt_state: Any,
  grads: Params,
  metrics: dict[str, jax.Array],
) -> tuple[Params, Any]:
  """Clips by the global norm and updates; a skipped update changes nothing."""
  clip = jnp.minimum(1.0, clip_grad / jnp.maximum(metrics["grad_norm"], 1e-30))
  grads = jax.tree.map(lambda g: g * clip, grads)
  updates, new_state = optimizer.update(grads, opt_state, params)
  new_params = optax.apply_updates(params, updates)
  keep = lambda new, old: jnp.where(metrics["skipped_updates"], old, new)
  return jax.tree.map(keep, (new_params, new_state), (params, opt_state))
