"""What a wrapper is asked for: checked, and turned into a config."""

from __future__ import annotations

import contextlib
import logging
import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
from transformers import PreTrainedTokenizerBase

from jaxrl_hybrid import config as config_lib
from jaxrl_hybrid import config_checks as checks
from jaxrl_hybrid import config_reader, model_source
from jaxrl_hybrid.data import tokenizer as tokenizers
from jaxrl_hybrid.errors import ConfigError, ModelError
from jaxrl_hybrid.models.hf.classifier import CLASSIFIER, LM, is_classifier
from jaxrl_hybrid.models.spec import ModelSpec
from jaxrl_hybrid.ops import attention
from jaxrl_hybrid.shapes import round_up

CLASSES = {f"AutoModel{kind}": kind for kind in (LM, CLASSIFIER)}
AXES = ("pp", "tp", "dp")
DTYPES = ("float32", "bfloat16", "float16")
ROWS = 32  # of a mini-batch, unless the config says otherwise
MICRO_ROWS = 4  # of a micro-batch on each device
# Config keys that an argument sets.
_ARGUMENTS = {
  "mesh.train": "parallel_config",
  "model.path": "model_name_or_path",
  "model.dtype": "dtype",
  "model.attention": "use_flash_attn",
  "model.tokenizer": "tokenizer",
}
# Config keys that have a meaning for one model by itself.
_USED = (
  "seed",
  "mesh.generation",
  "mesh.zero",
  "mesh.sequence_parallel",
  "mesh.pipeline_microbatches",
  "offload.optimizer",
  "offload.params",
  "offload.critic",
  "offload.reward_model",
  "offload.layers_per_chunk",
  "model.remat",
  "model.logprob_chunk",
  "data.string_prompts",
  "data.system_prompt",
  "data.chat_template",
  "data.max_prompt_length",
  "data.max_response_length",
  "data.train_batch_size",
  "algorithm.name",
  "algorithm.gamma",
  "algorithm.lam",
  "algorithm.whiten_advantages",
  "critic.cliprange_value",
  "reward_model.max_length",
  "trainer.total_steps",
)
_USED_SECTIONS = ("rollout.", "actor.", "critic.optim.", "model.lora.", "critic.lora.")
_CHANGEABLE = ("actor.", "critic.", "algorithm.")  # of a model that is loaded
_BATCH = (
  "data.train_batch_size",
  "actor.ppo_mini_batch_size",
  "actor.ppo_micro_batch_size_per_device",
  "mesh.pipeline_microbatches",
  "rollout.n",
)
_LENGTHS = ("data.max_prompt_length", "data.max_response_length")


def kind_of(model: Any, model_class: Any) -> str | None:
  """``LM`` or ``CLASSIFIER``; None: as the directory says.

  Args:
    model: a transformers model, or None.
    model_class: an Auto class of transformers or its name, or None.

  Raises:
    ConfigError: neither of the two kinds.
  """
  if model_class is not None:
    name = getattr(model_class, "__name__", model_class)
    if name not in CLASSES:
      raise ConfigError(
        f"model_class: expected one of {sorted(CLASSES)}, got {model_class!r}"
      )
    return CLASSES[name]
  if model is None:
    return None
  found = [kind for kind in (LM, CLASSIFIER) if type(model).__name__.endswith(kind)]
  if not found or not hasattr(model, "save_pretrained"):
    raise ConfigError(
      f"model: expected a transformers model of class ...{LM} or ...{CLASSIFIER}, got "
      f"{type(model).__name__}; a directory is model_name_or_path=DIR"
    )
  return found[0]


def mesh_of(parallel_config: Mapping[str, int] | None) -> tuple[int, int, int]:
  """(pp, tp, dp) of ``{"tp": 4, "dp": 2, "pp": 1}``; what is not there is 1.

  Raises:
    ConfigError: unknown keys, or no positive integers.
  """
  given = {} if parallel_config is None else parallel_config
  if (
    not isinstance(given, Mapping)
    or set(given) - set(AXES)
    or any(type(n) is not int or n < 1 for n in given.values())
  ):
    raise ConfigError(
      f"parallel_config: expected a dict of integers >= 1 for {AXES}, got {given!r}"
    )
  pp, tp, dp = (given.get(axis, 1) for axis in AXES)
  return pp, tp, dp


