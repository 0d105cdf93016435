"""HF tensor names to parameter paths: tables, and how to read them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping

from jaxrl_hybrid.models.params import DENSE
from jaxrl_hybrid.models.spec import ModelSpec

# Parameter path in a layer -> HF name in a layer; {e} is the expert.
LAYER_TABLE = {
  "attn_norm/scale": "input_layernorm.weight",
  "attn/q/kernel": "self_attn.q_proj.weight",
  "attn/k/kernel": "self_attn.k_proj.weight",
  "attn/v/kernel": "self_attn.v_proj.weight",
  "attn/o/kernel": "self_attn.o_proj.weight",
  "attn/q/bias": "self_attn.q_proj.bias",
  "attn/k/bias": "self_attn.k_proj.bias",
  "attn/v/bias": "self_attn.v_proj.bias",
  "attn/o/bias": "self_attn.o_proj.bias",
  "attn/q_norm/scale": "self_attn.q_norm.weight",
  "attn/k_norm/scale": "self_attn.k_norm.weight",
  "mlp_norm/scale": "post_attention_layernorm.weight",
  "mlp/gate/kernel": "mlp.gate_proj.weight",
  "mlp/up/kernel": "mlp.up_proj.weight",
  "mlp/down/kernel": "mlp.down_proj.weight",
  "mlp/gate/bias": "mlp.gate_proj.bias",
  "mlp/up/bias": "mlp.up_proj.bias",
  "mlp/down/bias": "mlp.down_proj.bias",
  "mlp/router/kernel": "mlp.gate.weight",
  "mlp/router/correction": "mlp.gate.e_score_correction_bias",
  "mlp/experts/gate/kernel": "mlp.experts.{e}.gate_proj.weight",
  "mlp/experts/up/kernel": "mlp.experts.{e}.up_proj.weight",
  "mlp/experts/down/kernel": "mlp.experts.{e}.down_proj.weight",
  "mlp/shared/gate/kernel": "mlp.shared_experts.gate_proj.weight",
  "mlp/shared/up/kernel": "mlp.shared_experts.up_proj.weight",
  "mlp/shared/down/kernel": "mlp.shared_experts.down_proj.weight",
  "mlp/shared/gate/bias": "mlp.shared_experts.gate_proj.bias",
  "mlp/shared/up/bias": "mlp.shared_experts.up_proj.bias",
  "mlp/shared/down/bias": "mlp.shared_experts.down_proj.bias",
}
_OUT_NORMS = {
  "attn_out_norm/scale": "post_attention_layernorm.weight",
  "mlp_out_norm/scale": "post_feedforward_layernorm.weight",
}
_SANDWICH = _OUT_NORMS | {"mlp_norm/scale": "pre_feedforward_layernorm.weight"}
_LATENT = {
  "attn/q_down/kernel": "self_attn.q_a_proj.weight",
  "attn/q_down/bias": "self_attn.q_a_proj.bias",
  "attn/q_norm/scale": "self_attn.q_a_layernorm.weight",
  "attn/kv_down/kernel": "self_attn.kv_a_proj_with_mqa.weight",
  "attn/kv_down/bias": "self_attn.kv_a_proj_with_mqa.bias",
  "attn/kv_norm/scale": "self_attn.kv_a_layernorm.weight",
  "attn/kv/kernel": "self_attn.kv_b_proj.weight",
}
# What families call otherwise. Paths with one HF name are its rows in this order.
FAMILY_TABLES: dict[str, dict[str, str]] = {
  "gemma2": _SANDWICH,
  "gemma3_text": _SANDWICH,
  "olmo2": _OUT_NORMS,
  "phi3": {
    **dict.fromkeys(
      ("attn/q/kernel", "attn/k/kernel", "attn/v/kernel"), "self_attn.qkv_proj.weight"
    ),
    **dict.fromkeys(("mlp/gate/kernel", "mlp/up/kernel"), "mlp.gate_up_proj.weight"),
  },
  "mixtral": {
    "mlp/router/kernel": "block_sparse_moe.gate.weight",
    "mlp/experts/gate/kernel": "block_sparse_moe.experts.{e}.w1.weight",
    "mlp/experts/up/kernel": "block_sparse_moe.experts.{e}.w3.weight",
    "mlp/experts/down/kernel": "block_sparse_moe.experts.{e}.w2.weight",
  },
  "deepseek_v2": _LATENT,
  "deepseek_v3": _LATENT,
}
# Queries that are compressed first have another name for the second product.
COMPRESSED_QUERIES = {"attn/q/kernel": "self_attn.q_b_proj.weight"}
OUTER_TABLE = {
  "embed/kernel": "model.embed_tokens.weight",
  "norm/scale": "model.norm.weight",
  "lm_head/kernel": "lm_head.weight",
  "value_head/kernel": "score.weight",
}
# HF Linear weights are [out, in]. Column-parallel kernels are kept that way;
# row-parallel ones are transposed, so that the tp dim leads.
TRANSPOSED = ("attn/o/kernel", "mlp/down/kernel", "shared/down/kernel")
TRANSPOSED += ("experts/down/kernel",)
# Buffers that old checkpoints hold and that follow from the config.
DERIVED_SUFFIXES = ("rotary_emb.inv_freq",)
SCORE_PREFIX, SCORE = "score.", OUTER_TABLE["value_head/kernel"]


@dataclasses.dataclass(frozen=True)
class Leaf:
  """Where one parameter leaf lives in an HF checkpoint.

  Attributes:
    path: keys into the parameter tree.
    names: HF names of the matrices or vectors that the leaf is a stack of, in the
      order of its leading dims.
    lead: how many leading dims those are: layers, then experts.
    transposed: whether each HF tensor is the transpose of ours.
    part: (index, rows of each part) if the leaf is some rows of the HF tensor.
  """

  path: tuple[str, ...]
  names: tuple[str, ...]
  lead: int = 0
  transposed: bool = False
  part: tuple[int, tuple[int, ...]] | None = None

  @property
  def rows(self) -> slice:
    """The rows of the HF tensor that the leaf is."""
    if self.part is None:
      return slice(None)
    index, sizes = self.part
    start = sum(sizes[:index])
    return slice(start, start + sizes[index])

  @property
  def is_vocab(self) -> bool:
    """Whether its rows are tokens, of which ours may have more."""
    return self.path[0] in ("embed", "lm_head")

  def tensor_shape(self, shape: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """Shape of the HF tensors, from that of our leaf."""
    expected = shape[self.lead :]
    expected = expected[::-1] if self.transposed else expected
    if self.is_vocab:
      expected = (vocab_size, *expected[1:])
    if self.part is not None:
      expected = (sum(self.part[1]), *expected[1:])
    return expected


def layer_table(spec: ModelSpec) -> dict[str, str]:
  """Parameter path in a layer -> HF name in a layer, of one family."""
  table = LAYER_TABLE | FAMILY_TABLES.get(spec.family, {})
  if spec.latent and spec.latent.q_rank is not None:
    table |= COMPRESSED_QUERIES
  return table


def leaves(spec: ModelSpec, params: dict) -> Iterator[Leaf]:
  """Yields the ``Leaf`` of every leaf of ``params``."""
  for path, name in OUTER_TABLE.items():
    if _has(params, path):
      yield Leaf(tuple(path.split("/")), (name,))
  for i in range(spec.dense_layers):
    yield from _layer_leaves(spec, params[DENSE][str(i)], (DENSE, str(i)), [i])
  stacked = range(spec.dense_layers, spec.num_layers)
  yield from _layer_leaves(spec, params["layers"], ("layers",), stacked)


def _layer_leaves(spec, tree, prefix, numbers) -> Iterator[Leaf]:
  table = {path: name for path, name in layer_table(spec).items() if _has(tree, path)}
  lead = int(prefix == ("layers",))
  for path, name in table.items():
    keys = tuple(path.split("/"))
    places = [f"model.layers.{i}.{name}" for i in numbers]
    experts = range(spec.experts.count) if "{e}" in name else [0]
    yield Leaf(
      (*prefix, *keys),
      tuple(p.format(e=e) for p, e in itertools.product(places, experts)),
      lead + ("{e}" in name),
      path.endswith(TRANSPOSED),
      _part(path, table, tree, lead),
    )


def _part(path: str, table: Mapping[str, str], tree: dict, lead: int):
  sharing = [p for p, name in table.items() if name == table[path]]
  if len(sharing) == 1:
    return None
  sizes = tuple(get(tree, tuple(p.split("/"))).shape[lead] for p in sharing)
  return sharing.index(path), sizes


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


def _has(params: dict, path: str) -> bool:
  for key in path.split("/"):
    if not isinstance(params, dict) or key not in params:
      return False
    params = params[key]
  return True
