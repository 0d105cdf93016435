"""What this process has had on its GPU."""

from __future__ import annotations

import jax

GB = 1e9


def peak_metrics() -> dict[str, float]:
  """``perf/max_memory_allocated_gb`` of the fullest local GPU; {} on a CPU."""
  stats = [device.memory_stats() or {} for device in jax.local_devices()]
  peaks = [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]
  return {"perf/max_memory_allocated_gb": max(peaks) / GB} if peaks else {}
