"""Random models at real shapes: what a run needs and how fast it is, not what it learns.

    python scripts/check_plan.py --gpu h200 -- --config configs/random_shapes.py:qwen1.5b
    python -m jaxrl_hybrid.train --config configs/random_shapes.py:smollm2 \\
        --config.trainer.total_steps=3

Shapes: ``smollm2`` (PPO), ``qwen1.5b`` (GRPO with a reference), ``qwen3b`` (GRPO,
parameters and moments in host memory). Hardware: one H200. Measured peaks beside
the plan's are in docs/performance.md.
"""

from ml_collections import ConfigDict

from jaxrl_hybrid import config as config_lib

TASK = "task:symbols?min=2&max=4&symbols=10"
ROPE = dict(rope_type="default", rope_theta=1e6)
SHAPES = {
  "smollm2": dict(
    model_type="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
  ),
  "qwen1.5b": dict(
    model_type="qwen2",
    vocab_size=151936,
    hidden_size=1536,
    intermediate_size=8960,
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    max_position_embeddings=32768,
    rope_parameters=ROPE,
    tie_word_embeddings=True,
  ),
  "qwen3b": dict(
    model_type="qwen2",
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=11008,
    num_hidden_layers=36,
    num_attention_heads=16,
    num_key_value_heads=2,
    max_position_embeddings=32768,
    rope_parameters=ROPE,
    tie_word_embeddings=True,
  ),
}


def get_config(shape: str = "smollm2") -> ConfigDict:
  if shape not in SHAPES:
    raise ValueError(f"expected one of {tuple(SHAPES)} after the colon, got {shape!r}")
  config = config_lib.base()
  config.model.random = ConfigDict(SHAPES[shape])
  config.model.tokenizer = TASK
  config.data.train_files = (TASK + "&n=4096",)
  config.data.max_prompt_length = 8
  config.data.max_response_length = 248
  config.rewards.functions = ("symbol_match",)
  config.rewards.skip_special_tokens = False
  if shape == "smollm2":
    config.algorithm.name = "ppo"
    config.data.train_batch_size = 256
    config.actor.ppo_micro_batch_size_per_device = 64
    return config
  config.algorithm.name = "grpo"
  config.data.train_batch_size = 32
  config.rollout.n = 8
  config.actor.ppo_micro_batch_size_per_device = 8
  if shape == "qwen1.5b":
    config.actor.use_kl_loss = True
    config.data.max_response_length = 504
  else:
    config.offload.optimizer = True
    config.offload.params = True
  return config
