"""Measures the switch from training to generation weights against other ways.

    python scripts/bench_reshard.py --shape 7b --train 1,2,1 --generation 1,1 --json F
    python scripts/bench_reshard.py --shape tiny --train 2,4,2 --generation 1,2 \\
        --fake_devices 16

``--train`` is (pp, tp, dp), ``--generation`` (p_g, t_g). All in one run, on random
weights:

  hybrid      HybridEngine: gathers in micro-DP groups, a layer of each stage at a time
  naive       the same with consecutive ranks as generation's tp groups
  everything  gathers all weights on every device, then keeps generation's part (as
              DeepSpeed-Chat does, arXiv:2308.01320)
  plain       one array of as many bytes, gathered in the micro-DP groups: what the
              collective library can do

``received``: bytes per device, by the collectives of the compiled programs.
``formula``: (t p - t_g p_g) / (t_g p_g t p) of the weights' bytes; t p d instead of
t p with --zero 3. ``temp``: the largest temporary of a program. ``peak``: the
allocator's, less what was in use before; after "<" if an earlier way needed more.
Times are medians after a warm-up. The way back drops the copy; a slice of it to
training's shards is measured for comparison. One device exchanges nothing: its
times are those of local copies. Fake devices exchange through one memory, so their
times say nothing; their dtype is float32, because a CPU gathers bfloat16 as that.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_hybrid.errors import JaxrlError
from jaxrl_hybrid.models import fused
from jaxrl_hybrid.models.spec import ModelSpec
from jaxrl_hybrid.parallel import mesh as mesh_lib
from jaxrl_hybrid.parallel import weights as weights_lib
from jaxrl_hybrid.parallel.abstract import device_bytes
from jaxrl_hybrid.parallel.hybrid import HybridEngine
from jaxrl_hybrid.parallel.rules import Layout

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/parallel"))
import hlo  # noqa: E402  (reads collectives; the tests of the switch use it too)

SHAPES = {  # three of Qwen2.5, and one for a CPU
  "32b": (152_064, 5120, 27_648, 64, 40, 8, 128),
  "7b": (152_064, 3584, 18_944, 28, 28, 4, 128),
  "1.5b": (151_936, 1536, 8960, 28, 12, 2, 128),
  "tiny": (512, 128, 256, 8, 16, 16, 8),
}
SIZES = ("received", "formula", "temp", "peak")
REPEAT = 5
Way = tuple[Callable[[], Any], list[tuple[int, jax.stages.Compiled]]]


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  numbers = lambda text: tuple(map(int, text.split(",")))
  parser.add_argument("--shape", choices=SHAPES, default="7b")
  parser.add_argument("--train", type=numbers, default=(1, 1, 1), metavar="pp,tp,dp")
  parser.add_argument("--generation", type=numbers, default=(1, 1), metavar="p_g,t_g")
  parser.add_argument("--zero", type=int, choices=weights_lib.ZERO, default=1)
  parser.add_argument("--layers", type=int, help="fewer than the model has")
  parser.add_argument("--fake_devices", type=int, default=0)
  parser.add_argument("--json", type=Path, help="also write the report here")
  flags = parser.parse_args(argv)
  if (len(flags.train), len(flags.generation)) != (3, 2):
    parser.error("expected --train pp,tp,dp and --generation p_g,t_g")
  if flags.fake_devices:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", flags.fake_devices)
  try:
    report = measure_all(flags)
  except JaxrlError as error:
    sys.exit(f"bench_reshard: {error}")
  print_table(report)
  if flags.json:
    flags.json.write_text(json.dumps(report, indent=2) + "\n")


def measure_all(flags: argparse.Namespace) -> dict[str, Any]:
  """The report of a run."""
  vocab, hidden, mlp, layers, *heads = SHAPES[flags.shape]
  layers = flags.layers or layers
  spec = ModelSpec("qwen2", vocab, hidden, mlp, layers, *heads, 32_768, qkv_bias=True)
  mesh = mesh_lib.train_mesh(flags.train)
  generation = mesh_lib.generation_mesh(mesh, flags.generation)
  train = weights_lib.train_layout(spec, mesh, sequence_parallel=False)
  dtype = jnp.dtype("float32" if flags.fake_devices else "bfloat16")
  source = weights_lib.WeightLayout(spec, train, dtype, flags.zero)
  target = weights_lib.generation_layout(spec, generation)
  engine = HybridEngine(source, target)
  naive = HybridEngine(source, Layout(consecutive(generation), target.rules))
  shapes = source.abstract_weights()
  size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
  weights = random_weights(shapes)
  checked = lambda: (engine.to_generation(weights), engine.verify())[0]
  # In the order of their memory: the allocator tells the highest peak so far only.
  results = {
    "hybrid": measure(switch(engine, weights)),
    "naive": measure(switch(naive, weights)),
    "slice": measure(slice_back(engine, weights)),
    "checksum": measure((checked, [])),
    "everything": measure(gather_everything(engine, weights)),
  }
  jax.tree.map(lambda x: x.delete(), weights)
  results["plain"] = measure(plain_gather(engine, size))
  back, with_checksum = (results.pop(name)["ms"] for name in ("slice", "checksum"))
  spread = math.prod(flags.train[:2]) * (flags.train[2] if flags.zero == 3 else 1)
  kept, best = math.prod(flags.generation), results["plain"]["gb_per_s"] or math.inf
  for row in results.values():
    row["formula"] = round((spread - kept) / (kept * spread) * size)
    row["percent_of_plain"] = 100 * row["gb_per_s"] / best
  return {
    "device": f"{mesh.size} x {mesh.devices.flat[0].device_kind}",
    "jax": jax.__version__,
    **{name: getattr(flags, name) for name in ("shape", "train", "generation", "zero")},
    **{"layers": layers, "dtype": dtype.name, "weight_bytes": size},
    "train_bytes": device_bytes(shapes),
    "generation_bytes": device_bytes(engine.copy(shapes)),
    "ways": results,
    "with_checksum_ms": with_checksum,
    "back_ms": {"drop": 0.0, "slice": back},
  }


def random_weights(shapes: Any) -> Any:
  """Leaf by leaf, so that this needs less memory than what is measured."""
  leaves, structure = jax.tree.flatten(shapes)
  for i, x in enumerate(leaves):
    draw = lambda key, x=x: jax.random.uniform(key, x.shape, x.dtype, -1)
    leaves[i] = jax.jit(draw, out_shardings=x.sharding)(jax.random.key(i))
  return structure.unflatten(jax.block_until_ready(leaves))


def consecutive(mesh: Mesh) -> Mesh:
  """The same devices, but consecutive ones generate together: tp the minor part."""
  *outer, t_g, micro = mesh.devices.shape
  names = (*mesh.axis_names[:3], "micro_dp_tp", "tp")
  return Mesh(mesh.devices.reshape(*outer, micro, t_g), names)


def switch(engine: HybridEngine, weights: Any) -> Way:
  """The engine's way, and how often it runs which program."""
  slot = engine.switch_slot.lower(weights["layers"], jnp.int32(0)).compile()
  outside = {name: leaf for name, leaf in weights.items() if name != "layers"}
  outer = engine.switch_outer.lower(outside).compile()
  calls = engine.source.padded_layers // engine.source.stages
  return lambda: engine.copy(weights), [(calls, slot), (1, outer)]


