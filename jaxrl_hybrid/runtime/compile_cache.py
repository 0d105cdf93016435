"""Where compiled programs are kept from one run to the next."""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Mapping
from pathlib import Path

AUTO, OFF = "auto", "off"
JAX_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
CPU_INFO = Path("/proc/cpuinfo")


def directory(setting: str, environ: Mapping[str, str]) -> Path | None:
  """The directory that ``trainer.compile_cache`` stands for; None leaves JAX's own.

  Args:
    setting: ``auto``, ``off`` or a directory.
    environ: with JAX's own variable set, ``auto`` leaves it to that.
  """
  if setting == OFF or (setting == AUTO and environ.get(JAX_VARIABLE)):
    return None
  if setting != AUTO:
    return Path(setting).expanduser().absolute()
  home = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
  return Path(home) / "jaxrl_hybrid" / "compiled" / _machine()


def is_writable(directory: Path) -> bool:
  """Makes the directory; says so if that is not possible."""
  try:
    directory.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    logging.warning(
      "compiled programs are not kept: %s; set trainer.compile_cache to a directory "
      "that can be written, or to off",
      error,
    )
    return False
  return True


def _machine() -> str:
  """Tells processors apart: programs for one may not run on another that shares the
  home directory."""
  flags = ""
  if CPU_INFO.exists():
    lines = CPU_INFO.read_text().splitlines()
    flags = next((x for x in lines if x.startswith(("flags", "Features"))), "")
  digest = hashlib.sha256(flags.encode()).hexdigest()[:8]
  return f"{platform.machine()}-{digest}"
