"""The seed's training loop with the reader's own prompts and reward."""

import math

import numpy as np
import pytest

from jaxrl_hybrid import (
  CriticWarmupScheduler,
  DataCollector,
  HFModelWrapper,
  StyleConstraint,
  Trainer,
)
from jaxrl_hybrid.errors import JaxrlError

torch = pytest.importorskip("torch", reason="models in memory are torch's")
transformers = pytest.importorskip("transformers")

from build_models import PROMPTS, SMALL, make_tokenizer, torch_model  # noqa: E402

LOOP = """
from jaxrl_hybrid import DataCollector, Trainer

collector = DataCollector(
  actor=actor,
  reward_fn=lambda seqs: reward_model.get_reward(seqs),
  max_seq_len=10,
  num_rollouts_per_prompt=2
)
trainer = Trainer(
  actor=actor,
  critic=critic,
  optimizer="adamw",
  lr=1e-2,
  grad_clip=1.0,
  ppo_epochs=2
)
for epoch in range(3):
  batch = collector.collect(prompts=batch_prompts)
  batch = trainer.compute_advantages(batch)
  loss_dict = trainer.step(batch)
  print(f"Epoch {epoch}, Actor Loss: {loss_dict['actor_loss']:.4f}")
"""


@pytest.fixture(scope="module")
def places(tmp_path_factory):
  root = tmp_path_factory.mktemp("loop")
  one = dict(num_hidden_layers=1)
  auto = transformers.AutoModelForCausalLM
  torch_model(auto, make_tokenizer(), root / "lm", **one)
  auto = transformers.AutoModelForSequenceClassification
  torch_model(auto, make_tokenizer(), root / "reward", num_labels=1, **one)
  return root


def load(path, **config):
  return HFModelWrapper(
    model_name_or_path=path,
    dtype="float32",
    config=SMALL | {"rollout.temperature": 0.9} | config,
  )


@pytest.fixture(scope="module")
def critic(places):
  return HFModelWrapper(
    model_class="AutoModelForSequenceClassification",
    model_name_or_path=places / "lm",
    dtype="float32",
    config=SMALL,
  )


@pytest.fixture(scope="module")
def actor(places):
  return load(places / "lm")


def test_the_loop_as_printed(actor, critic, places, capsys):
  names = dict(actor=actor, critic=critic, batch_prompts=PROMPTS)
  exec(LOOP, names | {"reward_model": load(places / "reward")}, names)
  batch, losses = names["batch"], names["loss_dict"]
  assert capsys.readouterr().out.count("Actor Loss: ") == 3
  assert [len(set(batch.draw_ids[i : i + 2])) for i in range(0, 8, 2)] == [1] * 4
  totals = batch.prompt_lengths + batch.response_lengths
  assert totals.max() == 10  # 8 tokens are not the limit here
  assert batch.response_lengths.max() > 8
  on_last = batch.rewards[np.arange(8), batch.response_lengths - 1]
  np.testing.assert_array_equal(on_last, batch.scores)
  assert (batch.rewards != 0).sum() <= 8
  assert losses["actor_loss"] == losses["actor/loss"]
  assert losses["critic_loss"] == losses["critic/vf_loss"] > 0
  assert losses["reward"] == pytest.approx(batch.scores.mean())
  assert losses["actor/lr"] == losses["critic/lr"] == pytest.approx(1e-2)
  assert actor.config.actor.ppo_epochs == critic.config.actor.ppo_epochs == 2
  assert actor.config.actor.optim.clip_grad == 1.0


def test_the_readers_own_reward_is_learned(places):
  """Without a critic: the group of a prompt is the baseline."""
  actor = load(
    places / "lm", **{"algorithm.name": "grpo", "rollout.n": 8, "data": SMALL["data"]}
  )
  trainer = Trainer(actor, lr=2e-2)
  collector = DataCollector(
    actor, lambda seqs: [text.split().count("w7") for text in seqs.texts]
  )
  rewards = []
  for _ in range(12):
    losses = trainer.step(trainer.compute_advantages(collector.collect(PROMPTS)))
    rewards.append(losses["reward"])
  assert "critic_loss" not in losses
  assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.5, rewards


def test_configure_keeps_parameters_and_starts_moments_anew(actor, critic):
  sequences = actor.generate_sequences(PROMPTS)
  actor.update_policy(sequences, np.ones(4))
  before = actor.compute_log_probs(sequences).old_log_probs
  role = actor._role
  actor.configure({"actor.ppo_epochs": actor.config.actor.ppo_epochs})
  assert actor._role is role  # nothing changed
  Trainer(actor, critic, lr=5e-3)
  assert actor._role is not role and actor._role.state.updates == 0
  after = actor.compute_log_probs(sequences).old_log_probs
  np.testing.assert_array_equal(before, after)
  metrics = actor.update_policy(sequences, np.ones(4))
  assert metrics["actor/lr"] == pytest.approx(5e-3)


