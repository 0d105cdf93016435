"""KL estimators, the direction of their gradients, and the controllers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_hybrid.algorithms import kl

estimate = jax.jit(kl.kl_estimate, static_argnames="kind")

# Policy (.5, .2) against reference (.25, .4).
HAND = {
  "k1": [0.6931, -0.6931],
  "k2": [0.2402, 0.2402],
  "k3": [0.1931, 0.3069],
  "abs": [0.6931, 0.6931],
}


def test_every_estimator_has_a_hand_value():
  assert set(HAND) == set(kl.ESTIMATORS)


@pytest.mark.parametrize("kind", kl.ESTIMATORS)
def test_estimators_by_hand(kind):
  got = estimate(
    jnp.log(jnp.array([0.5, 0.2])), jnp.log(jnp.array([0.25, 0.4])), kind=kind
  )
  np.testing.assert_allclose(got, HAND[kind], atol=5e-5)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_kl(kind):
  p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
  got = (p * np.asarray(estimate(jnp.log(p), jnp.log(q), kind=kind))).sum()
  assert got == pytest.approx((p * np.log(p / q)).sum(), rel=1e-5)


@pytest.mark.parametrize("kind", kl.ESTIMATORS)
def test_a_plus_keeps_the_value_and_takes_the_gradient_of_k2(kind):
  log_p, log_q = jnp.log(jnp.array([0.5, 0.2])), jnp.log(jnp.array([0.25, 0.4]))
  run = jax.jit(
    jax.value_and_grad(lambda x, kind: jnp.sum(kl.kl_estimate(x, log_q, kind))),
    static_argnums=1,
  )
  value, grad = run(log_p, f"{kind}+")
  assert value == pytest.approx(sum(HAND[kind]), abs=1e-4)
  np.testing.assert_allclose(grad, [0.6931, -0.6931], atol=5e-5)


@pytest.mark.parametrize("kind", kl.LOSSES)
@pytest.mark.parametrize("gap", [1e3, -1e3])
def test_extreme_gaps_stay_finite(kind, gap):
  run = jax.jit(jax.value_and_grad(functools.partial(kl.kl_estimate, kind=kind)))
  value, grad = run(jnp.float32(gap), jnp.float32(0))
  assert np.isfinite(value) and np.isfinite(grad)


def test_an_unknown_estimator_is_named():
  with pytest.raises(ValueError, match="'k4'"):
    kl.kl_estimate(jnp.zeros(1), jnp.zeros(1), "k4")


REFERENCE = jnp.log(jnp.array([0.1, 0.2, 0.7]))
POLICY = jnp.log(jnp.array([0.6, 0.3, 0.1]))


def expected_gradient(kind):
  """Of the KL loss over tokens sampled from the policy, by exact expectation."""

  def loss(logits):
    log_probs = jax.nn.log_softmax(logits)
    weights = jax.lax.stop_gradient(jnp.exp(log_probs))
    return jnp.sum(weights * kl.kl_estimate(log_probs, REFERENCE, kind))

  return jax.jit(jax.grad(loss))(POLICY)


def kl_to_reference(logits):
  log_probs = jax.nn.log_softmax(logits)
  return jnp.sum(jnp.exp(log_probs) * (log_probs - REFERENCE))


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_a_step_on_the_kl_loss_moves_the_policy_to_the_reference(kind):
  moved = POLICY - 0.1 * expected_gradient(kind)
  assert kl_to_reference(moved) < kl_to_reference(POLICY) - 1e-3
  assert moved[0] < POLICY[0] and moved[2] > POLICY[2]


def test_the_gradient_of_k2_is_that_of_the_kl_and_the_one_of_k1_is_zero():
  np.testing.assert_allclose(
    expected_gradient("k2"), jax.jit(jax.grad(kl_to_reference))(POLICY), atol=1e-6
  )
  np.testing.assert_allclose(expected_gradient("k1"), 0, atol=1e-6)


@pytest.mark.parametrize(
  "measured,expected",
  [
    (12.0, 0.102),  # far above: +20 %
    (6.6, 0.101),  # 10 % above
    (6.0, 0.1),
    (5.4, 0.099),
    (0.0, 0.098),  # far below: -20 %
    (-1.0, 0.098),
  ],
)
def test_the_adaptive_controller_by_hand(measured, expected):
  controller = kl.KLController("adaptive", 0.1, target=6.0, horizon=100)
  controller.update(measured, sequences=10)
  assert controller.coef == pytest.approx(expected)


def test_the_fixed_controller_keeps_its_coefficient():
  controller = kl.KLController("fixed", 0.1, target=6.0, horizon=100)
  controller.update(100.0, sequences=10)
  assert controller.coef == 0.1
