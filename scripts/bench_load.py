"""Measures how fast an HF directory becomes sharded parameters, and what it needs.

    python scripts/make_random_model.py --shape 7b --out random-7b
    python scripts/bench_load.py --model random-7b --json F
    python scripts/bench_load.py --model random-7b --dtype float32 --fake_devices 8 \\
        --train 1,8,1
    python scripts/launch_local.py -n 2 -- scripts/bench_load.py --model random-7b \\
        --fake_devices 2 --train 1,2,1

In turns, ``--repeat`` times: the files are read and dropped, with as many threads
and as large pieces as the loader uses; then the loader makes parameters of them.
Once with a cold page cache (the files' pages are dropped before each turn; a cache
below this machine stays as it is) and once with a warm one. Rates are medians, of
the bytes of the whole directory; of several processes each tells its own.

``ratio``: the loader's rate by that of reading. ``cpu_s``: of the loader's threads,
to tell a slow loader from a busy machine. ``read``: bytes that this process
read, of the directory's. ``beyond``: the peak of resident memory less what the
process had before and, on CPUs, less the parameters; the limit is 1.2 x the largest
tensor + one shard.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_hybrid import config as config_lib
from jaxrl_hybrid.errors import JaxrlError
from jaxrl_hybrid.models import families
from jaxrl_hybrid.models.hf import load, shards
from jaxrl_hybrid.models.hf.checkpoint import Checkpoint
from jaxrl_hybrid.parallel import mesh as mesh_lib
from jaxrl_hybrid.parallel import weights as weights_lib
from jaxrl_hybrid.runtime import launch

COLUMNS = ("disk_gb_per_s", "load_gb_per_s", "ratio", "load_s", "cpu_s", "beyond_mb")


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  numbers = lambda text: tuple(map(int, text.split(",")))
  parser.add_argument("--model", type=Path, required=True)
  parser.add_argument("--dtype", default="bfloat16", help="of the parameters")
  parser.add_argument("--train", type=numbers, default=(1, 1, 1), metavar="pp,tp,dp")
  parser.add_argument("--fake_devices", type=int, default=0)
  parser.add_argument("--repeat", type=int, default=3)
  parser.add_argument("--json", type=Path, help="also write the report here")
  flags = parser.parse_args(argv)
  config = config_lib.base()
  config.mesh.fake_devices = flags.fake_devices
  try:
    launch.setup(config)
    report = measure_all(flags)
  except JaxrlError as error:
    sys.exit(f"bench_load: {error}")
  print_table(report)
  if flags.json:
    flags.json.write_text(json.dumps(report, indent=2) + "\n")


def measure_all(flags: argparse.Namespace) -> dict[str, Any]:
  """The report of a run."""
  spec = families.spec_from_hf(families.load_hf_config(flags.model))
  mesh = mesh_lib.train_mesh(flags.train)
  train = weights_lib.train_layout(spec, mesh, sequence_parallel=False)
  layout = weights_lib.WeightLayout(spec, train, jnp.dtype("bfloat16"))
  abstract, dtype = layout.abstract_params(), jnp.dtype(flags.dtype)
  shardings = jax.tree.map(lambda x: x.sharding, abstract)
  with Checkpoint(flags.model) as checkpoint:
    tensors = list(checkpoint.tensors.values())
  files = sorted({tensor.file.path for tensor in tensors})
  shard = lambda x: math.prod(x.sharding.shard_shape(x.shape)) * dtype.itemsize
  leaves = jax.tree.leaves(abstract)
  kept = sum(shard(x) * len(x.sharding.addressable_devices) for x in leaves)
  on_host = mesh.devices.flat[0].platform == "cpu"
  largest = max(tensor.nbytes for tensor in tensors)

  def once() -> Any:
    return load.load_params(
      flags.model, spec, shardings, vocab=layout.vocab, dtype=dtype
    )

  size = sum(tensor.nbytes for tensor in tensors)
  caches = {}
  for cache in ("cold", "warm"):
    turns = [turn(files, once, cache == "cold") for _ in range(flags.repeat)]
    caches[cache] = summary(turns, size, kept if on_host else 0)
  return {
    "device": f"{mesh.size} x {mesh.devices.flat[0].device_kind}",
    "process": jax.process_index(),
    "processes": jax.process_count(),
    "cpus": os.cpu_count(),
    "train": flags.train,
    "dtype": dtype.name,
    "files": len(files),
    "bytes": size,
    "kept_bytes": kept,
    "limit_mb": (1.2 * largest + max(map(shard, leaves))) / 1e6,
    "caches": caches,
  }


def turn(files: list[Path], once: Any, cold: bool) -> dict[str, float]:
  """Reads the files, then loads them."""
  gc.collect()
  prepare(files, cold)
  start = time.perf_counter()
  read_files(files)
  disk = time.perf_counter() - start
  prepare(files, cold)
  reset_peak()
  before, read = resident("VmRSS"), bytes_read()
  start, cpu = time.perf_counter(), time.process_time()
  params = jax.block_until_ready(once())
  seconds = time.perf_counter() - start
  result = {
    "disk_s": disk,
    "load_s": seconds,
    "cpu_s": time.process_time() - cpu,
    "peak": resident("VmHWM") - before,
    "read": bytes_read() - read,
  }
  del params
  return result


def summary(turns: list[dict[str, float]], size: int, kept: int) -> dict[str, Any]:
  """Medians, and the turns."""
  median = lambda name: statistics.median(t[name] for t in turns)
  disk, seconds = median("disk_s"), median("load_s")
  return {
    "disk_gb_per_s": size / disk / 1e9,
    "load_gb_per_s": size / seconds / 1e9,
    "ratio": disk / seconds,
    "load_s": seconds,
    "cpu_s": median("cpu_s"),
    "beyond_mb": (max(t["peak"] for t in turns) - kept) / 1e6,
    "read_bytes": int(median("read")),
    "turns": turns,
  }


def prepare(files: list[Path], cold: bool) -> None:
  """Drops the files' pages; a warm cache is what the turn before left."""
  if not cold:
    return
  for file in files:
    with file.open("rb") as handle:
      os.fsync(handle.fileno())  # pages not yet written cannot be dropped
      os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_files(files: list[Path]) -> None:
  """One after the other, in the loader's pieces, by its number of threads."""
  with ThreadPoolExecutor(shards.THREADS) as pool:
    for file in files:
      with file.open("rb", buffering=0) as handle:
        size = file.stat().st_size
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)

        def read(start: int, descriptor: int = handle.fileno()) -> int:
          return len(os.pread(descriptor, shards.PIECE_BYTES, start))

        assert sum(pool.map(read, range(0, size, shards.PIECE_BYTES))) == size


def reset_peak() -> None:
  """VmHWM starts anew."""
  Path("/proc/self/clear_refs").write_text("5")


def resident(name: str) -> int:
  """A line of /proc/self/status in bytes."""
  lines = Path("/proc/self/status").read_text().splitlines()
  return 1024 * int(next(x.split()[1] for x in lines if x.startswith(name + ":")))


def bytes_read() -> int:
  """By this process, from files or from the page cache."""
  lines = Path("/proc/self/io").read_text().splitlines()
  return int(next(line.split()[1] for line in lines if line.startswith("rchar:")))


def print_table(report: dict[str, Any]) -> None:
  print(", ".join(f"{k}={v}" for k, v in report.items() if not isinstance(v, dict)))
  print("cache " + "".join(f"{x:>15}" for x in (*COLUMNS, "read")))
  for cache, row in report["caches"].items():
    cells = [f"{row[name]:.2f}" for name in COLUMNS]
    cells.append(f"{row['read_bytes'] / report['bytes']:.3f}")
    print(f"{cache:<6}" + "".join(f"{cell:>15}" for cell in cells))


if __name__ == "__main__":
  main()
