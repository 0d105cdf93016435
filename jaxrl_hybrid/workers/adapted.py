"""A model whose adapters are trained beside weights that stay as they are."""

from __future__ import annotations

from typing import Any

import jax

from jaxrl_hybrid.models.params import Params
from jaxrl_hybrid.parallel import offload
from jaxrl_hybrid.parallel.adapters import AdapterLayout
from jaxrl_hybrid.workers.stores import Store


class Frozen:
  """Weights that no update changes: the base of adapters.

  Args:
    weights: in the training layout, 16-bit kernels; no fp32 copy exists.
    on_host: keep them in pinned host memory between uses.
    shared: another role owns these arrays.
  """

  def __init__(self, weights: Params, *, on_host: bool = False, shared: bool = False):
    self._shared = shared
    self._resting = offload.to_host(weights) if on_host else None
    self._weights = None if on_host else weights

  def share(self) -> Frozen:
    """The same arrays for another role, at no cost."""
    return Frozen(self.weights, shared=True)

  @property
  def weights(self) -> Params:
    """On the device."""
    if self._weights is None:
      self._weights = offload.to_device(self._resting)
    return self._weights

  @property
  def held(self) -> Params:
    """Where they are now; nothing if another role owns them."""
    if self._shared:
      return {}
    return self._resting if self._weights is None else self._weights

  def rest(self) -> None:
    """Frees the device copy, if they are to live on the host."""
    if self._resting is not None:
      self._weights = None


class AdaptedStore:
  """The store of the adapters, and weights with these attached.

  Parameters, moments and gradients are those of the adapters alone.
  """

  def __init__(self, adapters: Store, frozen: Frozen, layout: AdapterLayout):
    self.frozen = frozen
    self._adapters, self._layout = adapters, layout

  @property
  def params(self) -> Any:
    """The adapters as their store keeps them."""
    return self._adapters.params

  @params.setter
  def params(self, params: Any) -> None:
    self._adapters.params = params

  @property
  def opt_state(self) -> Any:
    """Moments of the adapters."""
    return self._adapters.opt_state

  @opt_state.setter
  def opt_state(self, opt_state: Any) -> None:
    self._adapters.opt_state = opt_state

  @property
  def weights(self) -> Params:
    """What programs compute with, on the device."""
    return self._layout.attach(self.frozen.weights, self._adapters.weights)

  @property
  def held_weights(self) -> Params:
    """Of this role alone, where they are now."""
    return {"frozen": self.frozen.held, "adapters": self._adapters.held_weights}

  @property
  def renewed_weights(self) -> Params:
    """Of the adapters."""
    return self._adapters.renewed_weights

  def apply(self, grads: Params, metrics: dict[str, jax.Array]) -> None:
    """One optimizer step of the adapters."""
    self._adapters.apply(grads, metrics)

  def whole_params(self) -> Params:
    """The adapters as one tree."""
    return self._adapters.whole_params()

  def rest(self) -> None:
    """Parks what is to live on the host."""
    self._adapters.rest()
    self.frozen.rest()

  def lower_update(self, grads: Params, metrics: Any) -> jax.stages.Lowered:
    """The update ahead of time."""
    return self._adapters.lower_update(grads, metrics)

  def visiting_bytes(self) -> int:
    """Of the adapters."""
    return self._adapters.visiting_bytes()
