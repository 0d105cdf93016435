"""REINFORCE++ on the quickstart's task.

    python -m jaxrl_hybrid.train --config configs/algorithms/reinforce_plus_plus.py

Whitened returns to go; no baseline, no critic.
On CPUs eval/reward 0.02 before training, 0.25 after 60 of its 150 steps.
"""

from pathlib import Path

from ml_collections import ConfigDict

from jaxrl_hybrid import user_files

QUICKSTART = Path(__file__).parents[1] / "quickstart.py"


def get_config() -> ConfigDict:
  quickstart = user_files.load(str(QUICKSTART), "config")
  config = quickstart.get_config()
  config.algorithm.name = "reinforce_plus_plus"
  config.rollout.n = 1
  config.data.train_batch_size = 256
  return config
