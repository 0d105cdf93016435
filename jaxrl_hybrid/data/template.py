"""From one prompt, a string or a list of messages, to the ids the model sees."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from jaxrl_hybrid.errors import ConfigError, DataError

if TYPE_CHECKING:
  from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class PromptEncoder:
  """Encodes prompts with one tokenizer, chat template and system prompt.

  Attributes:
    tokenizer: the tokenizer, unchanged.
    chat_template: text of the template that was given, None for the tokenizer's.
    system_prompt: put before message lists that hold no system message.
    prefix: ids that the tokenizer puts before a plain text, such as its BOS.
  """

  def __init__(
    self,
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat_template: str | None,
    system_prompt: str | None,
  ):
    """Reads the template.

    Args:
      tokenizer: a Hugging Face tokenizer.
      chat_template: path of a Jinja file; None takes the tokenizer's own template.
      system_prompt: None leaves the choice to row and template; "" is a system
        message without text.

    Raises:
      ConfigError: the template file cannot be read, or the tokenizer is empty.
    """
    self.tokenizer = tokenizer
    self.chat_template = _read_template(chat_template)
    self.system_prompt = system_prompt
    self.prefix = _added_prefix(tokenizer)
    self._warned: set[str] = set()

  def encode(self, prompt: Any) -> tuple[np.ndarray, str]:
    """Returns int32 ids ``[P]`` and the text that they stand for.

    The ids end without an EOS of the tokenizer's own making and hold one BOS at
    most, unless the prompt itself holds more. The text of a string prompt is the
    string; that of a message list is the rendered template.

    Raises:
      DataError: the prompt is neither a string nor a list of messages, or the
        template refuses it.
      ConfigError: a message list, but there is no chat template.
    """
    text = self.render(prompt)
    return self.tokenize([prompt], [text])[0], text

  def render(self, prompt: Any) -> str:
    """Returns the text of a prompt; checks its form. Raises as ``encode``."""
    if isinstance(prompt, str):
      self._warn_typed_bos(prompt, limit=1)
      if self.system_prompt is not None:
        self._warn(
          "system", "system_prompt is not used for plain-string prompts, only for chats"
        )
      return prompt
    messages = _clean_messages(prompt)
    for message in messages:
      self._warn_typed_bos(message["content"] or "", limit=0)
    if messages[-1]["role"] == "assistant":
      self._warn(
        "assistant",
        "a prompt ends with an assistant message; a new assistant turn follows it",
      )
    return self._apply_template(self._with_system(messages), answered=False)

  def encode_answered(self, prompt: Any, answer: str) -> np.ndarray:
    """Returns int32 ids ``[T]`` of a prompt with its answer, as a judge reads them.

    With a chat template a string prompt is a user's message; without one it is the
    text in front of the answer. Raises as ``encode``.
    """
    if isinstance(prompt, str):
      if not self._has_template:
        return self.tokenize([prompt], [prompt + answer])[0]
      prompt = [{"role": "user", "content": prompt}]
    elif not self._has_template:
      raise ConfigError(
        f"tokenizer {_tokenizer_name(self.tokenizer)!r} has no chat template to read "
        "a list of messages with; add one to its directory"
      )
    messages = self._with_system(_clean_messages(prompt))
    messages += [{"role": "assistant", "content": answer}]
    return self.tokenize([messages], [self._apply_template(messages, answered=True)])[0]

  def tokenize(self, prompts: Sequence[Any], texts: Sequence[str]) -> list[np.ndarray]:
    """Returns int32 ids ``[P]`` of each rendered prompt, in one batched call.

    Args:
      prompts: prompts as given to ``render``; they tell strings from chats.
      texts: what ``render`` returned for them.
    """
    if not texts:
      return []
    # Special tokens are put in front by hand: a template's text is complete, and
    # the tokenizer's own way may also append an EOS.
    encoded = self.tokenizer(
      list(texts),
      add_special_tokens=False,
      padding=False,
      truncation=False,
      verbose=False,
      return_attention_mask=False,
    )["input_ids"]
    result = []
    for prompt, ids in zip(prompts, encoded, strict=True):
      starts = ids[: len(self.prefix)] == self.prefix
      if isinstance(prompt, str):
        ids = ids if starts else [*self.prefix, *ids]
      elif not starts:
        self._warn(
          "no_bos",
          "the tokenizer puts %r before plain text, but the chat template does not; "
          "chats are encoded as the template says",
          self.tokenizer.decode(self.prefix),
        )
      result.append(np.asarray(ids, np.int32))
    return result

  @property
  def _has_template(self) -> bool:
    return bool(self.chat_template is not None or self.tokenizer.chat_template)

  def _with_system(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    own = any(message["role"] == "system" for message in messages)
    if self.system_prompt is None or own:
      return messages
    return [{"role": "system", "content": self.system_prompt}, *messages]

  def _apply_template(self, messages: list[dict[str, Any]], *, answered: bool) -> str:
    if not self._has_template:
      raise ConfigError(
        "the prompt is a list of messages, but tokenizer "
        f"{_tokenizer_name(self.tokenizer)!r} has no chat template: set "
        "data.chat_template=<file>, or use plain-string prompts"
      )
    try:
      return self.tokenizer.apply_chat_template(
        messages,
        chat_template=self.chat_template,
        tokenize=False,
        add_generation_prompt=not answered,
      )
    except (jinja2.TemplateError, ValueError, TypeError) as e:
      roles = ", ".join(message["role"] for message in messages)
      raise DataError(
        f"the chat template refuses the messages (roles: {roles}): {e}"
      ) from e

  def _warn_typed_bos(self, text: str, *, limit: int) -> None:
    bos = self.tokenizer.bos_token
    if bos and text.count(bos) > limit:
      self._warn(
        "bos",
        "a prompt's own text holds %d BOS strings %r; kept as given: %.80r",
        text.count(bos),
        bos,
        text,
      )

  def _warn(self, kind: str, message: str, *args: Any) -> None:
    """Logs a warning, once per kind."""
    if kind not in self._warned:
      self._warned.add(kind)
      logger.warning(message + " (said once)", *args)


def _read_template(path: str | None) -> str | None:
  if path is None:
    return None
  try:
    return Path(path).expanduser().read_text("utf-8-sig")
  except (OSError, ValueError) as e:
    raise ConfigError(
      f"data.chat_template={path}: expected a readable Jinja text file ({e})"
    ) from None


def _added_prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
  """The ids that the tokenizer puts before any plain text."""
  special = set(tokenizer.all_special_ids)
  for token in range(len(tokenizer)):
    # Any text of the vocabulary shows it; "a" may not be in a small one.
    probe = tokenizer.decode([token])
    bare = tokenizer(probe, add_special_tokens=False)["input_ids"]
    if bare and not special.intersection(bare):
      full = tokenizer(probe)["input_ids"]
      starts = range(len(full) - len(bare) + 1)
      return next(full[:i] for i in starts if full[i : i + len(bare)] == bare)
  raise ConfigError(f"tokenizer {_tokenizer_name(tokenizer)!r} has no ordinary token")


def _tokenizer_name(tokenizer: PreTrainedTokenizerBase) -> str:
  return getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__


def _clean_messages(prompt: Any) -> list[dict[str, Any]]:
  """Checks a message list and returns messages with plain-text content."""
  expected = "expected a string or a list of {role, content} messages"
  if prompt is None:
    raise DataError(f"the prompt is null; {expected}")
  if not isinstance(prompt, list | tuple):
    raise DataError(f"the prompt is of type {type(prompt).__name__}; {expected}")
  if not prompt:
    raise DataError(f"the prompt is an empty list; {expected}")
  return [_clean_message(i, message) for i, message in enumerate(prompt)]


def _clean_message(i: int, message: Any) -> dict[str, Any]:
  if not isinstance(message, Mapping):
    raise DataError(
      f"the prompt is a list, but its item {i} is of type {type(message).__name__}; "
      "expected messages {role, content}"
    )
  # Parquet gives every message every key; templates ask which keys are there.
  cleaned = {key: value for key, value in message.items() if value is not None}
  if not isinstance(cleaned.get("role"), str):
    raise DataError(f"message {i} has no role; its keys are {sorted(cleaned)}")
  content = message.get("content")
  if isinstance(content, list | tuple):
    content = "".join(_part_text(i, part) for part in content)
  if not isinstance(content, str) and not cleaned.get("tool_calls"):
    raise DataError(
      f"message {i} ({cleaned['role']}) has content of type "
      f"{type(content).__name__}; expected text"
    )
  return {**cleaned, "content": content}


def _part_text(i: int, part: Any) -> str:
  if isinstance(part, Mapping) and part.get("type") == "text":
    return str(part.get("text"))
  raise DataError(f"message {i} holds a content part that is not text: {part!r:.80}")
