"""Python files of the user's own, found by path or by module name."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import pathlib
import sys
import types
from collections.abc import Iterable

from jaxrl_hybrid.errors import ConfigError


def load(place: str, what: str) -> types.ModuleType:
  """Imports ``path/to/file.py`` or ``package.module``, once.

  Args:
    place: of the file; what ends in ``.py`` is a path.
    what: asks for it, for errors: "reward", "algorithm.module".

  Raises:
    ConfigError: there is no such file, or it fails on import.
  """
  return _load_path(place, what) if place.endswith(".py") else _load_name(place, what)


def nearest(name: str, known: Iterable[str]) -> str:
  """Returns "; did you mean 'x'?" with the known names close to name, or ""."""
  close = difflib.get_close_matches(name, list(known), n=3)
  return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def _load_name(name: str, what: str) -> types.ModuleType:
  try:
    return importlib.import_module(name)
  except (Exception, SystemExit) as error:
    raise ConfigError(
      f"{what}: expected an importable module, got {name!r}, which fails with "
      f"{type(error).__name__}: {error}"
    ) from error


def _load_path(place: str, what: str) -> types.ModuleType:
  path = pathlib.Path(place).expanduser().resolve()
  if not path.is_file():
    near = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
    raise ConfigError(
      f"{what}: expected a Python file, got {place!r}, which does not exist"
      f"{nearest(path.name, near)}"
    )
  digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
  name = f"jaxrl_user_{path.stem}_{digest}"
  if name in sys.modules:  # two functions of one file share its state
    return sys.modules[name]
  spec = importlib.util.spec_from_file_location(name, path)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module
  try:
    spec.loader.exec_module(module)
  except (Exception, SystemExit) as error:
    del sys.modules[name]
    raise ConfigError(
      f"{what}: {place} fails on import with {type(error).__name__}: {error}"
    ) from error
  return module
