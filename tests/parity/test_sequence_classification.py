"""Scores of Hugging Face reward models, and critics that become such models."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import FAMILIES, SIZES, torch_model

from jaxrl_hybrid.errors import ModelError
from jaxrl_hybrid.models import decoder, families
from jaxrl_hybrid.models import params as params_lib
from jaxrl_hybrid.models.hf import classifier, export, load
from jaxrl_hybrid.parallel import mesh as mesh_lib
from jaxrl_hybrid.parallel import weights as weights_lib
from jaxrl_hybrid.workers.reward_model import RewardModel

PAD = 7  # an id like any other, which rows hold in their middle and at their end
LENGTHS = (21, 5, 1, 13)


def torch_classifier(name, directory, labels=1, **overrides):
  """A random fp32 sequence classifier of the family, saved as safetensors."""
  torch = pytest.importorskip("torch", reason="torch is the oracle")
  from transformers import AutoConfig, AutoModelForSequenceClassification

  fields = {**SIZES, **FAMILIES[name], "num_labels": labels, "pad_token_id": PAD}
  fields |= overrides
  config = AutoConfig.for_model(fields.pop("model_type"), **fields)
  torch.manual_seed(0)
  model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
  for parameter_name, parameter in model.named_parameters():
    mean = float("norm" in parameter_name and parameter.ndim == 1)
    torch.nn.init.normal_(parameter, mean=mean, std=0.2 if parameter.ndim == 1 else 0.1)
  model.eval().save_pretrained(directory)
  return model


def build(directory, mesh=(1, 1, 1), **options):
  """(decoder, stored parameters, their layout) with the score head, fp32."""
  spec = families.spec_from_hf(families.load_hf_config(directory))
  train = weights_lib.train_layout(
    spec, mesh_lib.train_mesh(mesh), sequence_parallel=False
  )
  head = params_lib.VALUE
  layout = weights_lib.WeightLayout(spec, train, jnp.dtype(jnp.float32), head=head)
  model = decoder.Decoder(
    spec,
    jnp.float32,
    "xla",
    train.constrain,
    heads=layout.heads,
    use=layout.use,
    stages=layout.stages,
  )
  shardings = jax.tree.map(lambda x: x.sharding, layout.abstract_params())
  params = load.load_params(
    directory, spec, shardings, vocab=layout.vocab, head=head, **options
  )
  return model, params, layout


def reward_model(directory, mesh=(1, 1, 1), **options):
  model, params, layout = build(directory, mesh)
  weights = jax.jit(layout.prepare)(params)
  options = dict(micro_rows=4, max_length=64) | options
  return RewardModel(model, weights, layout.train, **options)


def rows():
  """Ragged rows; one ends with the pad id, which is a token of the text there."""
  rng = np.random.default_rng(0)
  found = [rng.integers(0, 131, n).astype(np.int32) for n in LENGTHS]
  found[0][3] = found[3][-1] = PAD
  return found


def hf_scores(model, ids, padded=True):
  """fp32 ``[N]`` by transformers, in one padded batch or row by row."""
  import torch

  with torch.no_grad():
    if not padded:  # without an attention mask or padding: the pad id is a token
      model.config.pad_token_id = None
      one = lambda row: model(torch.tensor(row[None].astype(np.int64))).logits[0, 0]
      return np.array([one(row) for row in ids])
    tokens = np.full((len(ids), max(map(len, ids))), PAD, np.int64)
    mask = np.zeros_like(tokens)
    for i, row in enumerate(ids):
      tokens[i, : len(row)], mask[i, : len(row)] = row, 1
    model.config.pad_token_id = PAD
    out = model(torch.tensor(tokens), attention_mask=torch.tensor(mask))
    return out.logits[:, 0].numpy()


def assert_near(got, expected):
  assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize(
  "name",
  ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2"],
)
def test_scores_equal_transformers(name, tmp_path):
  theirs = torch_classifier(name, tmp_path)
  ids = rows()
  got = reward_model(tmp_path).score_ids(ids)
  assert got.dtype == np.float32 and got.std() > 0.1
  assert_near(got, hf_scores(theirs, ids, padded=False))
  # In a padded batch transformers takes a last pad id for padding, ours does not.
  assert_near(got[:3], hf_scores(theirs, ids)[:3])


@pytest.mark.parametrize("mesh", [(1, 4, 2), (2, 2, 2)], ids=str)
def test_scores_do_not_depend_on_the_mesh_or_on_offload(mesh, tmp_path):
  theirs = torch_classifier("qwen2", tmp_path)
  model = reward_model(tmp_path, mesh, on_host=True)
  kinds = {x.sharding.memory_kind for x in jax.tree.leaves(model.weights)}
  assert kinds == {"pinned_host"}
  assert_near(model.score_ids(rows()), hf_scores(theirs, rows(), padded=False))


def test_a_critic_starts_from_a_score_head_or_a_fresh_one(tmp_path):
  theirs = torch_classifier("llama", tmp_path / "scores")
  _, params, _ = build(tmp_path / "scores")
  np.testing.assert_array_equal(
    params["value_head"]["kernel"], theirs.score.weight.detach().numpy()
  )
  torch_model("llama", tmp_path / "lm")
  _, params, _ = build(tmp_path / "lm")
  assert not np.asarray(params["value_head"]["kernel"]).any()
  with pytest.raises(ModelError, match="sequence classifier with a score head"):
    build(tmp_path / "lm", fresh_head=False)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_a_critic_of_a_causal_lm_exports_as_a_classifier(name, tmp_path):
  from transformers import AutoModelForSequenceClassification

  torch_model(name, tmp_path / "lm")
  model, params, _ = build(tmp_path / "lm", (1, 2, 1))
  head = np.random.default_rng(1).normal(size=(1, 64)).astype(np.float32)
  params["value_head"]["kernel"] = jnp.asarray(head)
  config = families.load_hf_config(tmp_path / "lm")
  export.export_hf(
    params,
    model.spec,
    tmp_path / "out",
    hf_config=classifier.as_classifier(config, pad_token_id=PAD),
    source_dir=tmp_path / "lm",
  )
  theirs, report = AutoModelForSequenceClassification.from_pretrained(
    tmp_path / "out", output_loading_info=True
  )
  assert not report["missing_keys"] and not report["unexpected_keys"]
  assert theirs.num_labels == 1 and theirs.config.pad_token_id is not None
  np.testing.assert_array_equal(theirs.score.weight.detach().numpy(), head)
  got = reward_model(tmp_path / "out").score_ids(rows())
  assert_near(got, hf_scores(theirs.eval(), rows(), padded=False))


def rewrite(directory, **changes):
  file = directory / "config.json"
  file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_head_that_is_not_one_score_is_refused(tmp_path):
  from safetensors.numpy import load_file, save_file

  torch_classifier("llama", tmp_path, labels=3)
  config = families.load_hf_config(tmp_path)
  with pytest.raises(ModelError, match="reward_model.path.*num_labels=1, got 3"):
    classifier.check_kind(config, [classifier.CLASSIFIER], key="reward_model.path")
  with pytest.raises(ModelError, match=r"num_labels=1.*score.weight': \(3, 64\)"):
    build(tmp_path)
  weights = load_file(tmp_path / "model.safetensors")
  weights["score.weight"] = weights["score.weight"][:1]
  weights["score.bias"] = np.zeros(1, np.float32)
  save_file(weights, tmp_path / "model.safetensors")
  with pytest.raises(ModelError, match="without a bias, got.*score.bias"):
    build(tmp_path)


def test_another_kind_of_model_is_named():
  lm = {"architectures": ["LlamaForCausalLM"]}
  own = {"architectures": ["Qwen2ForRewardModel"]}
  both = (classifier.LM, classifier.CLASSIFIER)
  for config in (lm, own):
    with pytest.raises(ModelError, match="reward_model.path: expected.*got"):
      classifier.check_kind(config, [classifier.CLASSIFIER], key="reward_model.path")
  with pytest.raises(ModelError, match="Qwen2ForRewardModel"):
    classifier.check_kind(own, both, key="critic.path")
  classifier.check_kind(lm, both, key="critic.path")
  classifier.check_kind({}, both, key="critic.path")  # no name: the tensors decide


@pytest.mark.parametrize("family", sorted(families.ARCHITECTURES))
def test_classifiers_are_named_as_transformers_names_them(family):
  pytest.importorskip("torch", reason="transformers' table needs it")
  from transformers.models.auto import modeling_auto

  names = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
  found = classifier.as_classifier(dict(model_type=family), pad_token_id=0)
  assert found["architectures"] == [names[family]]
