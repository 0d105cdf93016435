"""What is read from an HF config, and what is refused."""

import json

import pytest

from jaxrl_hybrid.errors import ModelError
from jaxrl_hybrid.models import families
from jaxrl_hybrid.models.families import ropes_from_hf, spec_from_hf
from jaxrl_hybrid.models.params import num_params
from jaxrl_hybrid.models.spec import RopeSpec

LLAMA = dict(
  model_type="llama",
  vocab_size=131,
  hidden_size=64,
  intermediate_size=96,
  num_hidden_layers=3,
  num_attention_heads=4,
  max_position_embeddings=512,
  rms_norm_eps=1e-5,
  hidden_act="silu",
)
LLAMA3 = dict(
  factor=32.0,
  low_freq_factor=1.0,
  high_freq_factor=4.0,
  original_max_position_embeddings=8192,
)
YARN = dict(factor=4.0, original_max_position_embeddings=128)


MOE = dict(
  model_type="qwen3_moe",
  num_experts=4,
  num_experts_per_tok=2,
  moe_intermediate_size=32,
)


def read_rope(config):
  return ropes_from_hf(config)[0]


def spec(**changes):
  return spec_from_hf({**LLAMA, **changes})


def test_sizes_and_their_defaults():
  got = spec()
  assert (got.vocab_size, got.hidden_size, got.num_layers) == (131, 64, 3)
  assert (got.num_heads, got.num_kv_heads, got.head_dim) == (4, 4, 16)
  assert not got.tie_word_embeddings and got.rope.theta == 10_000.0


def test_a_head_dim_of_its_own_is_not_hidden_over_heads():
  assert spec(model_type="qwen3", head_dim=32, num_key_value_heads=2).head_dim == 32


@pytest.mark.parametrize(
  "changes,expected",
  [
    (dict(), (False, False, False, None)),
    (dict(attention_bias=True), (True, True, False, None)),
    (dict(mlp_bias=True), (False, False, True, None)),
    (dict(model_type="qwen2"), (True, False, False, None)),
    (dict(model_type="qwen3"), (False, False, False, "head")),
    (dict(model_type="qwen3", attention_bias=True), (True, True, False, "head")),
  ],
)
def test_biases_and_norms_of_each_family(changes, expected):
  got = spec(**changes)
  assert (got.qkv_bias, got.out_bias, got.mlp_bias, got.qk_norm) == expected


@pytest.mark.parametrize(
  "changes,words",
  [
    (dict(model_type="gpt2"), ("model_type 'gpt2'", "'llama', 'mistral', 'mixtral'")),
    (dict(quantization_config=dict(quant_method="fp8")), ("quantized", "float")),
    (
      dict(layer_types=["linear_attention"] * 3, model_type="qwen3"),
      ("layer_types", "linear_attention", "sliding_attention"),
    ),
    (MOE | dict(mlp_only_layers=[0]), ("mlp_only_layers", "[0]")),
    (MOE | dict(decoder_sparse_step=2), ("decoder_sparse_step", "2")),
    (dict(model_type="gemma", use_bidirectional_attention=True), ("bidirectional",)),
    (dict(model_type=None), ("model_type None",)),
    (dict(hidden_act="relu2"), ("hidden_act 'relu2'", "'silu'")),
    (dict(rope_scaling=dict(type="mrope", factor=2.0)), ("'mrope'", "'yarn'")),
    (dict(rope_parameters=dict(rope_type="longrope")), ("'longrope'", "long_factor")),
    (
      dict(rope_parameters=dict(rope_type="default", partial_rotary_factor=0.5)),
      ("partial_rotary_factor", "0.5"),
    ),
    (dict(rope_scaling=dict(rope_type="linear")), ("linear", "factor")),
    (dict(rope_scaling=dict(rope_type="linear", factor=0)), ("factor", "> 0, got 0")),
    (dict(rope_scaling=dict(type="dynamic", factor="4")), ("factor", "got '4'")),
    (dict(rope_theta=-1.0), ("rope_theta", "-1.0")),
    (MOE | dict(num_experts_per_tok=99), ("num_experts_per_tok", "99")),
    (MOE | dict(num_experts_per_tok=0), ("num_experts_per_tok", "got 0")),
    (
      dict(rope_scaling=dict(rope_type="llama3", factor=8.0)),
      ("llama3", "low_freq_factor", "original_max_position_embeddings"),
    ),
  ],
)
def test_what_the_decoder_has_not_is_refused_by_name(changes, words):
  with pytest.raises(ModelError) as error:
    spec(**changes)
  assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
  "kind,options",
  [("default", {}), ("linear", dict(factor=4.0)), ("llama3", LLAMA3), ("yarn", YARN)],
)
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_both_spellings_of_the_rope_are_equal(kind, options, key):
  old = read_rope(
    dict(
      rope_theta=5e5, max_position_embeddings=512, rope_scaling={key: kind, **options}
    )
  )
  new = read_rope(
    dict(
      max_position_embeddings=512,
      rope_parameters=dict(rope_type=kind, rope_theta=5e5, **options),
    )
  )
  assert old == new
  assert (old.kind, old.theta) == (kind, 5e5)
  assert {k: old.option(k) for k in options} == options


