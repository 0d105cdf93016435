"""Every family in the engine, with refills, shared and long prompts, on a mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_continuous import many, with_options
from test_engine import as_is, naive, setup
from transformers import AutoConfig

from jaxrl_hybrid.models import decoder, families
from jaxrl_hybrid.rollout.sampling import Sampling

EOS = (2, 5, 9)
SIZES = dict(
  vocab_size=37,
  hidden_size=32,
  intermediate_size=48,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  max_position_embeddings=64,
  pad_token_id=0,
)
LATENT = dict(
  q_lora_rank=16,
  kv_lora_rank=16,
  qk_nope_head_dim=8,
  qk_rope_head_dim=8,
  v_head_dim=8,
  num_key_value_heads=4,
  n_routed_experts=4,
  num_experts_per_tok=2,
  n_shared_experts=1,
  moe_intermediate_size=16,
  first_k_dense_replace=1,
)
FAMILIES = {
  "gemma2": dict(head_dim=8, query_pre_attn_scalar=8, sliding_window=6),
  "deepseek_v3": LATENT | dict(n_group=2, topk_group=1),
}
SLOW = {
  "olmo2": {},
  "mixtral": dict(num_local_experts=4),
  "llama": {},
  "mistral": dict(sliding_window=6),
  "qwen2": {},
  "qwen3": dict(head_dim=8),
  "qwen3_moe": dict(
    head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
  ),
  "gemma": dict(head_dim=8),
  "gemma3_text": dict(
    head_dim=8,
    query_pre_attn_scalar=8,
    sliding_window=6,
    layer_types=["sliding_attention", "full_attention"],
  ),
  "phi3": {},
  "deepseek_v2": LATENT | dict(n_group=2, topk_group=1, q_lora_rank=None),
}
CASES = [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


@pytest.mark.parametrize("family", CASES)
def test_tokens_equal_token_by_token(family):
  given = SIZES | (FAMILIES | SLOW)[family]
  spec = families.spec_from_hf(AutoConfig.for_model(family, **given).to_dict())
  spec = dataclasses.replace(spec, initializer_range=0.3)
  case = setup(eos=EOS, spec=spec.for_length(32))
  _, params, _, weights = case
  small = with_options(case, max_rows=3, prefill_tokens=8)
  prompts, draws = many(4, longest=15)
  sampling = Sampling(temperature=0.8)
  out = small.generate(weights, prompts, draws, n=2, max_new=8, sampling=sampling)
  plain = decoder.Decoder(case[0], jnp.float32, "xla", as_is)
  params = jax.device_get(params)
  for row in range(8):
    prompt, draw = prompts[row // 2], draws[row // 2]
    ids, log_probs = naive(plain, params, prompt, draw, row % 2, sampling, EOS, 8)
    assert out.ids[row, : out.lengths[row]].tolist() == ids
    np.testing.assert_allclose(out.log_probs[row, : len(ids)], log_probs, atol=2e-5)
