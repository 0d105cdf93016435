"""Logits, export and cached decoding against transformers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
  VOCAB,
  assert_logits_equal,
  build,
  hf_logits,
  logits_of,
  random_tokens,
)
from oracle import FAMILIES, torch_model

from jaxrl_hybrid.models import decoder
from jaxrl_hybrid.models import spec as spec_lib
from jaxrl_hybrid.parallel import hybrid
from jaxrl_hybrid.parallel import mesh as mesh_lib
from jaxrl_hybrid.parallel import weights as weights_lib
from jaxrl_hybrid.parallel.experts import sharded_mixture


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_logits_equal_transformers(name, tmp_path):
  theirs = torch_model(name, tmp_path)
  # 200 positions: past the original context of the scaled ropes (64).
  assert_logits_equal(theirs, build(tmp_path), random_tokens(2, 200))


def test_llama3_scaling_matters_at_long_positions_only(tmp_path):
  theirs = torch_model("llama3_rope", tmp_path)
  model, params, layout = build(tmp_path)
  spec = dataclasses.replace(model.spec, rope=spec_lib.RopeSpec(5e5))
  plain = dataclasses.replace(model, spec=spec)
  tokens = random_tokens(1, 200)
  expected = hf_logits(theirs, tokens)
  gap = np.abs(logits_of(plain, params, layout, tokens) - expected).max((0, 2))
  assert gap[0] < 1e-4 and gap[150:].max() > 1e-2


@pytest.mark.parametrize("mesh", [(1, 2, 2), (1, 4, 1), (3, 2, 2)])
def test_logits_on_a_mesh_with_padded_vocab(mesh, tmp_path):
  theirs = torch_model("qwen2", tmp_path, num_key_value_heads=4)
  built = build(tmp_path, mesh)
  assert built[1]["embed"]["kernel"].shape[0] == 192
  assert_logits_equal(theirs, built, random_tokens(4, 24))


# 9 query and 3 key/value heads as in SmolLM2, 14 and 2 as in Qwen2.5-0.5B.
NINE = (
  "llama_bias",
  dict(hidden_size=72, num_attention_heads=9, num_key_value_heads=3),
)
FOURTEEN = ("qwen2", dict(hidden_size=112, num_attention_heads=14))
THREE_LAYERS = ("qwen3", {})


@pytest.mark.parametrize(
  "model,mesh",
  [
    (NINE, (1, 2, 1)),
    (NINE, (1, 4, 2)),
    (NINE, (1, 8, 1)),
    (FOURTEEN, (1, 4, 1)),
    (FOURTEEN, (1, 8, 2)),
    (THREE_LAYERS, (2, 1, 1)),
    (THREE_LAYERS, (4, 2, 2)),
    (NINE, (2, 4, 2)),
  ],
  ids=str,
)
def test_logits_on_a_mesh_that_divides_neither_heads_nor_layers(model, mesh, tmp_path):
  theirs = torch_model(model[0], tmp_path, **model[1])
  assert_logits_equal(theirs, build(tmp_path, mesh), random_tokens(4, 24))


DECODED = [
  (("llama", {}), (1, 1, 1), (1, 1)),
  (NINE, (1, 4, 1), (1, 4)),
  (NINE, (2, 4, 1), (1, 2)),
  (FOURTEEN, (1, 8, 1), (1, 8)),
  (("gemma2", {}), (1, 2, 1), (1, 1)),
  (("gemma3", {}), (2, 2, 1), (2, 2)),
  (("phi3_longrope", {}), (1, 1, 1), (1, 1)),
  (("olmo2", {}), (1, 8, 1), (1, 8)),
  (("qwen3_moe", {}), (2, 4, 2), (2, 2)),
  (("deepseek_v2", {}), (1, 4, 2), (1, 2)),
  (("deepseek_v3", {}), (2, 2, 1), (2, 1)),
]
SLOW_DECODED = [
  pytest.param((name, {}), mesh, (1, 2), marks=pytest.mark.slow, id=f"{name}-{mesh}")
  for name in sorted(FAMILIES)
  for mesh in ((1, 2, 1), (2, 2, 2))
]


@pytest.mark.parametrize("model,mesh,generation", DECODED + SLOW_DECODED, ids=str)
def test_prefill_and_decode_equal_the_full_forward(model, mesh, generation, tmp_path):
  torch_model(model[0], tmp_path, **model[1])
  # 36 positions: past the windows of 24; ropes as for 200.
  model, params, layout = build(tmp_path, mesh, length=200)
  tokens, prompt = random_tokens(4, 36, seed=1), 31
  expected = logits_of(model, params, layout, tokens)
  target = weights_lib.generation_layout(
    model.spec, mesh_lib.generation_mesh(layout.train.mesh, generation)
  )
  model = decoder.Decoder(
    model.spec,
    jnp.float32,
    "xla",
    target.constrain,
    heads=weights_lib.plan_heads(model.spec, target.mesh),
    stages=generation[0],
    mixture=sharded_mixture(target, model.spec),
  )
  switch = hybrid.HybridEngine(layout, target)
  weights, version = switch.to_generation(jax.jit(layout.prepare)(params))
  switch.verify()
  assert version == 1
  hidden, caches = jax.jit(model.prefill)(weights, tokens[:, :prompt])
  assert [x.shape[-2:] for x in caches[-1]] == model.cache_dims()
  pads = lambda x: [(0, 5 * (axis == x.ndim - 3)) for axis in range(x.ndim)]
  caches = jax.tree.map(lambda x: jnp.pad(x, pads(x)), caches)
  last, decode, logits = hidden[:, -1], jax.jit(model.decode), jax.jit(model.logits)
  for t in range(prompt, 36):
    np.testing.assert_allclose(
      logits(weights, last)[:, :VOCAB],
      expected[:, t - 1],
      atol=2e-5 * max(1, np.abs(expected).max()),
    )
    last, caches = decode(weights, tokens[:, t], np.full((4,), t, np.int32), caches)
