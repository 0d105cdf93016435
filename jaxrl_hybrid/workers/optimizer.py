"""AdamW and its schedule, from a config section."""

from __future__ import annotations

import jax
import optax
from ml_collections import ConfigDict

from jaxrl_hybrid.models import adapters
from jaxrl_hybrid.models.params import Params


def learning_rate(optim: ConfigDict, total_updates: int) -> optax.Schedule:
  """Linear warm-up from lr / warmup_steps to lr, then constant, linear or cosine.

  Args:
    optim: config section with lr, schedule, warmup_steps (in updates) and
      min_lr_ratio (of lr, reached after the last update).
    total_updates: of the whole run.
  """
  decay_steps = max(1, total_updates - optim.warmup_steps)
  main = {
    "constant": lambda: optax.constant_schedule(optim.lr),
    "linear": lambda: optax.linear_schedule(
      optim.lr, optim.lr * optim.min_lr_ratio, decay_steps
    ),
    "cosine": lambda: optax.cosine_decay_schedule(
      optim.lr, decay_steps, optim.min_lr_ratio
    ),
  }[optim.schedule]()
  if not optim.warmup_steps:
    return main
  warmup = optax.linear_schedule(
    optim.lr / optim.warmup_steps, optim.lr, optim.warmup_steps - 1
  )
  return optax.join_schedules([warmup, main], [optim.warmup_steps])


def make_optimizer(
  optim: ConfigDict, schedule: optax.Schedule
) -> optax.GradientTransformation:
  """AdamW (arXiv:1711.05101); norms and biases do not decay."""
  return optax.adamw(
    schedule,
    *optim.betas,
    eps=optim.eps,
    weight_decay=optim.weight_decay,
    mask=_decays,
  )


def _decays(params: Params) -> Params:
  return jax.tree_util.tree_map_with_path(
    lambda path, _: path[-1].key in ("kernel", adapters.A, adapters.B), params
  )
