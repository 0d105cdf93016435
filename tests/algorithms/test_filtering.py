"""Dynamic sampling and overlong shaping by hand."""

import logging

import numpy as np
import pytest

from jaxrl_hybrid.algorithms.filtering import PREFIX, GroupFilter, overlong_penalty
from jaxrl_hybrid.errors import ConfigError
from jaxrl_hybrid.types import STOP, Batch, Prompt


def scored(first_draw, groups, width=3):
  """A batch of groups of scores; ``terms`` tells the sign only."""
  scores = np.array([x for group in groups for x in group], np.float32)
  draws = [first_draw + i for i, group in enumerate(groups) for _ in group]
  count = len(scores)
  return Batch(
    prompts=[Prompt(np.ones(1, np.int32), "", "", d, d) for d in draws],
    sample_ids=np.arange(count, dtype=np.int32),
    response_ids=np.full((count, width), first_draw, np.int32),
    response_lengths=np.full(count, width, np.int32),
    finish_reasons=[STOP] * count,
    rollout_log_probs=np.zeros((count, width), np.float32),
    texts=[str(x) for x in scores],
    scores=scores,
    score_terms={"sign": np.sign(scores)},
    metrics={"critic/rewards/mean": float(scores.mean()), "reward/bad_count": 1.0},
  )


def collect(*batches, metric="", max_batches=10):
  """(batch, how many batches were sampled)."""
  left = list(batches)
  out = GroupFilter(metric, max_batches).collect(lambda: left.pop(0))
  return out, len(batches) - len(left)


def metric(batch, name):
  return batch.metrics[PREFIX + name]


FIRST = scored(0, [[1, 1], [0, 1], [0, 0]])
SECOND = scored(10, [[0, 1], [1, 1], [1, 0]], width=5)
THIRD = scored(20, [[0, 1], [1, 0], [1, 0]])


def test_it_samples_until_there_are_enough_mixed_groups():
  out, used = collect(FIRST, SECOND, THIRD)
  assert used == 2
  assert out.draw_ids.tolist() == [1, 1, 10, 10, 12, 12]
  assert out.scores.tolist() == [0, 1, 0, 1, 1, 0]
  assert out.texts == ["0.0", "1.0", "0.0", "1.0", "1.0", "0.0"]
  assert out.response_ids.shape == (6, 5)
  assert (
    out.response_ids[0].tolist() == [0, 0, 0, 0, 0] and out.valid_mask[0].sum() == 3
  )
  assert metric(out, "gen_batches") == 2
  assert metric(out, "mixed_share") == 0.5
  assert metric(out, "evicted_samples") == 6
  assert metric(out, "discarded_surplus_samples") == 0
  # Of all that was sampled, counts add up.
  assert out.metrics["critic/rewards/mean"] == pytest.approx((0.5 + 4 / 6) / 2)
  assert out.metrics["reward/bad_count"] == 2


def test_what_is_too_much_is_left_out():
  out, used = collect(FIRST, THIRD)
  assert used == 2 and out.draw_ids.tolist() == [1, 1, 20, 20, 21, 21]
  assert metric(out, "discarded_surplus_samples") == 2
  assert metric(out, "evicted_samples") == 4


def test_a_batch_of_mixed_groups_is_taken_as_it_is():
  out, used = collect(THIRD, FIRST)
  assert used == 1 and out.draw_ids.tolist() == THIRD.draw_ids.tolist()
  assert metric(out, "evicted_samples") == 0


def test_sampling_is_bounded(caplog):
  with caplog.at_level(logging.WARNING):
    out, used = collect(FIRST, FIRST, FIRST, max_batches=2)
  assert used == 2 and len(out) == 4
  assert "2 of 3 groups are mixed after 2 batches" in caplog.text


def test_without_any_mixed_group_the_last_batch_stays(caplog):
  flat = scored(0, [[1, 1], [0, 0]])
  out, used = collect(flat, flat, max_batches=2)
  assert used == 2 and out.scores.tolist() == [1, 1, 0, 0]
  assert metric(out, "mixed_share") == 0
  assert "the last batch as it is" in caplog.text


def test_groups_are_compared_by_one_reward_function():
  # The score differs in its length term, the sign does not.
  first, second = scored(0, [[1, 2], [-1, 2]]), scored(5, [[-1, 1], [3, 1]])
  out, used = collect(first, second, metric="sign")
  assert used == 2 and out.draw_ids.tolist() == [1, 1, 5, 5]
  with pytest.raises(ConfigError, match=r"\['sign'\], got 'acc'"):
    collect(first, metric="acc")


def test_rounding_does_not_make_a_group_mixed():
  out, used = collect(scored(0, [[0.1, 0.1 + 1e-8], [0, 1]]), THIRD)
  assert used == 2 and out.draw_ids.tolist() == [1, 1, 20, 20]


def test_the_overlong_penalty_by_hand():
  # Limit 20, buffer 4, factor .5: free up to 16, then -1/8 per token.
  lengths = np.array([1, 16, 17, 18, 20, 25])
  found = overlong_penalty(lengths, longest=20, buffer=4, factor=0.5)
  np.testing.assert_allclose(found, [0, 0, -0.125, -0.25, -0.5, -0.5])
  assert found.dtype == np.float32
