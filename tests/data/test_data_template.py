"""Prompts to ids: BOS, EOS, system prompts, missing templates."""

import logging

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jaxrl_hybrid.data.template import PromptEncoder
from jaxrl_hybrid.errors import ConfigError, DataError

BOS, EOS, USER, SYSTEM, ASSISTANT, HELLO, WORLD, SYS, YOU = 1, 2, 4, 5, 6, 7, 8, 9, 10
USER_HELLO = [{"role": "user", "content": "hello"}]


def _encoder(tokenizer, chat_template=None, system_prompt=None):
  return PromptEncoder(
    tokenizer, chat_template=chat_template, system_prompt=system_prompt
  )


def _ids(encoder, prompt):
  ids, _ = encoder.encode(prompt)
  assert ids.dtype == np.int32
  return ids.tolist()


def test_the_test_tokenizer_really_adds_both(chat_tokenizer):
  assert chat_tokenizer("hello")["input_ids"] == [BOS, HELLO, EOS]
  assert chat_tokenizer("<s>hello")["input_ids"] == [BOS, BOS, HELLO, EOS]


def test_string_prompt_has_one_bos_and_no_eos(chat_tokenizer, caplog):
  encoder = _encoder(chat_tokenizer)
  assert _ids(encoder, "hello world") == [BOS, HELLO, WORLD]
  assert _ids(encoder, "<s> hello") == [BOS, HELLO]
  assert encoder.encode("hello  world")[1] == "hello  world"
  assert not caplog.records


@pytest.mark.parametrize(
  ("single", "prefix"), [("$A", []), ("$A </s>", []), ("<s> $A", [BOS])]
)
def test_string_prompt_has_the_specials_that_the_tokenizer_adds(
  make_tokenizer, single, prefix
):
  assert _ids(_encoder(make_tokenizer(single)), "hello") == [*prefix, HELLO]


def test_flags_of_the_tokenizer_config_do_the_same(make_tokenizer, tmp_path):
  make_tokenizer().save_pretrained(tmp_path)
  tokenizer = PreTrainedTokenizerFast.from_pretrained(
    tmp_path, add_bos_token=True, add_eos_token=True
  )
  assert tokenizer("hello")["input_ids"] == [BOS, HELLO, EOS]
  assert _ids(_encoder(tokenizer), "hello") == [BOS, HELLO]


def test_prefix_is_found_in_a_vocabulary_without_common_words():
  backend = Tokenizer(models.WordLevel({"<s>": 0, "q": 1}))  # no unk: "a" would raise
  backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  backend.post_processor = processors.TemplateProcessing(
    single="<s> $A <s>", special_tokens=[("<s>", 0)]
  )
  tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=backend, bos_token="<s>", eos_token="<s>"
  )
  assert _ids(_encoder(tokenizer), "q q") == [0, 1, 1]


def test_a_typed_end_of_text_is_kept(chat_tokenizer):
  assert _ids(_encoder(chat_tokenizer), "hello </s>") == [BOS, HELLO, EOS]


def test_chat_has_one_bos_on_both_routes(chat_tokenizer):
  encoder = _encoder(chat_tokenizer)
  ids, text = encoder.encode(USER_HELLO)
  assert ids.tolist() == [BOS, SYSTEM, YOU, USER, HELLO, ASSISTANT]
  assert text.startswith("<s><|system|>")
  direct = chat_tokenizer.apply_chat_template(
    USER_HELLO, add_generation_prompt=True, tokenize=True
  )["input_ids"]
  assert ids.tolist() == direct


def test_typed_double_bos_is_kept_and_warned_once(chat_tokenizer, caplog):
  encoder = _encoder(chat_tokenizer)
  with caplog.at_level(logging.WARNING):
    assert _ids(encoder, "<s> <s> hello") == [BOS, BOS, HELLO]
    assert _ids(encoder, "<s> <s> world") == [BOS, BOS, WORLD]
  assert caplog.text.count("BOS strings") == 1


def test_bos_typed_in_a_chat_is_kept_and_warned_once(chat_tokenizer, caplog):
  encoder = _encoder(chat_tokenizer)
  messages = [{"role": "user", "content": "<s> <s> hello"}]
  with caplog.at_level(logging.WARNING):
    assert _ids(encoder, messages).count(BOS) == 3
    encoder.encode(messages)
  assert caplog.text.count("2 BOS strings") == 1


def test_template_without_bos_is_followed_and_said(make_tokenizer, caplog):
  template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
  encoder = _encoder(make_tokenizer("<s> $A", template))
  with caplog.at_level(logging.WARNING):
    assert _ids(encoder, USER_HELLO) == [HELLO]
    encoder.encode(USER_HELLO)
  assert caplog.text.count("the chat template does not") == 1


def test_system_prompt_of_the_row_wins(chat_tokenizer):
  encoder = _encoder(chat_tokenizer, system_prompt="sys")
  row = [{"role": "system", "content": "world"}, *USER_HELLO]
  assert _ids(encoder, row) == [BOS, SYSTEM, WORLD, USER, HELLO, ASSISTANT]


