"""Loading tokenizers, EOS ids and the tokenizer made in memory."""

import json

import pytest

from jaxrl_hybrid.data.tokenizer import eos_ids, load_tokenizer, symbol_tokenizer
from jaxrl_hybrid.errors import DataError, ModelError


def test_symbol_tokenizer_ids_and_round_trip():
  tokenizer = symbol_tokenizer(["copy", "a", ":", "a", "?"])
  assert tokenizer("copy a : ?")["input_ids"] == [4, 5, 6, 7]
  assert tokenizer("copy zzz")["input_ids"] == [4, tokenizer.unk_token_id]
  assert tokenizer.decode([4, 5, 6, 7]) == "copy a : ?"
  assert tokenizer.decode([5, 2], skip_special_tokens=True) == "a"
  assert (tokenizer.pad_token_id, tokenizer.bos_token_id) == (0, 1)
  assert (tokenizer.eos_token_id, tokenizer.unk_token_id) == (2, 3)
  assert len(tokenizer) == 8


def test_symbol_tokenizer_survives_saving(tmp_path):
  tokenizer = symbol_tokenizer(["a", "b", ":"])
  tokenizer.save_pretrained(tmp_path)
  loaded = load_tokenizer(tmp_path)
  assert loaded("b a :")["input_ids"] == tokenizer("b a :")["input_ids"] == [5, 4, 6]
  assert loaded.decode([5, 4, 6]) == "b a :"
  assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 2)


@pytest.mark.parametrize("symbol", ["", "a b", " a"])
def test_symbol_must_be_one_word(symbol):
  with pytest.raises(DataError, match="one word"):
    symbol_tokenizer(["a", symbol])


def test_load_tokenizer_needs_a_local_folder_with_a_tokenizer(tmp_path):
  with pytest.raises(ModelError, match="no such folder"):
    load_tokenizer(tmp_path / "some-org" / "model")
  with pytest.raises(ModelError, match=r"expected tokenizer\.json"):
    load_tokenizer(tmp_path)


def test_load_tokenizer_never_runs_code_of_the_folder(tmp_path):
  (tmp_path / "own.py").write_text("open('ran', 'w')\nclass Own: pass\n")
  config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
  with pytest.raises(ModelError, match="without running code"):
    load_tokenizer(tmp_path)


def test_eos_ids_are_the_union():
  tokenizer = symbol_tokenizer(["a"])
  assert eos_ids(tokenizer, None, None) == (2,)
  config, generation = {"eos_token_id": 7}, {"eos_token_id": [9, 0, 2]}
  assert eos_ids(tokenizer, config, generation) == (0, 2, 7, 9)
  assert eos_ids(tokenizer, {"eos_token_id": None}, {}) == (2,)
  tokenizer.eos_token = None
  assert eos_ids(tokenizer, {}, {}) == ()
