"""What each value of a config may be; ``config.validate`` calls these in order."""

from __future__ import annotations

import difflib
import math
from typing import Any

from ml_collections import ConfigDict

from jaxrl_hybrid.algorithms import kl, reduce
from jaxrl_hybrid.algorithms.correction import LEVELS
from jaxrl_hybrid.algorithms.registry import (
  ESTIMATORS,
  POLICY_LOSSES,
)
from jaxrl_hybrid.errors import ConfigError
from jaxrl_hybrid.models.decoder import REMAT
from jaxrl_hybrid.ops.attention import IMPLEMENTATIONS
from jaxrl_hybrid.parallel.weights import ZERO
from jaxrl_hybrid.workers.style_loss import METHODS


def check_choices(config: ConfigDict) -> None:
  """Values from a list; a wrong one names the nearest."""
  for key, choices in {
    "algorithm.adv_estimator": ESTIMATORS,
    "algorithm.kl_penalty": kl.ESTIMATORS,
    "algorithm.kl_ctrl.type": ("fixed", "adaptive"),
    "algorithm.rollout_correction.rollout_is": LEVELS,
    "actor.policy_loss": POLICY_LOSSES,
    "actor.loss_agg_mode": reduce.AGGREGATIONS,
    "actor.kl_loss_type": kl.LOSSES,
    "actor.optim.schedule": ("constant", "linear", "cosine"),
    "critic.optim.schedule": ("constant", "linear", "cosine"),
    "model.dtype": ("float32", "bfloat16", "float16"),
    "model.attention": IMPLEMENTATIONS,
    "model.remat": REMAT,
    "mesh.zero": ZERO,
    "mesh.distributed": ("auto", "off"),
    "data.string_prompts": ("plain", "user"),
    "actor.style.method": METHODS,
    "data.sampler.name": ("passes", "dynamic"),
    "data.overlong_prompts": ("drop", "truncate_left", "error"),
    "rewards.on_error": ("raise", "zero", "skip"),
    "trainer.resume_mode": ("auto", "disable"),
  }.items():
    one_of(config, key, choices)


def check_ranges(config: ConfigDict) -> None:
  """Numbers and their bounds."""
  positive = (
    "data.max_prompt_length",
    "data.max_response_length",
    "data.train_batch_size",
    "rollout.n",
    "rollout.max_rows",
    "rollout.prefill_tokens",
    "rollout.repetition_penalty",
    "rewards.timeout_s",
    "rewards.overlong_penalty",
    "rewards.num_workers",
    "actor.ppo_mini_batch_size",
    "actor.ppo_micro_batch_size_per_device",
    "actor.ppo_epochs",
    "actor.ptx_batch_size",
    "actor.optim.lr",
    "actor.optim.clip_grad",
    "actor.clip_ratio_low",
    "actor.clip_ratio_high",
    "actor.loss_scale_factor",
    "actor.style.weight",
    "critic.optim.lr",
    "critic.optim.clip_grad",
    "critic.cliprange_value",
    "actor.kl_cov_ratio",
    "actor.clip_cov_ratio",
    "actor.sapo_tau_pos",
    "actor.sapo_tau_neg",
    "trainer.total_steps",
    "trainer.max_ckpt_to_keep",
    "trainer.eval_max_prompts",
    "model.logprob_chunk",
    "mesh.pipeline_microbatches",
    "offload.layers_per_chunk",
    "algorithm.kl_ctrl.horizon",
    "algorithm.kl_ctrl.target_kl",
  )
  for key in positive:
    _require(config, key, lambda v: 0 < v < math.inf, "> 0 and finite")
  for key in (
    "trainer.test_freq",
    "trainer.save_freq",
    "critic.warmup",
    "trainer.sample_rows",
    "actor.optim.warmup_steps",
    "critic.optim.warmup_steps",
    "mesh.fake_devices",
    "seed",
  ):
    _require(config, key, lambda v: v >= 0, ">= 0")
  for key in (
    "actor.optim.weight_decay",
    "critic.optim.weight_decay",
    "actor.optim.min_lr_ratio",
    "critic.optim.min_lr_ratio",
    "actor.kl_loss_coef",
    "actor.ppo_kl_coef",
    "actor.ptx_coef",
    "actor.dro_beta",
    "actor.router_aux_loss_coef",
    "algorithm.kl_ctrl.kl_coef",
  ):
    _require(config, key, lambda v: 0 <= v < math.inf, ">= 0 and finite")
  for key in ("actor.optim.betas", "critic.optim.betas"):
    _require(config, key, _is_betas, "two numbers in [0, 1)")
  for key in ("algorithm.gamma", "algorithm.lam"):
    _require(config, key, lambda v: 0 <= v <= 1, "in [0, 1]")
  _require(
    config,
    "rollout.temperature",
    lambda v: 0 < v < math.inf,
    "> 0 (sampling and training share it; evaluation is greedy anyway)",
  )
  _require(config, "rollout.top_p", lambda v: 0 < v <= 1, "in (0, 1]")
  _require(config, "rollout.min_p", lambda v: 0 <= v < 1, "in [0, 1)")
  _require(config, "rollout.cache_fraction", lambda v: 0 < v <= 1, "in (0, 1]")
  for key in ("rollout.stop", "actor.style.reference_texts"):
    _require(config, key, _are_strings, "strings, none of them empty")
  _require(config, "rollout.top_k", lambda v: v == -1 or v >= 1, "-1 (off) or >= 1")
  _require(config, "actor.clip_ratio_c", lambda v: v > 1, "> 1")
  if config.algorithm.reward_clip is not None:
    _require(config, "algorithm.reward_clip", lambda v: 0 < v < math.inf, "> 0")


