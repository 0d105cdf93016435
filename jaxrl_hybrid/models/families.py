"""From HF configs to ``ModelSpec``: a row in ``FAMILIES`` for each model type.

A feature that the decoder does not have is an error here, before any weight is
read; never a silently different model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxrl_hybrid.errors import ModelError
from jaxrl_hybrid.models.rope_config import FULL, SLIDING, ropes_from_hf
from jaxrl_hybrid.models.spec import (
  PER_HEAD,
  POST_NORM,
  SANDWICH,
  SIGMOID,
  WHOLE,
  ExpertSpec,
  LatentSpec,
  ModelSpec,
)

HFConfig = Mapping[str, Any]
Fields = dict[str, Any]

# HF's names of activations -> ours.
ACTIVATIONS = {
  "silu": "silu",
  "swish": "silu",
  "gelu": "gelu",
  "gelu_pytorch_tanh": "gelu_tanh",
  "gelu_new": "gelu_tanh",
}


def _llama(config: HFConfig) -> Fields:
  bias = bool(config.get("attention_bias", False))
  return dict(
    qkv_bias=bias, out_bias=bias, mlp_bias=bool(config.get("mlp_bias", False))
  )


def _mistral(config: HFConfig) -> Fields:
  return _windows(config)


def _qwen2(config: HFConfig) -> Fields:
  return dict(qkv_bias=True) | _windows(config)


def _qwen3(config: HFConfig) -> Fields:
  bias = bool(config.get("attention_bias", False))
  return dict(qk_norm=PER_HEAD, qkv_bias=bias, out_bias=bias) | _windows(config)


def _qwen3_moe(config: HFConfig) -> Fields:
  if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
    raise ModelError(
      "expected experts in every layer (decoder_sparse_step=1, mlp_only_layers=[]), "
      f"got {config.get('decoder_sparse_step')}, {config.get('mlp_only_layers')}"
    )
  experts = ExpertSpec(
    _expert_count(config),
    config["num_experts_per_tok"],
    config["moe_intermediate_size"],
    normalize=bool(config.get("norm_topk_prob")),
  )
  return _qwen3(config) | dict(experts=experts)


def _mixtral(config: HFConfig) -> Fields:
  experts = ExpertSpec(
    _expert_count(config), config["num_experts_per_tok"], config["intermediate_size"]
  )
  return dict(experts=experts) | _windows(config)


def _gemma(config: HFConfig) -> Fields:
  bias = bool(config.get("attention_bias", False))
  if config.get("use_bidirectional_attention"):
    raise ModelError("use_bidirectional_attention=true is not supported")
  return dict(
    qkv_bias=bias,
    out_bias=bias,
    norm_offset=1.0,
    embed_scale=math.sqrt(config["hidden_size"]),
  )


def _gemma2(config: HFConfig) -> Fields:
  return (
    _gemma(config)
    | dict(
      norms=SANDWICH,
      attention_scale=config["query_pre_attn_scalar"] ** -0.5,
      attention_softcap=config.get("attn_logit_softcapping"),
      logit_softcap=config.get("final_logit_softcapping"),
    )
    | _windows(config)
  )


def _gemma3(config: HFConfig) -> Fields:
  return _gemma2(config) | dict(qk_norm=PER_HEAD)


def _phi3(config: HFConfig) -> Fields:
  bias = bool(config.get("attention_bias", False))
  return dict(qkv_bias=bias, out_bias=bias) | _windows(config)


def _olmo2(config: HFConfig) -> Fields:
  bias = bool(config.get("attention_bias", False))
  return dict(qkv_bias=bias, out_bias=bias, norms=POST_NORM, qk_norm=WHOLE)


def _deepseek(config: HFConfig) -> Fields:
  bias = bool(config.get("attention_bias", False))
  latent = LatentSpec(
    config.get("q_lora_rank"),
    config["kv_lora_rank"],
    config["qk_nope_head_dim"],
    config["qk_rope_head_dim"],
    config["v_head_dim"],
  )
  width = latent.nope_dim + latent.rope_dim
  dense = min(config.get("first_k_dense_replace") or 0, config["num_hidden_layers"])
  return dict(
    latent=latent,
    head_dim=width,
    num_kv_heads=config["num_attention_heads"],
    qkv_bias=bias,
    out_bias=bias,
    mlp_bias=bool(config.get("mlp_bias", False)),
    attention_scale=width**-0.5 * _latent_mscale(config) ** 2,
    dense_layers=dense,
  )


def _deepseek_v2(config: HFConfig) -> Fields:
  method = config.get("topk_method") or "greedy"
  if method not in ("greedy", "group_limited_greedy"):
    raise ModelError(
      "topk_method: expected greedy or group_limited_greedy, got " + repr(method)
    )
  grouped = method == "group_limited_greedy"
  experts = ExpertSpec(
    _expert_count(config),
    config["num_experts_per_tok"],
    config["moe_intermediate_size"],
    shared_size=config["moe_intermediate_size"] * config["n_shared_experts"],
    normalize=False,
    scale=config.get("routed_scaling_factor", 1.0),
    groups=config["n_group"] if grouped else 1,
    top_groups=config["topk_group"] if grouped else 1,
  )
  return _deepseek(config) | dict(experts=experts)


def _deepseek_v3(config: HFConfig) -> Fields:
  experts = ExpertSpec(
    _expert_count(config),
    config["num_experts_per_tok"],
    config["moe_intermediate_size"],
    shared_size=config["moe_intermediate_size"] * config["n_shared_experts"],
    scores=SIGMOID,
    normalize=bool(config.get("norm_topk_prob", True)),
    scale=config.get("routed_scaling_factor", 1.0),
    groups=config["n_group"],
    top_groups=config["topk_group"],
    group_score_of=2,
    corrected=True,
  )
  return _deepseek(config) | dict(experts=experts)


FAMILIES: dict[str, Callable[[HFConfig], Fields]] = {
  "llama": _llama,
  "mistral": _mistral,
  "mixtral": _mixtral,
  "qwen2": _qwen2,
  "qwen3": _qwen3,
  "qwen3_moe": _qwen3_moe,
  "gemma": _gemma,
  "gemma2": _gemma2,
  "gemma3_text": _gemma3,
  "phi3": _phi3,
  "olmo2": _olmo2,
  "deepseek_v2": _deepseek_v2,
  "deepseek_v3": _deepseek_v3,
}
# transformers' class of each, for a config that names none.
ARCHITECTURES = {
  "llama": "LlamaForCausalLM",
  "mistral": "MistralForCausalLM",
  "mixtral": "MixtralForCausalLM",
  "qwen2": "Qwen2ForCausalLM",
  "qwen3": "Qwen3ForCausalLM",
  "qwen3_moe": "Qwen3MoeForCausalLM",
  "gemma": "GemmaForCausalLM",
  "gemma2": "Gemma2ForCausalLM",
  "gemma3_text": "Gemma3ForCausalLM",
  "phi3": "Phi3ForCausalLM",
  "olmo2": "Olmo2ForCausalLM",
  "deepseek_v2": "DeepseekV2ForCausalLM",
  "deepseek_v3": "DeepseekV3ForCausalLM",
}


def spec_from_hf(config: HFConfig) -> ModelSpec:
  """Reads a ``ModelSpec`` from an HF config dict with its defaults filled in.

  Args:
    config: ``transformers`` config as a dict (``load_hf_config``).

  Returns:
    The spec.

  Raises:
    ModelError: the model type or one of its features is not supported.
  """
  family = config.get("model_type")
  if family not in FAMILIES:
    raise ModelError(
      f"model_type {family!r} is not supported; expected one of {sorted(FAMILIES)}"
    )
  if config.get("quantization_config"):
    raise ModelError(
      "quantized checkpoints are not supported (quantization_config is set); "
      "expected float weights"
    )
  heads, kv_heads = _heads(config)
  rope, local_rope = ropes_from_hf(config)
  fields = dict(
    family=family,
    vocab_size=config["vocab_size"],
    hidden_size=config["hidden_size"],
    intermediate_size=config["intermediate_size"],
    num_layers=config["num_hidden_layers"],
    num_heads=heads,
    num_kv_heads=kv_heads,
    head_dim=config.get("head_dim") or config["hidden_size"] // heads,
    max_positions=config["max_position_embeddings"],
    rms_norm_eps=config["rms_norm_eps"],
    rope=rope,
    local_rope=local_rope,
    tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
    initializer_range=config.get("initializer_range", 0.02),
    activation=_activation(config),
  )
  spec = ModelSpec(**fields | FAMILIES[family](config))
  if spec.experts:
    _check_experts(spec.experts)
  if spec.rope_dim % 2:
    raise ModelError(f"expected an even rotary width, got {spec.rope_dim}")
  if spec.dense_layers >= spec.num_layers:
    raise ModelError(
      f"expected first_k_dense_replace below the {spec.num_layers} layers, got "
      f"{spec.dense_layers}: there are no experts"
    )
  return spec


def _check_experts(experts: ExpertSpec) -> None:
  """A token finds its experts in the groups that it may choose from."""
  groups, best = experts.groups, experts.top_groups
  if groups < 1 or experts.count % groups or not 1 <= best <= groups:
    raise ModelError(
      f"expected n_group that divides {experts.count} experts and topk_group of 1 to "
      f"n_group, got n_group={groups}, topk_group={best}"
    )
  size = experts.count // groups
  if size < experts.group_score_of or not 1 <= experts.top_k <= best * size:
    raise ModelError(
      f"expected num_experts_per_tok of 1 to {best * size} ({best} groups of {size}, "
      f"each of at least {experts.group_score_of}), got {experts.top_k}"
    )


def load_hf_config(path: str | Path, *, key: str = "model.path") -> dict[str, Any]:
  """Reads ``config.json`` of a local HF directory, defaults filled in.

  Args:
    path: of the directory.
    key: where it was given, for errors.

  Raises:
    ModelError: there is no such directory or it holds no readable config.
  """
  from transformers import AutoConfig  # heavy import, needed here only

  path = Path(path)
  if not (path / "config.json").is_file():
    raise ModelError(
      f"{key}: expected a directory with a config.json, got {str(path)!r}"
    )
  try:
    return AutoConfig.from_pretrained(path, local_files_only=True).to_dict()
  except Exception as error:  # transformers raises its own kinds
    raise ModelError(f"{path / 'config.json'} is not readable: {error}") from error


def _heads(config: HFConfig) -> tuple[int, int]:
  heads, hidden = config["num_attention_heads"], config["hidden_size"]
  kv_heads = config.get("num_key_value_heads") or heads
  if heads % kv_heads or config["num_hidden_layers"] < 1:
    raise ModelError(
      f"expected at least one layer and num_key_value_heads that divide "
      f"num_attention_heads, got {config['num_hidden_layers']} layers, {kv_heads} and "
      f"{heads} heads"
    )
  if not config.get("head_dim") and hidden % heads:
    raise ModelError(
      f"expected num_attention_heads={heads} to divide hidden_size={hidden}, or a "
      "head_dim"
    )
  return heads, kv_heads


def _activation(config: HFConfig) -> str:
  name = config.get("hidden_activation") or config.get("hidden_act", "silu")
  if name not in ACTIVATIONS:
    raise ModelError(
      f"hidden_act {name!r} is not supported; expected one of {sorted(ACTIVATIONS)}"
    )
  return ACTIVATIONS[name]


def _windows(config: HFConfig) -> Fields:
  """Which layers are local: as ``layer_types`` says, else all if there is a window."""
  window = config.get("sliding_window")
  if config.get("use_sliding_window") is False:
    window = None
  types = config.get("layer_types") or [SLIDING] * config["num_hidden_layers"]
  unknown = set(types) - {FULL, SLIDING}
  if unknown:
    raise ModelError(
      f"layer_types {sorted(unknown)} are not supported; expected {FULL} or {SLIDING}"
    )
  if not window or SLIDING not in types:
    return {}
  return dict(window=window, local_layers=tuple(kind == SLIDING for kind in types))


def _expert_count(config: HFConfig) -> int:
  for name in ("num_local_experts", "num_experts", "n_routed_experts"):
    if config.get(name):
      return config[name]
  raise ModelError("expected num_local_experts, num_experts or n_routed_experts")


def _latent_mscale(config: HFConfig) -> float:
  """DeepSeek's factor on the logits of scaled ropes, ``0.1 m log(factor) + 1``."""
  options = config.get("rope_parameters") or config.get("rope_scaling") or {}
  kind = options.get("rope_type") or options.get("type") or "default"
  weight, factor = options.get("mscale_all_dim"), options.get("factor") or 1.0
  if kind == "default" or not weight or factor <= 1:
    return 1.0
  return 0.1 * weight * math.log(factor) + 1.0
