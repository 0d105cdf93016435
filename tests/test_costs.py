"""The cost's side of Safe RLHF: its config, what it loads, and what a plan counts."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import tiny_config

from jaxrl_hybrid import config as config_lib
from jaxrl_hybrid import costs, inspection, planning
from jaxrl_hybrid.errors import JaxrlError

RANDOM = dict(
  model_type="llama",
  hidden_size=16,
  intermediate_size=24,
  num_hidden_layers=1,
  num_attention_heads=2,
  num_key_value_heads=2,
  max_position_embeddings=32,
)


def configured(**changes):
  """Resolved; keys with __ for dots."""
  config = tiny_config.get_config()
  with config.unlocked():
    config.algorithm.name = "safe_rlhf"
    for key, value in changes.items():
      *path, name = key.split("__")
      section = config
      for part in path:
        section = section[part]
      section[name] = value
  return config_lib.resolve(config)


def test_the_costs_config_is_the_runs_with_other_judges():
  config = configured(
    cost__model__path="cost-model", critic__path="critic", rewards__overlong_buffer=2
  )
  own = costs.cost_config(config)
  assert own.rewards.functions == ("repetition",) and own.rewards.overlong_buffer == 0
  assert own.reward_model.path == own.critic.path == "cost-model"
  assert config.critic.path == "critic" and not config.reward_model.path
  assert own.rewards.on_error == config.rewards.on_error
  config.cost.critic_path = "cost-critic"
  assert costs.cost_config(config).critic.path == "cost-critic"


@pytest.mark.parametrize(
  "changes,words",
  [
    (dict(cost__functions=(), cost__weights=()), ["cost.functions", "cost.model.path"]),
    (dict(cost__weights=(1.0, 2.0)), ["cost", "1 numbers"]),
    (dict(cost__functions=("repetiton",)), ["cost", "repetition"]),
    (dict(cost__multiplier=0.0), ["0 < multiplier"]),
    (dict(cost__multiplier=11.0), ["11.0 and 10.0"]),
    (dict(cost__limit=float("nan")), ["finite limit"]),
    (dict(cost__multiplier_lr=-1.0), ["multiplier_lr"]),
    (dict(cost__critic_path="nowhere"), ["cost.critic_path", "nowhere"]),
    (dict(cost__model__path="nowhere"), ["cost.model", "nowhere"]),
    (dict(algorithm__adv_estimator="remax"), ["use_cost", "remax"]),
    (dict(algorithm__adv_estimator="gdpo"), ["use_cost", "gdpo"]),
  ],
)
def test_what_is_wrong_with_a_cost_is_said(changes, words):
  with pytest.raises(JaxrlError) as caught:
    inspection.inspect(configured(**changes))
  assert all(word in str(caught.value) for word in words), caught.value


def test_without_a_cost_nothing_of_it_is_looked_at():
  config = configured(
    algorithm__name="ppo", cost__functions=("nowhere",), cost__model__path="nowhere"
  )
  assert inspection.inspect(config).cost is None


def test_a_plan_counts_the_costs_models():
  config = configured(cost__model__random=RANDOM, cost__functions=(), cost__weights=())
  plan = inspection.inspect(config)
  assert "cost: a cost model; at most 0.1 on average" in plan.describe()
  planner = planning.Planner(plan, estimate=True)
  phases = {phase.name: phase.components for phase in planner.report().phases}
  assert {"cost", "cost_values", "update_cost_critic: gradients"} <= set(phases)
  resident = phases["gen"]
  for part in ("fp32 parameters", "moments", "weights"):
    assert resident[f"cost_critic {part}"] == resident[f"critic {part}"] > 0
  assert resident["cost weights"] > 0
  ppo = planning.Planner(
    inspection.inspect(configured(algorithm__name="ppo")), estimate=True
  ).report()
  extra = planner.report().peak.bytes - ppo.peak.bytes
  added = sum(v for k, v in resident.items() if k.startswith("cost"))
  np.testing.assert_allclose(extra, added, rtol=0.3)


def test_grpo_with_a_cost_has_no_critics():
  config = configured(algorithm__name="grpo", algorithm__use_cost=True)
  planner = planning.Planner(inspection.inspect(config), estimate=True)
  assert not planner.critics
