"""Experts spread over devices: each device runs its own experts for all its tokens.

Activations are the same on all devices of a tensor-parallel group, so nothing is
sent to experts: a device takes the tokens that chose its experts, and the results
are summed over the group as after any row-parallel product.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxrl_hybrid.models.spec import ModelSpec
from jaxrl_hybrid.models.transformer import Mixture
from jaxrl_hybrid.ops.experts import batched_mixture
from jaxrl_hybrid.parallel.rules import Layout

EXPERT_AXES = ("expert", "expert_mlp", "embed")


def sharded_mixture(layout: Layout, spec: ModelSpec) -> Mixture:
  """``ops.experts.batched_mixture`` with the experts as ``layout`` places them."""
  (axis,) = layout.rules.mesh_axes("expert")
  if spec.experts is None or layout.mesh.size == 1:
    return batched_mixture
  here = spec.experts.count // layout.mesh.shape[axis]

  def run(x_BTD, weights_BTK, chosen_BTK, experts, **options: Any) -> jax.Array:
    rows = layout.sharding(("batch", None, None), x_BTD.shape).spec
    kernels = layout.sharding(EXPERT_AXES, (spec.experts.count, 1, 1)).spec

    def local(x_BTD, weights_BTK, chosen_BTK, experts):
      first = jax.lax.axis_index(axis) * here
      out_BTD = batched_mixture(
        x_BTD, weights_BTK, chosen_BTK, experts, first=first, **options
      )
      return jax.lax.psum(out_BTD, axis)

    return jax.shard_map(
      local,
      mesh=layout.mesh,
      in_specs=(rows, rows, rows, kernels),
      out_specs=rows,
      check_vma=False,
    )(x_BTD, weights_BTK, chosen_BTK, experts)

  return run
