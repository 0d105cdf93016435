"""Advantage estimators against numbers computed by hand."""

import numpy as np
import pytest

from jaxrl_hybrid.algorithms import advantages
from jaxrl_hybrid.algorithms.groups import Groups


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


def test_remax_is_the_return_to_go_against_the_greedy_score():
  rewards = np.array([[0.1, 0.2, 1.0, 50.0], [2.0, 7.0, 7.0, 7.0]], np.float32)
  mask = np.array([[1, 1, 1, 0], [1, 0, 0, 0]], bool)
  found, to_go = advantages.remax(rewards, np.array([0.5, 3.0], np.float32), mask)
  np.testing.assert_allclose(to_go, [[1.3, 1.2, 1.0, 0], [2, 0, 0, 0]], rtol=1e-6)
  np.testing.assert_allclose(found, [[0.8, 0.7, 0.5, 0], [-1, 0, 0, 0]], rtol=1e-6)


@pytest.mark.parametrize("junk", [0.0, 9.0, np.nan])
def test_returns_to_go_skip_tool_tokens_and_padding(junk):
  # G = (1 + .5 (2 + .5 * 4), 2 + .5 * 4, 4): tool tokens do not discount.
  found = advantages.returns_to_go(
    row(1, junk, 2, 4, junk), mask_of(1, 0, 1, 1, 0), gamma=0.5
  )
  np.testing.assert_array_equal(found, row(3, 0, 4, 4, 0))


def otb(returns, probs, collision, mask, draws, **options):
  """The estimator on plain numbers; probabilities instead of log-probs."""
  return advantages.optimal_token_baseline(
    np.array(returns, np.float32),
    np.log(np.array(probs, np.float32)),
    np.array(collision, np.float32),
    np.array(mask, bool),
    Groups(np.array(draws)),
    **options,
  )


RETURNS = [[1, 1, 77], [0, 0, 0], [5, 5, 5]]
PROBS = [[0.5, 0.25, 0.9], [0.25, 0.5, 0.5], [0.5, 0.5, 0.5]]
COLLISION = [[0.5, 0.5, 77.0], [0.5, 0.5, 0.5], [0.5, 0.5, 0.5]]
OTB_MASK = [[1, 1, 0], [1, 1, 1], [1, 0, 0]]


def test_the_optimal_token_baseline_by_hand():
  # 1 - 2p + c: row 0 (.5, 1), row 1 (1, .5, .5); W: (.5, 1.5) and (1, 1.5, 2).
  # B_0 = .5 / 1.5 = 1/3; B_1 = 1.5 / 3 = 1/2; at 2 row 1 is alone: B = 0 = G.
  # Row 2 is a group of one: its own baseline.
  found = otb(RETURNS, PROBS, COLLISION, OTB_MASK, [7, 7, 9])
  expected = [[2 / 3, 1 / 2, 0], [-1 / 3, -1 / 2, 0], [0, 0, 0]]
  np.testing.assert_allclose(found, expected, atol=1e-6)


def test_the_optimal_token_baseline_takes_importance_weights_squared():
  # w = 2 on row 1: W (4, 6, 8); B_0 = .5 / 4.5, B_1 = 1.5 / 7.5.
  weights = np.array([[1, 1, 1], [2, 2, 2], [1, 1, 1]], np.float32)
  found = otb(RETURNS, PROBS, COLLISION, OTB_MASK, [7, 7, 9], weights_NR=weights)
  expected = [[8 / 9, 4 / 5, 0], [-1 / 9, -1 / 5, 0], [0, 0, 0]]
  np.testing.assert_allclose(found, expected, atol=1e-6)


def test_the_optimal_token_baseline_of_certain_tokens_is_finite():
  # p = 1: no gradient, W would be 0.
  found = otb([[1], [0]], [[1], [1]], [[1], [1]], [[1], [1]], [3, 3])
  np.testing.assert_allclose(found, [[0.5], [-0.5]], atol=1e-6)


def test_the_optimal_token_baseline_does_not_depend_on_the_order():
  order = [2, 1, 0]
  pick = lambda rows: [rows[i] for i in order]
  found = otb(*map(pick, (RETURNS, PROBS, COLLISION, OTB_MASK)), [9, 7, 7])
  np.testing.assert_array_equal(
    found, otb(RETURNS, PROBS, COLLISION, OTB_MASK, [7, 7, 9])[order]
  )
