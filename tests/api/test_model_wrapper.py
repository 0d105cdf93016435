"""``HFModelWrapper`` in the seed's own words, and every way to ask it wrongly."""

import ast
import logging
import subprocess
import sys
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_hybrid
from jaxrl_hybrid import HFModelWrapper
from jaxrl_hybrid.api import arguments
from jaxrl_hybrid.api.sequences import PromptReader
from jaxrl_hybrid.errors import JaxrlError
from jaxrl_hybrid.workers.actor import GAP_MAX

torch = pytest.importorskip("torch", reason="models in memory are torch's")
transformers = pytest.importorskip("transformers")

from build_models import MESH, PROMPTS, SMALL, WORDS, make_tokenizer, torch_model  # noqa: E402


@pytest.fixture(scope="module")
def places(tmp_path_factory):
  """Directories: a causal LM, and two reward models, one with other ids."""
  root = tmp_path_factory.mktemp("models")
  own, other = make_tokenizer(), make_tokenizer([*reversed(WORDS)])
  torch_model(transformers.AutoModelForCausalLM, own, root / "lm")
  scores = transformers.AutoModelForSequenceClassification
  torch_model(scores, own, root / "reward", num_labels=1)
  torch_model(scores, other, root / "other", num_labels=1)
  return root


@pytest.fixture(scope="module")
def actor(places):
  AutoModelForCausalLM = transformers.AutoModelForCausalLM
  model = AutoModelForCausalLM.from_pretrained(places / "lm", dtype=torch.float32)
  return HFModelWrapper(
    model,
    parallel_config={"tp": 4, "dp": 2},
    dtype=torch.float32,
    config=SMALL | {"actor.ppo_epochs": 2},
  )


@pytest.fixture(scope="module")
def reward_model(places):
  return HFModelWrapper(
    model_class="AutoModelForSequenceClassification",
    model_name_or_path=places / "reward",
    parallel_config=MESH,
    dtype="float32",
    config=SMALL,
  )


@pytest.fixture(scope="module")
def critic(places):
  return HFModelWrapper(
    model_class="AutoModelForSequenceClassification",
    model_name_or_path=str(places / "lm"),  # the same base
    parallel_config={"tp": 4, "dp": 2},
    dtype=jnp.float32,
    num_labels=1,
    config=SMALL,
  )


def hf_scores(directory, rows):
  auto = transformers.AutoModelForSequenceClassification
  model = auto.from_pretrained(directory, dtype=torch.float32)
  model.config.pad_token_id = None
  with torch.no_grad():
    one = lambda row: model(torch.tensor(np.asarray(row, np.int64)[None])).logits[0, 0]
    return np.array([one(row) for row in rows])


def test_the_four_lines_of_ppo(actor, reward_model, critic, places, tmp_path):
  sequences = actor.generate_sequences(PROMPTS)
  assert actor.compute_log_probs(sequences).metrics[GAP_MAX] < 1e-4
  rewards = reward_model.get_reward(sequences)
  advantages = critic.compute_advantages(sequences, rewards)
  metrics = actor.update_policy(sequences, advantages)

  rows = [
    np.concatenate([prompt.ids, sequences.response(i)])
    for i, prompt in enumerate(sequences.prompts)
  ]
  expected = hf_scores(places / "reward", rows)
  assert rewards.dtype == np.float32 and rewards.shape == (4,)
  assert np.abs(rewards - expected).max() <= 1e-4 * np.abs(expected).max()
  last = advantages.rewards[np.arange(4), sequences.response_lengths - 1]
  np.testing.assert_array_equal(last, rewards)
  assert not advantages.values.any()  # a fresh head
  assert metrics["actor/grad_norm"] > 0 and metrics["actor/lr"] == pytest.approx(1e-2)
  assert metrics["actor/ppo_kl"] != 0  # of the second epoch, to the old log-probs
  first = critic.update(advantages)["critic/vf_loss"]
  assert critic.update(advantages)["critic/vf_loss"] < first
  # Both as transformers sees them.
  auto = transformers.AutoModelForSequenceClassification
  values = critic.compute_values(sequences).values
  critic.save_pretrained(tmp_path / "critic")
  model = auto.from_pretrained(tmp_path / "critic", dtype=torch.float32)
  assert model.score.weight.any() and model.num_labels == 1
  before = [row[:-1] for row in rows]  # a value is that before its token
  expected = hf_scores(tmp_path / "critic", before)
  got = values[np.arange(4), sequences.response_lengths - 1]
  assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max()
  actor.save_pretrained(tmp_path / "actor")
  model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "actor")
  greedy = actor.generate_sequences(PROMPTS, greedy=True)
  ids = torch.tensor(greedy.prompts[0].ids[None].astype(np.int64))
  out = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
  assert greedy.response(0).tolist() == out.tolist()[: len(greedy.response(0))]
  assert greedy.texts[0] == make_tokenizer().decode(out, skip_special_tokens=True)


