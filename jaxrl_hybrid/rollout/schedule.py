"""Which row decodes in which slot: the host's side of continuous batching.

Every batch shard of the generation mesh has slots of its own. Rows wait in one
queue, those that may become longest first; a shard with free slots takes the next
prompt, so no shard runs alone at the end while others are idle. A prompt is
prefilled once on the shard that takes it, and its samples enter that shard's slots
as they become free. Nothing here depends on time: several processes that see the
same rows finish decide alike.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxrl_hybrid.shapes import bucket, round_up

REFILL = 16  # slots are filled again when this part of them (1 / REFILL) is free
NARROWEST = 16  # tokens; narrower prefill programs are not worth compiling


@dataclasses.dataclass(frozen=True)
class Unit:
  """Samples of one prompt that decode on one shard.

  Attributes:
    prompt: index of the prompt.
    rows: indices of the rows, in the order of admission.
    length: tokens of the prompt.
  """

  prompt: int
  rows: tuple[int, ...]
  length: int


@dataclasses.dataclass(eq=False)
class Group:
  """Prompts that are prefilled by one call.

  Attributes:
    units: of each shard, by place.
    places: prompts per shard that the program has room for.
    width: tokens per prompt that it has room for.
    waiting: rows that have not entered a slot yet.
    caches: keys and values of all places, once they are there.
  """

  units: list[list[Unit]]
  places: int
  width: int
  waiting: int
  caches: Any = None


class Admission(NamedTuple):
  """A row enters a slot."""

  shard: int
  slot: int
  place: int
  unit: Unit
  row: int


def make_units(
  lengths: Sequence[int], n: int, limits: Sequence[int], shards: int
) -> list[Unit]:
  """Units in the order in which they are taken: longest limit first.

  With fewer prompts than shards the samples of a prompt are spread over several
  shards, each of which prefills it.

  Args:
    lengths: tokens of each prompt.
    n: samples per prompt; row ``i * n + j`` is sample j of prompt i.
    limits: most new tokens of each row.
    shards: batch shards.
  """
  size = n if len(lengths) >= shards else -(-n * len(lengths) // shards)
  units = [
    Unit(i, tuple(range(i * n + j, i * n + min(j + size, n))), length)
    for i, length in enumerate(lengths)
    for j in range(0, n, size)
  ]
  return sorted(units, key=lambda unit: -max(limits[row] for row in unit.rows))


def widest(length: int, prefill_tokens: int) -> int:
  """Tokens that a program has room for in the place of a prompt of ``length``."""
  if length <= prefill_tokens:
    return min(bucket(length), prefill_tokens)
  return round_up(length, prefill_tokens)


def width_for(length: int, widest: int) -> int:
  """The smallest of widest, widest / 4, widest / 16, ... that is at least length."""
  width = widest
  while width % 4 == 0 and width // 4 >= max(length, NARROWEST):
    width //= 4
  return width


class Schedule:
  """The queue, the prompts that are prefilled, and the slots.

  Args:
    units: in the order in which they are taken.
    shards: batch shards.
    slots: of each shard.
    prefill_tokens: most prompt tokens per shard in one prefill program.
    widest: tokens per prompt of the widest one; at least as many as a prompt has.

  Attributes:
    running: the row of each (shard, slot) that has one.
  """

  def __init__(
    self,
    units: Sequence[Unit],
    *,
    shards: int,
    slots: int,
    prefill_tokens: int,
    widest: int,
  ):
    self.shards, self.slots = shards, slots
    self.prefill_tokens, self._widest = prefill_tokens, widest
    self._queue = collections.deque(units)
    self._free = [list(range(slots))[::-1] for _ in range(shards)]
    self._ready: list[collections.deque[tuple[Group, int, Unit, int]]]
    self._ready = [collections.deque() for _ in range(shards)]
    self._order = {unit: i for i, unit in enumerate(units)}
    self._most_places = 1
    while self._most_places * shards < len(units):
      self._most_places *= 2
    rows = max((len(unit.rows) for unit in units), default=1)
    self._refill = max(1, slots // REFILL // rows)
    self.running: dict[tuple[int, int], int] = {}

  @property
  def waiting(self) -> bool:
    """Whether a row has not entered a slot yet."""
    return bool(self._queue) or any(self._ready)

  @property
  def until_refill(self) -> int:
    """Rows that should end before slots are filled again."""
    wanted = max(1, self.slots * self.shards // REFILL - self._idle)
    return min(wanted, len(self.running))

  @property
  def busiest(self) -> int:
    """Rows that decode on the shard that has most of them."""
    counts = collections.Counter(shard for shard, _ in self.running)
    return max(counts.values(), default=0)

  def next_group(self) -> Group | None:
    """The prompts to prefill now: those that free slots are waiting for.

    Two sizes of program: for as many prompts as it may have, and for as many as a
    refill wants. A few slots rather wait than have a program run mostly empty.
    """
    units, width = self._wanted()
    count = max(map(len, units))
    if not count:
      return None
    places = self.room(width)
    if count < places:
      places = min(places, self._refill)
      self._put_back(units, places)
      few = 2 * sum(map(len, units)) < places * self.shards
      if few and self._queue and self._idle <= self.slots * self.shards // REFILL:
        self._put_back(units, 0)
        return None
    group = Group(units, places, width, 0)
    for shard, taken in enumerate(units):
      for place, unit in enumerate(taken):
        self._ready[shard].extend((group, place, unit, row) for row in unit.rows)
        group.waiting += len(unit.rows)
    return group

  @property
  def _idle(self) -> int:
    """Slots without a row, or one that is about to enter."""
    return sum(map(len, self._free)) - sum(map(len, self._ready))

  def _wanted(self) -> tuple[list[list[Unit]], int]:
    """Units off the queue for the free slots of each shard, and their width."""
    need = [
      len(free) - len(ready)
      for free, ready in zip(self._free, self._ready, strict=True)
    ]
    units: list[list[Unit]] = [[] for _ in need]
    width = 0
    while self._queue:
      shard = max(range(len(need)), key=lambda i: need[i])
      wider = max(width, width_for(self._queue[0].length, self._widest))
      if need[shard] <= 0 or len(units[shard]) >= self.room(wider):
        break
      if width and max(map(len, units)) > self.room(wider):
        break
      width = wider
      unit = self._queue.popleft()
      units[shard].append(unit)
      need[shard] -= len(unit.rows)
    return units, width

  def _put_back(self, units: list[list[Unit]], kept: int) -> None:
    """All units of a shard but the first ``kept``, in their order."""
    back = [unit for taken in units for unit in taken[kept:]]
    for taken in units:
      del taken[kept:]
    self._queue.extendleft(sorted(back, key=self._order.__getitem__, reverse=True))

  def admit(self) -> dict[Group, list[Admission]]:
    """Fills the free slots with rows whose prompts are prefilled."""
    found: dict[Group, list[Admission]] = {}
    for shard, (free, ready) in enumerate(zip(self._free, self._ready, strict=True)):
      while free and ready:
        group, place, unit, row = ready.popleft()
        slot = free.pop()
        self.running[shard, slot] = row
        group.waiting -= 1
        found.setdefault(group, []).append(Admission(shard, slot, place, unit, row))
    return found

  def release(self, shard: int, slot: int) -> int:
    """Frees the slot of a row that has ended; returns the row."""
    self._free[shard].append(slot)
    return self.running.pop((shard, slot))

  def shrink(self, slots: int) -> list[list[int]]:
    """Moves all rows into the first ``slots`` slots of their shards.

    Returns:
      for each shard the old slot of each new one; nobody's for those left over.
    """
    assert not self.waiting and self.busiest <= slots
    moved: dict[tuple[int, int], int] = {}
    sources = []
    for shard in range(len(self._free)):
      old = sorted(slot for where, slot in self.running if where == shard)
      moved |= {(shard, new): self.running[shard, slot] for new, slot in enumerate(old)}
      self._free[shard] = list(range(len(old), slots))[::-1]
      idle = [slot for slot in range(slots + len(old)) if slot not in set(old)]
      sources.append(old + idle[: slots - len(old)])
    self.running, self.slots = moved, slots
    return sources

  def room(self, width: int) -> int:
    """Prompts of this width that a shard prefills at once, at most."""
    return max(1, min(self.prefill_tokens // width, self._most_places))
