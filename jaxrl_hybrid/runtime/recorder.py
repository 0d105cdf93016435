"""The run directory and everything a run tells the world.

``config.json`` the resolved config; ``metrics.jsonl`` a line per step;
``samples.jsonl`` some completions; ``checkpoints/``; ``hf/`` the exported model.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxrl_hybrid.errors import ConfigError
from jaxrl_hybrid.runtime import processes
from jaxrl_hybrid.runtime.console import Console
from jaxrl_hybrid.runtime.metrics import METRICS_FILE, STEP_KEY, MetricsWriter
from jaxrl_hybrid.runtime.trackers import make_trackers

CONFIG_FILE = "config.json"
# Keys that a saved state depends on without showing it in its shapes.
FIXED = tuple(f"{role}.lora.{key}" for role in ("model", "critic")
              for key in ("alpha", "rslora"))  # fmt: skip
SAMPLES_FILE = "samples.jsonl"
LOCK_FILE = ".lock"


class Recorder:
  """Writes the run directory and prints to the console.

  Args:
    run_dir: created if absent, and locked: one process at a time writes to it.
    config: the resolved config.

  Raises:
    ConfigError: not a directory, or another process is at work in it.
  """

  def __init__(self, run_dir: str | Path, config: ConfigDict):
    self.run_dir = Path(run_dir)
    self._config = config
    try:
      self.run_dir.mkdir(parents=True, exist_ok=True)
      self._lock = (self.run_dir / LOCK_FILE).open("w")
    except OSError as error:
      raise ConfigError(
        f"trainer.run_dir: expected a directory to write to: {error}"
      ) from error
    try:
      fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
      raise ConfigError(
        f"trainer.run_dir: another process is training in {self.run_dir}"
      ) from error

  def open(self, step: int | None) -> None:
    """Continues the directory's run from ``step``, or starts one (None).

    Lines of later steps are dropped.

    Raises:
      ConfigError: a start in a directory that holds a finished or another run, or
        going on with a key of ``FIXED`` changed.
    """
    self._console = Console(self._config.trainer.total_steps)
    self._sample_rows = self._config.trainer.sample_rows
    self._greet(step)
    (self.run_dir / CONFIG_FILE).write_text(
      self._config.to_json_best_effort(indent=2) + "\n", encoding="utf-8"
    )
    with MetricsWriter(self.run_dir) as writer:
      writer.rewind(-1 if step is None else step)
    _rewind_samples(self.run_dir / SAMPLES_FILE, -1 if step is None else step)
    trainer = self._config.trainer
    self._trackers = make_trackers(
      tuple(trainer.trackers),
      self.run_dir,
      self._config.to_dict(),
      project=trainer.project,
      experiment=trainer.experiment or self.run_dir.name,
    )

  def _greet(self, step: int | None) -> None:
    changed = _changed(self.run_dir / CONFIG_FILE, self._config)
    if step is not None:
      wrong = [text for text in changed or () if text.split()[0] in FIXED]
      if wrong:
        raise ConfigError(
          f"{self.run_dir}: what step {step} has trained means something else with "
          f"{', '.join(wrong)}; expected the old value, or another trainer.run_dir"
        )
      self.say(f"resumed from step {step} of {self.run_dir}")
      if changed:
        self.say("changed since: " + ", ".join(changed))
    elif changed is not None:
      if changed or _last_step(self.run_dir) >= self._config.trainer.total_steps:
        raise ConfigError(
          f"trainer.run_dir: {self.run_dir} holds a "
          f"{'different' if changed else 'finished'} run and there is no checkpoint "
          "to resume, or trainer.resume_mode=disable; expected another directory"
        )
      self.say(f"{self.run_dir} has no checkpoint yet: the run starts afresh")

  def say(self, text: str) -> None:
    """Prints text above the progress bar."""
    self._console.write(text)

  def step(self, step: int, metrics: Mapping[str, float]) -> None:
    """Logs one step's metrics and prints its line."""
    for tracker in self._trackers:
      tracker.log(step, metrics)
    self._console.step_line(step, metrics)

  def samples(self, step: int, kind: str, rows: Sequence[tuple], *, show: bool) -> None:
    """Keeps the first rows in samples.jsonl; prints them as a table if asked."""
    rows = rows[: self._sample_rows]
    with (self.run_dir / SAMPLES_FILE).open("a", encoding="utf-8") as file:
      for prompt, completion, answer, reward in rows:
        file.write(
          json.dumps(
            dict(
              step=step,
              kind=kind,
              prompt=prompt,
              completion=completion,
              answer=answer,
              reward=reward,
            ),
            ensure_ascii=False,
          )
          + "\n"
        )
    if show and rows:
      self._console.samples_table(rows, f"{kind} samples at step {step}")

  def close(self) -> None:
    """Takes the bar away and closes the trackers."""
    self._console.close()
    for tracker in self._trackers:
      tracker.finish()


class SilentRecorder:
  """What the other processes have for a ``Recorder``: process 0 does it all."""

  def say(self, text: str) -> None:
    """Nothing."""

  def step(self, step: int, metrics: Mapping[str, float]) -> None:
    """Nothing."""

  def samples(self, step: int, kind: str, rows: Sequence[tuple], *, show: bool) -> None:
    """Nothing."""

  def close(self) -> None:
    """Nothing."""


def make_recorder(run_dir: str | Path, config: ConfigDict) -> Recorder | SilentRecorder:
  """The recorder of this process.

  Raises:
    ConfigError: in every process, as ``Recorder`` on process 0.
  """
  recorder = processes.on_primary(lambda: Recorder(run_dir, config))
  return recorder or SilentRecorder()


def _changed(path: Path, config: ConfigDict) -> list[str] | None:
  """What differs from the config saved at ``path``; None if there is none."""
  if not path.exists():
    return None
  try:
    before = dict(_leaves(json.loads(path.read_text(encoding="utf-8"))))
  except ValueError:
    return [f"{path.name} is not readable"]
  after = dict(_leaves(json.loads(config.to_json_best_effort())))
  return [
    f"{key} {before.get(key)!r} -> {after.get(key)!r}"
    for key in sorted(before | after)
    if before.get(key) != after.get(key)
  ]


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
  for key, value in tree.items():
    if isinstance(value, dict):
      yield from _leaves(value, f"{prefix}{key}.")
    else:
      yield prefix + key, value


def _last_step(run_dir: Path) -> int:
  path = run_dir / METRICS_FILE
  lines = path.read_bytes().split(b"\n") if path.exists() else []
  steps = [step for line in lines if (step := _step_of(line, STEP_KEY)) is not None]
  return max(steps, default=-1)


def _rewind_samples(path: Path, step: int) -> None:
  """Drops samples of later steps, and lines that a crash left unreadable."""
  if path.exists():
    lines = path.read_bytes().split(b"\n")
    kept = [
      line for line in lines if (s := _step_of(line, "step")) is not None and s <= step
    ]
    path.write_bytes(b"".join(line + b"\n" for line in kept))


def _step_of(line: bytes, key: str) -> int | None:
  try:
    step = json.loads(line)[key]
  except (ValueError, KeyError, TypeError):
    return None
  return step if isinstance(step, int) else None
