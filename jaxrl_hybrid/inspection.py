"""Everything that can be checked before weights load: config, model, data, rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxrl_hybrid import adapting, config_checks, model_source, styling
from jaxrl_hybrid import config as config_lib
from jaxrl_hybrid.algorithms.correction import Correction
from jaxrl_hybrid.algorithms.presets import Algorithm
from jaxrl_hybrid.costs import cost_config, naming_cost
from jaxrl_hybrid.data import files, weighting
from jaxrl_hybrid.data import prompts as prompts_lib
from jaxrl_hybrid.data import tokenizer as tokenizers
from jaxrl_hybrid.data.dynamic_stream import DynamicStream
from jaxrl_hybrid.data.ptx import AnsweredStream
from jaxrl_hybrid.data.stream import PromptStream
from jaxrl_hybrid.data.template import PromptEncoder
from jaxrl_hybrid.errors import ConfigError
from jaxrl_hybrid.models import params as params_lib
from jaxrl_hybrid.parallel import mesh as mesh_lib
from jaxrl_hybrid.rewards import loading
from jaxrl_hybrid.rewards.runner import RewardRunner
from jaxrl_hybrid.run_plan import Plan, layouts_of, most_positions
from jaxrl_hybrid.runtime import processes
from jaxrl_hybrid.types import Prompt
from jaxrl_hybrid.workers.reward import OVERLONG, Overlong, RewardWorker
from jaxrl_hybrid.workers.reward_model import NAME as REWARD_MODEL


def inspect(
  config: ConfigDict,
  *,
  training: bool = True,
  devices: Sequence[jax.Device] | None = None,
) -> Plan:
  """Checks config, model config, tokenizer, template, data and rewards.

  Args:
    config: a resolved config (``config.resolve``).
    training: whether the training data is read too.
    devices: of the mesh; default: those of this process's backend.

  Raises:
    JaxrlError: whatever is wrong, before weights load.
  """
  config_lib.validate(config, training=training)
  model = model_source.open_model(config.model, longest=_longest(config))
  plan = _with_judges(inspect_model(config, model, devices=devices), config)
  if config.algorithm.use_cost:
    with naming_cost():
      plan = dataclasses.replace(plan, cost=_with_judges(plan, cost_config(config)))
  encoder = make_encoder(config, model.tokenizer)
  train_data = None
  if training:
    train_data = _dataset(config, encoder, config.data.train_files)
  ptx = None
  if training and config.data.ptx_files:
    ptx = _answered(config, encoder, plan.eos_ids)
  eval_prompts, eval_total = _eval_prompts(config, encoder)
  style_tokens = 0
  if train_data:
    style_tokens = styling.extra_tokens(config, encoder, train_data.prompts[0])
    what = "model.path, with actor.style.reference_texts"
    _check_length(config, what, most_positions(model.spec) - style_tokens)
  processes.check_same(
    {
      "config": config.to_json_best_effort(sort_keys=True).encode(),
      "data.train_files": _ids(train_data.prompts if train_data else []),
      "data.eval_files": _ids(eval_prompts),
    }
  )
  return dataclasses.replace(
    plan,
    train_data=train_data,
    stream=make_stream(config, train_data) if train_data else None,
    ptx=ptx,
    eval_prompts=eval_prompts,
    eval_total=eval_total,
    style_tokens=style_tokens,
  )


def _with_judges(plan: Plan, config: ConfigDict) -> Plan:
  """The plan with what scores and values responses, by ``config``."""
  algorithm, model, longest = make_algorithm(config), plan.source, _longest(config)
  critic, critic_lora = model, None
  if algorithm.needs_critic:
    critic = model_source.open_critic(config, model, longest=longest)
    critic_lora = adapting.lora_spec(config, params_lib.VALUE, critic.spec)
  _check_length(config, "critic.path", most_positions(critic.spec))
  plan = dataclasses.replace(
    plan,
    config=config,
    critic=critic,
    critic_lora=critic_lora,
    reward_model=model_source.open_reward_model(config, model, longest=longest),
    reward=_reward(config, model.tokenizer, algorithm.min_group_size),
  )
  if plan.reward_model and not plan.re_encodes:
    _check_length(config, "reward_model.max_length", plan.reward_model_length)
  return plan


def inspect_model(
  config: ConfigDict,
  source: model_source.ModelSource,
  *,
  generates: bool = True,
  devices: Sequence[jax.Device] | None = None,
) -> Plan:
  """The plan of one model by itself: no data, no rewards.

  Args:
    config: a resolved config.
    source: the model.
    generates: whether it has to know where a completion ends.
    devices: as in ``inspect``.

  Raises:
    JaxrlError: config and model do not fit.
  """
  source = source.for_length(_longest(config))
  train_mesh = mesh_lib.train_mesh(config.mesh.train, devices)
  eos_ids = tokenizers.eos_ids(
    source.tokenizer, source.hf_config, source.generation_config
  )
  _check_model(config, source, eos_ids if generates else None)
  train_layout, generation_layout = layouts_of(config, source.spec, train_mesh)
  lora = critic_lora = None
  if generates:
    lora = adapting.lora_spec(config, params_lib.LM, source.spec)
  else:
    critic_lora = adapting.lora_spec(config, params_lib.VALUE, source.spec)
  return Plan(
    config=config,
    sizes=config_lib.validate(config, training=False),
    source=source,
    critic=source,
    reward_model=None,
    eos_ids=eos_ids,
    train_data=None,
    stream=None,
    eval_prompts=[],
    eval_total=0,
    reward=None,
    train_layout=train_layout,
    generation_layout=generation_layout,
    lora=lora,
    critic_lora=critic_lora,
  )


def make_encoder(config: ConfigDict, tokenizer: Any) -> PromptEncoder:
  """Of prompts; the tokenizer gets the template that is used, for the export."""
  encoder = PromptEncoder(
    tokenizer,
    chat_template=config.data.chat_template,
    system_prompt=config.data.system_prompt,
  )
  tokenizer.chat_template = encoder.chat_template or tokenizer.chat_template
  return encoder


def _longest(config: ConfigDict) -> int:
  return config.data.max_prompt_length + config.data.max_response_length


def make_algorithm(config: ConfigDict) -> Algorithm:
  """The algorithm section, resolved."""
  algorithm = config.algorithm
  correction = algorithm.rollout_correction
  return Algorithm(
    adv_estimator=algorithm.adv_estimator,
    gamma=algorithm.gamma,
    lam=algorithm.lam,
    norm_adv_by_std=algorithm.norm_adv_by_std_in_grpo,
    whiten_advantages=algorithm.whiten_advantages,
    use_kl_in_reward=algorithm.use_kl_in_reward,
    kl_penalty=algorithm.kl_penalty,
    correction=Correction(
      rollout_is=correction.rollout_is,
      threshold=correction.rollout_is_threshold,
      lower=correction.rollout_is_lower,
      batch_normalize=correction.rollout_is_batch_normalize,
      rejections=tuple(zip(correction.rollout_rs, correction.rollout_rs_threshold)),
      bypass=correction.bypass_mode,
    ),
  )


def _reward(config: ConfigDict, tokenizer: Any, min_group_size: int) -> RewardWorker:
  rewards = config.rewards
  functions = [loading.load_reward(reference) for reference in rewards.functions]
  given, overlong = [], None
  if config_checks.has_reward_model(config):
    given.append((REWARD_MODEL, config.reward_model.weight))
  if rewards.overlong_buffer:
    given.append((OVERLONG, 1.0))
    longest = config.data.max_response_length
    overlong = Overlong(longest, rewards.overlong_buffer, rewards.overlong_penalty)
  runner = RewardRunner(
    [(loading.reward_name(f), f) for f in functions],
    tuple(rewards.weights),
    on_error=rewards.on_error,
    timeout_s=rewards.timeout_s,
    num_workers=rewards.num_workers,
    given=given,
  )
  return RewardWorker(
    tokenizer,
    runner,
    min_group_size=min_group_size,
    skip_special_tokens=rewards.skip_special_tokens,
    overlong=overlong,
  )


def _dataset(
  config: ConfigDict, encoder: PromptEncoder, paths: tuple[str, ...]
) -> prompts_lib.PromptDataset:
  data = config.data
  rows = [
    row
    for path in paths
    for row in files.read_rows(path, skip_bad_rows=data.skip_bad_rows)
  ]
  if data.string_prompts == "user":
    rows = [_as_chat(row, data.prompt_key) for row in rows]
  return prompts_lib.build_dataset(
    rows,
    encoder,
    prompt_key=data.prompt_key,
    max_prompt_length=data.max_prompt_length,
    overlong=data.overlong_prompts,
    name=", ".join(paths),
    skip_bad_rows=data.skip_bad_rows,
  )


def _answered(
  config: ConfigDict, encoder: PromptEncoder, eos_ids: tuple[int, ...]
) -> AnsweredStream:
  data, tokenizer = config.data, encoder.tokenizer
  own = tokenizer.eos_token_id
  return AnsweredStream(
    _dataset(config, encoder, tuple(data.ptx_files)),
    tokenizer,
    eos_id=own if own in eos_ids else eos_ids[0],
    key=data.ptx_key,
    batch_size=config.actor.ptx_batch_size,
    max_length=data.max_response_length,
    seed=config.seed,
    shuffle=data.shuffle,
  )


def make_stream(
  config: ConfigDict, dataset: prompts_lib.PromptDataset
) -> PromptStream | DynamicStream:
  """What draws the prompts of each step, as ``data.sampler`` says."""
  curriculum = config.data.curriculum
  if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in curriculum):
    raise ConfigError(
      "data.curriculum: expected pairs ((first_step, max_level), ...), got "
      f"{curriculum}"
    )
  batch_size = config.data.train_batch_size
  if config.data.sampler.name == "dynamic":
    draws = _weighted_draws(config, dataset)
    return DynamicStream(dataset, draws, batch_size=batch_size, curriculum=curriculum)
  return PromptStream(
    dataset,
    batch_size=batch_size,
    seed=config.seed,
    shuffle=config.data.shuffle,
    curriculum=curriculum,
  )


def _weighted_draws(
  config: ConfigDict, dataset: prompts_lib.PromptDataset
) -> weighting.WeightedDraws:
  sampler, weight_fn = config.data.sampler, None
  if sampler.weight_fn:
    weight_fn = loading.load_object(sampler.weight_fn, "data.sampler.weight_fn")
  base = weighting.base_weights(
    [row.columns | {config.data.prompt_key: row.prompt} for row in dataset.prompts],
    weight_fn,
    dict(sampler.domain_boost),
    domain_key=sampler.domain_key,
    name=dataset.name,
  )
  processes.check_same({"data.sampler.weight_fn": base.tobytes()})
  rates = weighting.PassRates(
    len(base), pass_score=sampler.pass_score, floor=sampler.floor, decay=sampler.decay
  )
  return weighting.WeightedDraws(base, rates, seed=config.seed)


def _ids(prompts: Sequence[Prompt]) -> bytes:
  """All token ids and where each prompt ends."""
  lengths = np.array([len(prompt.ids) for prompt in prompts], np.int32)
  return b"".join([lengths.tobytes(), *(prompt.ids.tobytes() for prompt in prompts)])


def _as_chat(row: dict[str, Any], key: str) -> dict[str, Any]:
  if isinstance(row.get(key), str):
    return row | {key: [{"role": "user", "content": row[key]}]}
  return row


def _eval_prompts(
  config: ConfigDict, encoder: PromptEncoder
) -> tuple[list[Prompt], int]:
  """(a fixed sample of the evaluation prompts, how many there are in all)."""
  if not config.data.eval_files:
    return [], 0
  rows = _dataset(config, encoder, tuple(config.data.eval_files)).prompts
  order = np.random.default_rng(0).permutation(len(rows))
  chosen = [rows[i] for i in sorted(order[: config.trainer.eval_max_prompts])]
  prompts = [
    Prompt(row.ids, row.prompt, row.text, row.row_id, row.row_id, row.columns)
    for row in chosen
  ]
  return prompts, len(rows)


def _check_model(
  config: ConfigDict, model: model_source.ModelSource, eos_ids: tuple[int, ...] | None
) -> None:
  """Tokenizer, EOS ids (None: they do not matter) and lengths."""
  spec = model.spec
  known = 0 if model.tokenizer is None else len(model.tokenizer)
  if eos_ids is not None and not (eos_ids and max(eos_ids) < spec.vocab_size):
    raise ConfigError(
      f"expected EOS ids below the model's vocab_size {spec.vocab_size}, got "
      f"{list(eos_ids)} from tokenizer, config.json and generation_config.json"
    )
  if known > spec.vocab_size:
    raise ConfigError(
      f"model.tokenizer has {known} tokens but the model's vocab_size is "
      f"{spec.vocab_size}; expected the model's own tokenizer"
    )
  if config.actor.router_aux_loss_coef and spec.experts is None:
    raise ConfigError(
      f"actor.router_aux_loss_coef: {spec.family} has no experts; expected 0, got "
      f"{config.actor.router_aux_loss_coef}"
    )
  _check_length(config, "model.path", most_positions(spec))


def _check_length(config: ConfigDict, key: str, most: float) -> None:
  """Prompt and response fit the model of a key."""
  longest = _longest(config)
  if longest > most:
    raise ConfigError(
      f"data.max_prompt_length + data.max_response_length = {longest} exceeds what "
      f"{key} reads: {most} (max_position_embeddings if not set)"
    )