def test_no_rope_scaling_is_the_default_one():
  same = [
    read_rope(dict(rope_theta=1e5, max_position_embeddings=512, **extra))
    for extra in ({}, dict(rope_scaling=None), dict(rope_parameters=None))
  ]
  assert same[0] == same[1] == same[2]
  assert (same[0].kind, same[0].theta) == ("default", 1e5)


@pytest.mark.parametrize(
  "written",
  [
    dict(rope_theta=5e5, rope_scaling=dict(rope_type="llama3", **LLAMA3)),
    dict(rope_parameters=dict(rope_type="llama3", rope_theta=5e5, **LLAMA3)),
  ],
)
def test_both_spellings_survive_the_config_file(tmp_path, written):
  (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **written}))
  got = spec_from_hf(families.load_hf_config(tmp_path)).rope
  assert (got.theta, got.kind) == (5e5, "llama3")
  assert {k: got.option(k) for k in LLAMA3} == LLAMA3


def test_an_option_of_none_is_its_default():
  rope = RopeSpec(options=(("factor", None),))
  assert rope.option("factor", 3.0) == 3.0 and rope.option("other") is None


@pytest.mark.parametrize(
  "vocab,tp,expected",
  [(131, 1, 192), (131, 4, 192), (192, 8, 192), (1, 64, 64), (100, 3, 192)],
)
def test_the_vocabulary_is_padded_alike_for_most_meshes(vocab, tp, expected):
  assert spec(vocab_size=vocab).padded_vocab(tp) == expected


def test_the_parameters_of_smollm2_are_counted():
  got = spec(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    tie_word_embeddings=True,
  )
  assert num_params(got) == 134_515_008  # as the model card says: 135M


@pytest.mark.parametrize(
  "text,word",
  [(None, "config.json"), ("{", "config.json"), ('{"model_type": "nope"}', "nope")],
)
def test_an_unreadable_config_is_a_model_error(tmp_path, text, word):
  if text is not None:
    (tmp_path / "config.json").write_text(text)
  with pytest.raises(ModelError, match=word):
    families.load_hf_config(tmp_path)


def test_windows_of_each_way_to_write_them():
  kinds = ["sliding_attention", "full_attention", "sliding_attention"]
  mixed = spec(model_type="gemma2", layer_types=kinds, sliding_window=8, **GEMMA)
  assert mixed.window == 8 and mixed.local_layers == (True, False, True)
  assert mixed.mixes_windows and [mixed.is_local(i) for i in range(3)] == [
    True,
    False,
    True,
  ]
  every = spec(model_type="mistral", sliding_window=8)
  assert every.local_layers == (True,) * 3 and not every.mixes_windows
  none = spec(model_type="mistral", sliding_window=None)
  off = spec(model_type="qwen2", sliding_window=8, use_sliding_window=False)
  assert (
    (none.window, none.local_layers) == (off.window, off.local_layers) == (None, ())
  )


GEMMA = dict(query_pre_attn_scalar=16, hidden_activation="gelu_pytorch_tanh")


def test_ropes_that_choose_by_length_say_so():
  plain = spec()
  dynamic = spec(rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4))
  assert plain.knows_length and not dynamic.knows_length
  assert dynamic.for_length(100).knows_length
  assert dynamic.for_length(100).rope.length == 100


def test_a_rope_of_each_kind_of_layer():
  full = dict(rope_type="linear", factor=8.0, rope_theta=1e6)
  sliding = dict(rope_type="default", rope_theta=1e4)
  both = dict(full_attention=full, sliding_attention=sliding)
  rope, local = ropes_from_hf(dict(rope_parameters=both, max_position_embeddings=64))
  assert (rope.theta, rope.kind, local.theta, local.kind) == (
    1e6,
    "linear",
    1e4,
    "default",
  )
  same = dict(full_attention=full, sliding_attention=full)
  assert ropes_from_hf(dict(rope_parameters=same))[1] is None
