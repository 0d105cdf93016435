"""The plan of a config as a table and as JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any

import jax

from jaxrl_hybrid import config as config_lib
from jaxrl_hybrid import config_reader, inspection
from jaxrl_hybrid.parallel import deviceless_cudnn, topology
from jaxrl_hybrid.planning import Planner, Report
from jaxrl_hybrid.runtime import launch

GB = 1e9


@dataclasses.dataclass(frozen=True)
class PlanReport:
  """A report, the GPU it is for, and where the numbers come from.

  Attributes:
    report: phases and sizes.
    gpu: the type of GPU.
    devices: how many.
    per_node: GPUs of one machine.
    compiler: empty for XLA:GPU; else why the CPU's stood in for it.
    header: what the config derives to.
  """

  report: Report
  gpu: topology.Gpu
  devices: int
  per_node: int
  compiler: str
  header: str

  @property
  def usable(self) -> int:
    """What the allocator may hand out of one GPU."""
    fraction = os.environ.get(launch.MEMORY_VARIABLE, launch.MEMORY_FRACTION)
    return topology.usable_bytes(self.gpu, float(fraction))

  @property
  def fits(self) -> bool:
    """Whether every phase stays within ``usable``."""
    return self.report.peak.bytes <= self.usable

  def to_json(self) -> dict[str, Any]:
    """For machines; bytes, per GPU where not said otherwise."""
    report = self.report
    return {
      "gpu": self.gpu.name,
      "gpus": self.devices,
      "fits": self.fits,
      "peak_bytes_per_gpu": report.peak.bytes,
      "usable_bytes_per_gpu": self.usable,
      "reserved_bytes_per_gpu": self.gpu.memory_bytes - self.usable,
      "host_bytes_per_node": report.host_bytes * min(self.per_node, self.devices),
      "switch_bytes_per_gpu": report.switch_bytes,
      "kv_bytes_per_row": report.kv_row_bytes,
      "kv_rows_per_gpu": report.rows,
      "kv_rows_that_fit": report.kv_rows_that_fit(self.usable),
      "phases": {phase.name: phase.bytes for phase in report.phases},
      "components": {phase.name: phase.components for phase in report.phases},
      "compiled_for_gpu": not self.compiler,
      "note": self.compiler,
    }

  def describe(self) -> str:
    """For people."""
    report, usable = self.report, self.usable
    lines = [self.header]
    if self.compiler:
      lines.append(f"temporaries are a stand-in, not XLA:GPU's: {self.compiler}")
    lines += ["", f"GB per GPU ({self.devices} x {self.gpu.name})", *self._table(), ""]
    verdict = "fits" if self.fits else "DOES NOT FIT"
    lines += [
      f"switch: {report.switch_bytes / GB:.2f} GB received by each GPU",
      f"KV cache: {report.rows} rows per GPU of {report.kv_row_bytes / GB:.3f} GB; "
      f"{report.kv_rows_that_fit(usable)} would fit",
      f"host memory: {report.host_bytes * min(self.per_node, self.devices) / GB:.0f} "
      f"GB pinned on each machine of {min(self.per_node, self.devices)} GPUs",
      f"peak {report.peak.bytes / GB:.1f} GB in phase {report.peak.name!r} of "
      f"{usable / GB:.1f} GB usable ({self.gpu.memory_bytes / GB:.1f} GB in all): "
      f"{verdict}",
    ]
    return "\n".join(lines)

  def _table(self) -> list[str]:
    phases = self.report.phases
    components = list(dict.fromkeys(c for p in phases for c in p.components))
    width = max(map(len, [*components, "component"]))
    names = [phase.name.replace(": ", "\n") for phase in phases]
    columns = [max(map(len, name.split("\n"))) for name in names]
    columns = [max(6, size) for size in columns]
    lines = []
    for row in range(max(name.count("\n") for name in names) + 1):
      parts = [(name.split("\n") + [""])[row] for name in names]
      left = "component" if row == 0 else ""
      lines.append(_row(left, parts, width, columns))
    for component in components:
      sizes = [phase.components.get(component, 0) for phase in phases]
      cells = [f"{size / GB:.2f}" if size else "-" for size in sizes]
      lines.append(_row(component, cells, width, columns))
    totals = [f"{phase.bytes / GB:.2f}" for phase in phases]
    lines.append(_row("total", totals, width, columns))
    return lines


def make(argv: Sequence[str], gpu: str, per_node: int) -> PlanReport:
  """Plans the config named by ``argv`` for a type of GPU.

  Raises:
    JaxrlError: the config is wrong.
  """
  config, _ = config_reader.from_argv(argv)
  with config.unlocked():
    config.mesh.fake_devices = 0
  config = config_lib.resolve(config)
  count = math.prod(config.mesh.train)
  jax.config.update("jax_platforms", "cpu")
  compiler = topology.available()
  described = topology.GPUS[gpu]
  if compiler:
    jax.config.update("jax_num_cpu_devices", count)
    devices, context = None, contextlib.nullcontext()
  else:
    nodes = -(-count // per_node)
    devices = topology.devices(gpu, nodes, min(per_node, count))
    context = deviceless_cudnn.answering_for(described.compute_capability)
  with context:
    plan = inspection.inspect(config, training=False, devices=devices)
    report = Planner(plan).report()
  return PlanReport(report, described, count, per_node, compiler, plan.describe())


def _row(left: str, cells: Sequence[str], width: int, columns: Sequence[int]) -> str:
  right = "  ".join(c.rjust(w) for c, w in zip(cells, columns, strict=True))
  return f"{left:<{width}}  {right}"
