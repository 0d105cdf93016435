"""The auxiliary loss of experts against transformers', padding left out."""

import jax
import numpy as np
import pytest
from harness import build, random_tokens
from oracle import torch_model

from jaxrl_hybrid.ops import experts


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_balance_loss_equals_transformers(name, tmp_path):
  theirs = torch_model(name, tmp_path)
  import torch

  tokens = random_tokens(3, 20)
  real = np.arange(20) < np.array([[20], [11], [5]])
  with torch.no_grad():
    expected = theirs(
      torch.tensor(tokens, dtype=torch.long),
      attention_mask=torch.tensor(real).long(),
      output_router_logits=True,
    ).aux_loss
  model, params, layout = build(tmp_path, (1, 2, 1))

  def run(params, tokens, real):
    weights = layout.prepare(params)
    scored = model.score(weights, tokens, temperature=1.0, chunk=20, real_BT=real)
    return experts.balance_loss(scored.load)

  got = float(jax.jit(run)(params, tokens, real))
  assert got == pytest.approx(float(expected), rel=1e-4)
  everything = float(jax.jit(run)(params, tokens, np.ones_like(real)))
  assert abs(everything - got) > 1e-3 * got
