"""The base config, and the arithmetic that follows from it.

An experiment is a file with ``get_config()`` that starts from ``base()`` and
sets what differs. Keys whose base value is None take the default of
``algorithm.name`` (``algorithms.presets``) or of another key; ``resolve`` fills
them in, ``validate`` checks every value and combination.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict, config_dict

from jaxrl_hybrid import algorithm_checks, costs, user_files
from jaxrl_hybrid import config_checks as checks
from jaxrl_hybrid.algorithms import presets
from jaxrl_hybrid.algorithms.registry import ESTIMATORS, LOSS_KNOBS, POLICY_LOSSES
from jaxrl_hybrid.batch_sizes import Sizes, check_batch


def base() -> ConfigDict:
  """The defaults of every key; locked."""
  optional = config_dict.placeholder
  optim = lambda lr: dict(
    lr=lr,
    weight_decay=0.01,
    betas=(0.9, 0.999),
    eps=1e-8,
    clip_grad=1.0,
    schedule="constant",  # constant | linear | cosine, after the warm-up
    warmup_steps=0,
    min_lr_ratio=0.0,
  )
  lora = lambda: dict(
    rank=0,  # 0: no adapters, everything is trained
    alpha=32.0,  # scale alpha / rank
    dropout=0.0,
    targets=("all-linear",),  # or HF names of projections: ("q_proj", "v_proj")
    rslora=False,  # scale alpha / sqrt(rank)
    path="",  # PEFT directory to start from; brings rank, alpha, targets, rslora
  )
  config = ConfigDict(
    dict(
      seed=0,
      mesh=dict(
        train=(1, 1, 1),  # (pp, tp, dp)
        generation=(1, 1),  # (p_g, t_g): what of pp and tp generation keeps
        zero=1,  # spread over dp: 1 parameters, gradients, moments; 3 weights too
        sequence_parallel=False,  # activations between products spread over tp
        pipeline_microbatches=optional(int),  # default: all of a mini-batch
        fake_devices=0,  # n > 0: n CPU devices in all instead of real ones
        distributed="auto",  # auto | off: several processes (runtime/launch.py)
      ),
      # What lives in pinned host memory between its uses.
      offload=dict(
        optimizer=False,  # moments of actor and critic
        params=False,  # fp32 parameters of actor and critic
        critic=False,  # all of the critic, its weights included
        reference=False,
        reward_model=False,
        layers_per_chunk=1,  # of each stage, that an update has on the device
      ),
      model=dict(
        path="",  # HF directory
        random=dict(),  # without a path: HF config fields of a random model
        tokenizer="",  # directory, or task:NAME for a task's own symbols;
        # empty: model.path
        # Of products: float32, bfloat16, or float16 (forward float16, backward
        # bfloat16: the log-probs of trainer and engine agree eight times better).
        dtype="float16",
        attention="auto",  # auto | xla | cudnn
        remat="full",  # none | products | attention | full | stage (models/decoder.py)
        logprob_chunk=2048,  # tokens of a device whose logits exist at a time
        lora=lora(),  # of the actor
      ),
      data=dict(
        train_files=(),
        eval_files=(),
        ptx_files=(),  # prompts with answers, for actor.ptx_coef
        ptx_key="response",  # column of the answer
        prompt_key="prompt",
        string_prompts="plain",  # plain | user: a string is a chat's user message
        system_prompt=optional(str),
        chat_template=optional(str),  # file; default: the tokenizer's
        max_prompt_length=512,
        max_response_length=512,
        overlong_prompts="drop",  # drop | truncate_left | error
        skip_bad_rows=False,
        train_batch_size=32,
        shuffle=True,
        curriculum=(),  # ((first_step, max_level), ...) on column `level`
        sampler=dict(
          name="passes",  # passes over the data | dynamic: rows by weight
          weight_fn="",  # FILE.py:FUNCTION of a row; empty: 1 for all rows
          domain_boost=(),  # (("code", 2.0), ("math", 1.5)): factors of weights
          domain_key="domain",  # the column that domain_boost looks at
          # Rows that are always or never answered rightly are drawn less.
          pass_score=1.0,  # the least score of a right answer
          floor=0.1,  # the least factor of a row; 1: nothing is learned
          decay=0.5,  # of what was learned of a row, when it is drawn again
        ),
      ),
      rollout=dict(
        n=optional(int),  # samples of a prompt; default: 8 to compare them, else 1
        temperature=1.0,
        top_k=-1,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        stop=(),  # strings that end a response, which keeps them
        max_rows=256,  # that decode together, if the memory is there
        prefill_tokens=8192,  # of prompts, per device and program
        cache_fraction=0.8,  # of a device's free memory, most that the KV cache takes
      ),
      rewards=dict(
        functions=("exact_match",),
        weights=(1.0,),
        on_error="raise",  # raise | zero | skip
        timeout_s=60.0,
        num_workers=8,
        skip_special_tokens=True,
        overlong_buffer=0,  # last tokens before max_response_length with a penalty
        overlong_penalty=1.0,  # at max_response_length
      ),
      # One more term of the reward: a sequence classifier with one label.
      reward_model=dict(
        path="",  # HF directory with its own tokenizer; empty: there is none
        random=dict(),  # without a path: HF config fields of a random model
        weight=1.0,
        max_length=optional(int),  # of prompt and response; default: the model's
      ),
      # Safe RLHF: what must stay below a limit, with a multiplier as its price.
      cost=dict(
        functions=(),
        weights=(),
        model=dict(path="", random=dict(), weight=1.0, max_length=optional(int)),
        critic_path="",  # what the cost's critic starts from; default: model.path
        limit=0.0,  # mean cost of a response
        multiplier=1.0,  # at the start
        multiplier_lr=0.1,
        multiplier_max=10.0,
      ),
      algorithm=dict(
        name="grpo",  # a preset; or an estimator or a loss: GRPO with that one
        module="",  # the user's own file or module; it registers names for here
        adv_estimator=optional(str),
        gamma=1.0,
        lam=1.0,
        norm_adv_by_std_in_grpo=optional(bool),
        whiten_advantages=optional(bool),
        normalize_rewards=False,  # by the mean and std of all scores so far
        reward_clip=optional(float),  # rewards in [-c, c], after that
        use_cost=optional(bool),  # the section `cost`
        use_kl_in_reward=False,
        kl_penalty="k1",
        kl_ctrl=dict(type="fixed", kl_coef=0.001, target_kl=0.1, horizon=10_000),
        # DAPO: sample until enough groups have samples of different scores.
        filter_groups=dict(
          enable=optional(bool),
          metric="",  # a reward function's name; empty: the whole score
          max_num_gen_batches=10,
        ),
        # For the gap between the engine's log-probs and the trainer's.
        rollout_correction=dict(
          rollout_is="off",  # off | token | sequence: importance weights
          rollout_is_threshold=2.0,  # that are cut here
          rollout_is_lower=optional(float),  # if set: 0 outside of both (IcePop)
          rollout_is_batch_normalize=False,
          rollout_rs=(),  # what is left out: token_k1, seq_mean_k3, ...
          rollout_rs_threshold=(),  # one for each of them
          bypass_mode=False,  # the engine's log-probs are the old ones
        ),
      ),
      actor=dict(
        policy_loss=optional(str),
        loss_agg_mode=optional(str),
        loss_scale_factor=optional(float),  # default: max_response_length
        clip_ratio=optional(float),  # both sides, where they are not set
        clip_ratio_low=optional(float),
        clip_ratio_high=optional(float),
        clip_ratio_c=optional(float),  # dual clip; dppo: most of a ratio
        clip_cov_ratio=2e-4,  # share of tokens that clip_cov selects
        clip_cov_lb=1.0,  # and between which covariances
        clip_cov_ub=5.0,
        kl_cov_ratio=2e-4,  # share of tokens that kl_cov holds back
        ppo_kl_coef=0.1,  # and how much
        sapo_tau_pos=1.0,  # temperature of sapo's gate for advantages > 0
        sapo_tau_neg=1.05,
        dro_beta=0.1,
        entropy_coeff=0.0,
        use_kl_loss=False,
        kl_loss_coef=0.001,
        kl_loss_type="k3",  # "+" behind it: its value with the gradient of k2
        # Toward the actor's own answers when it is told these texts.
        style=dict(
          reference_texts=(),  # instructions; empty: no such loss
          weight=0.3,
          method="distill",  # or embedding: texts are samples
        ),
        router_aux_loss_coef=0.0,  # load balance of experts, of each micro-batch
        mask_truncated=False,  # drop rows without EOS from the loss
        ptx_coef=0.0,  # of the loss of answers that are given (data.ptx_files)
        ptx_batch_size=optional(int),  # of them per update; default: the mini-batch's
        ppo_mini_batch_size=optional(int),  # in prompts; default: the batch
        ppo_micro_batch_size_per_device=optional(int),  # in sequences
        ppo_epochs=1,
        optim=optim(1e-6),
      ),
      critic=dict(
        path="",
        share_base=False,  # adapters and value head on the actor's frozen weights
        cliprange_value=0.5,
        normalize_values=False,  # learns returns at mean 0 and std 1 of all so far
        warmup=0,  # steps in which the critic alone learns, to predict rewards
        full_steps=optional(int),  # until it has taken over; default: warmup
        warmup_explained_var=optional(float),  # that ends the warm-up early
        lora=lora(),
        optim=optim(1e-5),
      ),
      trainer=dict(
        total_steps=100,
        run_dir="",  # empty: runs/<config>-<time>
        project="jaxrl_hybrid",
        experiment="",
        trackers=(),  # beside metrics.jsonl: tensorboard, wandb
        test_freq=10,
        val_before_train=True,
        eval_max_prompts=512,
        save_freq=50,
        max_ckpt_to_keep=2,  # 0: no checkpoints
        resume_mode="auto",  # auto | disable
        export_hf=True,
        sample_rows=4,
        pack_sequences=True,  # several in a row, where that saves rows
        compile_cache="auto",  # auto: in the user's cache directory | off | directory
      ),
    )
  )
  return config.lock()


def resolve(config: ConfigDict) -> ConfigDict:
  """A copy with every None that has a default filled in.

  Raises:
    ConfigError: the algorithm's name is unknown.
  """
  config = config.copy_and_resolve_references()
  load_module(config)
  checks.one_of(config, "algorithm.name", presets.names())
  checks.check_mesh(config)
  with config.unlocked():
    actor = config.actor
    for side in ("clip_ratio_low", "clip_ratio_high"):
      if actor[side] is None:
        actor[side] = actor.clip_ratio
    for key, value in presets.preset(config.algorithm.name).items():
      *path, name = key.split(".")
      section = checks.get(config, ".".join(path))
      if section[name] is None:
        section[name] = value
    if config.rollout.n is None:
      config.rollout.n = _default_samples(config.algorithm)
    if config.critic.full_steps is None:
      config.critic.full_steps = config.critic.warmup
    if actor.loss_scale_factor is None:
      actor.loss_scale_factor = float(config.data.max_response_length)
    if actor.ppo_mini_batch_size is None:
      actor.ppo_mini_batch_size = config.data.train_batch_size
    if actor.ptx_batch_size is None:
      actor.ptx_batch_size = actor.ppo_mini_batch_size * config.rollout.n
    pp, _, dp = config.mesh.train
    per_shard = max(1, actor.ppo_mini_batch_size * config.rollout.n // dp)
    if actor.ppo_micro_batch_size_per_device is None:
      actor.ppo_micro_batch_size_per_device = _default_micro(per_shard, pp)
    if config.mesh.pipeline_microbatches is None:
      whole = max(1, per_shard // actor.ppo_micro_batch_size_per_device)
      config.mesh.pipeline_microbatches = whole if pp > 1 else 1
  return config


def load_module(config: ConfigDict) -> None:
  """Imports ``algorithm.module``, whose estimators and losses have names then.

  Raises:
    ConfigError: it is not there or fails.
  """
  if config.algorithm.module:
    user_files.load(config.algorithm.module, "algorithm.module")


def _default_samples(algorithm: ConfigDict) -> int:
  estimator = ESTIMATORS.get(algorithm.adv_estimator)  # an unknown one is said later
  compares = estimator is not None and estimator.min_group_size > 1
  return 8 if compares or algorithm.filter_groups.enable else 1


def _default_micro(per_shard: int, pp: int) -> int:
  """All sequences of a dp shard, or with pp > 1 enough parts to keep stages busy."""
  wanted = 1 if pp == 1 else 4 * pp
  parts = [n for n in range(1, per_shard + 1) if per_shard % n == 0]
  enough = [n for n in parts if n >= wanted]
  return per_shard // (enough[0] if enough else parts[-1])


def validate(config: ConfigDict, *, training: bool = True) -> Sizes:
  """Checks a resolved config and returns the derived sizes.

  Args:
    config: the resolved config.
    training: whether there must be training data.

  Raises:
    ConfigError: says what was expected, what came and the key to change.
  """
  checks.check_choices(config)
  checks.check_ranges(config)
  checks.check_mesh(config)
  checks.check_rewards(config)
  checks.check_reward_model(config)
  algorithm_checks.check_algorithm(config)
  costs.check_cost(config)
  _warn_of_unused_knobs(config)
  checks.check_warmup(config)
  checks.check_lora(config)
  if training:
    checks.check_data(config)
  return check_batch(config)


def _warn_of_unused_knobs(config: ConfigDict) -> None:
  """Knobs of one policy loss that the chosen one does not look at."""
  loss, default = POLICY_LOSSES[config.actor.policy_loss], base().actor
  unused = [
    f"actor.{name}"
    for name in LOSS_KNOBS
    if name not in (*loss.knobs, *loss.select_knobs)
    and default[name] is not None  # those of many losses come with the preset
    and config.actor[name] != default[name]
  ]
  if unused:
    logging.warning(
      "actor.policy_loss=%s does not use %s", config.actor.policy_loss, unused
    )


def flatten(config: ConfigDict, prefix: str = "") -> Iterator[tuple[str, Any]]:
  """Yields (dotted key, value) of all leaves."""
  for key, value in config.items():
    if isinstance(value, ConfigDict) and len(value):
      yield from flatten(value, f"{prefix}{key}.")
    else:
      yield prefix + key, value
