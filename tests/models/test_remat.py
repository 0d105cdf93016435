"""What the backward pass computes a second time, by ``model.remat``."""

import jax
import numpy as np

from jaxrl_hybrid.models import params as params_lib
from tests.workers import build_tiny as tiny

TOKENS = np.arange(2 * 32).reshape(2, 32) % tiny.SPEC.vocab_size


def flops(remat):
  """Of the compiled gradient of a sum of log-probs."""
  decoder = tiny.make_decoder(remat=remat)

  def loss(params):
    return decoder.score(params, TOKENS, temperature=1.0, chunk=64)[0].sum()

  params = params_lib.abstract_params(tiny.SPEC, vocab=tiny.VOCAB)
  return jax.jit(jax.grad(loss)).lower(params).compile().cost_analysis()["flops"]


def test_more_is_computed_again_from_none_to_full():
  nothing, products, full = map(flops, ("none", "products", "full"))
  assert nothing < products < full
  assert flops("attention") == full  # only cuDNN's attention can be kept