def test_prompts_are_text_messages_or_ids(actor):
  chat = [{"role": "user", "content": "w1 w2"}]
  ids = make_tokenizer()("user w1 w2 . assistant")["input_ids"]
  batch = actor.generate_sequences(
    [chat, ids, np.array(ids), "user w1 w2 . assistant"], greedy=True
  )
  assert len({prompt.ids.tobytes() for prompt in batch.prompts}) == 1
  assert len(set(batch.texts)) == 1
  assert batch.prompts[1].text == "user w1 w2 . assistant"
  draws = set(batch.draw_ids) | set(actor.generate_sequences(["w1"] * 4).draw_ids)
  assert len(draws) == 8
  for wrong in ("w1", [], [[]], ["w1 " * 17], [3], [[5, 99]], [[-1, 5]]):
    with pytest.raises(JaxrlError, match="expected|prompt"):
      actor.generate_sequences(wrong)


def test_a_reward_model_with_other_ids_reads_the_text(actor, places, caplog):
  caplog.set_level(logging.INFO)
  reward_model = HFModelWrapper(
    model_name_or_path=places / "other", dtype="float32", config=SMALL
  )
  prompts = ["w1 w2", "w3", "w4", "w5"]
  sequences = actor.generate_sequences(prompts)
  found = reward_model.get_reward(sequences)
  assert "reads texts by its own tokenizer" in caplog.text
  own = make_tokenizer([*reversed(WORDS)])
  texts = [
    f"user {prompt} . assistant {text} ."
    for prompt, text in zip(prompts, sequences.texts, strict=True)
  ]
  expected = hf_scores(places / "other", [own(text)["input_ids"] for text in texts])
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
  messages = [
    [{"role": "user", "content": p}, {"role": "assistant", "content": t}]
    for p, t in zip(prompts, sequences.texts, strict=True)
  ]
  pairs = list(zip(prompts, sequences.texts, strict=True))
  ids = [own(text)["input_ids"] for text in texts]
  for given in (texts, messages, pairs, ids):
    np.testing.assert_allclose(reward_model.get_reward(given), found, rtol=1e-5)
  for wrong in ([], [""], ["w1 " * 65], [{"role": "user"}], "w1", [[99]], [[-1]]):
    with pytest.raises(JaxrlError, match="expected"):
      reward_model.get_reward(wrong)


def test_each_role_has_its_methods(actor, reward_model, critic):
  batch = actor.generate_sequences(PROMPTS)
  assert critic.compute_values(batch).values.shape == batch.response_ids.shape
  assert len(reward_model.get_reward(batch)) == 4
  reference = actor.compute_ref_log_probs(batch).ref_log_probs
  assert np.abs(reference - batch.rollout_log_probs)[batch.mask].max() < 1e-4
  for call, words in (
    (lambda: actor.get_reward(batch), "a reward model.*this wrapper is an actor"),
    (lambda: actor.compute_values(batch), "a critic.*is an actor"),
    (lambda: critic.generate_sequences(["w1"]), "an actor, of AutoModelForCausalLM"),
    (lambda: actor.update_policy(batch), "expected advantages"),
    (lambda: actor.update_policy(batch, np.zeros(3)), r"expected shape \(4, "),
    (lambda: actor.update_policy(batch, [np.nan] * 4), "advantages.*finite"),
    (lambda: actor.update_policy(batch, ["good"] * 4), "advantages.*numbers"),
    (lambda: actor.update_policy(batch, batch.select([1, 0, 2])), "same sequences"),
    (lambda: critic.compute_advantages(batch, [[1.0]]), r"expected shape \(4,\)"),
    (lambda: critic.compute_advantages(batch, [np.nan] * 4), "finite"),
    (lambda: critic.compute_advantages(batch, [[1.0], [2.0, 3.0]]), "rewards.*numb"),
    (lambda: critic.update(batch), "values and returns"),
    (lambda: reward_model.compute_values(batch), "this wrapper is a reward model"),
    (lambda: reward_model.save_pretrained("x"), "frozen"),
  ):
    with pytest.raises(JaxrlError, match=words):
      call()


def test_a_causal_lm_gives_no_rewards(places):
  fresh = HFModelWrapper(
    model_class=transformers.AutoModelForSequenceClassification,
    model_name_or_path=places / "lm",
    dtype="float32",
  )
  with pytest.raises(JaxrlError, match="no score head, so it can only be a critic"):
    fresh.get_reward(["w1"])


