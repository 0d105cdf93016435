"""Tokenizers: loaded from a local folder, or a tiny one made in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
  AutoTokenizer,
  PreTrainedTokenizerBase,
  PreTrainedTokenizerFast,
)

from jaxrl_hybrid.errors import DataError, ModelError

_PAD, _BOS, _EOS, _UNK = "<pad>", "<bos>", "<eos>", "<unk>"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_SPECIAL = (_PAD, _BOS, _EOS, _UNK)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
  """Loads the tokenizer of a model folder; nothing is downloaded or executed.

  Raises:
    ModelError: no such folder, no usable tokenizer files, or one that needs code
      from the model's folder.
  """
  folder = Path(path).expanduser()
  if not folder.is_dir():
    raise ModelError(
      f"{folder}: no such folder; a tokenizer is read from a local model folder "
      "(download the model first)"
    )
  # A tokenizer.json is complete. AutoTokenizer may rebuild it as the class that
  # config.json's model_type suggests, with other ids.
  exact = (folder / "tokenizer.json").is_file()
  loader = PreTrainedTokenizerFast if exact else AutoTokenizer
  try:
    return loader.from_pretrained(
      str(folder), trust_remote_code=False, local_files_only=True
    )
  except (ValueError, OSError, KeyError, ImportError) as e:
    reason = str(e).strip().splitlines() or [type(e).__name__]
    raise ModelError(
      f"{folder}: cannot load the tokenizer without running code from that folder; "
      f"expected tokenizer.json and tokenizer_config.json ({reason[0]})"
    ) from e


def eos_ids(
  tokenizer: PreTrainedTokenizerBase | None,
  config: Mapping[str, Any] | None,
  generation_config: Mapping[str, Any] | None,
) -> tuple[int, ...]:
  """All ids that end a completion: a sorted union, empty if none is known.

  Args:
    tokenizer: its ``eos_token_id`` counts, if it has one.
    config: the model's config.json; ``eos_token_id`` is an int, a list or None.
    generation_config: the model's generation_config.json, likewise.
  """
  found: set[int] = set()
  sources = [config or {}, generation_config or {}]
  own = None if tokenizer is None else tokenizer.eos_token_id
  for value in [own, *(s.get("eos_token_id") for s in sources)]:
    if isinstance(value, list | tuple):
      found.update(map(int, value))
    elif value is not None:
      found.add(int(value))
  return tuple(sorted(found))


def has_tokenizer(folder: str | Path) -> bool:
  """Whether a model folder holds a tokenizer."""
  return any((Path(folder) / name).is_file() for name in TOKENIZER_FILES)


def same_vocabulary(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase) -> bool:
  """Whether every token has the same id in both, added tokens included."""
  return a is b or a.get_vocab() == b.get_vocab()


def symbol_tokenizer(symbols: Sequence[str]) -> PreTrainedTokenizerFast:
  """Makes a word-level tokenizer: one id per symbol, split at white space.

  Ids 0..3 are <pad>, <bos>, <eos> and <unk>; symbols follow in the given order,
  repeated ones once. No special token is added to a text, and decoding joins
  tokens with single spaces. ``save_pretrained`` works as usual.

  Raises:
    DataError: a symbol is empty or holds white space.
  """
  for symbol in symbols:
    if symbol.split() != [symbol]:
      raise DataError(f"symbol {symbol!r}: expected one word without white space")
  words = dict.fromkeys((*_SPECIAL, *symbols))
  backend = Tokenizer(
    models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=_UNK)
  )
  backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  return PreTrainedTokenizerFast(
    tokenizer_object=backend,
    pad_token=_PAD,
    bos_token=_BOS,
    eos_token=_EOS,
    unk_token=_UNK,
    clean_up_tokenization_spaces=False,  # else "a :" would decode to "a:"
  )