def check_data(config: ConfigDict) -> None:
  """What training draws from."""
  if not config.data.train_files:
    raise ConfigError("data.train_files: expected at least one file, got none")
  if bool(config.data.ptx_files) != (config.actor.ptx_coef > 0):
    raise ConfigError(
      "data.ptx_files and actor.ptx_coef belong together: expected files and a number "
      f"> 0, or neither, got {tuple(config.data.ptx_files)} and "
      f"{config.actor.ptx_coef}"
    )
  _check_sampler(config)


def _check_sampler(config: ConfigDict) -> None:
  """Weights, and that they are not asked of passes over the data."""
  sampler = config.data.sampler
  _require(config, "data.sampler.pass_score", math.isfinite, "a finite number")
  _require(config, "data.sampler.floor", lambda v: 0 < v <= 1, "in (0, 1]")
  _require(config, "data.sampler.decay", lambda v: 0 <= v <= 1, "in [0, 1]")
  _require(config, "data.sampler.domain_boost", _are_factors, 'pairs (("code", 2.0), )')
  if sampler.name == "passes" and (sampler.weight_fn or sampler.domain_boost):
    raise ConfigError(
      "data.sampler: weight_fn and domain_boost need data.sampler.name=dynamic, got "
      "passes, which takes every row once"
    )
  if sampler.name == "dynamic" and not config.data.shuffle:
    raise ConfigError(
      "data.shuffle: expected True with data.sampler.name=dynamic, which draws at "
      "random, got False"
    )


def _are_factors(value: Any) -> bool:
  return isinstance(value, tuple | list) and all(
    isinstance(pair, tuple | list)
    and len(pair) == 2
    and isinstance(pair[0], str)
    and isinstance(pair[1], int | float)
    and 0 < pair[1] < math.inf
    for pair in value
  )


def check_mesh(config: ConfigDict) -> None:
  """The shapes of both meshes."""
  for key, names in (("mesh.train", "(pp, tp, dp)"), ("mesh.generation", "(p_g, t_g)")):
    value = get(config, key)
    size = names.count(",") + 1
    if len(value) != size or any(type(v) is not int or v < 1 for v in value):
      raise ConfigError(f"{key}: expected {size} integers >= 1 {names}, got {value}")
  pp, tp, _ = config.mesh.train
  p_g, t_g = config.mesh.generation
  if pp % p_g or tp % t_g:
    raise ConfigError(
      f"mesh.generation: (p_g, t_g)={(p_g, t_g)} must divide "
      f"(pp, tp)={(pp, tp)} of mesh.train"
    )


