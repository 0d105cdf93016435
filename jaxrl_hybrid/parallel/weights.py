"""What is stored and what is computed with: fp32 parameters and weights.

*Stored*: fp32, in the model's own shapes, spread over all of (pp, tp, dp); so are
gradients and optimizer moments (ZeRO-1, arXiv:1910.02054). *Weights*: kernels in
the compute dtype, heads and layers padded so that tp and pp divide them, placed
by the training rules; with ``zero=3`` they too are spread over dp, and gathered
layer by layer where they are used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_hybrid.errors import ConfigError
from jaxrl_hybrid.models import heads as heads_lib
from jaxrl_hybrid.models import params as params_lib
from jaxrl_hybrid.models.params import Params
from jaxrl_hybrid.models.spec import WHOLE, ModelSpec
from jaxrl_hybrid.ops.matmul import Kernel
from jaxrl_hybrid.parallel import rules
from jaxrl_hybrid.parallel.rules import Layout
from jaxrl_hybrid.shapes import round_up

ZERO = (1, 3)


@dataclasses.dataclass(frozen=True)
class WeightLayout:
  """How one model's parameters lie on the training mesh.

  Attributes:
    spec: the model.
    train: mesh and rules of training programs.
    dtype: of the weights' kernels.
    zero: 1 or 3.
    head: ``params.LM`` or ``params.VALUE``.
  """

  spec: ModelSpec
  train: Layout
  dtype: jnp.dtype
  zero: int = 1
  head: str = params_lib.LM

  @property
  def heads(self) -> heads_lib.HeadPlan:
    """The attention heads of the training programs."""
    return plan_heads(self.spec, self.train.mesh)

  @property
  def vocab(self) -> int:
    """Padded vocabulary size."""
    return padded_vocab(self.spec, self.train.mesh)

  @property
  def stages(self) -> int:
    """pp."""
    return self.train.mesh.shape["pp"]

  @property
  def padded_layers(self) -> int:
    """Layers of the weights; a layer of zeros changes nothing."""
    return round_up(self.spec.stacked_layers, self.stages)

  @property
  def stored(self) -> Layout:
    """Layout of fp32 parameters, gradients and moments."""
    even = self.spec.stacked_layers == self.padded_layers
    return Layout(self.train.mesh, rules.stored_rules(divisible_layers=even))

  @property
  def placed(self) -> Layout:
    """Layout of the weights between programs."""
    if self.zero == 1:
      return self.train
    return Layout(self.train.mesh, rules.stored_rules(divisible_layers=True))

  @property
  def axes(self) -> Params:
    """Logical axes of every leaf."""
    return params_lib.logical_axes(self.spec, head=self.head)

  def abstract_params(self) -> Params:
    """Shapes, dtypes and shardings of the stored parameters."""
    shapes = params_lib.abstract_params(self.spec, vocab=self.vocab, head=self.head)
    return _with_shardings(shapes, self.stored.shardings(self.axes, shapes))

  def abstract_weights(self) -> Params:
    """Shapes, dtypes and shardings of the weights."""
    shapes = jax.eval_shape(self.prepare, self.abstract_params())
    return _with_shardings(shapes, self.placed.shardings(self.axes, shapes))

  def prepare(self, params: Params) -> Params:
    """Stored parameters -> weights; call it inside a program."""
    layers = self.prepare_layers(params["layers"])
    return {**self.prepare_outer(params), "layers": layers}

  def prepare_layers(self, layers: Params) -> Params:
    """Stored layers, all or some of every stage -> weights."""
    axes = self.axes["layers"]
    return jax.tree.map(self.placed.constrain, self._convert_layers(layers), axes)

  def prepare_outer(self, params: Params) -> Params:
    """What is stored outside of the layers -> weights."""
    outer = {name: leaf for name, leaf in params.items() if name != "layers"}
    outer = params_lib.compute_copy(outer, self.dtype)
    return jax.tree.map(self.placed.constrain, outer, {k: self.axes[k] for k in outer})

  def value_and_grad(
    self, loss: Callable[[Params], Any], weights: Params, grads: Params
  ) -> tuple[Any, Params]:
    """``((loss, aux), grads + gradient)``; layers add theirs in place.

    Args:
      loss: of trainable weights.
      weights: as programs compute with them.
      grads: fp32, of the weights' shapes (``zeros``).
    """

    def attach(path, leaf, slot, seed):
      if path[0].key == "layers":
        return Kernel(leaf, slot, seed)
      return Kernel(leaf, slot) if params_lib.is_rounded(path) else leaf + slot

    def loss_of(slots):
      return loss(jax.tree_util.tree_map_with_path(attach, weights, slots, grads))

    value, new = jax.value_and_grad(loss_of, has_aux=True)(self.zeros(weights))
    outer = {k: jax.tree.map(jnp.add, grads[k], x) for k, x in new.items()}
    return value, {**outer, "layers": new["layers"]}

  def zeros(self, weights: Params) -> Params:
    """fp32 zeros, shaped like the weights and placed as gradients are."""
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), weights)
    return self._constrain(zeros, self._gradients)

  def use(self, weights: Params, *, layer: bool) -> Params:
    """Weights as a program multiplies with them; gradients leave spread over dp.

    Args:
      weights: one layer's tree, or (``layer=False``) the tree without layers.
      layer: which of the two.
    """
    axes = self.axes["layers"] if layer else {k: self.axes[k] for k in weights}
    if layer:
      axes = drop_stack(axes)

    def place(path, leaf, names):
      if not isinstance(leaf, Kernel):
        return self.train.constrain(leaf, names)
      value = self.train.constrain(leaf.value, names)
      slot = self._gradients.constrain(leaf.slot, names)
      return Kernel(value, slot) if params_lib.is_rounded(path) else value + slot

    return jax.tree_util.tree_map_with_path(
      place, weights, axes, is_leaf=lambda x: isinstance(x, Kernel)
    )

  def strip(self, grads: Params) -> Params:
    """Gradients of the weights -> of the stored parameters."""
    layers = grads["layers"]
    if self.heads.pads_weights:
      layers = {**layers, "attn": jax.tree.map(self._gather, layers["attn"])}
    if self.padded_layers != self.spec.stacked_layers:
      cut = lambda x: self._gather(x)[: self.spec.stacked_layers]
      layers = jax.tree.map(cut, layers)
    layers = heads_lib.unpad_heads(layers, self.heads, self.spec.head_dim)
    return self._constrain({**grads, "layers": layers}, self.stored)

  @property
  def _gradients(self) -> Layout:
    """Layout of gradients of the weights' shapes."""
    return Layout(self.train.mesh, rules.stored_rules(divisible_layers=True))

  def _convert_layers(self, layers: Params) -> Params:
    layers = params_lib.compute_copy({"layers": layers}, self.dtype)["layers"]
    count = jax.tree.leaves(layers)[0].shape[0]
    missing = -count % self.stages
    if missing:
      pad = lambda x: jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))
      layers = jax.tree.map(lambda x: pad(self._gather(x)), layers)
    if self.heads.pads_weights:
      layers = {**layers, "attn": jax.tree.map(self._gather, layers["attn"])}
    return heads_lib.pad_heads(layers, self.heads, self.spec.head_dim)

  def _gather(self, x: jax.Array) -> jax.Array:
    """Unsharded: for the rare arrays whose rows move to other devices.

    XLA would find many small collectives instead, which can also deadlock on a
    CPU with few threads.
    """
    return jax.lax.with_sharding_constraint(x, self.train.replicated)

  def _constrain(self, tree: Params, layout: Layout) -> Params:
    return jax.tree.map(layout.constrain, tree, self.axes)


