"""scripts/experiments.py: its measures by hand, and that its keys are a config's."""

import importlib.util
from pathlib import Path

import pytest

from jaxrl_hybrid import config as config_lib
from jaxrl_hybrid import config_reader

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def experiments():
  path = ROOT / "scripts" / "experiments.py"
  spec = importlib.util.spec_from_file_location("experiments", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def test_all_variants_are_valid_configs(experiments, monkeypatch):
  monkeypatch.chdir(ROOT)
  for config, shared, variants in experiments.EXPERIMENTS.values():
    for keys in (*variants.values(), experiments.START):
      flags = [f"--config.{k}={v}" for k, v in (shared | keys).items()]
      found, _ = config_reader.from_argv(["train", "--config", config, *flags])
      config_lib.validate(config_lib.resolve(found))


def test_measures_by_hand(experiments, capsys):
  evals = [(0, 0.1), (5, 0.5), (10, 0.9)]
  rows = [{experiments.STEP: step, "eval/reward": reward} for step, reward in evals]
  rows[1]["critic/advantages/max"], rows[2]["critic/advantages/max"] = 0.0, 1.0
  found = experiments.sampler_measures(rows, 0.8, 12)
  assert found == {
    "steps_to_target": 10.0,
    "eval_reward": 0.9,
    "mean_eval_reward": 0.5,
    "steps_with_signal": 0.5,
  }
  assert experiments.sampler_measures(rows, 0.95, 12)["steps_to_target"] == 13.0
  step = lambda loss: {
    "actor/loss": 0.0,
    "critic/vf_loss": loss,
    "critic/vf_explained_var": 0.5,
    "critic/rewards/mean": loss,
  }
  alone = {"critic/vf_loss": 9.0}  # a step of the warm-up
  found = experiments.warmup_measures([alone, step(1.0), step(3.0), step(2.0)])
  assert found["critic_loss_variance"] == pytest.approx(2 / 3)
  assert found["critic_loss_jump"] == pytest.approx(2.5**0.5)
  assert (found["explained_variance"], found["last_reward"]) == (0.5, 2.0)
  report = {"experiment": "x", "steps": 3, "variants": {"a": [found, found]}}
  experiments.print_table(report)
  assert "0.5 (0.5, 0.5)" in capsys.readouterr().out
