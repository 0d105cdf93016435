"""Every policy loss but PPO's own (test_losses.py) against numbers by hand."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_hybrid.algorithms import registry
from jaxrl_hybrid.errors import ConfigError

KNOBS = dict(
  clip_ratio_low=0.2,
  clip_ratio_high=0.3,
  clip_ratio_c=3.0,
  sapo_tau_pos=1.0,
  sapo_tau_neg=2.0,
  dro_beta=0.5,
  ppo_kl_coef=0.1,
)


@functools.cache
def compiled(name):
  """(loss, gradient with respect to the log-probs) of rows ``[B, T]``."""
  loss = registry.POLICY_LOSSES[name]

  def run(log_probs, old, advantages, mask, selected, knobs):
    chosen = {"selected": selected} if loss.select else {}
    total = lambda x: loss.function(x, old, advantages, mask, **knobs, **chosen)
    grad = jax.grad(lambda x: jnp.sum(jnp.where(mask, total(x)[0], 0.0)))(log_probs)
    return *total(log_probs), grad

  return jax.jit(run)


def rows(name, ratios, advantages, *, old=0.5, mask=None, selected=None, **knobs):
  """(loss, metrics, gradient) of rows with these ratios to probability ``old``."""
  ratios = np.atleast_2d(np.array(ratios, np.float32))
  log_old = np.full(ratios.shape, np.log(old), np.float32)
  advantages = np.broadcast_to(np.array(advantages, np.float32), ratios.shape)
  mask = np.ones(ratios.shape, bool) if mask is None else np.array(mask, bool)
  selected = np.zeros_like(mask) if selected is None else np.array(selected, bool)
  taken = registry.POLICY_LOSSES[name].knobs
  knobs = {k: v for k, v in (KNOBS | knobs).items() if k in taken}
  found = compiled(name)(
    log_old + np.log(ratios), log_old, advantages, mask, selected, knobs
  )
  return jax.tree.map(np.asarray, found)


LOG_HALF = np.log(0.5)


def sapo(advantage, ratio, tau):
  return -advantage / (1 + np.exp(-tau * (ratio - 1))) * 4 / tau


# (ratio, advantage) of one token with p_old = 1/2 -> (loss, gradient by log p).
TOKENS = {
  "reinforce": [(1.0, 2.0, -2 * LOG_HALF, -2.0), (1.5, -1.0, np.log(0.75), 1.0)],
  "gpg": [(1.0, 2.0, -2 * LOG_HALF, -2.0)],
  "cispo": [
    (1.0, 2.0, -2 * LOG_HALF, -2.0),
    (1.5, 2.0, -1.3 * 2 * np.log(0.75), -2.6),  # the weight is cut, the gradient stays
    (0.5, -1.0, 0.8 * np.log(0.25), 0.8),
  ],
  "sapo": [
    (1.0, 2.0, -2 * 0.5 * 4, -2.0),  # at ratio 1 the gradient is PPO's
    (1.0, -1.0, 0.5 * 4 / 2, 1.0),
    (1.5, 1.0, sapo(1.0, 1.5, 1.0), None),
    (0.5, -1.0, sapo(-1.0, 0.5, 2.0), None),
  ],
  "dppo_tv": [
    (1.0, 2.0, -2 * LOG_HALF, -2.0),
    (1.5, 1.0, -1.5 * np.log(0.75), -1.5),  # p grew by .25 <= .3
    (1.7, 1.0, 0.0, 0.0),  # by .35
    (0.5, -1.0, 0.0, 0.0),  # fell by .25 > .2
    (1.5, -1.0, 1.5 * np.log(0.75), 1.5),  # a bad token above: it may come back
  ],
  "dppo_kl": [
    (1.0, 2.0, -2 * LOG_HALF, -2.0),
    (1.5, 1.0, -1.5 * np.log(0.75), -1.5),  # KL .1438 <= .3
    (1.9, 1.0, 0.0, 0.0),  # .8304
    (0.4, -1.0, 0.0, 0.0),  # .2231 > .2
    (0.5, -1.0, 0.5 * np.log(0.25), 0.5),  # .1438
    (0.4, 1.0, -0.4 * np.log(0.2), -0.4),  # it comes back
  ],
  "dro": [
    (1.0, 2.0, -2 * LOG_HALF, -2.0),
    (
      1.5,
      1.0,
      -(np.log(0.75) - 0.25 * np.log(1.5) ** 2),
      -1 + 0.5 * np.log(1.5),
    ),
  ],
  "gspo": [(1.0, 2.0, -2.0, -2.0), (1.5, 1.0, -1.3, 0.0), (0.9, -1.0, 0.9, 0.9)],
  "geo_mean": [
    (1.0, 2.0, -2.0, -2.0),
    (1.2, 1.0, -1.2, -1.2),
    (1.5, 1.0, -np.exp(0.3), 0.0),  # the bound is on the log
    (0.5, -1.0, np.exp(-0.2), 0.0),
    (1.5, -1.0, 1.5, 1.5),
  ],
  "clip_cov": [(1.0, 2.0, -2.0, -2.0), (1.5, 1.0, -1.3, 0.0), (5.0, -1.0, 5.0, 5.0)],
  "kl_cov": [(1.0, 2.0, -2.0, -2.0), (1.5, 1.0, -1.5, -1.5)],
}


def test_every_policy_loss_has_hand_values():
  assert {*TOKENS, "vanilla"} == {*registry.POLICY_LOSSES}


@pytest.mark.parametrize(
  "name,ratio,advantage,loss,grad",
  [(name, *case) for name, cases in TOKENS.items() for case in cases],
)
def test_one_token_by_hand(name, ratio, advantage, loss, grad):
  found, metrics, gradient = rows(name, [ratio], advantage)
  assert found[0, 0] == pytest.approx(loss, abs=1e-5)
  if grad is not None:
    assert gradient[0, 0] == pytest.approx(grad, abs=1e-5)
  if "ppo_kl" in metrics:
    assert metrics["ppo_kl"][0, 0] == pytest.approx(-np.log(ratio), abs=1e-6)


@pytest.mark.parametrize("name", registry.POLICY_LOSSES)
def test_at_ratio_one_the_gradient_is_minus_the_advantage(name):
  advantages = np.array([[1.5, -0.5, 2.0, 0.25]])
  expected = -advantages
  if name == "geo_mean":  # one advantage per sequence, the same loss on each token
    expected = np.full((1, 4), -advantages.mean())
  gradient = rows(name, [[1.0] * 4], advantages)[2]
  np.testing.assert_allclose(gradient, expected, atol=1e-6)


@pytest.mark.parametrize("name", registry.POLICY_LOSSES)
@pytest.mark.parametrize("ratio", [1e30, 1e-30])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_ratios_stay_finite(name, ratio, advantage):
  found, metrics, gradient = rows(name, [ratio, 1.0], advantage, old=1e-4)
  assert np.isfinite(found).all() and np.isfinite(gradient).all()


@pytest.mark.parametrize("name", registry.POLICY_LOSSES)
def test_what_is_outside_of_the_mask_has_no_influence(name):
  results = []
  for junk in (1.0, 7.0):
    found, _, gradient = rows(
      name, [[1.1, junk, 0.9, junk]], [[1, junk, 1, junk]], mask=[[1, 0, 1, 0]]
    )
    results.append((found[0, [0, 2]], gradient[0]))
  np.testing.assert_array_equal(results[0][0], results[1][0])
  np.testing.assert_array_equal(results[0][1], results[1][1])
  assert not results[0][1][[1, 3]].any()


def test_the_ratio_of_gspo_is_that_of_the_sequence():
  # mean log ratio (log 4 + log 1 + log 1) / 3 = log 4^(1/3); clipped at 1.3.
  found, _, gradient = rows("gspo", [[4.0, 1.0, 1.0]], -1.0)
  np.testing.assert_allclose(found, 4 ** (1 / 3), rtol=1e-5)
  np.testing.assert_allclose(gradient, 4 ** (1 / 3), rtol=1e-5)
  found, _, gradient = rows("gspo", [[4.0, 1.0, 1.0]], 1.0)
  np.testing.assert_allclose(found, -1.3, rtol=1e-5)
  assert not gradient.any()


def test_the_ratio_of_gspo_is_bounded():
  found, _, _ = rows("gspo", [1e8], -1.0)
  assert found[0, 0] == pytest.approx(np.exp(10.0), rel=1e-4)


def test_the_geometric_mean_is_over_clipped_ratios():
  # A = 1: logs (log 1.1, .3 for log 4, log .5): exp of their mean.
  logs = [np.log(1.1), 0.3, np.log(0.5)]
  found, metrics, gradient = rows("geo_mean", [[1.1, 4.0, 0.5]], 1.0)
  expected = -np.exp(np.mean(logs))
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  np.testing.assert_array_equal(metrics["pg_clipfrac"], [[0, 1, 0]])
  np.testing.assert_allclose(gradient, [[expected, 0, expected]], rtol=1e-5)


def test_dppo_truncates_the_ratio():
  found, _, gradient = rows("dppo_tv", [5.0], 1.0, old=0.01)
  assert gradient[0, 0] == -3 and found[0, 0] == pytest.approx(-3 * np.log(0.05))


# Advantages and log-probs of two rows; means 1 and -2 over the five tokens.
ADVANTAGES = np.array([[3.0, 1.0, -1.0, 99.0], [1.0, 1.0, 99.0, 99.0]])
LOG_PROBS = np.array([[-1.0, -2.0, -3.0, 99.0], [-4.0, 0.0, 99.0, 99.0]])
MASK = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], bool)


def select(name, log_probs=LOG_PROBS, old=LOG_PROBS, seed=0, mask=MASK, **knobs):
  """The tokens that a loss selects, as (row, index) pairs."""
  loss = registry.POLICY_LOSSES[name]
  base = dict(
    clip_ratio_low=0.2,
    clip_ratio_high=0.2,
    clip_cov_ratio=2e-4,
    clip_cov_lb=1.0,
    clip_cov_ub=5.0,
    kl_cov_ratio=2e-4,
  )
  knobs = {k: v for k, v in (base | knobs).items() if k in loss.select_knobs}
  rng = np.random.default_rng(seed)
  chosen = loss.select(log_probs, old, ADVANTAGES, mask, rng, **knobs)
  assert chosen.dtype == bool and not chosen[~mask].any()
  return set(zip(*np.nonzero(chosen), strict=True))


def test_kl_cov_selects_the_highest_covariances():
  # (A - 1)(log p + 2) = (2, 0, 2), (0, 0): of equal ones the first.
  assert select("kl_cov") == {(0, 0)}
  assert select("kl_cov", kl_cov_ratio=0.4) == {(0, 0), (0, 2)}
  assert len(select("kl_cov", kl_cov_ratio=1.0)) == 5


def test_clip_cov_selects_within_bounds_and_by_its_seed():
  assert select("clip_cov", clip_cov_ratio=1.0) == {(0, 0), (0, 2)}
  assert not select("clip_cov", clip_cov_ratio=1.0, clip_cov_lb=2.0)
  assert not select("clip_cov", clip_cov_ratio=1.0, clip_cov_ub=2.0)
  found = [select("clip_cov", seed=seed) for seed in range(20)]
  assert all(len(chosen) == 1 for chosen in found)
  assert found == [select("clip_cov", seed=seed) for seed in range(20)]
  assert len(set(map(frozenset, found))) == 2


def test_clip_cov_passes_over_tokens_that_are_clipped_anyway():
  old = LOG_PROBS.copy()
  old[0, 0] -= 1.0  # ratio e with A > 0
  assert select("clip_cov", old=old, clip_cov_ratio=1.0) == {(0, 2)}


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_nothing_is_selected_of_nothing(name):
  assert not select(name, mask=np.zeros_like(MASK), kl_cov_ratio=1.0)


def test_the_selected_tokens_are_treated_in_their_way():
  chosen = [[True, False]]
  found, metrics, gradient = rows("clip_cov", [[1.0, 1.0]], 2.0, selected=chosen)
  np.testing.assert_array_equal(found, [[0, -2]])
  np.testing.assert_array_equal(gradient, [[0, -2]])
  np.testing.assert_array_equal(metrics["selected_fraction"], chosen)
  found, _, gradient = rows("kl_cov", [[1.5, 1.5]], 1.0, selected=chosen)
  np.testing.assert_allclose(found, [[-1.5 + 0.1 * np.log(1.5), -1.5]], rtol=1e-5)
  np.testing.assert_allclose(gradient, [[-1.4, -1.5]], rtol=1e-5)


@pytest.mark.parametrize(
  "name,knob,value,ratio,advantage",
  [
    ("cispo", "clip_ratio_high", 0.9, 1.5, 1.0),
    ("cispo", "clip_ratio_low", 0.9, 0.5, 1.0),
    ("sapo", "sapo_tau_pos", 3.0, 1.5, 1.0),
    ("sapo", "sapo_tau_neg", 3.0, 1.5, -1.0),
    ("dppo_tv", "clip_ratio_high", 0.1, 1.5, 1.0),
    ("dppo_tv", "clip_ratio_low", 0.4, 0.5, -1.0),
    ("dppo_tv", "clip_ratio_c", 1.1, 1.5, 1.0),
    ("dppo_kl", "clip_ratio_high", 0.1, 1.5, 1.0),
    ("dppo_kl", "clip_ratio_low", 0.1, 0.5, -1.0),
    ("dppo_kl", "clip_ratio_c", 1.1, 1.5, 1.0),
    ("dro", "dro_beta", 3.0, 1.5, 1.0),
    ("gspo", "clip_ratio_high", 0.1, 1.5, 1.0),
    ("gspo", "clip_ratio_low", 0.1, 0.5, -1.0),
    ("geo_mean", "clip_ratio_high", 0.1, 1.5, 1.0),
    ("geo_mean", "clip_ratio_low", 0.1, 0.5, -1.0),
    ("clip_cov", "clip_ratio_high", 0.1, 1.5, 1.0),
    ("clip_cov", "clip_ratio_low", 0.1, 0.5, -1.0),
  ],
)
def test_no_knob_is_dead(name, knob, value, ratio, advantage):
  before, after = (
    rows(name, [ratio], advantage),
    rows(name, [ratio], advantage, **{knob: value}),
  )
  assert before[0][0, 0] != after[0][0, 0]


def test_a_loss_asks_for_knobs_by_name():
  for loss in registry.POLICY_LOSSES.values():
    parameters = inspect.signature(loss.function).parameters
    assert set(loss.knobs) <= set(parameters)
  with pytest.raises(ConfigError, match="clip_range"):
    registry.register_policy_loss("mine")(lambda p, old, a, mask, *, clip_range: p)
  with pytest.raises(ConfigError, match="'vanilla' is taken"):
    registry.register_policy_loss("vanilla")(lambda p, old, a, mask: p)
  assert "mine" not in registry.POLICY_LOSSES
