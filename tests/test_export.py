"""Checkpoints to HF directories: offloaded ones in chunks, and the critic."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxrl_hybrid.errors import ModelError
from jaxrl_hybrid.models.hf.checkpoint import Checkpoint
from jaxrl_hybrid.models.hf.export import check_replaceable

TESTS = Path(__file__).parent
# One process: a run of one step, then what is to be exported of its checkpoint.
PROGRAM = """
import sys
from jaxrl_hybrid import export, train
config, run_dir, *roles = sys.argv[1:]
train.main([
  "train", "--config", config, "--config.algorithm.name=ppo",
  f"--config.trainer.run_dir={run_dir}/run", "--config.trainer.export_hf=True",
  "--config.trainer.total_steps=1", "--config.trainer.save_freq=1",
  "--config.trainer.val_before_train=False", "--config.trainer.test_freq=0",
  "--config.offload.optimizer=True", "--config.offload.params=True",
  "--config.offload.critic=True",
])
for role in roles:
  export.main(
    ["export", "--run_dir", f"{run_dir}/run", "--out", f"{run_dir}/{role}",
     "--role", role]
  )
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
  """A run directory, and beside it an export of actor and of critic."""
  folder = tmp_path_factory.mktemp("export")
  config = str(TESTS / "tiny_config.py")
  done = subprocess.run(
    [sys.executable, "-c", PROGRAM, config, str(folder), "actor", "critic"],
    capture_output=True,
    text=True,
    timeout=600,
    cwd=TESTS.parent,
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
  )
  assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
  assert "exported the critic of step 1" in done.stdout
  return folder


def tensors(directory):
  with Checkpoint(directory) as checkpoint:
    return {name: checkpoint.read(name) for name in checkpoint.names()}


def test_the_actor_of_an_offloaded_checkpoint_is_the_final_one(exported):
  expected, got = tensors(exported / "run/hf"), tensors(exported / "actor")
  assert expected.keys() == got.keys()
  for name, value in expected.items():
    np.testing.assert_array_equal(got[name], value)


def test_the_critic_is_a_classifier_with_another_body_and_a_trained_head(exported):
  actor, critic = tensors(exported / "actor"), tensors(exported / "critic")
  assert critic.keys() - actor.keys() == {"score.weight"}
  assert actor.keys() - critic.keys() == {"lm_head.weight"}
  assert np.abs(critic["score.weight"]).min() > 0  # a fresh one is all zeros
  body = "model.layers.1.mlp.down_proj.weight"
  assert np.abs(critic[body] - actor[body]).max() > 0
  config = json.loads((exported / "critic/config.json").read_text())
  assert config["architectures"] == ["Qwen2ForSequenceClassification"]
  assert len(config["id2label"]) == 1 and config["pad_token_id"] is not None


def test_transformers_loads_the_critic(exported):
  pytest.importorskip("torch", reason="torch is the oracle")
  from transformers import AutoModelForSequenceClassification

  model, report = AutoModelForSequenceClassification.from_pretrained(
    exported / "critic", output_loading_info=True
  )
  assert not report["missing_keys"] and not report["unexpected_keys"]
  assert model.num_labels == 1


def test_an_export_never_replaces_what_the_run_began_with(tmp_path):
  (tmp_path / "base").mkdir()
  (tmp_path / "base" / "config.json").write_text("{}")
  (tmp_path / "same").symlink_to("base")
  check_replaceable(tmp_path / "base", tmp_path / "other")
  for out in ("base", "same"):
    with pytest.raises(ModelError, match="training began with"):
      check_replaceable(tmp_path / out, tmp_path / "base")
