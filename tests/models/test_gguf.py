"""GGUF conversion: files written here with known weights, converted, compared."""

import json
import sys
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoTokenizer

from jaxrl_hybrid.errors import ModelError
from jaxrl_hybrid.models import families
from jaxrl_hybrid.models import rope as rope_lib
from jaxrl_hybrid.models.hf import gguf_rope
from jaxrl_hybrid.models.hf.gguf import convert_gguf

HEADS, KV_HEADS, HEAD, WIDTH, MLP, LAYERS = 4, 2, 8, 32, 48, 2
THETA = 500.0
SPECIALS = ["<|pad|>", "<|start|>", "<|end|>", "<tool>"]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("1", "2"), ("h", "e"), ("Ġ", "t"), ("he", "Ġt")]
TOKENS = SPECIALS + ALPHABET + ["".join(m) for m in MERGES] + ["[PAD0]"]
KIND = gguf.TokenType
TYPES = (
  [KIND.CONTROL] * 3
  + [KIND.USER_DEFINED]
  + [KIND.NORMAL] * (len(ALPHABET) + len(MERGES))
  + [KIND.UNUSED]
)
TEMPLATE = "{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}"

# GGUF name -> (HF name, shape), written out once more on purpose.
LAYER = {
  "attn_norm.weight": ("input_layernorm.weight", (WIDTH,)),
  "attn_q.weight": ("self_attn.q_proj.weight", (HEADS * HEAD, WIDTH)),
  "attn_k.weight": ("self_attn.k_proj.weight", (KV_HEADS * HEAD, WIDTH)),
  "attn_v.weight": ("self_attn.v_proj.weight", (KV_HEADS * HEAD, WIDTH)),
  "attn_output.weight": ("self_attn.o_proj.weight", (WIDTH, HEADS * HEAD)),
  "ffn_norm.weight": ("post_attention_layernorm.weight", (WIDTH,)),
  "ffn_gate.weight": ("mlp.gate_proj.weight", (MLP, WIDTH)),
  "ffn_up.weight": ("mlp.up_proj.weight", (MLP, WIDTH)),
  "ffn_down.weight": ("mlp.down_proj.weight", (WIDTH, MLP)),
}
EXTRA = {
  "llama": {},
  "qwen2": {
    f"attn_{x}.bias": (f"self_attn.{x}_proj.bias", (heads * HEAD,))
    for x, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
  },
  "qwen3": {
    f"attn_{x}_norm.weight": (f"self_attn.{x}_norm.weight", (HEAD,)) for x in "qk"
  },
}
HF_CLASS = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def permute(array: np.ndarray, heads: int) -> np.ndarray:
  """What the writers of GGUF files do to q and k of a llama."""
  halves = array.reshape(heads, 2, len(array) // heads // 2, -1)
  return halves.swapaxes(1, 2).reshape(array.shape)


def names_of(arch: str, tied: bool) -> dict[str, tuple[str, tuple[int, ...]]]:
  names = {
    "token_embd.weight": ("model.embed_tokens.weight", (len(TOKENS), WIDTH)),
    "output_norm.weight": ("model.norm.weight", (WIDTH,)),
  }
  if not tied:
    names["output.weight"] = ("lm_head.weight", (len(TOKENS), WIDTH))
  for i in range(LAYERS):
    for name, (hf_name, shape) in {**LAYER, **EXTRA[arch]}.items():
      names[f"blk.{i}.{name}"] = (f"model.layers.{i}.{hf_name}", shape)
  return names


def add_metadata(writer: gguf.GGUFWriter, arch: str, pre: str) -> None:
  writer.add_block_count(LAYERS)
  writer.add_context_length(77)
  writer.add_embedding_length(WIDTH)
  writer.add_feed_forward_length(MLP)
  writer.add_head_count(HEADS)
  writer.add_head_count_kv(KV_HEADS)
  writer.add_layer_norm_rms_eps(1e-3)
  if THETA is not None:
    writer.add_rope_freq_base(THETA)
  if arch == "qwen3":
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
  writer.add_tokenizer_model("gpt2")
  writer.add_tokenizer_pre(pre)
  writer.add_token_list(TOKENS)
  writer.add_token_types(TYPES)
  writer.add_token_merges([" ".join(m) for m in MERGES])
  writer.add_bos_token_id(1)
  writer.add_eos_token_id(2)
  writer.add_pad_token_id(0)
  writer.add_chat_template(TEMPLATE)


def write_gguf(
  path: Path,
  arch="llama",
  *,
  pre="smollm",
  tied=False,
  seed=0,
  extra=None,
  skip=(),
  add=(),
) -> dict[str, np.ndarray]:
  """Writes a GGUF file; returns its weights by their HF names."""
  rng = np.random.default_rng(seed)
  writer = gguf.GGUFWriter(path, arch)
  add_metadata(writer, arch, pre)
  if extra is not None:
    extra(writer)
  weights = {}
  for name, (hf_name, shape) in names_of(arch, tied).items():
    array = rng.normal(size=shape).astype(np.float32)
    weights[hf_name] = array
    if arch == "llama" and name.endswith("attn_q.weight"):
      array = permute(array, HEADS)
    if arch == "llama" and name.endswith("attn_k.weight"):
      array = permute(array, KV_HEADS)
    if name not in skip:
      writer.add_tensor(name, array)
  for name in add:
    writer.add_tensor(name, np.ones(4, np.float32))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return weights


def converted(tmp_path: Path, arch="llama", *, dtype="float32", **kwargs):
  weights = write_gguf(tmp_path / "m.gguf", arch, **kwargs)
  convert_gguf(tmp_path / "m.gguf", tmp_path / "hf", dtype=dtype)
  return weights, tmp_path / "hf"


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_tensors(tmp_path, arch, tied):
  weights, out = converted(tmp_path, arch, tied=tied)
  loaded = load_file(out / "model.safetensors")
  assert loaded.keys() == weights.keys()
  for name, array in weights.items():
    np.testing.assert_array_equal(loaded[name], array, err_msg=name)


def test_default_dtype_is_bfloat16(tmp_path):
  weights = write_gguf(tmp_path / "m.gguf")
  convert_gguf(tmp_path / "m.gguf", tmp_path / "hf")
  loaded = load_file(tmp_path / "hf/model.safetensors")["model.norm.weight"]
  np.testing.assert_array_equal(
    loaded, weights["model.norm.weight"].astype(ml_dtypes.bfloat16)
  )
  assert json.loads((tmp_path / "hf/config.json").read_text())["dtype"] == "bfloat16"


def test_quantized_tensors_are_dequantized(tmp_path):
  kind = gguf.GGMLQuantizationType.Q8_0

  def extra(writer):
    data = gguf.quantize(np.full((len(TOKENS), WIDTH), 0.5, np.float32), kind)
    writer.add_tensor("token_embd.weight", data, raw_dtype=kind)

  write_gguf(tmp_path / "m.gguf", extra=extra, skip=("token_embd.weight",))
  convert_gguf(tmp_path / "m.gguf", tmp_path / "hf", dtype="float32")
  loaded = load_file(tmp_path / "hf/model.safetensors")["model.embed_tokens.weight"]
  assert loaded.shape == (len(TOKENS), WIDTH)
  np.testing.assert_allclose(loaded, 0.5, rtol=1e-3)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_config_loads_in_transformers(tmp_path, arch):
  _, out = converted(tmp_path, arch)
  config = AutoConfig.from_pretrained(out)
  assert type(config).__name__ == HF_CLASS[arch] + "Config"
  assert config.architectures == [HF_CLASS[arch] + "ForCausalLM"]
  assert config.rope_parameters["rope_theta"] == 500.0
  assert config.rms_norm_eps == 1e-3
  assert config.max_position_embeddings == 77
  assert config.num_key_value_heads == KV_HEADS
  assert config.head_dim == HEAD
  assert config.vocab_size == len(TOKENS)
  assert config.tie_word_embeddings is False
  assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 0)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling(tmp_path, kind):
  def extra(writer):
    writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(19)

  _, out = converted(tmp_path, extra=extra)
  rope = AutoConfig.from_pretrained(out).rope_parameters
  assert (rope["rope_type"], rope["factor"]) == (kind, 4.0)
  assert rope.get("original_max_position_embeddings") == (
    19 if kind == "yarn" else None
  )


