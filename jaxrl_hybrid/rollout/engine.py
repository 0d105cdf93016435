"""The rollout engine: prompts in, token ids and log-probs out, row by row.

Continuous batching (Yu et al. 2022, Orca, OSDI '22): rows wait in a queue
(``schedule``), decode together in a pool of slots on the device (``pool``), and as
some end others take their places. Read ``Engine.generate`` top-down.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_hybrid.models.decoder import Decoder
from jaxrl_hybrid.models.params import Params
from jaxrl_hybrid.parallel import multihost
from jaxrl_hybrid.parallel.rules import Layout
from jaxrl_hybrid.rollout import capacity
from jaxrl_hybrid.rollout.compiled import CompiledPrograms
from jaxrl_hybrid.rollout.completions import Completions, Writer
from jaxrl_hybrid.rollout.pool import Pool, Programs
from jaxrl_hybrid.rollout.sampling import Sampling
from jaxrl_hybrid.rollout.schedule import (
  Admission,
  Group,
  Schedule,
  make_units,
  widest,
)
from jaxrl_hybrid.rollout.stop import StopStrings
from jaxrl_hybrid.shapes import bucket

CHUNK = 64  # most tokens per row between two looks of the host
SHRINK = 4  # the last rows move to a pool this many times smaller ...
SMALLEST = 16  # ... unless it would have fewer slots per shard
FORESIGHT = 2  # programs are made for rows so many times longer than there are yet
ADMIT = 8  # rows enter in calls of all slots of a shard, or of this part of them

# Is told rows that have ended, by index, and all rows as they are.
OnFinished = Callable[[Sequence[int], Completions], None]


@dataclasses.dataclass(frozen=True)
class Request:
  """One call of ``Engine.generate``; see there.

  ``limits`` are int32 ``[N]``.
  """

  prompts: Sequence[np.ndarray]
  draw_ids: np.ndarray
  n: int
  limits: np.ndarray
  sampling: Sampling
  stop: StopStrings | None


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Of the arrays of a call.

  Attributes:
    slots: B, before memory is looked at.
    length: S.
    places: prompts of the largest prefill program, over all shards.
    width: its tokens per prompt.
  """

  slots: int
  length: int
  places: int
  width: int


