"""What only a GPU can show: cuDNN attention and the rollout/train gap in bf16."""

import dataclasses
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_hybrid.models import decoder
from jaxrl_hybrid.models import params as params_lib
from jaxrl_hybrid.models.spec import ExpertSpec, LatentSpec, ModelSpec
from jaxrl_hybrid.ops import attention, grouped, grouped_triton
from jaxrl_hybrid.parallel import hybrid
from jaxrl_hybrid.parallel import mesh as mesh_lib
from jaxrl_hybrid.parallel import weights as weights_lib
from jaxrl_hybrid.rollout.engine import Engine
from jaxrl_hybrid.rollout.sampling import Sampling
from jaxrl_hybrid.workers import stores

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
import mesh_parity  # noqa: E402

pytestmark = [
  pytest.mark.gpu,
  pytest.mark.skipif(
    jax.default_backend() != "gpu",
    reason="needs a GPU: JAXRL_TEST_GPU=1 pytest tests/gpu",
  ),
]

SPEC = ModelSpec("llama", 5003, 512, 1024, 8, 8, 2, 64, 1024, initializer_range=0.04)
LOCAL = dataclasses.replace(
  SPEC, window=24, local_layers=(True, False) * 4, norms="sandwich", qk_norm="head"
)
EXPERTS = dataclasses.replace(SPEC, experts=ExpertSpec(16, 2, 256, shared_size=256))
LATENT = dataclasses.replace(
  EXPERTS,
  num_kv_heads=8,
  head_dim=96,
  latent=LatentSpec(256, 128, 64, 32, 64),
  dense_layers=1,
)
MODELS = {"llama": SPEC, "local": LOCAL, "experts": EXPERTS, "latent": LATENT}


def qkv(dtype, length=96):
  keys = jax.random.split(jax.random.key(0), 3)
  return [
    jax.random.normal(k, (4, length, h, 64), dtype) for k, h in zip(keys, (8, 2, 2))
  ]


def test_cudnn_is_chosen_for_bf16_and_xla_for_fp32():
  assert attention.choose("auto", dtype=jnp.bfloat16, head_dim=64) == "cudnn"
  assert attention.choose("auto", dtype=jnp.float32, head_dim=64) == "xla"


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_cudnn_gradient_equals_the_fp32_reference(dtype, window):
  def loss(q, k, v, dtype, implementation):
    out = attention.causal(
      q,
      k,
      v,
      dtype=jnp.dtype(dtype),
      implementation=implementation,
      form=attention.Form(window=window),
    )
    return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape))

  grads = jax.jit(jax.grad(loss, (0, 1, 2)), static_argnums=(3, 4))
  operands = [x.astype(jnp.float32) for x in qkv(jnp.bfloat16)]
  with jax.default_matmul_precision("highest"):
    expected = grads(*operands, "float32", "xla")
  for a, b in zip(grads(*operands, dtype, "cudnn"), expected):
    assert jnp.linalg.norm(a - b) / jnp.linalg.norm(b) < 1e-2


def test_cudnn_decode_reads_live_slots_only():
  q, k, v = qkv(jnp.bfloat16)
  lengths = jnp.array([1, 5, 40, 96], jnp.int32)
  dead = jnp.arange(96)[None, :, None, None] >= lengths[:, None, None, None]
  poison = lambda x: jnp.where(dead, 1e4, x)
  out = attention.cached(
    q[:, :1], poison(k), poison(v), lengths, implementation="cudnn"
  )
  expected = attention.cached(q[:, :1], k, v, lengths, implementation="xla")
  np.testing.assert_allclose(
    out.astype(np.float32), expected.astype(np.float32), atol=2e-2
  )


@pytest.mark.parametrize(
  "model,dtype,limit",
  [
    ("llama", "float32", 1e-5),
    ("llama", "bfloat16", 5e-3),
    ("llama", "float16", 1e-3),
    ("local", "float16", 1e-3),
    ("experts", "float32", 1e-5),
    ("experts", "float16", 5e-3),  # a token between two experts may choose either
    ("latent", "float16", 5e-3),
  ],
)
def test_rollout_and_trainer_agree(model, dtype, limit):
  precision = "highest" if dtype == "float32" else "default"
  with jax.default_matmul_precision(precision):
    gap, ratio = gap_and_first_ratio(jnp.dtype(dtype), MODELS[model])
  print(
    f"{model} {dtype}: mean |logp_engine - logp_trainer| = {gap:.2e}, "
    f"|ratio - 1| = {ratio:.1e}"
  )
  assert gap < limit


