"""Measures the rollout engine: decode, prefill and a whole rollout, beside others.

    python scripts/bench_generate.py --shape 1.5b --parts decode,rollout,hf --json F
    python scripts/bench_generate.py --shape 7b --batch 32,128 --slots 256
    python scripts/bench_generate.py --shape tiny --parts decode,rollout \\
        --requests 40 --longest 64 --context 64 --batch 4 --slots 8 --dtype float32

Random weights at the shapes of Qwen2.5, or ``--model DIR``: those of an HF directory.

``copy``: GB/s of a copy on the device, read and written bytes, in this run.
``decode``: ms per step of ``batch`` rows that have ``context`` tokens each, sampled at
  temperature 1, and ms per call of the program beside its steps (from calls of 16 and
  of 64 steps); ``roofline``: (bytes of the weights that a step reads + bytes of live
  keys and values) / copy bandwidth / time.
``prefill``: tokens/s of ``prompts`` x ``prompt_tokens``; ``mfu``: 2 flops per weight
  and token + causal attention, of ``--peak`` TFLOP/s.
``rollout``: ``requests`` of 128 random prompt tokens, whose lengths are log-normal
  (median 200, sigma 1, at most ``longest``), no EOS, temperature 1, log-probs
  returned; longest first. ``overhead``: its time beyond the same device programs
  called again without looking at their results. ``static``: the same requests in
  batches of ``--static`` rows in the order drawn, each batch until its longest ends.
``hf``: transformers' generate, static cache, compiled, same shape and batch, in a
  process of its own; beside it our step at the same context (needs torch).
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from make_random_model import SHAPES, config_of

from jaxrl_hybrid.models import decoder as decoder_lib
from jaxrl_hybrid.models import families
from jaxrl_hybrid.models.hf import load
from jaxrl_hybrid.models.spec import ModelSpec
from jaxrl_hybrid.ops import attention
from jaxrl_hybrid.parallel import mesh as mesh_lib
from jaxrl_hybrid.parallel import weights as weights_lib
from jaxrl_hybrid.parallel.hybrid import HybridEngine
from jaxrl_hybrid.rollout.engine import CHUNK, Engine
from jaxrl_hybrid.rollout.sampling import Sampling

PARTS = ("decode", "prefill", "rollout", "static", "hf")
PROMPT = 128  # tokens of a request's prompt
SAMPLING = Sampling(temperature=1.0)
HF_CONTEXT, HF_NEW = 512, 64


def main(argv: Sequence[str] | None = None) -> None:
  flags = parse(argv)
  if flags.hf_only:
    print(json.dumps(hf_generate(flags)))
    return
  # Before JAX takes the memory.
  hf = run_hf(flags) if "hf" in flags.parts else None
  bench = Bench(flags)
  report: dict[str, Any] = {
    "device": jax.devices()[0].device_kind,
    "jax": jax.__version__,
    "shape": str(flags.model or flags.shape),
    "dtype": flags.dtype,
    "attention": bench.decoder.attention,
    "weights_gb": bench.read_bytes / 1e9,
    "copy_gb_per_s": bench.copy / 1e9,
  }
  if "decode" in flags.parts:
    report["decode"] = [bench.decode(b, flags.context) for b in flags.batch]
  if "prefill" in flags.parts:
    report["prefill"] = bench.prefill(*flags.prefill)
  if hf:
    ours = bench.decode(hf["batch"], HF_CONTEXT)
    report["hf"] = hf | {"ours_ms": ours["ms"], "ratio": hf["ms"] / ours["ms"]}
  if "rollout" in flags.parts:
    report["rollout"] = bench.rollout(flags)
  if "static" in flags.parts:
    report["static"] = bench.static(flags)
    if "rollout" in report:
      report["static"]["ratio"] = (
        report["static"]["seconds"] / report["rollout"]["seconds"]
      )
  show(report)
  if flags.json:
    flags.json.write_text(json.dumps(report, indent=2) + "\n")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  numbers = lambda text: tuple(map(int, text.split(",")))
  parser.add_argument("--shape", choices=SHAPES, default="1.5b")
  parser.add_argument("--layers", type=int, help="other than the shape has")
  parser.add_argument("--model", type=Path, help="an HF directory, in its place")
  parser.add_argument("--dtype", default="bfloat16")
  parser.add_argument(
    "--parts", type=lambda text: text.split(","), default=["decode", "prefill"]
  )
  parser.add_argument("--batch", type=numbers, default=(32, 128, 256))
  parser.add_argument("--context", type=int, default=1000)
  parser.add_argument("--prefill", type=numbers, default=(16, 1024), metavar="N,P")
  parser.add_argument("--slots", type=int, default=256, help="of the rollout")
  parser.add_argument("--prefill_tokens", type=int, default=8192)
  parser.add_argument("--requests", type=int, default=1024)
  parser.add_argument("--longest", type=int, default=1024)
  parser.add_argument("--static", type=int, default=128, help="rows of a static batch")
  parser.add_argument("--repeat", type=int, default=3)
  parser.add_argument("--peak", type=float, default=790.0, help="TFLOP/s of the device")
  parser.add_argument("--attention", default="auto", choices=attention.IMPLEMENTATIONS)
  parser.add_argument("--hf_batch", type=int, default=128)
  parser.add_argument("--hf_only", action="store_true", help=argparse.SUPPRESS)
  parser.add_argument("--json", type=Path, help="also write the report here")
  flags = parser.parse_args(argv)
  unknown = sorted(set(flags.parts) - set(PARTS))
  if unknown:
    parser.error(f"--parts: expected some of {', '.join(PARTS)}, got {unknown[0]}")
  return flags


class Bench:
  """A model on one device, and what is measured of it."""

  def __init__(self, flags: argparse.Namespace):
    dtype = jnp.dtype(flags.dtype)
    self.flags = flags
    self.spec = spec_of(flags).for_length(4096)
    train = mesh_lib.train_mesh((1, 1, 1))
    source = weights_lib.WeightLayout(
      self.spec,
      weights_lib.train_layout(self.spec, train, sequence_parallel=False),
      dtype,
    )
    mesh = mesh_lib.generation_mesh(train, (1, 1))
    self.layout = weights_lib.generation_layout(self.spec, mesh)
    chosen = attention.choose(flags.attention, dtype=dtype, head_dim=self.spec.head_dim)
    self.decoder = decoder_lib.Decoder(self.spec, dtype, chosen, self.layout.constrain)
    switch = HybridEngine(source, self.layout)
    if flags.model:
      shardings = jax.tree.map(lambda x: x.sharding, source.abstract_params())
      stored = load.load_params(flags.model, self.spec, shardings, vocab=source.vocab)
      self.params = switch.copy(jax.jit(source.prepare)(stored))
    else:
      self.params = random_weights(switch.copy(source.abstract_weights()))
    unread = 0 if self.spec.tie_word_embeddings else nbytes(self.params["embed"])
    self.read_bytes = nbytes(self.params) - unread
    self.copy = copy_bandwidth()

  def engine(self, slots: int) -> Engine:
    """A fresh one, without EOS."""
    return Engine(
      self.decoder,
      self.layout,
      eos_ids=(-1,),
      max_rows=slots,
      seed=0,
      prefill_tokens=self.flags.prefill_tokens,
    )

  def decode(self, batch: int, context: int) -> dict[str, Any]:
    """The bare decode program on rows that all have ``context`` tokens."""
    programs = self.engine(batch).programs
    length = -(-(context + CHUNK) // 128) * 128
    start = time.perf_counter()
    pool = programs.new_pool(self.params, batch, length, SAMPLING)
    full = jnp.full((batch,), context, jnp.int32)
    rows = pool["rows"] | {"position": full, "left": full, "step": full}
    running, few, many = np.ones((batch,), bool), CHUNK // 4, CHUNK

    def seconds(pool: Any, steps: int) -> tuple[Any, float]:
      pool = {"caches": pool["caches"], "rows": jax.tree.map(jnp.copy, rows)}
      jax.block_until_ready(pool)
      begin = time.perf_counter()
      pool, told = programs.decode(self.params, pool, running, steps, batch, SAMPLING)
      jax.block_until_ready(told)
      return pool, time.perf_counter() - begin

    pool, _ = seconds(pool, few)
    compile_s = time.perf_counter() - start
    times: dict[int, list[float]] = {few: [], many: []}
    for _ in range(self.flags.repeat):
      for steps, found in times.items():
        pool, spent = seconds(pool, steps)
        found.append(spent)
    short, long = (statistics.median(found) for found in times.values())
    step = (long - short) / (many - few)
    live = batch * (context + (few + many) / 2) * self.kv_bytes_per_token()
    ideal = (self.read_bytes + live) / self.copy
    return {
      "batch": batch,
      "context": context,
      "ms": 1e3 * step,
      "call_ms": 1e3 * (short - few * step),
      "tokens_per_s": batch / step,
      "roofline": ideal / step,
      "first_call_s": compile_s,
    }

  def prefill(self, prompts: int, tokens: int) -> dict[str, Any]:
    programs = self.engine(prompts).programs
    ids = np.random.default_rng(0).integers(
      0, self.spec.vocab_size, (prompts, tokens), np.int32
    )
    step = timed(lambda: programs.prefill(self.params, ids), self.flags.repeat)
    spec = self.spec
    tables = [self.params["embed"], self.params.get("lm_head", {})]
    weights = sum(x.size for x in jax.tree.leaves(self.params))
    weights -= sum(x.size for x in jax.tree.leaves(tables))
    products = 2 * weights * prompts * tokens
    attended = (
      2 * spec.num_layers * spec.num_heads * spec.head_dim * tokens**2 * prompts
    )
    return {
      "prompts": prompts,
      "prompt_tokens": tokens,
      "ms": 1e3 * step,
      "tokens_per_s": prompts * tokens / step,
      "mfu": (products + attended) / step / self.flags.peak / 1e12,
    }

  def rollout(self, flags: argparse.Namespace) -> dict[str, Any]:
    lens = lengths(flags)
    engine = self.engine(flags.slots)

    def once(i: int) -> float:
      begin = time.perf_counter()
      out = engine.generate(
        self.params,
        prompts(flags, i, self.spec),
        range(flags.requests),
        n=1,
        max_new=lens,
        sampling=SAMPLING,
      )
      assert (out.lengths == lens).all() and np.isfinite(out.log_probs).all()
      return time.perf_counter() - begin

    first = once(0)
    seconds = [once(i) for i in range(1, flags.repeat + 1)]
    with Recording(engine) as recording:
      once(0)
    best = statistics.median(seconds)
    bare, parts = recording.replay(), collections.Counter()
    recording.replay(parts)
    return {
      "requests": flags.requests,
      "tokens": int(lens.sum()),
      "slots": flags.slots,
      "seconds": best,
      "all_seconds": seconds,
      "tokens_per_s": float(lens.sum() / best),
      "decode_calls": recording.count("decode"),
      "prefill_calls": recording.count("prefill"),
      "bare_seconds": bare,
      "overhead": best / bare - 1,
      **{f"{name}_s": spent for name, spent in parts.items()},
      "first_s": first,
      "compile_s": engine.programs.seconds,
      "programs": engine.programs.count,
    }

  def static(self, flags: argparse.Namespace) -> dict[str, Any]:
    lens, given = lengths(flags), prompts(flags, 1, self.spec)
    engine = self.engine(flags.static)

    begin = time.perf_counter()
    for start in range(0, flags.requests, flags.static):
      part = slice(start, start + flags.static)
      engine.generate(
        self.params,
        given[part],
        range(len(given[part])),
        n=1,
        max_new=int(lens[part].max()),
        sampling=SAMPLING,
      )
    seconds = time.perf_counter() - begin - engine.programs.seconds
    return {"rows": flags.static, "seconds": seconds}

  def kv_bytes_per_token(self) -> int:
    width = sum(heads * width for heads, width in self.decoder.cache_dims())
    return self.spec.num_layers * width * self.decoder.dtype.itemsize


class Recording:
  """The device programs of a rollout, to call again without looking at results."""

  NAMES = ("new_pool", "prefill", "admit", "decode", "shrink")

  def __init__(self, engine: Engine):
    self._programs = engine.programs
    self._calls: list[tuple[str, tuple[Any, ...]]] = []

  def __enter__(self) -> Recording:
    for name in self.NAMES:
      setattr(self._programs, name, self._recorded(name, getattr(self._programs, name)))
    return self

  def __exit__(self, *_: Any) -> None:
    for name in self.NAMES:
      delattr(self._programs, name)

  def count(self, name: str) -> int:
    return sum(call[0] == name for call in self._calls)

  def replay(self, seconds: collections.Counter[str] | None = None) -> float:
    """Seconds of the same calls; with a counter each one is waited for and counted."""
    kv, pool, told = {}, None, None
    begin = time.perf_counter()
    for name, args, out in self._calls:
      start = time.perf_counter()
      program = getattr(self._programs, name)
      if name == "prefill":
        kv[out] = made = program(*args)
      elif name == "new_pool":
        made = pool = program(*args)
      elif name == "admit":
        made = pool = program(pool, kv[args[1]], args[2])
      elif name == "shrink":
        made = pool = program(pool, *args[1:])
      else:
        pool, made = program(args[0], pool, *args[2:])
        told = made
      if seconds is not None:
        jax.block_until_ready(made)
        seconds[name] += time.perf_counter() - start
    jax.block_until_ready(told)
    return time.perf_counter() - begin

  def _recorded(self, name: str, program: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
      out = program(*args)
      kept = list(args)
      if name in ("admit", "shrink"):
        kept[0] = None
      if name == "admit":
        kept[1] = id(args[1])
      if name == "decode":
        kept[1] = None
      self._calls.append((name, tuple(kept), id(out)))
      return out

    return call


def spec_of(flags: argparse.Namespace) -> ModelSpec:
  if flags.model:
    return families.spec_from_hf(families.load_hf_config(flags.model))
  return families.spec_from_hf(config_of(flags.shape, flags.layers))


def random_weights(shapes: Any) -> Any:
  """N(0, 0.02) kernels, norms of 1, made on the device."""
  leaves, structure = jax.tree.flatten(shapes)

  def make(i: int, x: jax.ShapeDtypeStruct) -> jax.Array:
    if x.ndim == 1:
      return jnp.ones(x.shape, x.dtype)
    noise = jax.random.normal(jax.random.key(i), x.shape, jnp.bfloat16)
    return (0.02 * noise).astype(x.dtype)

  made: dict[Any, Any] = {}
  arrays = []
  for i, x in enumerate(leaves):
    kind = (x.shape, x.dtype)
    if kind not in made:
      made[kind] = jax.jit(lambda i, x=x: make(i, x), out_shardings=x.sharding)
    arrays.append(made[kind](i))
  return jax.block_until_ready(structure.unflatten(arrays))


def lengths(flags: argparse.Namespace) -> np.ndarray:
  drawn = np.random.default_rng(0).normal(np.log(200), 1.0, flags.requests)
  return np.clip(np.rint(np.exp(drawn)), 1, flags.longest).astype(int)


def prompts(flags: argparse.Namespace, i: int, spec: ModelSpec) -> list[np.ndarray]:
  most = min(151_643, spec.vocab_size)
  shape = (flags.requests, PROMPT)
  return list(np.random.default_rng(100 + i).integers(0, most, shape).astype(np.int32))


def nbytes(tree: Any) -> int:
  return sum(x.nbytes for x in jax.tree.leaves(tree))


def timed(call: Callable[[], Any], repeat: int) -> float:
  seconds = []
  for _ in range(repeat + 1):
    begin = time.perf_counter()
    jax.block_until_ready(call())
    seconds.append(time.perf_counter() - begin)
  return statistics.median(seconds[1:])


def copy_bandwidth() -> float:
  """Bytes read and written per second by the faster of a copy and an addition."""
  on_cpu = jax.devices()[0].platform == "cpu"
  x = jnp.zeros((2**24 if on_cpu else 2**30,), jnp.float32)
  ways = (jax.jit(jnp.copy), jax.jit(lambda x: x + 1))

  def five(way: Callable[[jax.Array], jax.Array]) -> jax.Array:
    for _ in range(5):  # in a row: the host's part is hidden
      out = way(x)
    return out

  return 10 * x.nbytes / min(timed(lambda way=way: five(way), 3) for way in ways)


def run_hf(flags: argparse.Namespace) -> dict[str, Any]:
  """``hf_generate`` in a process that ends before JAX takes the memory."""
  command = [sys.executable, __file__, "--hf_only", "--shape", flags.shape]
  command += ["--hf_batch", str(flags.hf_batch), "--dtype", flags.dtype]
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  if done.returncode:
    sys.exit(f"bench_generate: transformers failed:\n{done.stderr[-2000:]}")
  return json.loads(done.stdout.splitlines()[-1])


def hf_generate(flags: argparse.Namespace) -> dict[str, Any]:
  """ms per step of transformers' generate: static cache, compiled."""
  import torch
  import transformers

  given = config_of(flags.shape, flags.layers)
  kind = given.pop("model_type")
  config = transformers.AutoConfig.for_model(kind, **given)
  with torch.device("cuda"):
    model = transformers.AutoModelForCausalLM.from_config(
      config, dtype=getattr(torch, flags.dtype)
    ).eval()
  ids = torch.randint(0, 1000, (flags.hf_batch, HF_CONTEXT), device="cuda")
  options = dict(
    attention_mask=torch.ones_like(ids),
    do_sample=True,
    top_k=0,
    cache_implementation="static",
    pad_token_id=0,
    eos_token_id=None,
  )

  def seconds(new: int) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    model.generate(ids, max_new_tokens=new, min_new_tokens=new, **options)
    torch.cuda.synchronize()
    return time.perf_counter() - begin

  start = time.perf_counter()
  for _ in range(3):
    seconds(HF_NEW)
  warm = time.perf_counter() - start
  # Without the prefill: what the longer of two runs takes more.
  long, short = (min(seconds(new) for _ in range(3)) for new in (HF_NEW, 2))
  return {
    "batch": flags.hf_batch,
    "context": HF_CONTEXT,
    "ms": 1e3 * (long - short) / (HF_NEW - 2),
    "warm_up_s": warm,
    "torch": torch.__version__,
    "transformers": transformers.__version__,
  }


def show(report: dict[str, Any]) -> None:
  for name, value in report.items():
    rows = value if isinstance(value, list) else [value]
    for row in rows:
      if isinstance(row, dict):
        print(name, " ".join(f"{k}={_short(v)}" for k, v in row.items()))
      else:
        print(name, _short(row))


def _short(value: Any) -> str:
  if isinstance(value, list):
    return "/".join(map(_short, value))
  return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  main()
