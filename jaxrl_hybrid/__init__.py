"""HybridFlow-style RLHF in JAX: one process, one controller, any HF causal LM."""

import os

# Only tokenizers and configs of transformers are used; it need not warn that it
# finds no torch.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

__version__ = "0.1.0"
