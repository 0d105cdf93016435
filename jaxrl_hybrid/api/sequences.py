"""What wrappers hand each other: prompts as they come, batches with a tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_hybrid.data.template import PromptEncoder
from jaxrl_hybrid.errors import ConfigError, DataError
from jaxrl_hybrid.types import Batch, Prompt


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
  """

  def __init__(
    self, encoder: PromptEncoder | None, *, string_prompts: str, max_length: int
  ):
    self._encoder, self._max_length = encoder, max_length
    self._as_user = string_prompts == "user"
    self._draws = 0

  def read(self, prompts: Sequence[Any]) -> list[Prompt]:
    """Every call gives its prompts new draw ids, so that their samples differ.

    Raises:
      DataError: no prompt, an empty or too long one, or of another form.
      ConfigError: text without a tokenizer or messages without a chat template.
    """
    if isinstance(prompts, str) or not len(prompts):
      raise DataError(f"prompts: expected a list of prompts, got {prompts!r:.80}")
    return [self._read(prompt) for prompt in prompts]

  def _read(self, given: Any) -> Prompt:
    if isinstance(given, Prompt):
      ids, prompt, text = given.ids, given.prompt, given.text
    elif is_ids(given):
      ids, prompt, text = np.asarray(given, np.int32), "", ""
      if self._encoder:
        prompt = text = self._encoder.tokenizer.decode(ids.tolist())
    elif self._encoder is None:
      raise ConfigError(
        "prompts: the model came without a tokenizer, so expected lists of token ids "
        "(or pass tokenizer= to the wrapper), got text"
      )
    else:
      prompt = given
      if isinstance(given, str) and self._as_user:
        prompt = [{"role": "user", "content": given}]
      ids, text = self._encoder.encode(prompt)
    if not 0 < len(ids) <= self._max_length:
      raise DataError(
        f"prompts: expected 1 to {self._max_length} tokens "
        f"(data.max_prompt_length), got {len(ids)}: {text[:80]!r}"
      )
    columns = given.columns if isinstance(given, Prompt) else {}
    self._draws += 1
    return Prompt(ids, prompt, text, self._draws - 1, self._draws - 1, columns)


def is_ids(given: Any) -> bool:
  """Whether this is one row of token ids."""
  if isinstance(given, np.ndarray):
    return given.ndim == 1 and given.dtype.kind in "iu"
  return (
    isinstance(given, list | tuple)
    and len(given) > 0
    and all(isinstance(x, int | np.integer) for x in given)
  )


def dialogue_ids(given: Any, encoder: PromptEncoder | None) -> np.ndarray:
  """int32 ids ``[T]`` of a dialogue as a judge reads it.

  Args:
    given: token ids, a text, (prompt, answer), or messages of which the last one is
      the assistant's.
    encoder: of the judge; None: only token ids can be read.

  Raises:
    ConfigError: text without a tokenizer, or messages without a chat template.
    DataError: another form.
  """
  if is_ids(given):
    return np.asarray(given, np.int32)
  if encoder is None:
    raise ConfigError(
      "the model came without a tokenizer: pass tokenizer= to the wrapper, or give it "
      "token ids"
    )
  if isinstance(given, str):
    return encoder.tokenize([given], [given])[0]
  if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], str):
    return encoder.encode_answered(*given)
  last = given[-1] if isinstance(given, list | tuple) and given else None
  if not isinstance(last, Mapping) or last.get("role") != "assistant":
    raise DataError(
      "expected token ids, a text, (prompt, answer) or messages that end with the "
      f"assistant's, got {given!r:.80}"
    )
  return encoder.encode_answered(list(given[:-1]), last["content"])
