"""Adapters on meshes: gradients, updates, the frozen base, the switch, the critic."""

import dataclasses
import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

sys.path.append(str(Path(__file__).parents[1] / "parallel"))

import build_tiny as tiny
import mesh_parity

from jaxrl_hybrid.algorithms import reduce
from jaxrl_hybrid.models import adapters as adapters_lib
from jaxrl_hybrid.models import fused
from jaxrl_hybrid.models import params as params_lib
from jaxrl_hybrid.models.adapters import HEAD, A, B, LoraSpec
from jaxrl_hybrid.models.decoder import Decoder
from jaxrl_hybrid.parallel import hybrid
from jaxrl_hybrid.parallel import mesh as mesh_lib
from jaxrl_hybrid.parallel import weights as weights_lib
from jaxrl_hybrid.parallel.adapters import AdapterLayout, Merger
from jaxrl_hybrid.workers import stores, training
from jaxrl_hybrid.workers.adapted import Frozen
from jaxrl_hybrid.workers.critic import Critic, CriticSettings

ODD, EVEN = mesh_parity.ODD, mesh_parity.EVEN
LORA = LoraSpec(3, alpha=6.0)
STEPS, CHUNK = 2, 4


def make_layout(spec, mesh, *, zero=1, sp=False, dtype="float32", lora=LORA):
  train = weights_lib.train_layout(
    spec, mesh_lib.train_mesh(mesh), sequence_parallel=sp
  )
  base = weights_lib.WeightLayout(spec, train, jnp.dtype(dtype), zero)
  return AdapterLayout(base, lora)


def decoder_of(layout, microbatches=1):
  base = layout.base
  return Decoder(
    base.spec, base.dtype, "xla", base.train.constrain, heads=base.heads,
    use=layout.use, stages=base.stages, microbatches=microbatches,
  )  # fmt: skip


def host_adapters(spec, lora=LORA):
  """Random pairs: b is not zero, so a has a gradient."""
  rng = np.random.default_rng(5)
  draw = lambda x: (0.2 * rng.normal(size=x.shape)).astype(np.float32)
  return jax.tree.map(draw, adapters_lib.abstract_adapters(spec, lora))


def freeze(layout, params):
  base = layout.base
  stored = put(params, base.abstract_params())
  shardings = stores.shardings_of(layout.abstract_frozen())
  return jax.jit(base.prepare, out_shardings=shardings)(stored)


def put(host, like):
  place = lambda x, l: jax.device_put(x, l.sharding, may_alias=False)
  return jax.tree.map(place, host, like)


def make_state(layout, microbatches=1, where=stores.RESIDENT, gradients=None):
  decoder = decoder_of(layout, microbatches)

  def loss_fn(params, micro, total):
    log_probs, entropy = decoder.token_log_probs(
      params, micro["tokens"], temperature=0.7, chunk=CHUNK
    )
    loss_BT = -micro["advantages"] * log_probs - 0.1 * entropy
    loss = reduce.aggregate(loss_BT, micro["mask"], total, mode="token-mean", scale=1.0)
    return loss, ({}, {})

  params = put(host_adapters(layout.spec, layout.lora), layout.abstract_params())
  of_base = mesh_parity.host_params(layout.spec, layout.base.vocab)
  state = training.TrainState(
    params, optax.adamw(mesh_parity.LR), layout, loss_fn,
    where=where, frozen=Frozen(freeze(layout, of_base)), seed=3,
  )  # fmt: skip
  state.gradients = gradients or state.gradients
  return state


def host(tree):
  return jax.tree.map(np.array, jax.device_get(tree))


@functools.cache
def on_one_device(spec):
  """(loss, gradients, adapters after two updates)."""
  state = make_state(make_layout(spec, (1, 1, 1)))
  loss, grads = mesh_parity.gradients(state)
  return loss, grads, mesh_parity.after_steps(state, STEPS)


def test_gradients_are_those_of_merged_weights_by_the_chain_rule():
  plain = mesh_parity.make_state(ODD, (1, 1, 1), chunk=CHUNK)
  pairs = host_adapters(ODD)
  merged = adapters_lib.merged(mesh_parity.host_params(ODD), pairs, LORA)
  plain.store.params = put(merged, plain._layout.abstract_params())
  expected_loss, of_weights = mesh_parity.gradients(plain)
  loss, grads, _ = on_one_device(ODD)
  np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
  for path, target in adapters_lib.places(ODD, LORA):
    kernel = of_weights
    pair, got = pairs, grads
    for key in path:
      kernel, pair, got = kernel[key], pair[key], got[key]
    of_oi = kernel["kernel"].swapaxes(1, 2) if target.row else kernel["kernel"]
    expected = {
      A: LORA.scale * np.einsum("loi,lor->lir", of_oi, pair[B]),
      B: LORA.scale * np.einsum("loi,lir->lor", of_oi, pair[A]),
    }
    assert mesh_parity.worst(got, expected) < 2e-5, path


