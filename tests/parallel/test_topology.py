import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_hybrid.errors import ConfigError, JaxrlError
from jaxrl_hybrid.ops import attention
from jaxrl_hybrid.parallel import deviceless_cudnn, topology

wheels = pytest.mark.skipif(
  bool(topology.available()), reason=f"CUDA wheels: {topology.available()}"
)
B, T, D, N, K, L = (
  4,
  512,
  1024,
  16,
  8,
  2,
)  # rows, tokens, model, heads, KV heads, layers
SPECS = {
  "q": P(None, None, "tp"),
  "k": P(None, None, "tp"),
  "v": P(None, None, "tp"),
  "o": P(None, "tp"),
}


def mesh_of(gpu="h200", nodes=2, per_node=8):
  grid = np.array(topology.devices(gpu, nodes, per_node)).reshape(nodes, per_node)
  return Mesh(grid, ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)


def shapes(mesh, dtype, head_dim):
  heads = {"q": N, "k": K, "v": K}
  sizes = {name: (L, D, n, head_dim) for name, n in heads.items()}
  sizes["o"] = (L, N, head_dim, D)

  def abstract(size, spec):
    return jax.ShapeDtypeStruct(size, dtype, sharding=NamedSharding(mesh, spec))

  params = {name: abstract(sizes[name], SPECS[name]) for name in sizes}
  return params, abstract((B, T, D), P("dp"))


def step(params, x_BTD):
  """Gradient step of attention layers, tp-sharded over heads."""

  def layer(x_BTD, w):
    q, k, v = (jnp.einsum("btd,dnh->btnh", x_BTD, w[name]) for name in "qkv")
    y = attention.causal(q, k, v, dtype=x_BTD.dtype, implementation="cudnn")
    return x_BTD + jnp.einsum("btnh,nhd->btd", y.astype(x_BTD.dtype), w["o"]), None

  def loss(params):
    return jax.lax.scan(layer, x_BTD, params)[0].astype(jnp.float32).var()

  grads = jax.grad(loss)(params)
  return jax.tree.map(lambda p, g: p - g, params, grads)


def compile_step(mesh, dtype=jnp.bfloat16, head_dim=64):
  params, x = shapes(mesh, dtype, head_dim)
  return jax.jit(step, donate_argnums=0).lower(params, x).compile()


@wheels
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_sharded_step_with_cudnn_attention_compiles_for_16_gpus(dtype):
  compiled = compile_step(mesh_of(), dtype)
  text = compiled.as_text()
  assert 'custom_call_target="__cudnn$fmhaSoftmax"' in text
  assert 'custom_call_target="__cudnn$fmhaSoftmaxBackward"' in text
  assert "all-reduce" in text
  sizes = topology.memory(compiled)
  params = 2 * L * D * 64 * (2 * N + 2 * K) // 8
  assert sizes["argument"] == params + 2 * B * T * D // 2
  assert sizes["alias"] == params <= sizes["output"] < params + 1024
  assert sizes["peak"] == sizes["argument"] + sizes["output"] - params + sizes["temp"]
  assert sizes["temp"] > 0 == sizes["host_peak"]


@wheels
@pytest.mark.parametrize("name", topology.GPUS)
def test_every_gpu_is_described_as_its_table_says(name):
  gpu, device = topology.GPUS[name], topology.devices(name, 1, 8)[0]
  assert device.platform == "gpu"
  assert device.device_kind.upper().startswith(f"NVIDIA {name.split('-')[0].upper()}")
  major, minor = gpu.compute_capability
  assert device.compute_capability == f"{major}.{minor}"
  assert topology.memory(compile_step(mesh_of(name, 1, 8)))["temp"] > 0


@wheels
def test_devices_keep_their_order_and_are_made_once():
  devices = topology.devices("h200", 2, 8)
  assert [device.id for device in devices] == list(range(16))
  assert mesh_of() == mesh_of()


@wheels
def test_wide_heads_need_the_context_and_a_hopper():
  mesh = mesh_of()
  with pytest.raises(NotImplementedError, match="128"):
    compile_step(mesh, head_dim=256)
  with deviceless_cudnn.answering_for((8, 0)):
    with pytest.raises(NotImplementedError, match="128"):
      compile_step(mesh, head_dim=256)
  with deviceless_cudnn.answering_for((9, 0)):
    assert "__cudnn$fmhaSoftmaxBackward" in compile_step(mesh, head_dim=256).as_text()
  with pytest.raises(NotImplementedError, match="128"):  # nothing is left behind
    compile_step(mesh, dtype=jnp.float16, head_dim=256)


