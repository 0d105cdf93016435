"""Chunked log-probs and entropy against a dense reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_hybrid.ops import logprob
from jaxrl_hybrid.ops.matmul import Kernel

VOCAB, PADDED, LENGTH = 37, 40, 7  # multiples of nothing in use
RNG = np.random.default_rng(0)
HIDDEN = RNG.normal(size=(2, LENGTH, 8)).astype(np.float32)
HEAD = RNG.normal(size=(PADDED, 8)).astype(np.float32)
HEAD[VOCAB:] = 50.0  # padding columns that would win, if they were not masked
TARGETS = RNG.integers(0, VOCAB, (2, LENGTH)).astype(np.int32)
WEIGHTS = RNG.normal(size=(2, 2, LENGTH)).astype(np.float32)
CHUNKS = (1, 3, 6, 7, 64)


def dense(hidden, head, temperature):
  """(log-probs of the targets, entropy) over the whole vocabulary."""
  log_probs = jax.nn.log_softmax(hidden @ head[:VOCAB].T / temperature, -1)
  entropy = -(jnp.exp(log_probs) * log_probs).sum(-1)
  return jnp.take_along_axis(log_probs, TARGETS[..., None], -1)[..., 0], entropy


def chunked(hidden, head, temperature, chunk):
  return logprob.token_log_probs(
    hidden, head, TARGETS, temperature=temperature, vocab_size=VOCAB, chunk=chunk
  )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_values_equal_a_float64_softmax(chunk, temperature):
  logits = HIDDEN.astype(np.float64) @ HEAD[:VOCAB].T.astype(np.float64) / temperature
  probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  expected = np.log(np.take_along_axis(probs, TARGETS[..., None], -1)[..., 0])
  log_probs, entropy = jax.jit(
    functools.partial(chunked, temperature=temperature, chunk=chunk)
  )(HIDDEN, HEAD)
  assert log_probs.dtype == entropy.dtype == jnp.float32
  np.testing.assert_allclose(log_probs, expected, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(
    entropy, -(probs * np.log(probs)).sum(-1), rtol=1e-5, atol=1e-5
  )


@pytest.mark.parametrize("chunk", CHUNKS)
def test_gradients_equal_those_of_the_dense_formula(chunk):
  def weighted(function):
    def loss(hidden, head):
      log_probs, entropy = function(hidden, head)
      return (WEIGHTS[0] * log_probs + WEIGHTS[1] * entropy).sum()

    return jax.jit(jax.grad(loss, (0, 1)))(HIDDEN, HEAD)

  got = weighted(functools.partial(chunked, temperature=0.7, chunk=chunk))
  expected = weighted(functools.partial(dense, temperature=0.7))
  for a, b in zip(got, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())
  assert (np.asarray(got[1])[VOCAB:] == 0).all()  # padding never learns


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("collision", [False, True])
def test_gradients_of_every_form_equal_autodiff(collision, softcap, shards):
  def dense_form(hidden, head):
    logits = logprob.cap(hidden @ head[:VOCAB].T, softcap) / 0.7
    log_probs = jax.nn.log_softmax(logits, -1)
    probs = jnp.exp(log_probs)
    second = probs**2 if collision else -probs * log_probs
    return jnp.take_along_axis(log_probs, TARGETS[..., None], -1)[..., 0], second.sum(
      -1
    )

  def of_kernel(hidden, slot):
    return logprob.token_log_probs(
      hidden,
      Kernel(HEAD, slot),
      TARGETS,
      temperature=0.7,
      vocab_size=VOCAB,
      chunk=3,
      softcap=softcap,
      collision=collision,
      shards=shards,
    )

  def loss(function, *given):
    first, second = function(*given)
    return (WEIGHTS[0] * first + WEIGHTS[1] * second).sum()

  value, got = jax.value_and_grad(loss, (1, 2))(of_kernel, HIDDEN, np.zeros_like(HEAD))
  same, expected = jax.value_and_grad(loss, (1, 2))(dense_form, HIDDEN, HEAD)
  np.testing.assert_allclose(value, same, rtol=1e-5)
  for a, b in zip(got, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


def test_a_chunk_is_counted_in_tokens_of_a_device():
  assert logprob.positions(8, 2048) == 256
  assert logprob.positions(8, 2048, shards=4) == 1024
  assert logprob.positions(4096, 2048) == 1


def test_padded_columns_have_probability_zero():
  logits = jnp.array([[1.0, 2.0, 90.0, jnp.inf]])
  probs = jax.nn.softmax(logprob.mask_padded_vocab(logits, 2))
  np.testing.assert_allclose(probs, [[0.268941, 0.731059, 0, 0]], atol=1e-6)
  assert (np.asarray(probs)[0, 2:] == 0).all()


@pytest.mark.parametrize(
  "temperature,expected",
  [(0.7, [-0.2601, -1.6887, -3.1173]), (1.0, [-0.4076, -1.4076, -2.4076])],
)
def test_the_temperature_is_that_of_the_rollout(temperature, expected):
  hidden = jnp.broadcast_to(jnp.array([2.0, 1.0, 0.0]), (1, 3, 3))
  got, _ = jax.jit(
    functools.partial(
      logprob.token_log_probs, temperature=temperature, vocab_size=3, chunk=2
    )
  )(hidden, jnp.eye(3), jnp.array([[0, 1, 2]]))
  np.testing.assert_allclose(got[0], expected, atol=5e-5)


def test_the_entropy_of_equal_logits_is_the_log_of_the_vocabulary():
  _, entropy = chunked(jnp.zeros_like(HIDDEN), jnp.asarray(HEAD), 1.0, 3)
  np.testing.assert_allclose(entropy, np.log(VOCAB), rtol=1e-6)


def test_bfloat16_inputs_give_float32_log_probs():
  half = lambda x: jnp.asarray(x, jnp.bfloat16)
  run = jax.jit(functools.partial(chunked, temperature=1.0, chunk=3))
  got, _ = run(half(HIDDEN), half(HEAD))
  wide = lambda x: half(x).astype(jnp.float32)
  expected, _ = jax.jit(functools.partial(dense, temperature=1.0))(
    wide(HIDDEN), wide(HEAD)
  )
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, expected, atol=1e-4)  # no rounding of logits


def test_the_backward_pass_never_holds_the_whole_logits():
  hidden = jax.ShapeDtypeStruct((1, 1024, 8), jnp.float32)
  head = jax.ShapeDtypeStruct((4096, 8), jnp.float32)
  targets = jax.ShapeDtypeStruct((1, 1024), jnp.int32)

  def loss(hidden, head, targets, chunk):
    log_probs, entropy = logprob.token_log_probs(
      hidden, head, targets, temperature=1.0, vocab_size=4096, chunk=chunk
    )
    return (log_probs + entropy).sum()

  def temporary(chunk):
    grad = jax.jit(jax.grad(functools.partial(loss, chunk=chunk), (0, 1)))
    analysis = grad.lower(hidden, head, targets).compile().memory_analysis()
    return analysis.temp_size_in_bytes

  logits = 1024 * 4096 * 4
  assert temporary(1024) >= logits  # the measure can see them
  assert temporary(32) < logits / 4
