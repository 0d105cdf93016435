"""Loading: what is read, what memory it takes, and that pieces come together."""

import contextlib
import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import save_file

from jaxrl_hybrid.errors import ModelError
from jaxrl_hybrid.models import families
from jaxrl_hybrid.models import params as params_lib
from jaxrl_hybrid.models.hf import load, shards, stored
from jaxrl_hybrid.models.hf.checkpoint import Checkpoint
from jaxrl_hybrid.models.hf.names import Leaf
from jaxrl_hybrid.parallel import mesh as mesh_lib
from jaxrl_hybrid.parallel import weights

MAKER = Path(__file__).parents[2] / "scripts/make_random_model.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  """A random bfloat16 directory of several files, by the script that makes large."""
  spec = importlib.util.spec_from_file_location("make_random_model", MAKER)
  maker = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(maker)
  path = tmp_path_factory.mktemp("random") / "model"
  maker.main(["--shape", "tiny", "--out", str(path), "--file_bytes", "100000"])
  return path


def read(path, mesh=(1, 1, 1), dtype=jnp.float32, **options):
  spec = families.spec_from_hf(families.load_hf_config(path))
  train = weights.train_layout(spec, mesh_lib.train_mesh(mesh), sequence_parallel=False)
  layout = weights.WeightLayout(spec, train, jnp.dtype(jnp.float32))
  shardings = jax.tree.map(lambda x: x.sharding, layout.abstract_params())
  options |= dict(vocab=layout.vocab, dtype=dtype)
  return load.load_params(path, spec, shardings, **options)


@pytest.fixture
def reads(monkeypatch):
  """(offset, bytes) of all reads of data."""
  found = []
  original = stored.TensorFile.read_into

  def note(self, buffer, offset):
    found.append((self.path.name, offset, buffer.nbytes))
    original(self, buffer, offset)

  monkeypatch.setattr(stored.TensorFile, "read_into", note)
  return found


def test_the_maker_writes_what_an_index_promises(model):
  index = json.loads((model / "model.safetensors.index.json").read_text())
  with Checkpoint(model) as checkpoint:
    assert checkpoint.names() == index["weight_map"].keys()
    size = sum(t.nbytes for t in checkpoint.tensors.values())
    assert len({t.file for t in checkpoint.tensors.values()}) > 1
    assert {t.kind for t in checkpoint.tensors.values()} == {"BF16"}
  assert size == index["metadata"]["total_size"]


@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 2, 2), (2, 4, 2)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_every_dtype_on_every_mesh(model, mesh, dtype, monkeypatch):
  monkeypatch.setattr(shards, "PIECE_BYTES", 1000)  # a few rows
  params = read(model, mesh, dtype)
  assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
  with Checkpoint(model) as checkpoint:
    expected = {
      ("embed", "kernel"): checkpoint.read("model.embed_tokens.weight"),
      ("layers", "mlp", "down", "kernel"): np.stack(
        [checkpoint.read(f"model.layers.{i}.mlp.down_proj.weight").T for i in range(3)]
      ),
      ("layers", "attn", "k", "bias"): np.stack(
        [checkpoint.read(f"model.layers.{i}.self_attn.k_proj.bias") for i in range(3)]
      ),
    }
  for path, value in expected.items():
    leaf = params
    for key in path:
      leaf = leaf[key]
    got = np.asarray(leaf)[tuple(map(slice, value.shape))]
    np.testing.assert_array_equal(got, value.astype(dtype))


def test_every_byte_is_read_once(model, reads):
  read(model, (1, 4, 2))  # replicas over dp are read once, columns by the shard
  with Checkpoint(model) as checkpoint:
    size = sum(t.nbytes for t in checkpoint.tensors.values())
  assert sum(n for _, _, n in reads) == size
  assert len(set(reads)) == len(reads)


class OneProcess(NamedSharding):
  """A sharding of which this process has some devices only."""

  def addressable_devices_indices_map(self, shape):
    whole = super().addressable_devices_indices_map(shape)
    return {d: i for d, i in whole.items() if d.id < 2}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("split", [PartitionSpec(None, "tp"), PartitionSpec("tp")])
def test_a_process_reads_its_own_shards_only(
  tmp_path, monkeypatch, reads, transposed, split
):
  prefetched = []
  note = lambda self, offset, size: prefetched.append(size)
  monkeypatch.setattr(stored.TensorFile, "prefetch", note)
  monkeypatch.setattr(jax, "make_array_from_single_device_arrays", lambda *a: a[2])
  matrices = {n: np.random.rand(16, 16).astype(np.float32) for n in "abcdefgh"}
  save_file(matrices, tmp_path / "model.safetensors")
  sharding = OneProcess(mesh_lib.train_mesh((1, 8, 1)), split)
  leaf = Leaf(("x",), tuple(matrices), 1, transposed)
  with (
    Checkpoint(tmp_path) as checkpoint,
    shards.ShardReader(np.dtype(np.float32), limit=0) as reader,
  ):
    tensors = np.array([checkpoint.tensors[n] for n in matrices], object)
    first, second = reader.read(leaf, tensors, (8, 16, 16), sharding)
  whole = np.stack([m.T if transposed else m for m in matrices.values()])
  expected = whole[:2] if split == PartitionSpec("tp") else whole[:, :4]
  axis = 0 if split == PartitionSpec("tp") else 1
  np.testing.assert_array_equal(np.concatenate([first, second], axis), expected)
  quarter = whole.nbytes // 4  # two devices of eight
  assert sum(n for _, _, n in reads) == quarter
  assert sum(prefetched) in (0, quarter)  # columns are not read ahead


def test_kernels_alone_may_have_16_bits(model):
  got = read(model, (1, 2, 1), jnp.float16, kernels_only=True)
  expected = params_lib.compute_copy(read(model, (1, 2, 1)), jnp.dtype("float16"))
  jax.tree.map(np.testing.assert_array_equal, got, expected)
  assert jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype, got, expected))


def test_no_more_than_one_shard_waits_for_its_device(model, monkeypatch):
  waiting = []
  original = shards.ShardReader._wait_for_room

  def note(self, size, limit):
    original(self, size, limit)
    waiting.append((sum(n for n, _ in self._uploads) + size, limit))

  monkeypatch.setattr(shards.ShardReader, "_wait_for_room", note)
  read(model, (1, 2, 1))
  assert len(waiting) > 10
  assert all(size <= limit for size, limit in waiting)


def test_a_file_that_shrinks_while_it_is_read_is_named(model, tmp_path, monkeypatch):
  copy = tmp_path / "copy"
  copy.mkdir()
  for file in model.iterdir():
    (copy / file.name).write_bytes(file.read_bytes())
  original = load.ShardReader

  def shrink(*args, **kwargs):
    for file in copy.glob("*.safetensors"):
      with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size // 2)
    return original(*args, **kwargs)

  monkeypatch.setattr(load, "ShardReader", shrink)
  with pytest.raises(ModelError, match="safetensors: .*was cut meanwhile"):
    read(copy)


def test_files_are_closed_after_an_error(tmp_path, monkeypatch):
  closed = []
  monkeypatch.setattr(stored.os, "close", closed.append)
  (tmp_path / "model.safetensors").write_bytes(b"\0" * 16)
  with contextlib.suppress(ModelError):
    Checkpoint(tmp_path)
  assert len(closed) == 1


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_a_stored_tensor_reads_parts(tmp_path, kind):
  x = np.arange(60).reshape(6, 10).astype(kind)
  save_file({"x": x, "y": x[:, 0].copy()}, tmp_path / "model.safetensors")
  with Checkpoint(tmp_path) as checkpoint:
    tensor = checkpoint.tensors["x"]
    np.testing.assert_array_equal(tensor.read(), x)
    for out in (np.empty((3, 4), np.float32), np.empty((4, 3), np.float32).T):
      tensor.read_rows(range(2, 5), range(3, 7), out)
      np.testing.assert_array_equal(out, x[2:5, 3:7].astype(np.float32))
    out = np.empty((3, 10), kind)
    tensor.read_rows(range(1, 4), None, out)
    np.testing.assert_array_equal(out, x[1:4])
    assert checkpoint.tensors["y"].dtype == jnp.dtype(kind)


def test_what_goes_to_an_accelerator_in_parts_is_the_same(model, monkeypatch):
  expected = read(model, (1, 2, 2))
  monkeypatch.setattr(shards, "_is_accelerator", lambda place: True)
  got = read(model, (1, 2, 2))
  jax.tree.map(np.testing.assert_array_equal, got, expected)
  same = jax.tree.map(lambda a, b: a.sharding == b.sharding, got, expected)
  assert jax.tree.all(same)
