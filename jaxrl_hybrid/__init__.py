"""HybridFlow-style RLHF in JAX: one process, one controller, any HF causal LM."""

__version__ = "0.1.0"
