"""Checkpoints that do not match their config: each an error that names the thing."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxrl_hybrid.errors import ModelError
from jaxrl_hybrid.models import params as params_lib
from jaxrl_hybrid.models.hf import load
from jaxrl_hybrid.models.spec import ModelSpec
from jaxrl_hybrid.parallel import mesh as mesh_lib
from jaxrl_hybrid.parallel import weights

# Vocabulary 5 is padded to 64: on tp 4 the last shards are all padding.
SPEC = ModelSpec("llama", 5, 8, 12, 2, 4, 4, 2, 64)
TIED = ModelSpec("llama", 5, 8, 12, 2, 4, 4, 2, 64, tie_word_embeddings=True)
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LAYER = {
  "input_layernorm": (8,),
  "post_attention_layernorm": (8,),
  "self_attn.q_proj": (8, 8),
  "self_attn.k_proj": (8, 8),
  "self_attn.v_proj": (8, 8),
  "self_attn.o_proj": (8, 8),
  "mlp.gate_proj": (12, 8),
  "mlp.up_proj": (12, 8),
  "mlp.down_proj": (8, 12),
}


def tensors(tied=False):
  """A complete checkpoint, names and shapes as HF writes them."""
  shapes = {EMBED: (5, 8), "model.norm.weight": (8,)}
  shapes |= {} if tied else {HEAD: (5, 8)}
  shapes |= {
    f"model.layers.{i}.{name}.weight": shape
    for i in range(2)
    for name, shape in LAYER.items()
  }
  rng = np.random.default_rng(0)
  return {
    name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()
  }


def write(directory, weights):
  save_file(weights, directory / "model.safetensors")
  return directory


def read(directory, spec=SPEC, mesh=(1, 1, 1), head=params_lib.LM):
  train = weights.train_layout(spec, mesh_lib.train_mesh(mesh), sequence_parallel=False)
  layout = weights.WeightLayout(spec, train, jnp.dtype(jnp.float32), head=head)
  shardings = jax.tree.map(lambda x: x.sharding, layout.abstract_params())
  return load.load_params(directory, spec, shardings, vocab=layout.vocab, head=head)


def assert_refused(directory, *words, **options):
  """Loading fails with one ModelError that holds all the words."""
  with pytest.raises(ModelError) as error:
    read(directory, **options)
  for word in (str(directory), *words):
    assert word in str(error.value)


def test_the_complete_checkpoint_loads(tmp_path):
  params = read(write(tmp_path, tensors()))
  np.testing.assert_array_equal(
    params["layers"]["mlp"]["down"]["kernel"][1],
    tensors()["model.layers.1.mlp.down_proj.weight"].T,
  )


def test_a_missing_tensor_is_named(tmp_path):
  weights = tensors()
  del weights["model.layers.1.self_attn.k_proj.weight"]
  assert_refused(
    write(tmp_path, weights),
    "missing",
    "left over [] (0)",
    "model.layers.1.self_attn.k_proj.weight",
    "(1)",
  )


def test_a_missing_head_of_an_untied_model_is_named(tmp_path):
  assert_refused(write(tmp_path, tensors(tied=True)), "missing", HEAD)


@pytest.mark.parametrize(
  "extra",
  [
    "model.layers.0.self_attn.q_proj.bias",
    "model.layers.2.mlp.up_proj.weight",
    "model.layers.0.self_attn.q_norm.weight",
  ],
)
def test_a_leftover_tensor_is_named(tmp_path, extra):
  weights = tensors() | {extra: np.zeros(8, np.float32)}
  assert_refused(write(tmp_path, weights), "left over", extra, "(1)", "missing [] (0)")


def test_rotary_buffers_of_old_checkpoints_are_no_leftover(tmp_path):
  name = "model.layers.0.self_attn.rotary_emb.inv_freq"
  read(write(tmp_path, tensors() | {name: np.zeros(2, np.float32)}))


@pytest.mark.parametrize(
  "name,got,expected",
  [
    ("model.layers.1.mlp.down_proj.weight", (12, 8), "(8, 12)"),  # transposed
    ("model.layers.0.self_attn.q_proj.weight", (8, 9), "(8, 8)"),
    ("model.layers.0.mlp.up_proj.weight", (11, 8), "(12, 8)"),
    ("model.norm.weight", (9,), "(8,)"),
    (EMBED, (6, 8), "(5, 8)"),
    (EMBED, (4, 8), "(5, 8)"),
    (HEAD, (5, 7), "(5, 8)"),
  ],
)
@pytest.mark.parametrize("tp", [1, 4])
def test_a_wrong_shape_is_named_with_both_shapes(tmp_path, name, got, expected, tp):
  weights = tensors() | {name: np.zeros(got, np.float32)}
  assert_refused(write(tmp_path, weights), name, str(got), expected, mesh=(1, tp, 1))


def test_pickled_weights_are_never_read(tmp_path):
  (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
  assert_refused(tmp_path, "pytorch_model.bin", "never read", "model.safetensors")


def test_an_empty_directory_says_what_was_expected(tmp_path):
  assert_refused(tmp_path, "expected model.safetensors", "found []")


@pytest.mark.parametrize(
  "keep, says",
  [(0, "0 bytes"), (5, "5 bytes"), (300, "300 bytes"), (-10, "truncated: model.norm")],
)
def test_a_truncated_file_is_named(tmp_path, keep, says):
  file = write(tmp_path, tensors()) / "model.safetensors"
  file.write_bytes(file.read_bytes()[:keep])
  assert_refused(tmp_path, "model.safetensors", "not a readable safetensors file", says)


def with_header(directory, change):
  """The complete checkpoint with another header."""
  file = write(directory, tensors()) / "model.safetensors"
  content = file.read_bytes()
  length = int.from_bytes(content[:8], "little")
  header = change(json.loads(content[8 : 8 + length]))
  header = header if isinstance(header, bytes) else json.dumps(header).encode()
  file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
  return directory


def set_field(name, **fields):
  return lambda header: header | {name: header[name] | fields}


@pytest.mark.parametrize(
  "change, words",
  [
    (lambda h: b"not JSON", ["damaged"]),
    (lambda h: [1], ["damaged"]),
    (lambda h: b'{"x": {}, "x": {}}', ["names x twice"]),
    (lambda h: h | {EMBED: {"dtype": "F32"}}, ["damaged", "shape"]),
    (set_field(EMBED, shape=[5, 9]), [EMBED, "160 bytes", "180", "F32 [5, 9]"]),
    (set_field(EMBED, shape=[-5, -8]), [EMBED]),
    (set_field(EMBED, data_offsets=[8, 168]), ["begin at byte"]),
    (lambda h: {k: v for k, v in h.items() if k != EMBED}, ["begin at byte"]),
  ],
)
def test_a_header_that_does_not_fit_its_file_is_named(tmp_path, change, words):
  with_header(tmp_path, change)
  assert_refused(tmp_path, "model.safetensors", "not a readable", *words)


def test_bytes_behind_the_last_tensor_are_an_error(tmp_path):
  with (write(tmp_path, tensors()) / "model.safetensors").open("ab") as file:
    file.write(b"more")
  assert_refused(tmp_path, "model.safetensors", "4 bytes behind the last tensor")


@pytest.mark.parametrize("kind", [np.int8, ml_dtypes.float8_e4m3fn])
def test_a_tensor_of_another_kind_is_named(tmp_path, kind):
  name = "model.layers.1.mlp.up_proj.weight"
  weights = tensors() | {name: np.zeros((12, 8), kind)}
  assert_refused(write(tmp_path, weights), "model.safetensors", name, "quantized")


def test_everything_is_checked_before_anything_is_read(tmp_path, monkeypatch):
  def no_reading(*_):
    raise AssertionError("read before all was checked")

  monkeypatch.setattr(load.ShardReader, "read", no_reading)
  weights = tensors() | {HEAD: np.zeros((5, 7), np.float32)}  # the last to load
  assert_refused(write(tmp_path, weights), HEAD)


def sharded(directory, weights):
  """Two files and their index."""
  names = sorted(weights)
  parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
  for file, chosen in parts.items():
    save_file({name: weights[name] for name in chosen}, directory / file)
  index = {"weight_map": {n: file for file, ns in parts.items() for n in ns}}
  (directory / "model.safetensors.index.json").write_text(json.dumps(index))
  return directory


def test_a_sharded_checkpoint_equals_the_single_file(tmp_path):
  (tmp_path / "one").mkdir(), (tmp_path / "two").mkdir()
  jax.tree.map(
    np.testing.assert_array_equal,
    read(write(tmp_path / "one", tensors())),
    read(sharded(tmp_path / "two", tensors())),
  )


def test_a_missing_file_of_the_index_is_named(tmp_path):
  (sharded(tmp_path, tensors()) / "b.safetensors").unlink()
  assert_refused(tmp_path, "b.safetensors", "not a readable safetensors file")


def test_an_index_that_names_a_wrong_file_is_named(tmp_path):
  index = sharded(tmp_path, tensors()) / "model.safetensors.index.json"
  mapping = json.loads(index.read_text())["weight_map"]
  assert mapping[EMBED] == "b.safetensors"
  index.write_text(json.dumps({"weight_map": mapping | {EMBED: "a.safetensors"}}))
  assert_refused(tmp_path, index.name, "a.safetensors", EMBED, "(1 such tensors)")


def test_a_tensor_in_two_files_is_named(tmp_path):
  sharded(tmp_path, tensors())
  names = sorted(tensors())
  again = {name: tensors()[name] for name in [*names[1::2], names[0]]}
  save_file(again, tmp_path / "b.safetensors")
  assert_refused(tmp_path, "a.safetensors", "b.safetensors", names[0], "once")


@pytest.mark.parametrize(
  "text",
  ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}']
  + ['{"weight_map": {"a": "../b.safetensors"}}', '{"weight_map": {"a": 1}}'],
)
def test_a_broken_index_is_named(tmp_path, text):
  index = sharded(tmp_path, tensors()) / "model.safetensors.index.json"
  index.write_text(text)
  assert_refused(tmp_path, "model.safetensors.index.json", "not a readable index")


def test_a_tied_checkpoint_may_hold_its_head_again_but_no_other(tmp_path):
  weights = tensors(tied=True)
  params = read(write(tmp_path, weights | {HEAD: weights[EMBED]}), TIED)
  assert "lm_head" not in params
  write(tmp_path, weights | {HEAD: weights[EMBED] + 1})
  assert_refused(tmp_path, "tie_word_embeddings", HEAD, "differs", spec=TIED)


def test_a_tied_checkpoint_without_its_embedding_is_named(tmp_path):
  weights = tensors()
  del weights[EMBED]
  assert_refused(write(tmp_path, weights), "missing", EMBED, spec=TIED)


def test_a_value_model_takes_the_body_and_a_fresh_head(tmp_path):
  params = read(write(tmp_path, tensors()), head=params_lib.VALUE)
  assert "lm_head" not in params
  assert params["value_head"]["kernel"].shape == (1, 8)
  assert not np.asarray(params["value_head"]["kernel"]).any()
  np.testing.assert_array_equal(params["embed"]["kernel"][:5], tensors()[EMBED])


@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 2, 1), (1, 4, 1), (2, 2, 4)])
def test_vocabulary_padding_loads_zeros(tmp_path, mesh):
  params = read(write(tmp_path, tensors()), mesh=mesh)
  for leaf, name in (("embed", EMBED), ("lm_head", HEAD)):
    kernel = np.asarray(params[leaf]["kernel"])
    assert kernel.shape == (64, 8)  # for most meshes: checkpoints fit others
    np.testing.assert_array_equal(kernel[:5], tensors()[name])
    assert not kernel[5:].any()


@pytest.mark.parametrize(
  "mesh", [(1, 2, 1), (1, 4, 1), (1, 16, 1), (4, 1, 2), (2, 2, 2), (1, 1, 8)]
)
def test_every_leaf_is_the_same_on_every_mesh(tmp_path, mesh):
  write(tmp_path, tensors())
  one, many = jax.device_get((read(tmp_path), read(tmp_path, mesh=mesh)))
  jax.tree.map(np.testing.assert_array_equal, one, many)


def test_bfloat16_checkpoints_load_exactly_into_float32(tmp_path):
  half = {n: x.astype(ml_dtypes.bfloat16) for n, x in tensors().items()}
  params = read(write(tmp_path, half))
  assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
  np.testing.assert_array_equal(
    params["embed"]["kernel"][:5], half[EMBED].astype(np.float32)
  )
