"""A reward model beside the reward functions: what it reads and what becomes of it."""

import json
import re
import sys
from pathlib import Path

import build_tiny as tiny
import jax
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
import tiny_config

from jaxrl_hybrid import build, inspection, planning, role_params
from jaxrl_hybrid import config as config_lib
from jaxrl_hybrid.data.tokenizer import symbol_tokenizer
from jaxrl_hybrid.errors import JaxrlError
from jaxrl_hybrid.models import params as params_lib
from jaxrl_hybrid.models.hf.classifier import as_classifier
from jaxrl_hybrid.models.hf.export import export_hf
from jaxrl_hybrid.rewards.execution import Failure
from jaxrl_hybrid.types import STOP, Batch, Prompt
from jaxrl_hybrid.workers.reward_model import RewardModel

RANDOM = dict(
  model_type="llama",
  hidden_size=16,
  intermediate_size=24,
  num_hidden_layers=2,
  num_attention_heads=2,
  num_key_value_heads=2,
  max_position_embeddings=32,
  initializer_range=0.3,
)
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} . {% endfor %}"


def model(**options):
  layout = tiny.weight_layout(head=params_lib.VALUE)
  decoder = tiny.make_decoder(head=params_lib.VALUE)
  options = dict(micro_rows=2, max_length=20) | options
  weights = tiny.place_params(tiny.host_params(head=params_lib.VALUE), layout)
  return RewardModel(decoder, weights, layout.train, **options)


def test_the_score_is_that_of_the_row_whatever_is_behind_it():
  batch = tiny.make_batch()  # with junk behind every response
  scorer = model()
  scores = scorer.score(batch, ["not read"] * len(batch))
  assert np.ptp(scores) > 0.1
  for prompt, response, score in zip(tiny.PROMPTS, tiny.RESPONSES, scores, strict=True):
    row = np.array([*prompt, *response], np.int32)
    (alone,) = scorer.score_ids([row])
    assert score == pytest.approx(alone, rel=1e-5)


def test_a_dialogue_that_is_too_long_gets_no_score():
  scores = model(max_length=10).score(tiny.make_batch(), ["x"] * 4)
  assert [isinstance(score, Failure) for score in scores] == [False, False, False, True]
  assert "reward_model.max_length=10 tokens, got 11" in scores[3].reason


def test_another_tokenizer_reads_the_text():
  seen = []

  def encode(prompt, text):
    seen.append((prompt.row_id, text))
    return np.arange(3 + len(text), dtype=np.int32)

  scorer = model(encode=encode)
  found = scorer.score(tiny.make_batch(), ["", "a", "bc", "d"])
  assert seen == [(0, ""), (1, "a"), (2, "bc"), (3, "d")]
  assert found[1] == found[3] != found[2]
  assert found[2] == pytest.approx(scorer.score_ids([np.arange(5)])[0], rel=1e-5)


def configured(**section):
  config = tiny_config.get_config()
  with config.unlocked():
    for key, value in section.items():
      place = config.reward_model
      if "." in key:
        head, key = key.split(".")
        place = config[head]
      place[key] = value
  return config


def inspected(config):
  return inspection.inspect(config_lib.resolve(config), training=False)


def answered(plan, prompts, answers):
  """A batch of these prompts and answers in the actor's tokens."""
  tokenizer = plan.source.tokenizer
  ids = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in answers]
  width = max(map(len, ids))
  prompt = lambda p: p if isinstance(p, str) else p[-1]["content"]
  return Batch(
    prompts=[
      Prompt(
        np.array(tokenizer(prompt(p))["input_ids"], np.int32),
        p, "", i, i, {"ground_truth": "s1"},
      )
      for i, p in enumerate(prompts)
    ],
    sample_ids=np.zeros(len(ids), np.int32),
    response_ids=np.array([x + [0] * (width - len(x)) for x in ids], np.int32),
    response_lengths=np.array([len(x) for x in ids], np.int32),
    finish_reasons=[STOP] * len(ids),
    rollout_log_probs=np.zeros((len(ids), width), np.float32),
  )  # fmt: skip


def save_model(directory, tokenizer):
  """A random classifier with this tokenizer as an HF directory."""
  plan = inspected(configured(random=RANDOM | dict(vocab_size=len(tokenizer))))
  own = plan.of_model(plan.reward_model)
  params = role_params.make_params(own, params_lib.VALUE, fresh_head=False)
  config = as_classifier(own.source.hf_config, pad_token_id=0)
  export_hf(params, own.source.spec, directory, hf_config=config, tokenizer=tokenizer)
  return directory


def test_it_is_one_more_weighted_term_on_every_process_and_mesh(tmp_path):
  config = configured(
    random=RANDOM, weight=0.5, **{"offload.reward_model": True, "mesh.train": (2, 2, 2)}
  )
  plan = inspected(config)
  assert "weight 0.5, at most 32 tokens; the actor's tokenizer" in plan.describe()
  worker = build.make_reward(plan)
  kinds = {x.sharding.memory_kind for x in jax.tree.leaves(worker.model.weights)}
  assert kinds == {"pinned_host"}
  batch = answered(plan, ["copy a :", "copy b a :"], ["a", "b a"])
  scored = worker.compute_rewards(batch)
  terms = scored.score_terms
  assert list(terms) == ["symbol_match", "reward_model"]
  assert np.abs(terms["reward_model"]).min() > 1e-3
  np.testing.assert_allclose(
    scored.scores, terms["symbol_match"] + 0.5 * terms["reward_model"], rtol=1e-6
  )
  assert scored.metrics["reward/reward_model/mean"] == pytest.approx(
    terms["reward_model"].mean()
  )
  none = {"rewards.functions": (), "rewards.weights": ()}
  alone = configured(random=RANDOM, **none)
  worker = build.make_reward(inspected(alone))
  np.testing.assert_allclose(
    worker.score(batch).scores, terms["reward_model"], rtol=1e-4
  )


