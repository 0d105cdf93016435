"""Where a model comes from: an HF directory, or a random one at given sizes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxrl_hybrid.data import tasks
from jaxrl_hybrid.data import tokenizer as tokenizers
from jaxrl_hybrid.errors import ConfigError, ModelError
from jaxrl_hybrid.models.families import ARCHITECTURES, load_hf_config, spec_from_hf
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
    tokenizer: HF tokenizer.
    path: the HF directory; None for a random model.
  """

  spec: ModelSpec
  hf_config: dict[str, Any]
  generation_config: dict[str, Any]
  tokenizer: Any
  path: str | None

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
  hf_config = load_hf_config(path) if path else None
  tokenizer = _open_tokenizer(model["tokenizer"] or path)
  if hf_config is None:
    hf_config = _random_config(random, tokenizer)
  spec = spec_from_hf(hf_config)
  return ModelSource(
    spec if spec.knows_length else spec.for_length(longest),
    hf_config,
    _generation_config(path),
    tokenizer,
    path or None,
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


def _random_config(fields: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
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
      f"model.random: expected the fields of an HF config with a "
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
