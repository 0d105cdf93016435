"""Imports point one way, as the layers of the package."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "jaxrl_hybrid"
# Each layer may import itself and those after it.
LAYERS = [
  {"api", "controller", "assembly", "build", "adapting", "inspection", "cli"}
  | {"model_source", "evaluation", "run_plan", "role_params", "costs", "styling"}
  | {"config", "config_checks", "algorithm_checks", "config_reader", "batch_sizes"}
  | {"train", "evaluate", "export"}
  | {"plan", "plan_model", "plan_report", "planning", "tools"},
  {"workers", "data", "rewards", "runtime"},
  {"rollout", "parallel", "models"},
  {"ops", "algorithms", "types", "errors", "shapes", "user_files"},
]


def layer(name):
  return next(i for i, names in enumerate(LAYERS) if name in names)


def imported(path):
  """Second parts of all ``jaxrl_hybrid.X`` imports of a file."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom) and node.module == "jaxrl_hybrid":
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxrl"):
      yield node.module.split(".")[1]


@pytest.mark.parametrize(
  "path",
  sorted(p for p in PACKAGE.rglob("*.py") if p.name != "__init__.py"),
  ids=lambda p: str(p.relative_to(PACKAGE)),
)
def test_a_module_imports_its_own_layer_or_those_below(path):
  own = layer(path.relative_to(PACKAGE).parts[0].removesuffix(".py"))
  above = [name for name in imported(path) if layer(name) < own]
  assert not above, f"{path.name} imports {above} from a layer above it"


def test_no_module_is_large():
  sizes = {p.name: len(p.read_text().splitlines()) for p in PACKAGE.rglob("*.py")}
  assert max(sizes.values()) <= 400, sizes
