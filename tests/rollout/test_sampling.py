"""Sampling against distributions written out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_hybrid.rollout import sampling
from jaxrl_hybrid.rollout.sampling import Sampling


def draw(probs, settings, count=40_000, seed=0):
  """Frequencies of `count` draws from one distribution."""
  logits = jnp.broadcast_to(jnp.log(jnp.asarray(probs)), (count, len(probs)))
  uniform = jax.random.uniform(jax.random.key(seed), (count,))
  tokens, log_probs = jax.jit(sampling.sample, static_argnums=2)(
    logits, uniform, settings
  )
  return np.bincount(tokens, minlength=len(probs)) / count, tokens, log_probs


@pytest.mark.parametrize(
  "settings,expected",
  [
    (Sampling(), [0.5, 0.25, 0.15, 0.1]),
    (Sampling(temperature=0.5), [0.7246, 0.1812, 0.0652, 0.0290]),
    (Sampling(top_k=2), [2 / 3, 1 / 3, 0, 0]),
    (Sampling(top_p=0.7), [2 / 3, 1 / 3, 0, 0]),
    (Sampling(top_p=0.75), [2 / 3, 1 / 3, 0, 0]),
    (Sampling(top_p=0.76), [0.5556, 0.2778, 0.1667, 0]),
    (Sampling(top_k=3, top_p=0.5), [1, 0, 0, 0]),
    (Sampling(temperature=0.0), [1, 0, 0, 0]),
    (Sampling(min_p=0.3), [0.5556, 0.2778, 0.1667, 0]),  # at least 0.15
    (Sampling(min_p=0.31), [2 / 3, 1 / 3, 0, 0]),
    (Sampling(top_p=0.76, min_p=0.6), [1, 0, 0, 0]),
  ],
)
def test_frequencies(settings, expected):
  frequencies, _, _ = draw([0.5, 0.25, 0.15, 0.1], settings)
  np.testing.assert_allclose(frequencies, expected, atol=0.012)
  assert (frequencies[np.array(expected) == 0] == 0).all()


def test_log_probs_are_at_the_temperature_and_before_truncation():
  logits = jnp.array([[2.0, 1.0, 0.0]])
  _, at_07 = sampling.sample(
    logits, jnp.array([0.0]), Sampling(temperature=0.7, top_k=1)
  )
  np.testing.assert_allclose(at_07, [-0.2601], atol=5e-5)
  _, greedy = sampling.sample(logits, jnp.array([0.0]), Sampling(temperature=0.0))
  np.testing.assert_allclose(greedy, [-0.4076], atol=5e-5)


@pytest.mark.parametrize("vocab", [1, 7, 256, 257, 1000])
def test_inverse_cdf_equals_a_plain_search(vocab):
  rng = np.random.default_rng(vocab)
  weights = rng.random((500, vocab)).astype(np.float32)
  weights[rng.random(weights.shape) < 0.5] = 0
  weights[:, vocab // 2] = 0.3
  uniform = rng.random(500).astype(np.float32)
  got = np.asarray(sampling.inverse_cdf(jnp.asarray(weights), jnp.asarray(uniform)))
  cdf = np.cumsum(weights.astype(np.float64), -1)
  point = uniform * cdf[:, -1]
  plain = (cdf <= point[:, None]).sum(-1)
  near_edge = np.abs(cdf - point[:, None]).min(-1) < 1e-4 * cdf[:, -1]
  assert ((got == plain) | near_edge).all()
  assert (weights[np.arange(500), got] > 0).all()


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-24])
def test_weight_zero_is_never_drawn_at_the_ends(uniform):
  weights = jnp.array([[0.0, 0.2, 0.1, 0.0, 0.0]])
  index = int(sampling.inverse_cdf(weights, jnp.array([uniform], jnp.float32))[0])
  assert index == (1 if uniform == 0 else 2)


def test_keys_do_not_depend_on_the_place_in_the_batch():
  key = jax.random.key(0)
  draws, samples = jnp.array([5, 9, 5], jnp.uint32), jnp.array([0, 1, 1], jnp.uint32)
  together = sampling.uniforms(sampling.row_keys(key, draws, samples), 3)
  alone = [
    sampling.uniforms(sampling.row_keys(key, draws[i : i + 1], samples[i : i + 1]), 3)
    for i in range(3)
  ]
  np.testing.assert_array_equal(together, np.concatenate(alone))
  assert len(set(np.asarray(together).tolist())) == 3


@pytest.mark.parametrize(
  "temperature,seen,expected",
  [
    # Logits 2, 1, -1 and penalty 2: the first becomes 1, the last -2.
    (1.0, [1, 0, 0], [0.4683, 0.4683, 0.0634]),
    (1.0, [0, 0, 1], [0.7214, 0.2654, 0.0132]),
    (0.5, [1, 0, 1], [0.4994, 0.4994, 0.0012]),
    (0.0, [1, 0, 0], [1, 0, 0]),  # a tie: the first
  ],
)
def test_repetition_penalty(temperature, seen, expected):
  """Softmax of (1, 1, -1), (2, 1, -2) and (2, 2, -4), worked out by hand."""
  count = 40_000
  logits = jnp.broadcast_to(jnp.array([2.0, 1.0, -1.0]), (count, 3))
  uniform = jax.random.uniform(jax.random.key(0), (count,))
  settings = Sampling(temperature=temperature, repetition_penalty=2.0)
  seen = jnp.broadcast_to(jnp.array(seen, bool), (count, 3))
  tokens, log_probs = sampling.sample(logits, uniform, settings, seen)
  frequencies = np.bincount(tokens, minlength=3) / count
  np.testing.assert_allclose(frequencies, expected, atol=0.012)
  plain = jax.nn.log_softmax(jnp.array([2.0, 1.0, -1.0]) / (temperature or 1.0))
  np.testing.assert_allclose(log_probs, plain[tokens], atol=1e-5)
