"""The price of a cost, by hand."""

import json
import math

import numpy as np
import pytest

from jaxrl_hybrid.algorithms.lagrange import Multiplier


def make(**options):
  return Multiplier(**(dict(value=2.0, limit=1.0, lr=0.1, most=10.0) | options))


@pytest.mark.parametrize(
  "costs,expected",
  [
    ([3.0, 1.0], 2 * math.exp(0.1 * 2 * 1)),  # mean 2, one above the limit
    ([1.0, 1.0], 2.0),
    ([0.0, 1.0], 2 * math.exp(-0.1 * 2 * 0.5)),
    ([100.0], 10.0),  # bounded
    ([1e30], 10.0),
    ([-1e30], 1e-6),
  ],
)
def test_the_price_follows_the_excess(costs, expected):
  multiplier = make()
  multiplier.update(np.array(costs, np.float32))
  assert multiplier.value == pytest.approx(expected)


def test_a_rate_of_zero_keeps_the_price():
  multiplier = make(lr=0.0)
  multiplier.update(np.array([1e30], np.float32))
  assert multiplier.value == 2.0


def test_advantages_are_combined_at_the_price():
  rewards, costs = np.array([[3.0, 0.0]]), np.array([[1.0, -3.0]])
  found = make(value=2.0).combine(rewards, costs)
  np.testing.assert_allclose(found, [[1 / 3, 2.0]], rtol=1e-6)
  assert found.dtype == np.float32
  np.testing.assert_allclose(
    make(value=1e-9).combine(rewards, costs), rewards, atol=1e-6
  )


def test_the_state_is_json():
  multiplier, again = make(), make(value=7.0)
  again.restore(json.loads(json.dumps(multiplier.state())))
  assert again == multiplier
