"""Rows to data sets: bad rows, long rows, and what is printed at start."""

import logging

import numpy as np
import pytest

from jaxrl_hybrid.data.files import read_rows
from jaxrl_hybrid.data.prompts import build_dataset
from jaxrl_hybrid.data.template import PromptEncoder
from jaxrl_hybrid.errors import ConfigError, DataError

CHAT = [{"role": "user", "content": "hello"}]


def _build(rows, tokenizer, *, system_prompt=None, **options):
  encoder = PromptEncoder(tokenizer, chat_template=None, system_prompt=system_prompt)
  settings = {
    "prompt_key": "prompt",
    "max_prompt_length": 512,
    "overlong": "drop",
    "name": "d.jsonl",
  }
  return build_dataset(rows, encoder, **{**settings, **options})


def test_rows_keep_prompt_text_id_and_columns(chat_tokenizer):
  rows = [
    {"prompt": "hello", "ground_truth": "x", "level": 1},
    {"prompt": CHAT, "ground_truth": "y", "level": 0},
  ]
  dataset = _build(rows, chat_tokenizer)
  assert len(dataset) == 2
  first, second = dataset.prompts
  assert first.ids.dtype == np.int32
  assert first.ids.tolist() == [1, 7]
  assert (first.prompt, first.text, first.row_id) == ("hello", "hello", 0)
  assert first.columns == {"ground_truth": "x", "level": 1}
  assert (second.prompt, second.row_id) == (CHAT, 1)
  assert second.text == "<s><|system|> you <|user|> hello <|assistant|>"


def test_prompt_ids_are_shared_so_read_only(chat_tokenizer):
  dataset = _build([{"prompt": "hello"}], chat_tokenizer)
  with pytest.raises(ValueError, match="read-only"):
    dataset.prompts[0].ids[0] = 3


def test_missing_key_lists_keys_and_the_closest(chat_tokenizer):
  rows = [{"prompt": "hello"}, {"Promt": "hello", "answer": "x"}]
  with pytest.raises(DataError) as error:
    _build(rows, chat_tokenizer)
  for part in ("row 1", "'prompt'", "Promt, answer", "closest is 'Promt'"):
    assert part in str(error.value)


@pytest.mark.parametrize(
  ("row", "reason"),
  [
    ({"prompt": None}, "null"),
    ({"prompt": ["hello", "world"]}, "item 0 is of type str"),
    ({"prompt": 3}, "of type int"),
    ({"prompt": []}, "empty list"),
    ({}, "the row is empty"),
    ("hello", "expected columns by name"),
  ],
)
def test_bad_prompts_are_named_by_row(chat_tokenizer, row, reason):
  rows = [{"prompt": "hello"}, {"prompt": CHAT}, row]
  with pytest.raises(DataError, match=rf"d\.jsonl, row 2 .*{reason}"):
    _build(rows, chat_tokenizer)


def test_empty_prompt_needs_a_bos(make_tokenizer):
  with pytest.raises(DataError, match="row 0 .*prompt is empty"):
    _build([{"prompt": ""}], make_tokenizer())
  dataset = _build([{"prompt": ""}], make_tokenizer("<s> $A"))
  assert dataset.prompts[0].ids.tolist() == [1]


def test_skip_bad_rows_counts_and_keeps_row_ids(chat_tokenizer, caplog):
  rows = [{"prompt": None}, {"prompt": "hello"}, {"x": 1}, {"prompt": CHAT}]
  dataset = _build(rows, chat_tokenizer, skip_bad_rows=True)
  assert [row.row_id for row in dataset.prompts] == [1, 3]
  assert "2 of 4 rows skipped" in caplog.text
  with pytest.raises(DataError, match="all 2 rows are bad"):
    _build([rows[0], rows[2]], chat_tokenizer, skip_bad_rows=True)
  with pytest.raises(DataError, match="no rows"):
    _build([], chat_tokenizer)


def test_missing_template_names_the_row_and_is_never_skipped(make_tokenizer):
  rows = [{"prompt": "hello"}, {"prompt": CHAT}]
  for skip in (False, True):
    with pytest.raises(ConfigError, match=r"row 1 .*data\.chat_template=<file>"):
      _build(rows, make_tokenizer(), skip_bad_rows=skip)


