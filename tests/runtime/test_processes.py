"""Several processes: their helpers, and a real run of two against a run of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_hybrid.errors import ConfigError, RewardError
from jaxrl_hybrid.parallel import multihost
from jaxrl_hybrid.runtime import launch, processes

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "tests" / "tiny_config.py")
RUN = (
  "--config.mesh.fake_devices=8",
  "--config.mesh.train=(1,2,4)",
  "--config.actor.use_kl_loss=True",
  "--config.trainer.save_freq=2",
  "--config.trainer.val_before_train=False",
  "--config.trainer.test_freq=0",
)


def start(
  *command: str, count: int | None = None, timeout: float = 300
) -> subprocess.CompletedProcess:
  """Runs ``python *command``, by the launcher if a count is given."""
  launcher = [] if count is None else ["scripts/launch_local.py", "-n", count, "--"]
  return subprocess.run(
    [sys.executable, *map(str, launcher), *command],
    capture_output=True,
    text=True,
    timeout=timeout,
    cwd=ROOT,
    env=os.environ
    | {"JAX_PLATFORMS": "cpu", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"},
  )


@pytest.fixture(scope="module")
def train(tmp_path_factory):
  """Runs the training of the tiny config with further options."""
  cache = f"--config.trainer.compile_cache={tmp_path_factory.mktemp('cache')}"

  def run(*options: str, count: int | None = None) -> subprocess.CompletedProcess:
    command = ["-m", "jaxrl_hybrid.train", "--config", TINY, *RUN, cache, *options]
    return start(*command, count=count)

  return run


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
  """All but times; a clip fraction counts tokens, and one may lie on the edge."""
  lines = (run_dir / "metrics.jsonl").read_text().splitlines()
  left_out = ("timing_s/", "perf/time", "perf/throughput", "actor/pg_clipfrac")
  left_out += ("critic/vf_clipfrac",)
  return [
    {k: v for k, v in json.loads(line).items() if not k.startswith(left_out)}
    for line in lines
  ]


# Helpers, in one process.


@pytest.fixture(scope="module")
def mesh() -> Mesh:
  return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))


def test_put_fetch_and_gather_give_back_what_they_got(mesh):
  x = np.arange(24, dtype=np.float32).reshape(4, 6)
  spread = multihost.put(x, NamedSharding(mesh, PartitionSpec("a", "b")))
  assert spread.addressable_shards[0].data.shape == (2, 3)
  everywhere = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))
  found = multihost.fetch({"x": everywhere(spread)})
  np.testing.assert_array_equal(found["x"], x)
  np.testing.assert_array_equal(multihost.gather(spread), x)
  np.testing.assert_array_equal(multihost.gather(spread, (2,)), x[2])


def test_values_travel_unchanged():
  value = {
    "none": None,
    "text": "ä\n",
    "numbers": [1, -2.5, True],
    "nested": {"array": np.array([[1.5, np.nan]], np.float32)},
    "empty": np.zeros((0, 3), np.int64),
    "scalar": np.array(7, np.uint8),
    "mask": np.array([True, False]),
  }
  found = processes.decode(processes.encode(value))
  np.testing.assert_equal(found, value)
  assert list(found) == list(value)
  assert found["nested"]["array"].dtype == np.float32
  found["mask"][0] = False  # a copy that can be written to


@pytest.mark.parametrize(
  "value", [object(), b"bytes", np.array([object()]), {1: 2}, {"__array__": 0}]
)
def test_what_is_not_plain_data_does_not_travel(value):
  with pytest.raises(TypeError):
    processes.encode({"value": [value]})


def test_one_process_runs_everything_by_itself():
  assert multihost.is_primary()
  assert processes.broadcast((1, "x")) == (1, "x")
  assert processes.on_primary(lambda: 3) == processes.from_primary(lambda: 3) == 3
  processes.check_same({"config": b"x"})
  multihost.barrier("test")
  with pytest.raises(RewardError, match="mine"):
    processes.on_primary(lambda: _fail(RewardError("mine")))


def _fail(error: Exception) -> None:
  raise error


OURS = {
  launch.COORDINATOR: "host:1234",
  launch.COUNT: "4",
  launch.INDEX: "3",
}
SLURM = {"SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "5"}
MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}


@pytest.mark.parametrize(
  "environ, expected",
  [
    ({}, None),
    ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None),  # no step: sbatch, salloc
    (OURS, launch.Group(4, 3, "host:1234")),
    (OURS | {launch.COUNT: "1", launch.INDEX: "0"}, None),
    (SLURM, launch.Group(16, 5, None)),
    (SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
    (MPI, launch.Group(2, 1, None)),
    (SLURM | OURS, launch.Group(4, 3, "host:1234")),
    (MPI | {launch.COORDINATOR: "head:7"}, launch.Group(2, 1, "head:7")),
  ],
)
def test_the_environment_says_who_starts_together(environ, expected):
  assert launch.find_group(environ) == expected


@pytest.mark.parametrize(
  "changed, words",
  [
    ({launch.COORDINATOR: None}, ["JAXRL_COORDINATOR", "host:port"]),
    ({launch.COORDINATOR: "host"}, ["JAXRL_COORDINATOR", "'host'"]),
    ({launch.COUNT: None}, ["JAXRL_NUM_PROCESSES", "mesh.distributed=off"]),
    ({launch.INDEX: "four"}, ["JAXRL_PROCESS_ID", "'four'"]),
    ({launch.INDEX: "4"}, ["JAXRL_PROCESS_ID", "got 4"]),
  ],
)
def test_half_an_environment_is_an_error(changed, words):
  environ = {k: v for k, v in (OURS | changed).items() if v is not None}
  with pytest.raises(ConfigError) as caught:
    launch.find_group(environ)
  assert all(word in str(caught.value) for word in words), caught.value


# Real processes.


def test_two_processes_and_a_resume_equal_one(train, tmp_path):
  done = train(
    f"--config.trainer.run_dir={tmp_path}/one",
    "--config.trainer.total_steps=3",
    "--config.trainer.export_hf=True",
  )
  assert done.returncode == 0, done.stderr[-3000:]
  for steps in (2, 3):
    done = train(
      f"--config.trainer.run_dir={tmp_path}/two",
      f"--config.trainer.total_steps={steps}",
      "--config.trainer.export_hf=True",
      count=2,
    )
    assert done.returncode == 0, done.stderr[-3000:]
  assert "resumed from step 2" in done.stdout
  assert done.stdout.count("run finished") == 1
  assert "[1] step" not in done.stderr and "[1] WARNING" not in done.stderr
  one, two = (metrics_of(tmp_path / name) for name in ("one", "two"))
  assert len(one) == len(two) == 3
  for expected, found in zip(one, two, strict=True):
    assert list(expected) == list(found)
    for name, value in expected.items():
      near = 1e-6 if name.startswith("rollout_train_") else 1e-7  # rounding itself
      assert found[name] == pytest.approx(value, rel=1e-6, abs=near), name
  samples = [(tmp_path / name / "samples.jsonl").read_text() for name in ("one", "two")]
  assert samples[0] == samples[1] and samples[0]
  assert_same_weights(tmp_path / "one" / "hf", tmp_path / "two" / "hf")


def assert_same_weights(a: Path, b: Path) -> None:
  from jaxrl_hybrid.models.hf.checkpoint import Checkpoint

  with Checkpoint(a) as first, Checkpoint(b) as second:
    assert first.names() == second.names()
    for name in first.names():
      np.testing.assert_allclose(second.read(name), first.read(name), rtol=0, atol=1e-5)


def test_a_reward_error_ends_all_processes_with_its_message(train, tmp_path):
  rewards = tmp_path / "rewards.py"
  rewards.write_text(
    "import os\n"
    "def bad(solution_str, ground_truth):\n"
    "  raise ValueError('process ' + os.environ['JAXRL_PROCESS_ID'])\n"
  )
  done = train(
    f"--config.rewards.functions=('{rewards}:bad',)",
    f"--config.trainer.run_dir={tmp_path}/run",
    count=2,
  )
  assert done.returncode == 2
  lines = done.stderr.splitlines()
  for prefix in ("", "[1] "):
    message = f"{prefix}RewardError: reward 'bad' failed on sample 0"
    assert any(line.startswith(message) for line in lines), done.stderr[-3000:]
  assert done.stderr.count("ValueError: process 0") == 2
  assert "Traceback" not in done.stderr and "killed" not in done.stderr


TALK = f"""
import os, sys
from jaxrl_hybrid.runtime import launch, processes
sys.path.insert(0, {str(ROOT / "tests")!r})
import tiny_config
from jaxrl_hybrid import config as config_lib
launch.setup(config_lib.resolve(tiny_config.get_config()))
from jaxrl_hybrid.errors import ConfigError
index = int(os.environ["JAXRL_PROCESS_ID"])
"""


def test_processes_hear_what_process_0_says_and_notice_what_differs():
  done = start(
    "-c",
    TALK
    + """
