"""PPO by adapters on a laptop: actor, critic and reference share one frozen base.

    python -m jaxrl_hybrid.train --config configs/quickstart.py \\
        --config.trainer.run_dir=runs/half --config.trainer.total_steps=50
    python -m jaxrl_hybrid.train --config configs/quickstart_lora.py

Adapters change what a model can do already; they do not teach a random one. So
the base is the quickstart's model after 50 of its 150 steps, which gets about half
of the symbols right (eval/reward 0.49); 60 steps of adapters take it to 0.99. The
base is held once, in float16; trained are adapters of rank 16 for the actor and of
rank 4 for the critic. The run directory has ``adapter/`` (PEFT) beside ``hf/``
(merged).
"""

from ml_collections import ConfigDict

from jaxrl_hybrid import config as config_lib

TASK = "task:symbols?min=2&max=4&symbols=10"


def get_config() -> ConfigDict:
  config = config_lib.base()
  config.mesh.fake_devices = 8
  config.mesh.train = (1, 2, 4)
  config.model.path = "runs/half/hf"
  config.model.remat = "none"
  config.model.lora.rank = 16
  config.critic.share_base = True
  config.critic.lora.rank = 4
  config.data.train_files = (TASK + "&n=4096",)
  config.data.eval_files = (TASK + "&n=128&split=eval",)
  config.data.max_prompt_length = 8
  config.data.max_response_length = 5
  config.data.train_batch_size = 256
  config.rewards.functions = ("symbol_match",)
  config.rewards.weights = (1.0,)
  config.rewards.skip_special_tokens = False  # <bos> and the like are wrong symbols
  config.algorithm.name = "ppo"
  config.algorithm.lam = 0.95
  config.actor.use_kl_loss = True
  config.actor.ppo_mini_batch_size = 128
  config.actor.optim.lr = 2e-3
  config.actor.optim.schedule = "linear"
  config.actor.optim.weight_decay = 0.0
  config.critic.optim.lr = 5e-3
  config.critic.optim.weight_decay = 0.0
  config.trainer.total_steps = 60
  config.trainer.test_freq = 20
  return config
