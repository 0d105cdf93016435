"""PPO of a Qwen2-72B-shaped actor, critic and reward model on 16 GPUs of 80 GB.

    python -m jaxrl_hybrid.plan --config configs/qwen70b_ppo.py
    python -m jaxrl_hybrid.train --config configs/qwen70b_ppo.py \\
        --config.model.path=DIR --config.model.tokenizer=DIR \\
        --config.critic.path=DIR --config.reward_model.path=DIR \\
        --config.data.train_files=train.jsonl,

Full fine-tuning: fp32 parameters and Adam moments of actor and critic live in
host memory (about 1 TB on each machine of 8 GPUs) and are updated layer by
layer; training is (pp, tp, dp) = (2, 4, 2) with ZeRO-3 and sequence parallelism,
generation is tp 4 with micro-dp 2. The reward model, one more term beside the
reward function, is frozen and waits in host memory too (72 GB on each machine);
--config.reward_model.random={} goes without. Without --config.model.path all
weights are random, of the same shapes. See docs/performance.md for the planned
memory.
"""

from ml_collections import ConfigDict

from jaxrl_hybrid import config as config_lib

TASK = "task:symbols?min=2&max=4&symbols=10"
SHAPE = dict(
  model_type="qwen2",
  vocab_size=152064,
  hidden_size=8192,
  intermediate_size=29568,
  num_hidden_layers=80,
  num_attention_heads=64,
  num_key_value_heads=8,
  max_position_embeddings=32768,
  rope_parameters=dict(rope_type="default", rope_theta=1e6),
  rms_norm_eps=1e-6,
  tie_word_embeddings=False,
)


def get_config() -> ConfigDict:
  config = config_lib.base()
  config.mesh.train = (2, 4, 2)
  config.mesh.generation = (1, 4)
  config.mesh.zero = 3
  config.mesh.sequence_parallel = True
  config.offload.optimizer = True
  config.offload.params = True
  config.offload.critic = True
  config.offload.reference = True
  config.offload.reward_model = True
  config.model.random = ConfigDict(SHAPE)
  config.reward_model.random = ConfigDict(SHAPE)
  config.model.tokenizer = TASK
  config.model.dtype = "bfloat16"
  config.model.remat = "stage"
  config.data.train_files = (TASK + "&n=4096",)
  config.data.eval_files = (TASK + "&n=128&split=eval",)
  config.data.max_prompt_length = 1024
  config.data.max_response_length = 1024
  config.data.train_batch_size = 128
  config.rollout.max_rows = 64
  config.rewards.functions = ("symbol_match",)
  config.rewards.skip_special_tokens = False
  config.algorithm.name = "ppo"
  config.algorithm.use_kl_in_reward = True
  config.actor.ppo_mini_batch_size = 32
  config.actor.ppo_micro_batch_size_per_device = 1
  config.actor.optim.lr = 1e-6
  config.critic.optim.lr = 1e-5
  config.trainer.total_steps = 200
  config.trainer.test_freq = 20
  config.trainer.save_freq = 20
  return config
