"""RLOO on the quickstart's task.

    python -m jaxrl_hybrid.train --config configs/algorithms/rloo.py

Each sample against the mean of the prompt's other samples.
On CPUs eval/reward 0.02 before training, 0.48 after 60 of its 150 steps.
"""

from pathlib import Path

from ml_collections import ConfigDict

from jaxrl_hybrid import user_files

QUICKSTART = Path(__file__).parents[1] / "quickstart.py"


def get_config() -> ConfigDict:
  quickstart = user_files.load(str(QUICKSTART), "config")
  config = quickstart.get_config()
  config.algorithm.name = "rloo"
  return config
