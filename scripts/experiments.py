"""What the sampler, the critic's warm-up and the style loss change, measured.

    python scripts/experiments.py sampler --json sampler.json
    python scripts/experiments.py warmup --json warmup.json
    python scripts/experiments.py style --json style.json    # needs get_smollm2.py

Each compares runs of ``jaxrl_hybrid.train`` that differ in a few config keys, for
``--seeds`` seeds, and prints a table of means over the seeds (and the least and the
most). ``--steps`` is the length of a run; what follows ``--`` goes to every run:

    python scripts/experiments.py warmup --seeds 2 -- --config.trainer.total_steps=40

sampler: GRPO on prompts of 1 to 4 symbols; steps until the held-out reward reaches
``--target``.
warmup: PPO with a fresh critic; the critic's loss in the steps in which the actor
learns, from an actor that 60 steps of GRPO have made.
style: GRPO on one-digit sums with SmolLM2-135M; the style is to answer with the number.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl_hybrid import train

ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, float]
STEP = "training/global_step"

ONE_CPU = {"mesh.fake_devices": 1, "mesh.train": (1, 1, 1)}
SMALL = {
  "model.random.hidden_size": 64,
  "model.random.intermediate_size": 128,
  "model.random.num_hidden_layers": 2,
  "trainer.save_freq": 0,
  "trainer.export_hf": False,
}
MIXED = "task:symbols?min=1&max=4&symbols=6"
STYLE = ("Reply with only the number, no words.",)

SAMPLER = {
  "data.train_files": (f"{MIXED}&n=512",),
  "data.eval_files": (f"{MIXED}&n=128&split=eval",),
  "model.tokenizer": MIXED,
  "data.train_batch_size": 32,
  "rollout.n": 8,
  "trainer.test_freq": 5,
}
# An actor that is half-way there, as after fine-tuning: the others start from it.
START = {
  "algorithm.name": "grpo",
  "data.train_batch_size": 64,
  "trainer.total_steps": 60,
  "trainer.export_hf": True,
}
WARMUP = {"algorithm.name": "ppo", "data.train_batch_size": 32, "trainer.test_freq": 0}
STYLED = {
  "data.train_batch_size": 2,
  "data.train_files": ("task:arithmetic?digits=1&n=80",),
  "data.eval_files": ("task:arithmetic?digits=1&n=20&split=eval",),
  "data.curriculum": (),
  "data.max_response_length": 16,
  "actor.optim.lr": 2e-5,
  "actor.optim.warmup_steps": 0,
  "trainer.test_freq": 1000,  # before and after
  "trainer.eval_max_prompts": 8,
  "trainer.save_freq": 0,
  "trainer.export_hf": False,
}
# Experiment -> (config, keys of all its runs, {name of a variant: its keys}).
EXPERIMENTS: dict[str, tuple[str, dict, dict[str, dict]]] = {
  "sampler": (
    "configs/quickstart.py",
    ONE_CPU | SMALL | SAMPLER,
    {
      "passes": {},
      "dynamic": {"data.sampler.name": "dynamic", "data.sampler.pass_score": 0.5},
    },
  ),
  "warmup": (
    "configs/quickstart.py",
    ONE_CPU | SMALL | WARMUP,
    {
      "none": {},
      "warm-up": {"critic.warmup": 15, "critic.full_steps": 15},
      "warm-up, take-over": {"critic.warmup": 15, "critic.full_steps": 45},
    },
  ),
  "style": (
    "configs/smollm2_arithmetic_grpo.py:cpu",
    STYLED,
    # The weight of a loss that is never learned from makes its value a metric.
    {
      "reward alone": {"actor.style.weight": 1e-9},
      "with style": {"actor.style.weight": 0.3},
    },
  ),
}
STEPS = {"sampler": 100, "warmup": 75, "style": 10}


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("experiment", choices=sorted(EXPERIMENTS))
  parser.add_argument("--seeds", type=int, default=3)
  parser.add_argument("--steps", type=int, help="of each run")
  parser.add_argument("--target", type=float, default=0.6, help="sampler: eval/reward")
  parser.add_argument("--json", type=Path, help="also write the report here")
  argv = list(sys.argv[1:] if argv is None else argv)
  cut = argv.index("--") if "--" in argv else len(argv)
  flags = parser.parse_args(argv[:cut])
  report = measure(flags, argv[cut + 1 :])
  print_table(report)
  if flags.json:
    flags.json.write_text(json.dumps(report, indent=2) + "\n")


def measure(flags: argparse.Namespace, more: Sequence[str] = ()) -> dict[str, Any]:
  """The report: of each variant the measures of each seed; ``more`` is for each run."""
  config, shared, variants = EXPERIMENTS[flags.experiment]
  steps = flags.steps or STEPS[flags.experiment]
  shared = shared | {"trainer.total_steps": steps}
  if flags.experiment == "style":
    shared["actor.style.reference_texts"] = STYLE
  summarize = {
    "sampler": lambda rows: sampler_measures(rows, flags.target, steps),
    "warmup": warmup_measures,
    "style": style_measures,
  }[flags.experiment]
  found = {name: [] for name in variants}
  for seed in range(flags.seeds):
    with tempfile.TemporaryDirectory(prefix="experiment-") as folder:
      start = {"seed": seed}
      if flags.experiment == "warmup":
        before = shared | START | start
        run(config, before, more, f"{folder}/start")
        start["model.path"] = f"{folder}/start/hf"
      for name, keys in variants.items():
        rows = run(config, shared | keys | start, more, f"{folder}/{name}")
        found[name].append(summarize(rows))
        print(f"{name}, seed {seed}: {found[name][-1]}", file=sys.stderr, flush=True)
  return {"experiment": flags.experiment, "steps": steps, "variants": found}


def run(
  config: str, keys: dict[str, Any], more: Sequence[str], folder: str
) -> list[Row]:
  """The metrics of a run in ``folder``, step by step; its output goes to a file."""
  argv = ["train", "--config", str(ROOT / config)]
  argv += [f"--config.{key}={value}" for key, value in keys.items()]
  argv += [*more, f"--config.trainer.run_dir={folder}"]
  log = Path(f"{folder}.log")
  process = multiprocessing.get_context("spawn").Process(
    target=train_alone, args=(argv, log)
  )
  process.start()
  process.join()
  if process.exitcode:
    told = log.read_text()[-2000:] if log.exists() else ""
    sys.exit(f"experiments: a run ended with {process.exitcode}\n{told}")
  lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


def train_alone(argv: list[str], log: Path) -> None:
  """``jaxrl_hybrid.train`` in a process of its own, which JAX needs for its devices."""
  os.chdir(ROOT)  # the configs name models and files from here
  with log.open("w") as file:
    os.dup2(file.fileno(), sys.stdout.fileno())
    os.dup2(file.fileno(), sys.stderr.fileno())
    train.main(argv)


def sampler_measures(rows: list[Row], target: float, steps: int) -> Row:
  """Steps to the target (one more than there were: never), and where it ended."""
  evaluated = [r for r in rows if "eval/reward" in r]
  evals = {int(r[STEP]): r["eval/reward"] for r in evaluated}
  reached = [step for step, reward in evals.items() if reward >= target]
  mixed = [r["critic/advantages/max"] > 0 for r in rows if "critic/advantages/max" in r]
  return {
    "steps_to_target": float(min(reached, default=steps + 1)),
    "eval_reward": evals[max(evals)],
    "mean_eval_reward": statistics.mean(evals.values()),
    "steps_with_signal": statistics.mean(mixed),
  }


def warmup_measures(rows: list[Row]) -> Row:
  """Of the first 30 steps in which the actor learns, and the reward of the last 5."""
  learning = [r for r in rows if "actor/loss" in r and "critic/vf_loss" in r][:30]
  losses = [r["critic/vf_loss"] for r in learning]
  rewards = [r["critic/rewards/mean"] for r in rows if "critic/rewards/mean" in r]
  jumps = [b - a for a, b in zip(losses, losses[1:])]
  return {
    "critic_loss_variance": statistics.pvariance(losses),
    "critic_loss_jump": math.sqrt(statistics.fmean(x * x for x in jumps)),
    "explained_variance": statistics.fmean(
      r["critic/vf_explained_var"] for r in learning
    ),
    "last_reward": statistics.fmean(rewards[-5:]),
  }


def style_measures(rows: list[Row]) -> Row:
  """Of the last third of the steps: style, length and reward."""
  learning = [r for r in rows if "actor/style_loss" in r]
  last = learning[-max(1, len(learning) // 3) :]
  evals = [r for r in rows if "eval/reward" in r]
  return {
    "style_kl_first": learning[0]["actor/style_loss"],
    "style_kl_last": statistics.fmean(r["actor/style_loss"] for r in last),
    "response_length_last": statistics.fmean(r["response_length/mean"] for r in last),
    "eval_length_first": evals[0]["eval/response_length/mean"],
    "eval_length_last": evals[-1]["eval/response_length/mean"],
    "eval_reward_first": evals[0]["eval/reward"],
    "eval_reward_last": evals[-1]["eval/reward"],
  }


def print_table(report: dict[str, Any]) -> None:
  """Mean (least, most) over the seeds."""
  variants: dict[str, list[Row]] = report["variants"]
  names = list(next(iter(variants.values()))[0])
  width = 2 + max(map(len, variants))
  print(f"{report['experiment']}, {report['steps']} steps")
  print(" " * width + "".join(f"{name:>30}" for name in names))
  for variant, found in variants.items():
    cells = [_cell([row[name] for row in found]) for name in names]
    print(f"{variant:<{width}}" + "".join(f"{cell:>30}" for cell in cells))


def _cell(values: list[float]) -> str:
  spread = f" ({min(values):.4g}, {max(values):.4g})" if len(values) > 1 else ""
  return f"{statistics.fmean(values):.4g}{spread}"


if __name__ == "__main__":
  main()
