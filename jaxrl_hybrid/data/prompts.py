"""Rows to a checked, encoded data set of prompts."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_hybrid.data.template import PromptEncoder
from jaxrl_hybrid.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

OVERLONG = ("drop", "truncate_left", "error")  # what to do with long prompts


@dataclasses.dataclass(frozen=True)
class PromptRow:
  """One encoded data row.

  Attributes:
    ids: int32 ``[P]``, read-only.
    prompt: the row's prompt as given: a string or a list of messages.
    text: the prompt as the model sees it (after template and truncation).
    row_id: index of the row in the source, counted from 0, dropped rows included.
    columns: all other columns of the row.
  """

  ids: np.ndarray
  prompt: Any
  text: str
  row_id: int
  columns: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class PromptDataset:
  """Encoded prompts; never empty.

  Attributes:
    name: what messages call it, such as the file's path.
    prompts: the rows that are used, in the order of the source.
    total: number of rows of the source, unused ones included.
    first: the first prompt, decoded from its ids, special tokens shown.
  """

  name: str
  prompts: list[PromptRow]
  total: int
  first: str

  def __len__(self) -> int:
    return len(self.prompts)

  @functools.cached_property
  def fingerprint(self) -> str:
    """Hex hash of all ids in order; differs as soon as one prompt differs."""
    digest = hashlib.sha256()
    for row in self.prompts:
      digest.update(len(row.ids).to_bytes(8, "little"))
      digest.update(row.ids.astype("<i4").tobytes())
    return digest.hexdigest()

  def describe(self) -> str:
    """Counts, quantiles of the prompt lengths and the first prompt in full."""
    lengths = [len(row.ids) for row in self.prompts]
    names = ("min", "median", "90%", "99%", "max")
    values = np.quantile(lengths, (0, 0.5, 0.9, 0.99, 1))
    quantiles = ", ".join(f"{n} {v:,.0f}" for n, v in zip(names, values, strict=True))
    return (
      f"{self.name}: {len(self):,} prompts of {self.total:,} rows\n"
      f"prompt tokens: {quantiles}\n"
      f"first prompt, as the model sees it (row {self.prompts[0].row_id}):\n"
      f"{self.first}"
    )


def build_dataset(
  rows: Sequence[Mapping[str, Any]],
  encoder: PromptEncoder,
  *,
  prompt_key: str,
  max_prompt_length: int,
  overlong: str,
  name: str,
  skip_bad_rows: bool = False,
) -> PromptDataset:
  """Checks and encodes rows; string prompts and message lists may be mixed.

  Args:
    rows: the rows, as ``read_rows`` gives them.
    encoder: turns a prompt into ids.
    prompt_key: the column that holds the prompt.
    max_prompt_length: limit in tokens, special tokens included.
    overlong: "drop" longer rows, "truncate_left" (keep the end, and the BOS that
      the tokenizer adds), or "error".
    name: what messages call the data set, such as the file's path.
    skip_bad_rows: count, skip and log rows without a usable prompt.

  Raises:
    DataError: a row without a usable prompt, a long row with "error", or no row
      left. Row numbers count from 0.
    ConfigError: message lists without a chat template, or a bad argument.
  """
  _check_arguments(max_prompt_length, overlong)
  bad: list[str] = []
  encoded = _encode(rows, encoder, prompt_key, name, bad)
  if bad and not skip_bad_rows:
    raise DataError(bad[0])
  _report_bad(name, bad, len(rows), len(encoded))
  fitting = _limit(encoded, encoder, max_prompt_length, overlong, name, len(rows))
  for row in fitting:
    row.ids.flags.writeable = False  # shared by all draws of the row
  first = encoder.tokenizer.decode(fitting[0].ids.tolist())
  return PromptDataset(name, fitting, len(rows), first)


def _encode(
  rows: Sequence[Mapping[str, Any]],
  encoder: PromptEncoder,
  key: str,
  name: str,
  bad: list[str],
) -> list[PromptRow]:
  """Encodes the good rows and appends a message for each other row to ``bad``."""
  kept: list[tuple[int, Any, str]] = []
  for i, row in enumerate(rows):
    where = f"{name}, row {i} (counted from 0)"
    try:
      prompt = prompt_of(row, key)
      kept.append((i, prompt, encoder.render(prompt)))
    except ConfigError as e:
      raise ConfigError(f"{where}: {e}") from e
    except DataError as e:
      bad.append(f"{where}: {e}")
  all_ids = encoder.tokenize([k[1] for k in kept], [k[2] for k in kept])
  encoded = []
  for (i, prompt, text), ids in zip(kept, all_ids, strict=True):
    if len(ids):
      columns = {k: v for k, v in rows[i].items() if k != key}
      encoded.append(PromptRow(ids, prompt, text, i, columns))
    else:
      bad.append(f"{name}, row {i} (counted from 0): the prompt is empty")
  return encoded


def _check_arguments(max_prompt_length: int, overlong: str) -> None:
  if overlong not in OVERLONG:
    raise ConfigError(f"data.overlong_prompts={overlong!r}, expected one of {OVERLONG}")
  if max_prompt_length < 1:
    raise ConfigError(
      f"data.max_prompt_length={max_prompt_length}, expected at least 1"
    )


def prompt_of(row: Mapping[str, Any], key: str) -> Any:
  """The column ``key`` of a row.

  Raises:
    DataError: there is none; names the closest.
  """
  if not isinstance(row, Mapping):
    raise DataError(f"expected columns by name, got {type(row).__name__}")
  if key in row:
    return row[key]
  keys = [str(k) for k in row]
  if not keys:
    raise DataError(f"no column {key!r}; the row is empty")
  by_lower = {k.lower(): k for k in keys}
  close = difflib.get_close_matches(key.lower(), by_lower, 1, cutoff=0)
  raise DataError(
    f"no column {key!r}; found {', '.join(keys)}; the closest is "
    f"{by_lower[close[0]]!r}: mend the row or set data.prompt_key"
  )


def _report_bad(name: str, bad: list[str], total: int, good: int) -> None:
  if bad:
    logger.warning("%d of %d rows skipped as bad (first: %s)", len(bad), total, bad[0])
  if not good:
    reason = f"all {total} rows are bad (first: {bad[0]})" if bad else "no rows"
    raise DataError(f"{name}: {reason}")


def _limit(
  rows: list[PromptRow],
  encoder: PromptEncoder,
  limit: int,
  overlong: str,
  name: str,
  total: int,
) -> list[PromptRow]:
  """Applies ``overlong`` to the rows with more than ``limit`` tokens."""
  long = [row for row in rows if len(row.ids) > limit]
  if not long:
    return rows
  longest = max(long, key=lambda row: len(row.ids))
  size = f"longest {len(longest.ids):,} > {limit:,}"
  if overlong == "error":
    raise DataError(
      f"{name}, row {long[0].row_id}: {len(long[0].ids):,} tokens exceed "
      f"data.max_prompt_length={limit} ({len(long)} of {total} rows, {size}); raise "
      "it, or set data.overlong_prompts to drop or truncate_left"
    )
  if overlong == "drop":
    logger.warning("%s: %d of %d rows dropped (%s)", name, len(long), total, size)
    if len(long) == len(rows):
      raise DataError(
        f"{name}: no row is left, {len(long)} of {total} rows dropped ({size}); "
        "raise data.max_prompt_length or set data.overlong_prompts=truncate_left"
      )
    return [row for row in rows if len(row.ids) <= limit]
  logger.warning(
    "%s: %d of %d rows truncated on the left (%s)", name, len(long), total, size
  )
  return [
    _truncate(row, encoder, limit) if len(row.ids) > limit else row for row in rows
  ]


def _truncate(row: PromptRow, encoder: PromptEncoder, limit: int) -> PromptRow:
  """Keeps the last ids, behind the prefix (BOS) if the row began with it."""
  keep = len(encoder.prefix)
  if keep >= limit or row.ids[:keep].tolist() != encoder.prefix:
    keep = 0
  ids = np.concatenate([row.ids[:keep], row.ids[len(row.ids) - limit + keep :]])
  text = encoder.tokenizer.decode(ids.tolist())
  return dataclasses.replace(row, ids=ids, text=text)