def slice_back(engine: HybridEngine, weights: Any) -> Way:
  """Cuts every layer of the copy down to training's shard over tp."""
  copy, axes = engine.copy(weights), engine.source.axes
  layer = weights_lib.drop_stack(axes["layers"])
  axes = {**axes, "layers": [layer] * len(copy["layers"])}

  def apart(copy: Any) -> Any:
    return {**copy, "layers": [fused.separate(layer) for layer in copy["layers"]]}

  shardings = engine.source.placed.shardings(axes, jax.eval_shape(apart, copy))
  program = jax.jit(apart, out_shardings=shardings).lower(copy).compile()
  return lambda: program(copy), [(1, program)]


def gather_everything(engine: HybridEngine, weights: Any) -> Way:
  """All of the weights on every device, then generation's part, in layers."""
  everywhere, axes = engine.source.train.replicated, engine.source.axes
  count = engine.source.padded_layers
  gather = compiled(weights, jax.tree.map(lambda _: everywhere, weights))
  shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere)
  whole = jax.tree.map(shape, weights)

  def unstack(tree: Any) -> Any:
    pick = lambda i: jax.tree.map(lambda x: x[i], tree["layers"])
    return {**tree, "layers": [pick(i) for i in range(count)]}

  axes = {**axes, "layers": [weights_lib.drop_stack(axes["layers"])] * count}
  shardings = engine.target.shardings(axes, jax.eval_shape(unstack, whole))
  keep = jax.jit(unstack, out_shardings=shardings).lower(whole).compile()
  return lambda: keep(gather(weights)), [(1, gather), (1, keep)]


