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