def gap_and_first_ratio(dtype, spec):
  train = mesh_lib.train_mesh((1, 1, 1))
  source = weights_lib.WeightLayout(
    spec, weights_lib.train_layout(spec, train, sequence_parallel=False), dtype
  )
  layout = weights_lib.generation_layout(spec, mesh_lib.generation_mesh(train, (1, 1)))
  implementation = attention.choose("auto", dtype=dtype, head_dim=spec.head_dim)
  model = decoder.Decoder(spec, dtype, implementation, layout.constrain)
  params = jax.jit(
    lambda: source.prepare(
      params_lib.init_params(spec, jax.random.key(0), vocab=source.vocab)
    )
  )()
  switch = hybrid.HybridEngine(source, layout)
  weights, _ = switch.to_generation(params)
  switch.verify()
  engine = Engine(model, layout, eos_ids=[1], max_rows=64, seed=0)
  prompts = [np.arange(2, 12 + i, dtype=np.int32) for i in range(64)]
  out = engine.generate(
    weights, prompts, range(64), n=1, max_new=64, sampling=Sampling()
  )
  tokens = np.zeros((64, 160), np.int32)
  for i, prompt in enumerate(prompts):
    row = np.concatenate([prompt, out.ids[i, : out.lengths[i]]])
    tokens[i, : len(row)] = row
  trainer = dataclasses.replace(model, constrain=source.train.constrain, use=source.use)
  score = lambda p: trainer.token_log_probs(p, tokens, temperature=1.0, chunk=64)[0]
  forward = np.asarray(jax.jit(score)(params))
  in_update = jax.jit(
    lambda p: source.value_and_grad(
      lambda p: (score(p).mean(), score(p)), p, source.zeros(p)
    )[0][1]
  )(params)
  gaps, ratios = [], []
  for i, prompt in enumerate(prompts):
    span = slice(len(prompt), len(prompt) + out.lengths[i])
    gaps.append(np.abs(forward[i, span] - out.log_probs[i, : out.lengths[i]]))
    ratios.append(np.abs(np.exp(forward[i, span] - np.asarray(in_update)[i, span]) - 1))
  return np.concatenate(gaps).mean(), np.concatenate(ratios).max()


def test_parameters_and_moments_stream_from_pinned_host_memory():
  resident = mesh_parity.after_steps(
    mesh_parity.make_state(mesh_parity.EVEN, (1, 1, 1)), 3
  )
  state = mesh_parity.make_state(
    mesh_parity.EVEN,
    (1, 1, 1),
    where=stores.Offload(optimizer=True, params=True, weights=True),
  )
  streamed = mesh_parity.after_steps(state, 3)
  kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state.store.opt_state)}
  assert kinds == {"pinned_host"}
  apart = jax.tree.map(lambda a, b: np.abs(a - b).max(), streamed, resident)
  assert max(jax.tree.leaves(apart)) < 2e-5  # of 3 steps of 1e-3


@pytest.mark.parametrize("dtype,limit", [("float32", 1e-5), ("bfloat16", 1e-5)])
@pytest.mark.parametrize("rows,groups", [(1000, 8), (64, 32), (5000, 3)])
def test_triton_kernels_equal_the_loop_of_tiles(dtype, limit, rows, groups):
  keys = jax.random.split(jax.random.key(0), 4)
  of_i = jax.random.normal(keys[0], (rows, 200)).astype(dtype)
  of_d = jax.random.normal(keys[1], (rows, 136)).astype(dtype)
  matrices = jax.random.normal(keys[2], (groups, 200, 136)).astype(dtype)
  group = jax.random.randint(keys[3], (rows - rows // 7,), 0, groups)
  sizes = jnp.bincount(group, length=groups).at[0].set(0)
  with jax.default_matmul_precision("highest"):
    pairs = [
      (
        grouped_triton.times(of_d, matrices, sizes, contract=1),
        grouped._times(of_d, matrices, sizes, contract=1),
      ),
      (
        grouped_triton.times(of_i, matrices, sizes, contract=0),
        grouped._times(of_i, matrices, sizes, contract=0),
      ),
      (
        grouped_triton.outer_products(of_i, of_d, sizes),
        grouped._outer_products(of_i, of_d, sizes),
      ),
    ]
  for got, expected in pairs:
    assert jnp.abs(got - expected).max() <= limit * jnp.abs(expected).max()
