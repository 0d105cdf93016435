"""Ragged rows to static arrays and back; masks come from lengths."""

import build_tiny as tiny
import numpy as np
import pytest

from jaxrl_hybrid.workers import rows


@pytest.mark.parametrize("micro_rows", [1, 2, 3, 4, 8])
def test_pack_and_unpack_are_inverse(micro_rows):
  batch, column = tiny.make_batch(), tiny.per_token(3)
  packed, places = rows.pack(batch, {"x": column}, micro_rows=micro_rows)
  assert {x.shape[1] for x in packed.values()} == {micro_rows}
  back = places.unpack(packed["x"], batch)
  np.testing.assert_array_equal(back, np.where(batch.valid_mask, column, 0))
  ids = places.unpack(packed["tokens"], batch)
  np.testing.assert_array_equal(ids, np.where(batch.valid_mask, batch.response_ids, 0))


def test_rows_are_prompt_response_and_zeros():
  packed, _ = rows.pack(tiny.make_batch(), {}, micro_rows=4)
  width = packed["tokens"].shape[-1]
  assert width == 12  # the longest row has 11 tokens
  rows_of = zip(
    packed["tokens"][0], packed["mask"][0], tiny.PROMPTS, tiny.RESPONSES, strict=True
  )
  for got, mask, prompt, response in rows_of:
    ids = prompt + response
    assert got.tolist() == ids + [0] * (width - len(ids))
    expected = [0] * len(prompt) + [1] * len(response)
    assert mask.tolist() == expected + [0] * (width - len(ids))


def test_an_eos_that_is_also_the_padding_is_trained_once():
  batch = tiny.make_batch([[tiny.EOS, 4, tiny.EOS]], [[5, 6, tiny.EOS]])
  batch.response_ids[:, 3:] = tiny.EOS  # pad == eos
  assert batch.mask[0, :5].tolist() == [1, 1, 1, 0, 0]
  packed, _ = rows.pack(batch, {}, micro_rows=1)
  assert packed["mask"][0, 0].tolist() == [0, 0, 0, 1, 1, 1, 0, 0]
  assert packed["tokens"][0, 0].tolist() == [2, 4, 2, 5, 6, 2, 0, 0]


def test_filler_rows_complete_the_last_micro_batch_outside_of_the_mask():
  packed, _ = rows.pack(tiny.make_batch(), {"x": tiny.per_token(0)}, micro_rows=3)
  assert packed["tokens"].shape[:2] == (2, 3)
  for name in ("tokens", "mask", "x"):
    assert not packed[name].reshape(6, -1)[4:].any()


def test_the_loss_mask_and_the_columns_move_with_their_tokens():
  loss_mask = np.ones((4, 6), bool)
  loss_mask[1, 2] = loss_mask[3] = False
  column = np.arange(24, dtype=np.int32).reshape(4, 6)
  packed, _ = rows.pack(
    tiny.make_batch(loss_mask=loss_mask), {"x": column}, micro_rows=4
  )
  assert packed["mask"][0, 1].tolist() == [0] * 5 + [1, 1, 0, 1, 1, 0, 0]
  assert not packed["mask"][0, 3].any()
  assert packed["x"][0, 1].tolist() == [0] * 5 + [6, 7, 8, 9, 10, 0, 0]
  assert packed["x"].dtype == np.int32


def test_nothing_behind_a_row_gets_in():
  packed, _ = rows.pack(tiny.make_batch(), {"x": tiny.per_token(0)}, micro_rows=2)
  assert not (packed["tokens"] == tiny.JUNK).any()
  assert np.abs(packed["x"]).max() < 100


def ragged(lengths, seed=0):
  """A batch of sequences of these lengths, a third of each a prompt."""
  rng = np.random.default_rng(seed)
  draw = lambda n: rng.integers(3, 30, n).tolist()
  prompts = [draw(max(1, n // 3)) for n in lengths]
  responses = [draw(n - len(p)) for n, p in zip(lengths, prompts)]
  return tiny.make_batch(prompts, responses)


def test_shared_rows_hold_every_token_once_and_count_from_zero():
  lengths = [9, 3, 5, 16, 2, 7, 4, 12, 3, 2]
  batch = ragged(lengths)
  column = np.arange(batch.response_ids.size, dtype=np.float32).reshape(
    batch.response_ids.shape
  )
  packed, places = rows.pack(batch, {"x": column}, micro_rows=2, share=True, real=True)
  assert places.shared and places.used == 4 and places.micro_batches == 2
  assert packed["tokens"].shape == (5, 2, 16)
  flat = {name: x.reshape(-1, 16) for name, x in packed.items()}
  seen = np.zeros((10, 16), int)
  for i, length in enumerate(lengths):
    at = places.row[i], slice(places.start[i], places.start[i] + length)
    assert flat["tokens"][at].tolist() == batch.sequence(i).tolist()
    assert flat[rows.POSITIONS][at].tolist() == list(range(length))
    assert flat["mask"][at].sum() == batch.response_lengths[i]
    assert flat["real"][at].all()
    seen[at] += 1
  assert seen.max() == 1 and seen.sum() == sum(lengths) == flat["real"].sum()
  # What pads a row is a sequence of its own, or its first token would be attended to.
  tails = flat[rows.POSITIONS][seen == 0]
  assert (flat[rows.POSITIONS][:, 0] == 0).all()
  for row, used in zip(flat[rows.POSITIONS], seen.sum(-1)):
    assert row[used:].tolist() == list(range(16 - used))
  assert tails.size
  back = places.unpack(packed["x"], batch)
  np.testing.assert_array_equal(back, np.where(batch.valid_mask, column, 0))


def test_heavy_tailed_lengths_leave_next_to_no_padding():
  """Log-normal lengths, as answers have them: real tokens over all tokens."""
  rng = np.random.default_rng(0)
  drawn = np.exp(rng.normal(np.log(200), 1.0, 1024))
  lengths = np.clip(np.rint(drawn), 2, 1024).astype(int)
  shared = rows.place(lengths, micro_rows=8, share=True)
  apart = rows.place(lengths, micro_rows=8, share=False)
  real = lambda places: (
    lengths.sum() / (places.micro_batches * places.shape[1] * places.shape[2])
  )
  assert real(shared) > 0.97 and real(apart) < 0.3


def test_rows_are_not_shared_where_it_saves_nothing():
  places = rows.place(np.array([15, 16, 15, 9, 14]), micro_rows=2, share=True)
  assert not places.shared and places.row.tolist() == list(range(5))
