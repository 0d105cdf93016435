"""Products with 16-bit operands: how they round, and what their gradients are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_hybrid.ops import matmul

EQUATIONS = {"bti,oi->bto": (7, 6), "bti,io->bto": (6, 7)}


def operands(equation):
  rng = np.random.default_rng(0)
  x = rng.normal(size=(2, 3, 6)).astype(np.float32)
  return x, rng.normal(size=EQUATIONS[equation]).astype(np.float32)


@pytest.mark.parametrize("equation", EQUATIONS)
def test_float32_is_einsum_in_value_and_gradient(equation):
  x, kernel = operands(equation)
  weight = np.random.default_rng(1).normal(size=(2, 3, 7)).astype(np.float32)
  loss = lambda f: lambda x, kernel: jnp.sum(weight * f(x, kernel))
  ours = loss(lambda x, k: matmul.product(x, k, equation, jnp.dtype("float32")))
  plain = loss(lambda x, k: jnp.einsum(equation, x, k))
  np.testing.assert_allclose(ours(x, kernel), plain(x, kernel), rtol=1e-6)
  for a, b in zip(
    jax.grad(ours, (0, 1))(x, kernel), jax.grad(plain, (0, 1))(x, kernel)
  ):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype,mantissa", [("bfloat16", 8), ("float16", 11)])
def test_only_the_operands_are_rounded(dtype, mantissa):
  x, kernel = operands("bti,oi->bto")
  got = matmul.product(x, kernel, "bti,oi->bto", jnp.dtype(dtype))
  rounded = [np.asarray(jnp.asarray(a).astype(dtype), np.float64) for a in (x, kernel)]
  np.testing.assert_allclose(
    got, np.einsum("bti,oi->bto", *rounded), rtol=1e-5, atol=1e-6
  )
  error = np.abs(rounded[0] - x).max() / np.abs(x).max()
  assert 2.0 ** -(mantissa + 2) < error < 2.0**-mantissa
  assert got.dtype == jnp.float32


@pytest.mark.parametrize("scale", [1e-20, 1e20])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tiny_and_huge_cotangents_survive(dtype, scale):
  x, kernel = operands("bti,oi->bto")
  loss = lambda x, k: (
    scale * jnp.sum(matmul.product(x, k, "bti,oi->bto", jnp.dtype(dtype)))
  )
  dx, dkernel = jax.grad(loss, (0, 1))(x, kernel)
  np.testing.assert_allclose(
    dx / scale, np.broadcast_to(kernel.sum(0), x.shape), rtol=2e-2, atol=2e-2
  )
  np.testing.assert_allclose(
    dkernel / scale,
    np.broadcast_to(x.sum((0, 1)), kernel.shape),
    rtol=2e-2,
    atol=2e-2,
  )
  assert dx.dtype == dkernel.dtype == jnp.float32


def test_row_scaling_keeps_float16_from_overflowing():
  x, kernel = operands("bti,oi->bto")
  x[0, 1] *= 1e6
  half = jnp.dtype("float16")
  assert not np.isfinite(matmul.product(x, kernel, "bti,oi->bto", half)).all()
  got = matmul.row_scaled_product(x, kernel, "bti,oi->bto", half)
  expected = np.einsum("bti,oi->bto", x, kernel)
  row = np.abs(expected).max(-1, keepdims=True)
  assert (np.abs(got - expected) / row).max() < 2e-3
  assert (got[1] == matmul.product(x, kernel, "bti,oi->bto", half)[1]).all()


def test_row_scales_are_the_powers_of_two_that_bring_rows_below_the_limit():
  ratios = [0.0, 1e-30, 0.5, 1.0, 1.0000001, 1.5, 2.0, 2.0000002, 3e7, np.inf]
  x = matmul.SAFE * np.array(ratios, np.float32)[:, None] * [1, -1]
  got = matmul.row_scales(x.astype(np.float32), jnp.dtype("float16"))[:, 0]
  np.testing.assert_array_equal(got, [1, 1, 1, 1, 2, 2, 2, 4, 2.0**25, np.inf])


def kernel_of(value, dtype):
  """Weights rounded to ``dtype``, and their slot."""
  value = jnp.asarray(value, dtype)
  return matmul.Kernel(value, jnp.zeros(value.shape, jnp.float32))


def slot_gradient(loss, kernel):
  """Gradient of a loss of a ``Kernel`` with respect to its slot."""
  return jax.grad(lambda slot: loss(matmul.Kernel(kernel.value, slot)))(kernel.slot)


@pytest.mark.parametrize("equation", EQUATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_gradient_of_a_slot_is_fp32_and_not_rounded(dtype, equation):
  x, kernel = operands(equation)
  weight = np.random.default_rng(1).normal(size=(2, 3, 7)).astype(np.float32)
  low = matmul.backward_dtype(jnp.dtype(dtype))
  # Exact products of operands that the backward pass does not round either.
  x, weight = (np.array(jnp.asarray(a, low).astype(jnp.float32)) for a in (x, weight))
  loss = lambda k: jnp.sum(weight * matmul.product(x, k, equation, jnp.dtype(dtype)))
  got = slot_gradient(loss, kernel_of(kernel, dtype))
  of_x, of_kernel, of_out = equation.replace("->", ",").split(",")
  expected = np.einsum(f"{of_out},{of_x}->{of_kernel}", weight, x, dtype=np.float64)
  assert got.dtype == jnp.float32 and got.shape == kernel.shape
  np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
  # The gradient of an array has the array's format: of 16 bits it is rounded.
  array = jax.grad(loss)(jnp.asarray(kernel, dtype))
  error = np.abs(np.asarray(array, np.float64) - expected).max()
  assert (error > 1e-4) == (dtype != "float32")


@pytest.mark.parametrize("equation", EQUATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_kernel_multiplies_like_its_value_and_its_slot_is_never_read(dtype, equation):
  x, kernel = operands(equation)
  wrapped = kernel_of(kernel, dtype)
  poisoned = matmul.Kernel(wrapped.value, jnp.full_like(wrapped.slot, jnp.nan))
  dtype = jnp.dtype(dtype)
  for function in (matmul.product, matmul.row_scaled_product):
    plain = function(x, wrapped.value, equation, dtype)
    for weights in (wrapped, poisoned):
      np.testing.assert_array_equal(function(x, weights, equation, dtype), plain)
    of_x = lambda w: jax.grad(lambda x: jnp.sum(function(x, w, equation, dtype) ** 2))(
      x
    )
    np.testing.assert_array_equal(of_x(poisoned), of_x(wrapped.value))


def test_gradients_of_a_slot_add_up_over_its_uses():
  x, kernel = operands("bti,oi->bto")
  twice = lambda k: sum(
    jnp.sum(matmul.product(a, k, "bti,oi->bto", jnp.dtype("float32")))
    for a in (x, 2 * x)
  )
  got = slot_gradient(twice, kernel_of(kernel, "float32"))
  expected = np.broadcast_to(3 * x.sum((0, 1)), kernel.shape)
  np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_gradient_of_a_lookup_is_an_fp32_scatter_add(dtype):
  rng = np.random.default_rng(0)
  table = kernel_of(rng.normal(size=(9, 4)), dtype)
  indices = np.array([[3, 0, 3], [8, 3, 0]])  # rows once, twice, three times, never
  # float16 would make 0 of all of it.
  weight = (1e-9 * rng.normal(size=(2, 3, 4))).astype(np.float32)
  dtype = jnp.dtype(dtype)
  rows = matmul.lookup(table, indices, dtype)
  np.testing.assert_array_equal(rows, np.asarray(table.value, np.float32)[indices])
  assert rows.dtype == jnp.float32
  loss = lambda t: jnp.sum(weight * matmul.lookup(t, indices, dtype))
  expected = np.zeros((9, 4), np.float64)
  np.add.at(expected, indices, weight)
  got = slot_gradient(loss, table)
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-15)


def test_many_small_gradients_of_a_row_are_not_lost():
  """4096 times 1 is 4096; a bfloat16 sum would stop at 256."""
  table, indices = kernel_of(np.ones((2, 1)), "bfloat16"), np.zeros(4096, np.int32)
  loss = lambda t: jnp.sum(matmul.lookup(t, indices, jnp.dtype("bfloat16")))
  np.testing.assert_array_equal(slot_gradient(loss, table), [[4096.0], [0.0]])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_lookup_in_an_fp32_table_rounds_as_a_kernel_does(dtype):
  table = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
  indices = np.array([4, 1, 4])
  plain = matmul.lookup(jnp.asarray(table), indices, jnp.dtype(dtype))
  kernel = matmul.lookup(kernel_of(table, dtype), indices, jnp.dtype(dtype))
  np.testing.assert_array_equal(plain, kernel)
  assert (np.asarray(plain) != table[indices]).any()