def test_system_prompt_is_put_in_front_once(chat_tokenizer):
  encoder = _encoder(chat_tokenizer, system_prompt="sys")
  expected = [BOS, SYSTEM, SYS, USER, HELLO, ASSISTANT]
  assert _ids(encoder, USER_HELLO) == expected
  assert _ids(encoder, USER_HELLO) == expected
  assert USER_HELLO == [{"role": "user", "content": "hello"}]  # not changed in place


def test_empty_system_prompt_replaces_the_default(chat_tokenizer):
  encoder = _encoder(chat_tokenizer, system_prompt="")
  assert _ids(encoder, USER_HELLO) == [BOS, SYSTEM, USER, HELLO, ASSISTANT]


def test_system_prompt_with_strings_is_said_not_used(chat_tokenizer, caplog):
  encoder = _encoder(chat_tokenizer, system_prompt="sys")
  with caplog.at_level(logging.WARNING):
    assert _ids(encoder, "hello") == [BOS, HELLO]
    encoder.encode("hello")
  assert caplog.text.count("system_prompt is not used") == 1


def test_all_messages_are_used(chat_tokenizer, caplog):
  row = [
    *USER_HELLO,
    {"role": "assistant", "content": "world"},
    {"role": "user", "content": "?"},
  ]
  expected = [BOS, SYSTEM, YOU, USER, HELLO, ASSISTANT, WORLD, USER, 11, ASSISTANT]
  assert _ids(_encoder(chat_tokenizer), row) == expected
  assert not caplog.records


def test_chat_that_ends_with_the_assistant_is_said(chat_tokenizer, caplog):
  row = [*USER_HELLO, {"role": "assistant", "content": "world"}]
  ids = _ids(_encoder(chat_tokenizer), row)
  assert ids[-3:] == [ASSISTANT, WORLD, ASSISTANT]
  assert "ends with an assistant message" in caplog.text


def test_missing_template_names_tokenizer_and_both_fixes(make_tokenizer, tmp_path):
  tokenizer = make_tokenizer()
  tokenizer.name_or_path = "models/base-7b"
  encoder = _encoder(tokenizer)
  assert _ids(encoder, "hello") == [HELLO]  # strings need no template
  with pytest.raises(ConfigError) as error:
    encoder.encode(USER_HELLO)
  for part in ("models/base-7b", "data.chat_template=<file>", "plain-string"):
    assert part in str(error.value)


def test_template_file_is_used_instead_of_the_tokenizers(chat_tokenizer, tmp_path):
  file = tmp_path / "own.jinja"
  file.write_text("\ufeff<s>{{ messages[0]['content'] }} ?", "utf-8")
  encoder = _encoder(chat_tokenizer, chat_template=str(file))
  assert _ids(encoder, USER_HELLO) == [BOS, HELLO, 11]
  with pytest.raises(ConfigError, match=r"data\.chat_template=.*none\.jinja"):
    _encoder(chat_tokenizer, chat_template=str(tmp_path / "none.jinja"))


@pytest.mark.parametrize(
  "template",
  ["{{ raise_exception('no system role') }}", "{{ messages[0]['x'].y.z }}", "{% if %}"],
)
def test_template_that_refuses_is_a_data_error(make_tokenizer, template):
  encoder = _encoder(make_tokenizer(template=template))
  with pytest.raises(DataError, match=r"template refuses the messages \(roles: user\)"):
    encoder.encode(USER_HELLO)


@pytest.mark.parametrize(
  ("prompt", "reason"),
  [
    (None, "prompt is null"),
    (7, "of type int"),
    ({"role": "user", "content": "a"}, "of type dict"),
    ([], "empty list"),
    (["hello"], "item 0 is of type str"),
    ([{"content": "hello"}], "message 0 has no role"),
    ([*USER_HELLO, {"role": "user", "content": None}], "message 1 .*NoneType"),
    ([{"role": "user", "content": 3}], "message 0 .*int"),
    ([{"role": "user", "content": [{"type": "image"}]}], "not text"),
  ],
)
def test_other_prompts_are_refused(chat_tokenizer, prompt, reason):
  with pytest.raises(DataError, match=reason):
    _encoder(chat_tokenizer).encode(prompt)


def test_parquet_leftovers_and_text_parts(chat_tokenizer, monkeypatch):
  seen = []

  def record(messages, **_):
    seen.extend(messages)
    return ""

  monkeypatch.setattr(chat_tokenizer, "apply_chat_template", record)
  parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "?"}]
  prompt = [{"role": "user", "content": parts, "name": None}]
  _encoder(chat_tokenizer).render(prompt)
  assert seen == [{"role": "user", "content": "hello ?"}]


def test_batched_ids_equal_single_ones(chat_tokenizer):
  encoder = _encoder(chat_tokenizer)
  prompts = ["hello", USER_HELLO, "<s> world ?", "hello hello hello"]
  texts = [encoder.render(prompt) for prompt in prompts]
  batched = [ids.tolist() for ids in encoder.tokenize(prompts, texts)]
  assert batched == [_ids(encoder, prompt) for prompt in prompts]
  assert encoder.tokenize([], []) == []
