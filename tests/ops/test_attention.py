"""Attention against a softmax written out in numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_hybrid.errors import ConfigError
from jaxrl_hybrid.ops import attention

causal = jax.jit(
  functools.partial(
    attention.causal, dtype=jnp.dtype(jnp.float32), implementation="xla"
  )
)
cached = jax.jit(functools.partial(attention.cached, implementation="xla"))


def random(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def reference(q_THA, k_SKA, v_SKA, visible_TS):
  """One row; query head h reads key/value head h // G."""
  out = np.zeros(q_THA.shape)
  group = q_THA.shape[1] // k_SKA.shape[1]
  for h in range(q_THA.shape[1]):
    scores = q_THA[:, h] @ k_SKA[:, h // group].T / np.sqrt(q_THA.shape[-1])
    scores = np.where(visible_TS, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out[:, h] = weights @ v_SKA[:, h // group]
  return out


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_causal_equals_a_masked_softmax(kv_heads):
  q, k, v = (
    random(2, 7, heads, 8, seed=i) for i, heads in enumerate((4, kv_heads, kv_heads))
  )
  got = causal(q, k, v)
  for row in range(2):
    expected = reference(q[row], k[row], v[row], np.tril(np.ones((7, 7), bool)))
    np.testing.assert_allclose(got[row], expected, atol=1e-5)


def test_causal_rows_do_not_see_what_comes_later():
  q, k, v = (random(1, 7, 2, 8, seed=i) for i in range(3))
  poison = lambda x: np.concatenate([x[:, :4], np.full_like(x[:, 4:], 1e4)], 1)
  np.testing.assert_array_equal(
    causal(q, k, v)[:, :4], causal(poison(q), poison(k), poison(v))[:, :4]
  )


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_cached_equals_a_softmax_over_the_first_slots(kv_heads):
  q, k, v = (
    random(4, 1, 4, 8),
    random(4, 9, kv_heads, 8, seed=1),
    random(4, 9, kv_heads, 8, seed=2),
  )
  lengths = np.array([1, 4, 8, 9], np.int32)
  poisoned = [x.copy() for x in (k, v)]
  for row, length in enumerate(lengths):
    for x in poisoned:
      x[row, length:] = 1e4
  got = cached(q, *poisoned, lengths)
  for row, length in enumerate(lengths):
    expected = reference(q[row], k[row], v[row], np.arange(9)[None] < length)
    np.testing.assert_allclose(got[row], expected, atol=1e-5)


def test_cached_is_the_last_row_of_causal():
  q, k, v = (random(2, 6, heads, 8, seed=i) for i, heads in enumerate((4, 2, 2)))
  got = cached(q[:, -1:], k, v, jnp.full((2,), 6, jnp.int32))
  np.testing.assert_allclose(got[:, 0], causal(q, k, v)[:, -1], atol=1e-6)


def test_auto_on_a_cpu_is_xla_and_cudnn_is_refused():
  assert attention.choose("auto", dtype=jnp.bfloat16, head_dim=64) == "xla"
  with pytest.raises(ConfigError, match="the platform is cpu"):
    attention.choose("cudnn", dtype=jnp.bfloat16, head_dim=64)


@pytest.mark.parametrize(
  "dtype,error", [("float32", 1e-6), ("bfloat16", 2e-2), ("float16", 2e-3)]
)
def test_16_bit_operands_round_as_little_as_their_format(dtype, error):
  q, k, v = (random(2, 9, heads, 8, seed=i) for i, heads in enumerate((4, 2, 2)))
  run = functools.partial(
    attention.causal, dtype=jnp.dtype(dtype), implementation="xla"
  )
  got = np.asarray(jax.jit(run)(q, k, v))
  difference = np.abs(got - causal(q, k, v)).max()
  assert got.dtype == np.float32 and difference < error
  assert dtype == "float32" or difference > error / 100  # it did round


def test_float16_attention_has_bfloat16s_range_in_its_gradient():
  q, k, v = (random(1, 5, 2, 8, seed=i) for i in range(3))

  def gradient(dtype, scale):
    run = functools.partial(
      attention.causal, dtype=jnp.dtype(dtype), implementation="xla"
    )
    return jax.jit(jax.grad(lambda q: scale * jnp.sum(run(q, k, v) ** 2)))(q) / scale

  exact = gradient("float32", 1.0)
  # Cotangents of 1e-9 are 0 in float16.
  error = jnp.linalg.norm(gradient("float16", 1e-9) - exact) / jnp.linalg.norm(exact)
  assert error < 2e-2


POSITIONS = np.array([[0, 1, 2, 3, 0, 1, 0, 0], [0, 1, 2, 3, 4, 5, 6, 7]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
  "form",
  [attention.Form(), attention.Form(window=2), attention.Form(softcap=3.0)],
  ids=["plain", "window", "softcap"],
)
def test_sequences_of_a_row_are_as_if_alone(form, dtype):
  """Outputs and gradients; the neighbours hold numbers that would show."""
  q, k, v = (jnp.asarray(random(2, 8, 4, 16, seed=i)) for i in range(3))
  weight = random(2, 8, 4, 16, seed=3)
  options = dict(dtype=jnp.dtype(dtype), implementation="xla", form=form)

  def together(q, k, v):
    out = attention.causal(q, k, v, positions_BT=jnp.asarray(POSITIONS), **options)
    return jnp.sum(weight[0, 4:6] * out[0, 4:6]), out[0, 4:6]

  def alone(q, k, v):
    out = attention.causal(*(x[:1, 4:6] for x in (q, k, v)), **options)
    return jnp.sum(weight[0, 4:6] * out[0]), out[0]

  poisoned = [x.at[0, :4].set(1e4).at[0, 6:].set(-1e4) for x in (q, k, v)]
  grads, out = jax.grad(together, (0, 1, 2), has_aux=True)(*poisoned)
  expected_grads, expected = jax.grad(alone, (0, 1, 2), has_aux=True)(q, k, v)
  np.testing.assert_allclose(out, expected, atol=1e-5)
  for got, want in zip(grads, expected_grads):
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_sequence_ids_count_the_starts():
  ids = attention.sequence_ids(jnp.asarray(POSITIONS))
  assert ids.tolist() == [[1, 1, 1, 1, 2, 2, 3, 4], [1] * 8]
