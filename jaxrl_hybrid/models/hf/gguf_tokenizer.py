"""Tokenizer of a GGUF file -> the tokenizer files of a Hugging Face directory.

Byte-level BPE only. The file holds vocabulary and merges, but names its
pre-tokenizer by a word: ``_PRE_TOKENIZERS`` says what the word means.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from gguf import TokenType
from tokenizers import (
  AddedToken,
  Regex,
  Tokenizer,
  decoders,
  models,
  normalizers,
  pre_tokenizers,
  processors,
)

from jaxrl_hybrid.errors import ModelError
from jaxrl_hybrid.models.hf.gguf_metadata import Metadata

# Words, {digits}, the rest; {digits} is how many stand together.
_REGEX = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|{digits}"
  r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_REGEX = _REGEX.replace("{digits}", r"\p{N}")
_LLAMA3_REGEX = _REGEX.replace("{digits}", r"\p{N}{1,3}")


@dataclasses.dataclass(frozen=True)
class _Splitter:
  """What `tokenizer.ggml.pre` stands for."""

  split: Callable[[], pre_tokenizers.PreTokenizer]
  byte_level_regex: bool
  nfc: bool = False
  ignore_merges: bool = False  # a word that is a token is not split
  add_bos: bool = False  # where the file does not say


_PRE_TOKENIZERS = {
  "smollm": _Splitter(
    lambda: pre_tokenizers.Digits(individual_digits=True), byte_level_regex=True
  ),
  "qwen2": _Splitter(
    lambda: pre_tokenizers.Split(Regex(_QWEN2_REGEX), behavior="isolated"),
    byte_level_regex=False,
    nfc=True,
  ),
  "llama-bpe": _Splitter(
    lambda: pre_tokenizers.Split(Regex(_LLAMA3_REGEX), behavior="isolated"),
    byte_level_regex=False,
    ignore_merges=True,
    add_bos=True,
  ),
}


def write_tokenizer(meta: Metadata, out_dir: Path) -> None:
  """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja."""
  tokens = meta.need("tokenizer.ggml.tokens")
  ids = meta.token_ids("bos", "eos", "pad", "unk")
  names = {key.removesuffix("_id"): tokens[i] for key, i in ids.items()}
  tokenizer = _bpe(meta, tokens)
  _add_bos_eos(tokenizer, meta, names)
  tokenizer.save(str(out_dir / "tokenizer.json"))
  config = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
    "model_max_length": meta.arch("context_length"),
    **names,
  }
  text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
  (out_dir / "tokenizer_config.json").write_text(text, encoding="utf-8")
  template = meta.get("tokenizer.chat_template")
  if template is not None:
    (out_dir / "chat_template.jinja").write_text(template, encoding="utf-8")


def _bpe(meta: Metadata, tokens: list[str]) -> Tokenizer:
  """Returns the tokenizer, without what it adds around a text."""
  splitter = _splitter(meta)
  types = meta.need("tokenizer.ggml.token_type")
  # UNUSED entries only pad the vocabulary to the embedding's height.
  vocab = {
    token: i
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
    if kind != TokenType.UNUSED
  }
  merges = [tuple(m.split(" ", 1)) for m in meta.need("tokenizer.ggml.merges")]
  tokenizer = Tokenizer(
    models.BPE(vocab=vocab, merges=merges, ignore_merges=splitter.ignore_merges)
  )
  byte_level = pre_tokenizers.ByteLevel(
    add_prefix_space=meta.get("tokenizer.ggml.add_space_prefix", False),
    use_regex=splitter.byte_level_regex,
  )
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence([splitter.split(), byte_level])
  tokenizer.decoder = decoders.ByteLevel()
  if splitter.nfc:
    tokenizer.normalizer = normalizers.NFC()
  _add_tokens(tokenizer, tokens, types)
  return tokenizer


def _splitter(meta: Metadata) -> _Splitter:
  kind = meta.need("tokenizer.ggml.model")
  pre = meta.need("tokenizer.ggml.pre")
  if kind != "gpt2":
    raise ModelError(f"tokenizer model {kind!r} is not supported; gpt2 (BPE) is")
  if pre not in _PRE_TOKENIZERS:
    raise ModelError(
      f"pre-tokenizer {pre!r} is not supported; "
      f"expected one of {', '.join(_PRE_TOKENIZERS)}"
    )
  return _PRE_TOKENIZERS[pre]


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
  """Makes control tokens special, and keeps user-defined ones unsplit."""
  added = [
    AddedToken(t, normalized=False, special=kind == TokenType.CONTROL)
    for t, kind in zip(tokens, types, strict=True)
    if kind in (TokenType.CONTROL, TokenType.USER_DEFINED)
  ]
  tokenizer.add_tokens(added)


def _add_bos_eos(
  tokenizer: Tokenizer, meta: Metadata, names: Mapping[str, str]
) -> None:
  before, after = [], []
  if meta.get("tokenizer.ggml.add_bos_token", _splitter(meta).add_bos):
    before = [_named(names, "bos_token")]
  if meta.get("tokenizer.ggml.add_eos_token", False):
    after = [_named(names, "eos_token")]
  if before or after:
    single = [*before, "$A", *after]
    tokenizer.post_processor = processors.TemplateProcessing(
      single=single,
      pair=[*single, *before, "$B:1", *after],
      special_tokens=[(t, tokenizer.token_to_id(t)) for t in before + after],
    )


def _named(names: Mapping[str, str], name: str) -> str:
  if name not in names:
    raise ModelError(f"the GGUF metadata asks to add a {name}, but names none")
  return names[name]
