"""Prompts with an instruction about style in front of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_hybrid.data.template import PromptEncoder
from jaxrl_hybrid.errors import DataError
from jaxrl_hybrid.types import Prompt

logger = logging.getLogger(__name__)
SYSTEM, USER = "system", "user"


class StyledPrompts:
  """Makes token ids of prompts that a reference is to answer in a style.

  The texts are the system message of a chat, in front of one that is there. Where the
  chat template has none they come in front of the first user message, and in front
  of a plain string.

  Args:
    encoder: of the prompts.
    texts: of the style.
  """

  def __init__(self, encoder: PromptEncoder, texts: Sequence[str]):
    self._encoder, self._text = encoder, "\n".join(texts)
    self._role: str | None = None  # found with the first chat

  def ids(self, prompt: Prompt) -> np.ndarray:
    """int32 ``[P]``. Raises as ``PromptEncoder.encode``."""
    return self._encoder.encode(self._styled(prompt.prompt))[0]

  def _styled(self, prompt: Any) -> Any:
    if isinstance(prompt, str):
      return f"{self._text}\n{prompt}"
    messages = [dict(message) for message in prompt]
    if self._role is None:
      self._role = self._find_role()
    default = self._encoder.system_prompt
    own = any(message.get("role") == SYSTEM for message in messages)
    if self._role == SYSTEM and not own:
      messages.insert(0, {"role": SYSTEM, "content": default or ""})
    first = next((m for m in messages if m.get("role") == self._role), messages[0])
    first["content"] = f"{self._text}\n\n{first['content']}".strip()
    return messages

  def _find_role(self) -> str:
    """Whose message a template shows the texts in."""
    chat = [{"role": role, "content": self._text} for role in (SYSTEM, USER)]
    try:
      shown = self._encoder.render(chat).count(self._text)
    except DataError:
      shown = 1
    if shown == 2:
      return SYSTEM
    logger.info("the chat template has no system message: style goes to the user's")
    return USER
