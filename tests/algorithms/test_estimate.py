"""From a scored batch to advantages, by hand."""

import dataclasses

import numpy as np
import pytest

from jaxrl_hybrid.algorithms import estimate, registry
from jaxrl_hybrid.algorithms.kl import KLController
from jaxrl_hybrid.algorithms.lagrange import Multiplier
from jaxrl_hybrid.algorithms.presets import Algorithm
from jaxrl_hybrid.errors import ConfigError, NumericsError
from jaxrl_hybrid.types import STOP, Batch, Prompt

JUNK = 1e4  # what padding holds
LENGTHS = [3, 1]
CONTROLLER = dict(kind="fixed", coef=0.5, target=1.0, horizon=10)


def padded(*rows):
  """fp32 ``[2, 4]`` with junk behind each row."""
  return np.array([[*row, *[JUNK] * (4 - len(row))] for row in rows], np.float32)


def scored(draws=(0, 1), **fields):
  """A batch of two rows of 3 tokens and 1 token."""
  return Batch(
    prompts=[Prompt(np.ones(2, np.int32), "p", "p", 0, d) for d in draws],
    sample_ids=np.zeros(2, np.int32),
    response_ids=np.ones((2, 4), np.int32),
    response_lengths=np.array(LENGTHS, np.int32),
    finish_reasons=[STOP] * 2,
    rollout_log_probs=padded([0.0] * 3, [0.0]),
    rewards=padded([0, 0, 1], [2]),
    **fields,
  )


def make_algorithm(estimator, **options):
  """With gamma 1, lambda .95."""
  defaults = dict(
    adv_estimator=estimator,
    gamma=1.0,
    lam=0.95,
    norm_adv_by_std=False,
    whiten_advantages=False,
    use_kl_in_reward=False,
    kl_penalty="k1",
  )
  return Algorithm(**defaults | options)


def run(batch, estimator, controller=None, **options):
  """``compute_advantages`` by ``make_algorithm``."""
  return estimate.compute_advantages(
    batch,
    make_algorithm(estimator, **options),
    controller or KLController(**CONTROLLER),
  )


def test_gae_and_its_statistics():
  out = run(scored(values=padded([0.5, 0.6, 0.7], [1.5])), "gae")
  np.testing.assert_allclose(
    out.advantages, [[0.46575, 0.385, 0.3, 0], [0.5, 0, 0, 0]], atol=1e-6
  )
  np.testing.assert_allclose(
    out.returns, [[0.96575, 0.985, 1, 0], [2, 0, 0, 0]], atol=1e-6
  )
  assert out.metrics["critic/advantages/mean"] == pytest.approx(1.65075 / 4, rel=1e-5)
  assert out.metrics["critic/returns/max"] == 2.0
  assert out.metrics["critic/values/max"] == 1.5  # not the junk
  errors, returns = np.array([0.46575, 0.385, 0.3, 0.5]), [0.96575, 0.985, 1, 2]
  assert out.metrics["critic/vf_explained_var"] == pytest.approx(
    1 - errors.var() / np.var(returns), rel=1e-4
  )


def test_grpo_spreads_the_score_of_a_row_over_its_tokens():
  out = run(scored(draws=(5, 5)), "grpo")
  np.testing.assert_allclose(out.advantages, [[-0.5, -0.5, -0.5, 0], [0.5, 0, 0, 0]])
  assert not run(scored(draws=(5, 6)), "grpo").advantages.any()  # groups of one


def test_grpo_of_a_masked_row_counts_in_the_group_but_is_not_trained():
  mask = np.array([[False] * 4, [True] * 4])
  out = run(scored(draws=(5, 5), loss_mask=mask), "grpo")
  np.testing.assert_allclose(out.advantages, [[0, 0, 0, 0], [0.5, 0, 0, 0]])


def test_remax_subtracts_the_greedy_score():
  out = run(scored(baseline_scores=np.array([0.25, 3], np.float32)), "remax")
  np.testing.assert_allclose(out.advantages, [[0.75, 0.75, 0.75, 0], [-1, 0, 0, 0]])


def with_kl():
  """Log-ratios (.2, 0, -.1) and (1,) to the reference."""
  return scored(
    values=padded([0.5, 0.6, 0.7], [1.5]),
    old_log_probs=padded([-1, -2, -3], [-1]),
    ref_log_probs=padded([-1.2, -2, -2.9], [-2]),
  )


