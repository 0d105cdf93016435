"""What wrappers hand each other: prompts as they come, batches with a tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_hybrid.data.template import PromptEncoder
from jaxrl_hybrid.errors import ConfigError, DataError
from jaxrl_hybrid.types import Batch, Prompt
from jaxrl_hybrid.workers.generator import RolloutSettings


@dataclasses.dataclass(frozen=True)
class Sequences(Batch):
  """A batch that knows the tokenizer of its ids (None: there is none)."""

  tokenizer: Any = None


class PromptReader:
  """Makes a ``Prompt`` of a string, a list of messages or token ids.

  Args:
    encoder: None: only token ids can be read.
    string_prompts: ``plain`` or ``user``, as in the config.
    max_length: most tokens of a prompt.
    vocab_size: of the model; token ids are below it.
  """

  def __init__(
    self,
    encoder: PromptEncoder | None,
    *,
    string_prompts: str,
    max_length: int,
    vocab_size: int,
  ):
    self._encoder, self._max_length = encoder, max_length
    self._vocab_size = vocab_size
    self._as_user = string_prompts == "user"
    self._draws = 0

  def read(
    self, prompts: Sequence[Any], *, max_length: int | None = None
  ) -> list[Prompt]:
    """Every call gives its prompts new draw ids, so that their samples differ.

    Args:
      prompts: a list of them.
      max_length: most tokens of a prompt, if another number than the reader's.

    Raises:
      DataError: no prompt, an empty or too long one, ids that the model does not
        have, or another form.
      ConfigError: text without a tokenizer or messages without a chat template.
    """
    if isinstance(prompts, str) or not len(prompts):
      raise DataError(f"prompts: expected a list of prompts, got {prompts!r:.80}")
    key, most = "data.max_prompt_length", self._max_length
    if max_length is not None:
      key, most = "max_seq_len - 1", max_length
    return [self._read(prompt, most, key) for prompt in prompts]

  def _read(self, given: Any, most: int, key: str) -> Prompt:
    draw, row, columns = self._draws, self._draws, {}
    if isinstance(given, Prompt):
      row, columns = given.row_id, given.columns
    if isinstance(given, Prompt) and len(given.ids):
      ids, prompt, text = given.ids, given.prompt, given.text
    elif is_ids(given):
      ids, prompt, text = token_ids(given, self._vocab_size), "", ""
      if self._encoder:
        prompt = text = self._encoder.tokenizer.decode(ids.tolist())
    elif self._encoder is None:
      raise ConfigError(
        "prompts: the model came without a tokenizer, so expected lists of token ids "
        "(or pass tokenizer= to the wrapper), got text"
      )
    else:
      prompt = asked = given.prompt if isinstance(given, Prompt) else given
      if isinstance(asked, str) and self._as_user:
        prompt = [{"role": "user", "content": asked}]
      ids, text = self._encoder.encode(prompt)
    if not 0 < len(ids) <= most:
      raise DataError(
        f"prompts: expected 1 to {most} tokens ({key}), got {len(ids)}: {text[:80]!r}"
      )
    self._draws += 1
    return Prompt(ids, prompt, text, row, draw, columns)


def limited(
  settings: RolloutSettings, n: int | None, max_seq_len: int | None, *, most: float
) -> RolloutSettings:
  """Rollout settings with what a call asks for.

  Args:
    settings: those of the actor.
    n: samples per prompt, or None.
    max_seq_len: most tokens of prompt and completion together, or None.
    most: tokens that the model reads.

  Raises:
    ConfigError: a number out of range.
  """
  if n is not None:
    if n < 1:
      raise ConfigError(f"n: expected at least 1 sample per prompt, got {n}")
    settings = dataclasses.replace(settings, n=n)
  if max_seq_len is None:
    return settings
  if not 2 <= max_seq_len <= most:
    raise ConfigError(
      f"max_seq_len: expected 2 to {most} tokens, what the model reads, got "
      f"{max_seq_len}"
    )
  return dataclasses.replace(settings, max_new=max_seq_len, max_length=max_seq_len)


def is_ids(given: Any) -> bool:
  """Whether this is one row of token ids."""
  if isinstance(given, np.ndarray):
    return given.ndim == 1 and given.dtype.kind in "iu"
  return (
    isinstance(given, list | tuple)
    and len(given) > 0
    and all(isinstance(x, int | np.integer) for x in given)
  )


def token_ids(given: Any, vocab_size: int) -> np.ndarray:
  """int32 ids ``[T]`` of one row.

  Raises:
    DataError: an id that the model does not have.
  """
  ids = np.asarray(given)
  if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
    raise DataError(
      f"token ids: expected 0 to {vocab_size - 1} (the model's vocab_size), got "
      f"{ids.min()} to {ids.max()}"
    )
  return ids.astype(np.int32)


def numbers(given: Any, name: str) -> np.ndarray:
  """An fp32 array of what is given; a DataError that names it if that is no array."""
  try:
    return np.asarray(given, np.float32)
  except (TypeError, ValueError) as error:
    raise DataError(
      f"{name}: expected an array of numbers, got {given!r:.80}: {error}"
    ) from error
