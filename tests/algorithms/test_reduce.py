"""Aggregation and whitening: hand values, and micro-batches that add up."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_hybrid.algorithms import reduce

# Sequences of 1 and 3 tokens, losses 1 and 2 per token, padding of junk.
LOSS = np.array([[1, 9, 9, 9], [2, 2, 2, 9]], np.float32)
MASK = np.array([[1, 0, 0, 0], [1, 1, 1, 0]], bool)
HAND = {
  "token-mean": 1.75,
  "token-sum": 7.0,
  "seq-mean-token-sum": 3.5,
  "seq-mean-token-sum-norm": 0.875,
  "seq-mean-token-mean": 1.5,
}

aggregate = jax.jit(
  functools.partial(reduce.aggregate, scale=4.0), static_argnames="mode"
)


def test_every_mode_has_a_hand_value():
  assert set(HAND) == set(reduce.AGGREGATIONS)


@pytest.mark.parametrize("mode", reduce.AGGREGATIONS)
@pytest.mark.parametrize("junk", [9.0, np.nan, np.inf])
def test_modes_by_hand_whatever_the_padding_holds(mode, junk):
  loss = np.where(MASK, LOSS, np.float32(junk))
  got = aggregate(loss, MASK, reduce.totals(MASK), mode=mode)
  np.testing.assert_allclose(got, HAND[mode], rtol=1e-6)


@pytest.mark.parametrize("mode", reduce.AGGREGATIONS)
@pytest.mark.parametrize("micro_rows", [1, 2, 3])
def test_micro_batches_add_up_to_the_whole(mode, micro_rows):
  rng = np.random.default_rng(0)
  loss = rng.normal(size=(6, 5)).astype(np.float32)
  lengths = np.array([5, 1, 0, 2, 4, 3])  # 0: a filler or a masked row
  mask = np.arange(5) < lengths[:, None]
  split = lambda x: x.reshape(-1, micro_rows, 5)
  total = reduce.totals(split(mask))
  whole = aggregate(loss, mask, reduce.totals(mask), mode=mode)
  parts = [
    aggregate(x, m, total, mode=mode)
    for x, m in zip(split(loss), split(mask), strict=True)
  ]
  np.testing.assert_allclose(sum(parts), whole, rtol=1e-5)


def test_totals_count_only_sequences_with_a_token():
  mask = np.array([[[1, 0], [0, 0]], [[1, 1], [0, 0]]], bool)  # [A, B, T]
  assert [float(x) for x in reduce.totals(mask)] == [3.0, 2.0]


def test_a_masked_truncated_row_is_not_in_the_denominator():
  loss = np.ones((2, 25), np.float32)
  mask = np.stack([np.zeros(25, bool), np.ones(25, bool)])  # 5 tokens are masked
  got = aggregate(loss, mask, reduce.totals(mask), mode="token-mean")
  np.testing.assert_allclose(got, 1.0)


@pytest.mark.parametrize("mode", reduce.AGGREGATIONS)
def test_an_all_masked_batch_has_loss_and_gradient_zero(mode):
  mask = np.zeros_like(MASK)
  loss, grad = jax.jit(
    jax.value_and_grad(
      lambda x: reduce.aggregate(x, mask, reduce.totals(mask), mode=mode)
    )
  )(LOSS)
  assert loss == 0 and (np.asarray(grad) == 0).all()


def test_an_unknown_mode_is_named():
  with pytest.raises(ValueError, match="'mean'"):
    reduce.aggregate(
      jnp.ones((1, 1)),
      jnp.ones((1, 1), bool),
      reduce.totals(jnp.ones((1, 1), bool)),
      mode="mean",
    )


@pytest.mark.parametrize("junk", [5.0, 1e6, np.nan])
def test_whiten_sees_only_the_mask_and_uses_the_unbiased_variance(junk):
  x = np.array([[1, 2, junk], [3, junk, junk]], np.float32)
  mask = np.array([[1, 1, 0], [1, 0, 0]], bool)
  white = reduce.whiten(x, mask)
  np.testing.assert_allclose(white, [[-1, 0, 0], [1, 0, 0]], atol=1e-6)
  assert white.dtype == np.float32


@pytest.mark.parametrize("mask", [[0, 0], [1, 0]])
def test_whiten_of_less_than_two_tokens_is_zero(mask):
  assert not reduce.whiten(np.ones((1, 2), np.float32), np.array([mask], bool)).any()


def test_whiten_of_equal_values_is_finite():
  white = reduce.whiten(np.full((1, 4), 0.1, np.float32), np.ones((1, 4), bool))
  np.testing.assert_allclose(white, 0, atol=1e-3)


def test_rows_that_hold_several_sequences():
  """Sequences of 2, 3 and 1 tokens; the second has one token outside of the mask."""
  positions = jnp.array([[0, 1, 0, 1, 2, 0], [0, 0, 1, 2, 3, 4]])
  mask = jnp.array([[1, 1, 0, 1, 1, 0], [1, 0, 0, 0, 0, 0]], bool)
  loss = jnp.array([[2.0, 4.0, 9.0, 1.0, 7.0, 9.0], [5.0, 9.0, 9.0, 9.0, 9.0, 9.0]])
  sums = reduce.sequence_sums(jnp.where(mask, loss, 0.0), positions)
  assert sums.tolist() == [[6, 6, 8, 8, 8, 0], [5, 0, 0, 0, 0, 0]]
  total = reduce.totals(mask, positions)
  assert (total.tokens, total.sequences) == (5, 3)
  share = lambda mode: float(
    reduce.aggregate(loss, mask, total, mode=mode, positions_BT=positions, scale=2.0)
  )
  assert share("seq-mean-token-mean") == pytest.approx((3 + 4 + 5) / 3)
  assert share("seq-mean-token-sum") == pytest.approx((6 + 8 + 5) / 3)
  assert share("token-mean") == pytest.approx(19 / 5)
