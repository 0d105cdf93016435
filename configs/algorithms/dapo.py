"""DAPO on the quickstart's task.

    python -m jaxrl_hybrid.train --config configs/algorithms/dapo.py

Clip-higher, groups of equal answers are sampled anew, and answers that use up
the last token are punished a little.
On CPUs eval/reward -0.08 before training, 0.77 after 60 of its 150 steps.
"""

from pathlib import Path

from ml_collections import ConfigDict

from jaxrl_hybrid import user_files

QUICKSTART = Path(__file__).parents[1] / "quickstart.py"


def get_config() -> ConfigDict:
  quickstart = user_files.load(str(QUICKSTART), "config")
  config = quickstart.get_config()
  config.algorithm.name = "dapo"
  config.actor.ppo_mini_batch_size = 32  # two updates per step: ratios leave 1
  config.algorithm.filter_groups.metric = "symbol_match"
  config.algorithm.filter_groups.max_num_gen_batches = 3
  config.rewards.overlong_buffer = 1
  config.rewards.overlong_penalty = 0.1
  return config
