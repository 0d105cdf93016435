"""The reader of compiled programs: handwritten lines, then XLA's own text."""

from __future__ import annotations

import math
from collections.abc import Callable

import hlo
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Shard = Callable[[jax.Array], jax.Array]
AXES = ("a", "b", "c")
IN_ORDER, SHUFFLED = np.arange(16), np.random.default_rng(0).permutation(16)
LINE = """HloModule f, num_partitions=4
ENTRY %main (p: f32[8]) -> f32[16] {{
  %p = f32[8]{{0}} parameter(0)
  ROOT %g = f32[16]{{0}} all-gather(%p), channel_id=1, {}, dimensions={{0}}
}}
"""
ASYNC = """HloModule f, num_partitions=4
ENTRY %main (p: f32[8,2], q: u16[4]) -> f32[8,2] {
  %p = f32[8,2]{1,0:T(8,128)(2,1)} parameter(0)
  %q = u16[4]{0} parameter(1)
  %g = (f32[8,2]{1,0}, f32[16,2]{1,0}) all-gather-start(%p), replica_groups=[2,2]<=[4]
  %gd = f32[16,2]{1,0} all-gather-done(%g)
  %v = ((f32[8,2]{1,0}, u16[4]{0}), (f32[16,2]{1,0}, /*index=1*/u16[8]{0})) all-gather-start(%p, /*index=1*/%q), replica_groups={{0,1},{2,3}}, dimensions={0}
  %vd = (f32[16,2]{1,0}, u16[8]{0}) all-gather-done(%v)
  %r = (f32[8,2]{1,0}, u16[4]{0}) all-reduce-start(f32[8,2]{1,0} %p, u16[4]{0} %q), replica_groups={}, to_apply=%add
  %rd = (f32[8,2]{1,0}, u16[4]{0}) all-reduce-done(%r)
  %c = (f32[8,2]{1,0}, f32[8,2]{1,0}, u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}
  %cd = f32[8,2]{1,0} collective-permute-done(%c)
  %s = ((f32[8,2]{1,0}), f32[4,2]{1,0}) reduce-scatter-start(%p), replica_groups=[2,2]<=[2,2]T(1,0), to_apply=%add
  ROOT %sd = f32[4,2]{1,0} reduce-scatter-done(%s)
}
"""  # noqa: E501
EMPTY = LINE.format("replica_groups={}")
SEND = "send(%p), frontend_attributes={_xla_send_recv_source_target_pairs={{0,1}}}"
RING = [(i, (i + 1) % 4) for i in range(4)]
OPERATIONS = {
  "all-reduce": lambda x, axes: jax.lax.psum(x, tuple(axes)),
  "all-to-all": lambda x, axis: jax.lax.all_to_all(x, axis, 0, 1, tiled=True),
  "collective-permute": lambda x, axis: jax.lax.ppermute(x, axis, RING),
  "reduce-scatter": lambda x, axis: jax.lax.psum_scatter(x, axis, tiled=True),
}
each_order = pytest.mark.parametrize("order", [IN_ORDER, SHUFFLED], ids=["in", "mixed"])


def ids_mesh(order: np.ndarray) -> tuple[Mesh, np.ndarray]:
  """Mesh of the devices in that order, and their ids in its shape."""
  grid = np.array(jax.devices())[order].reshape(2, 2, 4)
  return Mesh(grid, AXES), order.reshape(2, 2, 4)


def expected(ids: np.ndarray, axes: str) -> set[tuple[int, ...]]:
  """Groups of a collective over those axes, the last one the minor."""
  ids = np.moveaxis(ids, [AXES.index(x) for x in axes], range(-len(axes), 0))
  return set(map(tuple, ids.reshape(-1, math.prod(ids.shape[-len(axes) :])).tolist()))


def reshard(mesh: Mesh, before: P, after: P) -> jax.stages.Compiled:
  """Move of a u16[32,16] from one sharding to another."""
  source, target = NamedSharding(mesh, before), NamedSharding(mesh, after)
  move = jax.jit(lambda x: x, in_shardings=source, out_shardings=target)
  return move.lower(jax.ShapeDtypeStruct((32, 16), np.uint16)).compile()


def mapped(mesh: Mesh, f: Shard, after: P) -> jax.stages.Compiled:
  """``f`` on the shards of an f32[32,16] that is split over a."""
  f = jax.shard_map(f, mesh=mesh, in_specs=P("a"), out_specs=after, check_vma=False)
  return jax.jit(f).lower(jax.ShapeDtypeStruct((32, 16), np.float32)).compile()


