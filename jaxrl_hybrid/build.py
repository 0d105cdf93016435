"""From an inspected plan to the roles of a run, on their mesh."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from jaxrl_hybrid import adapting
from jaxrl_hybrid import config as config_lib
from jaxrl_hybrid.algorithms.kl import KLController
from jaxrl_hybrid.controller import Controller
from jaxrl_hybrid.inspection import Plan, make_algorithm
from jaxrl_hybrid.models import params as params_lib
from jaxrl_hybrid.models.adapters import HEAD
from jaxrl_hybrid.models.decoder import Decoder
from jaxrl_hybrid.models.hf.load import load_params
from jaxrl_hybrid.models.hf.peft import save_adapters
from jaxrl_hybrid.models.params import Params
from jaxrl_hybrid.ops import attention
from jaxrl_hybrid.parallel import abstract
from jaxrl_hybrid.parallel import weights as weights_lib
from jaxrl_hybrid.parallel.adapters import AdapterLayout, Merger
from jaxrl_hybrid.parallel.experts import sharded_mixture
from jaxrl_hybrid.parallel.hybrid import HybridEngine
from jaxrl_hybrid.parallel.rules import Layout
from jaxrl_hybrid.parallel.weights import WeightLayout
from jaxrl_hybrid.rollout.engine import Engine
from jaxrl_hybrid.rollout.sampling import Sampling
from jaxrl_hybrid.runtime import processes
from jaxrl_hybrid.runtime.checkpoint import Checkpoints
from jaxrl_hybrid.runtime.recorder import make_recorder
from jaxrl_hybrid.workers.actor import Actor, ActorSettings
from jaxrl_hybrid.workers.adapted import Frozen
from jaxrl_hybrid.workers.chunks import Chunks
from jaxrl_hybrid.workers.critic import Critic, CriticSettings
from jaxrl_hybrid.workers.generator import Generator, RolloutSettings
from jaxrl_hybrid.workers.optimizer import learning_rate, make_optimizer
from jaxrl_hybrid.workers.reference import Reference
from jaxrl_hybrid.workers.stores import AnyLayout, Offload, shardings_of


def assemble(plan: Plan, run_dir: Path) -> Controller:
  """Loads weights and builds every role that the algorithm needs."""
  config, algorithm = plan.config, make_algorithm(plan.config)
  recorder = make_recorder(run_dir, config)
  actor = _loaded_actor(plan)
  checkpoints = Checkpoints(run_dir, max_to_keep=config.trainer.max_ckpt_to_keep)
  step = checkpoints.latest if config.trainer.resume_mode == "auto" else None
  step = processes.broadcast(step)
  kl_ctrl = config.algorithm.kl_ctrl
  controller = Controller(
    algorithm=algorithm,
    actor=actor,
    reward=plan.reward,
    reference=make_reference(plan, actor),
    critic=_loaded_critic(plan, actor) if algorithm.needs_critic else None,
    kl_controller=KLController(
      kl_ctrl.type, kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon
    ),
    stream=plan.stream,
    eval_prompts=plan.eval_prompts,
    settings=config.trainer,
    critic_warmup=config.critic.warmup if algorithm.needs_critic else 0,
    checkpoints=checkpoints,
    recorder=recorder,
  )
  if step is not None:
    controller.resume(step)
  processes.on_primary(lambda: recorder.open(step))
  return controller


def make_actor(plan: Plan, params: Params, frozen: Frozen | None = None) -> Actor:
  """The actor.

  Args:
    plan: of the run.
    params: stored ones, of the model or of its adapters; shapes, to compile without
      computing.
    frozen: the base of the adapters.
  """
  config = plan.config
  schedule = learning_rate(config.actor.optim, _total_updates(plan))
  return Actor(
    make_train_decoder(plan),
    params,
    trained_layout(plan),
    make_generator(plan),
    _actor_settings(config, plan.sizes),
    make_optimizer(config.actor.optim, schedule),
    schedule,
    clip_grad=config.actor.optim.clip_grad,
    where=offload_of(config),
    frozen=frozen,
  )


def make_critic(plan: Plan, params: Params, frozen: Frozen | None = None) -> Critic:
  """The critic; arguments as of ``make_actor``."""
  config, sizes = plan.config, plan.sizes
  schedule = learning_rate(config.critic.optim, _total_updates(plan))
  settings = CriticSettings(
    cliprange_value=config.critic.cliprange_value,
    loss_agg_mode=config.actor.loss_agg_mode,
    loss_scale_factor=config.actor.loss_scale_factor,
    ppo_epochs=config.actor.ppo_epochs,
    mini_rows=sizes.mini_sequences,
    micro_rows=sizes.micro_sequences,
    seed=config.seed,
  )
  return Critic(
    make_train_decoder(plan, params_lib.VALUE),
    params,
    trained_layout(plan, params_lib.VALUE),
    settings,
    make_optimizer(config.critic.optim, schedule),
    schedule,
    clip_grad=config.critic.optim.clip_grad,
    where=offload_of(config, everything=config.offload.critic),
    frozen=frozen,
  )


def planned_actor(plan: Plan) -> Actor:
  """The actor on shapes: it compiles, but computes nothing."""
  layout = trained_layout(plan)
  frozen = Frozen(layout.abstract_frozen()) if plan.lora else None
  return make_actor(plan, layout.abstract_params(), frozen)


def planned_critic(plan: Plan, actor: Actor) -> Critic:
  """The critic on shapes."""
  config, layout, frozen = plan.config, trained_layout(plan, params_lib.VALUE), None
  if plan.critic_lora and config.critic.share_base:
    frozen = actor.state.store.frozen.share()
  elif plan.critic_lora:
    frozen = Frozen(layout.abstract_frozen(), on_host=config.offload.critic)
  return make_critic(plan, layout.abstract_params(), frozen)


def make_reference(plan: Plan, actor: Actor) -> Reference | None:
  """The reference policy, if the KL is used."""
  config = plan.config
  if not (config.actor.use_kl_loss or config.algorithm.use_kl_in_reward):
    return None
  if config.actor.use_kl_loss and config.algorithm.use_kl_in_reward:
    logging.warning("the KL to the reference is both in the reward and in the loss")
  if plan.lora:
    weights = actor.state.store.frozen.weights
  else:
    weights = actor.state.weights
    if offload_of(config).streams and not config.offload.reference:
      weights = _copy(weights)  # streamed updates write into the actor's
  return Reference(
    make_train_decoder(plan),
    weights,
    plan.train_layout,
    temperature=config.rollout.temperature,
    chunk=config.model.logprob_chunk,
    micro_rows=plan.sizes.micro_sequences,
    on_host=config.offload.reference,
    shared=plan.lora is not None,
  )


def _copy(weights: Params) -> Params:
  program = jax.jit(
    lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=shardings_of(weights)
  )
  return abstract.call(program, weights)


def weight_layout(plan: Plan, head: str = params_lib.LM) -> WeightLayout:
  """How the parameters of a model with this head lie on the training mesh."""
  config = plan.config
  return WeightLayout(
    plan.source.spec,
    plan.train_layout,
    jnp.dtype(config.model.dtype),
    zero=config.mesh.zero,
    head=head,
  )


def trained_layout(plan: Plan, head: str = params_lib.LM) -> AnyLayout:
  """How what is trained lies on the mesh: the parameters, or the adapters."""
  lora = plan.lora if head == params_lib.LM else plan.critic_lora
  layout = weight_layout(plan, head)
  return layout if lora is None else AdapterLayout(layout, lora)


def make_train_decoder(plan: Plan, head: str = params_lib.LM) -> Decoder:
  """The model as training programs run it."""
  layout = weight_layout(plan, head)
  return dataclasses.replace(
    _decoder(plan, plan.train_layout),
    heads=layout.heads,
    use=trained_layout(plan, head).use,
    stages=layout.stages,
    microbatches=plan.sizes.pipeline_microbatches,
  )


def make_params(
  plan: Plan, head: str = params_lib.LM, path: str | None = None
) -> Params:
  """Loaded or random fp32 parameters, stored as the layout says."""
  layout = weight_layout(plan, head)
  path = plan.source.path if path is None else path
  abstract = layout.abstract_params()
  shardings = jax.tree.map(lambda x: x.sharding, abstract)
  if path:
    return load_params(path, layout.spec, shardings, vocab=layout.vocab, head=head)
  key = jax.random.key(plan.config.seed)

  def init() -> Params:
    params = params_lib.init_params(layout.spec, key, vocab=layout.vocab, head=head)
    if head == params_lib.VALUE:
      params["value_head"] = params_lib.init_value_head(layout.spec)
    return params

  return jax.jit(init, out_shardings=shardings)()


def restore_trained(
  plan: Plan, checkpoints: Checkpoints, step: int, head: str = params_lib.LM
) -> Params:
  """What the actor or (``VALUE``) the critic of a checkpoint has trained, whole."""
  config, layout = plan.config, trained_layout(plan, head)
  of_critic = head == params_lib.VALUE
  where = offload_of(config, everything=of_critic and config.offload.critic)
  path = ("critic" if of_critic else "actor", "params")
  if not where.streams:
    return checkpoints.restore_part(step, path, layout.abstract_params())
  chunks = Chunks(layout, where.layers_per_chunk)
  return chunks.join(checkpoints.restore_part(step, path, chunks.shapes()))


def full_params(plan: Plan, trained: Params, head: str = params_lib.LM) -> Params:
  """fp32 parameters of actor or critic, adapters merged into those of the base."""
  layout = trained_layout(plan, head)
  if not isinstance(layout, AdapterLayout):
    return trained
  own = plan.config.critic.path if head == params_lib.VALUE else ""
  return adapting.merge(layout, make_params(plan, head, own or None), trained)


def export_adapters(plan: Plan, trained: Params, out_dir: Path) -> None:
  """Writes the actor's adapters as PEFT does."""
  lora, source = plan.lora, plan.source
  save_adapters(trained, source.spec, lora, out_dir, base=source.path)