class Engine:
  """Continuous batching on the generation mesh.

  Args:
    decoder: the model, with ``constrain`` of the generation layout.
    layout: the generation layout.
    eos_ids: ids that end a row.
    max_rows: most rows that decode together; fewer if the cache of so many would
      not fit into the devices' free memory.
    seed: of all random numbers.
    prefill_tokens: most prompt tokens that a device prefills in one program; longer
      prompts take several calls.
    cache_fraction: of the memory that is free, most that the cache may take.
    longest: most tokens of a prompt, and of a prompt with its response, that any call
      will bring. Where that is not far from what the first one brings, programs are
      made for it at once, not again as rows get longer.
  """

  def __init__(
    self,
    decoder: Decoder,
    layout: Layout,
    *,
    eos_ids: Sequence[int],
    max_rows: int,
    seed: int,
    prefill_tokens: int = 8192,
    cache_fraction: float = 0.8,
    longest: tuple[int, int] = (0, 0),
  ):
    self.decoder = decoder
    self.programs = CompiledPrograms(
      Programs(decoder, layout, tuple(sorted(eos_ids)), seed, chunk=CHUNK)
    )
    self._layout = layout
    self._max_rows = max_rows
    self._prefill_tokens = prefill_tokens
    self._cache_fraction = cache_fraction
    self._longest = longest
    # Of the longest so far: few lengths, few programs.
    self._length = self._width = 0
    self._fitting: dict[tuple[int, int], int] = {}

  def generate(
    self,
    params: Params,
    prompts: Sequence[np.ndarray],
    draw_ids: Sequence[int],
    *,
    n: int,
    max_new: int | Sequence[int],
    sampling: Sampling,
    stop: StopStrings | None = None,
    on_finished: OnFinished | None = None,
  ) -> Completions:
    """Generates n completions of each prompt.

    Args:
      params: generation tree.
      prompts: token ids of each prompt, at least one token.
      draw_ids: one per prompt; with the sample id they key the random numbers.
      n: samples per prompt; row ``i * n + j`` is sample j of prompt i.
      max_new: most tokens of a completion, of all rows or of each of them.
      sampling: what to draw from.
      stop: strings that end a row.
      on_finished: is told the rows that have ended while others still decode.

    Returns:
      ``Completions`` of ``len(prompts) * n`` rows.

    Raises:
      ConfigError: the devices have no room for the cache of two rows.
    """
    count, shards = len(prompts) * n, self._layout.batch_shards
    limits = np.broadcast_to(np.asarray(max_new, np.int32), (count,))
    draws = np.asarray(draw_ids, np.uint32)
    request = Request(prompts, draws, n, limits, sampling, stop)
    lengths = [len(p) for p in prompts]
    sizes = self.sizes(lengths, n, limits)
    self._length, self._width = sizes.length, sizes.width
    schedule = Schedule(
      make_units(lengths, n, limits, shards),
      shards=shards,
      slots=self._fitting_slots(params, sizes) // shards,
      prefill_tokens=self._prefill_tokens,
      widest=sizes.width,
    )
    run = _Run(self.programs, params, request, schedule, sizes.length)
    ended: Sequence[int] = []
    while schedule.waiting or schedule.running:
      run.refill()
      run.shrink()
      told = run.decode()
      if ended and on_finished:  # while the device decodes
        on_finished(ended, run.writer.view())
      ended = run.collect(multihost.fetch(told))
    if ended and on_finished:
      on_finished(ended, run.writer.view())
    return run.writer.trimmed()

  def sizes(self, lengths: Sequence[int], n: int, limits: Sequence[int]) -> Sizes:
    """What a call would compile for.

    Args:
      lengths: of the prompts.
      n: samples per prompt.
      limits: ``[N]``, most new tokens of each row.
    """
    shards = self._layout.batch_shards
    longest = int((np.repeat(lengths, n) + np.asarray(limits)).max())
    prompt, longest = (
      known if found < known <= FORESIGHT * found else found
      for found, known in zip((max(lengths), longest), self._longest, strict=True)
    )
    width = max(self._width, widest(prompt, self._prefill_tokens))
    units = make_units(lengths, n, limits, shards)
    schedule = Schedule(
      units,
      shards=shards,
      slots=len(units),
      prefill_tokens=self._prefill_tokens,
      widest=width,
    )
    return Sizes(
      slots=capacity.wanted_slots(len(lengths) * n, self._max_rows, shards),
      length=max(self._length, bucket(longest), width),
      places=schedule.room(width) * shards,
      width=width,
    )

  def _fitting_slots(self, params: Params, sizes: Sizes) -> int:
    """``sizes.slots``, or as many as fit; found once, so that all steps are alike."""
    key = (sizes.slots, sizes.length)
    if key not in self._fitting:
      slots, shards = sizes.slots, self._layout.batch_shards
      free = capacity.free_bytes(list(self._layout.mesh.devices.flat))
      if free is not None:
        slots = capacity.fitting_slots(
          slots,
          slot_bytes=self.programs.slot_bytes(params, sizes.length),
          free=int(self._cache_fraction * free),
          shards=shards,
        )
      logging.info(
        "rollout: %d slots of %d tokens (%d asked for)", slots, sizes.length, key[0]
      )
      self._fitting[key] = slots
    return self._fitting[key]


