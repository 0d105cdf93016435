"""Device orders of the two meshes, and training shards inside generation shards."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxrl_hybrid.errors import ConfigError
from jaxrl_hybrid.models import params as params_lib
from jaxrl_hybrid.models.spec import ModelSpec
from jaxrl_hybrid.parallel import mesh as mesh_lib
from jaxrl_hybrid.parallel import rules

SPEC = ModelSpec(
  "llama", 37, 32, 48, 4, 8, 8, 4, 64, qkv_bias=True, out_bias=True, mlp_bias=True
)
SHAPES = [
  ((1, 1, 1), (1, 1)),
  ((1, 4, 1), (1, 1)),
  ((1, 4, 2), (1, 2)),
  ((1, 4, 2), (1, 4)),
  ((1, 8, 2), (1, 2)),
  ((1, 8, 1), (1, 4)),
  ((2, 4, 2), (1, 2)),
  ((2, 2, 4), (2, 1)),
]


def ids(mesh):
  return np.vectorize(lambda device: device.id)(mesh.devices)


def layouts(train, generation):
  """(training layout, generation layout)."""
  mesh = mesh_lib.train_mesh(train)
  return (
    rules.Layout(mesh, rules.TRAIN),
    rules.Layout(mesh_lib.generation_mesh(mesh, generation), rules.GENERATION),
  )


def leaves():
  """(shape, logical axes) of every parameter."""
  axes = params_lib.logical_axes(SPEC)
  shapes = params_lib.abstract_params(SPEC, vocab=SPEC.padded_vocab(8))
  return list(
    zip(
      [leaf.shape for leaf in jax.tree.leaves(shapes)],
      jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple)),
      strict=True,
    )
  )


def is_nested(inner, outer, shape):
  """Whether each device's inner shard lies inside its outer shard."""
  inner, outer = (s.devices_indices_map(shape) for s in (inner, outer))

  def inside(a, b, size):
    (start, stop, _), (low, high, _) = a.indices(size), b.indices(size)
    return low <= start and stop <= high

  return all(
    inside(a, b, size)
    for device in inner
    for a, b, size in zip(inner[device], outer[device], shape, strict=True)
  )


def test_training_keeps_tp_neighbours_next_to_each_other():
  mesh = mesh_lib.train_mesh((1, 2, 3))  # (pp, tp, dp)
  assert mesh.axis_names == ("pp", "dp", "tp")
  assert ids(mesh).tolist() == [[[0, 1], [2, 3], [4, 5]]]


def test_generation_splits_tp_with_micro_dp_as_the_minor_part():
  mesh = mesh_lib.generation_mesh(mesh_lib.train_mesh((1, 4, 2)), (1, 2))
  assert mesh.axis_names == ("pp", "micro_dp_pp", "dp", "tp", "micro_dp_tp")
  assert ids(mesh).tolist() == [[[[[0, 1], [2, 3]], [[4, 5], [6, 7]]]]]


@pytest.mark.parametrize("train,generation", SHAPES)
def test_both_meshes_have_the_same_flat_device_order(train, generation):
  a, b = layouts(train, generation)
  np.testing.assert_array_equal(ids(a.mesh).ravel(), np.arange(a.mesh.size))
  np.testing.assert_array_equal(ids(b.mesh).ravel(), np.arange(a.mesh.size))


@pytest.mark.parametrize("train,generation", SHAPES)
def test_every_training_shard_lies_inside_its_generation_shard(train, generation):
  a, b = layouts(train, generation)
  for shape, axes in leaves():
    assert is_nested(a.sharding(axes), b.sharding(axes), shape), axes


def test_nesting_would_fail_with_micro_dp_as_the_major_part():
  a, b = layouts((1, 4, 1), (1, 2))
  wrong = Mesh(b.mesh.devices.swapaxes(3, 4), b.mesh.axis_names)
  assert not is_nested(
    a.sharding(("heads",)), rules.Layout(wrong, b.rules).sharding(("heads",)), (8,)
  )


@pytest.mark.parametrize(
  "train,generation,shards",
  [((1, 4, 2), (1, 1), 8), ((1, 4, 2), (1, 2), 4), ((1, 4, 2), (1, 4), 2)],
)
def test_generation_spreads_rows_over_dp_and_micro_dp(train, generation, shards):
  a, b = layouts(train, generation)
  assert a.batch_shards == 2 and b.batch_shards == shards


@pytest.mark.parametrize(
  "train,generation,tp",
  [((1, 4, 2), (1, 2), 2), ((1, 8, 1), (1, 1), 1), ((1, 8, 2), (1, 4), 4)],
)
def test_generation_weights_are_split_over_the_generation_tp_only(
  train, generation, tp
):
  _, layout = layouts(train, generation)
  assert layout.sharding(("heads", "embed")).shard_shape((8, 5)) == (8 // tp, 5)


def test_too_few_devices_is_a_config_error_with_both_numbers():
  with pytest.raises(ConfigError, match=r"needs 32 devices, got 16.*mesh\.train"):
    mesh_lib.train_mesh((1, 4, 8))


def test_a_generation_tp_that_does_not_divide_is_a_config_error():
  with pytest.raises(ConfigError, match=r"mesh\.generation.*must divide"):
    mesh_lib.generation_mesh(mesh_lib.train_mesh((1, 4, 1)), (1, 3))


def test_the_line_for_the_user_names_both_meshes():
  train = mesh_lib.train_mesh((1, 4, 2))
  assert mesh_lib.describe(train, mesh_lib.generation_mesh(train, (1, 2))) == (
    "mesh: train pp=1 tp=4 dp=2; generation pp=1 tp=2 dp=2 micro_dp=2; "
    "8 of 16 cpu devices"
  )
