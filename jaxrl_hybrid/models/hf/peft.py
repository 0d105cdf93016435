"""Adapters as PEFT writes and reads them.

A directory with ``adapter_config.json`` and ``adapter_model.safetensors``, whose
tensors are ``base_model.model.model.layers.N.self_attn.q_proj.lora_A.weight``
``[r, in]`` and ``...lora_B.weight`` ``[out, r]``. Where HF has one matrix for
several of our projections (phi3), the pairs of the k parts are one pair of rank
k r, whose B is block-diagonal.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from jaxrl_hybrid.errors import ModelError
from jaxrl_hybrid.models import adapters as adapters_lib
from jaxrl_hybrid.models.adapters import HEAD, A, B, LoraSpec
from jaxrl_hybrid.models.hf import names
from jaxrl_hybrid.models.params import DENSE, Params
from jaxrl_hybrid.models.spec import ModelSpec
from jaxrl_hybrid.parallel import multihost

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_SUFFIXES = {A: ".lora_A.weight", B: ".lora_B.weight"}
_SCORE = _PREFIX + names.SCORE
_NAME = re.compile(r"[\w.]+")
# Fields that change the function; any other value than these is refused.
_EXPECTED: dict[str, tuple[Any, ...]] = {
  "peft_type": ("LORA",),
  "bias": ("none", None),
  "use_dora": (False, None),
  "fan_in_fan_out": (False, None),
  "lora_bias": (False, None),
  "layer_replication": (None,),
  "target_parameters": (None, []),
  "trainable_token_indices": (None,),
  "alora_invocation_tokens": (None, []),
  "use_qalora": (False, None),
  # Others change the base too.
  "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
  "modules_to_save": (None, [], ["score"], ["classifier", "score"]),
}


@dataclasses.dataclass(frozen=True)
class _Module:
  """One matrix of HF and the pairs that adapt it.

  Attributes:
    name: ``model.layers.0.self_attn.q_proj``.
    parts: keys of each pair in the tree of adapters.
    index: along the leading dim of the pairs; none for a layer of its own.
  """

  name: str
  parts: tuple[tuple[str, ...], ...]
  index: tuple[int, ...]


def read_spec(directory: str | Path) -> LoraSpec:
  """The adapters that a directory holds; no dropout.

  Raises:
    ModelError: not a PEFT directory, or one of another kind of adapter.
  """
  directory = Path(directory)
  file = directory / CONFIG_FILE
  try:
    config = json.loads(file.read_text(encoding="utf-8"))
    rank, alpha = int(config["r"]), float(config["lora_alpha"])
  except (OSError, ValueError, LookupError, TypeError) as error:
    raise ModelError(f"{file}: expected the config of a LoRA: {error!r}") from error
  for key, allowed in _EXPECTED.items():
    if config.get(key) not in allowed:
      raise ModelError(
        f"{file}: {key}={config.get(key)!r} is not supported, expected one of {allowed}"
      )
  if rank < 1 or not 0 < alpha < math.inf:
    raise ModelError(
      f"{file}: expected r >= 1 and lora_alpha > 0, got {rank} and {alpha}"
    )
  modules = {
    name.removesuffix(_SUFFIXES[A]).removeprefix(_PREFIX)
    for name in _read(directory)
    if name.endswith(_SUFFIXES[A])
  }
  if not modules:
    raise ModelError(f"{directory / WEIGHTS_FILE}: expected adapters, found none")
  lora = LoraSpec(
    rank=rank,
    alpha=alpha,
    targets=tuple(sorted({name.rpartition(".")[2] for name in modules})),
    rslora=bool(config.get("use_rslora")),
  )
  _check_scales(file, config, lora, modules)
  return lora


def _check_scales(
  file: Path, config: dict[str, Any], lora: LoraSpec, modules: set[str]
) -> None:
  """Patterns may give modules other ranks and alphas, but one scale to all."""
  ranks, alphas = (config.get(f"{key}_pattern") or {} for key in ("rank", "alpha"))
  for patterns in (ranks, alphas):
    if not isinstance(patterns, dict) or not all(
      _NAME.fullmatch(key) and isinstance(value, int | float) and value > 0
      for key, value in patterns.items()
    ):
      raise ModelError(
        f"{file}: rank_pattern, alpha_pattern: expected names and numbers > 0, got "
        f"{patterns}"
      )
  for name in sorted(modules):
    own = lambda patterns, default, name=name: next(
      (x for key, x in patterns.items() if f".{name}".endswith(f".{key}")), default
    )
    of_module = dataclasses.replace(
      lora, rank=own(ranks, lora.rank), alpha=own(alphas, lora.alpha)
    )
    if not math.isclose(of_module.scale, lora.scale):
      raise ModelError(
        f"{file}: {name} has scale {of_module.scale:g} by rank_pattern and "
        f"alpha_pattern; expected {lora.scale:g} of r and lora_alpha in every module"
      )


def load_adapters(
  directory: str | Path, spec: ModelSpec, lora: LoraSpec, shardings: Params
) -> Params:
  """Reads pairs, and a value head where there is one, into ``shardings``.

  Args:
    directory: as PEFT saves it.
    spec: the model.
    lora: ``read_spec`` of the directory.
    shardings: tree of the adapters' shardings.

  Raises:
    ModelError: a tensor is missing, left over or of another shape.
  """
  host = _fill(Path(directory), spec, lora, head=HEAD in shardings)
  return jax.tree.map(multihost.put, host, {name: shardings[name] for name in host})


def check_fits(
  directory: str | Path, spec: ModelSpec, lora: LoraSpec, *, head: bool
) -> None:
  """Raises what ``load_adapters`` would, before the model itself is loaded.

  Args:
    directory, spec, lora: as there.
    head: whether there may be a score head.
  """
  _fill(Path(directory), spec, lora, head=head)


def _fill(directory: Path, spec: ModelSpec, lora: LoraSpec, *, head: bool) -> Params:
  """The adapters on the host, fp32."""
  tensors = _read(directory)
  shapes = adapters_lib.abstract_adapters(spec, lora)
  host = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
  modules = list(_modules(spec, lora))
  wanted = {_name(m, side) for m in modules for side in (A, B)}
  if head:
    wanted |= {_SCORE} & set(tensors)
  missing, extra = sorted(wanted - set(tensors)), sorted(set(tensors) - wanted)
  if missing or extra:
    raise ModelError(
      f"{directory} does not fit a {spec.family} model of {spec.num_layers} layers: "
      f"missing {missing[:4]} ({len(missing)}), left over {extra[:4]} ({len(extra)})"
    )
  for module in modules:
    _split(module, tensors, host, directory)
  if _SCORE in wanted:
    score = tensors[_SCORE].astype(np.float32)
    if score.shape != (1, spec.hidden_size):
      raise ModelError(
        f"{directory}: {_SCORE} has shape {score.shape}, expected "
        f"{(1, spec.hidden_size)} (num_labels=1)"
      )
    host[HEAD] = {"kernel": score}
  return host


def save_adapters(
  adapters: Params,
  spec: ModelSpec,
  lora: LoraSpec,
  out_dir: str | Path,
  *,
  base: str | None,
) -> Path:
  """Writes the pairs of a causal LM; atomic, all processes call it.

  Args:
    adapters: stored pairs, any sharding.
    spec: the model.
    lora: the adapters.
    out_dir: replaced only when all files are complete.
    base: directory or name of the model that they belong to.

  Returns:
    The directory.

  Raises:
    ModelError: ``out_dir`` holds something else than adapters.
  """
  out_dir = Path(out_dir).absolute()
  if out_dir.exists() and not (out_dir / CONFIG_FILE).is_file():
    raise ModelError(f"{out_dir} would be replaced; expected a new directory")
  host = jax.tree.map(multihost.gather, adapters)
  if multihost.is_primary():
    _write(host, spec, lora, out_dir, base)
  multihost.barrier("adapters")
  return out_dir


def _write(host, spec, lora, out_dir: Path, base: str | None) -> None:
  partial = out_dir.with_name(out_dir.name + ".partial")
  shutil.rmtree(partial, ignore_errors=True)
  partial.mkdir(parents=True)
  modules = list(_modules(spec, lora))
  tensors = {}
  for module in modules:
    pair = _join(module, host)
    tensors |= {_name(module, s): np.ascontiguousarray(pair[s]) for s in (A, B)}
  save_file(tensors, partial / WEIGHTS_FILE, metadata={"format": "pt"})
  (partial / WEIGHTS_FILE).chmod(0o644)
  config = _config(modules, lora, base)
  (partial / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
  if out_dir.exists():
    shutil.rmtree(out_dir)
  os.replace(partial, out_dir)


def _config(modules: list[_Module], lora: LoraSpec, base: str | None) -> dict[str, Any]:
  short = {m.name.rpartition(".")[2]: len(m.parts) for m in modules}
  fused = {name: k for name, k in short.items() if k > 1}
  grown = lambda k: math.sqrt(k) if lora.rslora else k  # keeps the scale
  return {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": base,
    "r": lora.rank,
    "lora_alpha": lora.alpha,
    "lora_dropout": lora.dropout,
    "target_modules": sorted(short),
    "rank_pattern": {name: lora.rank * k for name, k in fused.items()},
    "alpha_pattern": {name: lora.alpha * grown(k) for name, k in fused.items()},
    "use_rslora": lora.rslora,
    "use_dora": False,
    "bias": "none",
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "inference_mode": True,
  }


def _modules(spec: ModelSpec, lora: LoraSpec) -> Iterator[_Module]:
  """All matrices with adapters, layer by layer."""
  for i in range(spec.num_layers):
    dense = i < spec.dense_layers
    prefix = (DENSE, str(i)) if dense else ("layers",)
    index = () if dense else (i - spec.dense_layers,)
    by_name: dict[str, list[tuple[str, ...]]] = {}
    for target in adapters_lib.targets(spec, lora, dense=dense):
      by_name.setdefault(target.name, []).append((*prefix, *target.path))
    for name, parts in by_name.items():
      yield _Module(f"model.layers.{i}.{name}", tuple(parts), index)


def _name(module: _Module, side: str) -> str:
  return _PREFIX + module.name + _SUFFIXES[side]


def _pairs(module: _Module, host: Params) -> list[dict[str, np.ndarray]]:
  """Views of ``[in, r]`` and ``[out, r]`` of each part."""
  return [
    {side: names.get(host, path)[side][module.index] for side in (A, B)}
    for path in module.parts
  ]


def _join(module: _Module, host: Params) -> dict[str, np.ndarray]:
  """PEFT's pair of a module."""
  pairs = _pairs(module, host)
  sizes, rank = [p[B].shape[0] for p in pairs], pairs[0][B].shape[1]
  joined = np.zeros((sum(sizes), rank * len(pairs)), np.float32)
  for i, pair in enumerate(pairs):
    start = sum(sizes[:i])
    joined[start : start + sizes[i], i * rank : (i + 1) * rank] = pair[B]
  return {A: np.concatenate([pair[A].T for pair in pairs]), B: joined}


