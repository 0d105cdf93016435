"""docs/algorithms.md, the presets and configs/algorithms/ tell of the same things."""

import re
from pathlib import Path

import pytest

from jaxrl_hybrid import config as config_lib
from jaxrl_hybrid import config_reader
from jaxrl_hybrid.algorithms import kl, reduce, registry
from jaxrl_hybrid.algorithms.presets import PRESETS

ROOT = Path(__file__).parents[1]
DOC = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
NAMES = set(re.findall(r"`([\w+-]+)`", DOC))


@pytest.mark.parametrize(
  "known",
  [
    registry.ESTIMATORS,
    registry.POLICY_LOSSES,
    set(PRESETS) - {"reinforce_plus_plus_baseline"},  # "..._baseline"
    reduce.AGGREGATIONS,
    kl.ESTIMATORS,
  ],
  ids=["estimators", "losses", "presets", "aggregations", "kl"],
)
def test_every_name_is_in_the_document(known):
  assert not set(known) - NAMES


def test_files_that_the_document_names_are_there():
  named = re.findall(r"`((?:tests|algorithms|workers|configs)/[\w/]+\.py)`", DOC)
  assert len(named) > 10
  for name in set(named) - {"configs/algorithms/NAME.py"}:
    assert (ROOT / name).exists() or (ROOT / "jaxrl_hybrid" / name).exists(), name


@pytest.mark.parametrize("name", PRESETS)
def test_every_algorithm_has_a_config(name):
  file = ROOT / "configs" / "algorithms" / f"{name}.py"
  assert f"--config configs/algorithms/{name}.py" in file.read_text(encoding="utf-8")
  config, _ = config_reader.from_argv(["train", "--config", str(file)])
  assert config.algorithm.name == name
  config_lib.validate(config_lib.resolve(config))
