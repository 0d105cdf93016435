"""The switch from training to generation layout, leaf by leaf."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_hybrid.errors import SwitchError
from jaxrl_hybrid.models import fused
from jaxrl_hybrid.models import heads as heads_lib
from jaxrl_hybrid.models.spec import ExpertSpec, LatentSpec, ModelSpec
from jaxrl_hybrid.parallel import hybrid
from jaxrl_hybrid.parallel import mesh as mesh_lib
from jaxrl_hybrid.parallel import weights as weights_lib

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
  qk_norm="head",
  qkv_bias=True,
  out_bias=True,
  mlp_bias=True,
)
ODD = dataclasses.replace(SPEC, num_heads=9, num_kv_heads=3)
GROUPED = dataclasses.replace(SPEC, num_heads=14, num_kv_heads=2)
EXPERTS = ModelSpec(
  "deepseek_v3",
  37,
  16,
  24,
  LAYERS,
  4,
  4,
  8,
  64,
  latent=LatentSpec(None, 8, 4, 4, 4),
  experts=ExpertSpec(4, 2, 8, shared_size=12),
  dense_layers=1,
)
IS_AXES = lambda x: isinstance(x, tuple)
HALF, FULL = jnp.bfloat16, jnp.float32
# (training (pp, tp, dp), generation (p_g, t_g), zero, dtype)
MESHES = [
  ((1, 1, 1), (1, 1), 1, FULL),
  ((1, 4, 2), (1, 1), 1, HALF),
  ((1, 4, 2), (1, 2), 1, HALF),
  ((1, 2, 4), (1, 2), 3, FULL),
  ((2, 2, 2), (1, 2), 1, HALF),
  ((3, 2, 2), (1, 1), 3, jnp.float16),
  ((2, 4, 2), (2, 2), 1, FULL),
  ((4, 2, 2), (2, 1), 1, HALF),
]


@functools.cache
def setup(train=(1, 4, 2), generation=(1, 2), zero=1, dtype=HALF, spec=SPEC):
  """(host parameters, weights, engine); every number differs. Compiled once."""
  mesh = mesh_lib.train_mesh(train)
  source = weights_lib.WeightLayout(
    spec,
    weights_lib.train_layout(spec, mesh, sequence_parallel=False),
    jnp.dtype(dtype),
    zero,
  )
  target = weights_lib.generation_layout(
    spec, mesh_lib.generation_mesh(mesh, generation)
  )
  rng = np.random.default_rng(0)
  host = jax.tree.map(
    lambda leaf: rng.normal(size=leaf.shape).astype(np.float32),
    source.abstract_params(),
  )
  shardings = jax.tree.map(lambda x: x.sharding, source.abstract_weights())
  prepare = jax.jit(source.prepare, out_shardings=shardings)
  return host, prepare(host), hybrid.HybridEngine(source, target)


def expected_copy(host, engine, dtype):
  """Layers as a list, kernels in ``dtype``, heads as generation wants them.

  With p_g stages each entry is a stack: a layer of every stage, zeros behind all.
  """
  cast = lambda path, x: x.astype(dtype if path[-1].key == "kernel" else np.float32)
  host = jax.tree_util.tree_map_with_path(cast, host)
  spec = engine.source.spec
  plan = heads_lib.plan_heads(
    spec.num_heads, spec.num_kv_heads, engine.target.mesh.shape["tp"]
  )
  stack = jax.device_get(heads_lib.pad_heads(host["layers"], plan, spec.head_dim))
  layers = [jax.tree.map(lambda x: x[i], stack) for i in range(spec.num_layers)]
  stages = engine.target.mesh.shape["pp"]
  if stages > 1:
    layers += [jax.tree.map(np.zeros_like, layers[0])] * (-len(layers) % stages)
    each = len(layers) // stages
    stacked = lambda *parts: np.stack(parts)
    layers = [jax.tree.map(stacked, *layers[i::each]) for i in range(each)]
  return {**host, "layers": layers}


def host_layers(host):
  """Stored parameters with the layers as a list."""
  unstack = lambda i: jax.tree.map(lambda x: x[i], host["layers"])
  count = jax.tree.leaves(host["layers"])[0].shape[0]
  return {**host, "layers": [unstack(i) for i in range(count)]}


def apart(copy, axis=0):
  """The copy with every projection by itself."""
  layers = [fused.separate(layer, axis=axis) for layer in copy["layers"]]
  return {**copy, "layers": layers}


def assert_same(engine, got, expected):
  got = apart(got, axis=min(engine.stages - 1, 1))
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(got), expected)
  same = jax.tree.map(lambda a, b: a.dtype == b.dtype, got, expected)
  assert all(jax.tree.leaves(same))


@pytest.mark.parametrize("train,generation,zero,dtype", MESHES)
def test_every_layer_arrives_as_it_was(train, generation, zero, dtype):
  host, weights, engine = setup(train, generation, zero, dtype)
  got, _ = engine.to_generation(weights)
  assert isinstance(got["layers"], list)
  assert_same(engine, got, expected_copy(host, engine, dtype))
  engine.verify()


@pytest.mark.parametrize(
  "spec,train,generation,zero",
  [
    (ODD, (1, 2, 2), (1, 2), 1),
    (ODD, (1, 4, 2), (1, 2), 1),
    (ODD, (2, 8, 1), (1, 4), 3),
    (ODD, (1, 16, 1), (1, 8), 1),
    (GROUPED, (1, 4, 2), (1, 2), 1),
    (GROUPED, (2, 4, 2), (1, 1), 3),
    (GROUPED, (2, 8, 1), (1, 4), 1),
  ],
  ids=lambda x: f"{x.num_heads}/{x.num_kv_heads}" if x in (ODD, GROUPED) else str(x),
)
def test_heads_arrive_as_generation_wants_them(spec, train, generation, zero):
  host, weights, engine = setup(train, generation, zero, spec=spec)
  got, _ = engine.to_generation(weights)
  assert_same(engine, got, expected_copy(host, engine, HALF))
  engine.verify()


def test_leading_dense_layers_and_shared_experts_arrive_fused():
  host, weights, engine = setup((1, 2, 2), (1, 2), 3, FULL, spec=EXPERTS)
  got, _ = engine.to_generation(weights)
  engine.verify()
  dense = got["dense"]["0"]["mlp"]
  # Split over tp and dp where it comes from, over tp where it arrives.
  assert dense["gate_up"]["kernel"].shape == (4, 12, 16)
  assert got["layers"][0]["mlp"]["shared"].keys() == {"gate_up", "down"}
  assert_same(engine, got | {"dense": fused.separate(got["dense"])}, host_layers(host))


@pytest.mark.parametrize("spec", [SPEC, ODD], ids=["4/4", "9/3"])
def test_every_leaf_has_the_sharding_of_the_generation_layout(spec):
  _, weights, engine = setup((2, 4, 2), (1, 2), spec=spec)
  got, _ = engine.to_generation(weights)
  axes = engine.source.axes
  layer = jax.tree.map(lambda names: names[1:], axes["layers"], is_leaf=IS_AXES)
  grouped = lambda parts: (parts[0][0], None, *parts[0][1:])
  layer = fused.map_parts(layer, {fused.QKV, fused.GATE_UP}, grouped)
  wanted = engine.target.shardings({**axes, "layers": [layer] * LAYERS}, got)
  same = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), got, wanted)
  assert all(jax.tree.leaves(same))
  kernel = got["layers"][0]["attn"]["qkv"]["kernel"]
  groups, *rest = kernel.shape
  assert kernel.sharding.shard_shape(kernel.shape) == (groups // 2, *rest)


def test_the_switch_does_not_go_through_the_host():
  _, weights, engine = setup()
  before = jax.device_get(weights)
  shardings = jax.tree.map(lambda x: x.sharding, engine.to_generation(weights)[0])
  outside = {name: leaf for name, leaf in weights.items() if name != "layers"}
  number = jax.device_put(np.int32(1), engine.source.train.replicated)
  with jax.transfer_guard("disallow_explicit"):
    jax.block_until_ready(engine.switch_slot(weights["layers"], number))
    jax.block_until_ready(engine.switch_outer(outside))
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(weights), before)
  # The guard sees what it should: the same move by an eager device_put.
  with jax.transfer_guard("disallow_explicit"):
    with pytest.raises(Exception, match="[Dd]isallowed"):
      embed = weights["embed"]["kernel"]
      moved = jax.device_put(embed, shardings["embed"]["kernel"])
      jax.block_until_ready(moved)


def test_the_version_counts_the_switches_and_compiles_once():
  _, weights, engine = setup.__wrapped__((2, 2, 2), (1, 1))
  assert engine.version == 0
  assert [engine.to_generation(weights)[1] for _ in range(3)] == [1, 2, 3]
  assert engine.version == 3
  # Two layers of each stage, three times, by one program.
  assert engine.switch_slot._cache_size() == engine.switch_outer._cache_size() == 1


def test_the_copy_follows_the_weights():
  _, weights, engine = setup(dtype=FULL)
  first, _ = engine.to_generation(weights)
  second, _ = engine.to_generation(
    jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree))(weights)
  )
  jax.tree.map(
    lambda a, b: np.testing.assert_array_equal(a + 1, b),
    jax.device_get(first),
    jax.device_get(second),
  )


def alter_on_the_way(monkeypatch, engine, layer, leaf):
  """From now on one element of one layer arrives with its lowest bit flipped."""
  per_stage = engine.source.padded_layers // engine.source.stages
  stage, slot = divmod(layer, per_stage)
  genuine = engine.switch_slot

  def flip(x):
    unsigned = {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(x, unsigned).reshape(-1)
    bits = bits.at[x.size // 3].set(bits[x.size // 3] ^ 1).reshape(x.shape)
    return jax.lax.bitcast_convert_type(bits, x.dtype)

  def switch_slot(layers, j):
    arrived = genuine(layers, j)
    if j == slot:
      attn = arrived[stage]["attn"]
      attn[leaf] = {k: flip(x) if k == "kernel" else x for k, x in attn[leaf].items()}
    return arrived

  monkeypatch.setattr(engine, "switch_slot", switch_slot)


@pytest.mark.parametrize("layer,leaf", [(0, "qkv"), (2, "o")])
def test_an_element_altered_on_the_way_is_found_and_its_layer_named(
  layer, leaf, monkeypatch
):
  _, weights, engine = setup((2, 2, 2), (1, 2))
  alter_on_the_way(monkeypatch, engine, layer, leaf)
  engine.to_generation(weights)
  with pytest.raises(
    SwitchError, match=rf"version {engine.version}.*layers {layer} differ"
  ):
    engine.verify()


def test_an_altered_embedding_is_found_too(monkeypatch):
  _, weights, engine = setup()
  genuine = engine.switch_outer

  def switch_outer(outside):
    arrived = genuine(outside)
    embed = arrived["embed"]["kernel"]
    return arrived | {"embed": {"kernel": embed.at[3, 5].multiply(-1)}}

  monkeypatch.setattr(engine, "switch_outer", switch_outer)
  engine.to_generation(weights)
  with pytest.raises(SwitchError, match=f"layers {LAYERS} differ.*stands for embed"):
    engine.verify()


def test_swapped_heads_and_swapped_layers_are_found(monkeypatch):
  _, weights, engine = setup((1, 1, 1), (1, 1), dtype=FULL)
  genuine = engine.switch_slot

  def swap(x):
    return jnp.concatenate([x[:, 8:16], x[:, :8], x[:, 16:]], 1)

  def swapped_heads(layers, j):
    arrived = genuine(layers, j)
    kernel = arrived[0]["attn"]["qkv"]["kernel"]
    arrived[0]["attn"]["qkv"] |= {"kernel": swap(kernel)}
    return arrived

  monkeypatch.setattr(engine, "switch_slot", swapped_heads)
  engine.to_generation(weights)
  with pytest.raises(SwitchError, match="layers 0, 1, 2 differ"):
    engine.verify()
  swapped_layers = lambda layers, j: genuine(layers, jnp.int32([0, 2, 1][int(j)]))
  monkeypatch.setattr(engine, "switch_slot", swapped_layers)
  engine.to_generation(weights)
  with pytest.raises(SwitchError, match="layers 1, 2 differ"):
    engine.verify()


def test_a_switch_is_verified_once():
  _, weights, engine = setup()
  engine.verify()  # nothing yet
  engine.to_generation(weights)
  engine._found = engine._found + 1
  with pytest.raises(SwitchError):
    engine.verify()
  engine.verify()
  engine.to_generation(weights)
  engine.verify()