def check_devices(mesh: tuple[int, int, int]) -> None:
  """Raises a ConfigError unless there are enough devices for (pp, tp, dp)."""
  needed, there = math.prod(mesh), jax.device_count()
  if needed > there:
    raise ConfigError(
      f"parallel_config={dict(zip(AXES, mesh, strict=True))} needs {needed} devices, "
      f"got {there}; change it, or on a CPU set JAX_NUM_CPU_DEVICES={needed} before "
      "Python starts"
    )


def dtype_name(dtype: Any) -> str | None:
  """``torch.bfloat16``, ``jnp.bfloat16`` and ``"bfloat16"`` alike as a name.

  Raises:
    ConfigError: another dtype.
  """
  if dtype is None:
    return None
  name = str(dtype)
  if name.startswith("torch."):  # torch itself is not needed to read it
    name = name.removeprefix("torch.")
  else:
    with contextlib.suppress(TypeError):
      name = jnp.dtype(dtype).name
  if name not in DTYPES:
    raise ConfigError(
      f"dtype: expected one of {DTYPES}, of torch or JAX, got {dtype!r}"
    )
  return name


def check_lora(config: ConfigDict, kind: str, *, in_memory: bool) -> None:
  """Adapters are asked for in the section of this kind, of a model in a directory.

  Raises:
    ConfigError: they are not.
  """
  sections = {LM: config.model.lora, CLASSIFIER: config.critic.lora}
  keys = {LM: "model.lora", CLASSIFIER: "critic.lora"}
  asked = [kind for kind, section in sections.items() if checks.has_lora(section)]
  if not asked:
    return
  if kind not in asked:
    raise ConfigError(
      f"config: expected {keys[kind]} for a model of class ...{kind}, got "
      f"{keys[asked[0]]}, which it does not have"
    )
  if in_memory:
    raise ConfigError(
      f"{keys[kind]}: expected model_name_or_path, whose weights the adapters are "
      "merged with when they are saved; got a model in memory"
    )


def attention_for(use_flash_attn: bool | None, spec: ModelSpec, dtype: str) -> str:
  """The attention that this asks for; warns if there is no flash attention here."""
  if not use_flash_attn:
    return "auto" if use_flash_attn is None else "xla"
  try:
    return attention.choose(
      "cudnn",
      dtype=jnp.dtype(dtype),
      head_dim=spec.head_dim,
      softcap=spec.attention_softcap is not None,
    )
  except ConfigError as error:
    logging.warning("use_flash_attn=True: attention runs as 'xla' (%s)", error)
    return "xla"