def test_dirty_file_from_end_to_end(tmp_path, chat_tokenizer):
  path = tmp_path / "dirty.jsonl"
  path.write_bytes(
    b'\xef\xbb\xbf{"prompt": "hello"}\r\n\r\n{broken\r\n{"x": 1}\r\n'
    b'{"prompt": null}\r\n{"prompt": [{"role": "user", "content": "hello"}]}'
  )
  with pytest.raises(DataError, match=r"dirty\.jsonl:3"):
    read_rows(path)
  rows = read_rows(path, skip_bad_rows=True)
  dataset = _build(rows, chat_tokenizer, skip_bad_rows=True)
  assert [row.prompt for row in dataset.prompts] == ["hello", CHAT]


def _long_rows(tokens):
  return [{"prompt": " ".join(["hello"] * n)} for n in tokens]


def test_overlong_rows_are_dropped_with_the_count(make_tokenizer, caplog):
  with caplog.at_level(logging.INFO):
    dataset = _build(_long_rows([512, 5120, 3]), make_tokenizer())
  assert "1 of 3 rows dropped (longest 5,120 > 512)" in caplog.text
  assert [row.row_id for row in dataset.prompts] == [0, 2]


def test_limit_counts_special_tokens(make_tokenizer):
  dataset = _build(_long_rows([3, 4]), make_tokenizer("<s> $A"), max_prompt_length=4)
  assert [row.row_id for row in dataset.prompts] == [0]


def test_all_dropped_is_an_error(make_tokenizer):
  with pytest.raises(DataError, match=r"2 of 2 rows dropped.*max_prompt_length"):
    _build(_long_rows([600, 700]), make_tokenizer())


def test_overlong_error_names_the_row(make_tokenizer):
  rows = _long_rows([3, 5120])
  with pytest.raises(DataError, match=r"row 1.*5,120 tokens.*=512"):
    _build(rows, make_tokenizer(), overlong="error")
  assert len(_build(rows[:1], make_tokenizer(), overlong="error")) == 1


def test_truncate_left_keeps_the_end(make_tokenizer, caplog):
  rows = [{"prompt": "hello world ? you"}, {"prompt": "you"}]
  options = {"overlong": "truncate_left", "max_prompt_length": 2}
  dataset = _build(rows, make_tokenizer(), **options)
  assert [row.ids.tolist() for row in dataset.prompts] == [[11, 10], [10]]
  assert dataset.prompts[0].text == "? you"
  assert dataset.prompts[0].prompt == "hello world ? you"
  assert "1 of 2 rows truncated on the left (longest 4 > 2)" in caplog.text


def test_truncate_left_keeps_the_bos_that_the_tokenizer_adds(chat_tokenizer):
  options = {"overlong": "truncate_left", "max_prompt_length": 3}
  rows = [{"prompt": "hello world ? you"}, {"prompt": CHAT}]
  dataset = _build(rows, chat_tokenizer, **options)
  assert [row.ids.tolist() for row in dataset.prompts] == [[1, 11, 10], [1, 7, 6]]
  one = _build(rows, chat_tokenizer, overlong="truncate_left", max_prompt_length=1)
  assert one.prompts[0].ids.tolist() == [10]  # no room for both: the prompt's end


def test_bad_arguments(chat_tokenizer):
  with pytest.raises(ConfigError, match=r"data\.overlong_prompts='cut'"):
    _build([{"prompt": "hello"}], chat_tokenizer, overlong="cut")
  with pytest.raises(ConfigError, match="max_prompt_length=0"):
    _build([{"prompt": "hello"}], chat_tokenizer, max_prompt_length=0)


@pytest.mark.parametrize(
  ("system_prompt", "shown"), [("sys", "<|system|> sys"), (None, "<|system|> you")]
)
def test_describe_shows_the_system_prompt(chat_tokenizer, system_prompt, shown):
  rows = [{"prompt": CHAT}, {"prompt": "hello"}, *_long_rows([600])]
  text = _build(rows, chat_tokenizer, system_prompt=system_prompt).describe()
  assert f"<s> {shown} <|user|> hello" in text
  assert "2 prompts of 3 rows" in text
  assert "min 2" in text
  assert "max 6" in text


def test_fingerprint_follows_ids_and_order(make_tokenizer):
  def fingerprint(*prompts):
    return _build([{"prompt": p} for p in prompts], make_tokenizer()).fingerprint

  assert fingerprint("hello", "world") == fingerprint("hello", "world")
  assert fingerprint("hello", "world") != fingerprint("world", "hello")
  assert fingerprint("hello you", "world") != fingerprint("hello", "you world")
