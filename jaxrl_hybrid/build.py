"""From an inspected plan to the roles of a run, on their mesh."""

from __future__ import annotations

import dataclasses
import logging

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from jaxrl_hybrid import adapting, styling
from jaxrl_hybrid import config as config_lib
from jaxrl_hybrid.algorithms.kl import KLController
from jaxrl_hybrid.data.template import PromptEncoder
from jaxrl_hybrid.inspection import make_encoder
from jaxrl_hybrid.models import params as params_lib
from jaxrl_hybrid.models.adapters import HEAD
from jaxrl_hybrid.models.decoder import Decoder
from jaxrl_hybrid.models.params import Params
from jaxrl_hybrid.ops import attention
from jaxrl_hybrid.parallel import abstract
from jaxrl_hybrid.parallel import weights as weights_lib
from jaxrl_hybrid.parallel.adapters import Merger
from jaxrl_hybrid.parallel.experts import sharded_mixture
from jaxrl_hybrid.parallel.hybrid import HybridEngine
from jaxrl_hybrid.parallel.rules import Layout
from jaxrl_hybrid.role_params import (
  make_weights,
  offload_of,
  starting_params,
  trained_layout,
  weight_layout,
)
from jaxrl_hybrid.rollout.engine import Engine
from jaxrl_hybrid.rollout.sampling import Sampling
from jaxrl_hybrid.rollout.stop import StopStrings
from jaxrl_hybrid.run_plan import Plan
from jaxrl_hybrid.workers.actor import Actor, ActorSettings
from jaxrl_hybrid.workers.adapted import Frozen
from jaxrl_hybrid.workers.critic import Critic, CriticSettings
from jaxrl_hybrid.workers.generator import Generator, RolloutSettings
from jaxrl_hybrid.workers.optimizer import learning_rate, make_optimizer
from jaxrl_hybrid.workers.reference import Reference
from jaxrl_hybrid.workers.reward import RewardWorker
from jaxrl_hybrid.workers.reward_model import RewardModel
from jaxrl_hybrid.workers.stores import shardings_of
from jaxrl_hybrid.workers.style import StyleTeacher


def make_kl_controller(config: ConfigDict) -> KLController:
  """Of the KL in the reward."""
  section = config.algorithm.kl_ctrl
  return KLController(section.type, section.kl_coef, section.target_kl, section.horizon)


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
    share_rows=config.trainer.pack_sequences,
    seed=config.seed,
    normalize_values=config.critic.normalize_values,
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
  return _frozen_actor(plan, actor)


def make_teacher(
  plan: Plan, actor: Actor, reference: Reference | None = None
) -> StyleTeacher | None:
  """What ``actor.style`` compares with, if it is used.

  Args:
    plan: of the actor.
    actor: as it is now is what reads the style.
    reference: the same, if there is one already.
  """
  if styling.constraint_of(plan.config) is None:
    return None
  tokenizer = plan.source.tokenizer
  encoder = None if tokenizer is None else make_encoder(plan.config, tokenizer)
  reference = reference or _frozen_actor(plan, actor)
  return styling.make_teacher(plan, make_train_decoder(plan), reference, encoder)


def _frozen_actor(plan: Plan, actor: Actor) -> Reference:
  config = plan.config
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
    share_rows=config.trainer.pack_sequences,
    on_host=config.offload.reference,
    shared=plan.lora is not None,
  )


def make_reward(plan: Plan) -> RewardWorker:
  """The reward functions and, if there is one, the reward model with its weights."""
  if plan.reward_model is None:
    return plan.reward
  own = plan.of_reward_model
  return plan.reward.with_model(
    make_reward_model(plan, make_weights(own, params_lib.VALUE, fresh_head=False))
  )


def make_reward_model(plan: Plan, weights: Params) -> RewardModel:
  """The reward model of an actor's plan; ``weights`` may be shapes."""
  config, own = plan.config, plan.of_reward_model
  encode = None
  if plan.re_encodes:
    encoder = PromptEncoder(
      own.source.tokenizer, chat_template=None, system_prompt=config.data.system_prompt
    )
    encode = lambda prompt, text: encoder.encode_answered(prompt.prompt, text)
  return RewardModel(
    make_train_decoder(own, params_lib.VALUE),
    weights,
    own.train_layout,
    micro_rows=plan.sizes.micro_sequences,
    share_rows=config.trainer.pack_sequences,
    max_length=plan.reward_model_length,
    encode=encode,
    on_host=config.offload.reward_model,
  )