@pytest.mark.parametrize(
  "spec, mesh, zero, microbatches, sp",
  [(ODD, (1, 2, 2), 3, 1, True), (ODD, (2, 2, 1), 1, 2, False)],
  ids=["tp2-dp2-zero3-sp", "pp2-tp2"],
)
def test_padded_heads_and_layers_give_the_gradients_and_updates_of_one_device(
  spec, mesh, zero, microbatches, sp
):
  layout = make_layout(spec, mesh, zero=zero, sp=sp)
  assert layout.base.heads.pads_weights
  state = make_state(layout, microbatches)
  frozen = host(state.store.frozen.weights)
  multiple = mesh[2] * microbatches
  loss, grads = mesh_parity.gradients(state, multiple=multiple)
  expected_loss, expected_grads, expected = on_one_device(spec)
  assert loss == pytest.approx(expected_loss, rel=1e-5)
  assert mesh_parity.worst(grads, expected_grads) < 1e-5
  got = mesh_parity.after_steps(state, STEPS, multiple=multiple)
  worst = jax.tree.map(lambda a, b: np.abs(a - b).max(), got, expected)
  # Adam moves a number with a gradient near 0 by up to the rate either way.
  assert max(jax.tree.leaves(worst)) < 0.05 * STEPS * mesh_parity.LR
  moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), got, host_adapters(spec))
  assert min(jax.tree.leaves(moved)) > 0.5 * mesh_parity.LR
  jax.tree.map(np.testing.assert_array_equal, host(state.store.frozen.weights), frozen)


@pytest.fixture(scope="module")
def even():
  """A state on four devices whose gradient program others share."""
  return make_state(make_layout(EVEN, (1, 2, 2), zero=3, dtype="float16"))


def test_only_adapters_have_gradients_moments_and_fp32_copies(even):
  shapes = jax.tree.leaves(adapters_lib.abstract_adapters(EVEN, LORA))
  count = sum(x.size for x in shapes)
  size = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
  moments = [optax.tree.get(even.store.opt_state, name) for name in ("mu", "nu")]
  grads, _ = even.gradient_shapes(
    training.place(mesh_parity.split(1), even._layout.train)
  )
  assert [size(x) for x in (*moments, even.store.params, grads)] == [count] * 4
  kernels = [
    x.value
    for x in jax.tree.leaves(even.weights, is_leaf=adapters_lib.is_adapted)
    if adapters_lib.is_adapted(x)
  ]
  assert len(kernels) == 7 and {x.dtype for x in kernels} == {jnp.dtype("float16")}
  # Spread over all four devices, wide dims first.
  for leaf in jax.tree.leaves(even.store.params):
    assert leaf.sharding.shard_shape(leaf.shape)[1] == leaf.shape[1] // 4


def test_weights_are_the_frozen_arrays_themselves(even):
  frozen = even.store.frozen.weights
  attached = even.weights
  assert attached["embed"]["kernel"] is frozen["embed"]["kernel"]
  q = attached["layers"]["attn"]["q"]["kernel"]
  assert q.value is frozen["layers"]["attn"]["q"]["kernel"]
  assert q.seed is None


def test_streamed_adapters_are_updated_as_resident_ones(even):
  where = stores.Offload(optimizer=True, params=True, weights=True, layers_per_chunk=2)
  streamed = make_state(even._layout, where=where, gradients=even.gradients)
  resident = make_state(even._layout, gradients=even.gradients)
  expected = mesh_parity.after_steps(resident, STEPS, multiple=2)
  got = mesh_parity.after_steps(streamed, STEPS, multiple=2)
  jax.tree.map(np.testing.assert_array_equal, got, expected)
  kinds = {x.sharding.memory_kind for x in jax.tree.leaves(streamed.store.params)}
  assert kinds == {"pinned_host"}
  weights = [host(state.weights) for state in (streamed, resident)]
  jax.tree.map(np.testing.assert_array_equal, *weights)


