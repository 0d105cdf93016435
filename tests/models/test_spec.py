"""What is read from an HF config, and what is refused."""

import json

import pytest

from jaxrl_hybrid.errors import ModelError
from jaxrl_hybrid.models import spec as spec_lib
from jaxrl_hybrid.models.spec import RopeSpec, rope_from_hf, spec_from_hf

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
    (dict(), (False, False, False, False)),
    (dict(attention_bias=True), (True, True, False, False)),
    (dict(mlp_bias=True), (False, False, True, False)),
    (dict(model_type="qwen2"), (True, False, False, False)),
    (dict(model_type="qwen3"), (False, False, False, True)),
    (dict(model_type="qwen3", attention_bias=True), (True, True, False, True)),
  ],
)
def test_biases_and_norms_of_each_family(changes, expected):
  got = spec(**changes)
  assert (got.qkv_bias, got.out_bias, got.mlp_bias, got.qk_norm) == expected


@pytest.mark.parametrize(
  "changes,words",
  [
    (dict(model_type="mixtral"), ("model_type 'mixtral'", "'llama', 'qwen2', 'qwen3'")),
    (dict(model_type=None), ("model_type None",)),
    (dict(hidden_act="gelu"), ("hidden_act 'gelu'", "expected 'silu'")),
    (dict(model_type="qwen2", use_sliding_window=True), ("use_sliding_window",)),
    (dict(model_type="qwen3", use_sliding_window=True), ("use_sliding_window",)),
    (dict(rope_scaling=dict(type="dynamic", factor=2.0)), ("'dynamic'", "'yarn'")),
    (dict(rope_parameters=dict(rope_type="longrope")), ("rope", "'longrope'")),
    (
      dict(rope_parameters=dict(rope_type="default", partial_rotary_factor=0.5)),
      ("partial_rotary_factor", "0.5"),
    ),
    (dict(rope_scaling=dict(rope_type="linear")), ("linear", "factor")),
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
  old = rope_from_hf(
    dict(
      rope_theta=5e5, max_position_embeddings=512, rope_scaling={key: kind, **options}
    )
  )
  new = rope_from_hf(
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
    rope_from_hf(dict(rope_theta=1e5, max_position_embeddings=512, **extra))
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
  got = spec_from_hf(spec_lib.load_hf_config(tmp_path)).rope
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
  assert got.num_params() == 134_515_008  # as the model card says: 135M


@pytest.mark.parametrize(
  "text,word",
  [(None, "config.json"), ("{", "config.json"), ('{"model_type": "nope"}', "nope")],
)
def test_an_unreadable_config_is_a_model_error(tmp_path, text, word):
  if text is not None:
    (tmp_path / "config.json").write_text(text)
  with pytest.raises(ModelError, match=word):
    spec_lib.load_hf_config(tmp_path)
