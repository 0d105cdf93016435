"""Streamed updates equal resident ones, and everything lives where it was told to."""

import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

TESTS = Path(__file__).parents[1]
sys.path.append(str(TESTS / "parallel"))

import build_tiny as tiny
import mesh_parity

from jaxrl_hybrid.errors import CheckpointError, ConfigError
from jaxrl_hybrid.models import params as params_lib
from jaxrl_hybrid.parallel import abstract, offload
from jaxrl_hybrid.runtime.checkpoint import Checkpoints
from jaxrl_hybrid.workers import stores
from jaxrl_hybrid.workers.reference import Reference

EVEN, ODD = mesh_parity.EVEN, mesh_parity.ODD
STEPS = 3
MESHES = [(1, 1, 1), (1, 2, 2), (2, 2, 1)]
SWITCHES = [x for x in itertools.product((False, True), repeat=3) if any(x)]
ALL = stores.Offload(optimizer=True, params=True, weights=True)


@functools.cache
def resident(mesh, spec=EVEN):
  """(a state whose gradient program is shared, host parameters after the steps)."""
  state = make(mesh, spec)
  return state, mesh_parity.after_steps(state, STEPS)


def make(mesh, spec=EVEN, where=stores.RESIDENT, **options):
  microbatches = 2 if mesh[0] > 1 else 1
  return mesh_parity.make_state(
    spec, mesh, zero=3, microbatches=microbatches, where=where, **options
  )


def streamed(mesh=(1, 2, 2), where=ALL, spec=EVEN):
  """A fresh streamed state; the gradient program is compiled once per mesh."""
  state = make(mesh, spec, where)
  state.gradients = resident(mesh, spec)[0].gradients
  return state


def assert_equal(got, expected):
  jax.tree.map(np.testing.assert_array_equal, got, expected)


def kinds(tree):
  return {x.sharding.memory_kind for x in jax.tree.leaves(tree)}


def kind(on_host):
  return {"pinned_host" if on_host else "device"}


def host(tree):
  return jax.tree.map(np.array, jax.device_get(tree))


def cases():
  """All combinations; those that differ in one thing only are for slow runs."""
  for mesh, per_chunk, switches in itertools.product(MESHES, (1, 2), SWITCHES):
    fast = all(switches) or (mesh, per_chunk) == ((1, 2, 2), 1)
    marks = () if fast else pytest.mark.slow
    yield pytest.param(mesh, per_chunk, switches, marks=marks)


@pytest.mark.parametrize("mesh, per_chunk, switches", cases())
def test_streamed_updates_equal_resident_ones_and_all_lives_where_it_should(
  mesh, per_chunk, switches
):
  where = stores.Offload(*switches, layers_per_chunk=per_chunk)
  state = streamed(mesh, where)
  assert_equal(mesh_parity.after_steps(state, STEPS), resident(mesh)[1])
  store = state.store
  assert len(store.params) == 1 + EVEN.num_layers // mesh[0] // per_chunk
  assert kinds(store.params) == kind(where.params)
  assert kinds(store.opt_state) == kind(where.optimizer)
  assert kinds(store.held_weights) == {"device"}
  before = host(store.weights)
  store.rest()
  assert kinds(store.held_weights) == kind(where.weights)
  assert kinds(store.weights) == kinds(store.held_weights) == {"device"}
  assert_equal(host(store.weights), before)


@pytest.mark.parametrize(
  "mesh", [(1, 2, 2), pytest.param((1, 4, 1), marks=pytest.mark.slow)]
)
def test_padded_heads_and_layers_that_nothing_divides_stream_as_well(mesh):
  state = streamed(mesh, spec=ODD)
  assert_equal(mesh_parity.after_steps(state, STEPS), resident(mesh, ODD)[1])


@pytest.mark.parametrize("mesh", MESHES)
def test_the_streamed_weights_are_those_of_its_parameters(mesh):
  state = streamed(mesh)
  layout = state._layout
  for _ in range(2):
    fresh = jax.jit(layout.prepare)(state.store.whole_params())
    assert_equal(host(state.store.weights), host(fresh))
    shardings = stores.shardings_of(layout.abstract_weights())
    assert stores.shardings_of(state.store.weights) == shardings
    mesh_parity.after_steps(state, 1)


def test_different_meshes_agree_within_rounding():
  expected = resident((1, 1, 1))[1]
  for mesh in MESHES[1:]:
    gap = jax.tree.map(lambda a, b: np.abs(a - b).max(), resident(mesh)[1], expected)
    # Adam moves a parameter with a gradient near 0 by up to LR either way.
    assert max(jax.tree.leaves(gap)) < 0.05 * STEPS * mesh_parity.LR