def plan_heads(spec: ModelSpec, mesh: Mesh) -> heads_lib.HeadPlan:
  """The heads of a model on a mesh with a tp axis.

  Raises:
    ConfigError: tp has to divide what cannot be padded and does not.
  """
  tp = mesh.shape["tp"]
  _check_divides(tp, spec.latent and spec.num_heads, "heads of latent attention")
  _check_divides(tp, spec.experts and spec.experts.count, "experts")
  return heads_lib.plan_heads(
    spec.num_heads, spec.num_kv_heads, tp, norms=spec.qk_norm == WHOLE
  )


def _check_divides(tp: int, count: int | None, what: str) -> None:
  if count and count % tp:
    allowed = [n for n in range(1, count + 1) if count % n == 0]
    raise ConfigError(
      f"mesh: expected a tp that divides the {count} {what}, one of {allowed}; got {tp}"
    )


def padded_vocab(spec: ModelSpec, mesh: Mesh) -> int:
  """The vocabulary size that every axis of a training mesh divides."""
  return spec.padded_vocab(mesh.size)


def train_layout(spec: ModelSpec, mesh: Mesh, *, sequence_parallel: bool) -> Layout:
  """Mesh and rules of a model's training programs."""
  plan = plan_heads(spec, mesh)
  return Layout(mesh, rules.train_rules(plan, sequence_parallel=sequence_parallel))


def generation_layout(spec: ModelSpec, mesh: Mesh) -> Layout:
  """Mesh and rules of a model's generation programs."""
  return Layout(mesh, rules.generation_rules(plan_heads(spec, mesh)))


def _with_shardings(shapes: Any, shardings: Any) -> Any:
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
  )


def drop_stack(axes: Any) -> Any:
  """Logical axes of one layer from those of the stack."""
  return jax.tree.map(
    lambda names: names[1:], axes, is_leaf=lambda x: isinstance(x, tuple)
  )
