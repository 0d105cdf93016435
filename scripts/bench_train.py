"""Measures the training side: actor update, critic update, log-probs, beside torch.

    python scripts/bench_train.py --shape 1.5b --parts actor,critic,log_probs,torch
    python scripts/bench_train.py --shape 1.5b --parts actor --batch packed,heavy
    python scripts/bench_train.py --shape 7b --layers 12 --offload --parts actor
    python scripts/bench_train.py --shape tiny --rows 2 --length 32 --dtype float32

Random weights at the shapes of Qwen2.5 (below 7B with tied embeddings, as there), fp32
parameters and AdamW, through the roles that a run has: what is timed is
``update_policy`` of a batch on the host, from packing its rows to its metrics.

``--batch``: ``full``: ``rows`` sequences of ``length`` tokens; ``packed``: four or five
  sequences in each of those rows but one; ``heavy``: log-normal lengths (median 200,
  sigma 1, at most ``length``), as many as fill eight times the rows, in micro-batches
  of ``rows``; beside it the same number of micro-batches, full.
``mfu``: model flops / time / ``--peak``. Of a sequence of t tokens, with N weights in
  products (the LM head's too, the embedding's not) and Q = heads x head_dim:
  forward ``2 N t + 2 L Q t^2`` (causal attention), update three times that. What is
  computed a second time does not count, padding neither.
``torch``: transformers' model with SDPA attention, gradient checkpointing, each layer
  compiled, fused AdamW, log-probs in checkpointed chunks, on ``full``: with bf16
  parameters and moments, and with fp32 ones under autocast.

Each part has a process of its own; ``peak_gb`` is that of its allocator.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from make_random_model import SHAPES, config_of

ROLES = ("actor", "critic", "log_probs")
PARTS = (*ROLES, "torch")
BATCHES = ("full", "packed", "heavy")
PROMPT = 8  # tokens of a sequence that are not its response
TASK = "task:symbols?min=2&max=4&symbols=10"


def main(argv: Sequence[str] | None = None) -> None:
  flags = parse(argv)
  if flags.child:
    print(json.dumps(measure(flags)))
    return
  report = {part: in_a_process(part, argv or sys.argv[1:]) for part in flags.parts}
  show(report)
  if flags.json:
    flags.json.write_text(json.dumps(report, indent=2) + "\n")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  names = lambda text: text.split(",")
  parser.add_argument("--shape", choices=SHAPES, default="1.5b")
  parser.add_argument("--layers", type=int, help="other than the shape has")
  parser.add_argument("--parts", type=names, default=list(ROLES))
  parser.add_argument("--batch", type=names, default=["full"])
  parser.add_argument("--rows", type=int, default=8, help="of a micro-batch")
  parser.add_argument("--length", type=int, default=2048)
  parser.add_argument("--dtype", default="bfloat16")
  parser.add_argument("--remat", default="full")
  parser.add_argument("--attention", default="auto")
  parser.add_argument("--offload", action="store_true", help="moments and parameters")
  parser.add_argument("--repeat", type=int, default=5)
  parser.add_argument("--peak", type=float, default=790.0, help="TFLOP/s of the device")
  parser.add_argument("--trace", type=Path, help="profile one call of each into here")
  parser.add_argument("--json", type=Path, help="also write the report here")
  parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
  flags = parser.parse_args(argv)
  for name, allowed in (("parts", PARTS), ("batch", BATCHES)):
    unknown = sorted(set(getattr(flags, name)) - set(allowed))
    if unknown:
      parser.error(f"--{name}: expected some of {', '.join(allowed)}, got {unknown[0]}")
  return flags


def in_a_process(part: str, argv: Sequence[str]) -> Any:
  """The report of one part."""
  command = [sys.executable, __file__, *argv, "--child", "--parts", part]
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  if done.returncode:
    sys.exit(f"bench_train: {part} failed:\n{done.stderr[-3000:]}")
  return json.loads(done.stdout.splitlines()[-1])


def measure(flags: argparse.Namespace) -> list[dict[str, Any]]:
  (part,) = flags.parts
  if part == "torch":
    return [torch_update(flags, "bfloat16"), torch_update(flags, "float32")]
  return [of_batch(flags, part, kind) for kind in flags.batch]


def lengths_of(kind: str, rows: int, length: int) -> np.ndarray:
  """Tokens of each sequence of a batch."""
  if kind == "full":
    return np.full(rows, length)
  if kind == "packed":
    quarter, fifth = length // 4, length // 5
    fours = rows // 2
    fives = rows - 1 - fours
    return np.array([length, *[quarter] * 4 * fours, *[fifth] * 5 * fives])
  drawn, rng = [], np.random.default_rng(0)
  while sum(drawn) < 8 * rows * length:
    drawn.append(int(np.clip(np.rint(np.exp(rng.normal(np.log(200), 1))), 16, length)))
  return np.array(drawn)


def of_batch(flags: argparse.Namespace, part: str, kind: str) -> dict[str, Any]:
  """One role on one kind of batch."""
  import jax

  lengths = lengths_of(kind, flags.rows, flags.length)
  count = len(lengths) + -len(lengths) % flags.rows
  plan = make_plan(flags, count, critic=part == "critic")
  begin = time.perf_counter()
  call = caller(plan, part, make_batch(plan.source.spec, lengths))
  built_s = time.perf_counter() - begin
  first_s, seconds = timed(call, flags)
  stats = jax.devices()[0].memory_stats() or {}
  found = {
    "batch": kind,
    "device": jax.devices()[0].device_kind,
    "remat": plan.config.model.remat,
    "dtype": flags.dtype,
    "sequences": len(lengths),
    "real": real_fraction(lengths, flags),
    "ms": 1e3 * seconds,
    "tokens_per_s": int(lengths.sum()) / seconds,
    "mfu": flops(plan.source.spec, lengths, part) / seconds / flags.peak / 1e12,
    "peak_gb": stats.get("peak_bytes_in_use", 0) / 1e9,
    "built_s": built_s,
    "first_call_s": first_s,
  }
  if kind == "heavy":
    whole = np.full(round(lengths.sum() / flags.length), flags.length)
    full = caller(
      make_plan(flags, -(-len(whole) // flags.rows) * flags.rows, critic=False),
      part,
      make_batch(plan.source.spec, whole),
    )
    _, full_seconds = timed(full, flags)
    rate = int(whole.sum()) / full_seconds
    found |= {"full_tokens_per_s": rate, "to_full": found["tokens_per_s"] / rate}
  return found


def real_fraction(lengths: np.ndarray, flags: argparse.Namespace) -> float:
  """Of the tokens of an update those that are no padding."""
  from jaxrl_hybrid.workers import rows

  places = rows.place(lengths, micro_rows=flags.rows, share=True)
  return float(lengths.sum() / (places.micro_batches * np.prod(places.shape[1:])))


def make_plan(flags: argparse.Namespace, sequences: int, *, critic: bool) -> Any:
  """What a run of so many sequences a step would be built from."""
  from ml_collections import ConfigDict

  from jaxrl_hybrid import config as config_lib
  from jaxrl_hybrid import inspection

  config = config_lib.base()
  config.model.random = ConfigDict(model_config(flags))
  config.model.tokenizer = TASK
  config.model.dtype, config.model.remat = flags.dtype, flags.remat
  config.model.attention = flags.attention
  config.data.train_files = (TASK + f"&n={sequences}",)
  config.data.train_batch_size = sequences
  config.data.max_prompt_length = PROMPT
  config.data.max_response_length = flags.length - PROMPT
  config.rewards.functions = ("symbol_match",)
  config.rewards.skip_special_tokens = False
  config.algorithm.name = "ppo" if critic else "reinforce_plus_plus"
  config.rollout.n = 1
  config.actor.ppo_micro_batch_size_per_device = flags.rows
  config.offload.optimizer = config.offload.params = flags.offload
  return inspection.inspect(config_lib.resolve(config))


def model_config(flags: argparse.Namespace) -> dict[str, Any]:
  """The HF config; models below 7B have tied embeddings."""
  tied = flags.shape != "7b"
  return config_of(flags.shape, flags.layers) | {"tie_word_embeddings": tied}


def make_batch(spec: Any, lengths: np.ndarray) -> Any:
  """Random tokens with what the updates look at."""
  from jaxrl_hybrid.types import LENGTH, Batch, Prompt

  rng = np.random.default_rng(1)
  draw = lambda *shape: rng.integers(0, spec.vocab_size, shape).astype(np.int32)
  numbers = lambda: rng.normal(size=(len(lengths), width)).astype(np.float32)
  width = int(lengths.max()) - PROMPT
  return Batch(
    prompts=[Prompt(draw(PROMPT), "", "", i, i) for i in range(len(lengths))],
    sample_ids=np.zeros(len(lengths), np.int32),
    response_ids=draw(len(lengths), width),
    response_lengths=(lengths - PROMPT).astype(np.int32),
    finish_reasons=[LENGTH] * len(lengths),
    rollout_log_probs=-(numbers() ** 2),
    advantages=numbers(),
    returns=numbers(),
    values=numbers(),
  )


def caller(plan: Any, part: str, batch: Any) -> Callable[[], Any]:
  """A call of one role on the batch."""
  from jaxrl_hybrid import build, role_params
  from jaxrl_hybrid.models import params as params_lib

  if part == "critic":
    critic = build.critic_from(
      plan, role_params.starting_params(plan, params_lib.VALUE)
    )
    return lambda: critic.update(batch)
  actor = build.actor_from(plan, role_params.starting_params(plan))
  if part == "actor":
    return lambda: actor.update_policy(batch)
  return lambda: actor.log_probs(actor.state.weights, batch)


def timed(call: Callable[[], Any], flags: argparse.Namespace) -> tuple[float, float]:
  """Seconds of the first call and of the median one after it."""
  import jax

  seconds = []
  for _ in range(flags.repeat + 1):
    begin = time.perf_counter()
    call()
    seconds.append(time.perf_counter() - begin)
  if flags.trace:
    with jax.profiler.trace(str(flags.trace)):
      call()
  return seconds[0], statistics.median(seconds[1:])


def flops(spec: Any, lengths: np.ndarray, part: str) -> float:
  """Of the model, without what is computed twice."""
  from jaxrl_hybrid.models.params import num_params

  weights = num_params(spec)
  if part == "critic":
    weights -= spec.vocab_size * spec.hidden_size
  if not spec.tie_word_embeddings:
    weights -= spec.vocab_size * spec.hidden_size
  attended = 2 * spec.num_layers * spec.num_heads * spec.head_dim
  forward = 2 * weights * lengths.sum() + attended * (lengths.astype(float) ** 2).sum()
  return float(forward) * (1 if part == "log_probs" else 3)


def torch_update(flags: argparse.Namespace, master: str) -> dict[str, Any]:
  """One step of transformers' model on ``full``, as the docstring says."""
  import torch
  import torch.nn.functional as F
  import transformers
  from torch.utils.checkpoint import checkpoint

  device = "cuda" if torch.cuda.is_available() else "cpu"
  given = model_config(flags)
  given.pop("architectures")
  config = transformers.AutoConfig.for_model(given.pop("model_type"), **given)
  config.use_cache = False
  torch.manual_seed(0)
  with torch.device(device):
    model = transformers.AutoModelForCausalLM.from_config(
      config, dtype=getattr(torch, master), attn_implementation="sdpa"
    ).train()
  model.gradient_checkpointing_enable(dict(use_reentrant=False))
  for layer in model.model.layers:
    layer.compile()
  optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=device == "cuda")
  rows, length, vocab = flags.rows, flags.length, config.vocab_size
  ids = torch.randint(0, vocab, (rows, length), device=device)
  targets, advantages = ids.roll(-1, 1).flatten(), torch.randn(rows * length).to(device)
  autocast = torch.autocast(device, torch.bfloat16, enabled=master == "float32")

  def chunk_loss(hidden: Any, target: Any, advantage: Any) -> Any:
    logits = model.lm_head(hidden).float()
    return (F.cross_entropy(logits, target, reduction="none") * advantage).sum()

  def step() -> None:
    with autocast:
      hidden = model.model(input_ids=ids).last_hidden_state.flatten(0, 1)
      parts = (x.split(2048) for x in (hidden, targets, advantages))
      loss = sum(
        checkpoint(chunk_loss, *part, use_reentrant=False) for part in zip(*parts)
      )
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if device == "cuda":
      torch.cuda.synchronize()

  seconds = []
  for _ in range(flags.repeat + 2):
    begin = time.perf_counter()
    step()
    seconds.append(time.perf_counter() - begin)
  spent = statistics.median(seconds[2:])
  from jaxrl_hybrid.models import families

  spec = families.spec_from_hf(model_config(flags))
  work = flops(spec, lengths_of("full", rows, length), "actor")
  on_gpu = device == "cuda"
  return {
    "batch": "full",
    "parameters": master,
    "ms": 1e3 * spent,
    "tokens_per_s": rows * length / spent,
    "mfu": work / spent / flags.peak / 1e12,
    "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if on_gpu else 0.0,
    "first_call_s": seconds[0],
  }


def show(report: dict[str, list[dict[str, Any]]]) -> None:
  for part, found in report.items():
    for line in found:
      shown = lambda v: f"{v:.4g}" if isinstance(v, float) else v
      print(f"{part}: " + ", ".join(f"{k} {shown(v)}" for k, v in line.items()))
  best = max((x["tokens_per_s"] for x in report.get("torch", [])), default=0.0)
  ours = [x["tokens_per_s"] for x in report.get("actor", []) if x["batch"] == "full"]
  if best and ours:
    print(f"actor to the best torch: {ours[0] / best:.2f}")


if __name__ == "__main__":
  main()