def test_the_critic_learns_first(actor, critic):
  """The seed's lines: scheduler = CriticWarmupScheduler(...), trainer.step(...)."""
  scheduler = CriticWarmupScheduler(critic=critic, warmup_steps=2, full_steps=4)
  trainer = Trainer(actor, critic, lr=1e-2, config={"critic.cliprange_value": 1e3})
  batch = actor.generate_sequences(PROMPTS)
  batch = critic.compute_advantages(batch, np.arange(4.0))
  plain = batch.returns
  before = actor.compute_log_probs(batch).old_log_probs
  steps = []
  for _ in range(4):
    batch = trainer.compute_advantages(batch)
    steps.append(trainer.step(batch, critic_scheduler=scheduler))
    if scheduler.step == 2:
      after = actor.compute_log_probs(batch).old_log_probs
      np.testing.assert_array_equal(before, after)
  alone = [math.isnan(step["actor_loss"]) for step in steps]
  assert alone == [True, True, False, False]
  assert [step["critic/share"] for step in steps] == [0, 0, 0.5, 1]
  assert steps[1]["critic_loss"] < steps[0]["critic_loss"]
  # A fresh head, lambda = 1: returns are rewards to go, with or without the critic.
  np.testing.assert_allclose(plain[batch.mask], batch.returns[batch.mask], rtol=1e-5)
  other = CriticWarmupScheduler(critic, 2, 4)
  other.restore(scheduler.state())
  assert (other.step, other.share, other.actor_learns) == (4, 1.0, True)
  foreign = CriticWarmupScheduler(actor, 2, 4)
  with pytest.raises(JaxrlError, match="of the trainer's own critic"):
    trainer.step(batch, critic_scheduler=foreign)


def test_a_style_beside_the_reward(places):
  """The seed's lines: StyleConstraint(...), style_loss.compute(actor_outputs)."""
  actor = load(places / "lm", **{"algorithm.name": "grpo", "rollout.n": 2})
  style_loss = StyleConstraint(reference_texts=["w8 w9", "w3"], weight=0.3)
  trainer = Trainer(actor, style=style_loss, lr=1e-2)
  collector = DataCollector(actor, lambda seqs: np.ones(len(seqs)))
  batch = trainer.compute_advantages(collector.collect(PROMPTS))
  actor_outputs = actor.outputs(batch)
  expected = float(style_loss.compute(actor_outputs))
  steps = [trainer.step(batch) for _ in range(6)]
  # Equal rewards: nothing but the style is learned.
  assert steps[0]["actor_loss"] == pytest.approx(expected, rel=1e-4)
  assert steps[0]["actor/style_loss"] == pytest.approx(expected / 0.3, rel=1e-4)
  assert steps[-1]["actor/style_loss"] < 0.8 * steps[0]["actor/style_loss"]
  teacher = actor._role.teacher
  actor.configure({"actor.optim.lr": 1e-3})
  assert actor._role.teacher is teacher  # still the actor as it was at first
  plain = load(places / "lm")
  with pytest.raises(JaxrlError, match="outputs: expected an actor with a style"):
    plain.outputs(batch)


def test_remax_compares_with_the_greedy_answer(places):
  actor = load(places / "lm", **{"algorithm.name": "remax"})
  length = lambda seqs: seqs.response_lengths
  batch = DataCollector(actor, length, num_rollouts_per_prompt=3).collect(PROMPTS)
  greedy = actor.generate_sequences(PROMPTS, greedy=True).response_lengths
  np.testing.assert_array_equal(batch.baseline_scores, np.repeat(greedy, 3))
  batch = Trainer(actor).compute_advantages(batch)
  expected = batch.response_lengths - np.repeat(greedy, 3)
  np.testing.assert_allclose(batch.advantages[:, 0], expected)
  plain = actor.generate_sequences(PROMPTS)
  for name, words in (("remax", "baseline_scores"), ("gdpo", "score_terms")):
    actor = load(places / "lm", **{"algorithm.name": name, "rollout.n": 2})
    with pytest.raises(JaxrlError, match=f"{name}: expected {words}"):
      actor.compute_advantages(plain, np.ones(4))


def test_wrong_arguments_are_named(actor, critic):
  ones = lambda seqs: np.ones(len(seqs))
  for call, words in (
    (lambda: Trainer(actor), "critic: algorithm.name='ppo'.*got none"),
    (lambda: Trainer(actor, critic, optimizer="sgd"), "optimizer.*adamw.*'sgd'"),
    (lambda: Trainer(actor, critic, lr=-1.0), "actor.optim.lr: expected > 0"),
    (lambda: Trainer(actor, critic, config={"actor.lr": 1}), "unknown key 'actor.lr'"),
    (lambda: Trainer(actor, critic, config={"seed": 1}), "'seed' is fixed"),
    (lambda: Trainer(actor, critic, reference=actor), "reference: expected none"),
    (lambda: DataCollector(actor, ones, 65).collect(["w1"]), "max_seq_len.*2 to 64"),
    (lambda: DataCollector(actor, ones, 4).collect(["w1 " * 4]), "max_seq_len - 1"),
    (lambda: DataCollector(actor, ones, 8, 0).collect(["w1"]), "n: expected at least"),
    (
      lambda: DataCollector(actor, lambda seqs: math.nan * ones(seqs)).collect(["w1"]),
      "rewards: expected finite",
    ),
    (lambda: DataCollector(actor, lambda seqs: [1.0]).collect(PROMPTS), "got \\(1,\\)"),
    (
      lambda: Trainer(actor, critic).compute_advantages(
        actor.generate_sequences(PROMPTS)
      ),
      "with rewards",
    ),
    (
      lambda: Trainer(actor, critic).step(actor.generate_sequences(PROMPTS)),
      "of compute_advantages",
    ),
  ):
    with pytest.raises(JaxrlError, match=words):
      call()
