"""HybridFlow-style RLHF in JAX: one process, one controller, any HF causal LM."""

from __future__ import annotations

import importlib
import os
from typing import Any

# Only tokenizers and configs of transformers are used; it need not warn that it
# finds no torch.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

__version__ = "0.1.0"
# Name -> where it is defined; importing the package alone imports none of it.
_EXPORTS = {
  "CriticWarmupScheduler": "jaxrl_hybrid.api.critic_warmup",
  "DataCollector": "jaxrl_hybrid.api.data_collector",
  "DynamicDataSampler": "jaxrl_hybrid.api.data_sampler",
  "HFModelWrapper": "jaxrl_hybrid.api.model_wrapper",
  "StyleConstraint": "jaxrl_hybrid.workers.style_loss",
  "Trainer": "jaxrl_hybrid.api.trainer",
}
__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
  if name not in _EXPORTS:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
  return sorted([*globals(), *_EXPORTS])
