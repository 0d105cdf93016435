"""HF directory -> parameters -> HF directory: nothing that HF reads has changed."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from harness import build, hf_logits
from oracle import FAMILIES, torch_model
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from jaxrl_hybrid.data.tokenizer import load_tokenizer, symbol_tokenizer
from jaxrl_hybrid.errors import ModelError
from jaxrl_hybrid.models import families
from jaxrl_hybrid.models.hf import export, sidecars
from jaxrl_hybrid.models.hf.checkpoint import Checkpoint

TEMPLATE = "{% for m in messages %}<bos>{{ m['content'] }}{% endfor %}"
TOKENS = np.arange(40).reshape(2, 20)


def save_source(name, directory):
  """A model with bfloat16 matrices and fp32 vectors; a tokenizer and a template."""
  torch_model(name, directory)
  mixed = {
    key: x if x.ndim == 1 else x.astype(ml_dtypes.bfloat16)
    for key, x in load_file(directory / "model.safetensors").items()
  }
  save_file(mixed, directory / "model.safetensors", metadata={"format": "pt"})
  config = json.loads((directory / "config.json").read_text())
  config |= dict(dtype="bfloat16", made_by="hand")
  (directory / "config.json").write_text(json.dumps(config))
  tokenizer = symbol_tokenizer([f"s{i}" for i in range(100)])
  tokenizer.chat_template = TEMPLATE
  tokenizer.save_pretrained(directory)
  for file in ("merges.txt", "generation_config.json"):
    (directory / file).write_text('{"eos_token_id": [2, 7], "top_k": 3}')
  return directory


def export_again(directory, out, mesh=(1, 1, 1), **options):
  model, params, _ = build(directory, mesh)
  return export.export_hf(
    params,
    model.spec,
    out,
    hf_config=families.load_hf_config(directory),
    tokenizer=load_tokenizer(directory),
    source_dir=directory,
    **options,
  )


def stored(directory):
  """name -> (dtype, shape, bytes)."""
  with Checkpoint(directory) as checkpoint:
    return {
      name: (tensor.kind, tensor.shape, tensor.read().tobytes())
      for name, tensor in checkpoint.tensors.items()
    }


def read_json(directory, name="config.json"):
  return json.loads((directory / name).read_text())


# Of qwen2 4 and 2 heads on tp 8, 3 layers on pp 2.
MESHES = {
  "phi3": (3, 2, 1),
  "qwen2": (2, 8, 1),
  "deepseek_v3": (2, 2, 2),
  "qwen3_moe": (1, 4, 2),
}


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_everything_comes_back(name, tmp_path):
  from transformers import AutoModelForCausalLM

  source = save_source(name, tmp_path / "in")
  split = dict(max_shard_bytes=40_000) if name == "llama_bias" else {}
  out = export_again(source, tmp_path / "out", MESHES.get(name, (1, 1, 1)), **split)
  assert stored(out) == stored(source)
  assert {kind for kind, *_ in stored(out).values()} == {"BF16", "F32"}
  assert read_json(out) == read_json(source)
  names = {f.name for f in out.iterdir() if "safetensors" not in f.name}
  assert names == {f.name for f in source.iterdir() if "safetensors" not in f.name}
  for file in names - {"config.json"}:
    assert (out / file).read_bytes() == (source / file).read_bytes(), file
  before, after = (
    hf_logits(AutoModelForCausalLM.from_pretrained(path, dtype="float32"), TOKENS)
    for path in (source, out)
  )
  np.testing.assert_array_equal(after, before)


def test_a_dtype_that_is_asked_for_is_that_of_all(tmp_path):
  source = save_source("qwen2", tmp_path / "in")
  out = export_again(source, tmp_path / "out", dtype=jnp.dtype("float16"))
  assert {kind for kind, *_ in stored(out).values()} == {"F16"}
  assert read_json(out) == read_json(source) | {"dtype": "float16"}


def test_another_template_takes_the_place_of_the_source_s(tmp_path):
  source = save_source("llama", tmp_path / "in")
  config = read_json(source, "tokenizer_config.json")
  config["chat_template"] = "old"  # where older versions of transformers keep it
  (source / "tokenizer_config.json").write_text(json.dumps(config))
  tokenizer = load_tokenizer(source)
  tokenizer.chat_template = "new"
  (tmp_path / "out").mkdir()
  sidecars.write_tokenizer(tmp_path / "out", tokenizer)
  assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == "new"
  left = read_json(tmp_path / "out", "tokenizer_config.json")
  assert left == {k: v for k, v in config.items() if k != "chat_template"}
  assert (tmp_path / "out/merges.txt").exists()


def test_a_template_in_the_tokenizer_config_stays_there(tmp_path):
  source = save_source("llama", tmp_path / "in")
  (source / "chat_template.jinja").unlink()
  config = read_json(source, "tokenizer_config.json") | {"chat_template": TEMPLATE}
  (source / "tokenizer_config.json").write_text(json.dumps(config))
  (tmp_path / "out").mkdir()
  sidecars.write_tokenizer(tmp_path / "out", load_tokenizer(source))
  assert read_json(tmp_path / "out", "tokenizer_config.json") == config
  assert not (tmp_path / "out/chat_template.jinja").exists()


def test_several_templates_are_kept_and_may_be_replaced(tmp_path):
  source = save_source("llama", tmp_path / "in")
  tokenizer = load_tokenizer(source)
  tokenizer.chat_template = {"default": "one", "tool_use": "two"}
  tokenizer.save_pretrained(source)
  for _ in range(2):
    out = export_again(source, tmp_path / "out")
  assert AutoTokenizer.from_pretrained(out).chat_template == tokenizer.chat_template
  (out / "mine").mkdir()
  with pytest.raises(ModelError, match="would be replaced"):
    export_again(source, out)


@pytest.mark.parametrize("change", ["token", "pad", "made"])
def test_a_changed_tokenizer_is_saved_and_not_copied(tmp_path, change):
  source = save_source("llama", tmp_path / "in")
  tokenizer = load_tokenizer(source)
  if change == "token":
    tokenizer.add_tokens(["new"])
  elif change == "pad":
    tokenizer.pad_token = "s3"
  else:
    tokenizer = symbol_tokenizer(["a", "b"])
  (tmp_path / "out").mkdir()
  sidecars.write_tokenizer(tmp_path / "out", tokenizer)
  again = PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")
  assert again.get_vocab() == tokenizer.get_vocab()
  assert again.pad_token == tokenizer.pad_token
  assert not (tmp_path / "out/merges.txt").exists()
