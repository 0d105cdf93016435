"""The pipeline against its layers applied one after the other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_hybrid.parallel import pipeline

LAYERS, ROWS, LENGTH, WIDTH = 8, 12, 5, 3
RNG = np.random.default_rng(0)
KERNELS = RNG.normal(scale=0.5, size=(LAYERS, WIDTH, WIDTH)).astype(np.float32)
SHIFTS = RNG.normal(size=(LAYERS, WIDTH)).astype(np.float32)
X = RNG.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
WEIGHT = RNG.normal(size=X.shape).astype(np.float32)
# Every divisor of the layers with every divisor of the rows.
SPLITS = [(pp, m) for pp in (1, 2, 4, 8) for m in (1, 2, 3, 4, 6, 12)]


def stage(layers, x_BTD, scale_BT, slots):
  """Residual layers whose order matters; slots count the calls."""

  def body(x, layer):
    kernel, shift = layer
    inner = x @ kernel + shift
    if scale_BT is not None:
      inner *= scale_BT[..., None]
    return x + jnp.tanh(inner), None

  x_BTD, _ = jax.lax.scan(body, x_BTD, layers)
  return x_BTD, None if slots is None else slots + 1


@functools.cache
def mesh(pp, dp):
  return Mesh(np.array(jax.devices()[: pp * dp]).reshape(pp, dp), ("pp", "dp"))


def run(layers, x, slots=None, scale=None, *, pp, microbatches, dp=1):
  """The pipeline on a mesh of (pp, dp) devices."""
  pin = lambda *spec: (
    lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh(pp, dp), P(*spec)))
  )
  return pipeline.run(
    stage,
    layers,
    x,
    scale,
    slots,
    stages=pp,
    microbatches=microbatches,
    pin=pin("dp"),
    pin_stages=pin("pp", "dp"),
  )


def by_hand(x, kernels=KERNELS, shifts=SHIFTS):
  for kernel, shift in zip(kernels, shifts, strict=True):
    x = x + np.tanh(x @ kernel + shift)
  return x


@pytest.mark.parametrize("pp,microbatches", SPLITS)
def test_it_equals_the_layers_one_after_the_other(pp, microbatches):
  piped = jax.jit(functools.partial(run, pp=pp, microbatches=microbatches))
  got, slots = piped((KERNELS, SHIFTS), X)
  np.testing.assert_allclose(got, by_hand(X), rtol=1e-5, atol=1e-5)
  assert slots is None


@pytest.mark.parametrize("pp,microbatches", [(1, 1), (2, 3), (4, 4), (8, 12), (4, 1)])
def test_every_stage_gets_what_belongs_to_its_rows(pp, microbatches):
  scale = RNG.normal(size=(ROWS, LENGTH)).astype(np.float32)
  piped = jax.jit(functools.partial(run, pp=pp, microbatches=microbatches))
  got, _ = piped((KERNELS, SHIFTS), X, None, scale)
  x = X
  for kernel, shift in zip(KERNELS, SHIFTS):
    x = x + np.tanh((x @ kernel + shift) * scale[..., None])
  np.testing.assert_allclose(got, x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pp,microbatches,dp", [(2, 3, 2), (4, 3, 4), (4, 1, 2)])
def test_rows_spread_over_dp_stay_where_they_are(pp, microbatches, dp):
  piped = functools.partial(run, pp=pp, microbatches=microbatches, dp=dp)
  place = lambda x, axis: jax.device_put(x, NamedSharding(mesh(pp, dp), P(axis)))
  layers, x = place((KERNELS, SHIFTS), "pp"), place(X, "dp")
  compiled = jax.jit(piped, out_shardings=(x.sharding, None)).lower(layers, x).compile()
  got, _ = compiled(layers, x)
  np.testing.assert_allclose(got, by_hand(X), rtol=1e-5, atol=1e-5)
  assert "all-to-all" not in compiled.as_text()


@pytest.mark.parametrize("pp,microbatches", [(2, 1), (2, 4), (4, 3), (8, 12), (8, 2)])
def test_gradients_equal_those_of_the_layers_applied_directly(pp, microbatches):
  def gradients(function):
    loss = lambda layers, x: jnp.sum(WEIGHT * function(layers, x)[0])
    return jax.jit(jax.grad(loss, (0, 1)))((KERNELS, SHIFTS), X)

  got = gradients(functools.partial(run, pp=pp, microbatches=microbatches))
  expected = gradients(lambda layers, x: stage(layers, x, None, None))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, expected
  )


@pytest.mark.parametrize("pp,microbatches", [(2, 1), (4, 3), (8, 6)])
def test_every_stage_runs_once_per_tick(pp, microbatches):
  zeros = jnp.zeros((LAYERS, 2))
  _, slots = jax.jit(functools.partial(run, pp=pp, microbatches=microbatches))(
    (KERNELS, SHIFTS), X, zeros
  )
  np.testing.assert_array_equal(slots, zeros + (microbatches + pp - 1))


def test_each_microbatch_is_independent_of_the_others():
  piped = jax.jit(functools.partial(run, pp=4, microbatches=4))
  poisoned = X.copy()
  poisoned[1::4] = np.nan  # microbatch 1 has rows 1, 5, 9
  got, _ = piped((KERNELS, SHIFTS), poisoned)
  clean = np.arange(ROWS) % 4 != 1
  np.testing.assert_allclose(
    np.asarray(got)[clean], by_hand(X)[clean], rtol=1e-5, atol=1e-5
  )
  assert np.isnan(np.asarray(got)[~clean]).all()
