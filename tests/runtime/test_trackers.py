"""Trackers: what reaches each backend, and that no backend can end a run."""

import json
import sys
import types

import pytest

from jaxrl_hybrid.errors import ConfigError
from jaxrl_hybrid.runtime.trackers import make_trackers


def make(names, run_dir, config=None):
  return make_trackers(names, run_dir, config or {}, project="proj", experiment="exp")


class FakeRun:
  """Stands for a wandb run and for a SummaryWriter."""

  def __init__(self, **kwargs):
    self.kwargs, self.calls, self.ended = kwargs, [], 0

  def log(self, metrics, step):
    self.calls.append((step, metrics))

  def add_scalar(self, name, value, step):
    self.calls.append((step, name, value))

  def finish(self):
    self.ended += 1

  close = finish


@pytest.fixture
def fakes(monkeypatch):
  """Installs a fake wandb and a fake tensorboardX; returns what they make."""
  made = {}

  def maker(name):
    def make_run(**kwargs):
      made[name] = FakeRun(**kwargs)
      return made[name]

    return make_run

  wandb, board = types.ModuleType("wandb"), types.ModuleType("tensorboardX")
  wandb.init, board.SummaryWriter = maker("wandb"), maker("tensorboard")
  monkeypatch.setitem(sys.modules, "wandb", wandb)
  monkeypatch.setitem(sys.modules, "tensorboardX", board)
  return made


@pytest.mark.parametrize("names", [[], ["jsonl"], ["jsonl", "jsonl"]])
def test_jsonl_is_always_there_once(tmp_path, names):
  (tracker,) = make(names, tmp_path)
  tracker.log(3, {"a": 1.5})
  tracker.finish()
  lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
  assert [json.loads(x) for x in lines] == [{"training/global_step": 3, "a": 1.5}]


def test_wandb(tmp_path, fakes):
  trackers = make(["wandb"], tmp_path, {"seed": 1})
  for tracker in trackers:
    tracker.log(2, {"a": 1.0})
    tracker.finish()
  run = fakes["wandb"]
  assert run.kwargs == {
    "project": "proj",
    "name": "exp",
    "config": {"seed": 1},
    "dir": str(tmp_path),
  }
  assert run.calls == [(2, {"a": 1.0})] and run.ended == 1
  assert (tmp_path / "metrics.jsonl").exists()


def test_tensorboard(tmp_path, fakes):
  _, tracker = make(["tensorboard"], tmp_path)
  tracker.log(2, {"a": 1.0, "b": 2.0})
  tracker.finish()
  run = fakes["tensorboard"]
  assert run.kwargs == {"logdir": str(tmp_path / "tensorboard")}
  assert run.calls == [(2, "a", 1.0), (2, "b", 2.0)] and run.ended == 1


@pytest.mark.parametrize(
  "name, package", [("wandb", "wandb"), ("tensorboard", "tensorboardX")]
)
def test_missing_package_names_the_extra(tmp_path, monkeypatch, name, package):
  monkeypatch.setitem(sys.modules, package, None)
  with pytest.raises(ConfigError, match=rf"{package}.*jaxrl-hybrid\[{name}\]"):
    make([name], tmp_path)


def test_a_failed_start_says_what_to_do(tmp_path, fakes):
  def fail(**kwargs):
    raise RuntimeError("no api key")

  sys.modules["wandb"].init = fail
  with pytest.raises(ConfigError, match="no api key.*wandb login"):
    make(["wandb"], tmp_path)


def test_unknown_name_gets_the_nearest_and_starts_nothing(tmp_path, fakes):
  with pytest.raises(ConfigError, match="'wandbb'.*did you mean 'wandb'"):
    make(["wandb", "wandbb"], tmp_path)
  assert not fakes
  with pytest.raises(ConfigError, match="expected one of jsonl, tensorboard, wandb$"):
    make(["zzz"], tmp_path)


def test_a_failing_tracker_is_reported_once_and_the_run_goes_on(
  tmp_path, fakes, caplog
):
  jsonl, wandb = make(["wandb"], tmp_path)
  run = fakes["wandb"]
  good, run.log = run.log, lambda *_, **__: 1 / 0
  for step in (1, 2):
    jsonl.log(step, {})
    wandb.log(step, {})
  assert len(caplog.records) == 1
  assert "'wandb' failed at step 1" in caplog.text
  assert "ZeroDivisionError" in caplog.text
  run.log = good
  wandb.log(3, {"a": 1.0})  # it is tried again: the failure may have passed
  assert run.calls == [(3, {"a": 1.0})]
  assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_failure_at_the_end_does_not_end_the_run(tmp_path, fakes, caplog):
  _, wandb = make(["wandb"], tmp_path)
  fakes["wandb"].finish = lambda: 1 / 0
  wandb.finish()
  assert "failed at the end" in caplog.text


def test_an_interrupt_is_not_swallowed(tmp_path, fakes):
  def interrupt(*_, **__):
    raise KeyboardInterrupt

  _, wandb = make(["wandb"], tmp_path)
  fakes["wandb"].log = interrupt
  with pytest.raises(KeyboardInterrupt):
    wandb.log(1, {})
