"""The KL divergence over the vocabulary: numpy, gradients, chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_hybrid.ops.divergence import kl_divergence

B, T, D, V, REAL = 2, 7, 5, 12, 11  # one column is padding


def arrays(seed=0):
  rng = np.random.default_rng(seed)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  return draw(B, T, D), draw(V, D), draw(B, T, D), draw(V, D)


def kl(hidden, head, other, other_head, chunk=3, **options):
  options = dict(temperature=0.7, vocab_size=REAL, chunk=chunk) | options
  return kl_divergence(hidden, head, other, other_head, **options)


def by_numpy(hidden, head, other, other_head, softcap=None):
  def probs(h, w):
    logits = np.asarray(h, np.float64) @ np.asarray(w, np.float64).T
    logits = logits if softcap is None else softcap * np.tanh(logits / softcap)
    weights = np.exp(logits[..., :REAL] / 0.7)
    return weights / weights.sum(-1, keepdims=True)

  p, q = probs(hidden, head), probs(other, other_head)
  return (p * np.log(p / q)).sum(-1)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("chunk", [2, 7, 100])
def test_equals_numpy(chunk, softcap):
  given = arrays()
  found = kl(*given, chunk=chunk, softcap=softcap)
  np.testing.assert_allclose(found, by_numpy(*given, softcap=softcap), rtol=2e-5)
  assert found.dtype == jnp.float32 and (found > 0).all()
  same = kl(*given[:2], *given[:2], chunk=chunk)
  np.testing.assert_allclose(same, 0, atol=1e-6)


def test_gradient_is_that_of_logits():
  """d KL / d logits = p (log p - log q - KL) / temperature."""
  hidden, head, other, other_head = arrays()
  found = jax.grad(lambda h: kl(h, head, other, other_head).sum())(hidden)
  p = jax.nn.softmax((hidden @ head.T)[..., :REAL] / 0.7)
  q = jax.nn.softmax((other @ other_head.T)[..., :REAL] / 0.7)
  ratio = jnp.log(p / q)
  logits = p * (ratio - (p * ratio).sum(-1, keepdims=True)) / 0.7
  np.testing.assert_allclose(found, logits @ head[:REAL], rtol=1e-3, atol=1e-5)