def make_config(
  mesh: tuple[int, int, int],
  *,
  dtype: str | None,
  longest: int,
  overrides: Mapping[str, Any],
) -> ConfigDict:
  """A config for one model, not yet resolved.

  Args:
    mesh: (pp, tp, dp).
    dtype: of products; None: the config's default.
    longest: tokens that the model reads.
    overrides: values of config keys, dotted or nested.

  Raises:
    ConfigError: an unknown key or a wrong value.
  """
  if not isinstance(overrides, Mapping):
    raise ConfigError(f"config: expected a dict of keys and values, got {overrides!r}")
  config, changes = config_lib.base(), dict(_flat(overrides))
  _check_keys(changes)
  pp, tp, dp = mesh
  config.mesh.train, config.mesh.generation = mesh, (1, tp)
  config.algorithm.name = "ppo"
  if dtype:
    config.model.dtype = dtype
  if not set(_LENGTHS) & set(changes):
    response = min(config.data.max_response_length, longest // 2)
    config.data.max_response_length = response
    config.data.max_prompt_length = min(
      config.data.max_prompt_length, longest - response
    )
  if not set(_BATCH) & set(changes):
    config.data.train_batch_size = round_up(ROWS, MICRO_ROWS * dp)
    if pp == 1:
      config.actor.ppo_micro_batch_size_per_device = MICRO_ROWS
  _update(config, changes)
  return config


def changed_config(asked: ConfigDict, changes: Mapping[str, Any]) -> ConfigDict:
  """A config with other settings of training.

  Args:
    asked: what ``make_config`` returned, with all changes so far; takes these on.
    changes: values of config keys, dotted or nested.

  Returns:
    The resolved config.

  Raises:
    ConfigError: an unknown key, a wrong value, or one that is fixed when the model
      is loaded.
  """
  changes = dict(_flat(changes))
  _check_keys(changes)
  for key in changes:
    if not key.startswith(_CHANGEABLE) or ".lora." in key:
      raise ConfigError(f"config: {key!r} is fixed when the model is loaded")
  fresh = asked.copy_and_resolve_references()
  _update(fresh, changes)
  resolved = config_lib.resolve(fresh)
  config_lib.validate(resolved, training=False)
  _update(asked, changes)  # only what is right
  return resolved


def warn_of_run_only(config: ConfigDict) -> None:
  """Settings of the training loop, which a loop of the caller's own does not have."""
  algorithm = config.algorithm
  ignored = {
    "algorithm.use_cost": algorithm.use_cost,
    "actor.ptx_coef": config.actor.ptx_coef > 0,
    "algorithm.filter_groups": algorithm.filter_groups.enable,
    "algorithm.normalize_rewards": algorithm.normalize_rewards,
    "algorithm.reward_clip": algorithm.reward_clip is not None,
    "rewards.overlong_buffer": config.rewards.overlong_buffer > 0,
  }
  names = [name for name, is_set in ignored.items() if is_set]
  if names:
    logging.warning(
      "%s: of runs by jaxrl_hybrid.train, not of a loop of your own", ", ".join(names)
    )


@contextlib.contextmanager
def directory_of(model: Any, name_or_path: str | Path | None) -> Iterator[Path]:
  """The HF directory of a model; that of one in memory lives in here only.

  Raises:
    ConfigError: both or none is given.
    ModelError: the name is no local directory.
  """
  if (model is None) == (name_or_path is None):
    raise ConfigError(
      "expected either a transformers model or model_name_or_path, got "
      f"{'neither' if model is None else 'both'}"
    )
  if model is None:
    yield _local(name_or_path)
    return
  with tempfile.TemporaryDirectory(prefix="jaxrl_hybrid-") as directory:
    model.save_pretrained(directory)
    yield Path(directory)


def find_tokenizer(given: Any, path: Path, model: Any) -> Any:
  """A tokenizer as given, or that of the directory ``given`` or of the model.

  Returns:
    None if the model came without one.

  Raises:
    ConfigError: ``given`` is neither a tokenizer nor a path.
  """
  if isinstance(given, PreTrainedTokenizerBase):
    return given
  if given is not None and not isinstance(given, str | Path):
    raise ConfigError(
      f"tokenizer: expected one of transformers or its directory, got {given!r:.80}"
    )
  origin = getattr(model, "name_or_path", "") or ""
  for directory in [given] if given is not None else [path, Path(origin or path)]:
    if given is not None or tokenizers.has_tokenizer(directory):
      return tokenizers.load_tokenizer(directory)
  return None


def open_source(
  path: Path, kind: str | None, tokenizer: Any
) -> tuple[str, model_source.ModelSource]:
  """(kind, the model of a directory); a classifier may start from a causal LM.

  Raises:
    ModelError: not supported, or of another kind.
  """
  kinds = (LM,) if kind == LM else (LM, CLASSIFIER)
  source = model_source.open_directory(
    path, key="model_name_or_path", kinds=kinds, tokenizer=tokenizer
  )
  if kind is None:
    kind = CLASSIFIER if is_classifier(source.hf_config) else LM
  return kind, source


def _local(name: str | Path) -> Path:
  """A directory by its path, or by its hub name from the local cache."""
  path = Path(name).expanduser()
  if path.is_dir():
    return path
  import huggingface_hub  # only for names

  try:
    found = huggingface_hub.snapshot_download(str(name), local_files_only=True)
  except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
    raise ModelError(
      f"model_name_or_path: expected an HF directory, or the name of a model in the "
      f"local cache, got {str(name)!r}; nothing is downloaded here, do it once by "
      f"`hf download {name} --local-dir DIR` and pass DIR"
    ) from error
  return Path(found)


def _update(config: ConfigDict, changes: Mapping[str, Any]) -> None:
  try:
    config.update_from_flattened_dict(changes)
  except (TypeError, ValueError, KeyError) as error:
    raise ConfigError(f"config: {error}") from error


def _flat(overrides: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
  for key, value in overrides.items():
    if isinstance(value, Mapping):
      yield from _flat(value, f"{prefix}{key}.")
    else:
      yield prefix + key, value


def _check_keys(changes: Mapping[str, Any]) -> None:
  known = [key for key, _ in config_lib.flatten(config_lib.base())]
  for key in changes:
    if key not in known:
      near = config_reader.nearest_key(key, known)
      hint = f"; did you mean {near!r}?" if near else ""
      raise ConfigError(f"config: unknown key {key!r}{hint}")
    if key in _ARGUMENTS:
      raise ConfigError(f"config: {key!r} is set by the argument {_ARGUMENTS[key]}")
    if key not in _USED and not key.startswith(_USED_SECTIONS):
      raise ConfigError(f"config: {key!r} means nothing to one model by itself")