def _split(module: _Module, tensors, host: Params, directory: Path) -> None:
  """Fills the parts of a module: one pair for all of them, or what ``_join`` made."""
  pairs = _pairs(module, host)
  given = {side: tensors[_name(module, side)].astype(np.float32) for side in (A, B)}
  (width, rank), rows = pairs[0][A].shape, sum(p[B].shape[0] for p in pairs)
  found = given[B].shape[1]
  shapes = {A: (found, width), B: (rows, found)}
  if found not in (rank, rank * len(pairs)) or any(
    given[side].shape != shapes[side] for side in (A, B)
  ):
    raise ModelError(
      f"{directory}: {module.name} has a pair of shapes {given[A].shape} and "
      f"{given[B].shape}, expected {(rank, width)} and {(rows, rank)}"
    )
  start = 0
  for i, pair in enumerate(pairs):
    end = start + pair[B].shape[0]
    columns = slice(0, rank) if found == rank else slice(i * rank, (i + 1) * rank)
    pair[A][...] = given[A][columns].T
    pair[B][...] = given[B][start:end, columns]
    if np.count_nonzero(given[B][start:end]) != np.count_nonzero(pair[B]):
      raise ModelError(
        f"{directory}: {module.name} mixes its {len(pairs)} parts; expected rank "
        f"{rank}, or {rank * len(pairs)} with a block-diagonal B"
      )
    start = end


def _read(directory: Path) -> dict[str, np.ndarray]:
  file = directory / WEIGHTS_FILE
  try:
    tensors = load_file(file)
  except (OSError, SafetensorError) as error:
    raise ModelError(
      f"{file}: expected adapters in safetensors (pickled ones are never read): {error}"
    ) from error
  for name, tensor in tensors.items():
    is_float = jnp.issubdtype(tensor.dtype, jnp.floating)
    if not is_float or not np.isfinite(tensor.astype(np.float32)).all():
      raise ModelError(f"{file}: {name}: expected finite floats, got {tensor.dtype}")
  return tensors
