"""Group estimators against fractions worked out by hand."""

import functools

import numpy as np
import pytest

from jaxrl_hybrid.algorithms import group_advantages
from jaxrl_hybrid.algorithms.groups import Groups

LENGTHS = np.array([1, 3, 2, 4, 9])  # for opo


def on_groups(function):
  """A group estimator that takes draw ids."""
  return lambda scores, draws, **options: function(
    np.asarray(scores), Groups(np.asarray(draws)), **options
  )


grpo = on_groups(group_advantages.grpo)
passk = on_groups(group_advantages.grpo_passk)
rloo = on_groups(group_advantages.rloo)
gpg = on_groups(group_advantages.gpg)
baseline = on_groups(group_advantages.group_baseline)


def opo(scores, draws):
  """With lengths by index."""
  return group_advantages.opo(
    np.asarray(scores), LENGTHS[: len(scores)], Groups(np.asarray(draws))
  )


def gdpo(scores, draws):
  """Two rewards, the second of them ten times the first one's square."""
  scores = np.asarray(scores)
  return group_advantages.gdpo(
    {"a": scores, "b": 10 * scores**2, "a/detail": np.full(len(scores), np.nan)},
    {"a": 1.0, "b": 0.5},
    Groups(np.asarray(draws)),
    norm_by_std=True,
  )


ALL = {
  "grpo": functools.partial(grpo, norm_by_std=True),
  "dr_grpo": functools.partial(grpo, norm_by_std=False),
  "grpo_passk": functools.partial(passk, norm_by_std=True),
  "gdpo": gdpo,
  "rloo": rloo,
  "opo": opo,
  "gpg": gpg,
  "reinforce_plus_plus_baseline": baseline,
}


@pytest.mark.parametrize(
  "norm_by_std,high,low", [(True, 1.2076, -0.7246), (False, 0.625, -0.375)]
)
def test_grpo_of_three_right_answers_out_of_eight(norm_by_std, high, low):
  scores = np.array([1, 0, 0, 1, 0, 1, 0, 0], np.float32)
  found = grpo(scores, np.zeros(8), norm_by_std=norm_by_std)
  np.testing.assert_allclose(found, np.where(scores == 1, high, low), atol=5e-5)


@pytest.mark.parametrize("norm_by_std", [True, False])
@pytest.mark.parametrize("score", [0.0, 1.0, 0.1, 1 / 3, -7.7, 1e8])
def test_grpo_of_equal_rewards_is_exactly_zero(score, norm_by_std):
  scores = np.full(7, score, np.float32)
  found = grpo(scores, np.zeros(7, np.int64), norm_by_std=norm_by_std)
  assert (found == 0).all()


def test_grpo_of_rewards_that_differ_by_rounding_is_exactly_zero():
  scores = np.array([0.3, 0.1 + 0.2, 0.3 + 1e-8])
  assert (grpo(scores, np.zeros(3, int), norm_by_std=True) == 0).all()


def test_grpo_keeps_small_but_real_differences():
  found = grpo(np.array([0.0, 1e-3]), np.zeros(2, int), norm_by_std=True)
  np.testing.assert_allclose(found, [-0.7061, 0.7061], atol=1e-3)


@pytest.mark.parametrize("norm_by_std", [True, False])
def test_grpo_of_a_group_of_one_is_zero(norm_by_std):
  found = grpo(np.array([1.0, 0.0, 1.0]), np.array([7, 8, 9]), norm_by_std=norm_by_std)
  assert (found == 0).all()


def test_grpo_groups_by_id_and_not_by_order():
  # Interleaved, of different sizes, with ids that are no indices.
  groups = np.array([900, 4, 900, 4, 900, 10**12])
  scores = np.array([1.0, 10.0, 0.0, 20.0, 2.0, 5.0])
  found = grpo(scores, groups, norm_by_std=False)
  np.testing.assert_allclose(found, [0, -5, -1, 5, 1, 0])
  order = np.array([5, 3, 0, 1, 4, 2])
  moved = grpo(scores[order], groups[order], norm_by_std=False)
  np.testing.assert_array_equal(moved, found[order])


def test_grpo_normalizes_each_group_by_its_own_std():
  # (0, 2): std sqrt(2); (0, 20): std sqrt(200): both become -+ 1 / sqrt(2).
  found = grpo(
    np.array([0.0, 0.0, 2.0, 20.0]), np.array([1, 2, 1, 2]), norm_by_std=True
  )
  np.testing.assert_allclose(found, np.array([-1, -1, 1, 1]) / 2**0.5, atol=1e-5)


