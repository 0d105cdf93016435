"""The run directory and everything a run tells the world.

``config.json`` the resolved config; ``metrics.jsonl`` a line per step;
``samples.jsonl`` some completions; ``checkpoints/``; ``hf/`` the exported model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxrl_hybrid.errors import ConfigError
from jaxrl_hybrid.runtime.console import Console
from jaxrl_hybrid.runtime.metrics import METRICS_FILE, MetricsWriter
from jaxrl_hybrid.runtime.trackers import make_trackers

CONFIG_FILE = "config.json"
SAMPLES_FILE = "samples.jsonl"


class Recorder:
  """Writes the run directory and prints to the console.

  Args:
    run_dir: created if absent.
    config: the resolved config.
    step: the step to continue from; later lines of an earlier run are dropped.

  Raises:
    ConfigError: the directory holds a run that is not continued.
  """

  def __init__(self, run_dir: str | Path, config: ConfigDict, *, step: int):
    self.run_dir = Path(run_dir)
    _check_free(self.run_dir, step)
    self.run_dir.mkdir(parents=True, exist_ok=True)
    (self.run_dir / CONFIG_FILE).write_text(
      config.to_json_best_effort(indent=2) + "\n", encoding="utf-8"
    )
    with MetricsWriter(self.run_dir) as writer:
      writer.rewind(step)
    _rewind_samples(self.run_dir / SAMPLES_FILE, step)
    self._console = Console(config.trainer.total_steps)
    self._sample_rows = config.trainer.sample_rows
    self._trackers = make_trackers(
      tuple(config.trainer.trackers),
      self.run_dir,
      config.to_dict(),
      project=config.trainer.project,
      experiment=config.trainer.experiment or self.run_dir.name,
    )

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


def _check_free(run_dir: Path, step: int) -> None:
  """Starting afresh must not overwrite what an earlier run left."""
  metrics = run_dir / METRICS_FILE
  if step == 0 and metrics.exists() and metrics.stat().st_size:
    raise ConfigError(
      f"trainer.run_dir: {run_dir} holds a run and there is no checkpoint to "
      "resume, or trainer.resume_mode=disable; expected another directory"
    )


def _rewind_samples(path: Path, step: int) -> None:
  if path.exists():
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and _step_of(line) <= step]
    path.write_text("".join(kept), encoding="utf-8")


def _step_of(line: str) -> Any:
  return json.loads(line)["step"]
