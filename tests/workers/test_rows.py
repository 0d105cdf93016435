"""Ragged rows to static arrays and back; masks come from lengths."""

import build_tiny as tiny
import numpy as np
import pytest

from jaxrl_hybrid.workers import rows


@pytest.mark.parametrize("micro_rows", [1, 2, 3, 4, 8])
def test_pack_and_unpack_are_inverse(micro_rows):
  batch, column = tiny.make_batch(), tiny.per_token(3)
  packed = rows.pack(batch, {"x": column}, micro_rows=micro_rows)
  assert {x.shape[1] for x in packed.values()} == {micro_rows}
  back = rows.unpack(packed["x"], batch)
  np.testing.assert_array_equal(back, np.where(batch.valid_mask, column, 0))
  ids = rows.unpack(packed["tokens"], batch)
  np.testing.assert_array_equal(ids, np.where(batch.valid_mask, batch.response_ids, 0))


def test_rows_are_prompt_response_and_zeros():
  packed = rows.pack(tiny.make_batch(), {}, micro_rows=4)
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
  packed = rows.pack(batch, {}, micro_rows=1)
  assert packed["mask"][0, 0].tolist() == [0, 0, 0, 1, 1, 1, 0, 0]
  assert packed["tokens"][0, 0].tolist() == [2, 4, 2, 5, 6, 2, 0, 0]


def test_filler_rows_complete_the_last_micro_batch_outside_of_the_mask():
  packed = rows.pack(tiny.make_batch(), {"x": tiny.per_token(0)}, micro_rows=3)
  assert packed["tokens"].shape[:2] == (2, 3)
  for name in ("tokens", "mask", "x"):
    assert not packed[name].reshape(6, -1)[4:].any()


def test_the_loss_mask_and_the_columns_move_with_their_tokens():
  loss_mask = np.ones((4, 6), bool)
  loss_mask[1, 2] = loss_mask[3] = False
  column = np.arange(24, dtype=np.int32).reshape(4, 6)
  packed = rows.pack(tiny.make_batch(loss_mask=loss_mask), {"x": column}, micro_rows=4)
  assert packed["mask"][0, 1].tolist() == [0] * 5 + [1, 1, 0, 1, 1, 0, 0]
  assert not packed["mask"][0, 3].any()
  assert packed["x"][0, 1].tolist() == [0] * 5 + [6, 7, 8, 9, 10, 0, 0]
  assert packed["x"].dtype == np.int32


def test_nothing_behind_a_row_gets_in():
  packed = rows.pack(tiny.make_batch(), {"x": tiny.per_token(0)}, micro_rows=2)
  assert not (packed["tokens"] == tiny.JUNK).any()
  assert np.abs(packed["x"]).max() < 100
