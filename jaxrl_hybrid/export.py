"""python -m jaxrl_hybrid.export --run_dir runs/NAME --out DIR [--step N]

Writes a checkpoint's actor as an HF directory that transformers loads; adapters
are merged, and with ``--adapter DIR`` also written as PEFT does. ``--role critic``
writes the critic as a sequence classifier with one label: at each token its score
is the value of the tokens up to there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from jaxrl_hybrid import cli, config_reader, inspection, role_params
from jaxrl_hybrid.errors import CheckpointError, ConfigError
from jaxrl_hybrid.models import params as params_lib
from jaxrl_hybrid.models.hf.classifier import as_classifier
from jaxrl_hybrid.models.hf.export import check_replaceable, export_hf
from jaxrl_hybrid.run_plan import Plan
from jaxrl_hybrid.runtime import launch, processes
from jaxrl_hybrid.runtime.checkpoint import Checkpoints
from jaxrl_hybrid.runtime.recorder import CONFIG_FILE

HEADS = {"actor": params_lib.LM, "critic": params_lib.VALUE}


def main(argv: Sequence[str]) -> None:
  """Exports one checkpoint of a run."""
  parser = argparse.ArgumentParser(prog="jaxrl_hybrid.export", description=__doc__)
  parser.add_argument("--run_dir", type=Path, required=True)
  parser.add_argument("--out", type=Path, required=True)
  parser.add_argument("--role", choices=HEADS, default="actor")
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
  _check(plan, flags)
  check_replaceable(flags.out.absolute(), plan.source.path)
  head, hf_config = HEADS[flags.role], plan.source.hf_config
  if head == params_lib.VALUE:
    plan = plan.of_critic
    pad_token_id = plan.source.pad_token_id
    hf_config = as_classifier(plan.source.hf_config, pad_token_id=pad_token_id)
  source = plan.source
  trained = role_params.restore_trained(plan, checkpoints, step, head)
  if flags.adapter:
    role_params.export_adapters(plan, trained, flags.adapter)
  export_hf(
    role_params.full_params(plan, trained, head),
    source.spec,
    flags.out,
    hf_config=hf_config,
    tokenizer=source.tokenizer,
    source_dir=source.path,
  )
  processes.say(
    f"exported the {flags.role} of step {step} of {flags.run_dir} to {flags.out}"
  )


def _check(plan: Plan, flags: argparse.Namespace) -> None:
  if flags.adapter and (flags.role != "actor" or not plan.lora):
    raise ConfigError(
      "--adapter: expected the actor of a run with model.lora, got the "
      f"{flags.role} of one {'with' if plan.lora else 'without'}"
    )
  if flags.role == "critic" and not inspection.make_algorithm(plan.config).needs_critic:
    raise ConfigError(
      "--role critic: expected a run whose algorithm has a critic, got "
      f"algorithm.name={plan.config.algorithm.name}"
    )


if __name__ == "__main__":
  cli.run(main)
