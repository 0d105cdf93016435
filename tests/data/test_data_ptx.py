"""Answered prompts: what is encoded, cut, shuffled, and where it goes on."""

import json

import numpy as np
import pytest

from jaxrl_hybrid.data.prompts import PromptDataset, PromptRow
from jaxrl_hybrid.data.ptx import AnsweredStream
from jaxrl_hybrid.errors import DataError

EOS = 9


def tokenizer(texts, *, add_special_tokens):
  assert add_special_tokens is False
  return {"input_ids": [[int(x) for x in text] for text in texts]}


def make(answers=("12", "3", "45678"), **options):
  rows = [
    PromptRow(np.array([1], np.int32), "p", "p", i, {"response": answer})
    for i, answer in enumerate(answers)
  ]
  defaults = dict(
    eos_id=EOS, key="response", batch_size=3, max_length=4, seed=0, shuffle=False
  )
  dataset = PromptDataset("file", rows, len(rows), "p")
  return AnsweredStream(dataset, tokenizer, **defaults | options)


def test_answers_end_with_the_eos_or_are_cut():
  batch = make().next()
  assert [batch.response(i).tolist() for i in range(3)] == [
    [1, 2, EOS],
    [3, EOS],
    [4, 5, 6, 7],
  ]
  assert batch.valid_mask.sum() == 9


def test_it_goes_on_where_it_was():
  stream = make(batch_size=2, shuffle=True)
  stream.next()
  again = make(batch_size=2, shuffle=True)
  again.restore(json.loads(json.dumps(stream.state())))
  for _ in range(3):
    a, b = stream.next(), again.next()
    np.testing.assert_array_equal(a.response_ids, b.response_ids)


@pytest.mark.parametrize("answer", [None, "", 3])
def test_a_row_without_an_answer_is_named(answer):
  with pytest.raises(DataError, match=r"file, row 1: .*'response' \(data.ptx_key\)"):
    make(("12", answer))
