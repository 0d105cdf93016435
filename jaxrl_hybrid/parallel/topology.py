"""GPUs that are not there: compile their programs on any Linux machine.

XLA compiles for a described GPU as for a real one; only running needs it. The
caller sets ``jax_platforms=cpu`` before JAX is used, builds a mesh over
``devices(...)``, gives ``jit(...).lower`` shapes with shardings on that mesh,
and reads ``memory(...)`` of what ``compile`` returns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os
import shutil
from collections.abc import Iterator
from importlib import metadata, resources
from pathlib import Path

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding

from jaxrl_hybrid.errors import ConfigError, JaxrlError

INSTALL = "pip install 'jaxrl_hybrid[plan]'"
CUDA_VERSIONS = (13, 12)
# Where XLA looks for a CUDA toolkit besides the wheels.
SYSTEM_TOOLKITS = ("/usr/local/cuda", "/opt/cuda")
# CUDA reserves this part of what the driver reports: 0.7 % on an H100, 0.9 % on
# an A100.
_RESERVED = 0.01


class TopologyError(JaxrlError):
  """Programs for GPUs that are not there cannot be compiled in this process."""


@dataclasses.dataclass(frozen=True)
class Gpu:
  """What a plan needs to know of one type of GPU (SXM form)."""

  name: str
  memory_bytes: int  # in all, as the driver reports it
  bandwidth: float  # of its memory, bytes per second
  flops: float  # peak of dense bf16, per second
  compute_capability: tuple[int, int]
  target: str  # file in gpus/, XLA's description of the device
  kind: str  # as Pallas knows it
  cores: int


_MIB = 2**20
GPUS: dict[str, Gpu] = {
  gpu.name: gpu
  for gpu in (
    Gpu(
      "a100-80gb",
      81_920 * _MIB,
      2.039e12,
      312e12,
      (8, 0),
      "a100_80gb.txtpb",
      "NVIDIA A100",
      108,
    ),
    Gpu(
      "h100-80gb",
      81_559 * _MIB,
      3.352e12,
      989e12,
      (9, 0),
      "h100_80gb.txtpb",
      "NVIDIA H100",
      132,
    ),
    Gpu(
      "h200", 143_771 * _MIB, 4.8e12, 989e12, (9, 0), "h200.txtpb", "NVIDIA H200", 132
    ),
  )
}


def usable_bytes(gpu: Gpu, fraction: float) -> int:
  """What JAX's allocator may hand out of one GPU.

  Args:
    gpu: the type of GPU.
    fraction: XLA_PYTHON_CLIENT_MEM_FRACTION of the run that is planned.
  """
  if not 0 < fraction <= 1:
    raise ConfigError(f"memory fraction={fraction} must be in (0, 1]")
  return int(gpu.memory_bytes * (1 - _RESERVED) * fraction)


def devices(gpu: str, nodes: int, per_node: int) -> list[jax.Device]:
  """Devices to compile for: ``nodes`` machines of ``per_node`` GPUs, in order.

  Raises:
    ConfigError: no such type of GPU, or not a positive number of them.
    TopologyError: JAX uses more than the CPU here, or wheels are missing.
  """
  if gpu not in GPUS:
    raise ConfigError(f"no GPU type {gpu!r}; known are {', '.join(GPUS)}")
  if nodes < 1 or per_node < 1:
    raise ConfigError(
      f"nodes={nodes} and GPUs per node={per_node} must both be at least 1"
    )
  if jax.config.jax_platforms != "cpu":
    raise TopologyError(
      "compiling for GPUs that are not there needs jax_platforms='cpu', got "
      f"{jax.config.jax_platforms!r}; call jax.config.update('jax_platforms', "
      "'cpu') before anything else uses JAX"
    )
  if reason := available():
    raise TopologyError(f"cannot compile GPU programs: {reason}")
  return list(_devices(gpu, nodes, per_node))


def lowering_for(gpu: Gpu) -> contextlib.AbstractContextManager[object]:
  """Where programs with Pallas kernels are lowered for a GPU that is not there."""
  device = jax.sharding.AbstractDevice(gpu.kind, gpu.cores, "gpu")
  mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
  return jax.sharding.use_abstract_mesh(mesh)


@functools.lru_cache
def _devices(gpu: str, nodes: int, per_node: int) -> tuple[jax.Device, ...]:
  """Made once: a mesh equals another only over the same device objects."""
  target = resources.files("jaxrl_hybrid.parallel") / "gpus" / GPUS[gpu].target
  topology = topologies.get_topology_desc(
    platform="cuda",
    target_config=target.read_text(),
    topology=f"1x{nodes}x{per_node}",
  )
  return tuple(topology.devices)


def available() -> str:
  """Why GPU programs cannot be compiled here; empty if they can.

  Any CUDA plugin of JAX will do, with cuDNN and with the two parts of nvcc
  whose absence XLA answers with a segmentation fault.
  """
  plugins = [v for v in CUDA_VERSIONS if _found(f"jax_plugins.xla_cuda{v}")]
  if not plugins:
    return f"jax-cuda13-plugin is not installed; {INSTALL}"
  version = plugins[0]
  jaxlib = metadata.version("jaxlib")
  plugin = _version(f"jax-cuda{version}-plugin")
  if plugin != jaxlib:
    return (
      f"jax-cuda{version}-plugin {plugin} is not of jaxlib {jaxlib}'s version; "
      f"{INSTALL}"
    )
  suffix = "-cu12" if version == 12 else ""
  missing = []
  if not (_has_tool("ptxas") and _has_libdevice()):
    missing.append(f"nvidia-cuda-nvcc{suffix}")
  if not _found("nvidia.cudnn"):
    missing.append(f"nvidia-cudnn-cu{version}")
  if missing:
    return f"{' and '.join(missing)} not installed; {INSTALL}"
  return ""


def _found(module: str) -> bool:
  try:
    return importlib.util.find_spec(module) is not None
  except ModuleNotFoundError:  # the parent package is missing
    return False


def _version(distribution: str) -> str:
  try:
    return metadata.version(distribution)
  except metadata.PackageNotFoundError:
    return "(not installed)"


def _toolkits() -> Iterator[Path]:
  for module in ("nvidia.cu13", "nvidia.cuda_nvcc"):
    if _found(module):
      spec = importlib.util.find_spec(module)
      yield from map(Path, spec.submodule_search_locations or ())
  yield from map(Path, SYSTEM_TOOLKITS)


def _has_tool(name: str) -> bool:
  in_toolkit = any(os.access(t / "bin" / name, os.X_OK) for t in _toolkits())
  return in_toolkit or shutil.which(name) is not None


def _has_libdevice() -> bool:
  return any((t / "nvvm" / "libdevice").is_dir() for t in _toolkits())


def pinned_host(sharding: NamedSharding) -> NamedSharding:
  """The same sharding in the machine's own memory, for arguments and results.

  On devices that are not there a plain ``memory_kind="pinned_host"`` is
  dropped without a word, and the array is counted as the GPU's; over an
  abstract mesh it holds. JAX then needs one other array with a sharding over
  the devices in the same program. Moves inside a program are
  ``jax.device_put(x, jax.memory.Space.Device)`` and ``...Space.Host``.
  """
  mesh = sharding.mesh.abstract_mesh
  return NamedSharding(mesh, sharding.spec, memory_kind="pinned_host")


def memory(compiled: jax.stages.Compiled) -> dict[str, int]:
  """Bytes per GPU that a compiled program needs.

  Returns:
    ``argument``, ``output``, ``temp``, ``alias`` (outputs written over donated
    arguments), ``peak`` (all that is allocated while it runs: XLA:GPU takes its
    temporaries as one block), and the same in the machine's pinned memory with
    the prefix ``host_``. XLA's own ``peak_memory_in_bytes`` would count both
    memories together.
  """
  stats = compiled.memory_analysis()
  result = {}
  for prefix in ("", "host_"):
    sizes = {
      name: getattr(stats, f"{prefix}{name}_size_in_bytes")
      for name in ("argument", "output", "temp", "alias")
    }
    sizes["peak"] = sizes["argument"] + sizes["output"] + sizes["temp"] - sizes["alias"]
    result |= {prefix + name: size for name, size in sizes.items()}
  return result
