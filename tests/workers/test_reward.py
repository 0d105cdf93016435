"""The reward worker: decoding, token rewards, removal of samples and groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxrl_hybrid.errors import RewardError
from jaxrl_hybrid.rewards import RewardRunner
from jaxrl_hybrid.rewards.execution import Failure
from jaxrl_hybrid.types import LENGTH, STOP, Batch, Prompt
from jaxrl_hybrid.workers.reward import OVERLONG, Overlong, RewardWorker

WORDS = ["<pad>", "<eos>", "<|end|>", "one", "two", "three"]
PAD, EOS, UNMARKED_EOS, ONE, TWO, THREE = range(6)


class Tokenizer:
  """Words; pad and eos are special, <|end|> is not marked as such."""

  def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
    special = (PAD, EOS) if skip_special_tokens else ()
    return " ".join(WORDS[i] for i in ids if i not in special)


def make_batch(responses: list[list[int]], draws: list[int]) -> Batch:
  width = max(map(len, responses)) + 1
  ids = np.full((len(responses), width), THREE, np.int32)  # padding is any id
  for row, response in zip(ids, responses):
    row[: len(response)] = response
  lengths = np.array([len(r) for r in responses], np.int32)
  ends = [STOP if r[-1] in (EOS, UNMARKED_EOS) else LENGTH for r in responses]
  prompts = [
    Prompt(np.zeros(2, np.int32), "p", "p", d, d, {"answer": i})
    for i, d in enumerate(draws)
  ]
  return Batch(
    prompts=prompts,
    sample_ids=np.arange(len(responses), dtype=np.int32),
    response_ids=ids,
    response_lengths=lengths,
    finish_reasons=ends,
    rollout_log_probs=np.zeros(ids.shape, np.float32),
    metrics={"before": 1.0},
  )


GIVEN = [("reward_model", 10.0)]


def make_worker(
  function: Any, on_error: str = "skip", given: Any = (), **options: Any
) -> RewardWorker:
  runner = RewardRunner(
    [("f", function)],
    [2.0],
    on_error=on_error,
    timeout_s=10,
    num_workers=2,
    given=given,
  )
  return RewardWorker(Tokenizer(), runner, **options)


RESPONSES = [[ONE, TWO, EOS], [ONE], [EOS], [TWO, PAD, UNMARKED_EOS]]


def test_rewards_texts_and_metrics():
  batch = make_batch(RESPONSES, [0, 0, 1, 1])
  scored = make_worker(lambda ground_truth, solution_str: ground_truth).compute_rewards(
    batch
  )
  assert scored.texts == ["one two", "one", "", "two"]
  assert scored.scores.tolist() == [0, 2, 4, 6]
  assert scored.score_terms["f"].tolist() == [0, 1, 2, 3]
  assert scored.score_weights == {"f": 2.0}
  expected = np.zeros((4, 4), np.float32)
  expected[1, 0], expected[2, 0], expected[3, 2] = 2, 4, 6
  np.testing.assert_array_equal(scored.rewards, expected)
  assert scored.rewards.dtype == np.float32
  assert scored.metrics == {
    "before": 1.0,
    "critic/rewards/mean": 3.0,
    "critic/rewards/max": 6.0,
    "critic/rewards/min": 0.0,
    "reward/f/mean": 1.5,
    "reward/bad_count": 0.0,
    "reward/removed_count": 0.0,
  }
  assert batch.rewards is None  # the given batch is not changed


class Model:
  """A reward model that reads the texts."""

  def score(self, batch: Batch, texts: list[str]) -> list[float | Failure]:
    assert len(batch) == len(texts)
    return [len(text) / 2 if text else Failure("nothing said") for text in texts]


def test_a_model_is_one_more_term_under_the_same_policy():
  batch = make_batch(RESPONSES, [0, 0, 1, 1])
  worker = make_worker(lambda ground_truth, solution_str: 1.0, given=GIVEN)
  scored = worker.with_model(Model()).compute_rewards(batch)
  assert list(scored.score_terms) == ["f", "reward_model"]
  assert scored.score_terms["reward_model"].tolist() == [3.5, 1.5, 1.5]  # one skipped
  assert scored.scores.tolist() == [2 + 35, 2 + 15, 2 + 15]
  assert scored.metrics["reward/bad_count"] == 1
  assert scored.metrics["reward/reward_model/mean"] == pytest.approx(6.5 / 3)
  assert worker.model is None
  strict = make_worker(lambda solution_str: 1.0, "raise", given=GIVEN)
  with pytest.raises(RewardError, match="'reward_model' failed on sample 2.*nothing"):
    strict.with_model(Model()).score(batch)
  zero = make_worker(lambda solution_str: 1.0, "zero", given=GIVEN)
  assert zero.with_model(Model()).score(batch).scores.tolist() == [37, 17, 2, 17]


def test_special_tokens_but_the_final_eos_are_shown_when_asked_for():
  worker = make_worker(lambda solution_str: 0.0, skip_special_tokens=False)
  scored = worker.compute_rewards(make_batch(RESPONSES, [0, 0, 1, 1]))
  assert scored.texts == ["one two", "one", "", "two <pad>"]


def test_functions_get_the_generated_ids():
  seen = []

  def f(completions, completion_ids):
    seen.extend(completion_ids)
    return [0.0] * len(completions)

  make_worker(f).compute_rewards(make_batch(RESPONSES, [0, 0, 1, 1]))
  assert seen == RESPONSES


def bad_first(ground_truth: int, solution_str: str) -> float | None:
  return None if ground_truth == 0 else float(ground_truth)


@pytest.mark.parametrize(
  "min_group_size, draws, kept",
  [
    (1, [0, 0, 1, 1], [1, 2, 3]),
    (2, [0, 0, 1, 1], [2, 3]),
    (2, [0, 1, 0, 0], [1, 2, 3]),  # draw 1 was small before: not ours to remove
    (3, [0, 0, 0, 1], [3]),
  ],
)
def test_bad_samples_and_small_groups_are_removed(
  min_group_size: int, draws: list[int], kept: list[int]
):
  worker = make_worker(bad_first, min_group_size=min_group_size)
  scored = worker.compute_rewards(make_batch(RESPONSES, draws))
  assert scored.sample_ids.tolist() == kept
  assert scored.draw_ids.tolist() == [draws[i] for i in kept]
  assert scored.scores.tolist() == [2 * i for i in kept]
  assert len(scored.texts) == len(scored.rewards) == len(kept)
  assert scored.score_terms["f"].tolist() == kept
  assert scored.metrics["reward/bad_count"] == 1
  assert scored.metrics["reward/removed_count"] == 4 - len(kept)
  assert scored.metrics["critic/rewards/mean"] == 2 * np.mean(kept)


def test_costs_stand_beside_rewards():
  batch = make_batch(RESPONSES, [0, 0, 1, 1])
  scored = make_worker(lambda solution_str: 1.0).compute_rewards(batch)
  costly = make_worker(bad_first, min_group_size=2).compute_costs(scored)
  assert costly.sample_ids.tolist() == [2, 3]  # of draw 0 only one had a cost
  assert costly.costs.tolist() == [4, 6] and costly.scores.tolist() == [2, 2]
  assert costly.token_costs.tolist() == [[4, 0, 0, 0], [0, 0, 6, 0]]
  assert costly.rewards.tolist() == [[2, 0, 0, 0], [0, 0, 2, 0]]
  metrics = costly.metrics
  assert metrics["cost/mean"] == 5 and metrics["cost/removed_count"] == 2
  assert metrics["cost/bad_count"] == 1 and metrics["cost/f/mean"] == 2
  assert metrics["critic/rewards/mean"] == 2 and metrics["reward/bad_count"] == 0


def test_long_responses_are_a_term_of_the_reward():
  worker = make_worker(
    lambda solution_str: 1.0,
    given=[(OVERLONG, 1.0)],
    overlong=Overlong(longest=3, buffer=2, factor=0.5),
  )
  scored = worker.compute_rewards(make_batch(RESPONSES, [0, 0, 1, 1]))
  assert scored.score_terms["overlong"].tolist() == [-0.5, 0, 0, -0.5]
  assert scored.scores.tolist() == [1.5, 2, 2, 1.5]
  assert scored.metrics["reward/overlong/mean"] == -0.25


def test_nothing_left_is_an_error():
  with pytest.raises(RewardError, match="none of 2.*rewards.on_error=zero"):
    make_worker(lambda solution_str: None).compute_rewards(
      make_batch(RESPONSES[:2], [0, 0])
    )


def test_a_bad_score_stops_or_counts_as_zero():
  batch = make_batch(RESPONSES, [0, 0, 1, 1])
  with pytest.raises(RewardError, match="sample 0"):
    make_worker(bad_first, "raise").compute_rewards(batch)
  scored = make_worker(bad_first, "zero", min_group_size=2).compute_rewards(batch)
  assert scored.scores.tolist() == [0, 2, 4, 6]
  assert scored.metrics["reward/bad_count"] == 1


def test_score_removes_nothing():
  result = make_worker(bad_first).score(make_batch(RESPONSES, [0, 0, 1, 1]))
  assert result.valid.tolist() == [False, True, True, True]
  assert result.scores.tolist() == [0, 2, 4, 6]


def test_a_real_tokenizer():
  tokenizers = pytest.importorskip("tokenizers")
  transformers = pytest.importorskip("transformers")
  model = tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, "<pad>")
  raw = tokenizers.Tokenizer(model)
  raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>"
  )
  runner = RewardRunner(
    [("f", lambda solution_str: 1.0)],
    [1.0],
    on_error="raise",
    timeout_s=10,
    num_workers=1,
  )
  scored = RewardWorker(tokenizer, runner).compute_rewards(
    make_batch(RESPONSES, [0, 0, 1, 1])
  )
  assert scored.texts == ["one two", "one", "", "two"]
