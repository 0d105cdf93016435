"""Collectives in the text of a compiled program: who exchanges how many bytes.

The ids in HLO text are partition numbers, positions in the device order that the
program was compiled for. Two meshes that differ only in that order give the same
text, so a statement about devices needs the order as well: ``device_ids``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

Groups = tuple[tuple[int, ...], ...]

KINDS = {"all-gather", "all-reduce", "all-to-all", "ragged-all-to-all"}
KINDS |= {"collective-broadcast", "collective-permute", "reduce-scatter"}
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*)")
_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+)\b.*\{\s*$")
_GROUPS = re.compile(r"(?:replica_groups|source_target_pairs)=")
_ARRAY = re.compile(r"(\w+)\[([\d,<= ]*)\](?:\{[^}]*\})?")
_WIDTH = re.compile(r"(?:bf|f|s|u|c)(\d+)(?:e\d+m\d+\w*)?")
# What may follow a value; anything else is a spelling unknown here.
_END = r"(?=[,\s]|$)"
_LISTS = re.compile(r"\{(\{\d+(?:,\d+)*\}(?:,\{\d+(?:,\d+)*\})*)?\}" + _END)
_TILE = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
_IOTA = re.compile(r"\[(\d+),(\d+)\]<=" + _TILE + _END)
_AXIS = r"'([^']+)'=(\d+)"
_REF = r"'([^']+)'(?::\((\d+)\)(\d+))?"
_MESH = re.compile(
  rf"mesh\[(?P<axes>{_AXIS}(?:,{_AXIS})*)\]"
  rf"(?:, device_ids=\((?:(?P<tile>{_TILE})|(?P<ids>[\d,]+))\))?"
  rf" \{{(?P<over>{_REF}(?:,{_REF})*)\}}{_END}"
)


@dataclass(frozen=True)
class Collective:
  """One collective instruction of a compiled program.

  Attributes:
    kind: HLO opcode without ``-start``.
    groups: ids of each replica group in the order of the data; for a
      collective-permute the (source, target) pairs.
    bytes_in: bytes of all operands on one device.
    bytes_out: bytes of all results on one device.
    name: name of the instruction.
    computation: name of the computation it stands in. How often that one runs,
      a loop body for example, is not known here.
    count: instructions, always 1; an async pair counts once.
  """

  kind: str
  groups: Groups
  bytes_in: int
  bytes_out: int
  name: str
  computation: str
  count: int = 1


def device_ids(compiled: jax.stages.Compiled) -> tuple[int, ...]:
  """Device id of each partition, from the executable and not from a mesh."""
  return tuple(d.id for d in compiled.runtime_executable().local_devices())


def collectives(text: str, devices: Sequence[int] | None = None) -> list[Collective]:
  """All collectives of a compiled program, in the order of the text.

  Args:
    text: ``compiled.as_text()``.
    devices: device id of each partition; None leaves partition numbers in the
      groups.

  Raises:
    ValueError: a collective is spelled in a way that is not known here.
  """
  partitions = _partitions(text)
  if devices is not None and partitions not in (None, len(devices)):
    raise ValueError(f"{len(devices)} devices for {partitions} partitions")
  found: list[Collective] = []
  computation, types = "", dict[str, str]()
  for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
    if not (match := _INSTRUCTION.match(line)):
      if match := _COMPUTATION.match(line):
        computation, types = match[1], {}
      continue
    name, rest = match.groups()
    end = _close(rest) if rest.startswith("(") else rest.index(" ")
    types[name], rest = rest[:end], rest[end:].lstrip()
    opcode = rest[: rest.index("(")]
    kind = opcode.removesuffix("-start")
    if kind not in KINDS and not _GROUPS.search(rest):
      continue
    try:
      if kind not in KINDS:
        raise ValueError("unknown collective")
      end = _close(rest[len(opcode) :]) + len(opcode)
      operands = _split(rest[len(opcode) + 1 : end - 1])
      bytes_in = sum(_bytes(types[x.split()[-1].removeprefix("%")]) for x in operands)
      bytes_out = _result_bytes(opcode, types[name], bytes_in)
      groups = _groups(rest[end:], partitions)
    except (KeyError, ValueError) as error:
      raise ValueError(f"cannot read, {error}: {line.strip()}") from error
    if devices is not None:
      groups = tuple(tuple(devices[i] for i in group) for group in groups)
    found.append(Collective(kind, groups, bytes_in, bytes_out, name, computation))
  return found


def received_bytes(c: Collective) -> int:
  """Bytes that one device receives from others, rounded down.

  An all-reduce counts as a ring, a reduce-scatter and an all-gather. In a
  collective-permute that moves anything, a device that is the target of another.
  """
  size = max((len(group) for group in c.groups), default=1)
  if c.kind == "all-gather":
    return c.bytes_out - c.bytes_in
  if c.kind == "reduce-scatter":
    return c.bytes_in - c.bytes_out
  if c.kind == "all-reduce":
    return 2 * c.bytes_in * (size - 1) // size
  if c.kind == "all-to-all":
    return c.bytes_out * (size - 1) // size
  if c.kind == "collective-permute":
    return c.bytes_out if any(a != b for a, b in c.groups) else 0
  raise ValueError(f"no rule for the bytes of a {c.kind}")


def _partitions(text: str) -> int | None:
  """Partitions by the module's header, None without one."""
  if not (header := re.search(r"^HloModule .*", text, re.MULTILINE)):
    return None
  if re.search(r", replica_count=(?!1\b)", header[0]):
    raise ValueError(f"more than one replica: {header[0]}")
  match = re.search(r", num_partitions=(\d+)", header[0])
  return int(match[1]) if match else 1


