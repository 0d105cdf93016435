"""Reads data rows: jsonl, json, parquet, a saved HF data set, procedural tasks."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from jaxrl_hybrid.data import tasks
from jaxrl_hybrid.errors import DataError

logger = logging.getLogger(__name__)

_BOM = b"\xef\xbb\xbf"
_ACCEPTED = (
  ".jsonl, .json, .parquet, a folder written by datasets' save_to_disk, or "
  "task:NAME?key=value"
)


def read_rows(path: str | Path, *, skip_bad_rows: bool = False) -> list[dict[str, Any]]:
  """Reads all rows of a data source, in file order.

  A UTF-8 byte-order mark, CRLF, blank lines and a missing last newline are fine.

  Args:
    path: a .jsonl or .json file (a list, or one object per line), a .parquet
      file, a folder written by ``save_to_disk``, or ``task:NAME?key=value&...``.
    skip_bad_rows: count, skip and log broken rows instead of stopping at them.

  Returns:
    One dict per row; lists of structs come back as lists of dicts.

  Raises:
    DataError: no such file, unknown kind, broken row ("file:line: ..."), no rows.
  """
  if str(path).startswith(tasks.PREFIX):
    return tasks.reference_rows(str(path))
  file = Path(path).expanduser()
  if not file.exists():
    raise DataError(f"{file}: no such file or folder")
  if file.is_dir():
    rows = _read_saved(file)
  elif file.suffix == ".parquet":
    rows = _read_arrow(file, parquet=True)
  elif file.suffix in (".jsonl", ".json"):
    rows = _read_json(file, skip_bad_rows)
  else:
    raise DataError(f"{file}: unknown suffix {file.suffix!r}; expected {_ACCEPTED}")
  if not rows:
    raise DataError(f"{file}: no rows")
  return rows


def _read_json(file: Path, skip_bad_rows: bool) -> list[dict[str, Any]]:
  raw = file.read_bytes().removeprefix(_BOM)
  rows: list[dict[str, Any]] = []
  bad: list[str] = []
  if file.suffix == ".json" and raw.lstrip().startswith(b"["):
    for i, value in enumerate(_parse_list(raw, file)):
      _keep(value, f"{file}: item {i}", rows, bad)
  else:
    # Not str.splitlines: it would also split at U+2028 inside a JSON string.
    for number, line in enumerate(raw.split(b"\n"), 1):
      if line.strip():
        _parse_line(line, f"{file}:{number}", rows, bad)
  if bad and not skip_bad_rows:
    raise DataError(f"{bad[0]}; mend it, or set data.skip_bad_rows=true")
  if bad:
    total = len(rows) + len(bad)
    logger.warning(
      "%d of %d rows skipped as broken (first: %s)", len(bad), total, bad[0]
    )
    if not rows:
      raise DataError(f"{file}: all {total} rows are broken (first: {bad[0]})")
  return rows


def _parse_list(raw: bytes, file: Path) -> list[Any]:
  try:
    return json.loads(raw.decode("utf-8"))
  except json.JSONDecodeError as e:
    raise DataError(f"{file}:{e.lineno}: not a valid JSON list ({e.msg})") from None
  except UnicodeDecodeError as e:
    number = raw.count(b"\n", 0, e.start) + 1
    raise DataError(f"{file}:{number}: not UTF-8 ({e.reason})") from None
  except RecursionError:
    raise DataError(f"{file}: JSON is nested too deeply") from None


def _parse_line(
  line: bytes, where: str, rows: list[dict[str, Any]], bad: list[str]
) -> None:
  try:
    value = json.loads(line.decode("utf-8"))
  except UnicodeDecodeError as e:
    bad.append(f"{where}: not UTF-8 ({e.reason})")
  except json.JSONDecodeError as e:
    bad.append(f"{where}: not valid JSON ({e.msg}, column {e.colno})")
  except RecursionError:
    bad.append(f"{where}: JSON is nested too deeply")
  else:
    _keep(value, where, rows, bad)


def _keep(value: Any, where: str, rows: list[dict[str, Any]], bad: list[str]) -> None:
  if isinstance(value, dict):
    rows.append(value)
  else:
    bad.append(f"{where}: expected an object {{...}}, got {type(value).__name__}")


def _read_saved(folder: Path) -> list[dict[str, Any]]:
  """Reads a folder written by ``save_to_disk``; it must hold one split."""
  splits_file, state_file = folder / "dataset_dict.json", folder / "state.json"
  if splits_file.is_file():
    splits = _saved_field(splits_file, "splits")
    raise DataError(
      f"{folder}: holds several splits ({', '.join(map(str, splits))}); name the "
      f"folder of one split, such as {folder / str(splits[0]) if splits else folder}"
    )
  if not state_file.is_file():
    raise DataError(f"{folder}: a folder without state.json; expected {_ACCEPTED}")
  rows: list[dict[str, Any]] = []
  for entry in _saved_field(state_file, "_data_files"):
    rows += _read_arrow(folder / entry["filename"], parquet=False)
  return rows


def _saved_field(file: Path, key: str) -> list[Any]:
  try:
    return list(json.loads(file.read_text("utf-8"))[key])
  except (ValueError, KeyError, TypeError) as e:
    raise DataError(f"{file}: expected a JSON object with {key!r} ({e!r})") from None


def _read_arrow(file: Path, *, parquet: bool) -> list[dict[str, Any]]:
  try:
    if parquet:
      table = pa.parquet.ParquetFile(file).read()
    else:
      with pa.memory_map(str(file)) as source:
        table = pa.ipc.open_stream(source).read_all()
  except (pa.ArrowException, OSError) as e:
    kind = "a parquet file" if parquet else "an Arrow stream"
    raise DataError(f"{file}: cannot be read as {kind} ({e})") from None
  return table.to_pylist()
