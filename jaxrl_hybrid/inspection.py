"""Everything that can be checked before weights load: config, model, data, rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxrl_hybrid import adapting, model_source
from jaxrl_hybrid import config as config_lib
from jaxrl_hybrid.algorithms.presets import Algorithm
from jaxrl_hybrid.data import files
from jaxrl_hybrid.data import prompts as prompts_lib
from jaxrl_hybrid.data import tokenizer as tokenizers
from jaxrl_hybrid.data.stream import PromptStream
from jaxrl_hybrid.data.template import PromptEncoder
from jaxrl_hybrid.errors import ConfigError
from jaxrl_hybrid.models import params as params_lib
from jaxrl_hybrid.models.adapters import LoraSpec
from jaxrl_hybrid.models.params import num_params
from jaxrl_hybrid.parallel import mesh as mesh_lib
from jaxrl_hybrid.parallel import weights
from jaxrl_hybrid.parallel.rules import Layout
from jaxrl_hybrid.rewards import loading
from jaxrl_hybrid.rewards.runner import RewardRunner
from jaxrl_hybrid.runtime import processes
from jaxrl_hybrid.types import Prompt
from jaxrl_hybrid.workers.reward import RewardWorker


@dataclasses.dataclass(frozen=True)
class Plan:
  """What is known before weights load."""

  config: ConfigDict
  sizes: config_lib.Sizes
  source: model_source.ModelSource
  eos_ids: tuple[int, ...]
  train_data: prompts_lib.PromptDataset | None  # None: for evaluation only
  stream: PromptStream | None  # of train_data
  eval_prompts: list[Prompt]
  eval_total: int  # rows of which eval_prompts are a part
  reward: RewardWorker
  train_layout: Layout
  generation_layout: Layout
  lora: LoraSpec | None = None  # of the actor
  critic_lora: LoraSpec | None = None

  def describe(self) -> str:
    """What the user should see before anything expensive starts."""
    spec = self.source.spec
    lines = [
      mesh_lib.describe(self.train_layout.mesh, self.generation_layout.mesh),
      f"model: {spec.family}, {num_params(spec):,} parameters, "
      f"{self.config.model.dtype}, from {self.source.describe()}",
      self.sizes.describe(self.config.trainer.total_steps),
      f"eos ids: {list(self.eos_ids)} (union of tokenizer, config and "
      "generation_config)",
      *self.source.describe_rope(),
      *adapting.describe("actor", self.lora, spec),
      *adapting.describe("critic", self.critic_lora, spec),
      *self.source.ignored_sampling(),
      *([self.train_data.describe()] if self.train_data else []),
      f"evaluation: {len(self.eval_prompts)} of {self.eval_total} prompts, greedy",
    ]
    return "\n".join(lines)


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
  sizes = config_lib.validate(config)
  train_mesh = mesh_lib.train_mesh(config.mesh.train, devices)
  generation_mesh = mesh_lib.generation_mesh(train_mesh, config.mesh.generation)
  model = model_source.open_model(config.model, longest=_longest(config))
  eos_ids = tokenizers.eos_ids(
    model.tokenizer, model.hf_config, model.generation_config
  )
  _check_model(config, model, eos_ids)
  encoder = PromptEncoder(
    model.tokenizer,
    chat_template=config.data.chat_template,
    system_prompt=config.data.system_prompt,
  )
  # What the model is trained with is what the exported directory carries.
  model.tokenizer.chat_template = encoder.chat_template or model.tokenizer.chat_template
  algorithm = make_algorithm(config)
  train_data = None
  if training:
    train_data = _dataset(config, encoder, config.data.train_files)
  eval_prompts, eval_total = _eval_prompts(config, encoder)
  processes.check_same(
    {
      "config": config.to_json_best_effort(sort_keys=True).encode(),
      "data.train_files": _ids(train_data.prompts if train_data else []),
      "data.eval_files": _ids(eval_prompts),
    }
  )
  return Plan(
    config=config,
    sizes=sizes,
    source=model,
    eos_ids=eos_ids,
    train_data=train_data,
    stream=_stream(config, train_data) if train_data else None,
    eval_prompts=eval_prompts,
    eval_total=eval_total,
    reward=_reward(config, model.tokenizer, algorithm.min_group_size),
    train_layout=weights.train_layout(
      model.spec, train_mesh, sequence_parallel=config.mesh.sequence_parallel
    ),
    generation_layout=weights.generation_layout(model.spec, generation_mesh),
    lora=adapting.lora_spec(config, params_lib.LM, model.spec),
    critic_lora=(
      adapting.lora_spec(config, params_lib.VALUE, model.spec)
      if algorithm.needs_critic
      else None
    ),
  )


def _longest(config: ConfigDict) -> int:
  return config.data.max_prompt_length + config.data.max_response_length


def make_algorithm(config: ConfigDict) -> Algorithm:
  """The algorithm section, resolved."""
  algorithm = config.algorithm
  return Algorithm(
    adv_estimator=algorithm.adv_estimator,
    gamma=algorithm.gamma,
    lam=algorithm.lam,
    norm_adv_by_std=algorithm.norm_adv_by_std_in_grpo,
    whiten_advantages=algorithm.whiten_advantages,
    use_kl_in_reward=algorithm.use_kl_in_reward,
    kl_penalty=algorithm.kl_penalty,
  )


def _reward(config: ConfigDict, tokenizer: Any, min_group_size: int) -> RewardWorker:
  rewards = config.rewards
  functions = [loading.load_reward(reference) for reference in rewards.functions]
  runner = RewardRunner(
    [(loading.reward_name(f), f) for f in functions],
    tuple(rewards.weights),
    on_error=rewards.on_error,
    timeout_s=rewards.timeout_s,
    num_workers=rewards.num_workers,
  )
  return RewardWorker(
    tokenizer,
    runner,
    min_group_size=min_group_size,
    skip_special_tokens=rewards.skip_special_tokens,
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


def _stream(config: ConfigDict, dataset: prompts_lib.PromptDataset) -> PromptStream:
  curriculum = config.data.curriculum
  if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in curriculum):
    raise ConfigError(
      "data.curriculum: expected pairs ((first_step, max_level), ...), got "
      f"{curriculum}"
    )
  return PromptStream(
    dataset,
    batch_size=config.data.train_batch_size,
    seed=config.seed,
    shuffle=config.data.shuffle,
    curriculum=curriculum,
  )


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
  config: ConfigDict, model: model_source.ModelSource, eos_ids: tuple[int, ...]
) -> None:
  spec, known = model.spec, len(model.tokenizer)
  if not eos_ids or max(eos_ids) >= spec.vocab_size:
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
  longest = _longest(config)
  if longest > spec.max_positions and spec.rope.kind != "dynamic":
    raise ConfigError(
      f"data.max_prompt_length + data.max_response_length = {longest} exceeds the "
      f"model's max_position_embeddings {spec.max_positions}"
    )
