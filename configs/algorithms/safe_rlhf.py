"""Safe RLHF on the quickstart's task.

    python -m jaxrl_hybrid.train --config configs/algorithms/safe_rlhf.py

PPO with a second critic: the reward rises while the cost, the share of words that
an answer says again, is kept below its limit by a multiplier. Some of the task's
answers are learned as they are beside it (ptx).
On CPUs eval/reward 0.02 before training, 0.36 after 60 of its 150 steps.
"""

from pathlib import Path

from ml_collections import ConfigDict

from jaxrl_hybrid import user_files

QUICKSTART = Path(__file__).parents[1] / "quickstart.py"


def get_config() -> ConfigDict:
  quickstart = user_files.load(str(QUICKSTART), "config")
  config = quickstart.get_config()
  config.algorithm.name = "safe_rlhf"
  config.rollout.n = 1
  config.data.train_batch_size = 256
  config.algorithm.lam = 0.95
  config.data.ptx_files = (quickstart.TASK + "&n=32",)
  config.data.ptx_key = "ground_truth"
  config.actor.ptx_coef = 0.01
  config.actor.ptx_batch_size = 64
  return config
