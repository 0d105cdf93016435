"""Whole runs through the command line: what a user types and sees."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_config

TESTS = Path(__file__).parent
TINY = str(TESTS / "tiny_config.py")


def run(*args, module="train", config=TINY, ok=True):
  """Runs an entry point in a fresh process; returns its output."""
  command = [sys.executable, "-m", f"jaxrl_hybrid.{module}"]
  command += ["--config", config] if config else []
  done = subprocess.run(
    [*command, *map(str, args)],
    capture_output=True,
    text=True,
    timeout=600,
    cwd=TESTS.parent,
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
  )
  assert (done.returncode == 0) == ok, done.stdout[-3000:] + done.stderr[-3000:]
  assert "Traceback" not in done.stderr, done.stderr[-3000:]
  return done


def metrics_of(run_dir):
  lines = (Path(run_dir) / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


def without_time(rows):
  return [
    {k: v for k, v in row.items() if not k.startswith(("timing_s", "perf/"))}
    for row in rows
  ]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
  """One uninterrupted run of four steps: (output, run_dir)."""
  run_dir = tmp_path_factory.mktemp("straight") / "run"
  out = run(
    f"--config.trainer.run_dir={run_dir}",
    "--config.trainer.export_hf=True",
    "--config.trainer.save_freq=2",
  )
  return out.stdout, run_dir


def test_output_has_lines_table_and_last_line(straight):
  stdout, run_dir = straight
  assert len(re.findall(r"^step \d/4 \|", stdout, re.M)) == 5  # with step 0's eval
  assert re.search(r"step 4/4 \| .*reward .*entropy .*gap .*grad .*lr .*tok/s", stdout)
  assert "eval samples at step 4" in stdout
  last = stdout.strip().splitlines()[-1]
  assert re.fullmatch(
    r"run finished: eval/reward=\d\.\d\d .*run_dir=" + str(run_dir), last
  )


def test_metrics_have_the_documented_names(straight):
  rows = metrics_of(straight[1])
  assert [row["training/global_step"] for row in rows] == [0, 1, 2, 3, 4]
  assert set(rows[1]) >= {
    "actor/pg_loss",
    "actor/entropy",
    "actor/grad_norm",
    "actor/ppo_kl",
    "actor/lr",
    "actor/pg_clipfrac",
    "critic/rewards/mean",
    "critic/advantages/mean",
    "rollout_train_logprob_diff_mean",
    "rollout_train_logprob_diff_max",
    "timing_s/gen",
    "timing_s/update_actor",
    "timing_s/step",
    "response_length/mean",
    "prompt_length/mean",
    "response_length/clip_ratio",
    "perf/throughput",
  }
  assert "eval/reward" in rows[2] and "eval/reward" not in rows[1]
  for row in rows[1:]:
    assert row["rollout_train_logprob_diff_mean"] < 1e-5
    parts = [v for k, v in row.items() if k.startswith("timing_s/") and k[9:] != "step"]
    assert sum(parts) == pytest.approx(row["timing_s/step"], rel=1e-6)


def test_run_directory_is_complete(straight):
  run_dir = straight[1]
  config = json.loads((run_dir / "config.json").read_text())
  assert config["algorithm"]["adv_estimator"] == "grpo"
  samples = [
    json.loads(l) for l in (run_dir / "samples.jsonl").read_text().splitlines()
  ]
  assert {s["kind"] for s in samples} == {"train", "eval"}
  assert {"prompt", "completion", "answer", "reward", "step"} <= set(samples[0])


def test_exported_model_loads_in_transformers(straight):
  pytest.importorskip("torch")
  from transformers import AutoModelForCausalLM, AutoTokenizer

  model = AutoModelForCausalLM.from_pretrained(straight[1] / "hf")
  tokenizer = AutoTokenizer.from_pretrained(straight[1] / "hf")
  ids = tokenizer("copy a b :", return_tensors="pt")
  assert model.generate(**ids, max_new_tokens=3).shape[1] > ids["input_ids"].shape[1]


def test_export_of_a_checkpoint_equals_the_final_model(straight, tmp_path):
  run("--run_dir", straight[1], "--out", tmp_path / "hf", module="export", config=None)
  from jaxrl_hybrid.models.hf.checkpoint import Checkpoint

  with Checkpoint(straight[1] / "hf") as a, Checkpoint(tmp_path / "hf") as b:
    assert a.names() == b.names()
    for name in a.names():
      np.testing.assert_array_equal(a.read(name), b.read(name))


def test_evaluate_reads_the_exported_model(straight):
  model = straight[1] / "hf"
  out = run(
    f"--config.model.path={model}",
    f"--config.model.tokenizer={model}",
    "--config.model.random={}",
    module="evaluate",
  )
  reward = json.loads(out.stdout.strip().splitlines()[-1])["eval/reward"]
  assert reward == pytest.approx(metrics_of(straight[1])[-1]["eval/reward"], abs=1e-6)


def test_resume_equals_the_uninterrupted_run(straight, tmp_path):
  common = [f"--config.trainer.run_dir={tmp_path}/run", "--config.trainer.save_freq=2"]
  run(*common, "--config.trainer.total_steps=2")
  out = run(*common)
  assert "resumed from step 2" in out.stdout
  assert without_time(metrics_of(tmp_path / "run")) == without_time(
    metrics_of(straight[1])
  )


@pytest.mark.parametrize(
  "train,generation,options",
  [
    ((2, 2, 1), (1, 2), ["--config.mesh.zero=3", "--config.model.remat=stage"]),
    ((1, 4, 1), (1, 1), ["--config.mesh.sequence_parallel=True"]),
  ],
  ids=str,
)
def test_another_mesh_learns_the_same(straight, train, generation, options, tmp_path):
  run(
    f"--config.trainer.run_dir={tmp_path}/run",
    "--config.trainer.total_steps=2",
    f"--config.mesh.train={train}",
    f"--config.mesh.generation={generation}",
    *options,
  )
  rows, expected = metrics_of(tmp_path / "run"), metrics_of(straight[1])
  assert rows[0]["eval/reward"] == expected[0]["eval/reward"]
  for got, same in zip(rows[1:], expected[1:3], strict=True):
    for name in ("critic/rewards/mean", "response_length/mean"):
      assert got[name] == same[name]
    for name in ("actor/grad_norm", "actor/entropy"):
      assert got[name] == pytest.approx(same[name], rel=1e-4)
  assert rows[2]["rollout_train_logprob_diff_max"] < 1e-4


REWARD_MODEL = [
  "--config.reward_model.random={'model_type': 'llama', 'hidden_size': 32, "
  "'intermediate_size': 32, 'num_hidden_layers': 1, 'num_attention_heads': 4}",
  "--config.reward_model.weight=0.1",
  "--config.offload.reward_model=True",
]


STYLE = "--config.actor.style.reference_texts=('copy a b :',)"


# With remax the updates write into the actor's weights, of which the reference on
# the device must have a copy.
@pytest.mark.parametrize(
  "algorithm,more",
  [("ppo", REWARD_MODEL), ("remax", ["--config.offload.optimizer=True", STYLE])],
)
def test_one_line_changes_the_algorithm(algorithm, more, tmp_path):
  run(
    *more,
    f"--config.algorithm.name={algorithm}",
    f"--config.trainer.run_dir={tmp_path}/run",
    "--config.actor.use_kl_loss=True",
    "--config.actor.ppo_epochs=2",
  )
  last = metrics_of(tmp_path / "run")[-1]
  assert ("critic/vf_loss" in last) == (algorithm == "ppo")
  assert ("critic/baseline/mean" in last) == (algorithm == "remax")
  assert ("reward/reward_model/mean" in last) == (algorithm == "ppo")
  assert last["actor/kl_loss"] > 0
  assert (last.get("actor/style_loss", 0.0) > 0) == (STYLE in more)
  assert last["training/global_step"] == 4


def test_resume_with_all_that_a_step_depends_on(tmp_path):
  """Two critics, a multiplier, an adaptive KL, running moments, given answers."""
  common = [
    "--config.algorithm.name=safe_rlhf",
    "--config.trainer.save_freq=2",
    "--config.algorithm.use_kl_in_reward=True",
    "--config.algorithm.kl_ctrl.type=adaptive",
    "--config.algorithm.normalize_rewards=True",
    "--config.critic.normalize_values=True",
    f"--config.data.ptx_files=('{tiny_config.TASK}&n=6',)",
    "--config.data.ptx_key=ground_truth",
    "--config.actor.ptx_coef=0.1",
  ]
  run(*common, f"--config.trainer.run_dir={tmp_path}/a")
  run(
    *common, f"--config.trainer.run_dir={tmp_path}/b", "--config.trainer.total_steps=2"
  )
  run(*common, f"--config.trainer.run_dir={tmp_path}/b")
  rows = metrics_of(tmp_path / "a")
  assert without_time(metrics_of(tmp_path / "b")) == without_time(rows)
  for name in ("actor/reward_kl_penalty_coeff", "cost/multiplier"):
    assert len({row[name] for row in rows[1:]}) == 4
  assert set(rows[-1]) >= {
    "cost/mean",
    "cost/repetition/mean",
    "cost_critic/vf_loss",
    "actor/ptx_loss",
  }


def test_dry_run_loads_nothing(tmp_path):
  out = run("--dry_run", f"--config.trainer.run_dir={tmp_path}/run")
  assert "8 prompts -> 32 sequences" in out.stdout
  assert "copy" in out.stdout  # the first prompt as the model sees it
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
  "override,words",
  [
    ("--config.actor.cliprato=1", ["cliprato", "actor.clip_ratio"]),
    ("--config.rewards.functions=('symbolmatch',)", ["symbolmatch", "symbol_match"]),
    ("--config.data.train_files=('no.jsonl',)", ["no.jsonl"]),
    ("--config.data.max_response_length=100", ["max_position_embeddings", "64"]),
    ("--config.mesh.generation=(1,4)", ["mesh.generation", "must divide"]),
    ("--config.mesh.train=(1,2,8)", ["16 devices", "got 4"]),
    ("--config.model.random.vocab_size=5", ["model.random.vocab_size"]),
    ("--config.data.string_prompts=user", ["data.chat_template"]),
    ("--config.data.curriculum=((0,9),(2,0))", ["curriculum"]),
    ("--config.model.attention=cudnn", ["model.attention", "use auto"]),
    ("--config.actor.optim.betas=(1.0,1.0)", ["betas", "[0, 1)"]),
    ("--config.trainer.trackers=('wandbb',)", ["wandbb", "wandb"]),
  ],
)
def test_user_errors_are_one_message(override, words, tmp_path):
  out = run(override, f"--config.trainer.run_dir={tmp_path}/run", ok=False)
  assert out.returncode == 2
  assert all(word in out.stderr for word in words), out.stderr
  assert len(out.stderr.strip().splitlines()) <= 4


def test_a_finished_run_is_not_overwritten(tmp_path):
  common = [
    f"--config.trainer.run_dir={tmp_path}/run",
    "--config.trainer.total_steps=1",
  ]
  run(*common)
  before = (tmp_path / "run" / "metrics.jsonl").read_text()
  out = run(*common, ok=False)
  assert out.returncode == 2 and "finished run" in out.stderr
  out = run(*common, "--config.seed=5", ok=False)
  assert out.returncode == 2 and "different run" in out.stderr
  assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_evaluation_needs_no_training_data_and_takes_other_columns(tmp_path):
  rows = [
    {"question": "copy a b :", "answer": "a b"},
    {"question": "copy c :", "answer": "c"},
  ]
  file = tmp_path / "eval.jsonl"
  file.write_text("\n".join(json.dumps(row) for row in rows))
  out = run(
    f"--config.data.eval_files=('{file}',)",
    "--config.data.prompt_key=question",
    module="evaluate",
  )
  metrics = json.loads(out.stdout.strip().splitlines()[-1])
  assert metrics["eval/samples"] == 2 and 0 <= metrics["eval/reward"] <= 1


def test_checkpoint_of_another_model_is_refused(straight, tmp_path):
  out = run(
    f"--config.trainer.run_dir={straight[1]}",
    "--config.trainer.total_steps=9",
    "--config.model.random.hidden_size=16",
    ok=False,
  )
  assert out.returncode == 2 and "does not fit this config" in out.stderr
  assert len(out.stderr.splitlines()) < 10
  config = json.loads((straight[1] / "config.json").read_text())
  assert config["model"]["random"]["hidden_size"] == 32  # the run is as it was


def test_not_finite_updates_change_nothing_and_stop_the_run(tmp_path):
  out = run(
    f"--config.trainer.run_dir={tmp_path}/run",
    "--config.actor.optim.lr=1e30",
    "--config.trainer.total_steps=9",
    "--config.trainer.save_freq=1",
    ok=False,
  )
  assert out.returncode == 2 and "NumericsError" in out.stderr
  rows = metrics_of(tmp_path / "run")
  assert all(row["actor/skipped_updates"] > 0 for row in rows[-3:])


def test_a_start_without_a_checkpoint_starts_afresh_and_two_at_once_do_not(tmp_path):
  import fcntl

  common = [
    f"--config.trainer.run_dir={tmp_path}/run",
    "--config.trainer.total_steps=2",
  ]
  run(*common)
  metrics = tmp_path / "run" / "metrics.jsonl"
  lines = metrics.read_text().splitlines()
  metrics.write_text("\n".join(lines[:2]) + "\n")  # as if it had died in step 2
  out = run(*common)
  assert "starts afresh" in out.stdout
  assert without_time(metrics_of(tmp_path / "run")) == without_time(
    [json.loads(line) for line in lines]
  )
  with (tmp_path / "run" / ".lock").open("w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    out = run(*common, ok=False)
  assert out.returncode == 2 and "another process" in out.stderr


def test_export_does_not_replace_what_is_not_a_model(straight, tmp_path):
  (tmp_path / "thesis.tex").write_text("years of work")
  out = run(
    "--run_dir", straight[1], "--out", tmp_path, module="export", config=None, ok=False
  )
  assert out.returncode == 2 and "would be replaced" in out.stderr
  assert (tmp_path / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize(
  "body,words",
  [
    ("def get_config(): return None", ["get_config()", "NoneType"]),
    ("def get_config(): return undefined", ["NameError", "undefined"]),
    ("import nowhere", ["nowhere"]),
    ("x = (", ["config.py"]),
  ],
)
def test_a_broken_config_file_is_one_message(body, words, tmp_path):
  file = tmp_path / "config.py"
  file.write_text(body)
  out = run(config=str(file), ok=False)
  assert out.returncode == 2
  assert all(word in out.stderr for word in words), out.stderr
