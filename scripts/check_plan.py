"""Predicted against measured GPU memory of a config.

    python scripts/check_plan.py --gpu h200 --steps 2 -- \
        --config configs/smollm2_arithmetic_ppo.py [--config.KEY=VALUE ...]

Plans the config in one process (XLA:GPU compiles there for a GPU it does not
use), runs a few steps in another, and prints the plan's peak, the allocator's
own peak and their difference. Needs a GPU of the named type.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

MEASURED = "perf/max_memory_allocated_gb"


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--gpu", required=True)
  parser.add_argument("--steps", type=int, default=2)
  parser.add_argument("config", nargs="+", help="after --: arguments of the config")
  flags = parser.parse_args()
  plan = json.loads(
    run(["-m", "jaxrl_hybrid.plan", *flags.config, "--gpu", flags.gpu, "--json"])
  )
  with tempfile.TemporaryDirectory() as run_dir:
    settings = {
      "total_steps": flags.steps,
      "run_dir": run_dir,
      "val_before_train": False,
      "test_freq": 0,
      "save_freq": 0,
      "export_hf": False,
    }
    overrides = [f"--config.trainer.{key}={value}" for key, value in settings.items()]
    run(["-m", "jaxrl_hybrid.train", *flags.config, *overrides])
    lines = pathlib.Path(run_dir, "metrics.jsonl").read_text().splitlines()
  measured = max(json.loads(line).get(MEASURED, 0.0) for line in lines)
  planned = plan["peak_bytes_per_gpu"] / 1e9
  report = {
    "config": flags.config,
    "planned_gb": round(planned, 3),
    "measured_gb": round(measured, 3),
    "error": round(planned / measured - 1, 4) if measured else None,
    "phases_gb": {k: round(v / 1e9, 2) for k, v in plan["phases"].items()},
  }
  print(json.dumps(report))


def run(args: list[str]) -> str:
  """Last line of the standard output of a Python process."""
  done = subprocess.run(
    [sys.executable, *args], capture_output=True, text=True, env=os.environ.copy()
  )
  if done.returncode:
    sys.exit(f"{' '.join(args)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
  return done.stdout.strip().splitlines()[-1]


if __name__ == "__main__":
  main()
