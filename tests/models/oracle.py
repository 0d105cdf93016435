"""Small random torch models, the oracle of every architecture."""

from pathlib import Path

import pytest

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
    rope_parameters=dict(
      rope_type="yarn", rope_theta=1e4, factor=8.0, original_max_position_embeddings=64
    ),
  ),
  "qwen2": dict(model_type="qwen2", num_key_value_heads=2),
  "qwen2_tied": dict(
    model_type="qwen2", num_key_value_heads=2, tie_word_embeddings=True
  ),
  "qwen3": dict(model_type="qwen3", num_key_value_heads=2, head_dim=32),
  "qwen3_bias": dict(
    model_type="qwen3", num_key_value_heads=4, head_dim=8, attention_bias=True
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
