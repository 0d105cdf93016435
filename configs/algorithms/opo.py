"""OPO on the quickstart's task.

    python -m jaxrl_hybrid.train --config configs/algorithms/opo.py

The group's mean, weighted by length, is the baseline.
On CPUs eval/reward 0.02 before training, 0.55 after 60 of its 150 steps.
"""

from pathlib import Path

from ml_collections import ConfigDict

from jaxrl_hybrid import user_files

QUICKSTART = Path(__file__).parents[1] / "quickstart.py"


def get_config() -> ConfigDict:
  quickstart = user_files.load(str(QUICKSTART), "config")
  config = quickstart.get_config()
  config.algorithm.name = "opo"
  return config
