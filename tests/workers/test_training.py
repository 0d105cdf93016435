"""One optimizer step over micro-batches, on a toy loss and on a real tree."""

import dataclasses

import build_tiny as tiny
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_hybrid.parallel.rules import Layout
from jaxrl_hybrid.workers import training


@dataclasses.dataclass(frozen=True)
class ToyLayout:
  """A layout of replicated numbers; each weight is twice its parameter."""

  train: Layout
  names: tuple[str, ...]

  def prepare(self, params):
    return {k: self.train.constrain(2 * x, (None,)) for k, x in params.items()}

  def abstract_weights(self):
    number = jax.ShapeDtypeStruct((1,), jnp.float32, sharding=self.train.replicated)
    return dict.fromkeys(self.names, number)

  def zeros(self, weights):
    return jax.tree.map(jnp.zeros_like, weights)

  def value_and_grad(self, loss, weights, grads):
    value, new = jax.value_and_grad(loss, has_aux=True)(weights)
    return value, jax.tree.map(jnp.add, grads, new)

  def strip(self, grads):
    return grads


def toy_loss(weights, micro, total):
  """sum(2 w x) / tokens: the weight's gradient is the mean of x over the mask."""
  per_token = weights["w"] * micro["x"]
  loss = jnp.sum(jnp.where(micro["mask"], per_token, 0.0)) / total.tokens
  means = {"x": training.masked(micro["x"], micro["mask"]), "loss_sum": (loss, 0.0)}
  return loss, (means, {"x_max": jnp.max(micro["x"])})


X = np.array([[[1, 2], [3, 50]], [[4, 50], [50, 50]]], np.float32)  # [A, B, T]
MASK = np.array([[[1, 1], [1, 0]], [[1, 0], [0, 0]]], bool)
MEAN = (1 + 2 + 3 + 4) / 4


def toy_state(mesh=(1, 1, 1), loss=toy_loss, names=("w",), **options):
  """Every parameter is 1, the rate .1."""
  layout = ToyLayout(tiny.weight_layout(mesh).train, names)
  params = jax.device_put(
    {name: np.ones(1, np.float32) for name in names},
    layout.train.replicated,
    may_alias=False,
  )
  return training.TrainState(params, optax.sgd(0.1), layout, loss, **options)


@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 1, 2)])
def test_gradients_and_metrics_are_those_of_the_whole_mini_batch(mesh):
  state = toy_state(mesh)
  metrics = state.step({"x": X, "mask": MASK})()
  np.testing.assert_allclose(state.store.params["w"], [1 - 0.1 * MEAN], rtol=1e-6)
  assert metrics == pytest.approx(
    {
      "loss": 2 * MEAN,
      "grad_norm": MEAN,
      "x": MEAN,
      "loss_sum": 2 * MEAN,
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
  np.testing.assert_array_equal(state.store.params["w"], [1.0])
  metrics = state.step({"x": X, "mask": MASK})()
  assert metrics["skipped_updates"] == 0.0
  np.testing.assert_allclose(state.store.params["w"], [0.75], rtol=1e-6)


def test_steps_may_be_queued_and_waited_for_in_any_order():
  state = toy_state()
  waits = [state.step({"x": X, "mask": MASK}) for _ in range(3)]
  losses = [wait()["loss"] for wait in reversed(waits)]
  np.testing.assert_allclose(losses, [5 * 0.5, 5 * 0.75, 5 * 1.0], rtol=1e-6)
  assert state.updates == 3


def test_the_weights_follow_the_parameters_and_are_made_once_per_update():
  state = toy_state()
  assert state.weights is state.weights
  np.testing.assert_array_equal(state.weights["w"], [2.0])
  state.step({"x": X, "mask": MASK})
  np.testing.assert_allclose(state.weights["w"], [1.5], rtol=1e-6)
  state.store.params = {"w": jnp.full(1, 7.0)}
  np.testing.assert_array_equal(state.weights["w"], [14.0])


@pytest.mark.parametrize("clip,by", [(10.0, 1.0), (5.0, 1.0), (1.0, 0.2)])
def test_the_gradient_is_clipped_by_its_global_norm_and_reported_as_it_is(clip, by):
  loss = lambda weights, *_: (jnp.sum(3 * weights["a"] + 4 * weights["b"]), ({}, {}))
  state = toy_state(loss=loss, names=("a", "b"), clip_grad=clip)
  assert state.step({"mask": MASK[:1]})()["grad_norm"] == pytest.approx(5.0)
  np.testing.assert_allclose(state.store.params["a"], [1 - 0.1 * 3 * by], rtol=1e-6)
  np.testing.assert_allclose(state.store.params["b"], [1 - 0.1 * 4 * by], rtol=1e-6)


def test_place_splits_the_rows_over_dp():
  packed = {"x": np.zeros((3, 4, 5), np.float32)}
  placed = training.place(packed, tiny.weight_layout((1, 2, 2)).train)["x"]
  assert placed.sharding.shard_shape(placed.shape) == (3, 2, 5)


@pytest.mark.parametrize(
  "mesh,shard",
  [((1, 2, 2), (2, 6, 16)), ((2, 2, 2), (1, 6, 16)), ((4, 1, 2), (2, 3, 16))],
)
def test_parameters_and_moments_are_spread_over_the_mesh_and_stay_so(mesh, shard):
  layout = tiny.weight_layout(mesh)

  def loss(weights, micro, total):
    """Its gradient is the same number everywhere."""
    del total
    entries = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(weights))
    return entries * jnp.sum(micro["mask"]), ({}, {})

  host = tiny.host_params()
  state = training.TrainState(
    tiny.place_params(host, layout), tiny.adamw(), layout, loss
  )
  wanted = jax.tree.map(lambda x: x.sharding, layout.abstract_params())
  rows = np.ones((1, 2 * mesh[2], 2), bool)

  def check():
    for name in ("mu", "nu"):
      moments = optax.tree.get(state.store.opt_state, name)
      jax.tree.map(assert_placed, moments, wanted)
    jax.tree.map(assert_placed, state.store.params, wanted)
    for leaf in jax.tree.leaves(state.store.opt_state):
      assert leaf.ndim or leaf.sharding.is_fully_replicated

  check()
  kernel = optax.tree.get(state.store.opt_state, "mu")["layers"]["mlp"]["up"]["kernel"]
  assert kernel.sharding.shard_shape(kernel.shape) == shard
  state.step({"mask": rows})()
  check()
  for leaf in jax.tree.leaves(optax.tree.get(state.store.opt_state, "mu")):
    np.testing.assert_allclose(leaf, 0.1 * rows.sum(), rtol=1e-5)  # 1 - beta1


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
