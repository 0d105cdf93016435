"""Algorithms in the one trainer: a few in every run of the tests, all with -m slow."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import test_train

sys.path.insert(0, str(Path(__file__).parent))
import tiny_config

from jaxrl_hybrid import assembly, inspection
from jaxrl_hybrid import config as config_lib
from jaxrl_hybrid.algorithms.presets import PRESETS

CONFIGS = Path(__file__).parents[1] / "configs" / "algorithms"
CORRECTED = {
  "algorithm.rollout_correction.rollout_is": "sequence",
  "algorithm.rollout_correction.rollout_rs": ("seq_mean_k3",),
  "algorithm.rollout_correction.rollout_rs_threshold": (0.1,),
}
# name -> (further settings, a metric that only this algorithm has)
FEW = {
  "dapo": ({}, "training/filter_groups/gen_batches"),
  "otb": (CORRECTED, "rollout_corr/rollout_is_mean"),
  "gspo": (
    {"algorithm.rollout_correction.bypass_mode": True},
    "rollout_train_logprob_diff_max",
  ),
}


def fit(tmp_path, name, settings):
  """Metrics of two steps of the tiny run, in this process."""
  config = tiny_config.get_config()
  with config.unlocked():
    config.mesh.fake_devices = 0
    config.mesh.train = (1, 1, 1)
    config.algorithm.name = name
    config.data.eval_files = ()
    config.trainer.total_steps = 2
    for key, value in settings.items():
      *path, last = key.split(".")
      section = config
      for part in path:
        section = section[part]
      section[last] = value
  plan = inspection.inspect(config_lib.resolve(config))
  controller = assembly.assemble(plan, tmp_path)
  controller.fit()
  controller.recorder.close()
  return test_train.metrics_of(tmp_path)


@pytest.mark.parametrize("name", FEW)
def test_a_few_algorithms_run(name, tmp_path):
  settings, metric = FEW[name]
  rows = fit(tmp_path / "run", name, settings)
  assert [row["training/global_step"] for row in rows] == [1, 2]
  for row in rows:
    assert metric in row and row["actor/grad_norm"] > 0
    assert all(map(math.isfinite, row.values()))
    assert not any(name.startswith("critic/vf") for name in row)
    assert row["rollout_train_logprob_diff_max"] < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_every_config_learns_in_20_steps(name, tmp_path):
  """The mean training reward of the last five steps against the first five."""
  test_train.run(
    f"--config.trainer.run_dir={tmp_path}/run",
    "--config.trainer.total_steps=20",
    "--config.trainer.save_freq=0",
    "--config.trainer.test_freq=0",
    "--config.trainer.val_before_train=False",
    "--config.trainer.export_hf=False",
    config=str(CONFIGS / f"{name}.py"),
  )
  rows = test_train.metrics_of(tmp_path / "run")
  rewards = [row["critic/rewards/mean"] for row in rows]
  assert len(rewards) == 20 and np.isfinite(rewards).all()
  first, last = np.mean(rewards[:5]), np.mean(rewards[-5:])
  assert last > first + 0.02, (first, last)
