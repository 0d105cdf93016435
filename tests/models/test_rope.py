"""Rotary frequencies by hand, and what a rotation must keep."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_hybrid.models import rope
from jaxrl_hybrid.models.spec import RopeSpec

LLAMA3 = RopeSpec(
  5e5,
  "llama3",
  (
    ("factor", 32.0),
    ("high_freq_factor", 4.0),
    ("low_freq_factor", 1.0),
    ("original_max_position_embeddings", 8192),
  ),
)


def test_llama3_frequencies_are_those_of_the_model_card():
  got, factor = rope.inverse_frequencies(LLAMA3, 64)
  np.testing.assert_allclose(
    got[[0, 10, 15, 16, 20, 31]],
    [1, 0.0165604, 0.00129055, 4.29557e-4, 8.57026e-6, 9.41831e-8],
    rtol=4e-6,
  )
  assert factor == 1.0 and got.dtype == np.float32 and got.shape == (32,)


def test_default_frequencies_are_powers_of_theta():
  got, factor = rope.inverse_frequencies(RopeSpec(10_000.0), 8)
  np.testing.assert_allclose(got, [1, 0.1, 0.01, 0.001], rtol=1e-6)
  assert factor == 1.0


def test_linear_divides_all_frequencies():
  got, _ = rope.inverse_frequencies(RopeSpec(1e4, "linear", (("factor", 4.0),)), 8)
  np.testing.assert_allclose(got, [0.25, 0.025, 0.0025, 0.00025], rtol=1e-6)


def test_yarn_keeps_short_wavelengths_and_divides_long_ones():
  spec = RopeSpec(
    1e4,
    "yarn",
    (
      ("factor", 4.0),
      ("max_positions", 4096),
      ("original_max_position_embeddings", 1024),
    ),
  )
  plain, _ = rope.inverse_frequencies(RopeSpec(1e4), 64)
  got, factor = rope.inverse_frequencies(spec, 64)
  # dims of 32 and of 1 rotations in 1024 positions: 5.66 -> 5, 17.7 -> 18.
  np.testing.assert_allclose(got[:6], plain[:6], rtol=1e-6)
  np.testing.assert_allclose(got[18:], plain[18:] / 4, rtol=1e-6)
  blend = 1 - 5 / 13  # at 10: 5 of the 13 dims between
  np.testing.assert_allclose(got[10], plain[10] * (blend + (1 - blend) / 4), rtol=1e-6)
  assert factor == pytest.approx(0.1 * math.log(4) + 1)


def test_an_explicit_attention_factor_wins_and_scales_cos_and_sin():
  spec = RopeSpec(
    1e4,
    "yarn",
    (
      ("attention_factor", 2.0),
      ("factor", 4.0),
      ("max_positions", 4096),
      ("original_max_position_embeddings", 1024),
    ),
  )
  cos, sin = rope.cos_sin(spec, 8, jnp.array([[0, 5]]))
  np.testing.assert_allclose(cos**2 + sin**2, 4.0, rtol=1e-5)


def test_rotation_by_hand():
  # Position 1, one pair per head dim 2: (1, 0) turns by one radian.
  cos, sin = rope.cos_sin(RopeSpec(), 2, jnp.array([[1]]))
  got = jax.jit(rope.rotate)(jnp.array([[[[1.0, 0.0]]]]), cos, sin)
  np.testing.assert_allclose(got[0, 0, 0], [math.cos(1), math.sin(1)], rtol=1e-6)


@pytest.mark.parametrize("spec", [RopeSpec(), LLAMA3])
def test_scores_depend_on_the_distance_only_and_lengths_are_kept(spec):
  q, k = (
    jnp.asarray(np.random.default_rng(i).normal(size=(1, 1, 1, 64)), jnp.float32)
    for i in range(2)
  )

  @jax.jit
  def score(at_q, at_k):
    turn = lambda x, t: rope.rotate(x, *rope.cos_sin(spec, 64, t.reshape(1, 1)))
    return jnp.vdot(turn(q, at_q), turn(k, at_k)), jnp.linalg.norm(turn(q, at_q))

  near, norm = score(jnp.int32(3), jnp.int32(1))
  far, _ = score(jnp.int32(503), jnp.int32(501))
  np.testing.assert_allclose(near, far, atol=2e-3)
  np.testing.assert_allclose(norm, jnp.linalg.norm(q), rtol=1e-5)
  assert abs(near - score(jnp.int32(3), jnp.int32(2))[0]) > 1e-2


def test_position_zero_is_the_identity_and_the_dtype_is_kept():
  x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 1, 2, 8)), jnp.bfloat16)
  got = rope.rotate(x, *rope.cos_sin(RopeSpec(), 8, jnp.array([[0]])))
  assert got.dtype == jnp.bfloat16
  np.testing.assert_array_equal(got.astype(jnp.float32), x.astype(jnp.float32))
