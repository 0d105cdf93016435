"""python -m jaxrl_hybrid.train --config configs/quickstart.py [--config.KEY=VALUE]

``--dry_run`` checks config, data, template and arithmetic and stops before
weights load.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from jaxrl_hybrid import assembly, cli, inspection, role_params
from jaxrl_hybrid.controller import Controller
from jaxrl_hybrid.models.hf.export import check_replaceable, export_hf
from jaxrl_hybrid.runtime import processes


def main(argv: Sequence[str]) -> None:
  """Trains; prints ``run finished: ...`` as the last line."""
  parser = argparse.ArgumentParser(prog="jaxrl_hybrid.train", description=__doc__)
  parser.add_argument("--dry_run", action="store_true")
  flags, rest = cli.split_flags(parser, argv)
  config, file = cli.load_config(rest)
  plan = inspection.inspect(config)
  processes.say(plan.describe())
  if flags.dry_run:
    processes.say("dry run finished: nothing was loaded")
    return
  run_dir = Path(config.trainer.run_dir or processes.broadcast(_default_run_dir(file)))
  if config.trainer.export_hf:
    check_replaceable((run_dir / "hf").absolute(), plan.source.path)
  controller = assembly.assemble(plan, run_dir)
  processes.say(f"run_dir={run_dir}; to resume: {_resume_command(rest, run_dir)}")
  try:
    evaluation = controller.fit()
  except KeyboardInterrupt:
    raise SystemExit(_interrupted(controller, rest, run_dir)) from None
  finally:
    controller.recorder.close()
  if config.trainer.export_hf:
    trained = controller.actor.state.store.whole_params()
    if plan.lora:
      role_params.export_adapters(plan, trained, run_dir / "adapter")
    export_hf(
      role_params.full_params(plan, trained),
      plan.source.spec,
      run_dir / "hf",
      hf_config=plan.source.hf_config,
      tokenizer=plan.source.tokenizer,
      source_dir=plan.source.path,
    )
  reward = evaluation.get("eval/reward", float("nan"))
  exact = evaluation.get("eval/exact_match")
  extra = "" if exact is None else f"eval/exact_match={exact:.2f} "
  processes.say(f"run finished: eval/reward={reward:.2f} {extra}run_dir={run_dir}")


def _interrupted(controller: Controller, argv: Sequence[str], run_dir: Path) -> int:
  saved = controller.checkpoints.latest
  processes.say(
    f"interrupted in step {controller.step}; last checkpoint: "
    f"{'none' if saved is None else f'step {saved}'}; to go on: "
    f"{_resume_command(argv, run_dir)}"
  )
  return 128 + signal.SIGINT


def _default_run_dir(file: str) -> str:
  stem = Path(file.split(":")[0]).stem
  return f"runs/{stem}-{time.strftime('%Y%m%d-%H%M%S')}"


def _resume_command(argv: Sequence[str], run_dir: Path) -> str:
  kept = [arg for arg in argv[1:] if not arg.startswith("--config.trainer.run_dir")]
  return shlex.join(
    [
      sys.executable,
      "-m",
      "jaxrl_hybrid.train",
      *kept,
      f"--config.trainer.run_dir={run_dir}",
    ]
  )


if __name__ == "__main__":
  cli.run(main)
