"""Sixteen fake CPU devices for every test; smaller meshes take a slice.

``JAXRL_TEST_GPU=1 pytest tests/gpu`` leaves the GPU to the tests in that folder.
"""

import os

import jax

if os.environ.get("JAXRL_TEST_GPU") != "1":
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", 16)
