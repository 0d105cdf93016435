"""Logits, export and cached decoding against transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import FAMILIES, torch_model

from jaxrl_hybrid.models import decoder
from jaxrl_hybrid.models import params as params_lib
from jaxrl_hybrid.models import spec as spec_lib
from jaxrl_hybrid.models.hf import export, load
from jaxrl_hybrid.parallel import hybrid, rules
from jaxrl_hybrid.parallel import mesh as mesh_lib


def build(directory, mesh_shape=(1, 1, 1)):
  """(decoder, params, layout) of an HF directory, fp32."""
  spec = spec_lib.spec_from_hf(spec_lib.load_hf_config(directory))
  layout = rules.Layout(mesh_lib.train_mesh(mesh_shape), rules.TRAIN)
  model = decoder.Decoder(spec, jnp.float32, "xla", layout.constrain)
  vocab = spec.padded_vocab(mesh_shape[1])
  shardings = layout.shardings(params_lib.logical_axes(spec))
  return model, load.load_params(directory, spec, shardings, vocab=vocab), layout


def logits_of(model, params, tokens):
  """fp32 logits of the un-padded vocabulary."""

  def run(params, tokens):
    hidden = model.hidden(params, tokens)
    flat = model.logits(params, hidden.reshape(-1, hidden.shape[-1]))
    return flat.reshape(*tokens.shape, -1)[..., : model.spec.vocab_size]

  return np.asarray(jax.jit(run)(params, tokens))


def hf_logits(model, tokens):
  import torch

  with torch.no_grad():
    return model(torch.tensor(np.asarray(tokens, np.int64))).logits.numpy()


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_logits_equal_transformers(name, tmp_path):
  theirs = torch_model(name, tmp_path)
  model, params, _ = build(tmp_path)
  # 200 positions: past the original context of the scaled ropes (64).
  tokens = np.random.default_rng(0).integers(0, 131, (2, 200)).astype(np.int32)
  expected = hf_logits(theirs, tokens)
  got = logits_of(model, params, tokens)
  assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max()


def test_llama3_scaling_matters_at_long_positions_only(tmp_path):
  theirs = torch_model("llama3_rope", tmp_path)
  model, params, _ = build(tmp_path)
  plain = decoder.Decoder(
    spec_lib.dataclasses.replace(model.spec, rope=spec_lib.RopeSpec(5e5)),
    jnp.float32,
    "xla",
    model.constrain,
  )
  tokens = np.random.default_rng(0).integers(0, 131, (1, 200)).astype(np.int32)
  expected = hf_logits(theirs, tokens)
  gap = np.abs(logits_of(plain, params, tokens) - expected).max((0, 2))
  assert gap[0] < 1e-4 and gap[150:].max() > 1e-2


@pytest.mark.parametrize("mesh_shape", [(1, 2, 2), (1, 4, 1)])
def test_logits_on_a_mesh_with_padded_vocab(mesh_shape, tmp_path):
  theirs = torch_model("qwen2", tmp_path, num_key_value_heads=4)
  model, params, _ = build(tmp_path, mesh_shape)
  assert params["embed"]["kernel"].shape[0] == 192
  tokens = np.random.default_rng(0).integers(0, 131, (4, 24)).astype(np.int32)
  expected = hf_logits(theirs, tokens)
  got = logits_of(model, params, tokens)
  assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("name", ["llama_tied", "qwen2", "qwen3_bias"])
@pytest.mark.parametrize("shard_bytes", [export.MAX_SHARD_BYTES, 40_000])
def test_export_loads_in_transformers(name, shard_bytes, tmp_path):
  theirs = torch_model(name, tmp_path / "in")
  model, params, _ = build(tmp_path / "in", (1, 2, 1) if name == "qwen2" else (1, 1, 1))
  export.export_hf(
    params,
    model.spec,
    tmp_path / "out",
    hf_config=spec_lib.load_hf_config(tmp_path / "in"),
    source_dir=tmp_path / "in",
    max_shard_bytes=shard_bytes,
  )
  from transformers import AutoModelForCausalLM

  again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
  tokens = np.arange(20)[None]
  np.testing.assert_array_equal(hf_logits(again, tokens), hf_logits(theirs, tokens))
  with load.Checkpoint(tmp_path / "in") as a, load.Checkpoint(tmp_path / "out") as b:
    assert a.names() == b.names()
    assert all(a.slice(n).get_dtype() == b.slice(n).get_dtype() for n in a.names())
  assert (tmp_path / "out" / "generation_config.json").exists()


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_prefill_and_decode_equal_the_full_forward(name, tmp_path):
  torch_model(name, tmp_path)
  model, params, layout = build(tmp_path)
  axes = params_lib.logical_axes(model.spec)
  engine = hybrid.HybridEngine(axes, layout, jnp.float32, model.spec.num_layers)
  weights, version = engine.to_generation(params)
  assert version == 1
  tokens = np.random.default_rng(1).integers(0, 131, (2, 12)).astype(np.int32)
  expected = logits_of(model, params, tokens)
  hidden, caches = model.prefill(weights, jnp.asarray(tokens[:, :5]))
  pad = lambda kv: jnp.pad(kv, ((0, 0), (0, 7), (0, 0), (0, 0)))
  caches = [(pad(k), pad(v)) for k, v in caches]
  last = hidden[:, -1]
  for t in range(5, 12):
    got = model.logits(weights, last)[:, :131]
    np.testing.assert_allclose(got, expected[:, t - 1], atol=2e-5)
    last, caches = model.decode(
      weights, jnp.asarray(tokens[:, t]), jnp.full((2,), t, jnp.int32), caches
    )