# theta 5e5 and width 8: kept, blended and divided frequencies are all there.
LLAMA3 = gguf_rope.llama3_factors(5e5, HEAD, 32.0)


def add_factors(factors, theta=5e5):
  def extra(writer):
    writer.add_rope_freq_base(theta)
    writer.add_tensor("rope_freqs.weight", np.asarray(factors, np.float32))

  return extra


def test_factors_of_llama_3_become_its_scaling(tmp_path, monkeypatch):
  monkeypatch.setattr(sys.modules[__name__], "THETA", None)
  _, out = converted(tmp_path, extra=add_factors(LLAMA3))
  rope = AutoConfig.from_pretrained(out).rope_parameters
  assert (rope["rope_type"], rope["factor"]) == ("llama3", 32.0)
  ours = families.spec_from_hf(families.load_hf_config(out)).rope
  assert ours.kind == "llama3"
  plain = 5e5 ** (-np.arange(0, HEAD, 2) / HEAD)
  cos, sin = rope_lib.cos_sin(ours, HEAD, np.array([[1]]))
  angles = np.arctan2(sin, cos)[0, 0, : HEAD // 2]
  np.testing.assert_allclose(angles, plain / LLAMA3, rtol=1e-5)
  assert LLAMA3[0] == 1.0 and LLAMA3[-1] == 32.0


@pytest.mark.parametrize("factors", [LLAMA3[:3], LLAMA3 * 2, [1.0, 3.0, 2.0, 32.0]])
def test_other_factors_are_named(tmp_path, monkeypatch, factors):
  monkeypatch.setattr(sys.modules[__name__], "THETA", None)
  with pytest.raises(ModelError, match="rope_freqs.weight.*expected 4 factors"):
    converted(tmp_path, extra=add_factors(factors))


def test_factors_of_one_are_none(tmp_path):
  _, out = converted(tmp_path, add=("rope_freqs.weight",))
  assert AutoConfig.from_pretrained(out).rope_parameters["rope_type"] == "default"


def test_llama_3_tokenizer(tmp_path):
  _, out = converted(tmp_path, pre="llama-bpe")
  tokenizer = AutoTokenizer.from_pretrained(out)
  # Up to three digits are one word; the beginning is marked, as the file's silence
  # means with this tokenizer.
  assert tokenizer.encode("12") == ids_of("<|start|>", "12")
  assert tokenizer.encode("he\n\n t")[1:] == ids_of("he", "Ċ", "Ċ", "Ġt")


def test_every_id_that_ends_a_turn_is_kept(tmp_path):
  _, out = converted(tmp_path, extra=lambda w: w.add_eot_token_id(0))
  config = json.loads((out / "generation_config.json").read_text())
  assert config == {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 0}


def ids_of(*tokens: str) -> list[int]:
  return [TOKENS.index(t) for t in tokens]


def test_smollm_tokenizer(tmp_path):
  _, out = converted(tmp_path, pre="smollm")
  tokenizer = AutoTokenizer.from_pretrained(out)
  # Digits stand alone, so the merge of "1" and "2" is never reached.
  assert tokenizer.encode("he t12") == ids_of("he", "Ġt", "1", "2")
  # The merge across the space is not reached either.
  assert tokenizer.encode("<|start|>he<|end|>") == ids_of("<|start|>", "he", "<|end|>")
  assert tokenizer.encode("a<tool>") == ids_of("a", "<tool>")
  assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|start|>", "<|end|>")
  assert tokenizer.pad_token == "<|pad|>"
  text = "he t é 日本 <tool>"
  assert tokenizer.decode(tokenizer.encode(text)) == text
  ids = tokenizer.encode("<|start|>a<tool>")
  assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool>"
  assert tokenizer.model_max_length == 77
  assert "[PAD0]" not in tokenizer.get_vocab()


def test_qwen2_tokenizer(tmp_path):
  _, out = converted(tmp_path, "qwen2", pre="qwen2")
  tokenizer = AutoTokenizer.from_pretrained(out)
  assert tokenizer.encode("12") == ids_of("1", "2")
  assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")  # NFC
  # Two spaces before a word: the first stands alone, unlike with one split only.
  assert tokenizer.encode("he\n\n t") == ids_of("he", "Ċ", "Ċ", "Ġt")


def test_chat_template(tmp_path):
  _, out = converted(tmp_path)
  tokenizer = AutoTokenizer.from_pretrained(out)
  messages = [{"role": "user", "content": "he"}]
  text = tokenizer.apply_chat_template(messages, tokenize=False)
  assert text == "<|start|>he<|end|>"


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
def test_bos_and_eos_are_added_as_the_file_says(tmp_path, bos, eos):
  def extra(writer):
    writer.add_add_bos_token(bos)
    writer.add_add_eos_token(eos)

  _, out = converted(tmp_path, extra=extra)
  tokenizer = AutoTokenizer.from_pretrained(out)
  expected = ["<|start|>"] * bos + ["a"] + ["<|end|>"] * eos
  assert tokenizer.encode("a") == ids_of(*expected)
  assert tokenizer.encode("a", add_special_tokens=False) == ids_of("a")


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_a_model_with_the_known_weights(tmp_path, arch, tied):
  torch = pytest.importorskip("torch")
  import transformers

  weights, out = converted(tmp_path, arch, tied=tied)
  config = getattr(transformers, HF_CLASS[arch] + "Config")(
    vocab_size=len(TOKENS),
    hidden_size=WIDTH,
    intermediate_size=MLP,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    head_dim=HEAD,
    num_key_value_heads=KV_HEADS,
    rms_norm_eps=1e-3,
    tie_word_embeddings=tied,
    rope_parameters={"rope_type": "default", "rope_theta": 500.0},
  )
  expected = getattr(transformers, HF_CLASS[arch] + "ForCausalLM")(config).eval()
  state = {k: torch.tensor(v) for k, v in weights.items()}
  missing, unexpected = expected.load_state_dict(state, strict=False)
  assert not unexpected and missing == (["lm_head.weight"] if tied else [])
  actual = transformers.AutoModelForCausalLM.from_pretrained(
    out, dtype=torch.float32
  ).eval()
  ids = torch.arange(24).reshape(2, 12)
  with torch.no_grad():
    torch.testing.assert_close(actual(ids).logits, expected(ids).logits)


@pytest.mark.parametrize(
  "kwargs, named",
  [
    ({"arch": "mamba"}, "'mamba' is not supported"),
    ({"pre": "tekken"}, "pre-tokenizer 'tekken'"),
    ({"add": ("blk.0.attn_q.bias",)}, "unknown tensor 'blk.0.attn_q.bias'"),
    ({"skip": ("blk.1.ffn_up.weight",)}, "missing tensor 'blk.1.ffn_up.weight'"),
    ({"extra": lambda w: w.add_expert_count(4)}, "'llama.expert_count'"),
    ({"extra": lambda w: w.add_rope_dimension_count(4)}, "rope.dimension_count"),
    (
      {"extra": lambda w: w.add_string("llama.rope.scaling.type", "longrope")},
      "RoPE scaling 'longrope'",
    ),
    ({"extra": lambda w: w.add_uint16("split.count", 2)}, "merge the split files"),
  ],
)
def test_what_is_not_understood_stops(tmp_path, monkeypatch, kwargs, named):
  monkeypatch.setitem(EXTRA, "mamba", {})
  write_gguf(tmp_path / "m.gguf", **kwargs)
  with pytest.raises(ModelError, match=named):
    convert_gguf(tmp_path / "m.gguf", tmp_path / "hf")
  assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]  # nothing half-made


