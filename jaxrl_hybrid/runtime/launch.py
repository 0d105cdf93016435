"""What must happen before JAX touches a device."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import jax
from ml_collections import ConfigDict

MEMORY_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
MEMORY_FRACTION = "0.92"  # JAX's own default leaves a quarter of a GPU unused


def setup(config: ConfigDict) -> None:
  """Chooses the platform, numerics and compile cache of this process."""
  os.environ.setdefault(MEMORY_VARIABLE, MEMORY_FRACTION)
  if config.mesh.fake_devices:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", config.mesh.fake_devices)
  if config.model.dtype == "float32":
    # GPUs would otherwise round fp32 products to TF32: a rollout/train gap of 1e-3.
    jax.config.update("jax_default_matmul_precision", "highest")
  if config.trainer.compile_cache:
    cache = Path(config.trainer.compile_cache).expanduser().absolute()
    jax.config.update("jax_compilation_cache_dir", str(cache))


def setup_logging(level: str) -> None:
  """Messages of this package on stderr from ``level`` on, others from WARNING."""
  logging.basicConfig(
    level=logging.WARNING, format="%(levelname)s: %(message)s", force=True
  )
  logging.getLogger().setLevel(level)
  for noisy in ("jax", "orbax", "absl", "asyncio", "transformers", "urllib3"):
    logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))
