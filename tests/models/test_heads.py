"""Head plans written out by hand, and padding that comes off again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_hybrid.models import heads as heads_lib
from jaxrl_hybrid.models.heads import HeadPlan, plan_heads

# (query heads, key/value heads, tp): slots, group, replicas, the key/value head of
# each slot, the query heads of each slot; "." is a head of zeros.
BY_HAND = {
  (8, 8, 4): (8, 1, 1, "0 1 2 3 4 5 6 7", "0 1 2 3 4 5 6 7"),
  (4, 2, 2): (2, 2, 1, "0 1", "0 1, 2 3"),
  (9, 3, 1): (3, 3, 1, "0 1 2", "0 1 2, 3 4 5, 6 7 8"),
  (9, 3, 2): (4, 3, 1, "0 1 2 .", "0 1 2, 3 4 5, 6 7 8, . . ."),
  (9, 3, 4): (4, 3, 1, "0 1 2 .", "0 1 2, 3 4 5, 6 7 8, . . ."),
  (9, 3, 8): (8, 2, 2, "0 0 1 1 2 2 . .", "0 1, 2 ., 3 4, 5 ., 6 7, 8 ., . ., . ."),
  (14, 2, 2): (2, 7, 1, "0 1", "0 1 2 3 4 5 6, 7 8 9 10 11 12 13"),
  (14, 2, 4): (
    4, 4, 2, "0 0 1 1", "0 1 2 3, 4 5 6 ., 7 8 9 10, 11 12 13 .",
  ),
  (14, 2, 8): (
    8, 2, 4, "0 0 0 0 1 1 1 1", "0 1, 2 3, 4 5, 6 ., 7 8, 9 10, 11 12, 13 .",
  ),
  (28, 4, 8): (
    8, 4, 2, "0 0 1 1 2 2 3 3",
    "0 1 2 3, 4 5 6 ., 7 8 9 10, 11 12 13 ., "
    "14 15 16 17, 18 19 20 ., 21 22 23 24, 25 26 27 .",
  ),
  (4, 1, 4): (4, 1, 4, "0 0 0 0", "0, 1, 2, 3"),
}  # fmt: skip
CASES = pytest.mark.parametrize("heads,kv_heads,tp", BY_HAND, ids=str)
HEAD_DIM, HIDDEN, LAYERS = 2, 3, 2


def numbers(text):
  return [-1 if x == "." else int(x) for x in text.replace(",", " ").split()]


@CASES
def test_plans_by_hand(heads, kv_heads, tp):
  slots, group, replicas, slot_source, query_source = BY_HAND[heads, kv_heads, tp]
  plan = plan_heads(heads, kv_heads, tp)
  assert plan == HeadPlan(heads, kv_heads, slots, group, replicas)
  assert plan.slot_source().tolist() == numbers(slot_source)
  assert plan.query_source().tolist() == numbers(query_source)
  # Query heads in the model's order need no padding, however keys are copied.
  stays = plan.query_source().tolist() == list(range(heads))
  assert plan.pads_weights == (not stays)


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
@pytest.mark.parametrize("heads,kv_heads", [(9, 3), (14, 2), (28, 4), (8, 8), (6, 1)])
def test_every_query_head_is_there_once_and_in_a_slot_of_its_own_key(
  heads, kv_heads, tp
):
  plan = plan_heads(heads, kv_heads, tp)
  query, slot = plan.query_source(), plan.slot_source()
  assert plan.slots % tp == 0 and len(query) == plan.slots * plan.group
  assert sorted(query[query >= 0]) == list(range(heads))
  for place, head in enumerate(query):
    if head >= 0:
      assert slot[place // plan.group] == head // (heads // kv_heads)


@pytest.mark.parametrize(
  "heads,kv_heads,tp,slots", [(9, 3, 2, 4), (14, 2, 4, 4), (32, 8, 8, 8), (7, 1, 4, 4)]
)
def test_the_cache_is_no_larger_than_the_mesh_makes_it(heads, kv_heads, tp, slots):
  assert plan_heads(heads, kv_heads, tp).slots == slots


def layers(heads, kv_heads):
  """A stack with every number different from the others."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=(LAYERS, *shape)).astype(np.float32)
  kernels = {
    name: {"kernel": draw(n * HEAD_DIM, HIDDEN), "bias": draw(n * HEAD_DIM)}
    for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
  }
  output = {"kernel": draw(heads * HEAD_DIM, HIDDEN), "bias": draw(HIDDEN)}
  norms = {"q_norm": {"scale": draw(HEAD_DIM)}}
  return {
    "attn": {**kernels, "o": output, **norms},
    "mlp": {"up": {"kernel": draw(HIDDEN, 5)}},
  }


