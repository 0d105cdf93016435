"""Adapters on the training mesh: stored and trained alone, beside frozen weights.

Same interface as ``WeightLayout``, so that stores and gradient programs serve
both. *Stored* are the fp32 pairs, gradients and moments, spread over all of
(pp, tp, dp) by the input or output dim of the projection. What programs
compute with are the frozen weights of ``base`` with the pairs attached: heads and
layers padded alike, the dim that the kernel has over tp over tp.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_hybrid.models import adapters as adapters_lib
from jaxrl_hybrid.models import heads as heads_lib
from jaxrl_hybrid.models import params as params_lib
from jaxrl_hybrid.models.adapters import HEAD, A, B, LoraSpec
from jaxrl_hybrid.models.hf import names
from jaxrl_hybrid.models.params import Params
from jaxrl_hybrid.models.spec import ModelSpec
from jaxrl_hybrid.ops.lora import Adapted
from jaxrl_hybrid.parallel import abstract, rules
from jaxrl_hybrid.parallel.rules import Axes, Layout
from jaxrl_hybrid.parallel.weights import WeightLayout, drop_stack

# Stored pairs are spread by both of their wide dims; in a kernel one is whole.
_SPREAD = "mlp"


@dataclasses.dataclass(frozen=True)
class AdapterLayout:
  """How the adapters of one model lie on the training mesh.

  Attributes:
    base: of the frozen weights; a value head in it is trained, not frozen.
    lora: the adapters.
  """

  base: WeightLayout
  lora: LoraSpec

  @property
  def spec(self) -> ModelSpec:
    """The model."""
    return self.base.spec

  @property
  def train(self) -> Layout:
    """Mesh and rules of training programs."""
    return self.base.train

  @property
  def stages(self) -> int:
    """pp."""
    return self.base.stages

  @property
  def stored(self) -> Layout:
    """Layout of fp32 adapters, gradients and moments."""
    return self.base.stored

  @property
  def axes(self) -> Params:
    """Logical axes of every stored leaf."""
    spread = lambda axes: tuple(_SPREAD if x == "embed" else x for x in axes)
    axes = self._used_axes
    layers = {k: _map_axes(spread, x) for k, x in axes.items() if k != HEAD}
    return axes | layers

  @property
  def _used_axes(self) -> Params:
    """Logical axes of the leaves in what programs compute with."""
    kernels = self.base.axes
    tree: Params = {"layers": {}}
    for path, target in adapters_lib.places(self.spec, self.lora):
      axes = names.get(kernels, (*path, "kernel"))
      width, size = adapters_lib.in_out(axes, target.row)
      pair = {A: (*axes[:-2], width, None), B: (*axes[:-2], size, None)}
      names.put(tree, path, pair)
    return tree | {k: kernels[k] for k in (HEAD,) if k in kernels}

  def abstract_params(self) -> Params:
    """Shapes, dtypes and shardings of the stored adapters."""
    shapes = adapters_lib.abstract_adapters(self.spec, self.lora)
    if self.base.head == params_lib.VALUE:
      shapes[HEAD] = jax.eval_shape(lambda: params_lib.init_value_head(self.spec))
    return _with_shardings(shapes, self.stored.shardings(self.axes, shapes))

  def abstract_weights(self) -> Params:
    """Shapes, dtypes and shardings of prepared adapters, without frozen weights."""
    shapes = jax.eval_shape(self.prepare, self.abstract_params())
    shardings = self.base.placed.shardings(self._used_axes, shapes)
    return _with_shardings(shapes, shardings)

  def abstract_frozen(self) -> Params:
    """Shapes, dtypes and shardings of the frozen weights."""
    return self.frozen_part(self.base.abstract_weights())

  def frozen_part(self, tree: Params) -> Params:
    """Of a tree of the model, what adapters leave frozen."""
    return {name: tree[name] for name in self.base.axes if name != HEAD}

  def prepare(self, adapters: Params) -> Params:
    """Stored adapters -> as programs compute with them; call it inside a program."""
    layers = self.prepare_layers(adapters["layers"])
    return {**self.prepare_outer(adapters), "layers": layers}

  def prepare_layers(self, layers: Params) -> Params:
    """Of all layers or some of every stage."""
    leaves = jax.tree.leaves(layers)
    missing = -leaves[0].shape[0] % self.stages if leaves else 0
    if missing:
      pad = lambda x: jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))
      layers = jax.tree.map(lambda x: pad(self._whole(x)), layers)
    layers = self._change_heads(layers, heads_lib.pad_heads)
    axes = self._used_axes["layers"]
    return jax.tree.map(self.base.placed.constrain, layers, axes)

  def prepare_outer(self, adapters: Params) -> Params:
    """What is stored outside of the stacked layers."""
    outer = {name: leaf for name, leaf in adapters.items() if name != "layers"}
    axes = self._used_axes
    return jax.tree.map(self.base.placed.constrain, outer, {k: axes[k] for k in outer})

  def attach(
    self, weights: Params, adapters: Params, seed: jax.Array | None = None
  ) -> Params:
    """Frozen weights and prepared adapters -> what programs compute with."""
    return adapters_lib.attach(self.frozen_part(weights), adapters, self.lora, seed)

  def value_and_grad(
    self,
    loss: Callable[[Params], Any],
    weights: Params,
    grads: Params,
    seed: jax.Array | None = None,
  ) -> tuple[Any, Params]:
    """``((loss, aux), grads + gradient)`` of the adapters.

    Args:
      loss: of weights.
      weights: as ``attach`` made them.
      grads: fp32, of the adapters' shapes (``zeros``).
      seed: uint32, of this micro-batch's dropout.
    """
    loss_of = lambda adapters: loss(self.attach(weights, adapters, seed))
    value, new = jax.value_and_grad(loss_of, has_aux=True)(self._adapters(weights))
    return value, self._constrain(jax.tree.map(jnp.add, grads, new), self._gradients)

  def zeros(self, weights: Params) -> Params:
    """fp32 zeros, shaped like prepared adapters and placed as gradients are."""
    zeros = lambda x: jnp.zeros(x.shape, jnp.float32)
    zeros = jax.tree.map(zeros, self._adapters(weights))
    return self._constrain(zeros, self._gradients)

  def use(self, weights: Params, *, layer: bool) -> Params:
    """As ``WeightLayout.use``, of weights with adapters."""
    axes = (
      self.base.axes["layers"] if layer else {k: self.base.axes[k] for k in weights}
    )
    if layer:
      axes = drop_stack(axes)

    def place(leaf: Any, axes: Axes) -> Any:
      constrain = self.train.constrain
      if not isinstance(leaf, Adapted):
        return constrain(leaf, axes)
      width, size = adapters_lib.in_out(axes, leaf.row)
      return dataclasses.replace(
        leaf,
        value=constrain(leaf.value, axes),
        a=constrain(leaf.a, (width, None)),
        b=constrain(leaf.b, (size, None)),
      )

    return jax.tree.map(place, weights, axes, is_leaf=adapters_lib.is_adapted)

  def strip(self, grads: Params) -> Params:
    """Gradients of prepared adapters -> of the stored ones."""
    layers, count = grads["layers"], self.spec.stacked_layers
    if self.base.padded_layers != count:
      layers = jax.tree.map(lambda x: self._whole(x)[:count], layers)
    layers = self._change_heads(layers, heads_lib.unpad_heads)
    return self._constrain({**grads, "layers": layers}, self.stored)

  def _change_heads(self, layers: Params, change: Callable[..., Params]) -> Params:
    """Pads or unpads what is by heads: b of queries, keys and values, a of outputs."""
    if not self.base.heads.pads_weights or "attn" not in layers:
      return layers
    by_head = lambda name: A if name == "o" else B
    attn = jax.tree.map(self._whole, layers["attn"])
    moved = {name: {"kernel": pair[by_head(name)]} for name, pair in attn.items()}
    moved = change({"attn": moved}, self.base.heads, self.spec.head_dim)["attn"]
    attn = {
      name: {**pair, by_head(name): moved[name]["kernel"]}
      for name, pair in attn.items()
    }
    return {**layers, "attn": attn}

  def _adapters(self, weights: Params) -> Params:
    return adapters_lib.pick(weights, self._used_axes)

  @property
  def _gradients(self) -> Layout:
    return Layout(self.train.mesh, rules.stored_rules(divisible_layers=True))

  def _whole(self, x: jax.Array) -> jax.Array:
    """Unsharded: rows move to other devices."""
    return jax.lax.with_sharding_constraint(x, self.train.replicated)

  def _constrain(self, tree: Params, layout: Layout) -> Params:
    return jax.tree.map(layout.constrain, tree, self.axes)


class Merger:
  """Compiled: weights with adapters -> plain weights of the same layout."""

  def __init__(self, layout: AdapterLayout):
    like = layout.frozen_part(layout.base.abstract_weights())
    marked = adapters_lib.attach(like, layout.abstract_weights(), layout.lora)
    self._program = jax.jit(
      lambda kernels: [kernel.merged() for kernel in kernels],
      out_shardings=[kernel.value.sharding for kernel in _kernels(marked)],
    )

  def __call__(self, weights: Params) -> Params:
    """Kernels without adapters are the same arrays; ``weights`` may be shapes."""
    kernels = _kernels(weights)
    if not kernels:
      return weights
    plain = iter(abstract.call(self._program, kernels))
    return jax.tree.map(
      lambda x: next(plain) if isinstance(x, Adapted) else x,
      weights,
      is_leaf=adapters_lib.is_adapted,
    )


def _kernels(weights: Params) -> list[Adapted]:
  leaves = jax.tree.leaves(weights, is_leaf=adapters_lib.is_adapted)
  return [x for x in leaves if isinstance(x, Adapted)]


def _map_axes(change: Callable[[Axes], Axes], tree: Params) -> Params:
  return jax.tree.map(change, tree, is_leaf=lambda x: isinstance(x, tuple))


def _with_shardings(shapes: Any, shardings: Any) -> Any:
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
  )