def _close(text: str) -> int:
  """End of the bracketed part that the text starts with."""
  depth = 0
  for match in re.finditer(r"[()]", text):
    depth += 1 if match[0] == "(" else -1
    if not depth:
      return match.end()
  raise ValueError(f"unbalanced: {text}")


def _split(text: str) -> list[str]:
  """Parts between the commas that stand outside of all brackets."""
  depth, parts = 0, [""]
  for char in text:
    depth += (char in "([{") - (char in ")]}")
    if char == "," and not depth:
      parts.append("")
    else:
      parts[-1] += char
  return [part.strip() for part in parts if part.strip()]


def _bytes(text: str) -> int:
  """Bytes of a type, tuples summed."""
  if text.startswith("("):
    return sum(_bytes(part) for part in _split(text[1:-1]))
  if not (match := _ARRAY.fullmatch(text)):
    raise ValueError(f"unknown type {text}")
  width = _WIDTH.fullmatch(match[1])
  bits = 8 if match[1] == "pred" else int(width[1]) if width else 0
  if not bits or bits % 8:
    raise ValueError(f"unknown element type {match[1]}")
  dims = [int(d.strip(" <=")) for d in match[2].split(",") if d]
  return math.prod(dims) * bits // 8


def _result_bytes(opcode: str, text: str, bytes_in: int) -> int:
  """Bytes of the results; a ``-start`` returns (operands, results, ...)."""
  if opcode == "all-reduce-start":  # returns its results only, like its operands
    return bytes_in
  return _bytes(_split(text[1:-1])[1] if opcode.endswith("-start") else text)


def _groups(attributes: str, partitions: int | None) -> Groups:
  """Groups or pairs in any of the spellings that XLA prints."""
  if not (at := _GROUPS.search(attributes)):
    raise ValueError("no replica_groups")
  start = at.end()
  if match := _LISTS.match(attributes, start):
    if match[1]:
      return tuple(_numbers(x) for x in match[1][1:-1].split("},{"))
    if at[0].startswith("source"):
      return ()
    if partitions is None:
      raise ValueError("empty replica_groups without a HloModule header")
    return (tuple(range(partitions)),)
  if match := _IOTA.match(attributes, start):
    return _rows(_tile(match[3], match[4]).reshape(int(match[1]), int(match[2])))
  if match := _MESH.match(attributes, start):
    return _mesh_groups(match)
  raise ValueError("unknown spelling of replica_groups")


def _numbers(text: str) -> tuple[int, ...]:
  return tuple(int(x) for x in text.split(","))


def _rows(ids: np.ndarray) -> Groups:
  return tuple(tuple(row) for row in ids.tolist())


def _tile(dims: str, permutation: str | None) -> np.ndarray:
  """Ids of ``[dims]T(permutation)``: iota in that shape, transposed."""
  shape = _numbers(dims)
  ids = np.arange(math.prod(shape)).reshape(shape)
  return ids.transpose(_numbers(permutation)) if permutation else ids


def _mesh_groups(match: re.Match[str]) -> Groups:
  """Groups over some axes of ``mesh['a'=2,'b'=8]``, the last listed the minor.

  ``'b':(2)4`` is a part of b: b as (2, 4, rest), its middle.
  """
  sizes = {name: int(n) for name, n in re.findall(_AXIS, match["axes"])}
  order = np.arange(math.prod(sizes.values()))
  if match["tile"]:
    order = _tile(*re.fullmatch(_TILE, match["tile"]).groups())
  elif match["ids"]:
    order = np.array(_numbers(match["ids"]))
  refs = [
    (name, int(pre or 1), int(n or sizes[name]))
    for name, pre, n in re.findall(_REF, match["over"])
  ]
  shape, place = [], dict[tuple[str, int], int]()
  for name, size in sizes.items():
    cuts = {1, size}.union(*({pre, pre * n} for axis, pre, n in refs if axis == name))
    for low, high in itertools.pairwise(sorted(cuts)):
      place[name, low] = len(shape)
      shape.append(high // low)
  minor = [place[name, pre] for name, pre, n in refs if n > 1]
  major = [i for i in range(len(shape)) if i not in minor]
  ids = order.reshape(shape).transpose(major + minor)
  return _rows(ids.reshape(-1, math.prod(n for _, _, n in refs)))
