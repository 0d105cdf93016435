"""Slots, queue and groups: no device."""

import collections
import random

import pytest

from jaxrl_hybrid.rollout.schedule import Schedule, make_units, widest, width_for


def test_units_are_sorted_by_limit_and_keep_samples_together():
  units = make_units([3, 5], 2, [4, 4, 9, 1], shards=2)
  assert [(u.prompt, u.rows, u.length) for u in units] == [
    (1, (2, 3), 5),
    (0, (0, 1), 3),
  ]


@pytest.mark.parametrize("prompts,n,shards", [(1, 8, 4), (3, 5, 4), (2, 7, 8)])
def test_few_prompts_are_spread_over_all_shards(prompts, n, shards):
  units = make_units([1] * prompts, n, [1] * (prompts * n), shards)
  rows = sorted(row for u in units for row in u.rows)
  assert rows == list(range(prompts * n))
  assert all(row // n == u.prompt for u in units for row in u.rows)
  most = max(len(u.rows) for u in units)
  assert most == -(-prompts * n // shards)


@pytest.mark.parametrize(
  "length,limit,width",
  [(3, 64, 8), (9, 64, 12), (60, 64, 64), (64, 64, 64), (65, 64, 128), (300, 64, 320)],
)
def test_short_prompts_have_bucketed_widths_and_long_ones_whole_chunks(
  length, limit, width
):
  assert widest(length, limit) == width


@pytest.mark.parametrize(
  "length,most,width",
  [(1, 1024, 16), (17, 1024, 64), (64, 1024, 64), (300, 1024, 1024), (3, 12, 12)],
)
def test_programs_are_of_few_widths(length, most, width):
  assert width_for(length, most) == width


def simulate(lengths, n, limits, *, shards, slots, prefill_tokens, finish):
  """Runs a schedule; rows end when ``finish`` says so. Returns (order, groups)."""
  units = make_units(lengths, n, limits, shards)
  schedule = Schedule(
    units,
    shards=shards,
    slots=slots,
    prefill_tokens=prefill_tokens,
    widest=widest(max(lengths), prefill_tokens),
  )
  order, groups = [], []
  while schedule.waiting or schedule.running:
    while (group := schedule.next_group()) is not None:
      groups.append(group)
      assert len(group.units) == shards
      assert all(len(taken) <= group.places for taken in group.units)
      assert group.places == 1 or group.places * group.width <= prefill_tokens
    for group, admissions in schedule.admit().items():
      for entry in admissions:
        assert group.units[entry.shard][entry.place] is entry.unit
        assert entry.row in entry.unit.rows
        order.append((entry.shard, entry.row))
    assert len(schedule.running) <= shards * slots
    assert schedule.running, "rows wait, slots are free, and nothing runs"
    for where in finish(schedule):
      schedule.release(*where)
  return order, groups


@pytest.mark.parametrize("seed", range(30))
def test_every_row_runs_once_and_every_prompt_is_prefilled_once(seed):
  rng = random.Random(seed)
  count, n = rng.randint(1, 30), rng.randint(1, 9)
  shards, slots = rng.choice([1, 2, 4]), rng.randint(2, 9)
  lengths = [rng.randint(1, 70) for _ in range(count)]
  limits = [rng.randint(1, 9) for _ in range(count * n)]

  def finish(schedule):
    running = list(schedule.running)
    return rng.sample(running, rng.randint(1, len(running)))

  order, groups = simulate(
    lengths, n, limits, shards=shards, slots=slots, prefill_tokens=32, finish=finish
  )
  assert sorted(row for _, row in order) == list(range(count * n))
  prefilled = collections.Counter(
    u.rows for group in groups for units in group.units for u in units
  )
  assert set(prefilled.values()) == {1}
  assert all(group.waiting == 0 for group in groups)


def test_a_shard_that_is_done_takes_what_waits_for_another():
  """Shard 0 gets one long row; shard 1 gets all of the others."""
  limits = [100] + [1] * 9
  clock = collections.Counter()

  def finish(schedule):
    ended = []
    for where, row in schedule.running.items():
      clock[row] += 1
      if clock[row] == limits[row]:
        ended.append(where)
    return ended

  order, _ = simulate(
    [4] * 10, 1, limits, shards=2, slots=1, prefill_tokens=32, finish=finish
  )
  by_shard = collections.Counter(shard for shard, _ in order)
  assert sorted(by_shard.values()) == [1, 9]


def test_few_program_sizes():
  rng = random.Random(0)
  sizes = set()

  def finish(schedule):
    return rng.sample(list(schedule.running), 1)

  _, groups = simulate(
    [20] * 100, 1, [5] * 100, shards=2, slots=8, prefill_tokens=256, finish=finish
  )
  sizes = {(group.places, group.width) for group in groups}
  assert len(sizes) <= 2


def test_shrinking_keeps_every_row_on_its_shard():
  units = make_units([4] * 16, 1, [5] * 16, 2)
  schedule = Schedule(units, shards=2, slots=8, prefill_tokens=64, widest=8)
  while schedule.next_group():
    pass
  schedule.admit()
  for where in [*((0, slot) for slot in range(7)), *((1, s) for s in range(6))]:
    schedule.release(*where)
  before = dict(schedule.running)
  assert set(before) == {(0, 7), (1, 6), (1, 7)}
  sources = schedule.shrink(2)
  for (shard, slot), row in schedule.running.items():
    assert before[shard, sources[shard][slot]] == row
  assert sorted(schedule.running.values()) == sorted(before.values())
  assert [len(set(old)) for old in sources] == [2, 2]
  (spare,) = set(sources[0]) - {7}
  assert (0, spare) not in before, "a new slot without a row comes from an idle one"
