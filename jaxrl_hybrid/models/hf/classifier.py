"""Sequence classifiers with one label: what critics and reward models are in HF.

A decoder with a score head, ``score.weight [1, D]`` without a bias; the score of a
row is that of its last real token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_hybrid.errors import ModelError
from jaxrl_hybrid.models.families import ARCHITECTURES

# How the names of transformers' classes end.
LM, CLASSIFIER = "ForCausalLM", "ForSequenceClassification"
# Classifiers that are not named as the causal LM is.
CLASSES = {"gemma3_text": "Gemma3TextForSequenceClassification"}


def is_classifier(hf_config: Mapping[str, Any]) -> bool:
  """Whether a config names a sequence classifier."""
  return any(name.endswith(CLASSIFIER) for name in _architectures(hf_config))


def check_kind(hf_config: Mapping[str, Any], kinds: Sequence[str], *, key: str) -> None:
  """A config's architecture is of one of ``kinds`` (or not named), with one label.

  Args:
    hf_config: as ``load_hf_config`` gives it.
    kinds: of ``LM`` and ``CLASSIFIER``.
    key: the config key that errors name.

  Raises:
    ModelError: it is another kind, or a classifier of several labels.
  """
  found = _architectures(hf_config)
  if found and not any(name.endswith(tuple(kinds)) for name in found):
    expected = " or ".join(f"...{kind}" for kind in kinds)
    raise ModelError(f"{key}: expected a model of class {expected}, got {found}")
  labels = hf_config.get("id2label") or {}
  if is_classifier(hf_config) and len(labels) != 1:
    raise ModelError(
      f"{key}: expected a sequence classifier with num_labels=1, got {len(labels)} "
      f"labels: {sorted(map(str, labels.values()))[:4]}"
    )


def as_classifier(
  hf_config: Mapping[str, Any], *, pad_token_id: int | None
) -> dict[str, Any]:
  """The config of the same model as a sequence classifier with one label.

  Args:
    hf_config: of a causal LM or a classifier.
    pad_token_id: transformers finds the last real token by it, and refuses batches
      without; used where the config has none.
  """
  family = hf_config["model_type"]
  # transformers' own table of classes cannot be read where torch is missing.
  name = CLASSES.get(family) or ARCHITECTURES[family].removesuffix(LM) + CLASSIFIER
  config = dict(hf_config) | dict(
    architectures=[name],
    id2label={"0": "LABEL_0"},
    label2id={"LABEL_0": 0},
  )
  if config.get("pad_token_id") is None:
    config["pad_token_id"] = pad_token_id
  return config


def _architectures(hf_config: Mapping[str, Any]) -> list[str]:
  return [name for name in hf_config.get("architectures") or () if name]
