"""Where metrics go: a file always, TensorBoard and Weights & Biases by name."""

from __future__ import annotations

import difflib
import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from jaxrl_hybrid.errors import ConfigError
from jaxrl_hybrid.runtime.metrics import MetricsWriter

_log = logging.getLogger(__name__)


class Tracker(Protocol):
  """Takes the metrics of a run."""

  def log(self, step: int, metrics: Mapping[str, float]) -> None:
    """Takes the metrics of one step."""

  def finish(self) -> None:
    """Called once, at the end of the run."""


class JsonlTracker:
  """Writes ``<run_dir>/metrics.jsonl``."""

  def __init__(self, run_dir: str | Path):
    self._writer = MetricsWriter(run_dir)

  def log(self, step: int, metrics: Mapping[str, float]) -> None:
    """Appends one line."""
    self._writer.write(step, metrics)

  def finish(self) -> None:
    """Closes the file."""
    self._writer.close()


class TensorboardTracker:
  """Writes event files to ``<run_dir>/tensorboard``."""

  def __init__(self, run_dir: str | Path):
    package = _import("tensorboardX", extra="tensorboard")
    self._writer = package.SummaryWriter(logdir=str(Path(run_dir) / "tensorboard"))

  def log(self, step: int, metrics: Mapping[str, float]) -> None:
    """Adds one scalar per metric."""
    for name, value in metrics.items():
      self._writer.add_scalar(name, value, step)

  def finish(self) -> None:
    """Writes what is buffered and closes the files."""
    self._writer.close()


class WandbTracker:
  """Sends metrics to Weights & Biases."""

  def __init__(
    self, run_dir: str | Path, config: dict[str, Any], project: str, experiment: str
  ):
    package = _import("wandb", extra="wandb")
    try:
      self._run = package.init(
        project=project, name=experiment, config=config, dir=str(run_dir)
      )
    except Exception as error:
      raise ConfigError(
        f"the tracker 'wandb' cannot start: {error}. Run `wandb login`, or set "
        "WANDB_MODE=offline, or take 'wandb' out of the trackers"
      ) from error

  def log(self, step: int, metrics: Mapping[str, float]) -> None:
    """Sends one step."""
    self._run.log(dict(metrics), step=step)

  def finish(self) -> None:
    """Waits until everything is sent."""
    self._run.finish()


class _Guarded:
  """A tracker whose failures are logged once and never end a run."""

  def __init__(self, name: str, tracker: Tracker):
    self._name = name
    self._tracker = tracker
    self._failed = False

  def log(self, step: int, metrics: Mapping[str, float]) -> None:
    self._try(lambda: self._tracker.log(step, metrics), f"step {step}")

  def finish(self) -> None:
    self._try(self._tracker.finish, "the end")

  def _try(self, action: Callable[[], None], when: str) -> None:
    try:
      action()
    except Exception:
      if not self._failed:
        _log.exception(
          "the tracker %r failed at %s; the run goes on, and further failures of "
          "this tracker are not reported",
          self._name,
          when,
        )
      self._failed = True


def make_trackers(
  names: Sequence[str],
  run_dir: str | Path,
  config: dict[str, Any],
  *,
  project: str,
  experiment: str,
) -> list[Tracker]:
  """Returns the trackers of a run.

  Args:
    names: any of jsonl, tensorboard, wandb; jsonl is always there.
    run_dir: where files go.
    config: the run's config, for trackers that show it.
    project: a name that groups experiments.
    experiment: the name of this run.

  Raises:
    ConfigError: for an unknown name, a missing package, or a failed start.
  """
  makers: dict[str, Callable[[], Tracker]] = {
    "jsonl": lambda: JsonlTracker(run_dir),
    "tensorboard": lambda: TensorboardTracker(run_dir),
    "wandb": lambda: WandbTracker(run_dir, config, project, experiment),
  }
  for name in names:
    if name not in makers:
      raise ConfigError(_unknown(name, list(makers)))
  wanted = dict.fromkeys(["jsonl", *names])
  return [_Guarded(name, makers[name]()) for name in wanted]


def _unknown(name: str, known: list[str]) -> str:
  near = difflib.get_close_matches(name, known, n=1)
  hint = f"; did you mean {near[0]!r}?" if near else ""
  return f"unknown tracker {name!r}: expected one of {', '.join(known)}{hint}"


def _import(package: str, *, extra: str) -> ModuleType:
  try:
    return importlib.import_module(package)
  except ImportError as error:
    raise ConfigError(
      f"the tracker {extra!r} needs the package {package} ({error}): "
      f"pip install 'jaxrl-hybrid[{extra}]'"
    ) from error
