"""The switch from training to generation layout, leaf by leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_hybrid.models import params as params_lib
from jaxrl_hybrid.models.spec import ModelSpec
from jaxrl_hybrid.parallel import hybrid, rules
from jaxrl_hybrid.parallel import mesh as mesh_lib

LAYERS = 3
SPEC = ModelSpec(
  "qwen3",
  37,
  16,
  24,
  LAYERS,
  4,
  4,
  8,
  64,
  qk_norm=True,
  qkv_bias=True,
  out_bias=True,
  mlp_bias=True,
)
AXES = params_lib.logical_axes(SPEC)
IS_AXES = lambda x: isinstance(x, tuple)


def setup(train=(1, 4, 2), generation=(1, 2), dtype=jnp.bfloat16):
  """(training parameters, engine, generation layout); every number differs."""
  mesh = mesh_lib.train_mesh(train)
  source = rules.Layout(mesh, rules.TRAIN)
  target = rules.Layout(mesh_lib.generation_mesh(mesh, generation), rules.GENERATION)
  rng = np.random.default_rng(0)
  numbers = jax.tree.map(
    lambda leaf: rng.normal(size=leaf.shape).astype(np.float32),
    params_lib.abstract_params(SPEC, vocab=SPEC.padded_vocab(4)),
  )
  params = jax.device_put(numbers, source.shardings(AXES))
  return params, hybrid.HybridEngine(AXES, target, dtype, LAYERS), target


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
  "train,generation",
  [((1, 1, 1), (1, 1)), ((1, 4, 2), (1, 1)), ((1, 4, 2), (1, 2)), ((1, 2, 4), (1, 2))],
)
def test_kernels_are_cast_and_the_rest_is_kept(train, generation, dtype):
  params, engine, target = setup(train, generation, dtype)
  got, _ = engine.to_generation(params)
  assert set(got) == set(params)
  assert isinstance(got["layers"], list) and len(got["layers"]) == LAYERS
  expected = jax.tree_util.tree_map_with_path(
    lambda path, x: np.asarray(x).astype(
      dtype if path[-1].key == "kernel" else np.float32
    ),
    params,
  )
  stacked = expected.pop("layers")
  expected["layers"] = [jax.tree.map(lambda x: x[i], stacked) for i in range(LAYERS)]
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(got), expected)
  assert jax.tree.map(lambda x: x.dtype, got) == jax.tree.map(
    lambda x: x.dtype, expected
  )


def test_every_leaf_has_the_sharding_of_the_generation_layout():
  params, engine, target = setup()
  got, _ = engine.to_generation(params)
  layer = jax.tree.map(lambda names: names[1:], AXES["layers"], is_leaf=IS_AXES)
  wanted = target.shardings({**AXES, "layers": [layer] * LAYERS})
  same = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), got, wanted)
  assert all(jax.tree.leaves(same))
  q = got["layers"][0]["attn"]["q"]["kernel"]
  assert q.shape == (32, 16) and q.sharding.shard_shape(q.shape) == (16, 16)


def test_the_switch_does_not_go_through_the_host():
  params, engine, target = setup()
  before = jax.device_get(params)
  with jax.transfer_guard("disallow_explicit"):
    got, _ = engine.to_generation(params)
    jax.block_until_ready(got)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(params), before)
  # The guard sees what it should: the same move by an eager device_put.
  with jax.transfer_guard("disallow_explicit"):
    with pytest.raises(Exception, match="[Dd]isallowed"):
      jax.block_until_ready(jax.device_put(params, target.shardings(AXES)))


def test_the_version_counts_the_switches_and_compiles_once():
  params, engine, _ = setup()
  assert engine.version == 0
  assert [engine.to_generation(params)[1] for _ in range(3)] == [1, 2, 3]
  assert engine.version == 3 and engine._switch._cache_size() == 1


def test_the_copy_follows_the_parameters():
  params, engine, _ = setup(dtype=jnp.float32)
  first, _ = engine.to_generation(params)
  second, _ = engine.to_generation(
    jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p))(params)
  )
  jax.tree.map(
    lambda a, b: np.testing.assert_array_equal(a + 1, b),
    jax.device_get(first),
    jax.device_get(second),
  )


def test_the_switch_gathers_inside_micro_dp_groups_only():
  params, engine, _ = setup()
  text = engine._switch.lower(params).compile().as_text()
  assert "all-gather" in text
  assert "all-to-all" not in text and "collective-permute" not in text
