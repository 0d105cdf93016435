"""Sixteen fake CPU devices for every test; smaller meshes take a slice."""

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 16)
