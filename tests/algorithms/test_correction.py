"""Rollout correction by hand: weights, rejection, bypass, metrics."""

import numpy as np
import pytest

from jaxrl_hybrid.algorithms.correction import REJECTIONS, Correction
from jaxrl_hybrid.types import STOP, Batch, Prompt

# Ratios trainer / engine of three rows; padding holds junk.
RATIOS = [[2.0, 0.5, 4.0], [1.0, 0.25], [3.0]]
LOG2 = np.log(2)
FACTOR = "rollout_corr/rollout_is_batch_norm_factor"
REJECTED = "rollout_corr/rollout_rs_{}masked_fraction"


def batch_of(ratios=RATIOS, width=4, **fields):
  """The engine's probability is 1/8 everywhere."""
  count = len(ratios)
  rollout = np.full((count, width), 7.0, np.float32)
  old = np.full((count, width), -9.0, np.float32)
  for i, row in enumerate(ratios):
    rollout[i, : len(row)] = np.log(1 / 8)
    old[i, : len(row)] = np.log(np.array(row) / 8)
  return Batch(
    prompts=[Prompt(np.ones(1, np.int32), "", "", i, i) for i in range(count)],
    sample_ids=np.zeros(count, np.int32),
    response_ids=np.ones((count, width), np.int32),
    response_lengths=np.array([len(row) for row in ratios], np.int32),
    finish_reasons=[STOP] * count,
    rollout_log_probs=rollout,
    old_log_probs=old,
    **fields,
  )


def weights(**options):
  out = Correction(**options).correct(batch_of())
  assert out.is_weights.dtype == np.float32 and not out.is_weights[~out.mask].any()
  return out.is_weights, out.metrics


def test_off_is_off():
  batch = batch_of()
  correction = Correction()
  assert correction.correct(batch) is batch and not correction.active


def test_token_weights_are_cut_at_the_threshold():
  found, metrics = weights(rollout_is="token", threshold=2.5)
  np.testing.assert_allclose(
    found, [[2, 0.5, 2.5, 0], [1, 0.25, 0, 0], [2.5, 0, 0, 0]], rtol=1e-6
  )
  kept = np.array([2, 0.5, 2.5, 1, 0.25, 2.5])
  expected = {
    "mean": kept.mean(),
    "std": kept.std(),
    "max": 2.5,
    "min": 0.25,
    "ratio_fraction_high": 2 / 6,
    "ratio_fraction_low": 1 / 6,
    "eff_sample_size": kept.sum() ** 2 / (kept**2).sum() / 6,
  }
  for name, value in expected.items():
    assert metrics[f"rollout_corr/rollout_is_{name}"] == pytest.approx(value), name


def test_icepop_weights_are_zero_outside_of_both_bounds():
  found, _ = weights(rollout_is="token", threshold=2.5, lower=0.4)
  np.testing.assert_allclose(
    found, [[2, 0.5, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]], rtol=1e-6
  )


def test_sequence_weights_are_products():
  # 4, 1/4, 3
  found, _ = weights(rollout_is="sequence", threshold=3.5)
  np.testing.assert_allclose(
    found, [[3.5] * 3 + [0], [0.25] * 2 + [0, 0], [3, 0, 0, 0]], rtol=1e-5
  )
  found, _ = weights(rollout_is="sequence", threshold=3.5, lower=1.0)
  np.testing.assert_allclose(found[:, 0], [0, 0, 3], rtol=1e-5)


