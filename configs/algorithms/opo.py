"""OPO on the quickstart's task.

    python -m jaxrl_hybrid.train --config configs/algorithms/opo.py

The group's mean, weighted by length, is the baseline.
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
