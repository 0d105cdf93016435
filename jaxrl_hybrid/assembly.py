"""From an inspected plan to the controller of a run."""

from __future__ import annotations

from pathlib import Path

from ml_collections import ConfigDict

from jaxrl_hybrid import build
from jaxrl_hybrid.algorithms.filtering import GroupFilter
from jaxrl_hybrid.algorithms.lagrange import Multiplier
from jaxrl_hybrid.algorithms.presets import Algorithm
from jaxrl_hybrid.algorithms.running import RewardShaper
from jaxrl_hybrid.algorithms.warmup import CriticWarmup
from jaxrl_hybrid.controller import Controller
from jaxrl_hybrid.inspection import make_algorithm
from jaxrl_hybrid.role_params import starting_params
from jaxrl_hybrid.run_plan import Plan
from jaxrl_hybrid.runtime import processes
from jaxrl_hybrid.runtime.checkpoint import Checkpoints
from jaxrl_hybrid.runtime.recorder import make_recorder
from jaxrl_hybrid.workers.actor import Actor
from jaxrl_hybrid.workers.constraint import Constraint


def assemble(plan: Plan, run_dir: Path) -> Controller:
  """Loads weights and builds every role that the algorithm needs."""
  config, algorithm = plan.config, make_algorithm(plan.config)
  recorder = make_recorder(run_dir, config)
  actor = build.actor_from(plan, starting_params(plan))
  checkpoints = Checkpoints(run_dir, max_to_keep=config.trainer.max_ckpt_to_keep)
  step = checkpoints.latest if config.trainer.resume_mode == "auto" else None
  step = processes.broadcast(step)
  reference = build.make_reference(plan, actor)
  actor.teacher = build.make_teacher(plan, actor, reference)
  controller = Controller(
    algorithm=algorithm,
    actor=actor,
    reward=build.make_reward(plan),
    reference=reference,
    critic=build.loaded_critic(plan, actor) if algorithm.needs_critic else None,
    kl_controller=build.make_kl_controller(config),
    shaper=RewardShaper(
      config.algorithm.normalize_rewards, config.algorithm.reward_clip
    ),
    constraint=_constraint(plan, actor),
    group_filter=_group_filter(config),
    stream=plan.stream,
    ptx=plan.ptx,
    eval_prompts=plan.eval_prompts,
    settings=config.trainer,
    critic_warmup=_critic_warmup(config, algorithm),
    checkpoints=checkpoints,
    recorder=recorder,
  )
  if step is not None:
    controller.resume(step)
  processes.on_primary(lambda: recorder.open(step))
  return controller


def _constraint(plan: Plan, actor: Actor) -> Constraint | None:
  if plan.cost is None:
    return None
  section, critic = plan.config.cost, None
  if make_algorithm(plan.config).needs_critic:
    critic = build.loaded_critic(plan.cost, actor)
    critic.name = "cost_critic"
  multiplier = Multiplier(
    section.multiplier, section.limit, section.multiplier_lr, section.multiplier_max
  )
  return Constraint(build.make_reward(plan.cost), critic, multiplier)


def _critic_warmup(config: ConfigDict, algorithm: Algorithm) -> CriticWarmup:
  if not algorithm.needs_critic:
    return CriticWarmup(0, 0)
  critic = config.critic
  return CriticWarmup(critic.warmup, critic.full_steps, critic.warmup_explained_var)


def _group_filter(config: ConfigDict) -> GroupFilter | None:
  section = config.algorithm.filter_groups
  if not section.enable:
    return None
  return GroupFilter(section.metric, section.max_num_gen_batches)
