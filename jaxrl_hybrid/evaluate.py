"""python -m jaxrl_hybrid.evaluate --config configs/FILE.py [--config.model.path=DIR]

Scores ``data.eval_files`` greedily with the config's rewards; prints one JSON
line of metrics. Nothing is trained, no optimizer is built.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from jaxrl_hybrid import build, cli, evaluation, inspection, role_params
from jaxrl_hybrid.errors import ConfigError
from jaxrl_hybrid.parallel import multihost
from jaxrl_hybrid.runtime import processes
from jaxrl_hybrid.runtime.console import Console


def main(argv: Sequence[str]) -> None:
  """Evaluates the model of the config."""
  parser = argparse.ArgumentParser(prog="jaxrl_hybrid.evaluate", description=__doc__)
  flags, rest = cli.split_flags(parser, argv)
  del flags
  config, _ = cli.load_config(rest)
  plan = inspection.inspect(config, training=False)
  if not plan.eval_prompts:
    raise ConfigError("data.eval_files: expected at least one file, got none")
  processes.say(plan.describe())
  processes.say(f"first prompt, as the model sees it: {plan.eval_prompts[0].text!r}")
  generator, reward = build.make_generator(plan), build.make_reward(plan)
  weights = role_params.make_weights(plan)
  metrics, samples = evaluation.evaluate(
    lambda prompts: generator.generate(weights, prompts, greedy=True),
    reward,
    plan.eval_prompts,
  )
  if multihost.is_primary():
    Console(0).samples_table(samples[: config.trainer.sample_rows], "samples")
  processes.say(json.dumps(metrics))


if __name__ == "__main__":
  cli.run(main)
