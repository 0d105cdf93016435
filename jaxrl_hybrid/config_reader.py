"""Reading a config: from the command line, and from a run's directory."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict
from ml_collections.config_flags import config_flags

from jaxrl_hybrid.config import base, flatten, load_module
from jaxrl_hybrid.errors import ConfigError

FREE = (
  "model.random",
  "reward_model.random",
  "cost.model.random",
)  # sections of any HF config fields


def from_argv(argv: Sequence[str]) -> tuple[ConfigDict, str]:
  """Reads ``--config FILE[:ARG] --config.key=value ...``; returns (config, file).

  Raises:
    ConfigError: no config, an unreadable one, an unknown key or a wrong type.
  """
  argv = _with_config_first(argv)
  file = _config_file(argv)
  values = flags.FlagValues()
  holder = config_flags.DEFINE_config_file(
    "config", flag_values=values, sys_argv=list(argv), lock_config=True
  )
  try:
    rest = values(list(argv))
  except flags.UnrecognizedFlagError as error:
    raise ConfigError(f"{error}; expected --config and --config.KEY=VALUE") from error
  except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
    raise ConfigError(_explain(error, argv)) from error
  except Exception as error:  # whatever the user's file raises
    raise ConfigError(f"{file}: {type(error).__name__}: {error}") from error
  _check_keys(holder.value, file)
  if rest[1:]:
    raise ConfigError(f"unexpected arguments {rest[1:]}; expected --config.KEY=VALUE")
  return holder.value, file


def _check_keys(config: Any, file: str) -> None:
  """``get_config()`` must give the keys of ``config.base()``, no more, no less."""
  if not isinstance(config, ConfigDict):
    raise ConfigError(
      f"{file}: expected get_config() to return config.base() with changes, got "
      f"{type(config).__name__}"
    )
  known = {key for key, _ in flatten(base()) if key not in FREE}
  found = {key for key, _ in flatten(config) if not key.startswith(FREE)}
  if known != found:
    raise ConfigError(
      f"{file}: expected the keys of config.base(); unknown {sorted(found - known)}, "
      f"missing {sorted(known - found)}"
    )


def from_run(path: str | Path) -> ConfigDict:
  """Reads the resolved config that a run wrote (``config.json``).

  Raises:
    ConfigError: there is no such file, or it is of another version.
  """
  try:
    saved = json.loads(Path(path).read_text(encoding="utf-8"))
  except (OSError, ValueError) as error:
    raise ConfigError(f"cannot read the config of a run: {error}") from error
  config = base()
  with config.unlocked():
    for key, value in flatten(ConfigDict(_tuples(saved))):
      section = config
      *path_to, name = key.split(".")
      for part in path_to:
        section = section[part]
      if name not in section and ".".join(path_to) not in FREE:
        raise ConfigError(f"{path}: unknown key {key!r}, from another version?")
      section[name] = value
  load_module(config)
  return config


def _tuples(value: Any) -> Any:
  """JSON has lists where a config has tuples."""
  if isinstance(value, dict):
    return {k: _tuples(v) for k, v in value.items()}
  return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _with_config_first(argv: Sequence[str]) -> list[str]:
  """``--config FILE`` and ``--config=FILE`` alike, before the overrides."""
  head, rest, pending = [], [], False
  for arg in argv[1:]:
    if pending:
      head, pending = [f"--config={arg}"], False
    elif arg in ("--config", "-config"):
      pending = True
    elif arg.startswith("--config="):
      head = [arg]
    else:
      rest.append(arg)
  if pending:
    raise ConfigError("--config: expected a file after it, got nothing")
  return [argv[0], *head, *rest]


def _config_file(argv: Sequence[str]) -> str:
  """FILE[:ARG] of ``--config``; it must exist, what it holds is not looked at."""
  for arg in argv:
    if arg.startswith("--config="):
      file = arg.split("=", 1)[1]
      if not Path(file.split(":")[0]).is_file():
        raise ConfigError(f"--config: expected a Python file, got {file!r}")
      return file
  raise ConfigError("expected --config FILE, e.g. --config configs/quickstart.py")


def _explain(error: Exception, argv: Sequence[str]) -> str:
  keys = [key for key, _ in flatten(base())]
  for arg in argv:
    match = re.match(r"--config\.([\w.]+)", arg)
    if match and match[1].startswith(FREE):
      if isinstance(error, AttributeError | KeyError):
        return f"unknown config key {match[1]!r}; the config file does not set it"
    elif match and match[1] not in keys:
      near = nearest_key(match[1], keys)
      hint = f"; did you mean {near!r}?" if near else ""
      return f"unknown config key {match[1]!r}{hint}"
  text = str(error).strip()
  if isinstance(error, AttributeError):
    return f"the config file sets an unknown key: {text}"
  return text or type(error).__name__


def nearest_key(key: str, keys: Sequence[str]) -> str | None:
  """The nearest whole key, or the nearest by its last part."""
  by_last = {k.rsplit(".", 1)[-1]: k for k in keys}
  near = difflib.get_close_matches(key, keys, 1, 0.75)
  if near:
    return near[0]
  near = difflib.get_close_matches(key.rsplit(".", 1)[-1], list(by_last), 1)
  return by_last[near[0]] if near else None
