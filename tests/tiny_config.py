"""A run of seconds: a two-layer model on the symbols task, no fake devices set."""

from ml_collections import ConfigDict

from jaxrl_hybrid import config as config_lib

TASK = "task:symbols?min=1&max=3&symbols=6"


def get_config() -> ConfigDict:
  config = config_lib.base()
  config.model.random = ConfigDict(
    dict(
      model_type="qwen2",
      hidden_size=32,
      intermediate_size=48,
      num_hidden_layers=2,
      num_attention_heads=4,
      num_key_value_heads=2,
      max_position_embeddings=64,
      initializer_range=0.1,
    )
  )
  config.model.tokenizer = TASK
  config.model.dtype = "float32"
  config.mesh.fake_devices = 4
  config.mesh.train = (1, 2, 2)
  config.data.train_files = (TASK + "&n=64",)
  config.data.eval_files = (TASK + "&n=8&split=eval",)
  config.data.max_prompt_length = 8
  config.data.max_response_length = 5
  config.data.train_batch_size = 8
  config.rollout.n = 4
  config.rewards.functions = ("symbol_match",)
  config.cost.functions = ("repetition",)  # of algorithms with a cost
  config.cost.weights = (1.0,)
  config.cost.limit = 0.1
  config.actor.ppo_mini_batch_size = 4
  config.actor.optim.lr = 1e-3
  config.critic.optim.lr = 1e-3
  config.trainer.total_steps = 4
  config.trainer.test_freq = 2
  config.trainer.save_freq = 0
  config.trainer.export_hf = False
  return config
