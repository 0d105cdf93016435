"""Device orders of the two meshes, rules, and which shard lies inside which."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxrl_hybrid.errors import ConfigError
from jaxrl_hybrid.models.spec import ModelSpec
from jaxrl_hybrid.parallel import mesh as mesh_lib
from jaxrl_hybrid.parallel import rules
from jaxrl_hybrid.parallel import weights as weights_lib

SPEC = ModelSpec(
  "llama", 37, 32, 48, 4, 8, 8, 4, 64, qkv_bias=True, out_bias=True, mlp_bias=True
)
# No mesh axis divides heads or layers.
ODD = dataclasses.replace(SPEC, num_heads=9, num_kv_heads=3, num_layers=5, head_dim=16)
SHAPES = [
  ((1, 1, 1), (1, 1)),
  ((1, 4, 1), (1, 1)),
  ((1, 4, 2), (1, 2)),
  ((1, 4, 2), (1, 4)),
  ((1, 8, 2), (1, 2)),
  ((1, 8, 1), (1, 4)),
  ((2, 4, 2), (1, 2)),
  ((2, 2, 4), (2, 1)),
  ((4, 2, 2), (2, 1)),
  ((4, 4, 1), (2, 2)),
]


def ids(mesh):
  return np.vectorize(lambda device: device.id)(mesh.devices)


def source(train, spec=SPEC, zero=1):
  """The weights on a training mesh."""
  mesh = mesh_lib.train_mesh(train)
  layout = weights_lib.train_layout(spec, mesh, sequence_parallel=False)
  return weights_lib.WeightLayout(spec, layout, jnp.dtype("bfloat16"), zero)


def layouts(train, generation, spec=SPEC):
  """(training layout, generation layout)."""
  layout = source(train, spec).train
  mesh = mesh_lib.generation_mesh(layout.mesh, generation)
  return layout, weights_lib.generation_layout(spec, mesh)


def leaves(spec=SPEC):
  """(shape, logical axes) of every parameter."""
  layout = source((1, 1, 1), spec)
  return list(
    zip(
      [leaf.shape for leaf in jax.tree.leaves(layout.abstract_params())],
      jax.tree.leaves(layout.axes, is_leaf=lambda x: isinstance(x, tuple)),
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
    assert is_nested(a.sharding(axes, shape), b.sharding(axes, shape), shape), axes


@pytest.mark.parametrize("train,_", SHAPES)
def test_every_stored_shard_lies_inside_its_shard_of_the_weights(train, _):
  layout = source(train)
  for shape, axes in leaves():
    inner, outer = (x.sharding(axes, shape) for x in (layout.stored, layout.train))
    assert is_nested(inner, outer, shape), axes


def test_nesting_would_fail_with_micro_dp_as_the_major_part():
  a, b = layouts((1, 4, 1), (1, 2))
  wrong = Mesh(b.mesh.devices.swapaxes(3, 4), b.mesh.axis_names)
  inner = a.sharding(("heads",), (8,))
  outer = rules.Layout(wrong, b.rules).sharding(("heads",), (8,))
  assert not is_nested(inner, outer, (8,))


@pytest.mark.parametrize(
  "train,generation,shards",
  [
    ((1, 4, 2), (1, 1), 8),
    ((1, 4, 2), (1, 2), 4),
    ((1, 4, 2), (1, 4), 2),
    ((2, 4, 2), (1, 2), 8),
    ((4, 2, 2), (2, 2), 4),
  ],
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
  sharding = layout.sharding(("heads", "embed"), (8, 5))
  assert sharding.shard_shape((8, 5)) == (8 // tp, 5)


@pytest.mark.parametrize(
  "size,axes,shard",
  [
    (16, ("tp", "pp", "dp"), 1),
    (8, ("tp", "pp"), 1),
    (12, ("tp",), 3),
    (6, None, 6),
    (1, None, 1),
  ],
)
def test_a_dim_takes_the_longest_prefix_of_its_axes_that_divides_it(size, axes, shard):
  layout = rules.Layout(
    mesh_lib.train_mesh((2, 4, 2)), rules.stored_rules(divisible_layers=False)
  )
  got = layout.sharding(("mlp",), (size,))
  assert got.spec == PartitionSpec(axes) and got.shard_shape((size,)) == (shard,)


@pytest.mark.parametrize("zero,kept", [(1, "train"), (3, "stored")])
def test_zero_says_whether_weights_are_spread_over_dp(zero, kept):
  layout = source((2, 2, 2), zero=zero)
  expected = getattr(layout, kept).shardings(layout.axes, layout.abstract_params())
  found = jax.tree.map(lambda x: x.sharding, layout.abstract_weights())
  shapes = jax.tree.map(lambda x: x.ndim, layout.abstract_weights())
  same = jax.tree.map(lambda a, b, n: a.is_equivalent_to(b, n), found, expected, shapes)
  assert all(jax.tree.leaves(same))


@pytest.mark.parametrize("spec", [SPEC, ODD], ids=["even", "odd"])
@pytest.mark.parametrize("train", [(1, 1, 8), (2, 2, 4), (2, 1, 2), (4, 2, 2)])
def test_matrices_are_stored_in_equal_parts_on_all_devices(train, spec):
  layout = source(train, spec)
  stored = layout.abstract_params()
  matrices = [x for x in jax.tree.leaves(stored["layers"]) if x.ndim == 3]
  matrices += [stored["embed"]["kernel"], stored["lm_head"]["kernel"]]
  assert len(matrices) == 9
  for leaf in matrices:
    shard = leaf.sharding.shard_shape(leaf.shape)
    assert leaf.size == np.prod(shard) * layout.train.mesh.size, leaf


@pytest.mark.parametrize(
  "train,layers,query,key",
  [
    ((1, 1, 1), 5, 9, 3),
    ((1, 2, 1), 5, 12, 4),
    ((2, 4, 1), 6, 12, 4),
    ((3, 1, 1), 6, 9, 3),
    ((4, 3, 1), 8, 9, 3),
  ],
)
def test_weights_have_padded_layers_and_heads_and_the_stored_have_not(
  train, layers, query, key
):
  layout = source(train, ODD)
  weights, stored = layout.abstract_weights(), layout.abstract_params()
  shape = lambda tree, name: tree["layers"]["attn"][name]["kernel"].shape
  assert shape(stored, "q") == (5, 9 * 16, 32)
  assert shape(stored, "k") == (5, 3 * 16, 32)
  assert shape(weights, "q") == (layers, query * 16, 32)
  assert shape(weights, "k") == (layers, key * 16, 32)
  dtypes = jax.tree_util.tree_map_with_path(
    lambda path, x: (path[-1].key == "kernel") == (x.dtype == jnp.bfloat16), weights
  )
  assert all(jax.tree.leaves(dtypes))
  assert {x.dtype for x in jax.tree.leaves(stored)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("train", [(1, 1, 1), (1, 4, 2), (2, 4, 2), (4, 2, 1)])
@pytest.mark.parametrize("spec", [SPEC, ODD], ids=["even", "odd"])
def test_strip_undoes_prepare(train, spec):
  layout = dataclasses.replace(source(train, spec), dtype=jnp.dtype("float32"))
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype(np.float32), layout.abstract_params()
  )
  again = jax.jit(lambda p: layout.strip(layout.prepare(p)))(params)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(again), params)


def test_too_few_devices_is_a_config_error_with_both_numbers():
  with pytest.raises(ConfigError, match=r"needs 32 devices, got 16.*mesh\.train"):
    mesh_lib.train_mesh((1, 4, 8))


def test_a_generation_tp_that_does_not_divide_is_a_config_error():
  with pytest.raises(ConfigError, match=r"mesh\.generation.*must divide"):
    mesh_lib.generation_mesh(mesh_lib.train_mesh((1, 4, 1)), (1, 3))


def test_the_line_for_the_user_names_both_meshes():
  train = mesh_lib.train_mesh((1, 4, 2))
  assert mesh_lib.describe(train, mesh_lib.generation_mesh(train, (1, 2))) == (
    "mesh: train pp=1 tp=4 dp=2; generation pp=1 tp=2 dp=2 micro_dp=2; 8 cpu devices"
  )
