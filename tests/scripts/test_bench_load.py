"""scripts/bench_load.py on a directory that scripts/make_random_model.py makes."""

import argparse
import importlib.util
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def script(name):
  spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_report_adds_up(tmp_path, capsys, dtype):
  maker, bench = script("make_random_model"), script("bench_load")
  maker.main(["--shape", "tiny", "--layers", "2", "--out", str(tmp_path / "model")])
  flags = argparse.Namespace(
    model=tmp_path / "model", dtype=dtype, train=(1, 2, 1), repeat=1
  )
  report = bench.measure_all(flags)
  for row in report["caches"].values():
    assert row["ratio"] == pytest.approx(row["load_gb_per_s"] / row["disk_gb_per_s"])
    # Every byte once, and the headers.
    assert report["bytes"] <= row["read_bytes"] < report["bytes"] + 100_000
  width = {"bfloat16": 1, "float32": 2}[dtype]
  padding = 2 * (576 - 515) * 64 * 2  # of the vocabulary, twice
  replicated = report["kept_bytes"] / width - report["bytes"] - padding
  assert 0 < replicated < 0.01 * report["bytes"]  # norms and biases
  bench.print_table(report)
  printed = capsys.readouterr().out
  assert "cold" in printed and "warm" in printed and "tiny" not in printed
