"""Errors of a config are found before anything loads, and name the fix."""

from pathlib import Path

import pytest

from jaxrl_hybrid import config as config_lib
from jaxrl_hybrid import config_reader
from jaxrl_hybrid.algorithms.presets import PRESETS
from jaxrl_hybrid.errors import ConfigError

TINY = str(Path(__file__).with_name("tiny_config.py"))
CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.py"))


def load(*overrides):
  return config_lib.resolve(
    config_reader.from_argv(["train", "--config", TINY, *overrides])[0]
  )


def fails(*overrides):
  with pytest.raises(ConfigError) as caught:
    config_lib.validate(load(*overrides))
  return str(caught.value)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_shipped_configs_are_valid(path):
  config, _ = config_reader.from_argv(["train", "--config", str(path)])
  config_lib.validate(config_lib.resolve(config))
  assert "python -m jaxrl_hybrid.train" in path.read_text()


@pytest.mark.parametrize(
  "typed,nearest",
  [
    ("--config.actor.optim.lerning_rate=1", "actor.optim.lr"),
    ("--config.actor.cliprato=0.1", "actor.clip_ratio"),
    ("--config.trainer.total_step=3", "trainer.total_steps"),
    ("--config.rollout.temprature=1", "rollout.temperature"),
    ("--config.train_batch_size=3", "data.train_batch_size"),
  ],
)
def test_a_typo_names_the_nearest_key(typed, nearest):
  message = fails(typed)
  assert typed.split("=")[0].removeprefix("--config.") in message
  if nearest != "actor.optim.lr":
    assert nearest in message


@pytest.mark.parametrize(
  "overrides,words",
  [
    (["--config.rollout.n=1"], ["rollout.n", ">= 2", "ppo"]),
    (["--config.rollout.temperature=0"], ["rollout.temperature", "> 0"]),
    (["--config.actor.ppo_mini_batch_size=3"], ["divisor", "8", "got 3"]),
    (["--config.actor.ppo_micro_batch_size_per_device=3"], ["16 sequences", "dp=2"]),
    (["--config.mesh.train=(1,2)"], ["3 integers", "(pp, tp, dp)", "(1, 2)"]),
    (["--config.mesh.train=(0,2,2)"], ["integers >= 1", "(0, 2, 2)"]),
    (["--config.mesh.generation=(1,3)"], ["mesh.generation", "divide"]),
    (["--config.mesh.generation=(2,1)"], ["(p_g, t_g)=(2, 1)", "(pp, tp)=(1, 2)"]),
    (["--config.data.sampler.weight_fn=f.py:f"], ["data.sampler.name=dynamic"]),
    (
      ["--config.algorithm.name=ppo", "--config.critic.warmup=3"]
      + ["--config.critic.full_steps=2"],
      ["critic.full_steps", ">= critic.warmup=3", "got 2"],
    ),
    (["--config.critic.warmup_explained_var=2"], ["warmup_explained_var", "got 2"]),
    (["--config.actor.style.method=distil"], ["'distill'", "distil"]),
    (["--config.actor.style.weight=0"], ["actor.style.weight", "> 0"]),
    (["--config.actor.style.reference_texts=('a','')"], ["none of them empty"]),
    (["--config.data.sampler.floor=0"], ["data.sampler.floor", "(0, 1]", "got 0"]),
    (["--config.data.sampler.decay=2"], ["data.sampler.decay", "[0, 1]"]),
    (["--config.data.sampler.domain_boost=('a',2)"], ["pairs", "('a', 2)"]),
    (
      ["--config.data.sampler.name=dynamic", "--config.data.shuffle=False"],
      ["data.shuffle", "dynamic"],
    ),
    (["--config.mesh.zero=2"], ["mesh.zero", "[1, 3]", "got 2"]),
    (["--config.mesh.pipeline_microbatches=0"], ["pipeline_microbatches", "> 0"]),
    (["--config.mesh.pipeline_microbatches=3"], ["16 sequences", "=3", "mesh.train"]),
    (["--config.model.remat=stages"], ["'stage'", "'stages'"]),
    (["--config.rewards.weights=(1.0,2.0)"], ["1 numbers", "got 2"]),
    (["--config.algorithm.name=gpro"], ["grpo", "gpro"]),
    (["--config.algorithm.adv_estimator=gea"], ["gae", "gea"]),
    (["--config.actor.loss_agg_mode=mean"], ["token-mean"]),
    (["--config.rollout.top_p=0"], ["rollout.top_p", "(0, 1]"]),
    (["--config.rollout.top_k=0"], ["-1 (off)"]),
    (["--config.trainer.total_steps=0"], ["trainer.total_steps", "> 0"]),
    (["--config.actor.optim.lr=fast"], ["lr", "fast"]),
    (["--config.data.train_files=()"], ["data.train_files"]),
    (["--confg.seed=1"], ["confg"]),
    (["stray"], ["stray"]),
  ],
)
def test_errors_say_expected_and_got(overrides, words):
  message = fails(*overrides)
  assert all(word in message for word in words), message