def test_the_kl_in_the_reward_by_hand():
  controller = KLController(**{**CONTROLLER, "kind": "adaptive"})
  out = run(with_kl(), "gae", controller, use_kl_in_reward=True)
  # r = (-.1, 0, 1.05) and (1.5): coef .5.
  np.testing.assert_allclose(out.rewards[0, :3], [-0.1, 0, 1.05], atol=1e-6)
  np.testing.assert_allclose(out.rewards[1, 0], 1.5, atol=1e-6)
  # delta = (-.1 + .6 - .5, .7 - .6, 1.05 - .7) = (0, .1, .35)
  np.testing.assert_allclose(
    out.advantages, [[0.410875, 0.4325, 0.35, 0], [0, 0, 0, 0]], atol=1e-6
  )
  # mean over sequences of the sums (.1, 1); the coefficient before its update
  assert out.metrics["actor/reward_kl_penalty"] == pytest.approx(0.55, rel=1e-5)
  assert out.metrics["actor/reward_kl_penalty_coeff"] == 0.5
  assert controller.coef == pytest.approx(0.5 * (1 - 0.2 * 2 / 10))


def test_the_kl_in_the_reward_skips_masked_tokens():
  mask = np.array([[True, False, True, True], [True] * 4])
  batch = with_kl().with_fields(
    loss_mask=mask, ref_log_probs=padded([-1.2, -50, -2.9], [-2])
  )
  out = run(batch, "gae", use_kl_in_reward=True)
  assert out.rewards[0, 1] == 0
  assert out.metrics["actor/reward_kl_penalty"] == pytest.approx(0.55, rel=1e-5)


def test_whitening_is_over_the_tokens_of_the_batch():
  batch = scored(values=padded([0.5, 0.6, 0.7], [1.5]))
  plain, white = run(batch, "gae"), run(batch, "gae", whiten_advantages=True)
  picked = plain.advantages[batch.mask].astype(np.float64)
  expected = (picked - picked.mean()) / picked.std(ddof=1)
  np.testing.assert_allclose(white.advantages[batch.mask], expected, rtol=1e-5)
  assert not white.advantages[~batch.mask].any()
  np.testing.assert_array_equal(white.returns, plain.returns)


def complete(draws=(0, 1), **fields):
  """With all that any estimator needs."""
  return scored(
    draws=draws,
    values=padded([0.5, 0.6, 0.7], [1.5]),
    old_log_probs=padded([-1, -2, -3], [-1]),
    ref_log_probs=padded([-1.2, -2, -2.9], [-2]),
    collision=padded([0.5, 0.6, 0.7], [0.5]),
    baseline_scores=np.ones(2, np.float32),
    scores=np.array([1, 2], np.float32),
    score_terms={"f": np.array([1, 2], np.float32)},
    score_weights={"f": 1.0},
    **fields,
  )


# Rewards 1 and 2 of a group; rows of 3 tokens and 1 token; gamma 1, lambda .95.
HAND = {
  "gae": ([0.46575, 0.385, 0.3], 0.5),
  "grpo": ([-0.5] * 3, 0.5),
  "grpo_passk": ([0.0] * 3, 1.0),
  "gdpo": ([-0.5] * 3, 0.5),
  "reinforce_plus_plus": ([1.0] * 3, 2.0),
  "reinforce_plus_plus_baseline": ([-0.5] * 3, 0.5),
  "rloo": ([-1.0] * 3, 1.0),
  "opo": ([1 - 5 / 4] * 3, 2 - 5 / 4),  # (3 * 1 + 1 * 2) / 4
  "gpg": ([-0.5] * 3, 0.5),
  "remax": ([0.0] * 3, 1.0),
  # p = 1/e: W is 1.5 - 2/e for both; then row 0 is alone.
  "optimal_token_baseline": ([-0.5, 0, 0], 0.5),
}


def test_every_estimator_has_a_hand_value():
  assert {*HAND} == {*registry.ESTIMATORS}


@pytest.mark.parametrize("estimator", HAND)
def test_every_estimator_by_hand_from_a_batch(estimator):
  out = run(complete(draws=(5, 5)), estimator)
  first, second = HAND[estimator]
  np.testing.assert_allclose(
    out.advantages, [[*first, 0], [second, 0, 0, 0]], atol=1e-6
  )
  assert out.advantages.dtype == out.returns.dtype == np.float32