def _copy(weights: Params) -> Params:
  program = jax.jit(
    lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=shardings_of(weights)
  )
  return abstract.call(program, weights)


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
      decoder,
      layout,
      eos_ids=plan.eos_ids,
      max_rows=rollout.max_rows,
      seed=config.seed,
      prefill_tokens=rollout.prefill_tokens,
      cache_fraction=rollout.cache_fraction,
      longest=(
        config.data.max_prompt_length,
        config.data.max_prompt_length + config.data.max_response_length,
      ),
    ),
    RolloutSettings(
      n=rollout.n,
      max_new=config.data.max_response_length,
      sampling=Sampling(
        rollout.temperature,
        rollout.top_k,
        rollout.top_p,
        rollout.min_p,
        rollout.repetition_penalty,
      ),
      mask_truncated=config.actor.mask_truncated,
      stop=StopStrings(plan.source.tokenizer, rollout.stop) if rollout.stop else None,
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
    _inner(dtype),
    mixture=sharded_mixture(layout, spec),
    batch_shards=layout.batch_shards,
  )


def _inner(dtype: jnp.dtype) -> jnp.dtype:
  """What column-parallel products give in training: half the bytes in bfloat16.

  In float16, which is there to round little, the distance of log-probs to those of
  float32 would grow from 1.4e-3 to 1.8e-3 (SmolLM2 on GSM8K; bfloat16 1.1e-2, 1.4e-2).
  """
  return jnp.dtype(jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32)


def _actor_settings(config: ConfigDict, sizes: config_lib.Sizes) -> ActorSettings:
  actor = config.actor
  shared = {
    field.name: actor[field.name]
    for field in dataclasses.fields(ActorSettings)
    if field.name in actor and field.name != "style"
  }
  return ActorSettings(
    **shared,
    bypass=config.algorithm.rollout_correction.bypass_mode,
    style=styling.constraint_of(config),
    temperature=config.rollout.temperature,
    logprob_chunk=config.model.logprob_chunk,
    mini_rows=sizes.mini_sequences,
    micro_rows=sizes.micro_sequences,
    share_rows=config.trainer.pack_sequences,
    seed=config.seed,
  )


def actor_from(plan: Plan, params: Params) -> Actor:
  """The actor that starts from ``starting_params`` of its model."""
  if plan.lora is None:
    return make_actor(plan, params)
  layout = trained_layout(plan)
  frozen = Frozen(adapting.freeze(layout, params))
  path = plan.config.model.lora.path
  return make_actor(
    plan, adapting.fresh(layout, seed=plan.config.seed, path=path), frozen
  )


def critic_from(plan: Plan, params: Params) -> Critic:
  """The critic that starts from ``starting_params`` of its model."""
  if plan.critic_lora is None:
    return make_critic(plan, params)
  layout = trained_layout(plan, params_lib.VALUE)
  on_host = plan.config.offload.critic
  frozen = Frozen(adapting.freeze(layout, params), on_host=on_host)
  return _adapted_critic(plan, frozen, params[HEAD])


def loaded_critic(plan: Plan, actor: Actor) -> Critic:
  """The critic of the config, with its weights."""
  if plan.config.critic.share_base:
    return _adapted_critic(plan, actor.state.store.frozen.share(), None)
  own = plan.of_critic
  return critic_from(own, starting_params(own, params_lib.VALUE))


def _adapted_critic(plan: Plan, frozen: Frozen, head: Params | None) -> Critic:
  config, layout = plan.config, trained_layout(plan, params_lib.VALUE)
  adapters = adapting.fresh(
    layout, seed=config.seed + 1, path=config.critic.lora.path, head=head
  )
  return make_critic(plan, adapters, frozen)


def _total_updates(plan: Plan) -> int:
  return plan.config.trainer.total_steps * plan.sizes.updates_per_step