def test_missing_config_file():
  with pytest.raises(ConfigError, match="nowhere.py"):
    config_reader.from_argv(["train", "--config", "nowhere.py"])
  with pytest.raises(ConfigError, match="expected --config FILE"):
    config_reader.from_argv(["train"])


def test_config_may_stand_anywhere_and_in_both_spellings():
  for argv in (
    ["t", "--config.seed=3", "--config", TINY],
    ["t", f"--config={TINY}", "--config.seed=3"],
  ):
    assert config_reader.from_argv(argv)[0].seed == 3


def test_the_algorithm_sets_defaults_that_can_be_overridden():
  ppo = load("--config.algorithm.name=ppo")
  assert (ppo.algorithm.adv_estimator, ppo.algorithm.whiten_advantages) == ("gae", True)
  mixed = load(
    "--config.algorithm.name=remax", "--config.actor.loss_agg_mode=token-sum"
  )
  assert mixed.algorithm.adv_estimator == "remax"
  assert mixed.actor.loss_agg_mode == "token-sum"


NAMES = (
  "ppo remax grpo rloo reinforce_plus_plus reinforce_plus_plus_baseline opo gpg "
  "dapo safe_rlhf dr_grpo gspo cispo sapo dppo gdpo grpo_passk otb "
  # and what is no preset but an estimator or a loss
  "gae optimal_token_baseline vanilla dppo_kl clip_cov kl_cov geo_mean dro reinforce"
).split()


@pytest.mark.parametrize("name", NAMES)
def test_one_line_switches_the_algorithm(name):
  config = load(f"--config.algorithm.name={name}")
  config_lib.validate(config)
  parts = (config.algorithm.adv_estimator, config.actor.policy_loss)
  own = {"ppo": "gae", "safe_rlhf": "gae", "dr_grpo": "grpo", "dapo": "grpo"}
  own |= {"dppo": "dppo_tv", "otb": "optimal_token_baseline"}
  assert own.get(name, name) in parts
  assert None not in (config.actor.clip_ratio_low, config.actor.loss_agg_mode)


@pytest.mark.parametrize("config", ["quickstart", "smollm2_arithmetic_ppo"])
@pytest.mark.parametrize("name", PRESETS)
def test_one_line_switches_the_algorithm_of_shipped_configs(name, config):
  file = CONFIGS[0].with_name(f"{config}.py")
  argv = ["train", f"--config={file}", f"--config.algorithm.name={name}"]
  config_lib.validate(config_lib.resolve(config_reader.from_argv(argv)[0]))


def test_algorithms_that_compare_samples_have_some():
  on_ppo = lambda name: config_reader.from_argv(
    [
      "train",
      f"--config={CONFIGS[0].with_name('smollm2_arithmetic_ppo.py')}",
      f"--config.algorithm.name={name}",
    ]
  )[0]
  samples = lambda name: config_lib.resolve(on_ppo(name)).rollout.n
  assert [samples(name) for name in ("ppo", "remax", "grpo", "rloo")] == [1, 1, 8, 8]


