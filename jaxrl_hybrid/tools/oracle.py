"""An HF directory as transformers computes with it; needs torch."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from jaxrl_hybrid.errors import ModelError


class Oracle:
  """transformers' model of a directory, on the CPU.

  Args:
    path: HF directory.
    dtype: of weights and products, e.g. ``float32``.
    classifier: a sequence classifier, not a causal LM.

  Raises:
    ModelError: torch is not installed, or transformers cannot load the directory.
  """

  def __init__(self, path: str | Path, *, dtype: str, classifier: bool = False):
    self._torch = _import_torch()
    import transformers  # heavy

    transformers.utils.logging.disable_progress_bar()
    kind = "SequenceClassification" if classifier else "CausalLM"
    loader = getattr(transformers, f"AutoModelFor{kind}")
    try:
      self._model = loader.from_pretrained(
        str(path),
        dtype=getattr(self._torch, dtype),
        attn_implementation="eager",
        local_files_only=True,
        trust_remote_code=False,
      ).eval()
    except (ValueError, OSError, KeyError, RuntimeError) as error:
      raise ModelError(f"{path}: transformers cannot load it: {error}") from error

  def logits(self, tokens_BT: np.ndarray) -> np.ndarray:
    """fp32 logits ``[B, T, V]`` of rows without padding."""
    return self._forward(tokens_BT)

  def greedy(self, prompt_P: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(continuation int32 ``[count]``, the fp32 logits ``[count, V]`` it comes from).

    By a whole forward for each token: no cache, no generation_config.
    """
    tokens, found = list(map(int, prompt_P)), []
    for _ in range(count):
      found.append(self._forward(np.array([tokens]))[0, -1])
      tokens.append(int(found[-1].argmax()))
    return np.array(tokens[len(prompt_P) :], np.int32), np.stack(found)

  def score(self, tokens_T: np.ndarray) -> float:
    """The score of one row without padding."""
    self._model.config.pad_token_id = None  # the pad id is a token like any other
    return float(self._forward(tokens_T[None])[0, 0])

  def _forward(self, tokens_BT: np.ndarray) -> np.ndarray:
    with self._torch.no_grad():
      tokens: Any = self._torch.tensor(np.asarray(tokens_BT, np.int64))
      return self._model(tokens).logits.float().numpy()


def _import_torch() -> ModuleType:
  try:
    import torch
  except ImportError as error:
    raise ModelError(
      "verify_model compares with transformers, which needs torch: pip install torch "
      "(a build for CPUs is enough; nothing else here needs it)"
    ) from error
  return torch
