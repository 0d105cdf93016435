"""Products with adapters: values, gradients, rounding and dropout."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_hybrid.ops import lora, matmul

SCALE, RANK = 1.5, 2
COLUMN, ROW = "bti,oi->bto", "bti,io->bto"


def operands(equation, dtype="float32"):
  """(x ``[2, 3, 6]``, a kernel of 7 outputs with an adapter)."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape).astype(np.float32))
  x, kernel = draw(2, 3, 6), draw(*((7, 6) if equation == COLUMN else (6, 7)))
  adapted = lora.Adapted(
    kernel.astype(dtype), draw(6, RANK), draw(7, RANK), None, SCALE, 0.5,
    row=equation == ROW,
  )  # fmt: skip
  return x, adapted


def dense(x, kernel, a, b, equation):
  """The paper's formula, written out."""
  return jnp.einsum(equation, x, kernel) + SCALE * (x @ a) @ b.T


@pytest.mark.parametrize("equation", [COLUMN, ROW])
def test_value_and_gradients_are_those_of_the_formula(equation):
  x, adapted = operands(equation)
  weight = np.random.default_rng(1).normal(size=(2, 3, 7)).astype(np.float32)

  def ours(x, a, b):
    changed = dataclasses.replace(adapted, a=a, b=b)
    return jnp.sum(weight * matmul.product(x, changed, equation, jnp.float32))

  def plain(x, a, b):
    return jnp.sum(weight * dense(x, adapted.value, a, b, equation))

  args = (x, adapted.a, adapted.b)
  np.testing.assert_allclose(ours(*args), plain(*args), rtol=1e-5)
  for got, expected in zip(
    jax.grad(ours, (0, 1, 2))(*args), jax.grad(plain, (0, 1, 2))(*args), strict=True
  ):
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    assert got.dtype == jnp.float32


@pytest.mark.parametrize("equation", [COLUMN, ROW])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_forward_is_bit_for_bit_that_of_the_merged_weight(equation, dtype):
  x, adapted = operands(equation, dtype)
  merged = adapted.merged()
  assert merged.dtype == dtype and merged.shape == adapted.value.shape
  got = matmul.product(x, adapted, equation, jnp.dtype(dtype))
  np.testing.assert_array_equal(
    got, matmul.product(x, merged, equation, jnp.dtype(dtype))
  )
  expected = dense(x, *(adapted.value, adapted.a, adapted.b), equation)
  np.testing.assert_allclose(got, expected, rtol=0.1, atol=0.1)


def test_a_frozen_kernel_has_no_gradient():
  x, adapted = operands(COLUMN)
  loss = lambda adapted: jnp.sum(matmul.product(x, adapted, COLUMN, jnp.float32))
  grads = jax.grad(loss)(adapted)
  assert not np.any(grads.value) and np.any(grads.a) and np.any(grads.b)


@pytest.mark.parametrize("equation", [COLUMN, ROW])
def test_dropout_hides_inputs_from_the_adapter_only(equation):
  x, adapted = operands(equation)
  one = lambda x, seed: matmul.product(
    x, dataclasses.replace(adapted, seed=seed), equation, jnp.float32
  )
  run = jax.jit(jax.vmap(one, (None, 0)))
  base = jnp.einsum(equation, x, adapted.value)
  seeds = jnp.arange(2000, dtype=jnp.uint32)
  many = np.asarray(run(x, seeds)) - base
  np.testing.assert_array_equal(run(x, seeds) - base, many)
  assert np.ptp(many, axis=0).min() > 0.1
  whole = dense(x, adapted.value, adapted.a, adapted.b, equation) - base
  error = np.abs(many.mean(0) - whole) / (many.std(0) / len(seeds) ** 0.5)
  assert error.max() < 5  # standard errors of a mean: unbiased
  # With rate 1/2 an input is seen twice as large or not at all.
  alone = np.zeros_like(x)
  alone[0, 0, 0] = 1.0
  seen = np.asarray(run(alone, seeds))[:, 0, 0]
  hidden = jnp.einsum(equation, alone, adapted.value)[0, 0]
  doubled = hidden + 2 * SCALE * adapted.a[0] @ adapted.b.T
  near = [np.abs(seen - x).max(1) < 1e-5 for x in (hidden, doubled)]
  assert (near[0] ^ near[1]).all() and 0.4 < near[0].mean() < 0.6
