"""The key-value pairs of a GGUF file, with errors that name the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from jaxrl_hybrid.errors import ModelError

_TOKEN_NAMES = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}


class Metadata:
  """Typed access to a GGUF file's metadata.

  Attributes:
    tensors: the file's tensors, as the reader gives them.
    architecture: value of ``general.architecture``.
  """

  def __init__(self, source: Path):
    if not source.is_file():
      raise ModelError(f"no GGUF file {source}")
    try:
      reader = gguf.GGUFReader(source)
    except (ValueError, IndexError, KeyError) as error:
      raise ModelError(f"{source} is not a readable GGUF file: {error}") from error
    self._fields = reader.fields
    self.tensors = reader.tensors
    self.architecture: str = self.need("general.architecture")

  def get(self, key: str, default: Any = None) -> Any:
    """Returns a value, or the default if the file does not hold the key."""
    field = self._fields.get(key)
    return default if field is None else field.contents()

  def need(self, key: str) -> Any:
    """Returns a value that the file must hold."""
    value = self.get(key)
    if value is None:
      raise ModelError(f"the GGUF metadata lacks {key!r}")
    return value

  def arch_keys(self) -> set[str]:
    """Returns all keys below ``<architecture>.``, without that prefix."""
    prefix = self.architecture + "."
    return {k.removeprefix(prefix) for k in self._fields if k.startswith(prefix)}

  def arch(self, key: str, default: Any = None) -> Any:
    """Returns the single value of ``<architecture>.key``.

    Without a default the file must hold it.
    """
    key = f"{self.architecture}.{key}"
    value = self.need(key) if default is None else self.get(key, default)
    if isinstance(value, list):
      raise ModelError(f"GGUF key {key!r} differs between layers: not supported")
    return value

  def arch_float(self, key: str, default: float | None = None) -> float:
    """Returns a float32 value by its shortest decimal: 1e-05, not 9.99…e-06."""
    return float(str(np.float32(self.arch(key, default))))

  def token_id(self, name: str) -> int | None:
    """Returns the id of a special token, by its GGUF name, if there is one."""
    return self.get(f"tokenizer.ggml.{name}_token_id")

  def token_ids(self, *names: str) -> dict[str, int]:
    """Returns ``{"bos_token_id": 1, …}`` of those special tokens that exist.

    Args:
      *names: HF's names: bos, eos, pad, unk.
    """
    ids = {f"{n}_token_id": self.token_id(_TOKEN_NAMES[n]) for n in names}
    return {k: v for k, v in ids.items() if v is not None}