def test_weights_are_normalised_over_tokens_or_sequences():
  found, metrics = weights(rollout_is="token", threshold=2.0, batch_normalize=True)
  assert metrics[FACTOR] == pytest.approx(7.75 / 6)
  np.testing.assert_allclose(found[2, 0], 2 / (7.75 / 6), rtol=1e-6)
  found, metrics = weights(rollout_is="sequence", threshold=3.5, batch_normalize=True)
  assert metrics["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(2.25)
  np.testing.assert_allclose(
    found[:, 0], [3.5 / 2.25, 0.25 / 2.25, 3 / 2.25], rtol=1e-5
  )


def kept(*rejections):
  batch = batch_of()
  out = Correction(rejections=rejections).correct(batch)
  assert (out.mask == batch.mask).all()  # advantages see all tokens
  assert not out.policy_mask[~batch.mask].any()
  return [
    row[: len(r)].tolist() for row, r in zip(out.policy_mask, RATIOS)
  ], out.metrics


ALL, NONE = [True] * 3, [False] * 3
K3 = lambda r: r - 1 - np.log(r)
# (name, threshold that one row or token is just beyond) -> what is kept
CASES = [
  ("token_k1", 3.5, [[True, True, False], [True, False], [True]]),
  ("token_k1", 2.5, [[True, True, False], [True, False], [False]]),
  ("token_k2", 0.5 * (1.5 * LOG2) ** 2, [[True, True, False], [True, False], [False]]),
  ("token_k3", 0.7, [[True, True, False], [True, True], [False]]),  # .307 .193 1.61 0
  ("seq_sum_k1", 3.5, [NONE, NONE[:2], [True]]),  # 4, 1/4, 3
  ("seq_sum_k2", 3 * LOG2**2, [ALL, ALL[:2], [True]]),  # 3, 2 log2^2 and .603
  ("seq_sum_k2", 2.9 * LOG2**2, [NONE, ALL[:2], [True]]),
  ("seq_sum_k3", 2.0, [NONE, ALL[:2], [True]]),  # 2.11, .636, .901
  ("seq_mean_k1", 2.5, [ALL, ALL[:2], [False]]),  # 4^(1/3), 1/2, 3
  ("seq_mean_k2", 1.01 * LOG2**2, [ALL, ALL[:2], [False]]),  # 1, 1, 1.26 log2^2
  ("seq_mean_k3", 0.8, [ALL, ALL[:2], [False]]),  # .704, .318, .901
  ("seq_max_k2", 1.9 * LOG2**2, [NONE, NONE[:2], [True]]),  # 2, 2, 1.26 log2^2
  ("seq_max_k3", 1.0, [NONE, ALL[:2], [True]]),  # 1.61, .636, .901
]


def test_every_rejection_has_a_case():
  assert {name for name, _, _ in CASES} == set(REJECTIONS)


@pytest.mark.parametrize("name,threshold,expected", CASES)
def test_rejections_by_hand(name, threshold, expected):
  found, metrics = kept((name, threshold + 1e-6))
  assert found == expected
  dropped = 6 - sum(map(sum, expected))
  gone = sum(not any(row) for row in expected)
  assert metrics[REJECTED.format("")] == pytest.approx(dropped / 6)
  assert metrics[REJECTED.format(f"{name}_")] == pytest.approx(dropped / 6)
  assert metrics[REJECTED.format("seq_")] == pytest.approx(gone / 3)


def test_rejections_add_up():
  found, _ = kept(("token_k1", 3.5), ("seq_mean_k1", 2.5))
  assert found == [[True, True, False], [True, False], [False]]


def test_a_tool_token_is_in_no_statistic():
  mask = np.array([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]], bool)
  batch = batch_of(loss_mask=mask)
  out = Correction(
    rollout_is="sequence", threshold=9.0, rejections=(("seq_max_k2", 0.5),)
  ).correct(batch)
  np.testing.assert_allclose(out.is_weights[:, 0], [1, 1, 3], rtol=1e-5)
  assert out.policy_mask.tolist() == [
    [True, True, False, False],
    [True] + NONE,
    [False] * 4,
  ]


def test_bypass_takes_the_log_probs_of_the_engine():
  batch = batch_of()
  out = Correction(bypass=True).correct(batch)
  assert out.old_log_probs is batch.rollout_log_probs and not out.metrics
  out = Correction(bypass=True, rollout_is="token").correct(batch)
  assert out.old_log_probs is batch.rollout_log_probs
  assert out.is_weights[0, 1] == 0.5  # of the trainer's


def test_the_distance_of_engine_and_trainer():
  metrics = Correction(rollout_is="token").correct(batch_of()).metrics
  ratios = np.concatenate(RATIOS)
  expected = {
    "kl": -np.log(ratios).mean(),
    "k3_kl": K3(ratios).mean(),
    "chi2_token": (ratios**2).mean() - 1,
    "chi2_seq": (16 + 1 / 16 + 9) / 3 - 1,
    "rollout_ppl": 8.0,
    "training_ppl": (8 / 4 ** (1 / 3) + 8 * 2 + 8 / 3) / 3,
    "log_ppl_diff": np.mean([2 / 3 * LOG2, -LOG2, np.log(3)]),
    "log_ppl_abs_diff": np.mean([2 / 3 * LOG2, LOG2, np.log(3)]),
  }
  for name, value in expected.items():
    assert metrics[f"rollout_corr/{name}"] == pytest.approx(value, rel=1e-5), name


@pytest.mark.parametrize("rollout_is", ["token", "sequence"])
def test_extreme_and_empty_batches_stay_finite(rollout_is):
  correction = Correction(
    rollout_is=rollout_is,
    batch_normalize=True,
    rejections=tuple((name, 2.0) for name in REJECTIONS),
  )
  for batch in (
    batch_of([[1e30, 1e30], [1e-30]]),
    batch_of(loss_mask=np.zeros((3, 4), bool)),
  ):
    out = correction.correct(batch)
    assert np.isfinite(out.is_weights).all()
    assert np.isfinite(list(out.metrics.values())).all()
