"""Advantage estimators against numbers computed by hand."""

import numpy as np
import pytest

from jaxrl_hybrid.algorithms import advantages


def row(*numbers):
  """One fp32 row."""
  return np.array([numbers], np.float32)


def mask_of(*numbers):
  """One bool row."""
  return np.array([numbers], bool)


@pytest.mark.parametrize("junk", [0.0, 9.0, -1e6, np.nan])
def test_gae_is_the_one_by_hand_whatever_the_padding_holds(junk):
  found, returns = advantages.gae(
    row(0, 0, 1, junk, junk, junk),
    row(0.5, 0.6, 0.7, junk, junk, junk),
    mask_of(1, 1, 1, 0, 0, 0),
    gamma=1.0,
    lam=0.95,
  )
  np.testing.assert_allclose(found, row(0.46575, 0.385, 0.3, 0, 0, 0), atol=1e-6)
  np.testing.assert_allclose(returns, row(0.96575, 0.985, 1.0, 0, 0, 0), atol=1e-6)


@pytest.mark.parametrize("junk", [0.0, 9.0, np.nan])
def test_gae_is_carried_through_tool_tokens(junk):
  # The same three tokens as above, with two tool tokens after the first.
  found, returns = advantages.gae(
    row(0, junk, junk, 0, 1),
    row(0.5, junk, junk, 0.6, 0.7),
    mask_of(1, 0, 0, 1, 1),
    gamma=1.0,
    lam=0.95,
  )
  np.testing.assert_allclose(found, row(0.46575, 0, 0, 0.385, 0.3), atol=1e-6)
  np.testing.assert_allclose(returns, row(0.96575, 0, 0, 0.985, 1.0), atol=1e-6)


def test_gae_discounts_by_gamma_and_lambda():
  # delta = (1 + .5*4 - 2, 3 - 4) = (1, -1); A_0 = 1 + .5 * .5 * -1 = .75.
  found, returns = advantages.gae(
    row(1, 3), row(2, 4), mask_of(1, 1), gamma=0.5, lam=0.5
  )
  np.testing.assert_allclose(found, row(0.75, -1))
  np.testing.assert_allclose(returns, row(2.75, 3))


def test_gae_of_one_token_is_the_reward_minus_the_value():
  found, returns = advantages.gae(
    row(0.7, 9), row(0.2, 9), mask_of(1, 0), gamma=0.9, lam=0.9
  )
  np.testing.assert_allclose(found, row(0.5, 0), rtol=1e-6)
  np.testing.assert_allclose(returns, row(0.7, 0), rtol=1e-6)


def test_gae_of_an_empty_mask_is_zero():
  found, returns = advantages.gae(
    row(1, 2), row(3, 4), mask_of(0, 0), gamma=1.0, lam=1.0
  )
  assert not found.any() and not returns.any()


@pytest.mark.parametrize(
  "norm_by_std,high,low", [(True, 1.2076, -0.7246), (False, 0.625, -0.375)]
)
def test_grpo_of_three_right_answers_out_of_eight(norm_by_std, high, low):
  scores = np.array([1, 0, 0, 1, 0, 1, 0, 0], np.float32)
  found = advantages.grpo(scores, np.zeros(8, np.int64), norm_by_std=norm_by_std)
  np.testing.assert_allclose(found, np.where(scores == 1, high, low), atol=5e-5)


@pytest.mark.parametrize("norm_by_std", [True, False])
@pytest.mark.parametrize("score", [0.0, 1.0, 0.1, 1 / 3, -7.7, 1e8])
def test_grpo_of_equal_rewards_is_exactly_zero(score, norm_by_std):
  scores = np.full(7, score, np.float32)
  found = advantages.grpo(scores, np.zeros(7, np.int64), norm_by_std=norm_by_std)
  assert (found == 0).all()


def test_grpo_of_rewards_that_differ_by_rounding_is_exactly_zero():
  scores = np.array([0.3, 0.1 + 0.2, 0.3 + 1e-8])
  assert (advantages.grpo(scores, np.zeros(3, int), norm_by_std=True) == 0).all()


def test_grpo_keeps_small_but_real_differences():
  found = advantages.grpo(np.array([0.0, 1e-3]), np.zeros(2, int), norm_by_std=True)
  np.testing.assert_allclose(found, [-0.7061, 0.7061], atol=1e-3)


@pytest.mark.parametrize("norm_by_std", [True, False])
def test_grpo_of_a_group_of_one_is_zero(norm_by_std):
  found = advantages.grpo(
    np.array([1.0, 0.0, 1.0]), np.array([7, 8, 9]), norm_by_std=norm_by_std
  )
  assert (found == 0).all()


def test_grpo_groups_by_id_and_not_by_order():
  # Interleaved, of different sizes, with ids that are no indices.
  groups = np.array([900, 4, 900, 4, 900, 10**12])
  scores = np.array([1.0, 10.0, 0.0, 20.0, 2.0, 5.0])
  found = advantages.grpo(scores, groups, norm_by_std=False)
  np.testing.assert_allclose(found, [0, -5, -1, 5, 1, 0])
  order = np.array([5, 3, 0, 1, 4, 2])
  moved = advantages.grpo(scores[order], groups[order], norm_by_std=False)
  np.testing.assert_array_equal(moved, found[order])


def test_grpo_normalizes_each_group_by_its_own_std():
  # (0, 2): std sqrt(2); (0, 20): std sqrt(200): both become -+ 1 / sqrt(2).
  found = advantages.grpo(
    np.array([0.0, 0.0, 2.0, 20.0]), np.array([1, 2, 1, 2]), norm_by_std=True
  )
  np.testing.assert_allclose(found, np.array([-1, -1, 1, 1]) / 2**0.5, atol=1e-5)


def test_remax_is_the_return_to_go_against_the_greedy_score():
  rewards = np.array([[0.1, 0.2, 1.0, 50.0], [2.0, 7.0, 7.0, 7.0]], np.float32)
  mask = np.array([[1, 1, 1, 0], [1, 0, 0, 0]], bool)
  found, to_go = advantages.remax(rewards, np.array([0.5, 3.0], np.float32), mask)
  np.testing.assert_allclose(to_go, [[1.3, 1.2, 1.0, 0], [2, 0, 0, 0]], rtol=1e-6)
  np.testing.assert_allclose(found, [[0.8, 0.7, 0.5, 0], [-1, 0, 0, 0]], rtol=1e-6)