def test_the_switch_merges_and_generation_sees_the_weights_of_training(even):
  layout = even._layout
  merge = Merger(layout)
  plain = merge(even.weights)
  like = layout.abstract_frozen()
  assert jax.tree.structure(plain) == jax.tree.structure(like)
  for got, wanted in zip(jax.tree.leaves(plain), jax.tree.leaves(like), strict=True):
    assert got.sharding.is_equivalent_to(wanted.sharding, got.ndim)
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
  assert plain["embed"]["kernel"] is even.store.frozen.weights["embed"]["kernel"]
  decoder = decoder_of(layout)
  run = jax.jit(
    lambda weights, tokens: decoder.token_log_probs(
      weights, tokens, temperature=1.0, chunk=CHUNK
    )[0]
  )
  tokens = mesh_parity.batch()["tokens"]
  adapted, merged = run(even.weights, tokens), run(plain, tokens)
  np.testing.assert_array_equal(adapted, merged)
  base = run(even.store.frozen.weights, tokens)  # adapters off
  assert np.abs(np.asarray(base) - np.asarray(adapted)).max() > 0.1
  target = weights_lib.generation_layout(
    EVEN, mesh_lib.generation_mesh(layout.train.mesh, (1, 1))
  )
  engine = hybrid.HybridEngine(layout.base, target)
  copy, _ = engine.to_generation(plain)
  engine.verify()
  q = fused.separate(copy["layers"][1])["attn"]["q"]["kernel"]
  np.testing.assert_array_equal(q, plain["layers"]["attn"]["q"]["kernel"][1])
  assert merge(plain) is plain


def test_dropout_is_the_same_for_the_same_update_and_off_in_scoring():
  lora = dataclasses.replace(LORA, dropout=0.5)
  state = make_state(make_layout(EVEN, (1, 1, 1), lora=lora))
  columns = mesh_parity.split(2)
  losses = []
  for update in (0, 1, 0):
    state.updates = update
    seeds = state._seeds(columns)
    assert len(set(seeds[training.DROPOUT].tolist())) == 2  # one each micro-batch
    placed = training.place(columns, state._layout.train) | seeds
    losses.append(float(state.gradients(state.weights, placed)[1]["loss"]))
  assert losses[0] == losses[2] != losses[1]
  assert state.weights["layers"]["attn"]["q"]["kernel"].seed is None


def make_critic(layout, frozen):
  value = dataclasses.replace(layout.base, head=params_lib.VALUE)
  layout = dataclasses.replace(layout, base=value)
  rng = np.random.default_rng(7)
  draw = lambda x: (0.2 * rng.normal(size=x.shape)).astype(np.float32)
  like = layout.abstract_params()
  return Critic(
    decoder_of(layout), put(jax.tree.map(draw, like), like), layout,
    CriticSettings(**tiny.CRITIC), optax.sgd(0.1), optax.constant_schedule(0.1),
    frozen=frozen,
  )  # fmt: skip


def test_a_critic_on_the_actors_base_shares_its_arrays_and_learns_alone():
  layout = make_layout(tiny.SPEC, (1, 2, 2))
  shapes = layout.base.abstract_params()
  frozen = Frozen(
    jax.jit(
      layout.base.prepare, out_shardings=stores.shardings_of(layout.abstract_frozen())
    )(put(tiny.host_params(), shapes))
  )
  before = host(frozen.weights)
  critic = make_critic(layout, frozen.share())
  store = critic.state.store
  assert "lm_head" not in store.weights and "lm_head" in frozen.weights
  for mine, theirs in (
    (store.weights["layers"]["mlp"]["up"]["kernel"].value,
     frozen.weights["layers"]["mlp"]["up"]["kernel"]),
    (store.weights["embed"]["kernel"], frozen.weights["embed"]["kernel"]),
  ):  # fmt: skip
    assert mine is theirs
  assert not jax.tree.leaves(store.held_weights["frozen"])
  assert set(store.params) == {"layers", HEAD}
  params = host(store.params)
  batch = critic.compute_values(tiny.make_batch(returns=tiny.per_token(1)))
  metrics = critic.update(batch)
  assert metrics["critic/grad_norm"] > 0
  moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), host(store.params), params)
  assert min(jax.tree.leaves(moved)) > 0
  jax.tree.map(np.testing.assert_array_equal, host(frozen.weights), before)
  again = critic.compute_values(batch).values
  assert np.abs(again - batch.values).max() > 0


def test_a_base_on_the_host_comes_for_its_phase_and_leaves():
  weights = {"kernel": jnp.ones((4, 4))}
  base = Frozen(weights, on_host=True)
  kind = lambda tree: {x.sharding.memory_kind for x in jax.tree.leaves(tree)}
  assert kind(base.held) == {"pinned_host"}
  assert kind(base.weights) == kind(base.held) == {"device"}
  base.rest()
  assert kind(base.held) == {"pinned_host"}
  np.testing.assert_array_equal(base.weights["kernel"], weights["kernel"])
  assert base.share().weights["kernel"] is base.weights["kernel"]
