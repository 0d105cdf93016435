"""Which projections of a model have low-rank adapters, and the tree of these.

A tree of adapters has a pair ``{"lora_a": [L, in, r], "lora_b": [L, out, r]}``,
fp32, where the tree of parameters has a ``{"kernel": ...}``, and nothing where
there is no adapter. A critic's has its value head too, which is trained whole.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_hybrid.errors import ConfigError
from jaxrl_hybrid.models import params as params_lib
from jaxrl_hybrid.models.hf import names
from jaxrl_hybrid.models.params import DENSE, Params
from jaxrl_hybrid.models.spec import ModelSpec
from jaxrl_hybrid.ops.lora import Adapted

A, B = "lora_a", "lora_b"
ALL_LINEAR = "all-linear"
HEAD = "value_head"


@dataclasses.dataclass(frozen=True)
class LoraSpec:
  """The adapters of a model (LoRA, arXiv:2106.09685).

  Attributes:
    rank: r.
    alpha: the product of a pair is scaled by alpha / r.
    dropout: of what adapters see in gradient passes.
    targets: HF names of projections (``q_proj``), or ``all-linear``: all of
      attention, dense MLPs and shared experts.
    rslora: scale by alpha / sqrt(r) instead (arXiv:2312.03732).
  """

  rank: int
  alpha: float = 32.0
  dropout: float = 0.0
  targets: tuple[str, ...] = (ALL_LINEAR,)
  rslora: bool = False

  @property
  def scale(self) -> float:
    """Factor on the product of a pair."""
    return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclasses.dataclass(frozen=True)
class Target:
  """One projection of a layer.

  Attributes:
    path: keys in the layer's tree, without ``kernel``.
    name: in an HF layer, ``self_attn.q_proj``.
    row: whether its kernel is ``[in, out]``.
  """

  path: tuple[str, ...]
  name: str
  row: bool


def targets(spec: ModelSpec, lora: LoraSpec, *, dense: bool = False) -> list[Target]:
  """The projections of a layer that have adapters.

  Args:
    spec: the model.
    lora: whose ``targets`` choose.
    dense: of a leading layer without experts.

  Raises:
    ConfigError: a name is no projection of the model, or one of its experts.
  """
  known = {kind: _projections(spec, dense=kind) for kind in (False, True)}
  for wanted in lora.targets:
    _check_target(spec, wanted, known[False] + known[True])
  return [
    target
    for target in known[dense]
    if any(_matches(target.name, wanted) for wanted in lora.targets)
  ]


def _projections(spec: ModelSpec, *, dense: bool) -> list[Target]:
  axes = params_lib.logical_axes(spec)
  tree = axes["layers"]
  if dense:
    tree = axes[DENSE]["0"] if spec.dense_layers else {}
  table = names.layer_table(spec)
  return [
    Target(tuple(keys[:-1]), name.removesuffix(".weight"), row)
    for path, name in table.items()
    for keys in [path.split("/")]
    for row in [path.endswith(names.TRANSPOSED)]
    if keys[-1] == "kernel" and _has(tree, keys) and not {"router", "experts"} & {*keys}
  ]


def _check_target(spec: ModelSpec, wanted: str, known: list[Target]) -> None:
  if any(_matches(target.name, wanted) for target in known):
    return
  of_experts = [
    name.removesuffix(".weight")
    for path, name in names.layer_table(spec).items()
    if "/experts/" in path and spec.experts
  ]
  if any(_matches(name, wanted) for name in of_experts):
    raise ConfigError(
      f"lora.targets: {wanted!r} is a projection of routed experts, which have no "
      f"adapters; expected some of {_short(known)} or {ALL_LINEAR!r}"
    )
  raise ConfigError(
    f"lora.targets: expected some of {_short(known)} or {ALL_LINEAR!r} for a "
    f"{spec.family} model, got {wanted!r}"
  )


def _short(known: list[Target]) -> list[str]:
  return sorted({target.name.rpartition(".")[2] for target in known})


def _matches(name: str, wanted: str) -> bool:
  return wanted == ALL_LINEAR or f".{name}".endswith(f".{wanted}")


def init_adapters(spec: ModelSpec, lora: LoraSpec, key: jax.Array) -> Params:
  """Fresh pairs: a uniform in ``+- 1 / sqrt(in)``, b zero, so that nothing changes."""

  def pair(shape, target, number):
    width, size = in_out(shape, target.row)
    bound = 1.0 / math.sqrt(width)
    lead = shape[:-2]
    a = jax.random.uniform(
      jax.random.fold_in(key, number), (*lead, width, lora.rank), minval=-1.0, maxval=1
    )
    return {A: bound * a, B: jnp.zeros((*lead, size, lora.rank), jnp.float32)}

  return build(spec, lora, pair)


def abstract_adapters(spec: ModelSpec, lora: LoraSpec) -> Params:
  """The tree of ``init_adapters`` as shapes; allocates nothing."""
  return jax.eval_shape(lambda: init_adapters(spec, lora, jax.random.key(0)))


def build(
  spec: ModelSpec,
  lora: LoraSpec,
  pair: Callable[[tuple[int, ...], Target, int], Params],
) -> Params:
  """A tree of pairs ``pair(shape of the kernel, target, number of the pair)``."""
  shapes = params_lib.abstract_params(spec, vocab=spec.vocab_size)
  tree: Params = {"layers": {}}
  for number, (path, target) in enumerate(places(spec, lora)):
    kernel = names.get(shapes, (*path, "kernel"))
    names.put(tree, path, pair(kernel.shape, target, number))
  return tree


def places(spec: ModelSpec, lora: LoraSpec) -> Iterator[tuple[tuple[str, ...], Target]]:
  """(keys in the parameter tree, projection) of all pairs."""
  for i in range(spec.dense_layers):
    for target in targets(spec, lora, dense=True):
      yield (DENSE, str(i), *target.path), target
  for target in targets(spec, lora):
    yield ("layers", *target.path), target


def in_out(shape: tuple[int, ...], row: bool) -> tuple[int, int]:
  """(in, out) of a kernel."""
  return (shape[-2], shape[-1]) if row else (shape[-1], shape[-2])


def attach(
  weights: Params, adapters: Params, lora: LoraSpec, seed: jax.Array | None = None
) -> Params:
  """The weights with an ``Adapted`` for each pair; no array is copied.

  Args:
    weights: frozen ones, or what this function made.
    adapters: pairs and, of a critic, the value head.
    lora: their scale.
    seed: uint32, of one gradient pass: adapters see their input through dropout.
  """
  key = None if seed is None else jax.random.key(seed)
  count = 0

  def walk(here: Any, below: Any, path: tuple[str, ...]) -> Any:
    nonlocal count
    if not isinstance(below, dict):
      return below
    if A not in below:
      return {**here, **{k: walk(here.get(k, {}), x, (*path, k))
                         for k, x in below.items()}}  # fmt: skip
    value = here["kernel"]
    value = value.value if isinstance(value, Adapted) else value
    row = "/".join((*path, "kernel")).endswith(names.TRANSPOSED)
    seeds, count = _seeds(key, count, below[A].shape[:-2]), count + 1
    static = dict(scale=lora.scale, rate=lora.dropout, row=row)
    return {**here, "kernel": Adapted(value, below[A], below[B], seeds, **static)}

  return walk(weights, adapters, ())


def _seeds(key: jax.Array | None, number: int, lead: tuple[int, ...]):
  if key is None:
    return None
  return jax.random.bits(jax.random.fold_in(key, number), lead, jnp.uint32)


def pick(weights: Params, like: Params) -> Params:
  """The trained part of attached weights: a tree as ``like``."""
  if not isinstance(like, dict):
    return weights
  if A in like:
    return {A: weights["kernel"].a, B: weights["kernel"].b}
  return {name: pick(weights[name], below) for name, below in like.items()}


def merged(params: Params, adapters: Params, lora: LoraSpec) -> Params:
  """Plain parameters with the adapters merged into their kernels."""
  return jax.tree.map(
    lambda x: x.merged() if isinstance(x, Adapted) else x,
    attach(params, adapters, lora),
    is_leaf=is_adapted,
  )


def is_adapted(x: Any) -> bool:
  """Whether a node of a tree is an ``Adapted``."""
  return isinstance(x, Adapted)


def _has(tree: Params, keys: list[str]) -> bool:
  for key in keys:
    if not isinstance(tree, dict) or key not in tree:
      return False
    tree = tree[key]
  return True