def plain_gather(engine: HybridEngine, size: int) -> Way:
  """One array of that many bytes, split on dim 0 as the weights are."""
  mesh, kept, width = engine.target.mesh, ("pp", "tp"), engine.source.spec.hidden_size
  inner = (*mesh_lib.MICRO_DP, *["dp"] * (engine.source.zero == 3))
  rows = -(-size // (width * engine.dtype.itemsize * mesh.size)) * mesh.size
  over = lambda axes: NamedSharding(mesh, PartitionSpec(axes))
  array = jnp.ones((rows, width), engine.dtype, device=over((*kept, *inner)))
  program = compiled(array, over(kept))
  return lambda: program(array), [(1, program)]


def compiled(tree: Any, shardings: Any) -> jax.stages.Compiled:
  """A program that only moves a tree."""
  return jax.jit(lambda x: x, out_shardings=shardings).lower(tree).compile()


def measure(way: Way) -> dict[str, Any]:
  """Bytes, time and memory; each result is freed before the next run."""
  run, programs = way
  used, earlier = allocator("bytes_in_use"), allocator("peak_bytes_in_use")
  times = []
  for _ in range(REPEAT + 1):
    start = time.perf_counter()
    result = jax.block_until_ready(run())
    times.append(time.perf_counter() - start)
    del result
  peak, seconds = allocator("peak_bytes_in_use"), statistics.median(times[1:])
  read = lambda program: map(hlo.received_bytes, hlo.collectives(program.as_text()))
  received = sum(calls * sum(read(program)) for calls, program in programs)
  temps = (p.memory_analysis().temp_size_in_bytes for _, p in programs)
  return {
    "received": received,
    "ms": 1e3 * seconds,
    "gb_per_s": received / seconds / 1e9,
    **{"temp": max(temps, default=0), "peak": max(peak - used, 0)},
    "peak_is_a_bound": 0 < peak == earlier,
  }


def allocator(name: str) -> int:
  """A number of the fullest device's allocator, 0 on a CPU."""
  return max((d.memory_stats() or {}).get(name, 0) for d in jax.local_devices())


def print_table(report: dict[str, Any]) -> None:
  print(", ".join(f"{k}={v}" for k, v in report.items() if not isinstance(v, dict)))
  print(" " * 12 + "".join(f"{x:>12}" for x in (*SIZES, "ms", "GB/s", "% of plain")))
  for way, row in report["ways"].items():
    cells = [f"{row[name] / 1e9:.4f}" for name in SIZES]
    cells[-1] = "<" * row["peak_is_a_bound"] + cells[-1] if row["peak"] else "-"
    cells += [f"{row[name]:.2f}" for name in ("ms", "gb_per_s", "percent_of_plain")]
    print(f"{way:<12}" + "".join(f"{cell:>12}" for cell in cells))
  print(f"hybrid and its checksums, read: {report['with_checksum_ms']:.2f} ms")
  print(f"back: 0 ms; a slice would take {report['back_ms']['slice']:.2f} ms")
  if not (hybrid := report["ways"]["hybrid"])["received"]:
    rate = 2 * report["generation_bytes"] / hybrid["ms"] / 1e6
    print(f"nothing is exchanged: local copies, {rate:.0f} GB/s read and written")


if __name__ == "__main__":
  main()