def test_passk_gives_the_best_its_lead():
  # (0, 1, 3): lead 2, unbiased variance ((4 + 1 + 25) / 9) * 3 / 2 = 7/3.
  scores, draws = [0.0, 1.0, 3.0], [5, 5, 5]
  np.testing.assert_array_equal(passk(scores, draws, norm_by_std=False), [0, 0, 2])
  np.testing.assert_allclose(
    passk(scores, draws, norm_by_std=True), [0, 0, 2 / np.sqrt(7 / 3)], rtol=1e-5
  )


def test_passk_of_a_shared_first_place_is_zero():
  found = passk([1.0, 1.0, 0.0, 2.0, 0.0], [1, 1, 1, 2, 2], norm_by_std=False)
  np.testing.assert_array_equal(found, [0, 0, 0, 2, 0])


def test_gdpo_normalises_each_reward_by_itself():
  # Every reward of two samples becomes -+ 1 / sqrt(2); 1 + .5 of them.
  found = gdpo([0.0, 1.0, 2.0, 0.0], [3, 3, 8, 8])
  np.testing.assert_allclose(found, np.array([-1, 1, 1, -1]) * 1.5 / 2**0.5, rtol=1e-4)


def test_gdpo_keeps_apart_what_a_sum_would_mix_up():
  # GRPO of the sum sees (1, 1): no signal. Each by itself does.
  terms = {"a": np.array([1.0, 0.0]), "b": np.array([0.0, 1.0])}
  found = group_advantages.gdpo(
    terms, {"a": 1.0, "b": 0.25}, Groups(np.zeros(2)), norm_by_std=False
  )
  np.testing.assert_allclose(found, [0.375, -0.375])


def test_rloo_subtracts_the_mean_of_the_others():
  # Three right of eight: 1 - 2/7, 0 - 3/7.
  scores = np.array([1, 0, 0, 1, 0, 1, 0, 0])
  found = rloo(scores, np.zeros(8))
  np.testing.assert_allclose(found, np.where(scores == 1, 5 / 7, -3 / 7), rtol=1e-6)


def test_rloo_of_one_sample_has_no_baseline():
  np.testing.assert_array_equal(rloo([0.7, 2.0], [1, 2]), np.float32([0.7, 2.0]))


def test_opo_weights_the_mean_by_length():
  # (1 * 1 + 3 * 0 + 2 * 2) / 6 = 5/6; the last two are another group.
  found = opo([1.0, 0.0, 2.0, 1.0, 3.0], [4, 4, 4, 6, 6])
  expected = [1 / 6, -5 / 6, 7 / 6, 1 - 31 / 13, 3 - 31 / 13]
  np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_gpg_makes_up_for_groups_without_a_signal():
  # 6 rows, 2 of them with a signal: alpha = 3.
  found = gpg([1.0, 1.0, 0.0, 1.0, 0.0, 0.0], [1, 1, 2, 2, 3, 3])
  np.testing.assert_allclose(found, [0, 0, -1.5, 1.5, 0, 0])
  assert not gpg([1.0, 1.0], [1, 1]).any()


def test_the_group_baseline_is_the_mean():
  found = baseline([1.0, 2.0, 6.0, 5.0], [1, 1, 1, 2])
  np.testing.assert_array_equal(found, [-2, -1, 3, 0])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("score", [0.0, 1.0, 0.1, 1 / 3, -7.7])
def test_equal_rewards_have_advantage_zero_exactly(name, score):
  scores = np.full(5, score, np.float32)
  scores[2] += np.float32(score) * np.float32(1e-7)  # rounding
  assert (ALL[name](scores, np.zeros(5)) == 0).all()


@pytest.mark.parametrize("name", [name for name in ALL if name != "opo"])
def test_rows_may_stand_in_any_order(name):
  rng = np.random.default_rng(0)
  scores, draws = rng.normal(size=12), np.repeat([9, 2, 10**12], 4)
  order = rng.permutation(12)
  found = ALL[name](scores, draws)
  assert np.abs(found).max() > 0.1
  np.testing.assert_allclose(ALL[name](scores[order], draws[order]), found[order])


@pytest.mark.parametrize("name", ALL)
def test_all_are_fp32_one_per_row(name):
  found = ALL[name](np.array([1.0, 0.0, 3.0]), np.array([1, 1, 1]))
  assert found.shape == (3,) and found.dtype == np.float32
