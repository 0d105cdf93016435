"""REINFORCE++ with a baseline on the quickstart's task.

    python -m jaxrl_hybrid.train \\
        --config configs/algorithms/reinforce_plus_plus_baseline.py

The group's mean is subtracted, then the batch is whitened.
On CPUs eval/reward 0.02 before training, 0.24 after 60 of its 150 steps.
"""

from pathlib import Path

from ml_collections import ConfigDict

from jaxrl_hybrid import user_files

QUICKSTART = Path(__file__).parents[1] / "quickstart.py"


def get_config() -> ConfigDict:
  quickstart = user_files.load(str(QUICKSTART), "config")
  config = quickstart.get_config()
  config.algorithm.name = "reinforce_plus_plus_baseline"
  return config
