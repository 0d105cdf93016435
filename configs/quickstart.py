"""A one-minute run on a laptop: a tiny random model learns to copy symbols.

    python -m jaxrl_hybrid.train --config configs/quickstart.py

The prompt is an operation word, two to four of ten symbols and ':'; the answer
is those symbols and EOS. Nothing is downloaded. Eight fake CPU devices form a
real (pp, tp, dp) = (1, 2, 4) mesh; generation runs with tp 1 and micro-dp 2.
"""

from ml_collections import ConfigDict

from jaxrl_hybrid import config as config_lib

TASK = "task:symbols?min=2&max=4&symbols=10"


def get_config() -> ConfigDict:
  config = config_lib.base()
  config.mesh.fake_devices = 8
  config.mesh.train = (1, 2, 4)
  config.mesh.generation = (1, 1)
  config.model.random = ConfigDict(
    dict(
      model_type="llama",
      hidden_size=128,
      intermediate_size=320,
      num_hidden_layers=4,
      num_attention_heads=4,
      num_key_value_heads=4,
      max_position_embeddings=64,
      initializer_range=0.08,
      tie_word_embeddings=False,
    )
  )
  config.model.tokenizer = TASK
  config.model.dtype = "float32"
  config.model.remat = "none"
  config.data.train_files = (TASK + "&n=4096",)
  config.data.eval_files = (TASK + "&n=128&split=eval",)
  config.data.max_prompt_length = 8
  config.data.max_response_length = 5
  config.data.train_batch_size = 64
  config.rollout.n = 4
  config.rewards.functions = ("symbol_match",)
  config.rewards.weights = (1.0,)
  config.rewards.skip_special_tokens = False  # <bos> and the like are wrong symbols
  # Of algorithms with a cost (safe_rlhf): answers that repeat themselves.
  config.cost.functions = ("repetition",)
  config.cost.weights = (1.0,)
  config.cost.limit = 0.15
  config.algorithm.name = "grpo"
  config.algorithm.norm_adv_by_std_in_grpo = False
  config.actor.entropy_coeff = 0.02
  config.actor.optim.lr = 1e-3
  config.actor.optim.weight_decay = 0.0
  config.critic.optim.lr = 1e-3
  config.critic.optim.weight_decay = 0.0
  config.trainer.total_steps = 150
  config.trainer.test_freq = 25
  return config
