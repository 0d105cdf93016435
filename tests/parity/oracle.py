"""Small random torch models, the oracle of every architecture."""

from pathlib import Path

import pytest

YARN = dict(
  rope_type="yarn", rope_theta=1e4, factor=8.0, original_max_position_embeddings=64
)
FAMILIES = {
  "llama": dict(model_type="llama", num_key_value_heads=2),
  "llama_bias": dict(
    model_type="llama", num_key_value_heads=4, attention_bias=True, mlp_bias=True
  ),
  "llama_tied": dict(
    model_type="llama", num_key_value_heads=1, tie_word_embeddings=True
  ),
  "llama3_rope": dict(
    model_type="llama",
    num_key_value_heads=2,
    max_position_embeddings=512,
    rope_parameters=dict(
      rope_type="llama3",
      rope_theta=5e5,
      factor=8.0,
      low_freq_factor=1.0,
      high_freq_factor=4.0,
      original_max_position_embeddings=64,
    ),
  ),
  "linear_rope": dict(
    model_type="llama",
    num_key_value_heads=2,
    rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0),
  ),
  "yarn_rope": dict(
    model_type="llama",
    num_key_value_heads=2,
    max_position_embeddings=512,
    rope_parameters=YARN,
  ),
  "qwen2": dict(model_type="qwen2", num_key_value_heads=2),
  "qwen2_tied": dict(
    model_type="qwen2", num_key_value_heads=2, tie_word_embeddings=True
  ),
  "qwen3": dict(model_type="qwen3", num_key_value_heads=2, head_dim=32),
  "qwen3_bias": dict(
    model_type="qwen3", num_key_value_heads=4, head_dim=8, attention_bias=True
  ),
  "dynamic_rope": dict(
    model_type="llama",
    num_key_value_heads=2,
    max_position_embeddings=64,
    rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=4.0),
  ),
  "mistral": dict(model_type="mistral", num_key_value_heads=2, sliding_window=24),
  "mixtral": dict(model_type="mixtral", num_key_value_heads=2, num_local_experts=4),
  "qwen2_window": dict(
    model_type="qwen2",
    num_key_value_heads=2,
    use_sliding_window=True,
    sliding_window=24,
    max_window_layers=1,
  ),
  "qwen3_moe": dict(
    model_type="qwen3_moe",
    num_key_value_heads=2,
    head_dim=32,
    num_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=40,
    norm_topk_prob=True,
  ),
  "qwen3_moe_unnormed": dict(
    model_type="qwen3_moe",
    num_key_value_heads=2,
    head_dim=16,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=40,
    norm_topk_prob=False,
  ),
  "gemma": dict(model_type="gemma", num_key_value_heads=1, head_dim=24),
  "gemma2": dict(
    model_type="gemma2",
    num_key_value_heads=2,
    head_dim=24,
    query_pre_attn_scalar=20,
    sliding_window=24,
    attn_logit_softcapping=5.0,
    final_logit_softcapping=8.0,
  ),
  "gemma3": dict(
    model_type="gemma3_text",
    num_hidden_layers=4,
    num_key_value_heads=2,
    head_dim=24,
    query_pre_attn_scalar=20,
    sliding_window=24,
    layer_types=["sliding_attention", "full_attention"] * 2,
    rope_parameters=dict(
      full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e6),
      sliding_attention=dict(rope_type="default", rope_theta=1e4),
    ),
  ),
  "phi3": dict(
    model_type="phi3", num_key_value_heads=2, sliding_window=24, pad_token_id=0
  ),
  "phi3_longrope": dict(
    model_type="phi3",
    num_key_value_heads=2,
    pad_token_id=0,
    original_max_position_embeddings=64,
    rope_parameters=dict(
      rope_type="longrope",
      rope_theta=1e4,
      short_factor=[1.0 + 0.1 * i for i in range(6)],
      long_factor=[2.0 + i for i in range(6)],
      partial_rotary_factor=0.75,
    ),
  ),
  "olmo2": dict(model_type="olmo2", num_key_value_heads=2),
  "deepseek_v2": dict(
    model_type="deepseek_v2",
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=40,
    n_shared_experts=2,
    first_k_dense_replace=1,
    topk_method="group_limited_greedy",
    n_group=4,
    topk_group=2,
    routed_scaling_factor=1.5,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=10,
  ),
  "deepseek_v2_lite": dict(
    model_type="deepseek_v2",
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=40,
    n_shared_experts=1,
    q_lora_rank=None,
    kv_lora_rank=32,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=20,
    rope_parameters=YARN | dict(mscale=0.707, mscale_all_dim=0.707),
  ),
  "deepseek_v3": dict(
    model_type="deepseek_v3",
    num_key_value_heads=4,
    num_hidden_layers=4,
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=40,
    n_shared_experts=1,
    first_k_dense_replace=2,
    n_group=4,
    topk_group=2,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=12,
    rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=1.0),
  ),
}
SIZES = dict(
  vocab_size=131,
  hidden_size=64,
  intermediate_size=96,
  num_hidden_layers=3,
  num_attention_heads=4,
  max_position_embeddings=512,
  rms_norm_eps=1e-5,
)


def torch_model(name: str, directory: Path, **overrides):
  """A random fp32 model of the family, saved as safetensors; eval mode."""
  torch = pytest.importorskip("torch", reason="torch is the oracle")
  from transformers import AutoConfig, AutoModelForCausalLM

  fields = {**SIZES, **FAMILIES[name], **overrides}
  config = AutoConfig.for_model(fields.pop("model_type"), **fields)
  torch.manual_seed(0)
  model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
  for parameter_name, parameter in model.named_parameters():
    if parameter.ndim == 1:  # defaults of 0 and 1 would hide a dropped tensor
      torch.nn.init.normal_(parameter, mean=float("norm" in parameter_name), std=0.2)
    else:
      torch.nn.init.normal_(parameter, std=0.1)
  model.save_pretrained(directory)
  return model
