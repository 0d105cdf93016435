"""PPO with a critic on real weights: SmolLM2-135M-Instruct learns to add.

    python scripts/get_smollm2.py
    python -m jaxrl_hybrid.train --config configs/smollm2_arithmetic_ppo.py

The task of ``smollm2_arithmetic_grpo.py``; the critic starts from the same
weights with a fresh value head. Hardware: one GPU with 40 GB or more; ``:cpu``
is a small batch for a laptop.
"""

from ml_collections import ConfigDict

from jaxrl_hybrid import config as config_lib

VARIANTS = ("gpu", "cpu")


def get_config(variant: str = "gpu") -> ConfigDict:
  if variant not in VARIANTS:
    raise ValueError(f"expected one of {VARIANTS} after the colon, got {variant!r}")
  config = config_lib.base()
  config.model.path = "models/smollm2-135m-instruct"
  config.data.train_files = (
    "task:arithmetic?digits=1&n=80",
    "task:arithmetic?digits=2&n=4000",
  )
  config.data.eval_files = (
    "task:arithmetic?digits=1&n=20&split=eval",
    "task:arithmetic?digits=2&n=200&split=eval",
  )
  config.data.curriculum = ((0, 1), (20, 2))
  config.data.max_prompt_length = 64
  config.data.max_response_length = 24
  config.data.train_batch_size = 512
  config.rollout.max_rows = 1024
  config.rewards.functions = ("last_number",)
  config.rewards.weights = (1.0,)
  # Of algorithms with a cost (safe_rlhf): answers that repeat themselves.
  config.cost.functions = ("repetition",)
  config.cost.weights = (1.0,)
  config.cost.limit = 0.2
  config.algorithm.name = "ppo"
  config.algorithm.lam = 0.95
  config.actor.ppo_mini_batch_size = 256
  config.actor.ppo_micro_batch_size_per_device = 128
  config.actor.optim.lr = 1e-5
  config.actor.optim.warmup_steps = 10
  config.critic.optim.lr = 2e-5
  config.critic.warmup = 3
  config.trainer.total_steps = 150
  config.trainer.test_freq = 10
  return _on_cpu(config) if variant == "cpu" else config


def _on_cpu(config: ConfigDict) -> ConfigDict:
  config.model.dtype = "float32"
  config.data.train_batch_size = 16
  config.actor.ppo_mini_batch_size = 8
  config.actor.ppo_micro_batch_size_per_device = 8
  config.trainer.eval_max_prompts = 20
  config.trainer.total_steps = 3
  return config
