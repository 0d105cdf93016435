"""Plans: sizes checked by hand, both compilers, and every way to ask wrongly."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl_hybrid import config as config_lib
from jaxrl_hybrid import config_reader, inspection, plan, plan_report, planning
from jaxrl_hybrid.errors import JaxrlError
from jaxrl_hybrid.parallel import abstract, topology
from jaxrl_hybrid.runtime import launch
from jaxrl_hybrid.workers.training import abstract_batch

TESTS = Path(__file__).parent
CONFIGS = TESTS.parent / "configs"
TINY = f"--config={TESTS}/tiny_config.py"
QWEN = f"--config={CONFIGS}/qwen70b_ppo.py"
LLAMA = f"--config={CONFIGS}/llama70b_grpo.py"
SMOLLM2 = TESTS.parent / "models" / "smollm2-135m-instruct"
HALF = "--config.model.dtype=bfloat16"
GB = 10**9
wheels = pytest.mark.skipif(
  bool(topology.available()), reason=f"CUDA wheels: {topology.available()}"
)


@pytest.fixture(autouse=True)
def devices_as_they_are(monkeypatch):
  """The sixteen devices of these tests are there already."""
  config = types.SimpleNamespace(update=lambda *_: None)
  monkeypatch.setattr(plan_report, "jax", types.SimpleNamespace(config=config))
  monkeypatch.delenv(launch.MEMORY_VARIABLE, raising=False)


@pytest.fixture
def no_wheels(monkeypatch):
  """As on a machine without a compiler for GPUs."""
  monkeypatch.setattr(plan_report.topology, "available", lambda: "no wheels")


def make(*args, gpu="h100-80gb", per_node=8):
  return plan_report.make(["plan", *args], gpu, per_node)


def as_json(capsys, *args):
  plan.main(["plan", "--json", "--log_level=ERROR", *args])
  return json.loads(capsys.readouterr().out)


def component(found, phase, name):
  return found.to_json()["components"][phase][name]


# The tiny model: D = 32, 2 layers, 4 query and 2 key heads of 8, MLP 48, and a
# vocabulary padded to 64 with embedding and head apart.
MATRICES = 2 * (32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 32 * 48) + 2 * 64 * 32
BIASES, NORMS = 2 * (32 + 16 + 16), 2 * 2 * 32 + 32


def test_sizes_of_a_small_model_are_those_of_a_hand_calculation(no_wheels):
  found = make(TINY, HALF, "--config.mesh.train=(1,2,2)")
  size = lambda name, phase="gen": component(found, phase, name)
  stored = 4 * ((MATRICES + BIASES) // 4 + NORMS)  # over tp and dp, norms whole
  weights = 2 * MATRICES // 2 + 4 * BIASES // 2 + 4 * NORMS  # over tp
  generation = 2 * MATRICES + 4 * BIASES + 4 * NORMS  # t_g = 1
  assert size("actor fp32 parameters") == stored
  assert 2 * stored <= size("actor moments") <= 2 * stored + 16  # and counters
  assert size("actor weights") == weights
  assert size("generation weights") == generation
  assert size("gradients", "update_actor: gradients") == stored
  assert found.report.switch_bytes == generation - weights
  tokens, per_token = 16, 2 * 2 * 2 * 8 * 2  # k and v, layers, heads, size, bf16
  assert found.report.kv_row_bytes == tokens * per_token
  styled = make(
    TINY,
    HALF,
    "--config.mesh.train=(1,2,2)",
    "--config.actor.style.reference_texts=('copy',)",
  )
  assert component(styled, "gen", "reference weights") == weights
  assert "reference weights" not in found.to_json()["components"]["gen"]
  rows = 8 * 4 // 4  # sequences over dp and micro-dp
  assert found.report.rows == rows
  assert size("KV cache") == rows * found.report.kv_row_bytes
  assert found.report.host_bytes == 0


def test_zero_pipeline_and_generation_tp_divide_what_they_should(no_wheels):
  found = make(
    TINY, HALF, "--config.mesh.train=(2,2,2)", "--config.mesh.generation=(1,2)",
    "--config.mesh.zero=3",
  )  # fmt: skip
  size = lambda name: component(found, "gen", name)
  layer_norms = 2 * 2 * 32 // 2  # spread over pp
  norms = layer_norms + 32
  assert size("actor fp32 parameters") == 4 * ((MATRICES + BIASES) // 8 + norms)
  assert size("actor weights") == 2 * MATRICES // 8 + 4 * BIASES // 8 + 4 * norms
  generation = 2 * MATRICES // 2 + 4 * BIASES // 2 + 4 * NORMS
  assert size("generation weights") == generation
  halved = make(
    TINY, HALF, "--config.mesh.train=(2,2,2)", "--config.mesh.generation=(2,2)"
  )
  layers = MATRICES - 2 * 64 * 32
  expected = (layers // 2 + 2 * 64 * 32) + 4 * (BIASES // 4 + norms)
  assert component(halved, "gen", "generation weights") == pytest.approx(
    expected, abs=128
  )


def test_what_is_offloaded_moves_from_the_gpu_to_the_host(no_wheels):
  args = [TINY, "--config.algorithm.name=ppo", "--config.actor.use_kl_loss=True"]
  here = make(*args)
  there = make(
    *args,
    "--config.offload.optimizer=True",
    "--config.offload.params=True",
    "--config.offload.critic=True",
    "--config.offload.reference=True",
    per_node=2,
  )
  names = [f"{role} {what}" for role in ("actor", "critic")
           for what in ("fp32 parameters", "moments")]  # fmt: skip
  moved = sum(
    component(here, "gen", name)
    for name in [*names, "critic weights", "reference weights"]
  )
  assert there.to_json()["host_bytes_per_node"] == pytest.approx(2 * moved, rel=0.01)
  assert set(there.to_json()["components"]["gen"]) == {
    "actor weights", "generation weights", "KV cache", "prefilled prompts",
    planning.BUFFERS,
  }  # fmt: skip
  for phase, name in (("ref", "reference weights"), ("values", "critic weights")):
    visiting = component(there, phase, name)
    assert visiting == component(here, phase, name) > 0
    assert name not in there.to_json()["components"]["gen"]
  chunks = component(there, "update_actor: optimizer", "optimizer chunks")
  whole = sum(component(here, "gen", name) for name in names[:2])
  assert whole <= chunks <= whole + 64  # all three of them, with counters of their own


def test_resident_bytes_are_the_arguments_of_the_cpu_compiler(no_wheels):
  config, _ = config_reader.from_argv(["plan", TINY, HALF])
  planner = planning.Planner(
    inspection.inspect(config_lib.resolve(config), training=False), estimate=True
  )
  state = planner.actor.state
  columns = {"tokens": np.int32, "mask": bool}
  columns |= dict.fromkeys(("advantages", "old_log_probs"), np.float32)
  batch = abstract_batch(columns, (1, 16, 16), planner._plan.train_layout)
  compiled = state.lower(batch).compile()
  expected = abstract.device_bytes(state.weights) + abstract.device_bytes(batch)
  assert topology.memory(compiled)["argument"] == expected


def test_json_has_every_number_and_says_that_some_are_estimates(no_wheels, capsys):
  found = as_json(capsys, TINY, "--gpu=a100-80gb")
  assert found["compiled_for_gpu"] is False
  assert found["estimated"] == [planning.BUFFERS]
  assert "no wheels" in found["note"] and "estimate" in found["note"]
  assert (found["gpu"], found["gpus"], found["fits"]) == ("a100-80gb", 4, True)
  assert found["peak_bytes_per_gpu"] == max(found["phases"].values())
  assert found["phases"][found["peak_phase"]] == found["peak_bytes_per_gpu"]
  memory = topology.GPUS["a100-80gb"].memory_bytes
  assert found["usable_bytes_per_gpu"] + found["reserved_bytes_per_gpu"] == memory
  assert found["host_bytes_per_node"] == 0 < found["switch_bytes_per_gpu"]
  assert found["kv_rows_that_fit"] > found["kv_rows_per_gpu"] > 0
  assert found["kv_bytes_per_row"] > 0
  assert list(found["phases"]) == [
    "switch", "gen", "old_log_prob", "update_actor: gradients",
    "update_actor: optimizer",
  ]  # fmt: skip
  for phase, components in found["components"].items():
    assert sum(components.values()) == found["phases"][phase]
    assert all(isinstance(size, int) and size > 0 for size in components.values())


def test_the_table_adds_up_and_marks_estimates(no_wheels, capsys):
  plan.main(["plan", TINY, "--log_level=ERROR"])
  out = capsys.readouterr().out
  assert f"{planning.BUFFERS} (estimate)" in out
  assert "MB per GPU (4 x h100-80gb)" in out
  assert "fits by this estimate" in out.splitlines()[-2]
  assert "planned in" in out.splitlines()[-1]


def test_greedy_completions_that_need_more_are_a_phase_of_their_own(no_wheels):
  phases = lambda *args: list(make(TINY, *args).to_json()["phases"])
  task = "task:symbols?min=1&max=3&symbols=6&n=99&split=eval"
  many = f"--config.data.eval_files=('{task}',)"
  assert "testing" not in phases()  # 8 prompts as in training
  assert "testing" in phases(many)
  assert "gen_baseline" not in phases("--config.algorithm.name=remax")


@pytest.mark.parametrize("config, fewest, most", [(QWEN, 44, 60), (LLAMA, 40, 60)])
def test_70b_fits_sixteen_gpus_of_80_gb_by_the_estimate(
  no_wheels, config, fewest, most
):
  before = sum(x.nbytes for x in jax.live_arrays())
  found = make(config, gpu="a100-80gb")
  assert found.fits and found.devices == 16
  assert fewest * GB < found.report.peak.bytes < most * GB
  assert sum(x.nbytes for x in jax.live_arrays()) - before < 10**6
  resident = make(config, "--config.offload.params=False", gpu="a100-80gb")
  assert resident.report.peak.bytes > found.report.peak.bytes + 15 * GB


def test_a_run_that_does_not_fit_is_told_so(no_wheels):
  switches = [f"--config.offload.{name}=False" for name in ("optimizer", "params")]
  found = make(LLAMA, *switches, "--config.mesh.generation=(1,1)")
  assert not found.fits and not found.to_json()["fits"]
  assert "DOES NOT FIT" in found.describe()
  assert found.to_json()["kv_rows_that_fit"] == 0


def test_no_weights_are_read(no_wheels, tmp_path, capsys):
  config, _ = config_reader.from_argv(["plan", TINY])
  source = inspection.inspect(config_lib.resolve(config), training=False).source
  source.tokenizer.save_pretrained(tmp_path)
  (tmp_path / "config.json").write_text(json.dumps(source.hf_config))
  assert not list(tmp_path.glob("*.safetensors"))
  args = [f"--config.model.path={tmp_path}", "--config.model.tokenizer="]
  found = as_json(capsys, TINY, *args)
  assert found["phases"] == as_json(capsys, TINY)["phases"]


@pytest.mark.parametrize("variable, said", [("half", "'half'"), ("1.5", "1.5")])
def test_a_memory_fraction_that_is_none_is_named(
  no_wheels, monkeypatch, variable, said
):
  monkeypatch.setenv(launch.MEMORY_VARIABLE, variable)
  with pytest.raises(JaxrlError, match=said):
    make(TINY).to_json()


def test_the_memory_fraction_of_the_run_counts(no_wheels, monkeypatch):
  memory = topology.GPUS["h100-80gb"]
  assert make(TINY).usable == topology.usable_bytes(memory, 0.92)
  monkeypatch.setenv(launch.MEMORY_VARIABLE, "0.5")
  assert make(TINY).usable == topology.usable_bytes(memory, 0.5)


@pytest.mark.parametrize(
  "args, said",
  [
    ([], "--config FILE"),
    (["--config=nope.py"], "nope.py"),
    ([TINY, "more"], "unexpected arguments"),
    ([TINY, "--gpus_per_node=0"], "--gpus_per_node: expected at least 1, got 0"),
    ([TINY, "--gpus_per_node=-1"], "at least 1, got -1"),
    ([TINY, "--config.mesh.trian=(1,2,2)"], "did you mean 'mesh.train'"),
    ([TINY, "--config.mesh.train"], "mesh.train"),
    ([TINY, "--config.mesh.train=(1,2)"], "3 integers"),
    ([TINY, "--config.mesh.train=(1,2,0)"], "3 integers >= 1"),
    ([TINY, "--config.mesh.train=(1,2,3)"], "change one of them or mesh.train"),
    ([TINY, "--config.mesh.generation=(1,3)"], "must divide"),
    ([TINY, "--config.mesh.zero=2"], "mesh.zero"),
    ([TINY, "--config.model.dtype=bf16"], "did you mean 'bfloat16'"),
    ([TINY, "--config.model.path=/nope"], "/nope"),
    (
      [TINY, "--config.mesh.train=(3,1,1)", "--config.offload.params=True"],
      "needs pp to divide the layers",
    ),
    (
      [TINY, "--config.offload.params=True", "--config.offload.layers_per_chunk=3"],
      "offload.layers_per_chunk: expected a divisor of the 2 layers",
    ),
  ],
)
def test_a_wrong_request_is_an_error_that_says_what_to_change(no_wheels, args, said):
  with pytest.raises(JaxrlError) as caught:
    plan.main(["plan", *args])
  assert said in str(caught.value)


@pytest.mark.parametrize(
  "args",
  [
    ["--config.mesh.train=(3,1,1)"],  # layers padded
    ["--config.mesh.train=(1,8,1)"],  # heads padded
    ["--config.mesh.train=(2,2,4)", "--config.mesh.generation=(2,1)"],
    ["--config.mesh.train=(1,2,2)", "--config.mesh.fake_devices=1"],
  ],
)
def test_unusual_meshes_are_planned(no_wheels, args):
  assert make(TINY, *args, per_node=3).fits


def run(*args):
  return subprocess.run(
    [sys.executable, "-m", "jaxrl_hybrid.plan", *args],
    capture_output=True,
    text=True,
    cwd=TESTS.parent,
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
    timeout=300,
  )


def test_the_command_exits_as_it_should():
  fine = run(TINY, "--json")
  assert fine.returncode == 0, fine.stderr
  found = json.loads(fine.stdout)
  assert found["compiled_for_gpu"] is (topology.available() == "")
  for wrong in (["--gpu=h300", TINY], [TINY, "--config.mesh.trian=1"]):
    done = run(*wrong)
    assert done.returncode == 2 and "Traceback" not in done.stderr
  assert "h100-80gb" in run("--gpu=h300", TINY).stderr


def test_help_shows_every_option(capsys):
  with pytest.raises(SystemExit) as caught:
    plan.main(["plan", "--help"])
  assert caught.value.code == 0
  out = capsys.readouterr().out
  for option in ("--config", "--gpu", "--gpus_per_node", "--json", *topology.GPUS):
    assert option in out


@wheels
def test_a_small_config_is_compiled_for_the_gpu(capsys):
  found = as_json(capsys, TINY, HALF, "--config.offload.optimizer=True")
  assert found["compiled_for_gpu"] and not found["note"] and not found["estimated"]
  assert found["phases"]["update_actor: gradients"] > 0
  assert "estimate" not in make(TINY, HALF).describe()


@wheels
@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="no SmolLM2")
def test_smollm2_needs_some_eight_gigabytes(monkeypatch):
  monkeypatch.chdir(TESTS.parent)
  found = make(f"--config={CONFIGS}/smollm2_arithmetic_grpo.py")
  assert found.report.peak.name == "update_actor: gradients"
  assert 6 * GB < found.report.peak.bytes < 10 * GB
  assert component(found, "gen", "actor fp32 parameters") == pytest.approx(
    4 * 134_515_008, rel=0.001
  )


@wheels
@pytest.mark.slow
@pytest.mark.parametrize("config", [QWEN, LLAMA])
def test_70b_compiled_fits_and_the_estimate_is_near(config, monkeypatch):
  found = make(config, gpu="a100-80gb")
  assert found.fits and "usable (85.9 GB in all): fits" in found.describe()
  assert 44 * GB < found.report.peak.bytes < 60 * GB
  monkeypatch.setattr(plan_report.topology, "available", lambda: "no wheels")
  estimate = make(config, gpu="a100-80gb")
  assert estimate.report.peak.name == found.report.peak.name
  assert estimate.report.peak.bytes == pytest.approx(found.report.peak.bytes, rel=0.05)
