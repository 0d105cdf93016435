"""How many prompts, sequences, micro-batches and updates a config makes."""

from __future__ import annotations

import dataclasses

from ml_collections import ConfigDict

from jaxrl_hybrid.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Derived arithmetic, all of it printed before weights load."""

  prompts: int  # per step
  sequences: int  # per step
  mini_batches: int  # per epoch
  mini_sequences: int
  micro_sequences: int  # over all dp shards
  accumulation: int  # micro-batches per mini-batch
  updates_per_step: int
  dp: int
  pipeline_microbatches: int  # of micro_sequences

  def describe(self, total_steps: int) -> str:
    """A table for the user."""
    return (
      f"batch: {self.prompts} prompts -> {self.sequences} sequences per step; "
      f"{self.updates_per_step} update(s) of {self.mini_sequences} sequences in "
      f"{self.accumulation} micro-batch(es) of {self.micro_sequences} "
      f"({self.micro_sequences // self.dp} per device, dp={self.dp}"
      f"{self._describe_pipeline()}); "
      f"{total_steps} steps = {total_steps * self.updates_per_step} updates"
    )

  def _describe_pipeline(self) -> str:
    if self.pipeline_microbatches == 1:
      return ""
    return f", {self.pipeline_microbatches} pipeline microbatches"


def check_batch(config: ConfigDict) -> Sizes:
  """The sizes of a resolved config.

  Raises:
    ConfigError: one does not divide another.
  """
  prompts, n = config.data.train_batch_size, config.rollout.n
  mini, dp = config.actor.ppo_mini_batch_size, config.mesh.train[2]
  per_device = config.actor.ppo_micro_batch_size_per_device
  if prompts % mini:
    raise ConfigError(
      f"actor.ppo_mini_batch_size (in prompts): expected a divisor of "
      f"data.train_batch_size={prompts}, got {mini}"
    )
  microbatches = config.mesh.pipeline_microbatches
  micro = per_device * dp * microbatches
  if (mini * n) % micro:
    raise ConfigError(
      f"a mini-batch has {mini} prompts x {n} samples = {mini * n} sequences; "
      f"expected a multiple of actor.ppo_micro_batch_size_per_device={per_device} "
      f"x dp={dp} x mesh.pipeline_microbatches={microbatches} = {micro}; change one "
      "of them or mesh.train"
    )
  return Sizes(
    prompts,
    prompts * n,
    prompts // mini,
    mini * n,
    micro,
    mini * n // micro,
    prompts // mini * config.actor.ppo_epochs,
    dp,
    microbatches,
  )
