"""What a decode step compiles to on a GPU: few kernels, and the cache in place."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import pytest

from jaxrl_hybrid.models.decoder import Decoder
from jaxrl_hybrid.models.spec import ModelSpec
from jaxrl_hybrid.parallel import mesh as mesh_lib
from jaxrl_hybrid.parallel import topology
from jaxrl_hybrid.parallel import weights as weights_lib
from jaxrl_hybrid.parallel.hybrid import HybridEngine

ROWS, LENGTH, LAYERS = 128, 1024, 3
# Widths of Qwen2.5-1.5B.
SPEC = ModelSpec(
  "qwen2", 151_936, 1536, 8960, LAYERS, 12, 2, 128, LENGTH, qkv_bias=True
).for_length(LENGTH)
CACHE = f"[{ROWS},{LENGTH},2,128]"
# The four products, attention, two writes of the cache, the queries' rope, two norms
# and the activation. float16: how large a row is inside the MLP, and the residual.
KERNELS = {"bfloat16": 11, "float16": 13}

pytestmark = pytest.mark.skipif(bool(topology.available()), reason=topology.available())


@functools.cache
def compiled(dtype):
  """A step with logits, for one H200."""
  mesh = mesh_lib.train_mesh((1, 1, 1), topology.devices("h200", 1, 1))
  train = weights_lib.train_layout(SPEC, mesh, sequence_parallel=False)
  source = weights_lib.WeightLayout(SPEC, train, jnp.dtype(dtype))
  target = weights_lib.generation_layout(SPEC, mesh_lib.generation_mesh(mesh, (1, 1)))
  weights = HybridEngine(source, target).copy(source.abstract_weights())
  decoder = Decoder(SPEC, jnp.dtype(dtype), "cudnn", target.constrain)
  shape = lambda *dims, dtype=jnp.int32: jax.ShapeDtypeStruct(
    dims, dtype, sharding=target.replicated
  )
  cache = shape(ROWS, LENGTH, *decoder.cache_dims()[0], dtype=decoder.dtype)
  caches = [(cache, cache)] * LAYERS

  def step(weights, tokens, positions, caches):
    hidden, caches = decoder.decode(weights, tokens, positions, caches)
    return decoder.logits(weights, hidden), caches

  lowered = jax.jit(step, donate_argnums=3).lower(
    weights, shape(ROWS), shape(ROWS), caches
  )
  return lowered.compile({"xla_gpu_enable_triton_gemm": False})


def kernels(text):
  """(operation, shape of its result) of all that a program starts."""
  entry = text[text.index("\nENTRY") :]
  pattern = r"= (.+?) (fusion|custom-call|copy|convert|transpose|reduce|scatter)\("
  return [(op, shape) for shape, op in re.findall(pattern, entry)]


@pytest.mark.parametrize("dtype", KERNELS)
def test_a_layer_is_few_kernels_and_writes_its_cache_in_place(dtype):
  program = compiled(dtype)
  found = kernels(program.as_text())
  # Besides: the embedding, rope tables once for all layers, lengths, the last norm
  # and the head.
  assert len(found) <= KERNELS[dtype] * LAYERS + 5, collections.Counter(found)
  caches = [op for op, shape in found if CACHE in shape]
  assert caches == ["fusion"] * 2 * LAYERS  # the scatters
  memory = topology.memory(program)
  size = LAYERS * 2 * ROWS * LENGTH * 2 * 128 * 2
  assert memory["alias"] == size
  # Logits are a result; no weight is converted and no cache copied.
  assert memory["temp"] < 20e6