@pytest.mark.parametrize("name", NAMES)
def test_what_an_algorithm_sets_can_be_overridden(name):
  config = load(
    f"--config.algorithm.name={name}",
    "--config.algorithm.adv_estimator=rloo",
    "--config.algorithm.whiten_advantages=True",
    "--config.actor.policy_loss=cispo",
    "--config.actor.loss_agg_mode=token-sum",
    "--config.actor.clip_ratio=0.1",
    "--config.actor.clip_ratio_c=7.0",
  )
  actor = config.actor
  assert config.algorithm.adv_estimator == "rloo" and config.algorithm.whiten_advantages
  assert (actor.policy_loss, actor.loss_agg_mode) == ("cispo", "token-sum")
  assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c) == (
    0.1,
    0.1,
    7.0,
  )


def test_a_knob_of_another_loss_is_said_to_be_unused(caplog):
  fails_not = lambda *overrides: config_lib.validate(load(*overrides))
  fails_not("--config.actor.policy_loss=sapo", "--config.actor.sapo_tau_pos=2.0")
  assert "does not use" not in caplog.text
  fails_not("--config.actor.sapo_tau_pos=2.0")
  assert "vanilla does not use ['actor.sapo_tau_pos']" in caplog.text


def test_a_kl_loss_that_holds_nothing_is_said(caplog):
  overrides = ["--config.actor.use_kl_loss=True", "--config.actor.kl_loss_type=k1"]
  config_lib.validate(load(*overrides))
  assert "gradient is 0 on average" in caplog.text
  caplog.clear()
  config_lib.validate(load(overrides[0], "--config.actor.kl_loss_type=k1+"))
  assert not caplog.text


@pytest.mark.parametrize(
  "override",
  ["use_kl_in_reward=True", "normalize_rewards=True", "reward_clip=1.0"],
)
def test_gdpo_looks_at_nothing_but_the_reward_functions(override):
  message = fails("--config.algorithm.name=gdpo", f"--config.algorithm.{override}")
  assert override.split("=")[0] in message and "no effect" in message


@pytest.mark.parametrize(
  "override", ["data.ptx_files=('a.jsonl',)", "actor.ptx_coef=0.5"]
)
def test_given_answers_need_files_and_a_weight(override):
  message = fails(f"--config.{override}")
  assert "data.ptx_files and actor.ptx_coef belong together" in message


def test_dapo_sets_its_parts():
  config = load("--config.algorithm.name=dapo")
  assert config.algorithm.filter_groups.enable
  actor = config.actor
  assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.2, 0.28)
  assert actor.loss_agg_mode == "token-mean"
  assert not load().algorithm.filter_groups.enable


@pytest.mark.parametrize(
  "overrides,words",
  [
    (
      ["algorithm.filter_groups.max_num_gen_batches=0"],
      ["max_num_gen_batches", ">= 1"],
    ),
    (
      ["algorithm.name=remax", "rollout.n=1", "algorithm.filter_groups.enable=True"],
      ["filter_groups", "rollout.n >= 2"],
    ),
    (["rewards.overlong_buffer=6"], ["overlong_buffer", "max_response_length=5"]),
  ],
)
def test_wrong_values_of_dapo_are_named(overrides, words):
  message = fails(*(f"--config.{override}" for override in overrides))
  assert all(word in message for word in words), message


CORRECTION = "--config.algorithm.rollout_correction."


@pytest.mark.parametrize(
  "overrides,words",
  [
    (["rollout_is=tokens"], ["rollout_is", "'token'"]),
    (["rollout_is_lower=3.0"], ["rollout_is_lower", "3.0 and 2.0"]),
    (["rollout_rs=('seq_k1',)"], ["rollout_rs", "seq_k1", "seq_mean_k1"]),
    (["rollout_rs=('token_k2',)"], ["rollout_rs_threshold", "a number for each"]),
    (
      ["rollout_rs=('token_k1',)", "rollout_rs_threshold=(1.0,)"],
      ["> 1 for k1", "(1.0,)"],
    ),
    (["bypass_mode=True", "rollout_is=token"], ["corrects already", "reinforce"]),
  ],
)
def test_wrong_rollout_corrections_are_named(overrides, words):
  message = fails(*(CORRECTION + override for override in overrides))
  assert all(word in message for word in words), message


