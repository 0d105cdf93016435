"""What must happen before JAX touches a device.

Several processes start together when the environment says so:

  JAXRL_COORDINATOR    host:port of process 0, reachable from all
  JAXRL_NUM_PROCESSES  how many there are; default: what SLURM or Open MPI say
  JAXRL_PROCESS_ID     0 ... n-1, this one; default: what SLURM or Open MPI say

Without them, a SLURM step (srun) or an Open MPI job (mpirun) of several tasks is
enough; JAX then gives one GPU to each process, or those of JAX_LOCAL_DEVICE_IDS.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Mapping

import jax
from ml_collections import ConfigDict

from jaxrl_hybrid.errors import ConfigError
from jaxrl_hybrid.parallel.multihost import is_primary
from jaxrl_hybrid.runtime import compile_cache

MEMORY_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
HOST_MEMORY_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
MEMORY_FRACTION = "0.92"  # JAX's own default leaves a quarter of a GPU unused
COORDINATOR, COUNT, INDEX = (
  "JAXRL_COORDINATOR",
  "JAXRL_NUM_PROCESSES",
  "JAXRL_PROCESS_ID",
)
# Where a scheduler says the same; SLURM_NTASKS is not only set inside of a step.
_SCHEDULERS = (
  ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
  ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
)
HEARTBEAT_S = 30  # a process that is silent for so long is taken for dead
SHUTDOWN_S = 60  # how long a process that ends waits for the others to end
FAILED_S = 10.0  # the same of one that has failed, maybe alone


@dataclasses.dataclass(frozen=True)
class Group:
  """The processes of a run as seen by one of them.

  Attributes:
    count: at least 2.
    index: of this process.
    coordinator: host:port of process 0; None: JAX asks the scheduler.
  """

  count: int
  index: int
  coordinator: str | None


def setup(config: ConfigDict) -> None:
  """Chooses the platform, numerics and compile cache; joins the other processes.

  Raises:
    ConfigError: the environment describes no proper group, or nobody answers.
  """
  os.environ.setdefault(MEMORY_VARIABLE, MEMORY_FRACTION)
  # XLA gives up at 64 GB of pinned memory otherwise, whatever the machine has.
  os.environ.setdefault(HOST_MEMORY_VARIABLE, str(_host_memory_gb()))
  group = find_group(os.environ) if config.mesh.distributed == "auto" else None
  if config.mesh.fake_devices:
    jax.config.update("jax_platforms", "cpu")
    count = _fake_devices(config.mesh.fake_devices, group)
    jax.config.update("jax_num_cpu_devices", count)
  if config.model.dtype == "float32":
    # GPUs would otherwise round fp32 products to TF32: a rollout/train gap of 1e-3.
    jax.config.update("jax_default_matmul_precision", "highest")
  cache = compile_cache.directory(config.trainer.compile_cache, os.environ)
  if cache is not None and compile_cache.is_writable(cache):
    jax.config.update("jax_compilation_cache_dir", str(cache))
  if group:
    _join(group)


def leave_failed(code: int) -> None:
  """Call it before this process ends with an exit code that is not 0.

  If the others fail in the same way, all end together. If they do not, this one
  goes after a moment, and whoever started it can end the rest.
  """
  if jax.distributed.is_initialized():
    timer = threading.Timer(FAILED_S, os._exit, [code])
    timer.daemon = True
    timer.start()


def setup_logging(level: str) -> None:
  """Messages of this package on stderr from ``level`` on, others from WARNING."""
  logging.basicConfig(
    level=logging.WARNING, format="%(levelname)s: %(message)s", force=True
  )
  logging.getLogger().setLevel(level)
  for noisy in ("jax", "orbax", "absl", "asyncio", "transformers", "urllib3"):
    logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))


def find_group(environ: Mapping[str, str]) -> Group | None:
  """The group that an environment describes; None for a process by itself.

  Raises:
    ConfigError: a variable is missing or wrong.
  """
  ours = [name for name in (COORDINATOR, COUNT, INDEX) if name in environ]
  scheduler = next((names for names in _SCHEDULERS if names[0] in environ), ())
  if not ours and not scheduler:
    return None
  count, index = (
    _integer(environ, [ours_name, *scheduler[i : i + 1]])
    for i, ours_name in enumerate((COUNT, INDEX))
  )
  if ours and COORDINATOR not in environ:
    raise ConfigError(
      f"{ours[0]} is set but {COORDINATOR} is not; expected host:port of process 0"
    )
  if not 0 <= index < count:
    raise ConfigError(f"{INDEX}: expected 0 ... {COUNT} - 1 = {count - 1}, got {index}")
  coordinator = environ.get(COORDINATOR)
  if coordinator is not None and not coordinator.rpartition(":")[2].isdigit():
    raise ConfigError(f"{COORDINATOR}: expected host:port, got {coordinator!r}")
  return Group(count, index, coordinator) if count > 1 else None


def _integer(environ: Mapping[str, str], names: list[str]) -> int:
  for name in names:
    if name in environ:
      try:
        return int(environ[name])
      except ValueError as error:
        raise ConfigError(
          f"{name}: expected an integer, got {environ[name]!r}"
        ) from error
  raise ConfigError(
    f"expected the environment variable {names[0]} beside the others that start "
    "several processes; or set mesh.distributed=off"
  )


def _fake_devices(total: int, group: Group | None) -> int:
  """Of this process."""
  processes = group.count if group else 1
  if total % processes:
    raise ConfigError(
      f"mesh.fake_devices: expected a multiple of the {processes} processes, got "
      f"{total}"
    )
  return total // processes


def _join(group: Group) -> None:
  if jax.distributed.is_initialized():
    return
  # Its handler would swallow SIGTERM, and nobody asks for its sync points.
  jax.config.update("jax_enable_preemption_service", False)
  try:
    jax.distributed.initialize(
      group.coordinator,
      group.count,
      group.index,
      heartbeat_timeout_seconds=HEARTBEAT_S,
      shutdown_timeout_seconds=SHUTDOWN_S,
    )
  except (RuntimeError, ValueError) as error:
    raise ConfigError(
      f"process {group.index} of {group.count} cannot join the others at "
      f"{group.coordinator or 'the address that the scheduler gives'}: {error}; "
      f"expected {COORDINATOR}=host:port of process 0, or mesh.distributed=off for "
      "a process by itself"
    ) from error
  if not is_primary():
    # All say the same; process 0 says it.
    logging.getLogger().setLevel(logging.ERROR)


def _host_memory_gb() -> int:
  return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**30
