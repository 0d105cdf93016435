"""Parameter trees: plain nested dicts of arrays, layers stacked on axis 0.

``{"embed": {"kernel"}, "layers": {...: [L, ...]}, "norm": {"scale"},
"lm_head" | "value_head": {"kernel"}}``; a tied model has no ``lm_head``. Leading
layers without experts are not alike and stand in ``"dense": {"0": {...}, ...}``.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_hybrid.models import fused, layers
from jaxrl_hybrid.models.block import DecoderLayer
from jaxrl_hybrid.models.spec import ModelSpec

Params = dict[str, Any]
LM, VALUE = "lm", "value"  # heads
DENSE = "dense"


def init_params(
  spec: ModelSpec, key: jax.Array, *, vocab: int, head: str = LM
) -> Params:
  """Random fp32 parameters; ``vocab`` is the padded vocabulary size."""
  keys = jax.random.split(key, spec.num_layers + 1)
  tree = {
    name: _pure(module) for name, module in _outer(spec, keys[0], vocab, head).items()
  }

  def make_layer(key: jax.Array, dense: bool = False) -> Params:
    return _pure(DecoderLayer(spec, dense=dense, rngs=nnx.Rngs(key)))

  leading = spec.dense_layers
  if leading:
    tree[DENSE] = {
      str(i): make_layer(k, dense=True) for i, k in enumerate(keys[1 : leading + 1])
    }
  tree["layers"] = jax.vmap(make_layer)(keys[leading + 1 :])
  return tree


def dense_layers(params: Params) -> list[Params]:
  """The leading layers without experts, in order."""
  dense = params.get(DENSE, {})
  return [dense[str(i)] for i in range(len(dense))]


def num_params(spec: ModelSpec, *, head: str = LM) -> int:
  """Number of parameters, un-padded, tied embeddings counted once."""
  shapes = abstract_params(spec, vocab=spec.vocab_size, head=head)
  return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))


def init_value_head(spec: ModelSpec) -> Params:
  """A fresh value head: zeros, so that the first values are 0."""
  return {"kernel": jnp.zeros((1, spec.hidden_size), jnp.float32)}


def abstract_params(spec: ModelSpec, *, vocab: int, head: str = LM) -> Params:
  """The tree of ``init_params`` as ``ShapeDtypeStruct``; allocates nothing."""
  init = functools.partial(init_params, spec, vocab=vocab, head=head)
  return jax.eval_shape(init, jax.random.key(0))


def is_rounded(path: tuple[Any, ...]) -> bool:
  """Whether the leaf at a tree path is computed with in the compute dtype.

  Kernels of products are; norms, biases, routers and the value head stay fp32.
  """
  keys = [entry.key for entry in path]
  return keys[-1] == "kernel" and not {"value_head", "router"} & set(keys)


def compute_copy(params: Params, dtype: jnp.dtype) -> Params:
  """Kernels in the compute dtype, as products round them; the rest unchanged."""
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: leaf.astype(dtype) if is_rounded(path) else leaf, params
  )


@functools.lru_cache(maxsize=16)
def logical_axes(spec: ModelSpec, *, head: str = LM) -> Params:
  """The same tree with a tuple of logical axis names at each leaf; not to change."""
  abstract = nnx.eval_shape(
    lambda: _outer(spec, jax.random.key(0), spec.vocab_size, head)
  )
  tree = {name: _axes(module) for name, module in abstract.items()}
  if spec.dense_layers:
    one = _axes(_abstract_layer(spec, dense=True))
    tree[DENSE] = {str(i): one for i in range(spec.dense_layers)}
  layer = _abstract_layer(spec)
  stack = lambda axes: ("layers", *axes)
  tree["layers"] = jax.tree.map(
    stack, _axes(layer), is_leaf=lambda x: isinstance(x, tuple)
  )
  return tree


def bind_layer(spec: ModelSpec, params: Params, *, dense: bool = False) -> DecoderLayer:
  """Returns the layer module whose parameters are ``params`` (one layer's).

  Projections may be fused, as the generation layout has them.
  """
  graphdef, state = _layer_structure(spec, dense, fused.kinds(params))
  state = jax.tree.map(lambda leaf: leaf, state)
  nnx.replace_by_pure_dict(state, params)
  return nnx.merge(graphdef, state)


@functools.lru_cache(maxsize=16)
def _layer_structure(
  spec: ModelSpec, dense: bool, fused_kinds: frozenset[str]
) -> tuple[Any, Any]:
  return nnx.split(_abstract_layer(spec, dense=dense, fused=fused_kinds))


def _abstract_layer(spec: ModelSpec, **form: Any) -> DecoderLayer:
  return nnx.eval_shape(lambda: DecoderLayer(spec, **form, rngs=nnx.Rngs(0)))


def _outer(spec: ModelSpec, key: jax.Array, vocab: int, head: str) -> dict[str, Any]:
  std, rngs = spec.initializer_range, nnx.Rngs(key)
  table = functools.partial(layers.Table, hidden=spec.hidden_size, rngs=rngs)
  # Unit-variance embeddings (as in T5) keep the token in front in the residual
  # stream, which tiny models learn from much faster; a tied table is a head too.
  embed_std = std if spec.tie_word_embeddings else 1.0
  modules = {
    "embed": table(vocab, axis="vocab", std=embed_std),
    "norm": layers.norm(spec, spec.hidden_size),
  }
  if head == VALUE:
    modules["value_head"] = table(1, axis=None, std=std)
  elif not spec.tie_word_embeddings:
    modules["lm_head"] = table(vocab, axis="vocab", std=std)
  return modules


def _pure(module: nnx.Module) -> Params:
  return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def _axes(module: nnx.Module) -> Params:
  flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
  tree: Params = {}
  for path, variable in flat:
    node = tree
    for name in path[:-1]:
      node = node.setdefault(name, {})
    node[path[-1]] = tuple(variable.get_metadata()["logical_axes"])
  return tree
