"""Adapters against PEFT's formula in torch, written out; their files; merged export."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import build, hf_logits, random_tokens
from oracle import torch_model
from safetensors.numpy import load_file, save_file

from jaxrl_hybrid.errors import ModelError
from jaxrl_hybrid.models import adapters as adapters_lib
from jaxrl_hybrid.models import families
from jaxrl_hybrid.models.adapters import HEAD, LoraSpec
from jaxrl_hybrid.models.hf import export, peft
from jaxrl_hybrid.parallel.adapters import AdapterLayout

LORA = LoraSpec(3, alpha=4.5)
PEFT_PREFIX = "base_model.model."


def random_pairs(spec, lora=LORA):
  rng = np.random.default_rng(3)
  draw = lambda x: jnp.asarray(rng.normal(scale=0.2, size=x.shape), jnp.float32)
  return jax.tree.map(draw, adapters_lib.abstract_adapters(spec, lora))


def adapt(model, directory):
  """PEFT by hand: every adapted module adds ``scale B A x``; returns the tensors."""
  import torch

  config = json.loads((directory / "adapter_config.json").read_text())
  stored = load_file(directory / "adapter_model.safetensors")
  tensors = {k: torch.tensor(x, requires_grad=True) for k, x in stored.items()}
  for name, a in tensors.items():
    if not name.endswith(".lora_A.weight"):
      continue
    path = name.removeprefix(PEFT_PREFIX).removesuffix(".lora_A.weight")
    b = tensors[name.replace("lora_A", "lora_B")]
    short = path.rpartition(".")[2]
    rank = config["rank_pattern"].get(short, config["r"])
    scale = config["alpha_pattern"].get(short, config["lora_alpha"]) / rank
    assert a.shape[0] == b.shape[1] == rank and short in config["target_modules"]

    def add(module, args, out, *, a=a, b=b, scale=scale):
      return out + scale * (args[0] @ a.T) @ b.T

    model.get_submodule(path).register_forward_hook(add)
  return tensors


@pytest.mark.parametrize("name", ["qwen3_bias", "deepseek_v2", "phi3"])
def test_logits_gradients_files_and_merged_export(name, tmp_path):
  theirs = torch_model(name, tmp_path / "base")
  model, params, base = build(tmp_path / "base")
  layout = AdapterLayout(base, LORA)
  model = dataclasses.replace(model, use=layout.use)
  pairs = random_pairs(model.spec)
  saved = peft.save_adapters(
    pairs, model.spec, LORA, tmp_path / "adapter", base=str(tmp_path / "base")
  )
  tensors = adapt(theirs, saved)
  tokens, weight = (
    random_tokens(2, 9),
    np.random.default_rng(4).normal(size=(2, 9, 131)),
  )

  def loss(pairs):
    weights = layout.attach(base.prepare(params), layout.prepare(pairs))
    hidden = model.hidden(weights, tokens)
    flat = model.logits(weights, hidden.reshape(-1, hidden.shape[-1]))
    logits = flat.reshape(*tokens.shape, -1)[..., :131]
    return jnp.sum(weight * logits) / 100, logits

  grads, logits = jax.jit(jax.grad(loss, has_aux=True))(pairs)
  import torch

  expected = theirs(torch.tensor(np.asarray(tokens, np.int64))).logits
  scale = float(expected.detach().abs().max())
  assert np.abs(logits - expected.detach().numpy()).max() < 1e-4 * scale
  ((expected * torch.tensor(weight)).sum() / 100).backward()
  folder = peft.save_adapters(grads, model.spec, LORA, tmp_path / "grads", base=None)
  for key, got in load_file(folder / peft.WEIGHTS_FILE).items():
    wanted = tensors[key].grad.numpy()
    if "qkv_proj" in key or "gate_up" in key:  # PEFT trains the zero blocks too
      wanted = np.where(got == 0, 0, wanted) if "lora_B" in key else None
    if wanted is not None:
      assert np.abs(got - wanted).max() <= 1e-4 * np.abs(wanted).max(), key
  lora = peft.read_spec(saved)
  assert (lora.rank, lora.scale) == (LORA.rank, LORA.scale)
  placed = layout.stored.shardings(layout.axes, pairs)
  again = peft.load_adapters(saved, model.spec, lora, placed)
  jax.tree.map(np.testing.assert_array_equal, again, pairs)
  export.export_hf(
    adapters_lib.merged(params, pairs, LORA),
    model.spec,
    tmp_path / "merged",
    hf_config=families.load_hf_config(tmp_path / "base"),
    source_dir=tmp_path / "base",
  )
  from transformers import AutoModelForCausalLM

  merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
  assert np.abs(hf_logits(merged, tokens) - np.asarray(logits)).max() < 1e-4 * scale


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
  """(spec, layout, directory of adapters on q and v)."""
  folder = tmp_path_factory.mktemp("tiny")
  torch_model("llama", folder / "base")
  model, _, base = build(folder / "base")
  lora = LoraSpec(2, alpha=3.0, targets=("q_proj", "v_proj"), rslora=True)
  pairs = random_pairs(model.spec, lora)
  peft.save_adapters(pairs, model.spec, lora, folder / "adapter", base="a/model")
  return model.spec, AdapterLayout(base, lora), folder / "adapter"


def test_names_and_shapes_are_those_of_peft(tiny):
  spec, _, directory = tiny
  tensors = load_file(directory / peft.WEIGHTS_FILE)
  prefix = "base_model.model.model.layers.1.self_attn"
  assert tensors[f"{prefix}.q_proj.lora_A.weight"].shape == (2, 64)
  assert tensors[f"{prefix}.v_proj.lora_B.weight"].shape == (2 * spec.head_dim, 2)
  assert len(tensors) == 2 * 2 * spec.num_layers
  config = json.loads((directory / peft.CONFIG_FILE).read_text())
  assert config["peft_type"] == "LORA" and config["task_type"] == "CAUSAL_LM"
  assert config["base_model_name_or_path"] == "a/model"
  assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (2, 3.0, True)
  assert config["target_modules"] == ["q_proj", "v_proj"]
  lora = peft.read_spec(directory)
  assert lora == LoraSpec(2, alpha=3.0, targets=("q_proj", "v_proj"), rslora=True)


def test_the_score_head_of_a_classifiers_adapters_is_read(tiny, tmp_path):
  spec, layout, directory = tiny
  shutil.copytree(directory, tmp_path / "critic")
  file = tmp_path / "critic" / peft.WEIGHTS_FILE
  score = np.arange(64, dtype=np.float32)[None]
  save_file(load_file(file) | {"base_model.model.score.weight": score}, file)
  shardings = layout.stored.shardings(layout.axes, random_pairs(spec, layout.lora))
  with pytest.raises(ModelError, match="left over .*score"):
    peft.load_adapters(file.parent, spec, layout.lora, shardings)
  shardings[HEAD] = {"kernel": layout.train.replicated}
  got = peft.load_adapters(file.parent, spec, layout.lora, shardings)
  np.testing.assert_array_equal(got[HEAD]["kernel"], score)


def change_config(directory, **fields):
  file = directory / peft.CONFIG_FILE
  file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def change_tensors(directory, change):
  file = directory / peft.WEIGHTS_FILE
  save_file(change(load_file(file)), file)


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
  "damage, said",
  [
    (lambda d: change_config(d, use_dora=True), "use_dora=True"),
    (lambda d: change_config(d, bias="all"), "bias='all'"),
    (lambda d: change_config(d, peft_type="IA3"), "peft_type='IA3'"),
    (lambda d: change_config(d, r="many"), "config of a LoRA"),
    (lambda d: change_config(d, r=0), "r >= 1"),
    (lambda d: change_config(d, peft_type=None), "peft_type=None"),
    (lambda d: change_config(d, init_lora_weights="pissa"), "init_lora.*'pissa'"),
    (lambda d: change_config(d, alpha_pattern={"q_proj": 6}), "q_proj has scale 4.2"),
    (lambda d: change_config(d, rank_pattern={"1.self_attn.v_proj": 4}), "v_proj has"),
    (lambda d: change_config(d, alpha_pattern={"(q|v)_proj": 6}), "expected names"),
    (lambda d: change_config(d, alpha_pattern={"q_proj": "6"}), "numbers > 0"),
    (lambda d: change_tensors(d, lambda t: {}), "found none"),
    (
      lambda d: change_tensors(d, lambda t: t | {FIRST: t[FIRST] * np.nan}),
      f"{FIRST}: expected finite",
    ),
    (lambda d: (d / peft.CONFIG_FILE).unlink(), peft.CONFIG_FILE),
    (lambda d: (d / peft.WEIGHTS_FILE).write_bytes(b"no"), "safetensors"),
    (lambda d: change_tensors(d, lambda t: {k: t[k] for k in t if k != FIRST}), FIRST),
    (lambda d: change_tensors(d, lambda t: t | {FIRST: t[FIRST][:1]}), r"\(1, 64\)"),
  ],
  ids=range(17),
)
def test_other_adapters_and_damaged_ones_are_named(damage, said, tiny, tmp_path):
  spec, layout, directory = tiny
  shutil.copytree(directory, tmp_path / "bad")
  damage(tmp_path / "bad")
  shardings = layout.stored.shardings(layout.axes, random_pairs(spec, layout.lora))
  with pytest.raises(ModelError, match=said):
    lora = peft.read_spec(tmp_path / "bad")
    peft.load_adapters(tmp_path / "bad", spec, lora, shardings)


def test_saving_replaces_adapters_and_nothing_else(tiny, tmp_path):
  spec, layout, directory = tiny
  pairs = random_pairs(spec, layout.lora)
  save = lambda where: peft.save_adapters(pairs, spec, layout.lora, where, base=None)
  save(save(tmp_path / "out"))
  (tmp_path / "thesis").mkdir()
  with pytest.raises(ModelError, match="would be replaced"):
    save(tmp_path / "thesis")
