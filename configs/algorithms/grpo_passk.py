"""GRPO for pass@k on the quickstart's task.

    python -m jaxrl_hybrid.train --config configs/algorithms/grpo_passk.py

Of each prompt's samples only the best one counts, by its lead.
On CPUs eval/reward 0.02 before training, 0.31 after 60 of its 150 steps.
"""

from pathlib import Path

from ml_collections import ConfigDict

from jaxrl_hybrid import user_files

QUICKSTART = Path(__file__).parents[1] / "quickstart.py"


def get_config() -> ConfigDict:
  quickstart = user_files.load(str(QUICKSTART), "config")
  config = quickstart.get_config()
  config.algorithm.name = "grpo_passk"
  config.rollout.n = 8
  config.data.train_batch_size = 32
  config.algorithm.norm_adv_by_std_in_grpo = True
  return config
