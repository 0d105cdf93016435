"""Dialogues as a judge reads them: of sequences, texts, messages or ids."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_hybrid.api.sequences import is_ids, token_ids
from jaxrl_hybrid.data.template import PromptEncoder
from jaxrl_hybrid.data.tokenizer import same_vocabulary
from jaxrl_hybrid.errors import ConfigError, DataError
from jaxrl_hybrid.types import Batch


class DialogueReader:
  """Makes token ids of whole dialogues.

  Args:
    tokenizer: of the judge, or None.
    encoder: of this tokenizer; None: only token ids can be read.
    vocab_size: of the judge.
  """

  def __init__(self, tokenizer: Any, encoder: PromptEncoder | None, *, vocab_size: int):
    self._tokenizer, self._encoder = tokenizer, encoder
    self._vocab_size = vocab_size
    self._said: set[str] = set()

  def read(self, sequences: Batch | Sequence[Any]) -> list[np.ndarray]:
    """int32 ids of each of N sequences or dialogues; logs once how they are read.

    Raises:
      ConfigError, DataError: as ``dialogue_ids``.
    """
    if not isinstance(sequences, Batch):
      if isinstance(sequences, str):
        raise DataError(f"expected a list of dialogues, got {sequences!r:.80}")
      size = self._vocab_size
      return [dialogue_ids(x, self._encoder, vocab_size=size) for x in sequences]
    theirs, own = getattr(sequences, "tokenizer", None), self._tokenizer
    if theirs is None or own is None or same_vocabulary(theirs, own):
      self._say("the reward model reads the actor's token ids")
      pairs = zip(sequences.prompts, range(len(sequences)), strict=True)
      return [np.concatenate([p.ids, sequences.response(i)]) for p, i in pairs]
    self._say("the reward model reads texts by its own tokenizer and chat template")
    pairs = zip(sequences.prompts, sequences.texts, strict=True)
    return [self._encoder.encode_answered(p.prompt, text) for p, text in pairs]

  def _say(self, text: str) -> None:
    if text not in self._said:
      self._said.add(text)
      logging.info("%s", text)


def dialogue_ids(
  given: Any, encoder: PromptEncoder | None, *, vocab_size: int
) -> np.ndarray:
  """int32 ids ``[T]`` of a dialogue as a judge reads it.

  Args:
    given: token ids, a text, (prompt, answer), or messages of which the last one is
      the assistant's.
    encoder: of the judge; None: only token ids can be read.
    vocab_size: of the judge.

  Raises:
    ConfigError: text without a tokenizer, or messages without a chat template.
    DataError: another form, or ids that the judge does not have.
  """
  if is_ids(given):
    return token_ids(given, vocab_size)
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
