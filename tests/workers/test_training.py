"""One optimizer step over micro-batches, on a toy loss and on a real tree."""

import build_tiny as tiny
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_hybrid.models import params as params_lib
from jaxrl_hybrid.workers import training


def toy_loss(params, micro, total):
  """sum(w x) / tokens: its gradient is the mean of x over the mask."""
  per_token = params["w"]["kernel"] * micro["x"]
  loss = jnp.sum(jnp.where(micro["mask"], per_token, 0.0)) / total.tokens
  means = {"x": training.masked(micro["x"], micro["mask"]), "loss_sum": (loss, 0.0)}
  return loss, (means, {"x_max": jnp.max(micro["x"])})


X = np.array([[[1, 2], [3, 50]], [[4, 50], [50, 50]]], np.float32)  # [A, B, T]
MASK = np.array([[[1, 1], [1, 0]], [[1, 0], [0, 0]]], bool)


def toy_state(mesh=(1, 1, 1)):
  layout = tiny.train_layout(mesh)
  params = jax.device_put(
    {"w": {"kernel": np.full(1, 2, np.float32)}}, layout.replicated, may_alias=False
  )
  return training.TrainState(params, optax.sgd(0.1), layout, toy_loss)


@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 1, 2)])
def test_gradients_and_metrics_are_those_of_the_whole_mini_batch(mesh):
  state = toy_state(mesh)
  metrics = state.step({"x": X, "mask": MASK})()
  mean = (1 + 2 + 3 + 4) / 4
  np.testing.assert_allclose(state.params["w"]["kernel"], [2 - 0.1 * mean], rtol=1e-6)
  assert metrics == pytest.approx(
    {
      "loss": 2 * mean,
      "grad_norm": mean,
      "x": mean,
      "loss_sum": 2 * mean,
      "x_max": 50.0,
      "skipped_updates": 0.0,
    }
  )
  assert state.updates == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_update_that_is_not_finite_changes_nothing(bad):
  state = toy_state()
  broken = np.where(np.arange(2) == 0, X, bad).astype(np.float32)
  metrics = state.step({"x": np.where(MASK, broken, X), "mask": MASK})()
  assert metrics["skipped_updates"] == 1.0
  np.testing.assert_array_equal(state.params["w"]["kernel"], [2.0])
  metrics = state.step({"x": X, "mask": MASK})()
  assert metrics["skipped_updates"] == 0.0
  np.testing.assert_allclose(state.params["w"]["kernel"], [1.75], rtol=1e-6)


def test_steps_may_be_queued_and_waited_for_in_any_order():
  state = toy_state()
  waits = [state.step({"x": X, "mask": MASK}) for _ in range(3)]
  losses = [wait()["loss"] for wait in reversed(waits)]
  np.testing.assert_allclose(losses, [2.5 * 1.5, 2.5 * 1.75, 2.5 * 2.0], rtol=1e-6)
  assert state.updates == 3


def test_place_splits_the_rows_over_dp():
  packed = {"x": np.zeros((3, 4, 5), np.float32)}
  placed = training.place(packed, tiny.train_layout((1, 2, 2)))["x"]
  assert placed.sharding.shard_shape(placed.shape) == (3, 2, 5)


def test_moments_are_sharded_like_their_parameters_and_stay_so():
  layout = tiny.train_layout((1, 2, 2))
  params = tiny.place_params(tiny.host_params(), layout)

  def loss(params, micro, total):
    del total
    total_sum = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
    return total_sum * jnp.sum(micro["mask"]), ({}, {})

  state = training.TrainState(params, tiny.adamw(), layout, loss)
  wanted = layout.shardings(params_lib.logical_axes(tiny.SPEC))

  def check():
    for name in ("mu", "nu"):
      moments = optax.tree.get(state.opt_state, name)
      jax.tree.map(assert_placed, moments, wanted)
    jax.tree.map(assert_placed, state.params, wanted)
    for leaf in jax.tree.leaves(state.opt_state):
      assert leaf.ndim or leaf.sharding.is_fully_replicated

  check()
  kernel = optax.tree.get(state.opt_state, "mu")["layers"]["mlp"]["up"]["kernel"]
  assert kernel.sharding.shard_shape(kernel.shape) == (2, 12, 16)  # tp = 2
  state.step({"mask": MASK})()
  check()
  assert tiny.largest(optax.tree.get(state.opt_state, "mu")) > 0


def assert_placed(array, sharding):
  assert array.sharding.is_equivalent_to(sharding, array.ndim), array.sharding
  assert array.dtype == jnp.float32


def test_masked_metrics_skip_what_is_outside():
  total, weight = training.masked(
    jnp.array([[1.0, jnp.nan], [3.0, 4.0]]), jnp.array([[True, False], [True, False]])
  )
  assert (float(total), float(weight)) == (4.0, 2.0)


def batches(*args, **kwargs):
  return [chosen.tolist() for chosen in training.mini_batches(*args, **kwargs)]


def test_a_single_mini_batch_keeps_the_order():
  assert batches(4, 4, 2, key=(0, 0)) == [[0, 1, 2, 3]] * 2
  assert batches(3, 8, 1, key=(0, 0)) == [[0, 1, 2]]


def test_every_epoch_has_every_row_once_in_a_new_order():
  got = batches(10, 4, 3, key=(0, 7))
  assert [len(x) for x in got] == [4, 4, 2] * 3
  epochs = [sum(got[i : i + 3], []) for i in (0, 3, 6)]
  assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
  assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_order_follows_from_the_key_alone():
  assert batches(10, 4, 2, key=(0, 7)) == batches(10, 4, 2, key=(0, 7))
  assert batches(10, 4, 2, key=(0, 7)) != batches(10, 4, 2, key=(0, 8))
  assert batches(10, 4, 2, key=(0, 7)) != batches(10, 4, 2, key=(1, 7))


def test_metrics_of_several_updates_are_means_and_maxima():
  updates = [{"loss": 1.0, "gap_max": 5.0}, {"loss": 3.0, "gap_max": 2.0}]
  got = training.summarize(updates)
  assert got == {"loss": 2.0, "gap_max": 5.0}
