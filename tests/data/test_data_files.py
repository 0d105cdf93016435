"""Reading rows: every kind of file, clean and dirty."""

import json
import logging

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest

from jaxrl_hybrid.data.files import read_rows
from jaxrl_hybrid.errors import DataError

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def _write(path, data: bytes):
  path.write_bytes(data)
  return path


def test_jsonl_with_bom_crlf_blank_lines_and_no_last_newline(tmp_path):
  data = b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n   \n{"prompt": "b\xe2\x80\xa8c"}'
  rows = read_rows(_write(tmp_path / "d.jsonl", data))
  assert rows == [{"prompt": "a"}, {"prompt": "b\u2028c"}]


def test_broken_line_is_named_by_file_and_line(tmp_path):
  path = _write(tmp_path / "d.jsonl", b'{"prompt": "a"}\n\n{"prompt": \n{"x": 1}\n')
  with pytest.raises(DataError, match=r"d\.jsonl:3: not valid JSON.*skip_bad_rows"):
    read_rows(path)


@pytest.mark.parametrize(
  ("line", "reason"),
  [
    (b'{"prompt": "\xff"}', "not UTF-8"),
    (b"[1, 2]", "expected an object"),
    (b"null", "expected an object"),
    (b'{"a":' * 100_000, "JSON is nested too deeply|not valid JSON"),
  ],
  ids=["not-utf8", "list", "null", "deep"],
)
def test_other_broken_lines(tmp_path, line, reason):
  path = _write(tmp_path / "d.jsonl", b'{"prompt": "a"}\n' + line)
  with pytest.raises(DataError, match=rf"d\.jsonl:2: ({reason})"):
    read_rows(path)


def test_skip_bad_rows_counts_and_logs(tmp_path, caplog):
  path = _write(tmp_path / "d.jsonl", b'{"prompt": "a"}\n{oops\n7\n{"prompt": "b"}')
  with caplog.at_level(logging.WARNING):
    rows = read_rows(path, skip_bad_rows=True)
  assert [row["prompt"] for row in rows] == ["a", "b"]
  assert "2 of 4 rows skipped" in caplog.text
  assert "d.jsonl:2" in caplog.text


def test_all_rows_broken_is_an_error_even_when_skipping(tmp_path):
  path = _write(tmp_path / "d.jsonl", b"{oops\n")
  with pytest.raises(DataError, match="all 1 rows are broken"):
    read_rows(path, skip_bad_rows=True)


def test_json_holds_a_list_or_lines(tmp_path):
  expected = [{"prompt": "a"}, {"prompt": CHAT}]
  as_list = b"\xef\xbb\xbf\n" + json.dumps(expected, indent=1).encode()
  as_lines = b"\n".join(json.dumps(row).encode() for row in expected)
  assert read_rows(_write(tmp_path / "list.json", as_list)) == expected
  assert read_rows(_write(tmp_path / "lines.json", as_lines)) == expected


def test_broken_json_list_names_the_place(tmp_path):
  path = _write(tmp_path / "d.json", b'[\n{"prompt": "a"},\n{"prompt" "b"}\n]')
  with pytest.raises(DataError, match=r"d\.json:3: not a valid JSON list"):
    read_rows(path)
  path = _write(tmp_path / "e.json", b'[{"prompt": "a"}, "b"]')
  with pytest.raises(DataError, match=r"e\.json: item 1: expected an object"):
    read_rows(path)
  assert read_rows(path, skip_bad_rows=True) == [{"prompt": "a"}]
  with pytest.raises(DataError, match=r"g\.json: (JSON is nested|.*not a valid)"):
    read_rows(_write(tmp_path / "g.json", b"[" * 100_000))
  path = _write(tmp_path / "f.json", b'[\n{"prompt": "\xff"}]')
  with pytest.raises(DataError, match=r"f\.json:2: not UTF-8"):
    read_rows(path)


def test_parquet_gives_message_lists_as_dicts(tmp_path):
  rows = [{"prompt": CHAT, "level": 1}, {"prompt": CHAT[:1], "level": 2}]
  path = tmp_path / "d.parquet"
  pa.parquet.write_table(pa.Table.from_pylist(rows), path)
  assert read_rows(path) == rows
  assert type(read_rows(path)[0]["prompt"][0]) is dict


def test_broken_parquet(tmp_path):
  with pytest.raises(DataError, match=r"d\.parquet: cannot be read as a parquet"):
    read_rows(_write(tmp_path / "d.parquet", b"not parquet"))


def _save_to_disk(folder, shards):
  """What ``datasets.Dataset.save_to_disk`` leaves in a folder."""
  folder.mkdir()
  names = [f"data-{i:05d}-of-{len(shards):05d}.arrow" for i in range(len(shards))]
  for name, rows in zip(names, shards, strict=True):
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(folder / name), "wb") as sink:
      with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
  state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
  (folder / "state.json").write_text(json.dumps(state))


def test_saved_folder_reads_its_shards_in_order(tmp_path):
  shards = [[{"prompt": CHAT}], [{"prompt": CHAT[:1]}, {"prompt": CHAT}]]
  _save_to_disk(tmp_path / "d", shards)
  assert read_rows(tmp_path / "d") == [*shards[0], *shards[1]]


def test_saved_folder_with_splits_says_which(tmp_path):
  (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
  with pytest.raises(DataError, match=r"train, test.*folder of one split"):
    read_rows(tmp_path)


def test_damaged_saved_folders(tmp_path):
  with pytest.raises(DataError, match=r"folder without state\.json"):
    read_rows(tmp_path)
  (tmp_path / "state.json").write_text("{}")
  with pytest.raises(DataError, match=r"state\.json: expected.*_data_files"):
    read_rows(tmp_path)
  (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "x.arrow"}]}')
  with pytest.raises(DataError, match=r"x\.arrow: cannot be read"):
    read_rows(tmp_path)
  (tmp_path / "x.arrow").write_bytes(b"not arrow")
  with pytest.raises(DataError, match=r"x\.arrow: cannot be read as an Arrow stream"):
    read_rows(tmp_path)


def test_missing_unknown_and_empty_files(tmp_path):
  with pytest.raises(DataError, match="no such file"):
    read_rows(tmp_path / "none.jsonl")
  with pytest.raises(DataError, match=r"unknown suffix '\.csv'; expected \.jsonl"):
    read_rows(_write(tmp_path / "d.csv", b"a,b"))
  with pytest.raises(DataError, match="no rows"):
    read_rows(_write(tmp_path / "d.jsonl", b"\n\n"))


def test_task_reference_is_a_path():
  rows = read_rows("task:symbols?n=3&seed=1")
  assert len(rows) == 3
  assert rows[0]["data_source"] == "symbols"
