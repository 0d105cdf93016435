"""Where the texts of a style stand in a prompt."""

import numpy as np

from jaxrl_hybrid.data.styled import StyledPrompts
from jaxrl_hybrid.data.template import PromptEncoder
from jaxrl_hybrid.types import Prompt

NO_SYSTEM = (
  "{% for m in messages %}"
  "{% if m['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
  "<|{{ m['role'] }}|> {{ m['content'] }} {% endfor %}"
)
SILENT = (
  "{% for m in messages %}{% if m['role'] != 'system' %}"
  "<|{{ m['role'] }}|> {{ m['content'] }} {% endif %}{% endfor %}"
)
CHAT = [{"role": "user", "content": "hello ?"}]
TOLD = [{"role": "system", "content": "you"}, *CHAT]


def shown(tokenizer, prompt, texts=("world", "sys"), system_prompt=None):
  encoder = PromptEncoder(tokenizer, chat_template=None, system_prompt=system_prompt)
  ids = StyledPrompts(encoder, texts).ids(Prompt(np.zeros(0), prompt, "", 0, 0))
  return tokenizer.decode(ids)


def test_a_string_has_them_in_front(chat_tokenizer):
  assert shown(chat_tokenizer, "hello") == "<s> world sys hello"


def test_a_chat_has_them_in_its_system_message(chat_tokenizer):
  end = "<|user|> hello ? <|assistant|>"
  text = shown(chat_tokenizer, CHAT)
  assert text == f"<s> <|system|> world sys {end}"
  assert shown(chat_tokenizer, TOLD) == f"<s> <|system|> world sys you {end}"
  found = shown(chat_tokenizer, CHAT, system_prompt="you")
  assert found == f"<s> <|system|> world sys you {end}"
  assert CHAT == [{"role": "user", "content": "hello ?"}]  # untouched


def test_without_a_system_message_the_user_says_it(make_tokenizer):
  for template in (NO_SYSTEM, SILENT):
    tokenizer = make_tokenizer("$A", template)
    assert shown(tokenizer, CHAT) == "<|user|> world sys hello ?"
