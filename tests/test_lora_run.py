"""Whole runs with adapters: PPO whose critic shares the actor's base."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_hybrid import (
  adapting,
  assembly,
  build,
  config_reader,
  inspection,
  planning,
  role_params,
)
from jaxrl_hybrid import config as config_lib
from jaxrl_hybrid.errors import ConfigError
from jaxrl_hybrid.models.adapters import HEAD, A
from jaxrl_hybrid.runtime.checkpoint import Checkpoints
from jaxrl_hybrid.runtime.recorder import CONFIG_FILE, Recorder
from jaxrl_hybrid.runtime.timers import Timers

TESTS = Path(__file__).parent
SHARED = dict(
  algorithm__name="ppo",
  model__lora__rank=4,
  model__lora__dropout=0.1,
  model__dtype="float16",
  critic__share_base=True,
  critic__lora__rank=2,
  critic__lora__targets=("q_proj", "down_proj"),
  actor__use_kl_loss=True,
  mesh__train=(1, 1, 2),
  mesh__zero=3,
  data__eval_files=(),
  trainer__total_steps=3,
  trainer__save_freq=1,
)


def inspect(**changes):
  """The plan of the tiny config; ``a__b=1`` sets ``a.b``."""
  config, _ = config_reader.from_argv(["train", f"--config={TESTS}/tiny_config.py"])
  with config.unlocked():
    for key, value in changes.items():
      *sections, name = key.split("__")
      section = config
      for part in sections:
        section = section[part]
      section[name] = value
  return inspection.inspect(config_lib.resolve(config))


def host(tree):
  return jax.tree.map(np.array, jax.device_get(tree))


def metrics_of(run_dir):
  rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
  timed = ("timing_s/", "perf/")
  return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in rows]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
  """(plan, run directory, controller after three steps, frozen base before them)."""
  plan, run_dir = inspect(**SHARED), tmp_path_factory.mktemp("shared")
  controller = assembly.assemble(plan, run_dir)
  before = host(controller.actor.state.store.frozen.weights)
  controller.fit()
  controller.recorder.close()
  return plan, run_dir, controller, before


def test_reference_and_critic_are_the_actors_base_and_no_update_touches_it(shared):
  _, _, controller, before = shared
  base = controller.actor.state.store.frozen.weights
  jax.tree.map(np.testing.assert_array_equal, host(base), before)
  of_reference = jax.tree.leaves(controller.reference.weights)
  assert all(a is b for a, b in zip(of_reference, jax.tree.leaves(base), strict=True))
  critic = controller.critic.state.store
  assert critic.weights["embed"]["kernel"] is base["embed"]["kernel"]
  assert set(critic.params["layers"]) == {"attn", "mlp"} and HEAD in critic.params
  assert np.any(host(critic.params[HEAD]["kernel"]))


def test_the_run_starts_at_the_reference_and_trainer_and_engine_agree(shared):
  rows = metrics_of(shared[1])
  assert len(rows) == 3
  assert all(row["rollout_train_logprob_diff_mean"] < 1e-4 for row in rows)
  # The first of two updates of step 1 is at the reference but for the dropout.
  assert 0 < rows[0]["actor/kl_loss"] < rows[-1]["actor/kl_loss"]


def test_a_checkpoint_holds_adapters_alone_and_resumes_bit_for_bit(shared):
  plan, run_dir, controller, _ = shared
  stores = [controller.actor.state.store, controller.critic.state.store]
  trained = lambda: [(host(store.params), host(store.opt_state)) for store in stores]
  expected = trained()
  controller.resume(2)
  changed = lambda a, b: bool(np.any(a != b))
  assert jax.tree.all(jax.tree.map(changed, trained()[0][0], expected[0][0]))
  controller.step = 3
  metrics = controller.train_step(Timers())
  jax.tree.map(np.testing.assert_array_equal, trained(), expected)
  row = metrics_of(run_dir)[-1]
  assert {k: x for k, x in metrics.items() if k in row} == row
  sizes = [sum(x.size for x in jax.tree.leaves(x)) for x in expected[0]]
  whole = role_params.trained_layout(plan).abstract_params()
  pairs = sum(x.size for x in jax.tree.leaves(whole))
  assert sizes == [pairs, 2 * pairs + 2]  # and two counters
  restored = role_params.restore_trained(plan, Checkpoints(run_dir, max_to_keep=2), 3)
  jax.tree.map(np.testing.assert_array_equal, host(restored), expected[0][0])


def test_exports_are_adapters_and_a_merged_model_and_both_start_a_run(shared, tmp_path):
  plan, _, controller, _ = shared
  trained = controller.actor.state.store.whole_params()
  role_params.export_adapters(plan, trained, tmp_path / "adapter")
  tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
  assert len(tensors) == 2 * 7 * plan.source.spec.num_layers
  full = role_params.full_params(plan, trained)
  generation = controller.actor.generator.plain(controller.actor.state.weights)
  kernel = lambda tree: np.asarray(tree["layers"]["attn"]["q"]["kernel"], np.float32)
  np.testing.assert_allclose(kernel(full), kernel(generation), rtol=2e-3, atol=1e-5)
  # The embedding is what it was, not what 16 bits made of it.
  embed = np.asarray(role_params.make_params(plan)["embed"]["kernel"])
  np.testing.assert_array_equal(full["embed"]["kernel"], embed)
  start = inspect(**SHARED | dict(
    model__lora__rank=0, model__lora__path=str(tmp_path / "adapter")
  ))  # fmt: skip
  assert (start.lora.rank, start.lora.scale) == (plan.lora.rank, plan.lora.scale)
  assert start.lora.dropout == 0.1 and "q_proj" in start.lora.targets
  actor = build.actor_from(start, role_params.starting_params(start))
  jax.tree.map(
    np.testing.assert_array_equal, host(actor.state.store.params), host(trained)
  )
  q = role_params.make_weights(start)["layers"]["attn"]["q"]["kernel"]
  assert q.dtype == jnp.float16
  np.testing.assert_allclose(np.asarray(q, np.float32), kernel(full), rtol=2e-3)
  with pytest.raises(ConfigError, match=r"model.lora.rank: .* has 4, got 3"):
    inspect(model__lora__rank=3, model__lora__path=str(tmp_path / "adapter"))


def planned(**changes):
  report = planning.Planner(inspect(**changes), estimate=True).report()
  return {phase.name: phase.components for phase in report.phases}


def test_a_shared_critic_costs_its_adapters_in_the_plan():
  plan = inspect(**SHARED)
  whole = planned(**SHARED | dict(critic__share_base=False))["gen"]
  shared_ = planned(**SHARED)
  gen = shared_["gen"]
  assert "reference weights" not in gen
  saved = whole["critic weights"] - gen["critic weights"]
  of_actor = build.planned_actor(plan).state.store.held_weights
  size = lambda tree: sum(
    np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
  )
  frozen = {k: x for k, x in of_actor["frozen"].items() if k != "lm_head"}
  assert saved == size(frozen)
  assert gen["critic weights"] < 0.2 * gen["actor weights"]
  assert gen["actor weights"] == size(of_actor)
  assert shared_["switch"]["merged weights"] == size(
    [x for x in jax.tree.leaves(frozen["layers"]) if x.ndim == 3]
  )
  parameters = jax.tree.leaves(role_params.trained_layout(plan).abstract_params())
  stored = 4 * sum(x.size for x in parameters) // 2  # spread over dp
  assert gen["actor fp32 parameters"] == stored
  assert gen["actor moments"] == pytest.approx(2 * stored, abs=16)


@pytest.mark.parametrize(
  "changes, said",
  [
    (dict(model__lora__rank=-1), "model.lora.rank"),
    (dict(model__lora__rank=2, model__lora__dropout=1.0), "model.lora.dropout"),
    (dict(model__lora__rank=2, model__lora__targets=()), "model.lora.targets"),
    (dict(model__lora__rank=2, model__lora__targets=("w1",)), "'w1'"),
    (dict(model__lora__rank=2, offload__reference=True), "offload.reference"),
    (dict(critic__share_base=True, critic__lora__rank=2), "model.lora.rank > 0"),
    (dict(critic__share_base=True, model__lora__rank=2), "critic.lora.rank > 0"),
    (SHARED | dict(critic__path="elsewhere"), "critic.path"),
    (dict(model__lora__path="/nowhere"), "/nowhere"),
    (dict(model__lora__alpha=8.0), "model.lora.alpha=8.0: expected model.lora.rank"),
  ],
)
def test_what_does_not_go_together_is_named(changes, said):
  with pytest.raises(Exception, match=said) as caught:
    inspect(**changes)
  assert type(caught.value).__module__ == "jaxrl_hybrid.errors"


def test_what_is_frozen_is_loaded_in_16_bits(shared):
  plan = shared[0]
  params = role_params.starting_params(plan)
  dtypes = lambda tree: {x.dtype for x in jax.tree.leaves(tree) if x.ndim == 3}
  assert dtypes(params["layers"]) == {jnp.dtype("float16")}
  assert params["norm"]["scale"].dtype == jnp.float32


def test_fresh_adapters_do_not_depend_on_the_mesh():
  layouts = [
    role_params.trained_layout(inspect(model__lora__rank=2, mesh__train=mesh))
    for mesh in ((1, 1, 1), (2, 2, 1))
  ]
  pairs = [host(adapting.fresh(layout, seed=0)) for layout in layouts]
  jax.tree.map(np.testing.assert_array_equal, *pairs)
  assert np.any(pairs[0]["layers"]["attn"]["q"][A])


def test_going_on_with_another_scale_of_the_adapters_is_refused(tmp_path):
  config = inspect(model__lora__rank=2).config
  (tmp_path / CONFIG_FILE).write_text(config.to_json_best_effort())
  with config.unlocked():
    config.actor.optim.lr = 5e-4  # may change
    config.model.lora.alpha = 8.0
  with pytest.raises(ConfigError, match=r"with model.lora.alpha 32.0 -> 8.0; expected"):
    Recorder(tmp_path, config).open(1)
