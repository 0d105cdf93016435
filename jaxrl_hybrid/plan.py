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
from jaxrl_hybrid.parallel import topology


def main(argv: Sequence[str]) -> None:
  """Prints the plan of a config."""
  parser = argparse.ArgumentParser(
    prog="jaxrl_hybrid.plan",
    usage="python -m jaxrl_hybrid.plan --config FILE [--config.KEY=VALUE] [options]",
    description=__doc__.partition("\n\n")[2],
    epilog="Without the wheels of jaxrl_hybrid[plan] nothing is compiled for the GPU: "
    "activations and buffers are then estimates, and the output says so.",
  )
  add = parser.add_argument
  add("--config", metavar="FILE", help="a config; --config.KEY=VALUE changes it")
  add("--gpu", choices=topology.GPUS, default="h100-80gb", help="default: %(default)s")
  add("--gpus_per_node", type=int, default=8, help="of one machine; default: 8")
  add("--json", action="store_true", help="one JSON object, sizes in bytes")
  flags, rest = cli.split_flags(parser, argv)
  started = time.perf_counter()
  if flags.config:
    rest.insert(1, f"--config={flags.config}")
  found = plan_report.make(rest, flags.gpu, flags.gpus_per_node)
  if flags.json:
    print(json.dumps(found.to_json()))
  else:
    print(found.describe())
    print(f"planned in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
  cli.run(main)