def make_weights(plan: Plan) -> Params:
  """The actor's weights alone, for generation without training."""
  params, path = make_params(plan), plan.config.model.lora.path
  if path:
    layout = trained_layout(plan)
    adapters = adapting.fresh(layout, seed=plan.config.seed, path=path)
    params = adapting.merge(layout, params, adapters)
  return jax.jit(weight_layout(plan).prepare)(params)


def make_generator(plan: Plan) -> Generator:
  """The layout switch and engine of the actor's model."""
  config, spec, layout = plan.config, plan.source.spec, plan.generation_layout
  heads = weights_lib.plan_heads(spec, layout.mesh)
  decoder = dataclasses.replace(
    _decoder(plan, layout), heads=heads, stages=layout.mesh.shape["pp"]
  )
  rollout = config.rollout
  return Generator(
    HybridEngine(weight_layout(plan), layout),
    Engine(
      decoder, layout, eos_ids=plan.eos_ids, max_rows=rollout.max_rows, seed=config.seed
    ),
    RolloutSettings(
      n=rollout.n,
      max_new=config.data.max_response_length,
      sampling=Sampling(rollout.temperature, rollout.top_k, rollout.top_p),
      mask_truncated=config.actor.mask_truncated,
    ),
    None if plan.lora is None else Merger(trained_layout(plan)),
  )