@CASES
def test_padding_comes_off_again(heads, kv_heads, tp):
  plan, given = plan_heads(heads, kv_heads, tp), layers(heads, kv_heads)
  padded = heads_lib.pad_heads(given, plan, HEAD_DIM)
  again = heads_lib.unpad_heads(padded, plan, HEAD_DIM)
  jax.tree.map(np.testing.assert_array_equal, again, given)


@CASES
def test_padded_projections_hold_the_heads_of_the_plan_and_zeros(heads, kv_heads, tp):
  plan, given = plan_heads(heads, kv_heads, tp), layers(heads, kv_heads)
  padded = heads_lib.pad_heads(given, plan, HEAD_DIM)
  source = {"q": plan.query_source(), "o": plan.query_source()}
  # Copies are made of what k and v project to, not of their kernels.
  for name in ("k", "v"):
    source[name] = np.arange(kv_heads) if plan.replicas > 1 else plan.slot_source()
  for name, sources in source.items():
    for leaf in ("kernel",) if name == "o" else ("kernel", "bias"):
      by_head = lambda x: np.split(np.asarray(x), x.shape[1] // HEAD_DIM, axis=1)
      before = by_head(given["attn"][name][leaf])
      after = by_head(padded["attn"][name][leaf])
      assert len(after) == len(sources)
      for found, head in zip(after, sources, strict=True):
        expected = before[head] if head >= 0 else np.zeros_like(before[0])
        np.testing.assert_array_equal(found, expected)
  for same in (("attn", "o", "bias"), ("attn", "q_norm", "scale"), ("mlp", "up")):
    a, b = given, padded
    for key in same:
      a, b = a[key], b[key]
    jax.tree.map(np.testing.assert_array_equal, a, b)


@CASES
def test_attention_over_the_slots_equals_attention_over_the_heads(heads, kv_heads, tp):
  """Scores and sums head by head in numpy; x stands for all projections' input."""
  plan, given = plan_heads(heads, kv_heads, tp), layers(heads, kv_heads)
  x = np.random.default_rng(1).normal(size=(1, 4, HIDDEN)).astype(np.float32)

  def output(attn, query_heads, fill):
    def project(name):
      kernel, bias = (np.asarray(attn[name][k][0]) for k in ("kernel", "bias"))
      return (x @ kernel.T + bias).reshape(1, 4, -1, HEAD_DIM)

    q, k, v = (
      project("q"),
      np.asarray(fill(project("k"))),
      np.asarray(fill(project("v"))),
    )
    group = query_heads // k.shape[2]
    out = np.zeros_like(q)
    for head in range(query_heads):
      scores = np.exp(q[0, :, head] @ k[0, :, head // group].T)
      mixed = scores / scores.sum(-1, keepdims=True) @ v[0, :, head // group]
      out[0, :, head] = mixed
    return out.reshape(1, 4, -1) @ np.asarray(attn["o"]["kernel"][0])

  expected = output(given["attn"], heads, lambda kv: kv)
  padded = heads_lib.pad_heads(given, plan, HEAD_DIM)
  fill = lambda kv: plan.fill_slots(jnp.asarray(kv))
  got = output(padded["attn"], plan.slots * plan.group, fill)
  np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
