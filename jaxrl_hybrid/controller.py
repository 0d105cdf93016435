"""The dataflow of one run, read top-down.

One loop drives everything: it draws prompts, lets the roles add their part to the
batch, and learns from it. Several processes run it alike. Meshes, padding and
devices are the workers' business. Deliberate differences from the HybridFlow
paper's listing:

1. The old log-probs are recomputed only when they can differ from the current
   ones (several updates per batch) or are needed earlier (KL in the reward,
   rollout correction).
2. A single update per batch uses its own log-probs as the old ones: exact.
3. Reward functions start with rows that have ended while others still decode.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from jaxrl_hybrid import evaluation
from jaxrl_hybrid.algorithms.estimate import compute_advantages
from jaxrl_hybrid.algorithms.filtering import GroupFilter
from jaxrl_hybrid.algorithms.kl import KLController
from jaxrl_hybrid.algorithms.presets import Algorithm
from jaxrl_hybrid.algorithms.running import RewardShaper
from jaxrl_hybrid.algorithms.warmup import CriticWarmup
from jaxrl_hybrid.data.dynamic_stream import DynamicStream
from jaxrl_hybrid.data.ptx import AnsweredStream
from jaxrl_hybrid.data.stream import PromptStream
from jaxrl_hybrid.errors import NumericsError, RewardError
from jaxrl_hybrid.runtime import memory
from jaxrl_hybrid.runtime.checkpoint import Checkpoints
from jaxrl_hybrid.runtime.recorder import Recorder, SilentRecorder
from jaxrl_hybrid.runtime.timers import Timers
from jaxrl_hybrid.types import LENGTH, Batch, Prompt
from jaxrl_hybrid.workers.actor import Actor
from jaxrl_hybrid.workers.constraint import Constraint
from jaxrl_hybrid.workers.critic import Critic
from jaxrl_hybrid.workers.reference import Reference
from jaxrl_hybrid.workers.reward import RewardWorker

Metrics = dict[str, float]
MAX_BAD_STEPS = 3


@dataclasses.dataclass
class Controller:
  """The roles of a run and the loop over them; absent roles are None."""

  algorithm: Algorithm
  actor: Actor
  reward: RewardWorker
  reference: Reference | None
  critic: Critic | None
  kl_controller: KLController
  shaper: RewardShaper
  constraint: Constraint | None
  group_filter: GroupFilter | None
  stream: PromptStream | DynamicStream
  ptx: AnsweredStream | None
  eval_prompts: Sequence[Prompt]
  settings: ConfigDict  # the trainer section
  critic_warmup: CriticWarmup
  checkpoints: Checkpoints
  recorder: Recorder | SilentRecorder
  step: int = 0
  bad_steps: int = 0  # in a row
  last_eval: Metrics = dataclasses.field(default_factory=dict)

  def fit(self) -> Metrics:
    """Trains to ``trainer.total_steps``; returns the last evaluation."""
    if self.step == 0 and self.settings.val_before_train and self.eval_prompts:
      self.recorder.step(0, self.evaluate())
    timers = Timers()
    while self.step < self.settings.total_steps:
      self.step += 1
      metrics = self.train_step(timers)
      if self._is_due(self.settings.test_freq) and self.eval_prompts:
        with timers("testing"):
          metrics |= self.evaluate()
      self.recorder.step(self.step, metrics | _throughput(metrics, timers))
      self._check_finite(metrics)
      # Recorded before it is saved: a resumed run never lacks a step's line. The
      # time of saving is part of the next step.
      timers = Timers()
      if self._is_due(self.settings.save_freq):
        with timers("save_checkpoint"):
          self.save()
    return self.last_eval

  def train_step(self, timers: Timers) -> Metrics:
    """One step of the algorithm: the lines of the paper."""
    batch = self.collect(timers)
    if self.constraint:
      with timers("cost"):
        batch = self.constraint.compute_costs(batch)
    with timers("old_log_prob"):
      batch = self.actor.compute_old_log_probs(batch, self.algorithm)
    if self.algorithm.needs_collision:
      with timers("collision"):
        batch = self.actor.compute_collision(batch)
    if self.reference:
      with timers("ref"):
        batch = self.reference.compute_log_probs(batch)
    if self.critic:
      with timers("values"):
        batch = self.critic.compute_values(batch)
    if self.constraint:
      with timers("cost_values"):
        batch = self.constraint.compute_values(batch)
    with timers("adv"):
      batch = self.shaper.shape(batch)
      batch = compute_advantages(
        batch,
        self.algorithm,
        self.kl_controller,
        critic_share=self.critic_warmup.share(self.step),
        multiplier=self.constraint.multiplier if self.constraint else None,
      )
    metrics = batch.metrics | _lengths(batch) | self._progress()
    if self.critic:
      with timers("update_critic"):
        metrics |= self.critic.update(batch)
    if self.constraint:
      with timers("update_cost_critic"):
        metrics |= self.constraint.update(batch)
    if self.critic_warmup.actor_learns(self.step):
      with timers("update_actor"):
        metrics |= self.actor.update_policy(
          batch, answered=self.ptx.next if self.ptx else None
        )
    metrics |= self._warm_up(metrics)
    self._show(batch)
    return metrics

  def collect(self, timers: Timers) -> Batch:
    """The scored samples of a step; DAPO samples until enough groups are mixed."""
    if self.group_filter is None:
      return self.roll_out(timers)
    batch = self.group_filter.collect(lambda: self.roll_out(timers))
    self.actor.release_generation_weights()
    return batch

  def roll_out(self, timers: Timers) -> Batch:
    """Scored samples of new prompts, and scores of greedy ones where needed."""
    prompts = self.stream.next(self.step)
    samples = self.actor.generator.settings.n
    watch = self.reward.watch([p for p in prompts for _ in range(samples)])
    with timers("gen"):
      batch = self.actor.generate_sequences(prompts, on_finished=watch)
    greedy = None
    if self.algorithm.needs_greedy_baseline:
      with timers("gen_baseline"):
        greedy = self.actor.generate_sequences(prompts, greedy=True)
    if self.reward.model or self.group_filter is None:  # else there may be more
      self.actor.release_generation_weights()
    with timers("reward"):
      batch = self.reward.compute_rewards(batch, watch)
      learned = self.stream.learn(batch.prompts, batch.scores)
      batch = batch.with_fields(metrics=learned)
      if greedy is not None:
        batch = self.add_greedy_baseline(batch, greedy)
    return batch

  def add_greedy_baseline(self, batch: Batch, greedy: Batch) -> Batch:
    """ReMax: the score of each prompt's greedy completion, by draw id."""
    result = self.reward.score(greedy)
    baseline = dict(
      zip(
        greedy.draw_ids[result.valid].tolist(),
        result.scores[result.valid].tolist(),
        strict=True,
      )
    )
    kept = [i for i, draw in enumerate(batch.draw_ids.tolist()) if draw in baseline]
    if not kept:
      raise RewardError("no greedy completion of this step got a valid reward")
    batch = batch.select(kept)
    scores = np.array([baseline[d] for d in batch.draw_ids.tolist()], np.float32)
    return batch.with_fields(
      baseline_scores=scores, metrics={"critic/baseline/mean": float(scores.mean())}
    )

  def evaluate(self) -> Metrics:
    """Greedy evaluation on the held-out prompts; prints some samples."""

    def generate(prompts: Sequence[Prompt]) -> Batch:
      batch = self.actor.generate_sequences(prompts, greedy=True)
      if self.reward.model:  # it has no room beside the generation weights
        self.actor.release_generation_weights()
      return batch

    metrics, samples = evaluation.evaluate(generate, self.reward, self.eval_prompts)
    final = self.step in (0, self.settings.total_steps)
    self.recorder.samples(self.step, "eval", samples, show=final)
    self.last_eval = metrics
    return metrics

  def save(self) -> None:
    """Writes a checkpoint of everything that the next step depends on."""
    host = {
      "step": self.step,
      "stream": self.stream.state(),
      "ptx": self.ptx.state() if self.ptx else None,
      "kl_coef": self.kl_controller.coef,
      "reward_moments": self.shaper.moments.state(),
      "value_moments": {name: role.moments.state() for name, role in self._critics()},
      "multiplier": self.constraint.multiplier.state() if self.constraint else None,
      "critic_warmup": self.critic_warmup.state(),
      "last_eval": self.last_eval,
      "updates": {name: role.state.updates for name, role in self._trained()},
    }
    self.checkpoints.save(self.step, self._arrays(), host)

  def resume(self, step: int) -> None:
    """Restores the checkpoint of a step."""
    arrays, host = self.checkpoints.restore(step, self._arrays())
    for name, role in self._trained():
      role.state.store.params = arrays[name]["params"]
      role.state.store.opt_state = arrays[name]["opt_state"]
      role.state.updates = host["updates"][name]
    self.stream.restore(host["stream"])
    if self.ptx:
      self.ptx.restore(host["ptx"])
    self.kl_controller.coef = host["kl_coef"]
    self.shaper.moments.restore(host["reward_moments"])
    for name, role in self._critics():
      role.moments.restore(host["value_moments"][name])
    if self.constraint:
      self.constraint.multiplier.restore(host["multiplier"])
    self.critic_warmup.restore(host["critic_warmup"])
    self.last_eval = host["last_eval"]
    self.step = host["step"]

  def _warm_up(self, metrics: Metrics) -> Metrics:
    """Whether the warm-up of the critic ends here; its share in this step."""
    if not self.critic_warmup.is_used:
      return {}
    share = self.critic_warmup.share(self.step)
    self.critic_warmup.look(self.step, metrics.get("critic/vf_explained_var", 0.0))
    return {"critic/share": share}

  def _trained(self) -> list[tuple[str, Any]]:
    return [("actor", self.actor), *self._critics()]

  def _critics(self) -> list[tuple[str, Critic]]:
    costs = self.constraint.critic if self.constraint else None
    roles = [("critic", self.critic), ("cost_critic", costs)]
    return [(name, role) for name, role in roles if role]

  def _arrays(self) -> dict[str, Any]:
    return {
      name: {"params": role.state.store.params, "opt_state": role.state.store.opt_state}
      for name, role in self._trained()
    }

  def _is_due(self, frequency: int) -> bool:
    last = self.step == self.settings.total_steps
    return frequency > 0 and (last or self.step % frequency == 0)

  def _check_finite(self, metrics: Metrics) -> None:
    """Stops before a run of skipped updates looks like training."""
    skipped = [
      name
      for name, _ in self._trained()
      if metrics.get(f"{name}/skipped_updates", 0.0) > 0
    ]
    self.bad_steps = self.bad_steps + 1 if skipped else 0
    if skipped:
      logging.warning(
        "step %d: loss or gradient of %s is not finite; the update was skipped",
        self.step,
        " and ".join(skipped),
      )
    if self.bad_steps >= MAX_BAD_STEPS:
      raise NumericsError(
        f"{self.bad_steps} steps in a row had a loss or gradient that is not finite "
        f"(last: step {self.step}); those updates were skipped. Expected "
        "finite rewards and weights and a stable optim.lr"
      )

  def _progress(self) -> Metrics:
    return {"training/global_step": self.step, "training/epoch": self.stream.epoch}

  def _show(self, batch: Batch) -> None:
    if not batch.mask.any():
      logging.warning("step %d: every sequence is masked, the loss is 0", self.step)
    due = self._is_due(self.settings.test_freq)
    self.recorder.samples(
      self.step,
      "train",
      evaluation.to_samples(batch),
      show=due and self.step == self.settings.total_steps,
    )


def _lengths(batch: Batch) -> Metrics:
  metrics = {}
  for name, lengths in (
    ("response_length", batch.response_lengths),
    ("prompt_length", batch.prompt_lengths),
  ):
    metrics |= {
      f"{name}/mean": float(lengths.mean()),
      f"{name}/max": float(lengths.max()),
      f"{name}/min": float(lengths.min()),
    }
  clipped = [reason == LENGTH for reason in batch.finish_reasons]
  total = int(batch.response_lengths.sum() + batch.prompt_lengths.sum())
  return metrics | {
    "response_length/clip_ratio": float(np.mean(clipped)),
    "perf/total_num_tokens": total,
  }


def _throughput(metrics: Metrics, timers: Timers) -> Metrics:
  timing = timers.metrics()
  idle = (
    timing.get(f"timing_s/{name}", 0.0) for name in ("testing", "save_checkpoint")
  )
  seconds = timing["timing_s/step"] - sum(idle)
  return timing | {
    "perf/throughput": metrics["perf/total_num_tokens"] / seconds,
    "perf/time_per_step": timing["timing_s/step"],
    **memory.peak_metrics(),
  }