def test_a_directory_with_the_actors_tokenizer_or_with_its_own(tmp_path):
  actor = inspected(tiny_config.get_config()).source.tokenizer
  save_model(tmp_path / "same", actor)
  plan = inspected(configured(path=str(tmp_path / "same")))
  assert not plan.re_encodes
  words = [*"abcdef:.", "copy", "user", "assistant", "system", "short"]
  own = symbol_tokenizer(words)
  own.chat_template = TEMPLATE
  save_model(tmp_path / "own", own)
  config = configured(path=str(tmp_path / "own"), **{"data.system_prompt": "short"})
  plan = inspected(config)
  assert plan.re_encodes and "reads texts by its own chat template" in plan.describe()
  worker = build.make_reward(plan)
  chat = [{"role": "user", "content": "copy a b :"}]
  batch = answered(plan, [chat, "copy a b :"], ["a b", "a b"])
  got = worker.score(batch).terms["reward_model"]
  text = "system short . user copy a b : . assistant a b ."
  ids = np.array(own(text)["input_ids"], np.int32)
  assert own.unk_token_id not in ids
  np.testing.assert_array_equal(got, worker.model.score_ids([ids, ids]))
  (tmp_path / "own" / "chat_template.jinja").unlink()
  worker = build.make_reward(inspected(config))
  with pytest.raises(JaxrlError, match="has no chat template"):
    worker.score(batch)


def test_a_model_with_fewer_ids_than_its_tokenizer_is_refused(tmp_path):
  config = tiny_config.get_config()
  save_model(tmp_path, inspected(config).source.tokenizer)
  keys = {"critic.path": str(tmp_path), "algorithm.name": "ppo"}
  said = inspected(configured(**keys)).describe()
  assert re.search("critic: llama, [0-9,]+ parameters, from " + str(tmp_path), said)
  file = tmp_path / "config.json"
  file.write_text(json.dumps(json.loads(file.read_text()) | dict(vocab_size=5)))
  for key, changes in (("reward_model", dict(path=str(tmp_path))), ("critic", keys)):
    with pytest.raises(JaxrlError, match=rf"{key}.path=.* at least the 12 .* got 5"):
      inspected(configured(**changes))


@pytest.mark.parametrize(
  "changes,words",
  [
    (dict(path="nowhere"), ["reward_model.path: expected", "nowhere"]),
    (dict(random=RANDOM, weight=float("nan")), ["reward_model.weight"]),
    (dict(random=RANDOM, max_length=0), ["reward_model.max_length", "> 0"]),
    (dict(random=RANDOM, max_length=12), ["= 13 exceeds", "max_length", "12"]),
    (dict(random=RANDOM, **{"model.path": "real"}), ["reward_model.path=DIR"]),
    (dict(random=dict(model_type="gpt2")), ["gpt2"]),
    ({"rewards.functions": (), "rewards.weights": ()}, ["or a reward_model.path"]),
  ],
)
def test_wrong_sections_are_named(changes, words):
  with pytest.raises(JaxrlError) as caught:
    inspected(configured(**changes))
  assert all(word in str(caught.value) for word in words), caught.value


def test_a_causal_lm_is_refused_before_and_while_it_loads(tmp_path):
  plan = inspected(tiny_config.get_config())
  source, directory = plan.source, tmp_path / "lm"
  export_hf(
    role_params.make_params(plan),
    source.spec,
    directory,
    hf_config=source.hf_config,
    tokenizer=source.tokenizer,
  )
  config = configured(path=str(directory))
  with pytest.raises(JaxrlError, match="ForSequenceClassification, got"):
    inspected(config)
  file = directory / "config.json"
  unnamed = json.loads(file.read_text()) | dict(architectures=None)
  file.write_text(json.dumps(unnamed))
  with pytest.raises(JaxrlError, match="a causal LM gives no rewards"):
    build.make_reward(inspected(config))


def test_the_plan_counts_it():
  config = configured(random=RANDOM, **{"algorithm.name": "ppo"})
  here = planning.Planner(inspected(config), estimate=True).report()
  with config.unlocked():
    config.offload.reward_model = True
  there = planning.Planner(inspected(config), estimate=True).report()
  phases = lambda report: {phase.name: phase.components for phase in report.phases}
  weights = phases(here)["gen"]["reward weights"]
  assert list(phases(here))[:4] == ["switch", "gen", "reward", "old_log_prob"]
  assert there.host_bytes == weights > 0 == here.host_bytes
  holders = [n for n, parts in phases(there).items() if "reward weights" in parts]
  assert holders == ["reward"] and phases(there)["reward"]["reward weights"] == weights
  assert "generation weights" not in phases(there)["reward"]
