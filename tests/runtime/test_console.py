"""What the console prints, with and without a terminal."""

import io
import os

import pytest

from jaxrl_hybrid.runtime import console as console_module
from jaxrl_hybrid.runtime.console import Console

METRICS = {
  "timing_s/step": 0.314,
  "critic/rewards/mean": 0.412,
  "actor/loss": -0.0131,
  "actor/entropy": 1.2034,
  "actor/ppo_kl": 0.00123,
  "rollout_train_logprob_diff_mean": 1.2e-6,
  "actor/grad_norm": 0.834,
  "actor/lr": 2e-3,
  "perf/throughput": 5120.4,
}
LINE = (
  "step 12/300 | 0.31 s | reward 0.412 | loss -0.013 | entropy 1.203 | kl 0.0012"
  " | gap 1.2e-06 | grad 0.83 | lr 2.0e-03 | 5,120 tok/s"
)


class Terminal(io.StringIO):
  def isatty(self):
    return True


def printed(action, stream=None) -> list[str]:
  stream = stream or io.StringIO()
  console = Console(300, stream=stream)
  action(console)
  console.close()
  return stream.getvalue().splitlines()


def test_step_line():
  assert printed(lambda c: c.step_line(12, METRICS)) == [LINE]


def test_absent_keys_are_dashes():
  metrics = {"actor/loss": 0.0, "timing_s/step": 2.0}
  assert printed(lambda c: c.step_line(1, metrics)) == [
    "step 1/300 | 2.00 s | reward - | loss 0.000 | entropy - | kl - | gap - | grad -"
    " | lr - | - tok/s"
  ]


def test_an_evaluation_before_the_first_step_is_alone_on_its_line():
  assert printed(lambda c: c.step_line(0, {"eval/reward": 0.25})) == [
    "step 0/300 | eval reward 0.250"
  ]


def test_eval_results_are_appended_when_present():
  evals = {"eval/reward": 0.25, "eval/exact_match": 0.5}
  assert printed(lambda c: c.step_line(12, METRICS | evals)) == [
    LINE + " | eval reward 0.250 | eval exact 0.500"
  ]
  assert printed(lambda c: c.step_line(12, METRICS | {"eval/exact_match": 0.5})) == [
    LINE + " | eval exact 0.500"
  ]


def test_not_a_terminal_gets_no_bar():
  stream = io.StringIO()
  console = Console(2, stream=stream)
  console.step_line(1, METRICS)
  console.close()
  assert "\r" not in stream.getvalue() and "%" not in stream.getvalue()


def test_terminal_gets_lines_above_a_bar():
  stream = Terminal()
  console = Console(4, stream=stream)
  console.step_line(3, METRICS)
  console.step_line(4, METRICS)
  text = stream.getvalue()
  assert "4/4" in text
  lines = [x for x in text.replace("\r", "\n").split("\n") if x.startswith("step ")]
  assert [x[:8] for x in lines] == ["step 3/4", "step 4/4"]
  console.close()
  console.close()


def test_default_stream_is_the_stdout_of_the_moment(capsys):
  Console(300).step_line(12, METRICS)
  assert capsys.readouterr().out == LINE + "\n"


def table(rows, stream=None) -> list[str]:
  return printed(lambda c: c.samples_table(rows, "samples of step 5"), stream)


def test_table_is_aligned_and_escaped():
  lines = table([("1+1=?", "It is\n2.\t\x1b[31m", "2", 1.0), ("hi", "yes", None, -0.5)])
  assert lines == [
    "samples of step 5",
    "prompt  completion           answer  reward",
    "-" * 43,
    r"1+1=?   It is\n2.\t\x1b[31m  2        1.000",
    "hi      yes                  -       -0.500",
  ]


def test_long_texts_are_shortened_in_the_middle_to_fit():
  rows = [("p" * 300 + "END", "START" + "c" * 300, "a" * 90, 0.0)]
  lines = table(rows)
  assert max(map(len, lines)) == 100
  row = lines[-1]
  assert "END  START" in row and row.count("...") == 3


def test_room_that_the_prompt_does_not_need_goes_to_the_completion():
  row = table([("short", "c" * 70, "4", 0.0)])[-1]
  assert "c" * 70 in row and len(row) <= 100


def test_narrow_terminal(monkeypatch):
  monkeypatch.setattr(
    console_module.shutil, "get_terminal_size", lambda _: os.terminal_size((60, 24))
  )
  lines = table([("p" * 100, "c" * 100, "42", 1.0)], Terminal())
  assert max(map(len, lines)) == 60


def test_wide_characters_stay_aligned():
  lines = table([("日本語", "a", "1", 0.0), ("abcdef", "a", "1", 0.0)])
  assert lines[-2] == lines[-1].replace("abcdef", "日本語")
  row = table([("日" * 200, "a", "1", 0.0)])[-1]
  assert sum(2 if c == "日" else 1 for c in row) in (99, 100)


def test_an_empty_table_is_only_its_head():
  assert len(table([])) == 3


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_text_that_the_stream_cannot_show_does_not_end_a_run(encoding):
  raw = io.BytesIO()
  stream = io.TextIOWrapper(raw, encoding=encoding)
  Console(1, stream=stream).samples_table([("é", "\ud800", None, 0.0)], "t")
  stream.flush()
  assert ("é" if encoding == "utf-8" else r"\xe9") in raw.getvalue().decode()