def test_whole_parameters_are_what_the_store_was_made_from():
  state = streamed((2, 2, 1), stores.Offload(params=True, layers_per_chunk=2))
  assert_equal(host(state.store.whole_params()), mesh_parity.host_params(EVEN))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_changes_nothing_in_a_streamed_store(bad):
  state = streamed()
  mesh_parity.after_steps(state, 1)
  store = state.store
  before = host([store.params, store.opt_state, store.weights])
  batch = {k: x[None].copy() for k, x in mesh_parity.batch().items()}
  batch["advantages"][0, 0, 1] = bad
  assert state.step(batch)()["skipped_updates"] == 1.0
  assert_equal(host([store.params, store.opt_state, store.weights]), before)
  batch["advantages"][0, 0, 1] = 1.0
  assert state.step(batch)()["skipped_updates"] == 0.0
  after = host(store.whole_params())
  assert mesh_parity.worst(after, mesh_parity.host_params(EVEN)) > 0


def test_the_global_norm_is_clipped_over_all_chunks():
  """Not each chunk by its own norm."""
  mesh, clip = (1, 2, 2), 0.01
  layout = resident(mesh)[0]._layout
  grads, metrics = resident(mesh)[0].gradients(
    resident(mesh)[0].weights, mesh_parity._placed(resident(mesh)[0], 1)
  )
  assert float(metrics["grad_norm"]) > 10 * clip
  got = []
  for store in (
    stores.ResidentStore(place(layout), optax.sgd(1.0), layout, clip),
    stores.StreamedStore(place(layout), optax.sgd(1.0), layout, clip, ALL),
  ):
    store.apply(grads, metrics)
    got.append(host(store.whole_params()))
  assert_equal(*got)
  moved = jax.tree.map(np.subtract, got[0], mesh_parity.host_params(EVEN))
  assert float(optax.tree.norm(moved)) == pytest.approx(clip, rel=1e-3)


def place(layout):
  return jax.tree.map(
    lambda x, like: jax.device_put(x, like.sharding, may_alias=False),
    mesh_parity.host_params(EVEN),
    layout.abstract_params(),
  )


@pytest.mark.parametrize(
  "mesh, per_chunk, spec",
  [((1, 2, 2), 3, EVEN), ((2, 2, 1), 4, EVEN), ((2, 2, 1), 1, ODD)],
)
def test_layers_that_make_no_whole_chunks_are_a_config_error(mesh, per_chunk, spec):
  where = stores.Offload(params=True, layers_per_chunk=per_chunk)
  said = rf"offload.layers_per_chunk: .*divisor of the {spec.num_layers} layers"
  with pytest.raises(ConfigError, match=said):
    make(mesh, spec, where)


@pytest.mark.parametrize(
  "where",
  [
    ALL,
    stores.Offload(optimizer=True),
    stores.Offload(params=True, layers_per_chunk=2),
  ],
)
def test_a_streamed_store_is_saved_and_goes_on_where_it_was(tmp_path, where):
  state = streamed(where=where)
  mesh_parity.after_steps(state, 2)
  arrays = lambda s: {"params": s.store.params, "opt_state": s.store.opt_state}
  checkpoints = Checkpoints(tmp_path, max_to_keep=1)
  checkpoints.save(1, arrays(state), {"step": 1})
  other = streamed(where=where)
  restored, _ = checkpoints.restore(1, arrays(other))
  other.store.params = restored["params"]
  other.store.opt_state = restored["opt_state"]
  for name in ("params", "opt_state"):
    assert_equal(host(arrays(other)[name]), host(arrays(state)[name]))
  assert kinds(other.store.params) == kind(where.params)
  assert kinds(other.store.opt_state) == kind(where.optimizer)
  assert_equal(host(other.store.weights), host(state.store.weights))
  assert_equal(mesh_parity.after_steps(other, 1), resident((1, 2, 2))[1])


def test_a_checkpoint_of_other_chunks_is_refused_in_words(tmp_path):
  arrays = lambda s: {"params": s.store.params, "opt_state": s.store.opt_state}
  saved = streamed()
  checkpoints = Checkpoints(tmp_path, max_to_keep=1)
  checkpoints.save(1, arrays(saved), {})
  for other in (
    streamed(where=dataclasses.replace(ALL, layers_per_chunk=2)),
    resident((1, 2, 2))[0],
  ):
    with pytest.raises(CheckpointError, match="offload.layers_per_chunk"):
      checkpoints.restore(1, arrays(other))
  checkpoints.save(2, arrays(resident((1, 2, 2))[0]), {})
  with pytest.raises(CheckpointError, match="does not fit this config"):
    checkpoints.restore(2, arrays(saved))


def test_trees_move_to_host_memory_and_back_with_their_shardings():
  layout = tiny.weight_layout((1, 2, 2))
  tree = tiny.place_params(tiny.host_params(), layout)
  parked = offload.to_host(tree)
  assert offload.is_on_host(parked) and not offload.is_on_host(tree)
  assert (abstract.device_bytes(parked), abstract.host_bytes(tree)) == (0, 0)
  assert abstract.host_bytes(parked) == abstract.device_bytes(tree) > 0
  back = offload.to_device(parked)
  assert stores.shardings_of(back) == stores.shardings_of(tree)
  assert_equal(host(parked), host(tree))
  assert_equal(host(back), host(tree))


