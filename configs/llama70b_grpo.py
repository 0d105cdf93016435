"""GRPO of a Llama-3-70B-shaped actor on 16 GPUs of 80 GB.

    python -m jaxrl_hybrid.plan --config configs/llama70b_grpo.py
    python -m jaxrl_hybrid.train --config configs/llama70b_grpo.py \\
        --config.model.path=DIR --config.model.tokenizer=DIR \\
        --config.data.train_files=train.jsonl,

As ``qwen70b_ppo.py`` without a critic: eight samples per prompt are compared
with each other. Full fine-tuning, KL to the reference in the loss; fp32
parameters, moments and the reference live in host memory (about 520 GB on each
machine of 8 GPUs).
"""

from ml_collections import ConfigDict

from jaxrl_hybrid import config as config_lib

TASK = "task:symbols?min=2&max=4&symbols=10"


def get_config() -> ConfigDict:
  config = config_lib.base()
  config.mesh.train = (2, 4, 2)
  config.mesh.generation = (1, 4)
  config.mesh.zero = 3
  config.mesh.sequence_parallel = True
  config.offload.optimizer = True
  config.offload.params = True
  config.offload.reference = True
  config.model.random = ConfigDict(
    dict(
      model_type="llama",
      vocab_size=128256,
      hidden_size=8192,
      intermediate_size=28672,
      num_hidden_layers=80,
      num_attention_heads=64,
      num_key_value_heads=8,
      max_position_embeddings=8192,
      rope_parameters=dict(rope_type="default", rope_theta=5e5),
      rms_norm_eps=1e-5,
      tie_word_embeddings=False,
    )
  )
  config.model.tokenizer = TASK
  config.model.dtype = "bfloat16"
  config.model.remat = "stage"
  config.data.train_files = (TASK + "&n=4096",)
  config.data.eval_files = (TASK + "&n=128&split=eval",)
  config.data.max_prompt_length = 1024
  config.data.max_response_length = 1024
  config.data.train_batch_size = 32
  config.rollout.n = 8
  config.rollout.max_rows = 64
  config.rewards.functions = ("symbol_match",)
  config.rewards.skip_special_tokens = False
  config.algorithm.name = "grpo"
  config.actor.use_kl_loss = True
  config.actor.ppo_mini_batch_size = 8
  config.actor.ppo_micro_batch_size_per_device = 1
  config.actor.optim.lr = 1e-6
  config.trainer.total_steps = 200
  config.trainer.test_freq = 20
  config.trainer.save_freq = 20
  return config
