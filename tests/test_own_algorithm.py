"""An algorithm of the user's own: as the README shows it, and every way to fail."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import test_algorithm_runs
import test_train

from jaxrl_hybrid import config as config_lib
from jaxrl_hybrid import config_reader, inspection
from jaxrl_hybrid.algorithms import registry
from jaxrl_hybrid.algorithms.estimate import compute_advantages
from jaxrl_hybrid.algorithms.kl import KLController
from jaxrl_hybrid.errors import ConfigError
from jaxrl_hybrid.types import STOP, Batch, Prompt

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
TO_REMAX, TO_OWN = re.findall(r"```diff\n(.*?)```", README, re.S)
OWN_FILE = re.search(r"```python\n(# my_algorithm.py\n.*?)```", README, re.S)[1]


@pytest.fixture(autouse=True)
def registries():
  """As they were before the test."""
  tables = (registry.ESTIMATORS, registry.POLICY_LOSSES)
  before = [dict(table) for table in tables]
  yield
  for table, entries in zip(tables, before, strict=True):
    table.clear()
    table.update(entries)


def load(file, name, *overrides):
  return config_lib.resolve(
    config_reader.from_argv(
      [
        "train",
        "--config",
        test_train.TINY,
        f"--config.algorithm.module={file}",
        f"--config.algorithm.name={name}",
        *overrides,
      ]
    )[0]
  )


def forget(file):
  """As in a new process."""
  for name, module in list(sys.modules.items()):
    if getattr(module, "__file__", None) == str(file):
      del sys.modules[name]


def write(tmp_path, text, name="my_algorithm.py"):
  file = tmp_path / name
  file.write_text(text)
  return file


def test_the_readme_needs_less_than_ten_lines():
  changed = lambda diff: [x for x in diff.splitlines() if x and x[0] in "+-"]
  assert len(changed(TO_REMAX)) == 2
  own = [x for x in OWN_FILE.splitlines() if x.strip() and not x.startswith("#")]
  assert len(changed(TO_OWN)) + len(own) < 10
  for diff, name in ((TO_REMAX, "remax"), (TO_OWN, "beat_the_median")):
    assert '-  config.algorithm.name = "ppo"' in diff
    assert f'+  config.algorithm.name = "{name}"' in diff
  assert '+  config.algorithm.module = "my_algorithm.py"' in TO_OWN


def test_the_readmes_own_algorithm_trains_and_a_saved_run_knows_its_file(tmp_path):
  file = write(tmp_path, OWN_FILE)
  settings = {"algorithm.module": str(file), "rollout.n": 1}
  rows = test_algorithm_runs.fit(tmp_path / "run", "beat_the_median", settings)
  assert rows[-1]["critic/advantages/max"] > 0 >= rows[-1]["critic/advantages/min"]
  del registry.ESTIMATORS["beat_the_median"]
  forget(file)
  saved = config_reader.from_run(tmp_path / "run" / "config.json")
  assert inspection.make_algorithm(saved).min_group_size == 1


def test_an_own_estimator_and_an_own_loss_are_found_by_name(tmp_path):
  file = write(
    tmp_path,
    """
from jaxrl_hybrid.algorithms import Groups, register_estimator, register_policy_loss

@register_estimator("above_max", needs=("values",), min_group_size=2)
def above_max(batch, algorithm):
  return batch.scores - Groups(batch.draw_ids).max(batch.scores)

@register_policy_loss("bold")
def bold(log_probs, old_log_probs, advantages, mask, *, clip_ratio_high):
  return -(1 + clip_ratio_high) * advantages * log_probs, {}
""",
  )
  config = load(file, "above_max", "--config.actor.policy_loss=bold")
  config_lib.validate(config)
  algorithm = inspection.make_algorithm(config)
  assert algorithm.needs_critic and algorithm.min_group_size == 2
  batch = Batch(
    prompts=[Prompt(np.ones(1, np.int32), "", "", 0, 0)] * 2,
    sample_ids=np.arange(2),
    response_ids=np.ones((2, 3), np.int32),
    response_lengths=np.array([2, 3], np.int32),
    finish_reasons=[STOP] * 2,
    rollout_log_probs=np.zeros((2, 3), np.float32),
    scores=np.array([1.0, 4.0], np.float32),
    rewards=np.zeros((2, 3), np.float32),
  )
  out = compute_advantages(batch, algorithm, KLController("fixed", 0.0, 1.0, 1))
  np.testing.assert_array_equal(out.advantages, [[-3, -3, 0], [0, 0, 0]])
  assert load(file, "bold").algorithm.adv_estimator == "grpo"


@pytest.mark.parametrize(
  "text,name,words",
  [
    (None, "mine", ["algorithm.module", "my_algorithm.py", "does not exist"]),
    ("x = (", "mine", ["algorithm.module", "SyntaxError"]),
    ("import nowhere", "mine", ["fails on import", "nowhere"]),
    ("", "mine", ["algorithm.name", "'mine'", "'grpo'"]),
    (
      "from jaxrl_hybrid.algorithms import register_estimator\n"
      "register_estimator('gae')(print)",
      "mine",
      ["'gae' is taken"],
    ),
    (
      "from jaxrl_hybrid.algorithms import register_policy_loss\n"
      "register_policy_loss('x')(lambda p, q, a, m, *, cliprange: p)",
      "x",
      ["clip_ratio_low", "cliprange"],
    ),
  ],
)
def test_what_is_wrong_with_a_file_is_said(text, name, words, tmp_path):
  file = tmp_path / "my_algorithm.py"
  if text is not None:
    write(tmp_path, text)
  with pytest.raises(ConfigError) as caught:
    load(file, name)
  assert all(word in str(caught.value) for word in words), caught.value