def test_missing_metadata_is_named(tmp_path, monkeypatch):
  monkeypatch.setattr(gguf.GGUFWriter, "add_layer_norm_rms_eps", lambda *_: None)
  write_gguf(tmp_path / "m.gguf")
  with pytest.raises(ModelError, match="llama.attention.layer_norm_rms_epsilon"):
    convert_gguf(tmp_path / "m.gguf", tmp_path / "hf")


def test_unreadable_files(tmp_path):
  with pytest.raises(ModelError, match="no GGUF file"):
    convert_gguf(tmp_path / "none.gguf", tmp_path / "hf")
  (tmp_path / "text.gguf").write_text("not a model, but long enough to be read")
  with pytest.raises(ModelError, match="not a readable GGUF"):
    convert_gguf(tmp_path / "text.gguf", tmp_path / "hf")
  write_gguf(tmp_path / "m.gguf")
  whole = (tmp_path / "m.gguf").read_bytes()
  (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
  with pytest.raises(ModelError, match="not a readable GGUF"):
    convert_gguf(tmp_path / "cut.gguf", tmp_path / "hf")


def test_a_directory_with_files_is_never_overwritten(tmp_path):
  write_gguf(tmp_path / "m.gguf")
  (tmp_path / "hf").mkdir()
  (tmp_path / "hf/mine.txt").write_text("keep")
  with pytest.raises(ModelError, match="not empty"):
    convert_gguf(tmp_path / "m.gguf", tmp_path / "hf")
  assert [p.name for p in (tmp_path / "hf").iterdir()] == ["mine.txt"]


def test_unknown_dtype(tmp_path):
  with pytest.raises(ModelError, match="float8.*bfloat16"):
    convert_gguf(tmp_path / "m.gguf", tmp_path / "hf", dtype="float8")
