"""Small tokenizers that behave like the real kinds."""

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = "<pad> <s> </s> <unk> <|user|> <|system|> <|assistant|> hello world sys you ?"

# Starts with BOS, and has a default system message, as real templates do.
TEMPLATE = (
  "{{ bos_token }}"
  "{% if messages[0]['role'] != 'system' %}<|system|> you {% endif %}"
  "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} {% endfor %}"
  "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
  """Makes a word tokenizer; ``single`` is what it adds around a text."""

  def make(single: str = "$A", template: str | None = None) -> PreTrainedTokenizerFast:
    words = WORDS.split()
    vocab = {word: i for i, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
      single=single, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer = PreTrainedTokenizerFast(
      tokenizer_object=backend,
      pad_token="<pad>",
      bos_token="<s>",
      eos_token="</s>",
      unk_token="<unk>",
      extra_special_tokens=["<|user|>", "<|system|>", "<|assistant|>"],
      clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer

  return make


@pytest.fixture
def chat_tokenizer(
  make_tokenizer: Callable[..., PreTrainedTokenizerFast],
) -> PreTrainedTokenizerFast:
  """Adds BOS and EOS around plain text and has a chat template with BOS."""
  return make_tokenizer("<s> $A </s>", TEMPLATE)
