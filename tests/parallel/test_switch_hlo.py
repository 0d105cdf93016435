"""The programs of the switch: which devices exchange what, and how much of it.

HybridFlow (arXiv:2409.19256, table 2): with M bytes of weights each device
receives (t p - t_g p_g) / (t_g p_g t p) M, and all of it inside its micro-DP
group. p_g = 1 unless said. M is float32: a CPU gathers bfloat16 as float32.
"""

import dataclasses
import functools
import math
import re

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxrl_hybrid.models.spec import ModelSpec
from jaxrl_hybrid.parallel import mesh as mesh_lib
from jaxrl_hybrid.parallel import topology
from jaxrl_hybrid.parallel import weights as weights_lib
from jaxrl_hybrid.parallel.hybrid import HybridEngine
from jaxrl_hybrid.parallel.rules import Layout

DEVICES = 16
COUNTS = range(1, DEVICES + 1)
SPEC = ModelSpec(
  "qwen3", 37, 32, 64, 0, 16, 16, 8, 64, qk_norm="head", qkv_bias=True, out_bias=True
)
# tp 4 copies the 2 key/value heads, so that training does not split them.
GROUPED = dataclasses.replace(SPEC, num_heads=12, num_kv_heads=2, num_layers=4)
# tp 8 pads the 14 query heads to 16, 7 to 8 of each key/value head.
PADDED = dataclasses.replace(SPEC, num_heads=14, num_kv_heads=2, num_layers=2)
# tp 16 and tp 8 spread the 9 query heads differently; pp 2 pads the layers to 6.
ODD = dataclasses.replace(SPEC, num_heads=9, num_kv_heads=3, num_layers=5)
SEVEN_B = ModelSpec(
  "qwen2", 152_064, 3584, 18_944, 28, 28, 4, 128, 32_768, qkv_bias=True
)
# (pp, tp, dp, t_g)
LEGAL = [
  (pp, tp, dp, t_g)
  for tp in (1, 2, 4, 8, 16)  # those that divide 16 heads
  for pp in COUNTS
  for dp in COUNTS
  for t_g in COUNTS
  if pp * tp * dp <= DEVICES and tp % t_g == 0
]
FAST = [
  (1, 1, 2, 1),
  (1, 2, 2, 1),
  (1, 4, 2, 2),
  (1, 4, 4, 4),
  (1, 8, 2, 4),
  (1, 16, 1, 2),
  (2, 1, 2, 1),
  (2, 2, 3, 1),
  (2, 4, 2, 2),
  (3, 4, 1, 4),
  (4, 4, 1, 1),
]
ZERO_3 = [case for case in LEGAL if case[0] < 4 and case[2] in (2, 4, 8)]
FAST_3 = [(1, 2, 4, 1), (2, 2, 4, 2)]
BETWEEN = [(1, 4, 2, 2), (1, 8, 2, 4), (2, 4, 2, 2)]  # 1 < t_g < tp
HOST = re.compile(r" (?:infeed|outfeed|send|recv)\(|S\(5\)|callback|[Mm]oveToHost")


def parts(sharding, shape) -> int:
  """Into how many shards of the same size an array is split."""
  return math.prod(shape) // math.prod(sharding.shard_shape(shape))


