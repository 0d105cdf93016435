"""python -m jaxrl_hybrid.plan --config configs/qwen70b_ppo.py [--gpu=h200] [--json]

What each GPU will hold in each phase of a step, what a switch moves, how many KV
rows fit, and whether the run fits; without weights and without a GPU. GB = 1e9.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence

from jaxrl_hybrid import cli, plan_report

GPU_CHOICES = ("a100-80gb", "h100-80gb", "h200")


def main(argv: Sequence[str]) -> None:
  """Prints the plan of a config."""
  parser = argparse.ArgumentParser(prog="jaxrl_hybrid.plan", description=__doc__)
  parser.add_argument("--gpu", choices=GPU_CHOICES, default="h100-80gb")
  parser.add_argument("--gpus_per_node", type=int, default=8)
  parser.add_argument("--json", action="store_true")
  flags, rest = cli.split_flags(parser, argv)
  started = time.perf_counter()
  found = plan_report.make(rest, flags.gpu, flags.gpus_per_node)
  if flags.json:
    print(json.dumps(found.to_json()))
  else:
    print(found.describe())
    print(f"planned in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
  cli.run(main)
