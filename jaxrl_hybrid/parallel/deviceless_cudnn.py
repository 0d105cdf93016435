"""The one place that reaches into JAX: cuDNN attention for a GPU that is not there.

JAX 0.10.2 to 0.12 ask a *local* device, not the one compiled for, whether it
is a Hopper before they let cuDNN attention have heads wider than 128 or values
narrower than keys. Without a local GPU the answer is no, and no public setting
changes it. Inside this context the answer is that of the GPU compiled for.
Heads of up to 128 need none of this.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterator

_MODULE = "jax._src.cudnn.fused_attention_stablehlo"
_CHECK = "check_compute_capability"


@contextlib.contextmanager
def answering_for(compute_capability: tuple[int, int]) -> Iterator[None]:
  """Trace, lower and compile for a GPU of ``compute_capability`` inside this.

  The answer holds for the whole process while the context is open. A JAX that
  no longer asks is left alone, with a warning: its own check then decides.
  """
  try:
    module = importlib.import_module(_MODULE)
    original = getattr(module, _CHECK)
  except (ImportError, AttributeError):
    logging.warning(
      "this JAX has no %s.%s: cuDNN attention with heads wider than 128 may be "
      "refused without a GPU",
      _MODULE,
      _CHECK,
    )
    yield
    return

  def check(capability: str) -> bool:
    return compute_capability >= tuple(int(part) for part in capability.split("."))

  setattr(module, _CHECK, check)
  try:
    yield
  finally:
    setattr(module, _CHECK, original)
