"""Reduction of metrics, and metrics.jsonl over crashes and resumes."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_hybrid.runtime.metrics import STEP_KEY, MetricsWriter


def rows(run_dir):
  text = (run_dir / "metrics.jsonl").read_text()
  return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def test_write_is_on_disk_at_once(tmp_path):
  writer = MetricsWriter(tmp_path / "run")
  writer.write(1, {"actor/loss": np.float32(0.5), "n": np.int64(3), "j": jnp.ones(())})
  assert rows(tmp_path / "run") == [{STEP_KEY: 1, "actor/loss": 0.5, "n": 3, "j": 1.0}]
  writer.close()
  writer.close()


def test_not_finite_numbers_become_null(tmp_path):
  with MetricsWriter(tmp_path) as writer:
    writer.write(1, {"a": math.nan, "b": -math.inf, "c": np.float32("nan"), "d": 1.0})
  assert rows(tmp_path) == [{STEP_KEY: 1, "a": None, "b": None, "c": None, "d": 1.0}]


def test_the_step_is_the_argument_and_comes_first(tmp_path):
  with MetricsWriter(tmp_path) as writer:
    writer.write(7, {"a": 1.0, STEP_KEY: 99.0})
  assert list(rows(tmp_path)[0].items()) == [(STEP_KEY, 7), ("a", 1.0)]


def test_rewind_then_go_on(tmp_path):
  with MetricsWriter(tmp_path) as writer:
    for step in range(1, 6):
      writer.write(step, {"a": step})
  with MetricsWriter(tmp_path) as writer:
    writer.rewind(3)
    writer.write(4, {"a": 40})
  assert [(r[STEP_KEY], r["a"]) for r in rows(tmp_path)] == [
    (1, 1),
    (2, 2),
    (3, 3),
    (4, 40),
  ]
  assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_rewind_to_the_last_step_changes_nothing(tmp_path):
  with MetricsWriter(tmp_path) as writer:
    writer.write(1, {})
    before = (tmp_path / "metrics.jsonl").stat().st_ino
    writer.rewind(1)
    assert (tmp_path / "metrics.jsonl").stat().st_ino == before
    writer.rewind(0)
  assert rows(tmp_path) == []


def test_a_torn_last_line_is_dropped(tmp_path, caplog):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"training/global_step": 1}\n{"training/glo')
  with MetricsWriter(tmp_path) as writer:
    writer.write(2, {})
  assert [r[STEP_KEY] for r in rows(tmp_path)] == [1, 2]
  assert "cut off" in caplog.text


def test_rewind_drops_a_broken_line_and_says_so(tmp_path, caplog):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"training/global_step": 1}\n\x00\x00\n[3]\n')
  with MetricsWriter(tmp_path) as writer:
    writer.rewind(5)
  assert [r[STEP_KEY] for r in rows(tmp_path)] == [1]
  assert caplog.text.count("unreadable") == 2