def test_a_model_in_memory_leaves_nothing_on_disk(actor, tmp_path, monkeypatch):
  monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
  model = torch_model(transformers.AutoModelForCausalLM)
  before = {name: x.clone() for name, x in model.state_dict().items()}
  wrapper = HFModelWrapper(model, dtype="float32", config=SMALL)
  assert not list(tmp_path.iterdir())
  assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
  with pytest.raises(JaxrlError, match="model.lora: expected model_name_or_path"):
    HFModelWrapper(model, config=SMALL | {"model.lora.rank": 2})
  with pytest.raises(JaxrlError, match="came without a tokenizer"):
    wrapper.generate_sequences(["w1"])
  reader = PromptReader(None, string_prompts="plain", max_length=3, vocab_size=9)
  (prompt,) = reader.read([[4, 5, 6]])
  assert prompt.ids.tolist() == [4, 5, 6] and prompt.ids.dtype == np.int32


@pytest.mark.parametrize(
  "given,words",
  [
    (dict(), ["either a transformers model or model_name_or_path", "neither"]),
    (dict(model_class="AutoModel", model_name_or_path="."), ["AutoModelForCausalLM"]),
    (dict(model="gpt2"), ["model: expected a transformers model", "str"]),
    (dict(model_name_or_path="Qwen/No-Such"), ["hf download Qwen/No-Such", "DIR"]),
    (dict(num_labels=2), ["num_labels: expected 1", "got 2"]),
    (dict(parallel_config={"tp": 2, "pd": 1}), ["pp", "'pd': 1"]),
    (dict(parallel_config={"tp": 0}), [">= 1"]),
    (dict(parallel_config="tp4"), ["parallel_config", "a dict", "'tp4'"]),
    (dict(config=["rollout.n"]), ["config: expected a dict"]),
    (dict(tokenizer=3), ["tokenizer", "got 3"]),
    (dict(config={"critic.lora.rank": 2}), ["expected model.lora", "critic.lora"]),
    (
      dict(
        config={"model.lora.rank": 2}, model_class="AutoModelForSequenceClassification"
      ),
      ["expected critic.lora", "model.lora"],
    ),
    (dict(parallel_config={"tp": 32}), ["32 devices, got 16", "JAX_NUM_CPU_DEVICES"]),
    (dict(dtype="int8"), ["dtype", "int8"]),
    (dict(dtype=torch.float64), ["dtype", "float64"]),
    (dict(config={"actor.optim.lrr": 1}), ["unknown key", "actor.optim.lr"]),
    (dict(config={"model.dtype": "float32"}), ["set by the argument dtype"]),
    (dict(config={"rewards.functions": ()}), ["means nothing to one model"]),
    (dict(config={"actor.optim.lr": "fast"}), ["config:", "fast"]),
    (dict(config={"rollout.temperature": 0.0}), ["rollout.temperature"]),
    (dict(config={"data.max_prompt_length": 64}), ["exceeds", "64"]),
  ],
)
def test_wrong_arguments_are_named(given, words, places):
  if "num_labels" in given or not {"model", "model_name_or_path"} & set(given):
    given = given and given | dict(model_name_or_path=places / "lm")
  with pytest.raises(JaxrlError) as caught:
    HFModelWrapper(**given)
  assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
  "dtype", [torch.bfloat16, jnp.bfloat16, "bfloat16", jnp.dtype("bfloat16")], ids=repr
)
def test_dtypes_of_torch_and_jax_are_alike(dtype):
  assert arguments.dtype_name(dtype) == "bfloat16"
  assert arguments.dtype_name(None) is None


def test_flash_attention_on_a_cpu_says_what_runs(actor, caplog):
  spec = actor._plan.source.spec
  assert arguments.attention_for(True, spec, "bfloat16") == "xla"
  assert "use_flash_attn=True: attention runs as 'xla'" in caplog.text
  assert arguments.attention_for(False, spec, "bfloat16") == "xla"
  assert arguments.attention_for(None, spec, "bfloat16") == "auto"


def test_the_package_is_cheap_to_import_and_needs_no_torch():
  code = "import sys, jaxrl_hybrid; print('jax' in sys.modules, dir(jaxrl_hybrid))"
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
  assert done.stdout.startswith("False") and "HFModelWrapper" in done.stdout, done
  with pytest.raises(AttributeError, match="no attribute 'HFModelWraper'"):
    _ = jaxrl_hybrid.HFModelWraper
  package = Path(jaxrl_hybrid.__file__).parent
  for path in set(package.rglob("*.py")) - {package / "tools" / "oracle.py"}:
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Import | ast.ImportFrom):
        module = getattr(node, "module", None) or ""
        names = [module, *(alias.name for alias in node.names)]
        assert not any(name.split(".")[0] == "torch" for name in names), path
