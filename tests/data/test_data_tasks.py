"""Procedural tasks: answers, splits, references."""

import pytest

from jaxrl_hybrid.data.tasks import reference_rows, task_rows, task_symbols
from jaxrl_hybrid.data.tokenizer import symbol_tokenizer
from jaxrl_hybrid.errors import DataError

# Saved streams continue only if these stay as they are.
GOLDEN_SYMBOLS = ["copy a j :", "copy d e :"]
GOLDEN_ARITHMETIC = ["What is 1 + 5?", "What is 5 + 2?", "What is 3 + 0?"]


def _question(row):
  prompt = row["prompt"]
  return prompt if isinstance(prompt, str) else prompt[0]["content"]


def test_symbols_rows_are_right():
  rows = task_rows("symbols", n=300, ops="copy,reverse", min=2, max=4, symbols=5)
  assert len(rows) == 300
  for row in rows:
    op, *symbols, marker = row["prompt"].split(" ")
    answer = row["ground_truth"].split(" ")
    assert marker == ":"
    assert set(symbols) <= set("abcde")
    assert answer == (symbols if op == "copy" else symbols[::-1])
    assert row["level"] == len(symbols)
    assert row["data_source"] == "symbols"
  assert {row["prompt"].split(" ")[0] for row in rows} == {"copy", "reverse"}
  assert {row["level"] for row in rows} == {2, 3, 4}


def test_symbols_default_is_copy_only():
  assert all(row["prompt"].startswith("copy ") for row in task_rows("symbols"))


def test_arithmetic_rows_are_right():
  rows = task_rows("arithmetic", n=50, digits=(1, 2))
  assert [row["level"] for row in rows] == [1] * 50 + [2] * 50
  for row in rows:
    [message] = row["prompt"]
    words = message["content"].removesuffix("?").split(" ")
    assert (message["role"], words[:2], words[3]) == ("user", ["What", "is"], "+")
    a, b = int(words[2]), int(words[4])
    assert row["ground_truth"] == str(a + b)
    assert len(str(a)) == len(str(b)) == row["level"]
    assert row["data_source"] == "arithmetic"


def test_one_digit_has_80_train_and_20_eval_problems():
  train = {_question(r) for r in task_rows("arithmetic", n=80)}
  held_out = {_question(r) for r in task_rows("arithmetic", n=20, split="eval")}
  assert (len(train), len(held_out), len(train | held_out)) == (80, 20, 100)


def test_pairs_repeat_only_after_a_full_pass():
  rows = [_question(r) for r in task_rows("arithmetic", n=200)]
  assert len(set(rows[:80])) == 80
  assert set(rows[80:160]) == set(rows[:80])
  assert rows[80:160] != rows[:80]
  assert len(rows) == 200


@pytest.mark.parametrize(
  ("name", "params"),
  [
    ("symbols", {"n": 3000, "max": 3}),
    ("arithmetic", {"n": 8000, "digits": (1, 2)}),
  ],
)
def test_splits_are_disjoint_for_all_seeds(name, params):
  seen = {
    split: {
      _question(row)
      for seed in (0, 1)
      for row in task_rows(name, split=split, seed=seed, **params)
    }
    for split in ("train", "eval")
  }
  assert seen["train"] and seen["eval"]
  assert not seen["train"] & seen["eval"]


@pytest.mark.parametrize("name", ["symbols", "arithmetic"])
def test_rows_depend_on_the_seed_only(name):
  assert task_rows(name, n=40, seed=1) == task_rows(name, n=40, seed=1)
  assert task_rows(name, n=40, seed=1) != task_rows(name, n=40, seed=2)


def test_rows_do_not_change_between_versions():
  assert [_question(r) for r in task_rows("symbols", n=2)] == GOLDEN_SYMBOLS
  assert [_question(r) for r in task_rows("arithmetic", n=3)] == GOLDEN_ARITHMETIC


def test_reference_is_the_call():
  reference = "task:arithmetic?digits=1,2&n=30&split=eval&seed=4"
  expected = task_rows("arithmetic", digits=(1, 2), n=30, split="eval", seed=4)
  assert reference_rows(reference) == expected
  assert reference_rows("task:symbols") == task_rows("symbols")


def test_vocabulary_covers_prompts_and_answers():
  reference = "task:symbols?ops=copy,reverse&symbols=6&n=50"
  words = task_symbols(reference)
  assert words == ("copy", "reverse", ":", "a", "b", "c", "d", "e", "f")
  assert task_symbols("symbols", ops=("copy", "reverse"), symbols=6) == words
  tokenizer = symbol_tokenizer(words)
  for row in reference_rows(reference):
    for text in (row["prompt"], row["ground_truth"]):
      ids = tokenizer(text)["input_ids"]
      assert tokenizer.unk_token_id not in ids
      assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
  ("reference", "reason"),
  [
    ("task:arithmatic", "unknown task 'arithmatic'; did you mean 'arithmetic'"),
    ("task:", "unknown task ''.*known: symbols, arithmetic"),
    ("task:symbols?sed=1", "no parameter 'sed'; did you mean 'seed'"),
    ("task:symbols?ops=revers", "unknown op 'revers'; did you mean 'reverse'"),
    ("task:symbols?ops=copy,copy", "ops=copy,copy, expected each"),
    ("task:symbols?n=many", "n='many', expected a whole number"),
    ("task:symbols?n", "key=value"),
    ("task:symbols?n=1&n=2", "each parameter once"),
    ("task:symbols?n=0", "n=0, expected at least 1"),
    ("task:symbols?seed=-1", "seed=-1, expected 0 or more"),
    ("task:symbols?split=test", "split=test, expected train or eval"),
    ("task:symbols?min=0", "min=0"),
    ("task:symbols?min=3&max=2", "max=2, expected at least min=3"),
    ("task:symbols?symbols=27", "symbols=27, expected from 1 to 26"),
    ("task:arithmetic?digits=3", "digits=3, expected 1, 2 or 1,2"),
    ("task:arithmetic?digits=1,1", "digits=1,1"),
  ],
)
def test_bad_references(reference, reason):
  with pytest.raises(DataError, match=reason):
    reference_rows(reference)


def test_split_without_problems_is_an_error():
  with pytest.raises(DataError, match="too few distinct problems for split="):
    for split in ("train", "eval"):  # one single problem cannot fill both
      task_rows("symbols", n=1, min=1, max=1, symbols=1, split=split)


def test_arithmetic_has_no_symbol_vocabulary():
  with pytest.raises(DataError, match="tokenizer of a model"):
    task_symbols("arithmetic")
