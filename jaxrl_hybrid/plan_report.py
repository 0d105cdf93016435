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
from jaxrl_hybrid import config_reader, inspection, plan_model
from jaxrl_hybrid.errors import ConfigError
from jaxrl_hybrid.parallel import deviceless_cudnn, topology
from jaxrl_hybrid.planning import BUFFERS, Planner, Report
from jaxrl_hybrid.runtime import launch

GB, MB = 1e9, 1e6


@dataclasses.dataclass(frozen=True)
class PlanReport:
  """A report, the GPU it is for, and where the numbers come from.

  Attributes:
    report: phases and sizes.
    gpu: the type of GPU.
    devices: how many.
    per_node: GPUs of one machine.
    compiler: empty for XLA:GPU; else why it was not there, and what stood in.
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
    return topology.usable_bytes(self.gpu, _memory_fraction())

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
      "peak_phase": report.peak.name,
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
      "estimated": [BUFFERS] if self.compiler else [],
      "note": self.compiler,
    }

  def describe(self) -> str:
    """For people."""
    report, usable = self.report, self.usable
    lines = [self.header]
    if self.compiler:
      lines.append(self.compiler)
    unit, size = self._unit
    lines += ["", f"{unit} per GPU ({self.devices} x {self.gpu.name})"]
    lines += [*self._table(size), ""]
    verdict = "fits" if self.fits else "DOES NOT FIT"
    if self.compiler:
      verdict += " by this estimate"
    lines += [
      f"switch: {report.switch_bytes / size:.2f} {unit} received by each GPU",
      f"KV cache: {report.rows} rows per GPU of {report.kv_row_bytes / MB:.2f} MB; "
      f"{report.kv_rows_that_fit(usable)} would fit",
      f"host memory: {report.host_bytes * min(self.per_node, self.devices) / GB:.0f} "
      f"GB pinned on each machine of {min(self.per_node, self.devices)} GPUs",
      f"peak {report.peak.bytes / size:.1f} {unit} in phase {report.peak.name!r} of "
      f"{usable / GB:.1f} GB usable ({self.gpu.memory_bytes / GB:.1f} GB in all): "
      f"{verdict}",
    ]
    return "\n".join(lines)

  @property
  def _unit(self) -> tuple[str, float]:
    """GB, or MB for models of a toy's size."""
    return ("GB", GB) if self.report.peak.bytes >= GB else ("MB", MB)

  def _table(self, unit: float) -> list[str]:
    phases = self.report.phases
    components = list(dict.fromkeys(c for p in phases for c in p.components))
    labels = {name: name for name in components}
    if self.compiler:
      labels[BUFFERS] = f"{BUFFERS} (estimate)"
    width = max(map(len, [*labels.values(), "component"]))
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
      cells = [f"{size / unit:.2f}" if size else "-" for size in sizes]
      lines.append(_row(labels[component], cells, width, columns))
    totals = [f"{phase.bytes / unit:.2f}" for phase in phases]
    lines.append(_row("total", totals, width, columns))
    return lines


def make(argv: Sequence[str], gpu: str, per_node: int) -> PlanReport:
  """Plans the config named by ``argv`` for a type of GPU.

  Raises:
    JaxrlError: the config is wrong.
  """
  if per_node < 1:
    raise ConfigError(f"--gpus_per_node: expected at least 1, got {per_node}")
  _memory_fraction()
  config, _ = config_reader.from_argv(argv)
  with config.unlocked():
    config.mesh.fake_devices = 0
  config = config_lib.resolve(config)
  count = math.prod(config.mesh.train)
  jax.config.update("jax_platforms", "cpu")
  reason = topology.available()
  described = topology.GPUS[gpu]
  if reason:
    jax.config.update("jax_num_cpu_devices", count)
    devices = None
  else:
    nodes = -(-count // per_node)
    devices = topology.devices(gpu, nodes, min(per_node, count))
  with contextlib.ExitStack() as stack:
    if not reason:
      stack.enter_context(topology.lowering_for(described))
      stack.enter_context(deviceless_cudnn.answering_for(described.compute_capability))
    plan = inspection.inspect(config, training=False, devices=devices)
    report = Planner(plan, estimate=bool(reason)).report()
  note = f"not compiled for the GPU ({reason}): {plan_model.NOTE}" if reason else ""
  return PlanReport(report, described, count, per_node, note, plan.describe())


def _memory_fraction() -> float:
  text = os.environ.get(launch.MEMORY_VARIABLE, launch.MEMORY_FRACTION)
  try:
    return float(text)
  except ValueError as error:
    raise ConfigError(
      f"{launch.MEMORY_VARIABLE}: expected a number in (0, 1], got {text!r}"
    ) from error


def _row(left: str, cells: Sequence[str], width: int, columns: Sequence[int]) -> str:
  right = "  ".join(c.rjust(w) for c, w in zip(cells, columns, strict=True))
  return f"{left:<{width}}  {right}"
