"""Fused projections: the same numbers as the separate ones, whatever the groups."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_hybrid.models import fused, layers, rope
from jaxrl_hybrid.models import params as params_lib
from jaxrl_hybrid.models.fused import GATE_UP, QKV
from jaxrl_hybrid.models.spec import ExpertSpec, LatentSpec, ModelSpec
from jaxrl_hybrid.ops import attention, experts

BOTH = frozenset({QKV, GATE_UP})
SPEC = ModelSpec("llama", 7, 12, 20, 1, 4, 4, 4, 16, initializer_range=0.3)
BIASED = dict(qkv_bias=True, out_bias=True, mlp_bias=True)
SPECS = {
  "plain": SPEC,
  "grouped, biases, norms of heads": dataclasses.replace(
    SPEC, num_heads=8, qk_norm="head", **BIASED
  ),
  # 4 groups have 9 rows of queries each, no whole heads.
  "odd, norms of all heads": dataclasses.replace(
    SPEC, num_heads=9, num_kv_heads=3, qk_norm="whole"
  ),
  "experts": dataclasses.replace(SPEC, experts=ExpertSpec(4, 2, 8, shared_size=20)),
}


def fuse(layer, groups, axis=0):
  join = functools.partial(fused.join_rows, groups=groups, axis=axis)
  return fused.map_parts(layer, BOTH, join)


def layer_of(spec):
  """Parameters of one layer, biases and scales drawn as well."""
  stack = params_lib.init_params(spec, jax.random.key(0), vocab=7)["layers"]
  rng = np.random.default_rng(0)
  draw = lambda x: x[0] + rng.normal(size=x.shape[1:]).astype(np.float32) / 4
  return jax.tree.map(draw, stack)


def test_groups_by_hand():
  q, k, v = np.arange(8), np.arange(100, 104), np.arange(200, 204)
  joined = fused.join_rows((q, k, v), groups=2)
  expected = [[0, 1, 2, 3, 100, 101, 200, 201], [4, 5, 6, 7, 102, 103, 202, 203]]
  np.testing.assert_array_equal(joined, expected)
  for x, part in zip((q, k, v), fused.split_rows(joined, 3, 8, axis=0), strict=True):
    np.testing.assert_array_equal(x, part)


@pytest.mark.parametrize("name", SPECS)
def test_a_layer_computes_the_same_with_fused_projections(name):
  spec = SPECS[name]
  layer = layer_of(spec)
  x_BTD = jax.random.normal(jax.random.key(1), (2, 5, spec.hidden_size))
  cos, sin = rope.cos_sin(spec.rope, spec.rope_dim, jnp.arange(5)[None])

  def attend(q, k, v):
    form = attention.Form(None, None, None)
    return attention.causal(
      q, k, v, dtype=jnp.float32, implementation="xla", form=form
    ), (k, v)

  context = layers.Context(
    cos, sin, attend, jnp.float32, mixture=experts.batched_mixture
  )
  run = lambda layer: params_lib.bind_layer(spec, layer)(x_BTD, context)[:2]
  expected = run(layer)
  for groups in (1, 2, 4):
    tree = fuse(layer, groups)
    assert fused.kinds(tree) == BOTH and not fused.kinds(layer)
    got = run(tree)
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5),
      got,
      expected,
    )
  for kind in BOTH:
    assert fused.kinds(fused.map_parts(layer, {kind}, np.concatenate)) == {kind}


@pytest.mark.parametrize("axis", [0, 1])
def test_separate_is_the_inverse(axis):
  layer = layer_of(SPECS["grouped, biases, norms of heads"])
  if axis:
    layer = jax.tree.map(lambda x: np.stack([x, -x]), layer)
  got = fused.separate(fuse(layer, 4, axis), axis=axis)
  jax.tree.map(np.testing.assert_array_equal, got, layer)


def test_what_has_no_common_input_stays_apart():
  spec = dataclasses.replace(
    SPEC,
    num_layers=2,
    dense_layers=1,
    latent=LatentSpec(None, 8, 4, 4, 4),
    experts=ExpertSpec(4, 2, 8, shared_size=20),
  )
  tree = params_lib.logical_axes(spec)
  got = fused.map_parts(tree, BOTH, lambda parts: parts[0])
  assert got["layers"]["mlp"]["experts"] == tree["layers"]["mlp"]["experts"]
  assert got["layers"]["attn"] == tree["layers"]["attn"]
  assert got["layers"]["mlp"]["shared"].keys() == {"gate_up", "down"}
  assert got["dense"]["0"]["mlp"].keys() == {"gate_up", "down"}
