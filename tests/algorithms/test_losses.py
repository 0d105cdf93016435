"""Policy and value losses against hand values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_hybrid.algorithms import losses

KNOBS = dict(clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0)


def vanilla_of(log_probs, old, advantages, **knobs):
  """One token, in the mask."""
  return losses.vanilla(log_probs, old, advantages, True, **knobs)


vanilla = jax.jit(vanilla_of)
value_loss = jax.jit(losses.value_loss)


def policy_loss(ratio, advantage, **knobs):
  """(loss, metrics) of one token with the given ratio."""
  loss, metrics = vanilla(
    jnp.log(jnp.float32(ratio)) - 3.0,
    jnp.float32(-3.0),
    jnp.float32(advantage),
    **{**KNOBS, **knobs},
  )
  return float(loss), {name: float(x) for name, x in metrics.items()}


@pytest.mark.parametrize(
  "ratio,advantage,expected,clipped",
  [
    (1.0, 2.0, -2.0, 0),
    (1.0, -2.0, 2.0, 0),
    (1.5, 1.0, -1.2, 1),  # gain is cut above 1 + high
    (0.5, 1.0, -0.5, 0),  # a loss is not
    (0.5, -1.0, 0.8, 1),  # below 1 - low
    (1.5, -1.0, 1.5, 0),
    (1.1, 1.0, -1.1, 0),
    (0.9, -1.0, 0.9, 0),
  ],
)
def test_ppo_clip_by_hand(ratio, advantage, expected, clipped):
  loss, metrics = policy_loss(ratio, advantage)
  assert loss == pytest.approx(expected, rel=1e-5)
  assert metrics["pg_clipfrac"] == clipped and metrics["pg_clipfrac_lower"] == 0
  assert metrics["ppo_kl"] == pytest.approx(-np.log(ratio), abs=1e-6)


def test_dual_clip_bounds_the_loss_of_bad_tokens_only():
  loss, metrics = policy_loss(5.0, -1.0)
  assert loss == pytest.approx(3.0, rel=1e-5) and metrics["pg_clipfrac_lower"] == 1
  loss, metrics = policy_loss(5.0, 1.0)
  assert loss == pytest.approx(-1.2, rel=1e-5) and metrics["pg_clipfrac_lower"] == 0


@pytest.mark.parametrize(
  "knob,value,ratio,advantage,before,after",
  [
    ("clip_ratio_high", 0.3, 1.5, 1.0, -1.2, -1.3),
    ("clip_ratio_low", 0.4, 0.5, -1.0, 0.8, 0.6),
    ("clip_ratio_c", 4.0, 5.0, -1.0, 3.0, 4.0),
  ],
)
def test_no_clip_knob_is_dead(knob, value, ratio, advantage, before, after):
  assert policy_loss(ratio, advantage)[0] == pytest.approx(before, rel=1e-5)
  assert policy_loss(ratio, advantage, **{knob: value})[0] == pytest.approx(
    after, rel=1e-5
  )


@pytest.mark.parametrize("gap", [1e3, -1e3, 1e30, -1e30])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_log_ratios_give_finite_losses_and_gradients(gap, advantage):
  run = jax.jit(
    jax.value_and_grad(
      lambda x: vanilla_of(x, jnp.float32(0), jnp.float32(advantage), **KNOBS)[0]
    )
  )
  loss, grad = run(jnp.float32(gap))
  assert np.isfinite(loss) and np.isfinite(grad)
  assert abs(loss) <= np.exp(20.0) * 1.001


def test_the_gradient_at_ratio_one_is_minus_the_advantage():
  grad = jax.jit(jax.grad(lambda x, a: vanilla_of(x, -1.0, a, **KNOBS)[0]))
  assert grad(-1.0, 2.5) == -2.5 and grad(-1.0, -2.5) == 2.5


def test_a_clipped_token_has_no_gradient():
  grad = jax.jit(jax.grad(lambda x, a: vanilla_of(x, 0.0, a, **KNOBS)[0]))
  assert grad(jnp.log(1.5), 1.0) == 0 and grad(jnp.log(0.5), -1.0) == 0
  assert grad(jnp.log(5.0), -1.0) == 0  # dual clip


@pytest.mark.parametrize(
  "value,cliprange,expected,clipped",
  [
    (1.0, 0.2, 0.125, 1),  # V moved .8 from .2: .4 counts, .5 * .5^2
    (1.0, 1.0, 0.005, 0),  # the knob lets it move
    (0.3, 0.2, 0.18, 0),  # within the range: .5 * .6^2
    (0.0, 0.2, 0.405, 0),
  ],
)  # moved away by exactly the range: .5 * .9^2
def test_value_clip_by_hand(value, cliprange, expected, clipped):
  loss, metrics = value_loss(
    jnp.float32(value), jnp.float32(0.9), jnp.float32(0.2), cliprange=cliprange
  )
  assert float(loss) == pytest.approx(expected, rel=1e-5)
  assert metrics["vf_clipfrac"] == clipped


def test_a_value_that_runs_from_its_return_is_pulled_back():
  # Away from the return beyond the range: the unclipped square is the larger.
  grad = jax.jit(jax.grad(lambda v: losses.value_loss(v, 0.9, 0.2, cliprange=0.2)[0]))
  assert float(grad(-1.0)) == pytest.approx(-1.9, rel=1e-5)
  assert float(grad(1.0)) == 0  # clipped
