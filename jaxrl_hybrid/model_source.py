"""Where a model comes from: an HF directory, or a random one at given sizes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxrl_hybrid.data import tasks
from jaxrl_hybrid.data import tokenizer as tokenizers
from jaxrl_hybrid.errors import ConfigError, ModelError
from jaxrl_hybrid.models.families import ARCHITECTURES, load_hf_config, spec_from_hf
from jaxrl_hybrid.models.hf import classifier
from jaxrl_hybrid.models.spec import ModelSpec

# What of a generation_config would change sampling; we take ours from the config.
SAMPLING_KEYS = (
  "temperature",
  "top_k",
  "top_p",
  "min_p",
  "repetition_penalty",
  "do_sample",
  "typical_p",
  "no_repeat_ngram_size",
)


@dataclasses.dataclass(frozen=True)
class ModelSource:
  """A model's spec, configs and tokenizer; no weights.

  Attributes:
    spec: what the decoder is built from.
    hf_config: the whole HF config, kept for export.
    generation_config: as in the directory; empty if there is none.
    tokenizer: HF tokenizer; None if a model by itself came without one.
    path: the HF directory; None for a random model.
  """

  spec: ModelSpec
  hf_config: dict[str, Any]
  generation_config: dict[str, Any]
  tokenizer: Any
  path: str | None

  @property
  def pad_token_id(self) -> int | None:
    """The tokenizer's; where it has none its EOS stands in, as is usual."""
    if self.tokenizer is None:
      return None
    known = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
    return next((i for i in known if i is not None), None)

  def for_length(self, longest: int) -> ModelSource:
    """The same model for sequences of at most so many tokens, if its rope asks."""
    if self.spec.knows_length:
      return self
    return dataclasses.replace(self, spec=self.spec.for_length(longest))

  def describe(self) -> str:
    """Directory, or that the weights are random."""
    return self.path or "random initialisation"

  def describe_rope(self) -> list[str]:
    """One line if rotary frequencies depend on the longest sequence."""
    rope = self.spec.rope
    if rope.length is None:
      return []
    return [
      f"rope: {rope.kind}, its frequencies are those for {rope.length} tokens "
      "(data.max_prompt_length + data.max_response_length) in every sequence"
    ]

  def ignored_sampling(self) -> list[str]:
    """One line if generation_config holds sampling defaults: they are not used."""
    found = {
      key: self.generation_config[key]
      for key in SAMPLING_KEYS
      if self.generation_config.get(key) is not None
    }
    return (
      [f"ignored from generation_config: {found} (sampling follows rollout.*)"]
      if found
      else []
    )


def open_model(model: ConfigDict, *, longest: int) -> ModelSource:
  """Reads the configs and tokenizer of the config's ``model`` section.

  Args:
    model: the section.
    longest: tokens of the longest sequence, prompt and response.

  Raises:
    ConfigError: neither model.path nor model.random.
    ModelError: an unreadable directory or an unsupported model.
  """
  path, random = model["path"], model["random"].to_dict()
  if not path and not random:
    raise ConfigError(
      "expected model.path (an HF directory) or model.random (HF config fields)"
    )
  if not path:
    source = random_model(random, _open_tokenizer(model["tokenizer"]), key="model")
  else:
    source = open_directory(path, key="model.path", kinds=(classifier.LM,))
    tokenizer = _open_tokenizer(model["tokenizer"] or path)
    source = dataclasses.replace(source, tokenizer=tokenizer)
  return source.for_length(longest)


def open_directory(
  path: str | Path, *, key: str, kinds: Sequence[str], tokenizer: Any = None
) -> ModelSource:
  """Reads the configs of an HF directory.

  Args:
    path: of the directory.
    key: the config key that errors name.
    kinds: of model, ``classifier.LM`` and ``classifier.CLASSIFIER``.
    tokenizer: of the model.

  Raises:
    ModelError: an unreadable directory or an unsupported model.
  """
  hf_config = load_hf_config(path, key=key)
  spec = spec_from_hf(hf_config)
  classifier.check_kind(hf_config, kinds, key=f"{key}={path}")
  return ModelSource(
    spec,
    hf_config,
    _generation_config(str(path)),
    tokenizer,
    str(path),
  )