import jax, numpy as np
from jaxrl_hybrid.parallel import mesh, multihost
assert (jax.process_count(), len(jax.devices()), len(jax.local_devices())) == (2, 4, 2)
value = processes.broadcast({"of": index, "x": np.full(3000, index, np.float32)})
assert value["of"] == 0 and not value["x"].any() and value["x"].shape == (3000,)
assert processes.from_primary(lambda: index) == 0
assert processes.on_primary(lambda: 5) == (5 if index == 0 else None)
errors = []
for action in (
  lambda: processes.on_primary(lambda: int("x")),
  lambda: processes.check_same({"same": b"x", "data": bytes([index])}),
  lambda: mesh.train_mesh((1, 1, 2)),
):
  try:
    action()
  except Exception as error:
    errors.append(f"{type(error).__name__}: {error}")
first, second, third = errors
assert first.startswith("RuntimeError: process 0 failed: ValueError" if index else
                        "ValueError: invalid literal"), first
assert "ConfigError: data: expected the same" in second and "[1]" in second, second
assert "expected all of them" in third, third
train = mesh.train_mesh((1, 2, 2))
from jax.sharding import NamedSharding, PartitionSpec as P
x = np.arange(8, dtype=np.float32).reshape(4, 2)
spread = multihost.put(x, NamedSharding(train, P("dp", "tp")))
assert not spread.is_fully_addressable
np.testing.assert_array_equal(multihost.gather(spread), x)
np.testing.assert_array_equal(multihost.gather(spread, (3,)), x[3])
try:
  multihost.fetch(spread)
except AssertionError:
  print("all is well", index)
""",
    count=2,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  assert "all is well 0" in done.stdout and "[1] all is well 1" in done.stderr


@pytest.mark.parametrize("dies", [0, 1])
def test_when_one_process_dies_the_launcher_ends_the_rest(dies):
  program = (
    TALK
    + f"""
for i in range(10**6):
  processes.broadcast(i)
  if i == 3:
    print("dying", flush=True)
    if index == {dies}:
      os._exit(9)
"""
  )
  began = time.monotonic()
  done = start("-c", program, count=2, timeout=120)
  assert done.returncode == 9, done.stderr[-3000:]
  assert time.monotonic() - began < 60
  assert f"process {dies} of 2 failed: exit code 9" in done.stderr
