"""Classes for use in your own Python, thin over workers and controller.

They are exported from ``jaxrl_hybrid`` itself, and imported when first asked for.
"""
