"""The critic's warm-up: exact counts, shares and estimates by hand."""

import json

import numpy as np
import pytest

from jaxrl_hybrid.algorithms.advantages import gae
from jaxrl_hybrid.algorithms.warmup import CriticWarmup, take_over
from jaxrl_hybrid.errors import ConfigError


def played(warmup, steps, explained=()):
  """(steps in which the actor learned, share of each step)."""
  learned, shares = [], []
  for step in range(1, steps + 1):
    shares.append(warmup.share(step))
    if warmup.actor_learns(step):
      learned.append(step)
    if step <= len(explained):
      warmup.look(step, explained[step - 1])
  return learned, shares


@pytest.mark.parametrize(
  "warmup,full,shares",
  [
    (2, 6, [0, 0, 1 / 4, 2 / 4, 3 / 4, 1, 1]),
    (0, 2, [1 / 2, 1, 1, 1, 1, 1, 1]),
    (3, 3, [0, 0, 0, 1, 1, 1, 1]),
    (0, 0, [1] * 7),
    (1, 2, [0, 1, 1, 1, 1, 1, 1]),
  ],
)
def test_exact_counts(warmup, full, shares):
  scheduler = CriticWarmup(warmup, full)
  learned, found = played(scheduler, 7)
  assert learned == list(range(warmup + 1, 8))
  np.testing.assert_allclose(found, shares)
  assert scheduler.is_used == (full > 0)


def test_it_ends_early_and_its_state_knows():
  scheduler = CriticWarmup(5, 7, 0.5)
  learned, shares = played(scheduler, 6, explained=[0.1, 0.6, 0.9, 0.0])
  assert learned == [3, 4, 5, 6]  # step 2 was good enough; later looks say nothing
  np.testing.assert_allclose(shares, [0, 0, 1 / 2, 1, 1, 1])
  other = CriticWarmup(5, 7, 0.5)
  other.restore(json.loads(json.dumps(scheduler.state())))
  assert played(other, 6) == (learned, shares)
  late, _ = played(CriticWarmup(2, 2, 0.9), 4, explained=[0.1, 0.1, 1.0])
  assert late == [3, 4]


@pytest.mark.parametrize("wrong", [(3, 2), (-1, 2), (1, 2, 0.0), (1, 2, 1.5)])
def test_wrong_steps_are_named(wrong):
  with pytest.raises(ConfigError, match="expected"):
    CriticWarmup(*wrong)


def test_take_over_by_hand():
  # gamma 1/2. Row 0: rewards 1, 4 -> to go 3, 4. Row 1: a tool token is skipped:
  # rewards 0, -, 2 -> to go 1, -, 2. Their mean is 10/4.
  rewards = np.array([[1, 4, 9], [0, 9, 2]], np.float32)
  mask = np.array([[1, 1, 0], [1, 0, 1]], bool)
  ones = np.where(mask, np.float32(1), np.float32(0))
  give = lambda share: take_over(
    8 * ones, 6 * ones, rewards, mask, gamma=0.5, share=share
  )
  advantages, returns = give(0.0)
  np.testing.assert_allclose(advantages, [[0.5, 1.5, 0], [-1.5, 0, -0.5]])
  np.testing.assert_allclose(returns, [[3, 4, 0], [1, 0, 2]])
  advantages, returns = give(0.25)
  np.testing.assert_allclose(advantages[0], [0.75 * 0.5 + 2, 0.75 * 1.5 + 2, 0])
  np.testing.assert_allclose(returns[1], [0.75 * 1 + 1.5, 0, 0.75 * 2 + 1.5])
  advantages, returns = give(1.0)
  np.testing.assert_array_equal((advantages, returns), (8 * ones, 6 * ones))
  assert advantages.dtype == returns.dtype == np.float32
  empty = take_over(
    ones * 0, ones * 0, rewards, np.zeros_like(mask), gamma=1.0, share=0.0
  )
  assert not np.any(empty)


def test_without_a_share_the_values_do_not_matter():
  rng = np.random.default_rng(0)
  rewards, mask = rng.normal(size=(3, 5)).astype(np.float32), np.ones((3, 5), bool)
  found = []
  for seed in (1, 2):
    values = np.random.default_rng(seed).normal(size=(3, 5))
    both = gae(rewards, values, mask, gamma=1.0, lam=0.9)
    found.append(take_over(*both, rewards, mask, gamma=1.0, share=0.0))
  np.testing.assert_array_equal(*found)