def only(compiled: jax.stages.Compiled) -> hlo.Collective:
  (found,) = hlo.collectives(compiled.as_text(), hlo.device_ids(compiled))
  return found


@pytest.mark.parametrize(
  "spelling,groups",
  [
    ("{{0,1},{2,3}}", [[0, 1], [2, 3]]),
    ("{{3,0,2,1}}", [[3, 0, 2, 1]]),
    ("{}", [[0, 1, 2, 3]]),
    ("[2,2]<=[4]", [[0, 1], [2, 3]]),
    ("[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
    ("[2,4]<=[2,2,2]T(1,0,2)", [[0, 1, 4, 5], [2, 3, 6, 7]]),
    ("mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
    ("mesh['a'=2,'b'=2] {'b'}", [[0, 1], [2, 3]]),
    ("mesh['a'=2,'b'=2] {'b','a'}", [[0, 2, 1, 3]]),
    ("mesh['x_0'=1,'x_1'=4] {'x_0'}", [[0], [1], [2], [3]]),
    ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", [[0, 2], [1, 3]]),
    ("mesh['a'=2,'b'=2], device_ids=(0,3,1,2) {'b'}", [[0, 3], [1, 2]]),
    ("mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ("mesh['a'=8] {'a':(1)2,'a':(4)2}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
    ("mesh['a'=4,'b'=2] {'b','a':(2)2}", [[0, 2, 1, 3], [4, 6, 5, 7]]),
  ],
)
def test_each_spelling_of_replica_groups(spelling: str, groups: list[list[int]]):
  (found,) = hlo.collectives(LINE.format(f"replica_groups={spelling}"))
  assert found == hlo.Collective(
    "all-gather", tuple(map(tuple, groups)), 32, 64, "g", "main"
  )


@pytest.mark.parametrize(
  "attribute",
  [
    "replica_groups={0,1}",
    "replica_groups=[4]",
    "replica_groups={{0,1},{2,3}}T(1,0)",
    "replica_groups=[2,2]<=[4]R(1)",
    "replica_groups=[2,3]<=[4]",
    "replica_groups=@mesh<a=2,b=2> {a}",
    "replica_groups=mesh['a'=2,'b'=2]",
    "replica_groups=mesh['a'=2,'b'=2] {'c'}",
    "replica_groups=mesh['a'=2,'b'=2], device_ids=(0,1,2) {'a'}",
    "frontend_attributes={}",
  ],
)
def test_an_unknown_spelling_raises_with_the_line(attribute: str):
  with pytest.raises(ValueError) as error:
    hlo.collectives(LINE.format(attribute))
  assert f"all-gather(%p), channel_id=1, {attribute}, dim" in str(error.value)


@pytest.mark.parametrize(
  "old,new,message",
  [
    ("all-gather(", "all-scatter(", "unknown collective"),
    ("all-gather(%p), channel_id=1, replica_groups={}", SEND, "unknown collective"),
    ("num_partitions=4", "replica_count=2, num_partitions=4", "one replica"),
    ("f32[8]", "f32[8]x", "unknown type"),
    ("f32[8]", "s4[8]", "element type s4"),
    ("all-gather(%p", "all-gather(%q", "'q'"),
    ("HloModule f, num_partitions=4", "", "without a HloModule header"),
  ],
)
def test_what_else_is_unknown_raises(old: str, new: str, message: str):
  with pytest.raises(ValueError, match=message):
    hlo.collectives(EMPTY.replace(old, new))


def test_the_number_of_devices_must_be_that_of_the_partitions():
  with pytest.raises(ValueError, match="3 devices for 4 partitions"):
    hlo.collectives(EMPTY, [0, 1, 2])


def test_async_and_variadic_collectives_count_once():
  got = [(c.name, c.kind, c.bytes_in, c.bytes_out) for c in hlo.collectives(ASYNC)]
  assert got == [
    ("g", "all-gather", 64, 128),
    ("v", "all-gather", 72, 144),
    ("r", "all-reduce", 72, 72),
    ("c", "collective-permute", 64, 64),
    ("s", "reduce-scatter", 64, 32),
  ]
  assert hlo.collectives(ASYNC)[3].groups == ((0, 1), (1, 0))


@pytest.mark.parametrize(
  "dtype,size",
  [("pred", 1), ("u8", 1), ("s8", 1), ("f8e4m3fn", 1), ("f8e5m2", 1), ("f8e8m0fnu", 1)]
  + [("bf16", 2), ("f16", 2), ("u16", 2), ("f32", 4), ("u32", 4), ("s32", 4)]
  + [("f64", 8), ("s64", 8), ("c64", 8), ("c128", 16)],
)
def test_element_types(dtype: str, size: int):
  (found,) = hlo.collectives(EMPTY.replace("f32", dtype))
  assert (found.bytes_in, found.bytes_out) == (8 * size, 16 * size)


@pytest.mark.parametrize(
  "kind,groups,sizes,received",
  [
    ("all-gather", ((0, 1, 2, 3),), (8, 32), 24),
    ("reduce-scatter", ((0, 1, 2, 3),), (32, 8), 24),
    ("all-reduce", ((0, 1, 2, 3),), (32, 32), 48),
    ("all-reduce", ((0,), (1,)), (32, 32), 0),
    ("all-to-all", ((0, 1, 2, 3),), (32, 32), 24),
    ("collective-permute", ((0, 0), (1, 2)), (32, 32), 32),
    ("collective-permute", ((0, 0), (1, 1)), (32, 32), 0),
  ],
)
def test_received_bytes(kind: str, groups: hlo.Groups, sizes: tuple, received: int):
  assert hlo.received_bytes(hlo.Collective(kind, groups, *sizes, "x", "y")) == received


@each_order
@pytest.mark.parametrize(
  "kind,axes,before,after,received",
  [
    ("all-gather", "b", P(("a", "b"), "c"), P("a", "c"), 64),
    ("all-gather", "c", P("a", ("b", "c")), P("a", "b"), 192),
    ("all-gather", "ac", P(("a", "c"), "b"), P(None, "b"), 448),
    ("all-gather", "abc", P(AXES), P(), 960),
    ("all-to-all", "c", P("c"), P(None, "c"), 192),
  ],
)
def test_collectives_of_a_compiled_reshard(
  kind: str, axes: str, before: P, after: P, received: int, order: np.ndarray
):
  mesh, ids = ids_mesh(order)
  found = only(reshard(mesh, before, after))
  assert found.kind == kind and set(found.groups) == expected(ids, axes)
  shards = [NamedSharding(mesh, p).shard_shape((32, 16)) for p in (before, after)]
  assert [found.bytes_in, found.bytes_out] == [2 * math.prod(x) for x in shards]
  assert hlo.received_bytes(found) == received


@each_order
@pytest.mark.parametrize(
  "kind,axes,after,received",
  [
    ("all-reduce", "b", P("a"), 1024),
    ("all-reduce", "ac", P(), 1792),
    ("all-to-all", "c", P("a", "c"), 768),
    ("collective-permute", "c", P("a"), 1024),
    ("reduce-scatter", "c", P(("a", "c")), 768),
  ],
)
def test_compiled_collectives_of_a_shard_map(
  kind: str, axes: str, after: P, received: int, order: np.ndarray
):
  mesh, ids = ids_mesh(order)
  found = only(mapped(mesh, lambda x: OPERATIONS[kind](x, axes), after))
  groups = expected(ids, axes)
  if kind == "collective-permute":
    groups = {(group[i], group[j]) for group in groups for i, j in RING}
  assert found.kind == kind and set(found.groups) == groups
  assert found.bytes_in == 1024 and hlo.received_bytes(found) == received


def test_a_collective_in_a_loop_counts_once_and_names_the_body():
  step = lambda _, x: 2 * jax.lax.ppermute(x, "c", RING)
  loop = lambda x: jax.lax.fori_loop(0, 5, step, x)
  compiled = mapped(ids_mesh(IN_ORDER)[0], loop, P("a"))
  found = only(compiled)
  assert f"body=%{found.computation}" in compiled.as_text() and found.count == 1


def test_only_device_ids_tell_a_permuted_mesh_from_another():
  (mesh, ids), (other, other_ids) = ids_mesh(IN_ORDER), ids_mesh(SHUFFLED)
  a, b = (reshard(m, P(("a", "b"), "c"), P("a", "c")) for m in (mesh, other))
  assert hlo.collectives(a.as_text()) == hlo.collectives(b.as_text())
  assert hlo.device_ids(b) == tuple(SHUFFLED.tolist())
  assert set(only(a).groups) == expected(ids, "b") != set(only(b).groups)
  assert set(only(b).groups) == expected(other_ids, "b")