class _Run:
  """One call of ``Engine.generate``: the pool and what has come out of it."""

  def __init__(
    self,
    programs: CompiledPrograms,
    params: Params,
    request: Request,
    schedule: Schedule,
    length: int,
  ):
    self._programs, self._params = programs, params
    self._request, self._schedule = request, schedule
    self.writer = Writer(request.limits)
    self._pool: Pool = programs.new_pool(
      params, schedule.slots * schedule.shards, length, request.sampling
    )

  def refill(self) -> None:
    """Prefills prompts and admits their rows until no slot is free or no row waits."""
    while (group := self._schedule.next_group()) is not None:
      group.caches = self._prefill(group)
    for group, admissions in self._schedule.admit().items():
      entries = self._entries(group, admissions)
      self._pool = self._programs.admit(self._pool, group.caches, entries)
      if not group.waiting:
        group.caches = None

  def shrink(self) -> None:
    """Moves the last rows into a smaller pool, where a step is faster."""
    smaller = self._smaller_pool()
    if smaller and not self._schedule.waiting and self._schedule.busiest <= smaller:
      sources = np.array(self._schedule.shrink(smaller), np.int32)
      self._pool = self._programs.shrink(self._pool, sources)

  def decode(self) -> dict[str, jax.Array]:
    """Starts some steps of all slots."""
    self._pool, told = self._programs.decode(
      self._params,
      self._pool,
      self._rows() >= 0,
      CHUNK,
      self._enough(),
      self._request.sampling,
    )
    return told

  def collect(self, told: dict[str, np.ndarray]) -> Sequence[int]:
    """Writes the tokens of the last call down; returns the rows that have ended."""
    schedule = self._schedule
    rows = self._rows()
    ended = set(self.writer.append(rows, told).tolist())
    if self._request.stop is not None:
      ended |= {
        slot
        for slot in np.flatnonzero(rows >= 0).tolist()
        if self.writer.cut(rows[slot], told["count"][slot], self._request.stop)
      }
    return [schedule.release(*divmod(slot, schedule.slots)) for slot in sorted(ended)]

  def _enough(self) -> int:
    """Rows that must end before the host has something to do."""
    if self._schedule.waiting:
      return self._schedule.until_refill
    kept = self._smaller_pool() * self._schedule.shards
    return max(1, len(self._schedule.running) - kept)

  def _smaller_pool(self) -> int:
    """Slots per shard of the next smaller pool; 0: there is none."""
    slots = self._schedule.slots // SHRINK
    return slots if slots >= SMALLEST else 0

  def _rows(self) -> np.ndarray:
    """int64 ``[B]``: the row of each slot, -1 without."""
    rows = np.full((self._schedule.shards, self._schedule.slots), -1)
    for (shard, slot), row in self._schedule.running.items():
      rows[shard, slot] = row
    return rows.reshape(-1)

  def _prefill(self, group: Group) -> Any:
    tokens = self._tokens(group)
    limit = self._schedule.prefill_tokens
    if group.width <= limit:
      return self._programs.prefill(self._params, tokens)
    caches = self._programs.blank(self._params, *tokens.shape)
    for start in range(0, group.width, limit):
      part = tokens[:, start : start + limit]
      caches = self._programs.extend(self._params, caches, part, start)
    return caches

  def _tokens(self, group: Group) -> np.ndarray:
    """int32 ``[G * places, P]``, right-padded."""
    tokens = np.zeros((len(group.units), group.places, group.width), np.int32)
    for shard, units in enumerate(group.units):
      for place, unit in enumerate(units):
        tokens[shard, place, : unit.length] = self._request.prompts[unit.prompt]
    return tokens.reshape(-1, group.width)

  def _entries(
    self, group: Group, admissions: Sequence[Admission]
  ) -> dict[str, np.ndarray]:
    """Arguments of ``Programs.admit``."""
    request, shards = self._request, self._schedule.shards
    size = _size(admissions, self._schedule)
    table = {
      name: np.zeros((shards, size), np.int32)
      for name in ("place", "draw", "sample", "token", "position", "step", "left")
    }
    table["draw"] = table["draw"].astype(np.uint32)
    table["slot"] = np.full((shards, size), self._schedule.slots, np.int32)
    if request.sampling.penalizes:  # what is no token is out of every range
      table["prompt"] = np.full((shards, size, group.width), 2**30, np.int32)
    filled = [0] * shards
    for entry in admissions:
      unit, at = entry.unit, (entry.shard, filled[entry.shard])
      filled[entry.shard] += 1
      prompt = request.prompts[unit.prompt]
      table["slot"][at], table["place"][at] = entry.slot, entry.place
      table["draw"][at] = request.draw_ids[unit.prompt]
      table["sample"][at] = entry.row % request.n
      # The first step feeds the last token of the prompt again.
      table["token"][at], table["position"][at] = prompt[-1], unit.length - 1
      table["left"][at] = request.limits[entry.row]
      if "prompt" in table:
        table["prompt"][at][: unit.length] = prompt
    return table


def _size(admissions: Sequence[Admission], schedule: Schedule) -> int:
  """Rows per shard of an ``admit`` call: two sizes, so that few are compiled."""
  most = max(np.bincount([entry.shard for entry in admissions]))
  few = max(1, schedule.slots // ADMIT)
  return few if most <= few else schedule.slots