def _decoder(plan: Plan, layout: Layout) -> Decoder:
  model, spec = plan.config.model, plan.source.spec
  dtype = jnp.dtype(model.dtype)
  return Decoder(
    spec,
    dtype,
    attention.choose(
      model.attention,
      dtype=dtype,
      head_dim=spec.head_dim,
      softcap=spec.attention_softcap is not None,
      platform=layout.mesh.devices.flat[0].platform,
    ),
    layout.constrain,
    model.remat,
    mixture=sharded_mixture(layout, spec),
  )


def offload_of(config: ConfigDict, *, everything: bool = False) -> Offload:
  """What lives on the host; ``everything``: whatever the switches say."""
  section = config.offload
  return Offload(
    optimizer=section.optimizer or everything,
    params=section.params or everything,
    weights=everything,
    layers_per_chunk=section.layers_per_chunk,
  )


def _actor_settings(config: ConfigDict, sizes: config_lib.Sizes) -> ActorSettings:
  actor = config.actor
  shared = {
    field.name: actor[field.name]
    for field in dataclasses.fields(ActorSettings)
    if field.name in actor
  }
  return ActorSettings(
    **shared,
    temperature=config.rollout.temperature,
    logprob_chunk=config.model.logprob_chunk,
    mini_rows=sizes.mini_sequences,
    micro_rows=sizes.micro_sequences,
    seed=config.seed,
  )


def _loaded_actor(plan: Plan) -> Actor:
  params = make_params(plan)
  if plan.lora is None:
    return make_actor(plan, params)
  layout = trained_layout(plan)
  frozen = Frozen(adapting.freeze(layout, params))
  path = plan.config.model.lora.path
  return make_actor(
    plan, adapting.fresh(layout, seed=plan.config.seed, path=path), frozen
  )


def _loaded_critic(plan: Plan, actor: Actor) -> Critic:
  config, value = plan.config, params_lib.VALUE
  if plan.critic_lora is None:
    return make_critic(plan, make_params(plan, value, config.critic.path or None))
  layout, head = trained_layout(plan, value), None
  if config.critic.share_base:
    frozen = actor.state.store.frozen.share()
  else:
    params = make_params(plan, value, config.critic.path or None)
    head = params[HEAD]
    frozen = Frozen(adapting.freeze(layout, params), on_host=config.offload.critic)
  adapters = adapting.fresh(
    layout, seed=config.seed + 1, path=config.critic.lora.path, head=head
  )
  return make_critic(plan, adapters, frozen)


def _total_updates(plan: Plan) -> int:
  return plan.config.trainer.total_steps * plan.sizes.updates_per_step
