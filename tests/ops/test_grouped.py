"""Grouped products against one product per row, and a mixture against a loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_hybrid.ops import experts, grouped, grouped_triton
from jaxrl_hybrid.ops.matmul import Kernel

CASES = [  # rows, I, D, rows of each group
  (40, 24, 40, (5, 0, 20, 7)),  # eight rows belong to no group
  (300, 100, 64, (0, 130, 170)),
  (33, 16, 16, (1,) * 8),
  (8, 16, 16, (0, 0)),
]
KERNELS = {
  "loop": (grouped._times, grouped._outer_products),
  "triton": (
    functools.partial(grouped_triton.times, interpret=True),
    functools.partial(grouped_triton.outer_products, interpret=True),
  ),
}


def operands(rows, side_i, side_d, sizes, seed=0):
  rng = np.random.default_rng(seed)
  of_i, of_d = rng.normal(size=(rows, side_i)), rng.normal(size=(rows, side_d))
  matrices = rng.normal(size=(len(sizes), side_i, side_d))
  return [x.astype(np.float32) for x in (of_i, of_d, matrices)]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("kind", KERNELS)
def test_each_row_meets_its_own_matrix(kind, case):
  times, outer_products = KERNELS[kind]
  of_i, of_d, matrices = operands(*case)
  sizes = np.array(case[3])
  group, n = np.repeat(np.arange(len(sizes)), sizes), sizes.sum()
  expected = np.zeros_like(of_i)
  expected[:n] = np.einsum("md,mid->mi", of_d[:n], matrices[group])
  got = times(of_d, jnp.asarray(matrices), jnp.asarray(sizes), contract=1)
  np.testing.assert_allclose(got, expected, atol=1e-4)
  expected = np.zeros_like(of_d)
  expected[:n] = np.einsum("mi,mid->md", of_i[:n], matrices[group])
  got = times(of_i, jnp.asarray(matrices), jnp.asarray(sizes), contract=0)
  np.testing.assert_allclose(got, expected, atol=1e-4)
  expected = np.zeros_like(matrices)
  np.add.at(expected, group, np.einsum("mi,md->mid", of_i[:n], of_d[:n]))
  got = outer_products(jnp.asarray(of_i), jnp.asarray(of_d), jnp.asarray(sizes))
  np.testing.assert_allclose(got, expected, atol=1e-4)


def dense_mixture(x, weights, chosen, kernels):
  """Every expert on every token: what a mixture must equal."""
  gate, up, down = kernels
  inner = jax.nn.silu(jnp.einsum("nd,eid->nei", x, gate))
  inner *= jnp.einsum("nd,eid->nei", x, up)
  out = jnp.einsum("nei,eid->ned", inner, down)
  picked = jnp.take_along_axis(out, chosen[..., None], 1)
  return jnp.sum(weights[..., None] * picked, 1)


def mixture_case(tokens=23, count=5, choices=2, side_i=12, side_d=8):
  keys = jax.random.split(jax.random.key(0), 6)
  x = jax.random.normal(keys[0], (tokens, side_d))
  weights = jax.random.uniform(keys[1], (tokens, choices))
  chosen = jax.lax.top_k(jax.random.normal(keys[2], (tokens, count)), choices)[1]
  kernels = tuple(jax.random.normal(k, (count, side_i, side_d)) for k in keys[3:])
  return x, weights, chosen, kernels


def test_a_mixture_and_its_gradients_equal_the_dense_run():
  x, weights, chosen, kernels = mixture_case()
  sparse = functools.partial(experts.mixture, act=jax.nn.silu, dtype=jnp.float32)

  def loss(fn, x, weights, kernels):
    return jnp.sum(jnp.sin(fn(x, weights, chosen, kernels)))

  got = jax.value_and_grad(loss, (1, 2, 3))(sparse, x, weights, kernels)
  expected = jax.value_and_grad(loss, (1, 2, 3))(dense_mixture, x, weights, kernels)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))


def test_the_gradient_of_16_bit_experts_is_not_rounded():
  x, weights, chosen, kernels = mixture_case()
  half = [k.astype(jnp.bfloat16) for k in kernels]
  run = functools.partial(experts.mixture, act=jax.nn.silu, dtype=jnp.bfloat16)
  slots = [jnp.zeros(k.shape, jnp.float32) for k in kernels]

  def loss(slots):
    both = tuple(Kernel(k, slot) for k, slot in zip(half, slots, strict=True))
    return jnp.sum(run(x, weights, chosen, both))

  grads = jax.grad(loss)(slots)
  assert all(g.dtype == jnp.float32 for g in grads)
  exact = [g.astype(jnp.bfloat16).astype(jnp.float32) == g for g in grads]
  assert not all(e.all() for e in exact)


def test_experts_in_parts_add_up_to_all_of_them():
  x, weights, chosen, kernels = mixture_case(count=6)
  run = functools.partial(experts.mixture, act=jax.nn.silu, dtype=jnp.float32)
  part = lambda first: run(
    x, weights, chosen, tuple(k[first : first + 2] for k in kernels), first=first
  )
  whole = run(x, weights, chosen, kernels)
  np.testing.assert_allclose(sum(map(part, (0, 2, 4))), whole, atol=1e-4)


def test_no_token_is_dropped_whatever_its_neighbours_choose():
  x, weights, chosen, kernels = mixture_case()
  run = functools.partial(experts.mixture, act=jax.nn.silu, dtype=jnp.float32)
  alone = run(x[:1], weights[:1], chosen[:1], kernels)
  crowd = jnp.broadcast_to(chosen[:1], chosen.shape)  # all choose the same two
  np.testing.assert_allclose(run(x, weights, crowd, kernels)[:1], alone, rtol=1e-5)


def test_float16_experts_do_not_overflow():
  x, weights, chosen, kernels = mixture_case()
  big = (kernels[0] * 100, kernels[1] * 100, kernels[2])
  run = functools.partial(experts.mixture, x, weights, chosen, big, act=jax.nn.silu)
  exact = run(dtype=jnp.float32)
  assert jnp.abs(exact).max() > 65504
  got = run(dtype=jnp.float16)
  np.testing.assert_allclose(got, exact, atol=5e-3 * float(jnp.abs(exact).max()))


def test_balance_loss_by_hand():
  # Two tokens are real; they choose experts 0 and 1; mean probabilities .6 .3 .1.
  probs = jnp.array([[[0.7, 0.2, 0.1], [0.5, 0.4, 0.1], [0.0, 0.0, 1.0]]])
  routing = experts.Routing(probs, jnp.array([[[0], [1], [2]]]))
  load = experts.load_of(routing, jnp.array([[True, True, False]]))
  stacked = jax.tree.map(lambda x: x[None], load)
  expected = 3 * (0.5 * 0.6 + 0.5 * 0.3)
  assert float(experts.balance_loss(stacked)) == pytest.approx(expected, rel=1e-6)
