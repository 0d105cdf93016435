"""verify_model: equal models pass, others do not; a table says where."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))
from oracle import FAMILIES, SIZES, torch_model  # noqa: E402

from jaxrl_hybrid.errors import ConfigError, ModelError  # noqa: E402
from jaxrl_hybrid.tools import verify_model  # noqa: E402
from jaxrl_hybrid.tools.oracle import Oracle  # noqa: E402


def run(path, *options):
  verify_model.main(["verify_model", str(path), "--tokens", "40", *options])


SLOW = [pytest.param(n, marks=pytest.mark.slow) for n in ("gemma2", "deepseek_v2")]


@pytest.mark.parametrize("name", ["llama3_rope", *SLOW])
def test_a_model_equals_transformers(name, tmp_path, capsys):
  torch_model(name, tmp_path, num_hidden_layers=2)
  run(tmp_path)
  printed = capsys.readouterr().out
  assert "equal: at most" in printed and "NOT" not in printed
  for line in ("logits 0-15", "logits 16-39", "log-probs 16-38", "greedy, 8 tokens"):
    assert line in printed
  assert printed.count("100.0%") == 3  # two ranges of positions, greedy


def test_scores_of_a_classifier_equal_transformers(tmp_path, capsys):
  torch = pytest.importorskip("torch")
  from transformers import AutoConfig, AutoModelForSequenceClassification

  fields = SIZES | FAMILIES["qwen2"] | dict(num_labels=1, pad_token_id=7)
  config = AutoConfig.for_model(fields.pop("model_type"), **fields)
  torch.manual_seed(0)
  model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
  torch.nn.init.normal_(model.score.weight)
  model.save_pretrained(tmp_path)
  run(tmp_path)
  printed = capsys.readouterr().out
  assert "score of 16 tokens" in printed and "score of 40 tokens" in printed


class Ours:
  """Stands for the package's model: transformers' results, some of them changed."""

  def __init__(self, path, dtype, logits=None, greedy=None):
    self.theirs = Oracle(path, dtype=dtype.name)
    self.change_logits = logits or (lambda x: None)
    self.change_greedy = greedy or (lambda x: None)

  def logits(self, tokens):
    found = self.theirs.logits(tokens).copy()
    self.change_logits(found)
    return found

  def log_probs(self, tokens):
    logits = self.logits(tokens)[0].astype(np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    own = log_probs[np.arange(len(logits) - 1), tokens[0, 1:]]
    return np.concatenate([[0.0], own])[None]

  def greedy(self, prompt, count):
    found = self.theirs.greedy(prompt, count)[0].copy()
    self.change_greedy(found)
    return found


@pytest.fixture
def changed(tmp_path, monkeypatch):
  """Makes verify_model compare a changed model: ``changed(logits=…, greedy=…)``."""
  torch_model("llama", tmp_path)

  def install(**changes):
    ours = lambda path, dtype: Ours(path, dtype, **changes)
    monkeypatch.setattr(verify_model, "open_model", ours)
    return tmp_path

  return install


def test_no_difference_is_none(changed):
  rows = verify_model.verify(changed(), dtype="float32", tokens=40)
  assert max(row.relative for row in rows) < 1e-6
  assert rows[-1].agreement == 1.0 and rows[-1].largest == 0.0


def test_a_difference_is_an_exit_code_and_a_place(changed, capsys):
  def change(logits):
    logits[:, 30, 5] += 2.0

  path = changed(logits=change)
  with pytest.raises(SystemExit) as error:
    run(path)
  assert error.value.code == verify_model.FAILED
  assert "NOT EQUAL" in capsys.readouterr().out
  first, second, *_ = verify_model.verify(path, dtype="float32", tokens=40)
  assert first.largest == 0.0 and second.what == "logits 16-39"
  assert second.largest == pytest.approx(2.0, rel=1e-5)
  assert second.mean == pytest.approx(2.0 / (24 * 131), rel=1e-5)


def test_in_16_bits_the_tolerance_is_another(changed, capsys):
  def change(logits):
    logits *= 1.01

  path = changed(logits=change)
  run(path, "--dtype", "bfloat16")
  assert "tolerance 3e-01" in capsys.readouterr().out
  with pytest.raises(SystemExit):
    run(path, "--dtype", "bfloat16", "--tolerance", "1e-3")


def test_another_greedy_token_counts_by_what_it_loses(changed):
  def change(tokens):
    tokens[3:] = (tokens[3:] + 1) % 131

  row = verify_model.verify(changed(greedy=change), dtype="float32", tokens=20)[-1]
  assert row.agreement == 3 / 8 and row.largest > 0.1
  assert row.relative > verify_model.TOLERANCES["float32"]


def test_without_torch_it_says_so(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "torch", None)
  with pytest.raises(ModelError, match="needs torch: pip install torch"):
    Oracle(tmp_path, dtype="float32")


@pytest.mark.parametrize("tokens", [3, 505])
def test_a_row_that_does_not_fit_is_named(tmp_path, tokens):
  torch_model("llama", tmp_path)
  with pytest.raises(ConfigError, match=f"--tokens: .* 16 to .* 504, got {tokens}"):
    verify_model.verify(tmp_path, dtype="float32", tokens=tokens)


def test_positions_are_compared_in_ranges():
  assert verify_model.position_ranges(16) == [range(16)]
  assert verify_model.position_ranges(64) == [range(16), range(16, 64)]
  ranges = verify_model.position_ranges(300)
  assert ranges == [range(16), range(16, 64), range(64, 256), range(256, 300)]
