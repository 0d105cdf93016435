"""One small model, one batch, any mesh: its loss, gradients and updates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_hybrid.algorithms import reduce
from jaxrl_hybrid.models import params as params_lib
from jaxrl_hybrid.models.decoder import Decoder
from jaxrl_hybrid.models.spec import ModelSpec
from jaxrl_hybrid.parallel import mesh as mesh_lib
from jaxrl_hybrid.parallel import weights as weights_lib
from jaxrl_hybrid.workers import stores, training

# 9 and 3 heads as in SmolLM2, 5 layers: neither tp nor pp divides anything.
ODD = ModelSpec(
  "qwen3", 37, 24, 48, 5, 9, 3, 8, 64, qk_norm="head", qkv_bias=True, out_bias=True,
  mlp_bias=True,
)  # fmt: skip
EVEN = ModelSpec("llama", 61, 32, 64, 4, 8, 4, 8, 64, tie_word_embeddings=True)
GROUPED = ModelSpec("qwen2", 61, 32, 64, 4, 14, 2, 8, 64, qkv_bias=True)
RESIDENT = stores.Offload()
SPECS = {"odd": ODD, "even": EVEN, "grouped": GROUPED}
ROWS, LENGTH, LR = 16, 12, 1e-3


@functools.cache
def batch() -> dict[str, np.ndarray]:
  """Rows of different lengths, ``[ROWS, LENGTH]``."""
  rng = np.random.default_rng(0)
  lengths = rng.integers(3, LENGTH + 1, ROWS)
  return {
    "tokens": rng.integers(0, 37, (ROWS, LENGTH)).astype(np.int32),
    "mask": (np.arange(LENGTH) < lengths[:, None]) & (np.arange(LENGTH) > 0),
    "advantages": rng.normal(size=(ROWS, LENGTH)).astype(np.float32),
  }


@functools.cache
def host_params(spec: ModelSpec, vocab: int = 64) -> dict:
  """fp32 parameters, every leaf random; rows from 64 on are zeros."""
  shapes = params_lib.abstract_params(spec, vocab=64)
  rng = np.random.default_rng(1)
  draw = lambda x: rng.normal(scale=0.2, size=x.shape).astype(np.float32)
  params = jax.tree.map(draw, shapes)
  for name in {"embed", "lm_head"} & set(params):
    rows = np.zeros((vocab, spec.hidden_size), np.float32)
    rows[:64] = params[name]["kernel"]
    params[name] = {"kernel": rows}
  return params


def make_state(
  spec: ModelSpec,
  train: tuple[int, int, int],
  *,
  dtype: str = "float32",
  zero: int = 1,
  sequence_parallel: bool = False,
  microbatches: int = 1,
  remat: str = "full",
  chunk: int = 4,
  where: stores.Offload = RESIDENT,
) -> training.TrainState:
  """A state at ``host_params`` whose loss is a policy gradient with an entropy."""
  layout = weights_lib.WeightLayout(
    spec,
    weights_lib.train_layout(
      spec, mesh_lib.train_mesh(train), sequence_parallel=sequence_parallel
    ),
    jnp.dtype(dtype),
    zero,
  )
  decoder = Decoder(
    spec,
    layout.dtype,
    "xla",
    layout.train.constrain,
    remat,
    heads=layout.heads,
    use=layout.use,
    stages=layout.stages,
    microbatches=microbatches,
    batch_shards=layout.train.batch_shards,
  )

  def loss_fn(params, micro, total):
    log_probs, entropy = decoder.token_log_probs(
      params, micro["tokens"], temperature=0.7, chunk=chunk
    )
    loss_BT = -micro["advantages"] * log_probs - 0.1 * entropy
    loss = reduce.aggregate(loss_BT, micro["mask"], total, mode="token-mean", scale=1.0)
    return loss, ({}, {})

  stored = jax.tree.map(
    lambda x, like: jax.device_put(x, like.sharding, may_alias=False),
    host_params(spec, layout.vocab),
    layout.abstract_params(),
  )
  return training.TrainState(stored, optax.adamw(LR), layout, loss_fn, where=where)


def gradients(state: training.TrainState, *, accumulate: int = 1, multiple: int = 1):
  """(loss, host gradients of the stored parameters); see ``split``."""
  placed = _placed(state, accumulate, multiple)
  grads, metrics = state.gradients(state.weights, placed)
  return float(metrics["loss"]), in_vocabulary(jax.device_get(grads))


def after_steps(
  state: training.TrainState, steps: int, *, accumulate: int = 1, multiple: int = 1
):
  """Host parameters after some updates."""
  for _ in range(steps):
    state.step(split(accumulate, multiple))
  return in_vocabulary(jax.device_get(state.store.whole_params()))


def compiled_gradients(
  state: training.TrainState, *, accumulate: int = 1, multiple: int = 1
) -> jax.stages.Compiled:
  """The gradient program."""
  placed = _placed(state, accumulate, multiple)
  return state.gradients.lower(state.weights, placed).compile()


def in_vocabulary(tree: dict) -> dict:
  """Without the rows of the vocabulary that only some meshes have."""
  for name in {"embed", "lm_head"} & set(tree):
    assert not tree[name]["kernel"][64:].any()
    tree = {**tree, name: {"kernel": tree[name]["kernel"][:64]}}
  return tree


def worst(got: dict, expected: dict) -> float:
  """Largest error of a leaf, relative to the leaf's largest entry."""
  ratio = lambda a, b: float(np.abs(a - b).max() / np.abs(b).max())
  return max(jax.tree.leaves(jax.tree.map(ratio, got, expected)))


def split(accumulate: int, multiple: int = 1) -> dict[str, np.ndarray]:
  """``[accumulate, B, LENGTH]``, B filled up to a multiple with rows without tokens.

  ``multiple`` is dp times the pipeline's microbatches.
  """
  columns = {}
  for name, x in batch().items():
    parts = x.reshape(accumulate, -1, LENGTH)
    columns[name] = np.pad(parts, ((0, 0), (0, -parts.shape[1] % multiple), (0, 0)))
  return columns


def _placed(state, accumulate, multiple=1):
  return training.place(split(accumulate, multiple), state._layout.train)
