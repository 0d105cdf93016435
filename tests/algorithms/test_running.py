"""Running moments, and rewards in their units."""

import json

import numpy as np
import pytest

from jaxrl_hybrid.algorithms.running import RewardShaper, RunningMoments
from jaxrl_hybrid.types import STOP, Batch, Prompt


def test_parts_give_the_moments_of_the_whole():
  rng = np.random.default_rng(0)
  x = rng.normal(3.0, 2.0, 50)
  moments = RunningMoments()
  for part in np.split(x, [1, 7, 7, 30]):  # one of one, one of none
    moments.update(part)
  assert moments.count == 50
  assert moments.mean == pytest.approx(x.mean())
  assert moments.std == pytest.approx(x.std(ddof=1))
  np.testing.assert_allclose(moments.denormalize(moments.normalize(x)), x, rtol=1e-5)


@pytest.mark.parametrize("numbers", [[], [4.0], [4.0, 4.0]])
def test_without_a_spread_the_unit_is_one(numbers):
  moments = RunningMoments()
  moments.update(np.array(numbers))
  assert moments.std == 1.0


def test_the_state_is_json_and_goes_on():
  moments, again = RunningMoments(), RunningMoments()
  moments.update(np.array([1.0, 2.0, 6.0]))
  again.restore(json.loads(json.dumps(moments.state())))
  for one in (moments, again):
    one.update(np.array([3.0]))
  assert moments == again


def scored(*scores):
  """Rows of two tokens; a KL of .5 was taken from the first token of each."""
  count = len(scores)
  rewards = np.array([[-0.5, score, 99.0] for score in scores], np.float32)
  return Batch(
    prompts=[Prompt(np.ones(2, np.int32), "", "", i, i) for i in range(count)],
    sample_ids=np.zeros(count, np.int32),
    response_ids=np.ones((count, 3), np.int32),
    response_lengths=np.full(count, 2, np.int32),
    finish_reasons=[STOP] * count,
    rollout_log_probs=np.zeros((count, 3), np.float32),
    scores=np.array(scores, np.float32),
    rewards=rewards,
  )


def last(batch):
  return batch.rewards[:, 1].tolist()


def test_rewards_are_clipped_and_scores_kept():
  out = RewardShaper(False, 1.5).shape(scored(-4.0, 1.0, 2.0))
  assert last(out) == [-1.5, 1.0, 1.5]
  assert out.scores.tolist() == [-4, 1, 2]
  assert out.rewards[:, 0].tolist() == [-0.5] * 3


def test_rewards_are_in_units_of_all_scores_so_far():
  shaper = RewardShaper(True, None)
  # mean 2, unbiased variance 2
  np.testing.assert_allclose(
    last(shaper.shape(scored(1.0, 3.0))), np.array([-1, 1]) / 2**0.5, rtol=1e-6
  )
  # with 5: mean 3, variance 4
  assert last(shaper.shape(scored(5.0))) == [1.0]
  assert last(RewardShaper(True, 0.5).shape(scored(1.0, 3.0))) == [-0.5, 0.5]


def test_greedy_scores_are_shaped_alike_but_not_learned_from():
  batch = scored(1.0, 3.0).with_fields(baseline_scores=np.array([2.0, 9.0], np.float32))
  shaper = RewardShaper(True, 1.0)
  assert shaper.shape(batch).baseline_scores.tolist() == [0.0, 1.0]
  assert shaper.moments.count == 2


def test_without_a_switch_nothing_changes():
  batch = scored(1.0, 3.0)
  assert RewardShaper(False, None).shape(batch) is batch
