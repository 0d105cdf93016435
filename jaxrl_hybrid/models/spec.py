"""What a decoder is, as data: a frozen ``ModelSpec`` read from an HF config.

Families differ by a row in ``FAMILIES``, not by a subclass. A feature that the
decoder does not have is an error here, before any weight is read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_hybrid.errors import ModelError

# Options that each kind cannot do without.
ROPE_OPTIONS = {
  "default": (),
  "linear": ("factor",),
  "yarn": (),
  "llama3": (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
  ),
}
VOCAB_MULTIPLE = 64
ROPE_KINDS = tuple(ROPE_OPTIONS)


@dataclasses.dataclass(frozen=True)
class RopeSpec:
  """Rotary position embedding; see ``models.rope`` for the formulas.

  Attributes:
    theta: base of the frequencies.
    kind: one of ``ROPE_KINDS``.
    options: the scaling's own numbers, as (name, value) pairs.
  """

  theta: float = 10_000.0
  kind: str = "default"
  options: tuple[tuple[str, Any], ...] = ()

  def option(self, name: str, default: Any = None) -> Any:
    """Returns a scaling option, or the default."""
    value = dict(self.options).get(name)
    return default if value is None else value


@dataclasses.dataclass(frozen=True)
class ModelSpec:
  """Sizes and switches of one decoder (names as in HF configs)."""

  family: str
  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  max_positions: int
  rms_norm_eps: float = 1e-6
  rope: RopeSpec = RopeSpec()
  tie_word_embeddings: bool = False
  qkv_bias: bool = False
  out_bias: bool = False
  mlp_bias: bool = False
  qk_norm: bool = False
  initializer_range: float = 0.02

  def padded_vocab(self, tp: int) -> int:
    """Vocabulary size rounded up so that tp divides it.

    The same for every tp up to 64, so that a checkpoint fits another mesh.
    """
    multiple = math.lcm(VOCAB_MULTIPLE, tp)
    return -(-self.vocab_size // multiple) * multiple

  def num_params(self) -> int:
    """Number of parameters, un-padded, tied embeddings counted once."""
    attention = (
      self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
    )
    mlp = 3 * self.hidden_size * self.intermediate_size
    biases = (
      self.qkv_bias * self.head_dim * (self.num_heads + 2 * self.num_kv_heads)
      + self.out_bias * self.hidden_size
      + self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
    )
    norms = 2 * self.hidden_size + 2 * self.head_dim * self.qk_norm
    embeddings = self.vocab_size * self.hidden_size
    embeddings *= 1 if self.tie_word_embeddings else 2
    return (
      self.num_layers * (attention + mlp + biases + norms)
      + embeddings
      + self.hidden_size
    )


def _llama(config: Mapping[str, Any]) -> dict[str, Any]:
  bias = bool(config.get("attention_bias", False))
  return dict(
    qkv_bias=bias, out_bias=bias, mlp_bias=bool(config.get("mlp_bias", False))
  )


def _qwen2(config: Mapping[str, Any]) -> dict[str, Any]:
  _refuse_sliding_window(config)
  return dict(qkv_bias=True)


def _qwen3(config: Mapping[str, Any]) -> dict[str, Any]:
  _refuse_sliding_window(config)
  bias = bool(config.get("attention_bias", False))
  return dict(qk_norm=True, qkv_bias=bias, out_bias=bias)


FAMILIES = {"llama": _llama, "qwen2": _qwen2, "qwen3": _qwen3}


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
  """Reads a ``ModelSpec`` from an HF config dict with its defaults filled in.

  Args:
    config: ``transformers`` config as a dict (``load_hf_config``).

  Returns:
    The spec.

  Raises:
    ModelError: the model type or one of its features is not supported.
  """
  family = config.get("model_type")
  if family not in FAMILIES:
    raise ModelError(
      f"model_type {family!r} is not supported; expected one of {sorted(FAMILIES)}"
    )
  if config.get("hidden_act", "silu") != "silu":
    raise ModelError(
      f"hidden_act {config['hidden_act']!r} is not supported; expected 'silu'"
    )
  heads, hidden = config["num_attention_heads"], config["hidden_size"]
  kv_heads = config.get("num_key_value_heads") or heads
  if heads % kv_heads or config["num_hidden_layers"] < 1:
    raise ModelError(
      f"expected at least one layer and num_key_value_heads that divide "
      f"num_attention_heads, got {config['num_hidden_layers']} layers, {kv_heads} and "
      f"{heads} heads"
    )
  if not config.get("head_dim") and hidden % heads:
    raise ModelError(
      f"expected num_attention_heads={heads} to divide hidden_size={hidden}, or a "
      "head_dim"
    )
  return ModelSpec(
    family=family,
    vocab_size=config["vocab_size"],
    hidden_size=hidden,
    intermediate_size=config["intermediate_size"],
    num_layers=config["num_hidden_layers"],
    num_heads=heads,
    num_kv_heads=kv_heads,
    head_dim=config.get("head_dim") or hidden // heads,
    max_positions=config["max_position_embeddings"],
    rms_norm_eps=config["rms_norm_eps"],
    rope=rope_from_hf(config),
    tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
    initializer_range=config.get("initializer_range", 0.02),
    **FAMILIES[family](config),
  )


def rope_from_hf(config: Mapping[str, Any]) -> RopeSpec:
  """Reads both spellings: ``rope_parameters``, and ``rope_scaling`` + theta."""
  options = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
  theta = options.pop("rope_theta", None) or config.get("rope_theta") or 10_000.0
  legacy_kind = options.pop("type", None)
  kind = options.pop("rope_type", None) or legacy_kind or "default"
  if kind not in ROPE_KINDS:
    raise ModelError(
      f"rope scaling {kind!r} is not supported; expected one of {ROPE_KINDS}"
    )
  missing = [name for name in ROPE_OPTIONS[kind] if options.get(name) is None]
  if missing:
    raise ModelError(f"rope scaling {kind!r} needs {missing}, got {options}")
  if options.get("partial_rotary_factor", 1.0) not in (None, 1.0):
    raise ModelError(
      "partial_rotary_factor is not supported; expected 1.0, got "
      f"{options['partial_rotary_factor']}"
    )
  options.setdefault("max_positions", config.get("max_position_embeddings"))
  return RopeSpec(float(theta), kind, tuple(sorted(options.items())))


def load_hf_config(path: str | Path) -> dict[str, Any]:
  """Reads ``config.json`` of a local HF directory, defaults filled in.

  Raises:
    ModelError: there is no such directory or it holds no readable config.
  """
  from transformers import AutoConfig  # heavy import, needed here only

  path = Path(path)
  if not (path / "config.json").is_file():
    raise ModelError(
      f"model.path: expected a directory with a config.json, got {str(path)!r}"
    )
  try:
    return AutoConfig.from_pretrained(path, local_files_only=True).to_dict()
  except Exception as error:  # transformers raises its own kinds
    raise ModelError(f"{path / 'config.json'} is not readable: {error}") from error


def _refuse_sliding_window(config: Mapping[str, Any]) -> None:
  if config.get("use_sliding_window"):
    raise ModelError("use_sliding_window=true is not supported; expected false")