def random_model(fields: dict[str, Any], tokenizer: Any, *, key: str) -> ModelSource:
  """A model of these HF config fields, for ``tokenizer``.

  Raises:
    ConfigError: they are no HF config.
    ModelError: an unsupported model.
  """
  hf_config = _random_config(fields, tokenizer, key)
  return ModelSource(spec_from_hf(hf_config), hf_config, {}, tokenizer, None)


def open_critic(config: ConfigDict, actor: ModelSource, *, longest: int) -> ModelSource:
  """What the critic starts from: ``critic.path``, or else the actor's model.

  A causal LM gets a fresh value head, a sequence classifier keeps its score head.

  Raises:
    ModelError: an unsupported model, or one with other token ids than the actor's.
  """
  path = config.critic.path
  if not path:
    return actor
  tokenizer = actor.tokenizer
  if tokenizers.has_tokenizer(path):
    tokenizer = tokenizers.load_tokenizer(path)
  kinds = (classifier.LM, classifier.CLASSIFIER)
  critic = open_directory(path, key="critic.path", kinds=kinds, tokenizer=tokenizer)
  if not tokenizers.same_vocabulary(tokenizer, actor.tokenizer):
    raise ModelError(
      f"critic.path={path}: expected the actor's tokenizer, got another one; a critic "
      "reads the actor's token ids"
    )
  _check_vocabulary(critic, "critic.path")
  return critic.for_length(longest)


def open_reward_model(
  config: ConfigDict, actor: ModelSource, *, longest: int
) -> ModelSource | None:
  """The model of the ``reward_model`` section, if there is one.

  It has the actor's own tokenizer object if both give every token the same id.

  Raises:
    ModelError: no sequence classifier with one label, or not supported.
  """
  path, random = config.reward_model.path, config.reward_model.random.to_dict()
  if not path:
    tokenizer = actor.tokenizer
    source = random_model(random, tokenizer, key="reward_model") if random else None
    return source and source.for_length(longest)
  source = open_directory(path, key="reward_model.path", kinds=(classifier.CLASSIFIER,))
  tokenizer = tokenizers.load_tokenizer(path)
  if tokenizers.same_vocabulary(tokenizer, actor.tokenizer):
    tokenizer = actor.tokenizer
  else:
    longest = config.reward_model.max_length or longest
  source = dataclasses.replace(source, tokenizer=tokenizer)
  _check_vocabulary(source, "reward_model.path")
  return source.for_length(longest)


def _check_vocabulary(source: ModelSource, key: str) -> None:
  """An id that a model has no embedding for would be read as another one."""
  known, most = len(source.tokenizer), source.spec.vocab_size
  if known > most:
    raise ModelError(
      f"{key}={source.path}: expected a vocab_size of at least the {known} tokens of "
      f"the tokenizer that its ids come from, got {most}"
    )


def _open_tokenizer(reference: str) -> Any:
  if not reference:
    raise ConfigError(
      "model.tokenizer: expected a directory, or task:NAME, for a "
      "random model; got nothing"
    )
  if reference.startswith(tasks.PREFIX):
    return tokenizers.symbol_tokenizer(tasks.task_symbols(reference))
  return tokenizers.load_tokenizer(reference)


def _random_config(fields: dict[str, Any], tokenizer: Any, key: str) -> dict[str, Any]:
  from transformers import AutoConfig  # heavy import, needed here only

  fields = {
    "vocab_size": len(tokenizer),
    "bos_token_id": tokenizer.bos_token_id,
    "eos_token_id": tokenizer.eos_token_id,
    "pad_token_id": tokenizer.pad_token_id,
    **fields,
  }
  try:
    config = AutoConfig.for_model(fields.pop("model_type"), **fields).to_dict()
  except Exception as error:  # transformers raises its own kinds
    raise ConfigError(
      f"{key}.random: expected the fields of an HF config with a "
      f"model_type, got {fields}: {error}"
    ) from error
  return config | {"architectures": [ARCHITECTURES.get(config["model_type"])]}


def _generation_config(path: str) -> dict[str, Any]:
  file = Path(path or "") / "generation_config.json"
  if not path or not file.is_file():
    return {}
  try:
    found = json.loads(file.read_text(encoding="utf-8"))
  except ValueError as error:
    raise ModelError(f"{file}: not valid JSON: {error}") from error
  if not isinstance(found, dict):
    raise ModelError(f"{file}: expected an object, got {type(found).__name__}")
  return found