def check_rewards(config: ConfigDict) -> None:
  """Functions and weights belong together."""
  functions, weights = config.rewards.functions, config.rewards.weights
  if not functions and not has_reward_model(config):
    raise ConfigError(
      "rewards.functions: expected at least one (or a reward_model.path), got none"
    )
  if not all(isinstance(f, str) for f in functions):
    raise ConfigError(f"rewards.functions: expected names, got {tuple(functions)}")
  if not all(isinstance(w, int | float) and math.isfinite(w) for w in weights):
    raise ConfigError(f"rewards.weights: expected numbers, got {tuple(weights)}")
  if len(functions) != len(weights):
    raise ConfigError(
      f"rewards.weights: expected {len(functions)} numbers, one per entry of "
      f"rewards.functions {tuple(functions)}, got {len(weights)}: {tuple(weights)}"
    )


def has_reward_model(config: ConfigDict) -> bool:
  """Whether a model is part of the reward."""
  return bool(config.reward_model.path or config.reward_model.random)


def check_reward_model(config: ConfigDict) -> None:
  """A random one is for plans and tests: with a real actor it would be noise."""
  section = config.reward_model
  if section.random and not section.path and config.model.path:
    raise ConfigError(
      "reward_model.random: the actor has real weights (model.path), so should the "
      "reward model: set --config.reward_model.path=DIR, or go without one by "
      "--config.reward_model.random={}"
    )
  _require(config, "reward_model.weight", math.isfinite, "a finite number")
  if section.max_length is not None:
    _require(config, "reward_model.max_length", lambda v: v > 0, "> 0")


def check_warmup(config: ConfigDict) -> None:
  """How the critic takes over."""
  critic = config.critic
  _require(
    config,
    "critic.full_steps",
    lambda v: v >= critic.warmup,
    f">= critic.warmup={critic.warmup}",
  )
  if critic.warmup_explained_var is not None:
    _require(config, "critic.warmup_explained_var", lambda v: 0 < v <= 1, "in (0, 1]")


def check_lora(config: ConfigDict) -> None:
  """Adapters, and what they make pointless or impossible."""
  for key in ("model.lora", "critic.lora"):
    _require(config, f"{key}.rank", lambda v: v >= 0, ">= 0 (0: no adapters)")
    _require(config, f"{key}.alpha", lambda v: 0 < v < math.inf, "> 0 and finite")
    _require(config, f"{key}.dropout", lambda v: 0 <= v < 1, "in [0, 1)")
    _require(config, f"{key}.targets", _is_names, "names such as ('q_proj',)")
  if has_lora(config.model.lora) and config.offload.reference:
    raise ConfigError(
      "offload.reference: expected False with model.lora, got True: the reference is "
      "the actor's own frozen base and takes no memory"
    )
  if config.critic.share_base:
    _check_shared(config)


def has_lora(section: ConfigDict) -> bool:
  """Whether a ``lora`` section asks for adapters."""
  return section.rank > 0 or bool(section.path)


def _check_shared(config: ConfigDict) -> None:
  for key in ("model.lora", "critic.lora"):
    if not has_lora(get(config, key)):
      raise ConfigError(
        f"critic.share_base: the base must be frozen for both; expected {key}.rank > 0 "
        f"or {key}.path, got neither"
      )
  if config.critic.path:
    raise ConfigError(
      "critic.path: expected none with critic.share_base (the base is model.path), "
      f"got {config.critic.path!r}; for adapters to start from use critic.lora.path"
    )


def _is_names(value: Any) -> bool:
  return len(value) > 0 and all(isinstance(name, str) for name in value)


def get(config: ConfigDict, key: str) -> Any:
  """The value at a dotted key."""
  for part in key.split("."):
    config = config[part]
  return config


def one_of(config: ConfigDict, key: str, choices: Any) -> None:
  """Raises a ConfigError unless the value at ``key`` is among ``choices``."""
  value = get(config, key)
  if value not in choices:
    near = difflib.get_close_matches(str(value), map(str, choices), 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"{key}: expected one of {sorted(choices)}, got {value!r}{hint}")


def _are_strings(value: Any) -> bool:
  return isinstance(value, tuple | list) and all(
    isinstance(x, str) and x for x in value
  )


def _is_betas(value: Any) -> bool:
  return len(value) == 2 and all(0 <= beta < 1 for beta in value)


def _require(config: ConfigDict, key: str, ok: Any, expected: str) -> None:
  value = get(config, key)
  if value is None or not ok(value):
    raise ConfigError(f"{key}: expected {expected}, got {value!r}")