def test_shapes_move_like_arrays():
  shapes = tiny.weight_layout((1, 2, 2)).abstract_params()
  parked = offload.to_host(shapes)
  assert offload.is_on_host(parked) and not offload.is_on_host(shapes)
  assert abstract.host_bytes(parked) == abstract.device_bytes(shapes) > 0
  assert abstract.device_bytes(parked) == abstract.host_bytes(shapes) == 0
  back = offload.to_device(parked)
  assert not offload.is_on_host(back)
  assert jax.tree.leaves(back) == jax.tree.leaves(shapes)


def test_bytes_of_a_tree_are_those_of_one_device():
  layout = tiny.weight_layout((1, 2, 2))
  leaf = layout.abstract_params()["layers"]["mlp"]["up"]["kernel"]
  assert abstract.device_bytes({"up": leaf}) == 4 * leaf.size // 4  # over tp and dp


def test_stores_are_built_on_shapes_alone():
  layout = resident((1, 2, 2))[0]._layout
  shapes = layout.abstract_params()
  store = stores.StreamedStore(shapes, optax.adamw(1e-3), layout, 1.0, ALL)
  real = streamed().store
  for name in ("params", "opt_state", "weights"):
    for built, made in zip(
      jax.tree.leaves(getattr(store, name)),
      jax.tree.leaves(getattr(real, name)),
      strict=True,
    ):
      assert (built.shape, built.dtype) == (made.shape, made.dtype)
      assert abstract.is_on_host(built) == abstract.is_on_host(made)
  assert store.visiting_bytes() == real.visiting_bytes() > 0


def test_three_chunks_are_what_visits():
  """fp32 parameters and two moments of three layers."""
  count = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
  layers = count(params_lib.abstract_params(EVEN, vocab=64)["layers"])
  expected = 12 * 3 * layers // EVEN.num_layers
  bytes_on_one = streamed((1, 1, 1)).store.visiting_bytes()
  assert expected <= bytes_on_one <= expected + 16  # and optax's counters
  half = stores.Offload(optimizer=True, layers_per_chunk=2)
  bytes_of_two = streamed((1, 1, 1), half).store.visiting_bytes()
  outer = 64 * EVEN.hidden_size + EVEN.hidden_size
  assert bytes_of_two == pytest.approx(8 * (layers + outer), abs=16)


def test_a_reference_in_host_memory_gives_the_same_log_probs():
  layout = tiny.weight_layout((1, 2, 2))
  weights = jax.jit(layout.prepare)(tiny.place_params(tiny.host_params(), layout))
  make_reference = lambda on_host: Reference(
    tiny.make_decoder((1, 2, 2)),
    weights,
    layout.train,
    temperature=0.7,
    chunk=5,
    micro_rows=4,
    on_host=on_host,
  )
  here, there = make_reference(False), make_reference(True)
  assert (kinds(here.weights), kinds(there.weights)) == ({"device"}, {"pinned_host"})
  batch = tiny.make_batch()
  for _ in range(2):
    got = there.compute_log_probs(batch).ref_log_probs
    np.testing.assert_array_equal(got, here.compute_log_probs(batch).ref_log_probs)
  assert kinds(there.weights) == {"pinned_host"}


def test_a_store_begins_at_rest():
  """Before their first use, too, the weights are where they are to live."""
  store = streamed().store
  assert kinds(store.held_weights) == {"pinned_host"}
  store.params = store.params
  assert kinds(store.held_weights) == {"pinned_host"}


def train(run_dir, *args, module="train"):
  """A run in a fresh process: its metrics without times."""
  options = (
    args
    if module != "train"
    else [
      f"--config={TESTS}/tiny_config.py",
      "--config.algorithm.name=ppo",
      "--config.actor.use_kl_loss=True",
      "--config.mesh.train=(1, 2, 2)",
      "--config.mesh.zero=3",
      f"--config.trainer.run_dir={run_dir}",
      *args,
    ]
  )
  done = subprocess.run(
    [sys.executable, "-m", f"jaxrl_hybrid.{module}", *options],
    capture_output=True,
    text=True,
    timeout=600,
    cwd=TESTS.parent,
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
  )
  assert done.returncode == 0, done.stderr[-3000:]
  rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
  timed = ("timing_s/", "perf/")
  return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in rows]


def test_a_run_with_everything_offloaded_learns_resumes_and_exports_the_same(tmp_path):
  plain, run_dir = tmp_path / "plain", tmp_path / "offloaded"
  switches = [
    f"--config.offload.{name}=True"
    for name in ("optimizer", "params", "critic", "reference")
  ]
  steps = lambda n: f"--config.trainer.total_steps={n}"
  saving = ["--config.trainer.save_freq=2", "--config.trainer.export_hf=True"]
  expected = train(plain, steps(4), "--config.trainer.export_hf=True")
  train(run_dir, *switches, *saving, steps(2))
  got = train(run_dir, *switches, *saving, steps(4))
  assert got == expected
  weights = lambda folder: (folder / "model.safetensors").read_bytes()
  assert weights(run_dir / "hf") == weights(plain / "hf")
  train(run_dir, f"--run_dir={run_dir}", f"--out={tmp_path}/out", module="export")
  assert weights(tmp_path / "out") == weights(plain / "hf")
