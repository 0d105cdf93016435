"""python -m jaxrl_hybrid.export --run_dir runs/NAME --out DIR [--step N]

Writes a checkpoint's actor as an HF directory that transformers loads; adapters
are merged, and with ``--adapter DIR`` also written as PEFT does.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from jaxrl_hybrid import build, cli, config_reader, inspection
from jaxrl_hybrid.errors import CheckpointError, ConfigError
from jaxrl_hybrid.models.hf.export import check_replaceable, export_hf
from jaxrl_hybrid.runtime import launch, processes
from jaxrl_hybrid.runtime.checkpoint import Checkpoints
from jaxrl_hybrid.runtime.recorder import CONFIG_FILE


def main(argv: Sequence[str]) -> None:
  """Exports one checkpoint of a run."""
  parser = argparse.ArgumentParser(prog="jaxrl_hybrid.export", description=__doc__)
  parser.add_argument("--run_dir", type=Path, required=True)
  parser.add_argument("--out", type=Path, required=True)
  parser.add_argument("--adapter", type=Path, help="of a run with model.lora")
  parser.add_argument("--step", type=int, help="default: the last one")
  flags, rest = cli.split_flags(parser, argv)
  if rest[1:]:
    parser.error(f"unexpected arguments {rest[1:]}")
  check_replaceable(flags.out.absolute())
  config = config_reader.from_run(flags.run_dir / CONFIG_FILE)
  launch.setup(config)
  checkpoints = Checkpoints(flags.run_dir, max_to_keep=config.trainer.max_ckpt_to_keep)
  step = processes.broadcast(checkpoints.latest if flags.step is None else flags.step)
  if step is None:
    raise CheckpointError(
      f"{flags.run_dir} has no checkpoint; expected a run with trainer.save_freq > 0"
    )
  plan = inspection.inspect(config, training=False)
  if flags.adapter and not plan.lora:
    raise ConfigError("--adapter: expected a run with model.lora, this one has none")
  trained = build.restore_actor_params(plan, checkpoints, step)
  source = plan.source
  if flags.adapter:
    build.export_adapters(plan, trained, flags.adapter)
  export_hf(
    build.full_params(plan, trained),
    source.spec,
    flags.out,
    hf_config=source.hf_config,
    tokenizer=source.tokenizer,
    source_dir=source.path,
  )
  processes.say(f"exported step {step} of {flags.run_dir} to {flags.out}")


if __name__ == "__main__":
  cli.run(main)