@pytest.mark.parametrize("estimator", HAND)
def test_order_and_padding_do_not_matter(estimator):
  batch = complete(draws=(5, 5))
  expected = run(batch, estimator).advantages
  np.testing.assert_array_equal(
    run(batch.select([1, 0]), estimator).advantages, expected[[1, 0]]
  )
  wider = {
    field.name: np.pad(x, [(0, 0), (0, 3)], constant_values=np.array(9, x.dtype))
    for field in dataclasses.fields(batch)
    if isinstance(x := getattr(batch, field.name), np.ndarray) and x.ndim == 2
  }
  found = run(dataclasses.replace(batch, **wider), estimator).advantages
  np.testing.assert_array_equal(found[:, :4], expected)
  assert not found[:, 4:].any()


@pytest.mark.parametrize("estimator", HAND)
def test_a_row_that_is_masked_is_not_trained_but_counts(estimator):
  mask = np.array([[False] * 4, [True] * 4])
  out = run(complete(draws=(5, 5), loss_mask=mask), estimator)
  assert not out.advantages[0].any()
  if registry.ESTIMATORS[estimator].min_group_size > 1 and "token" not in estimator:
    assert out.advantages[1, 0] != 0


@pytest.mark.parametrize("estimator", HAND)
def test_an_all_masked_batch_gives_zeros_and_no_nan(estimator):
  batch = complete(loss_mask=np.zeros((2, 4), bool))
  out = run(batch, estimator, use_kl_in_reward=True, whiten_advantages=True)
  assert not out.advantages.any() and not out.returns.any()
  assert np.isfinite(list(out.metrics.values())).all()


def test_safe_rlhf_subtracts_the_advantages_of_the_costs():
  # Reward: (.46575, .385, .3) and .5, as above. Costs 2 and 0 on the last tokens with
  # values (1, 1, 1) and 1: delta (0, 0, 1) and -1, A (.9025, .95, 1) and -1.
  batch = complete(
    costs=np.array([2, 0], np.float32),
    token_costs=padded([0, 0, 2], [0]),
    cost_values=padded([1, 1, 1], [1]),
  )
  plain = run(batch, "gae")
  multiplier = Multiplier(value=0.5, limit=0.0, lr=0.0, most=1.0)
  out = estimate.compute_advantages(
    batch, make_algorithm("gae"), KLController(**CONTROLLER), multiplier=multiplier
  )
  costs = [[0.9025, 0.95, 1.0, 0], [-1, 0, 0, 0]]
  np.testing.assert_allclose(
    out.advantages, (plain.advantages - 0.5 * np.array(costs)) / 1.5, atol=1e-6
  )
  np.testing.assert_array_equal(out.returns, plain.returns)
  np.testing.assert_allclose(
    out.cost_returns, [[1.9025, 1.95, 2, 0], [0, 0, 0, 0]], atol=1e-6
  )
  assert multiplier.value == 0.5  # moved by its own step only


def test_costs_are_compared_in_groups_too():
  batch = complete(
    draws=(5, 5),
    costs=np.array([3, 1], np.float32),
    token_costs=padded([0, 0, 3], [1]),
  )
  multiplier = Multiplier(value=1.0, limit=0.0, lr=0.0, most=1.0)
  out = estimate.compute_advantages(
    batch, make_algorithm("grpo"), KLController(**CONTROLLER), multiplier=multiplier
  )
  # (-.5 - 1) / 2 and (.5 + 1) / 2
  np.testing.assert_allclose(out.advantages, [[-0.75] * 3 + [0], [0.75, 0, 0, 0]])


@pytest.fixture
def own():
  """Registers for one test."""
  before = dict(registry.ESTIMATORS)
  yield registry.register_estimator
  registry.ESTIMATORS.clear()
  registry.ESTIMATORS.update(before)


def test_an_estimator_may_give_one_number_per_row(own):
  own("mine")(lambda batch, algorithm: batch.scores - algorithm.gamma)
  out = run(complete(), "mine")
  np.testing.assert_array_equal(out.advantages, [[0, 0, 0, 0], [1, 0, 0, 0]])
  np.testing.assert_array_equal(out.returns, out.advantages)


def test_a_wrong_estimator_is_named(own):
  own("wide")(lambda batch, algorithm: np.zeros((2, 3)))
  own("bad")(lambda batch, algorithm: np.array([np.nan, 0]))
  with pytest.raises(ConfigError, match=r"'wide'.*\(2, 4\).*\(2, 3\)"):
    run(complete(), "wide")
  with pytest.raises(NumericsError, match="'bad'"):
    run(complete(), "bad")


def test_names_are_not_taken_twice_and_needs_are_known(own):
  with pytest.raises(ConfigError, match="'grpo' is taken"):
    own("grpo")(lambda batch, algorithm: None)
  with pytest.raises(ConfigError, match="critics"):
    own("mine", needs=("critics",))
