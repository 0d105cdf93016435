"""The engine against a token-by-token full forward, on one device and on meshes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_hybrid.models import decoder
from jaxrl_hybrid.models import params as params_lib
from jaxrl_hybrid.models.spec import ModelSpec
from jaxrl_hybrid.parallel import hybrid
from jaxrl_hybrid.parallel import mesh as mesh_lib
from jaxrl_hybrid.parallel import weights as weights_lib
from jaxrl_hybrid.rollout import sampling as sampling_lib
from jaxrl_hybrid.rollout.engine import Engine
from jaxrl_hybrid.rollout.sampling import Sampling

SPEC = ModelSpec(
  "qwen3",
  37,
  32,
  48,
  2,
  4,
  4,
  16,
  256,
  qk_norm="head",
  qkv_bias=True,
  initializer_range=0.3,
)
PROMPTS = [np.arange(1, 1 + n, dtype=np.int32) for n in (3, 7, 1, 12, 5)]
DRAWS = [11, 4, 7, 100, 3]


# 9 and 3 heads, 3 layers.
ODD = dataclasses.replace(SPEC, num_heads=9, num_kv_heads=3, num_layers=3)


def setup(
  mesh=(1, 1, 1), generation=(1, 1), eos=(2,), max_rows=64, seed=0, spec=SPEC, zero=1
):
  """(spec, stored parameters, engine, generation weights)."""
  train = weights_lib.train_layout(
    spec, mesh_lib.train_mesh(mesh), sequence_parallel=False
  )
  source = weights_lib.WeightLayout(spec, train, jnp.dtype(jnp.float32), zero)
  target = weights_lib.generation_layout(
    spec, mesh_lib.generation_mesh(train.mesh, generation)
  )
  init = jax.jit(
    lambda: params_lib.init_params(spec, jax.random.key(1), vocab=source.vocab),
    out_shardings=jax.tree.map(lambda x: x.sharding, source.abstract_params()),
  )
  params = init()
  heads = weights_lib.plan_heads(spec, target.mesh)
  model = decoder.Decoder(
    spec,
    jnp.float32,
    "xla",
    target.constrain,
    heads=heads,
    stages=target.mesh.shape["pp"],
  )
  switch = hybrid.HybridEngine(source, target)
  weights, _ = switch.to_generation(jax.jit(source.prepare)(params))
  engine = Engine(model, target, eos_ids=eos, max_rows=max_rows, seed=seed)
  return spec, params, engine, weights


def naive(model, params, prompt, draw, sample, sampling, eos, max_new, seed=0):
  """One row, the whole forward again for each token; the plain definition."""
  ids, log_probs = list(prompt), []
  logits_at = _logits_at(model)
  keys = sampling_lib.row_keys(
    jax.random.key(seed), jnp.array([draw], jnp.uint32), jnp.array([sample], jnp.uint32)
  )
  for step in range(max_new):
    row = np.zeros((1, 24), np.int32)  # right padding: causality hides it
    row[0, : len(ids)] = ids
    token, log_prob = _sample(
      logits_at(params, row, len(ids) - 1), keys, step, sampling
    )
    ids.append(int(token[0]))
    log_probs.append(float(log_prob[0]))
    if ids[-1] in eos:
      break
  return ids[len(prompt) :], log_probs


@functools.lru_cache
def _logits_at(model):
  return jax.jit(
    lambda params, row, t: model.logits(params, model.hidden(params, row)[:, t])
  )


@functools.partial(jax.jit, static_argnums=3)
def _sample(logits, keys, step, sampling):
  return sampling_lib.sample(logits, sampling_lib.uniforms(keys, step), sampling)


def assert_equal_to_naive(case, sampling, n, eos, max_rows=64):
  spec, params, engine, weights = case
  out = engine.generate(weights, PROMPTS, DRAWS, n=n, max_new=9, sampling=sampling)
  plain = decoder.Decoder(spec, jnp.float32, "xla", as_is)
  params = jax.device_get(params)
  reasons = set()
  for i, (prompt, draw) in enumerate(zip(PROMPTS, DRAWS)):
    for s in range(n):
      ids, log_probs = naive(plain, params, prompt, draw, s, sampling, eos, 9)
      row = i * n + s
      assert out.ids[row, : out.lengths[row]].tolist() == ids
      np.testing.assert_allclose(out.log_probs[row, : len(ids)], log_probs, atol=1e-5)
      assert out.stopped[row] == (ids[-1] in eos)
      reasons.add(bool(out.stopped[row]))
  return reasons


def as_is(x, axes):
  """No mesh, no constraint."""
  del axes
  return x


@pytest.mark.parametrize(
  "sampling",
  [
    Sampling(),
    Sampling(temperature=0.7, top_k=5),
    Sampling(top_p=0.8),
    Sampling(temperature=0.0),
  ],
)
def test_equals_token_by_token(sampling):
  eos = (2, 5, 9, 30, 31, 32)
  reasons = assert_equal_to_naive(setup(eos=eos), sampling, 3, eos)
  assert sampling.greedy or reasons == {True, False}


@pytest.mark.parametrize(
  "mesh,generation",
  [
    ((1, 2, 2), (1, 1)),
    ((1, 4, 2), (1, 2)),
    ((1, 2, 2), (1, 2)),
    ((1, 1, 4), (1, 1)),
    ((2, 2, 2), (1, 2)),
    ((2, 2, 2), (2, 1)),
  ],
)
def test_meshes_give_the_same_tokens(mesh, generation):
  eos = (2, 5, 9)
  assert_equal_to_naive(setup(mesh, generation, eos), Sampling(), 2, eos)


@pytest.mark.parametrize(
  "mesh,generation,zero",
  [((1, 4, 2), (1, 4), 1), ((2, 4, 2), (2, 2), 1), ((2, 2, 2), (1, 1), 3)],
)
def test_meshes_that_divide_neither_heads_nor_layers_do_too(mesh, generation, zero):
  eos = (2, 5, 9)
  case = setup(mesh, generation, eos, spec=ODD, zero=zero)
  assert_equal_to_naive(case, Sampling(), 2, eos)


def test_waves_and_batch_order_do_not_change_a_row():
  _, _, engine, weights = setup(max_rows=2)
  whole = setup()[2].generate(
    weights, PROMPTS, DRAWS, n=2, max_new=6, sampling=Sampling()
  )
  waves = engine.generate(weights, PROMPTS, DRAWS, n=2, max_new=6, sampling=Sampling())
  order = [4, 2, 0, 3, 1]
  moved = engine.generate(
    weights,
    [PROMPTS[i] for i in order],
    [DRAWS[i] for i in order],
    n=2,
    max_new=6,
    sampling=Sampling(),
  )
  np.testing.assert_array_equal(whole.ids, waves.ids)
  rows = np.concatenate([[2 * i, 2 * i + 1] for i in order])
  np.testing.assert_array_equal(whole.ids[rows], moved.ids)


def test_equal_prompts_of_different_draws_differ():
  _, _, engine, weights = setup()
  out = engine.generate(
    weights, [PROMPTS[1]] * 2, [1, 2], n=4, max_new=8, sampling=Sampling()
  )
  assert len({tuple(row) for row in out.ids.tolist()}) == 8


def test_any_eos_stops_and_counts_as_part_of_the_response():
  _, _, engine, weights = setup(eos=range(37))
  out = engine.generate(weights, PROMPTS, DRAWS, n=1, max_new=8, sampling=Sampling())
  assert out.ids.shape == (5, 1)
  assert out.lengths.tolist() == [1] * 5 and out.stopped.all()


def test_padded_vocabulary_is_never_sampled():
  _, _, engine, weights = setup()
  out = engine.generate(
    weights, PROMPTS, DRAWS, n=64, max_new=8, sampling=Sampling(temperature=50.0)
  )
  assert out.ids.max() == 36
