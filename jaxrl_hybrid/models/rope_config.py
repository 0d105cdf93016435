"""From HF configs to ``RopeSpec``, in each of the spellings that there are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxrl_hybrid.errors import ModelError
from jaxrl_hybrid.models.spec import ROPE_KINDS, ROPE_OPTIONS, RopeSpec

HFConfig = Mapping[str, Any]

PARTIAL_ROTARY = ("phi3",)  # families whose heads may rotate in part
FULL, SLIDING = "full_attention", "sliding_attention"  # HF's kinds of layers


def ropes_from_hf(config: HFConfig) -> tuple[RopeSpec, RopeSpec | None]:
  """(rope, rope of local layers or None).

  Reads all spellings: ``rope_parameters``, one or one for each layer type, and
  ``rope_scaling`` with ``rope_theta``.
  """
  options = config.get("rope_parameters") or config.get("rope_scaling") or {}
  if FULL not in options and SLIDING not in options:
    return _rope(config, options), None
  full, sliding = (_rope(config, options[kind]) for kind in (FULL, SLIDING))
  return full, None if full == sliding else sliding


def _rope(config: HFConfig, options: Mapping[str, Any]) -> RopeSpec:
  options = dict(options)
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
  _check_rope_numbers(kind, options | {"rope_theta": theta})
  fraction = options.pop("partial_rotary_factor", None)
  fraction = fraction or config.get("partial_rotary_factor") or 1.0
  if fraction != 1.0 and config.get("model_type") not in PARTIAL_ROTARY:
    raise ModelError(
      f"partial_rotary_factor: expected 1.0 for {config.get('model_type')}, got "
      f"{fraction}"
    )
  options.setdefault("max_positions", config.get("max_position_embeddings"))
  if config.get("original_max_position_embeddings"):
    options.setdefault(
      "original_max_position_embeddings", config["original_max_position_embeddings"]
    )
  frozen = (
    (name, tuple(value) if isinstance(value, list) else value)
    for name, value in sorted(options.items())
  )
  interleaved = config.get("model_type") == "deepseek_v2" or bool(
    config.get("rope_interleave", False)
  )
  return RopeSpec(float(theta), kind, tuple(frozen), float(fraction), interleaved)


def _check_rope_numbers(kind: str, options: Mapping[str, Any]) -> None:
  """A factor of 0 or a text would be frequencies of no number."""
  for name in ("rope_theta", "factor", *ROPE_OPTIONS[kind]):
    value = options.get(name)
    for number in value if isinstance(value, list) else [value]:
      is_number = isinstance(number, int | float) and not isinstance(number, bool)
      if number is not None and not (is_number and 0 < number < math.inf):
        raise ModelError(
          f"rope scaling {kind!r}: {name}: expected finite numbers > 0, got {value!r}"
        )
