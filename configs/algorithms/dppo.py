"""DPPO on the quickstart's task.

    python -m jaxrl_hybrid.train --config configs/algorithms/dppo.py

Updates are bounded by the change of a token's probability.
On CPUs eval/reward 0.02 before training, 0.80 after 60 of its 150 steps.
"""

from pathlib import Path

from ml_collections import ConfigDict

from jaxrl_hybrid import user_files

QUICKSTART = Path(__file__).parents[1] / "quickstart.py"


def get_config() -> ConfigDict:
  quickstart = user_files.load(str(QUICKSTART), "config")
  config = quickstart.get_config()
  config.algorithm.name = "dppo"
  config.actor.ppo_mini_batch_size = 32  # two updates per step: ratios leave 1
  return config
