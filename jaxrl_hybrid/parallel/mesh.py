"""The two meshes of the 3D-HybridEngine, over one flat device order.

Training: axes ``(pp, dp, tp)``. Generation: the same devices in the same order
with pp and tp split, ``(pp, micro_dp_pp, dp, tp, micro_dp_tp)``: generation tp
is the major part of tp, micro-DP the minor part, so that each device's training
shard lies inside its generation shard (HybridFlow §5, arXiv:2409.19256).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxrl_hybrid.errors import ConfigError

MICRO_DP_PP, MICRO_DP_TP = MICRO_DP = ("micro_dp_pp", "micro_dp_tp")


def train_mesh(
  shape: tuple[int, int, int], devices: Sequence[jax.Device] | None = None
) -> Mesh:
  """Mesh of ``(pp, tp, dp)`` over the first pp*tp*dp devices.

  Args:
    shape: (pp, tp, dp).
    devices: default: those of this process's backend.

  Raises:
    ConfigError: there are fewer devices than that, or several processes with more.
  """
  pp, tp, dp = shape
  needed = math.prod(shape)
  devices = jax.devices() if devices is None else list(devices)
  if len(devices) < needed:
    raise ConfigError(
      f"mesh.train=(pp, tp, dp)={tuple(shape)} needs {needed} devices, got "
      f"{len(devices)}; change mesh.train, or set mesh.fake_devices on a CPU"
    )
  if jax.process_count() > 1 and len(devices) != needed:
    raise ConfigError(
      f"mesh.train=(pp, tp, dp)={tuple(shape)} uses {needed} of the {len(devices)} "
      f"devices of {jax.process_count()} processes; expected all of them: change "
      "mesh.train or start fewer processes"
    )
  grid = np.array(devices[:needed]).reshape(pp, dp, tp)
  return Mesh(grid, ("pp", "dp", "tp"), axis_types=(AxisType.Auto,) * 3)


def generation_mesh(train: Mesh, shape: tuple[int, int]) -> Mesh:
  """Splits the training mesh for generation with ``(p_g, t_g)``."""
  pp, dp, tp = train.devices.shape
  p_g, t_g = shape
  if pp % p_g or tp % t_g:
    raise ConfigError(
      f"mesh.generation=(p_g, t_g)={tuple(shape)} must divide mesh.train's "
      f"(pp, tp)=({pp}, {tp})"
    )
  grid = train.devices.reshape(p_g, pp // p_g, dp, t_g, tp // t_g)
  return Mesh(
    grid,
    ("pp", "micro_dp_pp", "dp", "tp", "micro_dp_tp"),
    axis_types=(AxisType.Auto,) * 5,
  )


def describe(train: Mesh, generation: Mesh) -> str:
  """One line for the user: both meshes and the micro-DP size."""
  pp, dp, tp = train.devices.shape
  sizes = dict(generation.shape)
  micro = math.prod(sizes[axis] for axis in MICRO_DP)
  return (
    f"mesh: train pp={pp} tp={tp} dp={dp}; generation pp={sizes['pp']} "
    f"tp={sizes['tp']} dp={dp} micro_dp={micro}; "
    f"{train.devices.size} {train.devices.flat[0].device_kind} devices"
  )
