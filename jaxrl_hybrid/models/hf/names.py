"""HF tensor names to parameter paths: a table, no code."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jaxrl_hybrid.models.params import LM, VALUE
from jaxrl_hybrid.models.spec import ModelSpec

# HF Linear weights are [out, in]. Column-parallel kernels are kept that way;
# row-parallel ones ("T") are transposed, so that the tp dim leads.
LAYER_TABLE = (
  ("input_layernorm.weight", "attn_norm/scale", ""),
  ("self_attn.q_proj.weight", "attn/q/kernel", ""),
  ("self_attn.k_proj.weight", "attn/k/kernel", ""),
  ("self_attn.v_proj.weight", "attn/v/kernel", ""),
  ("self_attn.o_proj.weight", "attn/o/kernel", "T"),
  ("self_attn.q_proj.bias", "attn/q/bias", ""),
  ("self_attn.k_proj.bias", "attn/k/bias", ""),
  ("self_attn.v_proj.bias", "attn/v/bias", ""),
  ("self_attn.o_proj.bias", "attn/o/bias", ""),
  ("self_attn.q_norm.weight", "attn/q_norm/scale", ""),
  ("self_attn.k_norm.weight", "attn/k_norm/scale", ""),
  ("post_attention_layernorm.weight", "mlp_norm/scale", ""),
  ("mlp.gate_proj.weight", "mlp/gate/kernel", ""),
  ("mlp.up_proj.weight", "mlp/up/kernel", ""),
  ("mlp.down_proj.weight", "mlp/down/kernel", "T"),
  ("mlp.gate_proj.bias", "mlp/gate/bias", ""),
  ("mlp.up_proj.bias", "mlp/up/bias", ""),
  ("mlp.down_proj.bias", "mlp/down/bias", ""),
)
OUTER_TABLE = (
  ("model.embed_tokens.weight", "embed/kernel"),
  ("model.norm.weight", "norm/scale"),
  ("lm_head.weight", "lm_head/kernel"),
)
# Buffers that old checkpoints hold and that follow from the config.
DERIVED_SUFFIXES = ("rotary_emb.inv_freq",)


@dataclasses.dataclass(frozen=True)
class Leaf:
  """Where one parameter leaf lives in an HF checkpoint.

  Attributes:
    path: keys into the parameter tree.
    names: one HF name per layer, or a single one outside of the layers.
    transposed: whether each HF tensor is the transpose of ours.
    stacked: whether the leaf has a leading layer axis.
  """

  path: tuple[str, ...]
  names: tuple[str, ...]
  transposed: bool = False
  stacked: bool = False


def leaves(spec: ModelSpec, params: dict, head: str = LM) -> Iterator[Leaf]:
  """Yields the ``Leaf`` of every leaf of ``params`` that HF has a name for.

  The value head (``head=VALUE``) has none in a causal LM and is left out.
  """
  for name, path in OUTER_TABLE:
    keys = tuple(path.split("/"))
    if keys[0] in params and not (head == VALUE and keys[0] == "lm_head"):
      yield Leaf(keys, (name,))
  for suffix, path, flag in LAYER_TABLE:
    keys = ("layers", *path.split("/"))
    if _has(params, keys):
      names = tuple(f"model.layers.{i}.{suffix}" for i in range(spec.num_layers))
      yield Leaf(keys, names, transposed=flag == "T", stacked=True)


def get(params: dict, path: tuple[str, ...]):
  """The leaf at a path."""
  for key in path:
    params = params[key]
  return params


def put(params: dict, path: tuple[str, ...], leaf) -> None:
  """Sets the leaf at a path, making the dicts on the way."""
  for key in path[:-1]:
    params = params.setdefault(key, {})
  params[path[-1]] = leaf


def _has(params: dict, path: tuple[str, ...]) -> bool:
  for key in path:
    if not isinstance(params, dict) or key not in params:
      return False
    params = params[key]
  return True
