"""Sixteen fake CPU devices for every test; smaller meshes take a slice.

``JAXRL_TEST_GPU=1 pytest tests/gpu`` leaves the GPU to the tests in that folder.
Compiled programs are shared by the processes of one session, and by the runs that
tests start: most of these differ in what they do, not in what they compile.
"""

import atexit
import os
import shutil
import tempfile

CACHE = "JAX_COMPILATION_CACHE_DIR"
ON_GPU = os.environ.get("JAXRL_TEST_GPU") == "1"

if CACHE not in os.environ and not ON_GPU:
  os.environ[CACHE] = tempfile.mkdtemp(prefix="jaxrl-tests-")
  os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
  atexit.register(shutil.rmtree, os.environ[CACHE], ignore_errors=True)

import jax  # noqa: E402

if not ON_GPU:
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", 16)
