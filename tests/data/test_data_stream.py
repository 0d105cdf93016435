"""The prompt stream: passes, draw ids, curriculum, exact continuation."""

import json
import logging

import numpy as np
import pytest

from jaxrl_hybrid.data.prompts import PromptDataset, PromptRow
from jaxrl_hybrid.data.stream import PromptStream
from jaxrl_hybrid.errors import ConfigError, DataError


def _dataset(n, columns=lambda i: {"level": i}, offset=0):
  rows = [
    PromptRow(np.array([i + offset, 9], np.int32), f"p{i}", f"t{i}", i, columns(i))
    for i in range(n)
  ]
  return PromptDataset("d.jsonl", rows, n, "t0")


def _stream(n=10, *, batch_size=4, seed=0, shuffle=True, curriculum=(), **dataset):
  return PromptStream(
    _dataset(n, **dataset),
    batch_size=batch_size,
    seed=seed,
    shuffle=shuffle,
    curriculum=curriculum,
  )


def _draw(stream, batches, first_step=0):
  drawn = [p for i in range(batches) for p in stream.next(first_step + i)]
  return [p.row_id for p in drawn]


def test_prompts_carry_the_row():
  prompt = _stream(3, batch_size=1, shuffle=False).next(0)[0]
  assert (prompt.prompt, prompt.text, prompt.row_id) == ("p0", "t0", 0)
  assert prompt.ids.tolist() == [0, 9]
  assert prompt.columns == {"level": 0}


def test_columns_of_two_draws_are_separate():
  stream = _stream(1, batch_size=2)
  a, b = stream.next(0)
  a.columns["level"] = 99
  assert b.columns == {"level": 0}


def test_every_pass_is_a_new_permutation_without_gaps():
  rows = _draw(_stream(), 10)  # 40 draws of 10 rows: four passes, batches straddle
  passes = [tuple(rows[i : i + 10]) for i in range(0, 40, 10)]
  assert all(sorted(p) == list(range(10)) for p in passes)
  assert len(set(passes)) == 4


def test_order_depends_on_the_seed_only():
  assert _draw(_stream(seed=3), 5) == _draw(_stream(seed=3), 5)
  assert _draw(_stream(seed=3), 5) != _draw(_stream(seed=4), 5)
  assert _draw(_stream(seed=3), 6) == _draw(_stream(seed=3, batch_size=8), 3)


def test_without_shuffle_the_order_is_kept():
  assert _draw(_stream(3, shuffle=False), 2) == [0, 1, 2, 0, 1, 2, 0, 1]


def test_draw_ids_count_up_without_end():
  stream = _stream(3)
  ids = [p.draw_id for step in range(5) for p in stream.next(step)]
  assert ids == list(range(20))


def test_epoch_counts_completed_passes():
  stream = _stream(8)
  epochs = [stream.epoch]
  for step in range(4):
    stream.next(step)
    epochs.append(stream.epoch)
  assert epochs == [0, 0, 1, 1, 2]


def test_small_data_set_wraps_around_and_says_so_once(caplog):
  stream = _stream(5, batch_size=8)
  with caplog.at_level(logging.INFO):
    batches = [stream.next(0), stream.next(1)]
  assert all(len(batch) == 8 for batch in batches)
  assert len({p.draw_id for batch in batches for p in batch}) == 16
  assert sorted(p.row_id for p in batches[0][:5]) == list(range(5))
  assert caplog.text.count("5 rows for a batch of 8") == 1


def test_no_wrap_message_for_a_data_set_of_one_batch(caplog):
  _draw(_stream(4), 3)
  assert not caplog.records


def test_curriculum_opens_levels_by_step():
  stream = _stream(curriculum=((0, 3), (2, 6), (5, 100)))
  rows = [set(_draw(stream, 1, step)) for step in range(9)]
  assert set.union(*rows[:2]) == {0, 1, 2, 3}
  assert set.union(*rows[2:4]) == {0, 1, 2, 3, 4, 5, 6}
  assert set.union(*rows[5:8]) == set(range(10))


def test_curriculum_change_starts_a_new_pass():
  stream = _stream(curriculum=((0, 5), (1, 6)), batch_size=7)
  stream.next(0)
  assert sorted(_draw(stream, 1, 1)) == list(range(7))


def test_before_the_first_stage_all_rows_are_drawn():
  stream = _stream(curriculum=((5, 0),), batch_size=10)
  assert sorted(_draw(stream, 1, 4)) == list(range(10))
  assert set(_draw(stream, 1, 5)) == {0}


@pytest.mark.parametrize("level", [None, "3", 1.0, True])
def test_curriculum_needs_integer_levels(level):
  columns = {"level": level} if level is not None else {"other": 1}
  with pytest.raises(DataError, match="row 0: .*integer column 'level'"):
    _stream(curriculum=((0, 3),), columns=lambda i: columns)
  _stream(columns=lambda i: columns)  # without a curriculum it does not matter


def test_bad_settings():
  with pytest.raises(ConfigError, match="rising"):
    _stream(curriculum=((5, 1), (5, 2)))
  with pytest.raises(DataError, match="no row for curriculum step 0, level <= -1"):
    _stream(curriculum=((0, -1),))
  with pytest.raises(ConfigError, match="batch_size=0"):
    _stream(batch_size=0)
  with pytest.raises(ConfigError, match="seed=-1"):
    _stream(seed=-1)


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 5, 7])
def test_restore_continues_exactly(cut):
  settings = {"curriculum": ((0, 6), (3, 20)), "seed": 5}
  whole = _stream(**settings)
  expected = [(p.row_id, p.draw_id) for s in range(8) for p in whole.next(s)]
  first = _stream(**settings)
  got = [(p.row_id, p.draw_id) for s in range(cut) for p in first.next(s)]
  state = json.loads(json.dumps(first.state()))
  second = _stream(**settings)
  second.next(0)  # restoring replaces whatever was there
  second.restore(state)
  assert second.epoch == first.epoch
  got += [(p.row_id, p.draw_id) for s in range(cut, 8) for p in second.next(s)]
  assert got == expected


def test_state_is_a_snapshot():
  stream = _stream(curriculum=((0, 100),))
  state = stream.state()
  state["curriculum"][0][0] = 7
  stream.next(0)
  assert state["position"] == 0
  assert stream.state()["curriculum"] == [[0, 100]]


@pytest.mark.parametrize(
  ("other", "key"),
  [
    ({"n": 11}, "count"),
    ({"offset": 1}, "fingerprint"),
    ({"seed": 1}, "seed"),
    ({"shuffle": False}, "shuffle"),
    ({"curriculum": ((0, 3),)}, "curriculum"),
  ],
)
def test_state_of_another_stream_is_refused(other, key):
  state = _stream(**other).state()
  stream = _stream()
  with pytest.raises(DataError, match=rf"does not fit d\.jsonl: {key} was"):
    stream.restore(state)
  assert _draw(stream, 3) == _draw(_stream(), 3)


def test_incomplete_state_is_refused():
  state = _stream().state()
  del state["position"]
  with pytest.raises(DataError, match="lacks position"):
    _stream().restore(state)