@dataclasses.dataclass(frozen=True)
class Leaf:
  """One weight: its bytes, and its shardings before and after the switch."""

  name: str
  shape: tuple[int, ...]
  size: int
  before: jax.sharding.NamedSharding
  after: jax.sharding.NamedSharding

  @property
  def split(self) -> tuple[int, int]:
    """Number of shards before and after."""
    return parts(self.before, self.shape), parts(self.after, self.shape)

  @property
  def missing(self) -> int:
    """What a device does not have yet, if its shard grows around the old one."""
    before, after = self.split
    return max(self.size // after - self.size // before, 0)


def engine_of(
  case, spec=SPEC, zero=1, p_g=1, order=COUNTS, naive=False, devices=None, **more
):
  """Engine for (pp, tp, dp, t_g); a spec without layers gets two per stage."""
  pp, tp, dp, t_g = case
  if not spec.num_layers:
    spec = dataclasses.replace(spec, num_layers=2 * pp)
  devices = devices or [jax.devices()[i - 1] for i in order]
  mesh = mesh_lib.train_mesh((pp, tp, dp), devices)
  train = weights_lib.train_layout(spec, mesh, sequence_parallel=False)
  dtype = jnp.dtype(more.get("dtype", "float32"))
  generation = mesh_lib.generation_mesh(mesh, (p_g, t_g))
  if naive:
    generation = consecutive(generation)
  return HybridEngine(
    weights_lib.WeightLayout(spec, train, dtype, zero),
    weights_lib.generation_layout(spec, generation),
  )


def consecutive(mesh: Mesh) -> Mesh:
  """The same devices, but consecutive ones generate together: tp the minor part."""
  *outer, t_g, micro = mesh.devices.shape
  names = (*mesh.axis_names[:3], "micro_dp_tp", "tp")
  return Mesh(mesh.devices.reshape(*outer, micro, t_g), names)


def programs(engine):
  """(how often it runs, compiled) of both programs, from shapes."""
  weights = engine.source.abstract_weights()
  slot = engine.switch_slot.lower(weights["layers"], jnp.int32(0)).compile()
  outside = {name: leaf for name, leaf in weights.items() if name != "layers"}
  outer = engine.switch_outer.lower(outside).compile()
  return [(engine.source.padded_layers // engine.source.stages, slot), (1, outer)]


@functools.cache
def switch(case, **options):
  """(engine, programs), made once."""
  engine = engine_of(case, **options)
  return engine, programs(engine)


def collectives(compiled):
  """With device ids."""
  return hlo.collectives(compiled.as_text(), hlo.device_ids(compiled))


def received(compiled) -> int:
  """Bytes that one device receives in a whole switch."""
  return sum(
    calls * sum(map(hlo.received_bytes, collectives(program)))
    for calls, program in compiled
  )


def leaves_of(engine) -> list[Leaf]:
  """Every weight, layers stacked."""
  weights = engine.source.abstract_weights()
  after = engine.target.shardings(engine.source.axes, weights)

  def leaf(path, x, sharding):
    size = x.size * x.dtype.itemsize
    return Leaf(jax.tree_util.keystr(path), x.shape, size, x.sharding, sharding)

  return jax.tree.leaves(jax.tree_util.tree_map_with_path(leaf, weights, after))


def micro_dp_groups(case, zero=1, p_g=1) -> np.ndarray:
  """Ids by micro-DP group (zero=3: and dp), from the paper's ranks, not a mesh.

  Rank (stage, replica, ti) is in part ti // (tp / t_g) of generation's tp.
  """
  pp, tp, dp, t_g = case
  ids = np.arange(pp * dp * tp).reshape(p_g, pp // p_g, dp, t_g, tp // t_g)
  if zero == 3:
    return ids.transpose(0, 3, 1, 2, 4).reshape(p_g * t_g, -1)
  return ids.transpose(0, 2, 3, 1, 4).reshape(p_g * dp * t_g, -1)


def strays(compiled, groups) -> list[hlo.Collective]:
  """Collectives that are not all-gathers inside one of the groups."""
  group_of = {device: i for i, row in enumerate(groups.tolist()) for device in row}
  inside = lambda group: len({group_of[device] for device in group}) == 1
  found = [c for _, program in compiled for c in collectives(program)]
  return [c for c in found if c.kind != "all-gather" or not all(map(inside, c.groups))]


def is_nested(shape, before, after) -> bool:
  """Whether what each device had lies inside what it gets."""
  before, after = (s.devices_indices_map(shape) for s in (before, after))

  def inside(a, b, size):
    (start, stop, _), (low, high, _) = a.indices(size), b.indices(size)
    return low <= start and stop <= high

  return all(
    inside(a, b, size)
    for device in before
    for a, b, size in zip(before[device], after[device], shape, strict=True)
  )


def assert_as_the_paper_says(case, **options):
  pp, tp, dp, t_g = case
  zero, p_g = options.get("zero", 1), options.get("p_g", 1)
  engine, compiled = switch(case, **options)
  (_, slot), (_, outer) = compiled
  leaves = leaves_of(engine)
  assert not strays([(1, slot)], micro_dp_groups(case, zero, p_g))
  # Embedding and head lie on every generation stage.
  assert not strays([(1, outer)], micro_dp_groups(case, zero))
  assert all(is_nested(x.shape, x.before, x.after) for x in leaves)
  assert received(compiled) == sum(x.missing for x in leaves)
  before = tp * pp * (dp if zero == 3 else 1)
  layers = [x for x in leaves if "layers" in x.name]
  for part, kept in ((layers, t_g * p_g), (set(leaves) - set(layers), t_g)):
    # The formula, of all that is spread as t p and t_g p_g say.
    spread = [x for x in part if x.split == (before, kept)]
    size = sum(x.size for x in spread)
    assert size
    assert sum(x.missing for x in spread) * kept * before == (before - kept) * size
    # What is not: norms and biases of the output, which tp and dp do not split.
    for leaf in set(part) - set(spread):
      assert re.search(r"(norm'\]\['scale|'o'\]\['bias)'\]$", leaf.name), leaf.name
      assert leaf.split == ((pp, p_g) if part is layers else (1, 1))


def marked(cases, fast):
  """Those that are not fast for slow runs only."""
  return [pytest.param(c, marks=() if c in fast else pytest.mark.slow) for c in cases]


@pytest.mark.parametrize("case", marked(LEGAL, FAST), ids=str)
def test_each_device_receives_what_it_lacks_from_its_micro_dp_group(case):
  assert_as_the_paper_says(case)


@pytest.mark.parametrize("case", marked(ZERO_3, FAST_3), ids=str)
def test_weights_spread_over_dp_are_gathered_there_too(case):
  assert_as_the_paper_says(case, zero=3)


@pytest.mark.parametrize(
  "case,p_g,zero", [((4, 2, 2, 1), 2, 1), ((2, 4, 2, 2), 2, 1), ((4, 2, 2, 2), 2, 3)]
)
def test_stages_that_generation_keeps_receive_their_own_layers(case, p_g, zero):
  assert_as_the_paper_says(case, p_g=p_g, zero=zero)


@pytest.mark.parametrize("case", BETWEEN, ids=str)
def test_consecutive_ranks_would_receive_more(case):
  engine, ours = switch(case)
  naive, compiled = switch(case, naive=True)
  assert received(compiled) > received(ours)
  assert strays(compiled, micro_dp_groups(case))
  assert not all(is_nested(x.shape, x.before, x.after) for x in leaves_of(naive))
  # Both give a device as much.
  assert [x.split for x in leaves_of(naive)] == [x.split for x in leaves_of(engine)]


def test_consecutive_ranks_nest_only_where_one_of_the_groups_is_trivial():
  for case in LEGAL:
    pp, tp, dp, t_g = case
    train = mesh_lib.train_mesh((pp, tp, dp))
    ours = mesh_lib.generation_mesh(train, (1, t_g))
    rules = weights_lib.generation_layout(SPEC, ours).rules
    before = weights_lib.train_layout(SPEC, train, sequence_parallel=False)
    nested = [
      is_nested((16,), *(x.sharding(("heads",), (16,)) for x in (before, after)))
      for after in (Layout(ours, rules), Layout(consecutive(ours), rules))
    ]
    assert nested == [True, not 1 < t_g < tp], case


@pytest.mark.parametrize("case", BETWEEN[1:], ids=str)
def test_a_permuted_mesh_is_seen(case):
  """Its program is the same text; only who is who in it differs."""
  order = tuple((np.random.default_rng(0).permutation(DEVICES) + 1).tolist())
  engine, compiled = switch(case, order=order)
  assert received(compiled) == received(switch(case)[1])
  assert strays(compiled, micro_dp_groups(case))
  mapped = (np.array(order) - 1)[micro_dp_groups(case)]
  assert not strays(compiled, mapped)


@pytest.mark.parametrize("case", [(1, 4, 2, 2), (1, 4, 1, 1)], ids=str)
def test_key_heads_that_training_copies_are_not_received(case):
  engine, compiled = switch(case, spec=GROUPED)
  assert engine.source.heads.replicas == 2 and engine.heads.replicas == 1
  assert not strays(compiled, micro_dp_groups(case))
  leaves = leaves_of(engine)
  assert received(compiled) == sum(x.missing for x in leaves)
  keys = [x for x in leaves if re.search("'[kv]'", x.name)]
  assert len(keys) == 4 and {x.split for x in keys} == {(1, case[-1])}


@pytest.mark.parametrize("case", [(1, 8, 2, 2), (2, 8, 1, 1)], ids=str)
def test_padding_of_heads_is_taken_out_where_they_arrive(case):
  engine, compiled = switch(case, spec=PADDED)
  assert engine.source.heads.pads_weights and not engine.heads.pads_weights
  assert not strays(compiled, micro_dp_groups(case))
  assert received(compiled) == sum(x.missing for x in leaves_of(engine))


@pytest.mark.parametrize(
  "case,spec,zero,qkv,gathers",
  [
    # q|k|v, its bias, o, gate|up, down
    ((1, 4, 2, 1), SPEC, 1, (4, 3 * 16 * 8 // 4), 5),
    ((1, 4, 2, 2), SPEC, 1, (4, 96), 5),
    ((1, 4, 2, 4), SPEC, 1, (4, 96), 0),
    # Spread over dp as well: 8 parts, of 2 heads each.
    ((1, 4, 2, 2), SPEC, 3, (8, 48), 5),
    # Joined on arrival: training does not split k and v, only q is gathered.
    ((1, 4, 2, 2), GROUPED, 1, (2, 64), 5),
    # As heads are regrouped.
    ((1, 8, 2, 2), PADDED, 1, (2, 72), 5),
  ],
  ids=lambda x: "" if isinstance(x, ModelSpec) else str(x),
)
def test_projections_are_joined_before_they_are_gathered_if_possible(
  case, spec, zero, qkv, gathers
):
  engine, compiled = switch(case, spec=spec, zero=zero)
  layer = engine.copy(engine.source.abstract_weights())["layers"][0]
  assert layer["attn"]["qkv"]["kernel"].shape == (*qkv, 32)
  assert layer["attn"]["qkv"]["bias"].shape == qkv
  assert layer["mlp"].keys() == {"gate_up", "down"}
  assert len(collectives(compiled[0][1])) == gathers


def test_keys_that_generation_copies_stay_apart():
  engine = engine_of((1, 4, 1, 4), spec=GROUPED)
  layer = engine.copy(engine.source.abstract_weights())["layers"][0]
  assert {"q", "k", "v"} < layer["attn"].keys()
  assert layer["mlp"].keys() == {"gate_up", "down"}


@pytest.mark.parametrize("case", [(1, 16, 1, 8)], ids=str)
def test_heads_that_go_to_another_group_are_gathered_whole_and_nothing_else_is(case):
  engine, compiled = switch(case, spec=ODD)
  leaves = leaves_of(engine)
  moved = [x for x in leaves if re.search(r"'q'|'o'\]\['kernel", x.name)]
  assert len(moved) == 3
  whole = sum(x.size - x.size // x.split[0] for x in moved)
  others = sum(x.missing for x in set(leaves) - set(moved))
  assert received(compiled) == whole + others
  assert {c.kind for _, p in compiled for c in collectives(p)} == {"all-gather"}


@pytest.mark.parametrize(
  "case,options",
  [(case, {}) for case in FAST]
  + [(case, {"zero": 3}) for case in FAST_3]
  + [((1, 4, 2, 2), {"spec": GROUPED}), ((1, 16, 1, 8), {"spec": ODD})],
  ids=lambda x: str(x) if isinstance(x, tuple) else "-".join(x),
)
def test_a_slot_needs_little_more_than_its_result_and_never_the_host(case, options):
  engine, compiled = switch(case, **options)
  slot = compiled[0][1]
  sizes = slot.memory_analysis()
  factor = 3 if options.get("spec") == ODD else 1
  assert sizes.temp_size_in_bytes <= factor * sizes.output_size_in_bytes
  assert not any(HOST.search(program.as_text()) for _, program in compiled)


def test_a_move_to_the_host_would_be_seen():
  x = jnp.ones(16)
  to_host = jax.jit(lambda x: jax.device_put(x + 1, jax.memory.Space.Host))
  callback = jax.jit(lambda x: jax.pure_callback(lambda y: y, x, x) + 1)
  for program in (to_host, callback):
    assert HOST.search(program.lower(x).compile().as_text())


@pytest.mark.skipif(bool(topology.available()), reason=topology.available())
@pytest.mark.parametrize(
  "case,temp",
  [
    ((1, 1, 1, 1), 0.0001),
    ((1, 2, 1, 1), 0.14),
    ((2, 4, 2, 4), 0.14),
    ((2, 4, 2, 2), 0.14),
    ((1, 8, 2, 4), 0.042),
  ],
  ids=str,
)
def test_a_7b_model_on_gpus_needs_little_temporary_memory(case, temp):
  """One layer of each stage: 0.12 to 0.47 GB on each GPU after the switch."""
  count = math.prod(case[:3])
  devices = topology.devices("h200", max(count // 8, 1), min(count, 8))
  engine = engine_of(case, spec=SEVEN_B, devices=devices, dtype="bfloat16")
  found = []
  for calls, program in programs(engine):
    text = program.as_text()
    found += calls * hlo.collectives(text)
    assert " transpose(" not in text and not HOST.search(text)
    assert topology.memory(program)["temp"] < temp * 1e9
  assert {c.kind for c in found} <= {"all-gather"}
  assert sum(map(hlo.received_bytes, found)) == sum(
    x.missing for x in leaves_of(engine)
  )