def test_a_jax_without_that_check_is_left_alone(monkeypatch, caplog):
  monkeypatch.setattr(deviceless_cudnn, "_CHECK", "no_such_function")
  with deviceless_cudnn.answering_for((9, 0)):
    pass
  assert "no_such_function" in caplog.text


@wheels
def test_pinned_memory_is_counted_apart():
  mesh = mesh_of()
  device = NamedSharding(mesh, P("dp"))
  host = topology.pinned_host(device)
  array = jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=device)
  moments = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=host)

  def update(moments, grads):
    new = jax.device_put(moments, jax.memory.Space.Device) * 0.9 + grads
    return jax.device_put(new, jax.memory.Space.Host), grads * 2

  jitted = jax.jit(update, donate_argnums=(0, 1), out_shardings=(host, device))
  sizes = topology.memory(jitted.lower(moments, array).compile())
  half = 4 * 1024 * 1024 // 2
  assert sizes["argument"] == half == sizes["alias"]
  assert sizes["host_argument"] == sizes["host_output"] == sizes["host_alias"] == half
  assert sizes["host_peak"] == half
  assert sizes["peak"] < 4 * half


def missing(monkeypatch, *modules):
  monkeypatch.setattr(topology, "_found", lambda module: module not in modules)
  monkeypatch.setattr(
    topology, "_version", lambda _: topology.metadata.version("jaxlib")
  )
  monkeypatch.setattr(topology, "_has_tool", lambda _: True)
  monkeypatch.setattr(topology, "_has_libdevice", lambda: True)


PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


@pytest.mark.parametrize(
  "modules, named",
  [
    (PLUGINS, "jax-cuda13-plugin is not installed"),
    (["nvidia.cudnn"], "nvidia-cudnn-cu13 not installed"),
    (["nvidia.cudnn", PLUGINS[0]], "nvidia-cudnn-cu12 not installed"),
  ],
)
def test_missing_wheels_are_named_with_the_way_to_get_them(monkeypatch, modules, named):
  missing(monkeypatch, *modules)
  with pytest.raises(JaxrlError, match=rf"{named}.*pip install 'jaxrl_hybrid\[plan\]'"):
    topology.devices("h200", 1, 8)


@pytest.mark.parametrize("part", ["_has_tool", "_has_libdevice"])
def test_missing_parts_of_nvcc_are_found_before_xla_crashes(monkeypatch, part):
  missing(monkeypatch)
  assert topology.available() == ""
  monkeypatch.setattr(topology, part, lambda *_: False)
  assert "nvidia-cuda-nvcc not installed" in topology.available()


def test_a_plugin_of_another_version_is_refused(monkeypatch):
  missing(monkeypatch)
  monkeypatch.setattr(topology, "_version", lambda _: "0.1.0")
  assert "jax-cuda13-plugin 0.1.0 is not of jaxlib" in topology.available()


def test_other_platforms_than_the_cpu_are_refused(monkeypatch):
  config = types.SimpleNamespace(jax_platforms=None)
  monkeypatch.setattr(topology, "jax", types.SimpleNamespace(config=config))
  with pytest.raises(topology.TopologyError, match="jax_platforms='cpu', got None"):
    topology.devices("h200", 1, 8)


@pytest.mark.parametrize(
  "arguments, said",
  [(("h300", 1, 8), "h300.*known.*h200"), (("h200", 0, 8), "nodes=0")],
)
def test_wrong_arguments_are_config_errors(arguments, said):
  with pytest.raises(ConfigError, match=said):
    topology.devices(*arguments)


def test_usable_memory_is_a_part_of_what_cuda_sees():
  h100 = topology.GPUS["h100-80gb"]
  assert h100.memory_bytes == 81_559 * 2**20
  # A CUDA program on an H100 sees 84,942,979,072 bytes.
  assert 0.99 * 84_942_979_072 < topology.usable_bytes(h100, 1.0) <= 84_942_979_072
  assert topology.usable_bytes(h100, 0.5) == topology.usable_bytes(h100, 1.0) // 2
  with pytest.raises(ConfigError, match="fraction"):
    topology.usable_bytes(h100, 92)