@pytest.mark.parametrize(
  "overrides",
  [
    ["rollout_is=token", "rollout_is_lower=0.5"],
    ["rollout_rs=('seq_mean_k1','token_k3')", "rollout_rs_threshold=(1.01,2)"],
    ["bypass_mode=True", "rollout_rs=('seq_mean_k3',)", "rollout_rs_threshold=(0.1,)"],
  ],
)
def test_right_rollout_corrections_are_taken(overrides):
  config_lib.validate(load(*(CORRECTION + override for override in overrides)))


def test_clip_ratio_alone_has_an_effect():
  config = load("--config.actor.clip_ratio=0.1")
  assert (config.actor.clip_ratio_low, config.actor.clip_ratio_high) == (0.1, 0.1)
  config = load("--config.actor.clip_ratio_high=0.28")
  assert (config.actor.clip_ratio_low, config.actor.clip_ratio_high) == (0.2, 0.28)


def test_sizes_by_hand():
  sizes = config_lib.validate(
    load(
      "--config.actor.ppo_micro_batch_size_per_device=4", "--config.actor.ppo_epochs=3"
    )
  )
  assert (sizes.prompts, sizes.sequences, sizes.mini_batches) == (8, 32, 2)
  assert (sizes.mini_sequences, sizes.micro_sequences, sizes.accumulation) == (16, 8, 2)
  assert sizes.updates_per_step == 6


@pytest.mark.parametrize("train", [(1, 4, 1), (1, 8, 2), (4, 3, 1), (2, 2, 4)])
def test_a_mesh_need_not_divide_heads_or_layers(train):
  """The model has 4 and 2 heads and 2 layers; the mesh pads what it computes with."""
  sizes = config_lib.validate(load(f"--config.mesh.train={train}"))
  assert sizes.dp == train[2] and sizes.accumulation == 1


@pytest.mark.parametrize(
  "overrides,per_device,microbatches,accumulation",
  [
    # 16 sequences per mini-batch, 8 per dp shard; 4 microbatches a stage wanted.
    (["--config.mesh.train=(1,2,2)"], 8, 1, 1),
    (["--config.mesh.train=(2,1,2)"], 1, 8, 1),
    (["--config.mesh.train=(4,1,2)"], 1, 8, 1),  # 8 are all there are
    (["--config.mesh.train=(2,1,1)"], 2, 8, 1),
    (
      [
        "--config.mesh.train=(2,1,2)",
        "--config.actor.ppo_micro_batch_size_per_device=2",
      ],
      2, 4, 1,
    ),
    (
      [
        "--config.mesh.train=(2,1,2)",
        "--config.actor.ppo_micro_batch_size_per_device=2",
        "--config.mesh.pipeline_microbatches=2",
      ],
      2, 2, 2,
    ),
  ],
)  # fmt: skip
def test_pipeline_microbatches_by_hand(
  overrides, per_device, microbatches, accumulation
):
  config = load(*overrides)
  sizes = config_lib.validate(config)
  assert config.actor.ppo_micro_batch_size_per_device == per_device
  assert sizes.pipeline_microbatches == microbatches
  assert sizes.accumulation == accumulation
  assert sizes.micro_sequences * accumulation == 16


def test_a_saved_config_reads_back_the_same(tmp_path):
  config = load()
  (tmp_path / "config.json").write_text(config.to_json_best_effort())
  assert config_reader.from_run(tmp_path / "config.json").to_dict() == config.to_dict()


def test_some_180_knobs_and_no_more():
  assert sum(1 for _ in config_lib.flatten(config_lib.base())) <= 190
