"""Projections of activations that float16 cannot hold."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl_hybrid.models.attention import Attention
from jaxrl_hybrid.models.layers import Projection
from jaxrl_hybrid.models.spec import ModelSpec

HALF = jnp.dtype("float16")


@pytest.mark.parametrize("bounded", [True, False])
def test_only_what_is_not_bounded_is_scaled(bounded):
  row = Projection(
    4, 3, None, kind="row", bias=False, std=1.0, bounded=bounded, rngs=nnx.Rngs(0)
  )
  largest = jnp.full((1, 2, 4), np.finfo(np.float16).max, jnp.float32)
  assert np.isfinite(row(largest, HALF)).all()
  assert np.isfinite(row(2 * largest, HALF)).all() == (not bounded)


def test_the_output_projection_of_attention_is_bounded():
  spec = ModelSpec("llama", 7, 8, 8, 1, 2, 2, 4, 16)
  assert Attention(spec, rngs=nnx.Rngs(0)).o.bounded
