"""Scaled ropes of GGUF files -> ``rope_scaling`` of HF configs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxrl_hybrid.errors import ModelError
from jaxrl_hybrid.models.hf.gguf_metadata import Metadata

FACTORS = "rope_freqs.weight"  # what each frequency is divided by
# Llama 3 keeps wavelengths below context / 4 and divides those above context / 1 by
# the factor. The file holds the result only; these are the same in all releases.
_LOW, _HIGH, _CONTEXT = 1.0, 4.0, 8192


def rope_scaling(meta: Metadata, head_dim: int) -> dict[str, Any] | None:
  """The config's ``rope_scaling``; None without one.

  Args:
    meta: of the file.
    head_dim: width that rotates.

  Raises:
    ModelError: a kind that is not known, or factors that are not Llama 3's.
  """
  kind = meta.arch("rope.scaling.type", "none")
  factors = next((t.data for t in meta.tensors if t.name == FACTORS), None)
  if kind == "none":
    return None if factors is None else _llama3(meta, np.asarray(factors), head_dim)
  if kind not in ("linear", "yarn") or factors is not None:
    raise ModelError(
      f"RoPE scaling {kind!r} {'with' if factors is not None else 'without'} {FACTORS} "
      f"is not supported; linear and yarn are, and {FACTORS} alone"
    )
  scaling = {"rope_type": kind, "factor": meta.arch_float("rope.scaling.factor")}
  if kind == "yarn":
    context = meta.arch("rope.scaling.original_context_length")
    scaling["original_max_position_embeddings"] = context
  return scaling


def _llama3(
  meta: Metadata, factors: np.ndarray, head_dim: int
) -> dict[str, Any] | None:
  """The parameters that give these factors; None if they change nothing."""
  factor = float(factors.max())
  theta = meta.arch_float("rope.freq_base", 10000.0)
  expected = llama3_factors(theta, head_dim, factor)
  if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
    raise ModelError(
      f"{FACTORS} of a GGUF file is not supported: expected {len(expected)} factors of "
      f"Llama 3's scaling (context {_CONTEXT}, {_LOW:g} and {_HIGH:g}), got "
      f"{factors.shape}, {factors.min():g} to {factors.max():g}"
    )
  if factor == 1.0:
    return None
  return {
    "rope_type": "llama3",
    "factor": factor,
    "low_freq_factor": _LOW,
    "high_freq_factor": _HIGH,
    "original_max_position_embeddings": _CONTEXT,
  }


def llama3_factors(theta: float, head_dim: int, factor: float) -> np.ndarray:
  """fp32 ``[head_dim / 2]``: what Llama 3 divides each frequency by."""
  frequency = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
  turns = _CONTEXT * frequency / (2 * math.pi)  # within the original context
  smooth = np.clip((turns - _LOW) / (_HIGH - _LOW), 0.0, 1.0)
  return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
