"""An HF directory's safetensors, single file or sharded index."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np

from jaxrl_hybrid.errors import ModelError
from jaxrl_hybrid.models.hf.stored import StoredTensor, TensorFile

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"


class Checkpoint(contextlib.AbstractContextManager):
  """The tensors of an HF directory by name; only headers are read here.

  Attributes:
    path: the directory.
    tensors: name -> ``StoredTensor``.

  Raises:
    ModelError: a file or the index is missing, damaged, or contradicts another.
  """

  def __init__(self, path: str | Path):
    self.path = Path(path)
    self._stack = contextlib.ExitStack()
    self.tensors: dict[str, StoredTensor] = {}
    with contextlib.ExitStack() as on_error:
      on_error.push(self._stack)
      weight_map = self._weight_map()
      for file in sorted(set(weight_map.values())) if weight_map else [SINGLE_FILE]:
        self._add(self.path / file)
      self._check_index(weight_map)
      on_error.pop_all()

  def __exit__(self, *exc: object) -> None:
    self._stack.close()

  def __contains__(self, name: str) -> bool:
    return name in self.tensors

  def names(self) -> set[str]:
    """All tensor names."""
    return set(self.tensors)

  def read(self, name: str) -> np.ndarray:
    """A whole tensor."""
    return self.tensors[name].read()

  def _add(self, path: Path) -> None:
    file = TensorFile(path)
    self._stack.callback(file.close)
    for name in sorted(file.tensors.keys() & self.tensors.keys()):
      raise ModelError(
        f"{path}: {name} is in {self.tensors[name].file.path.name} too; expected it "
        "once"
      )
    self.tensors |= file.tensors

  def _weight_map(self) -> dict[str, str]:
    """Tensor name -> file name; empty for a single file, which comes first in HF."""
    if (self.path / SINGLE_FILE).is_file():
      return {}
    index = self.path / INDEX_FILE
    if not index.is_file():
      found = sorted(p.name for p in self.path.glob("*") if p.is_file())
      raise ModelError(
        f"{self.path}: expected {SINGLE_FILE} or {INDEX_FILE}, found {found}; "
        "pickled weights (.bin, .pt) are never read, save them as safetensors"
      )
    try:
      mapping = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
      files = {name: Path(file).name for name, file in mapping.items()}
      if not files or files != mapping:
        raise ValueError("weight_map must name files of this directory")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
      raise ModelError(f"{index}: not a readable index: {error!r}") from error
    return files

  def _check_index(self, weight_map: dict[str, str]) -> None:
    wrong = sorted(
      name
      for name, file in weight_map.items()
      if name not in self or self.tensors[name].file.path.name != file
    )
    if wrong:
      file = weight_map[wrong[0]]
      raise ModelError(
        f"{self.path / INDEX_FILE}: says that {file} holds {wrong[0]}, which it does "
        f"not ({len(wrong)} such tensors)"
      )
