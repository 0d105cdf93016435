"""An HF directory as this package computes with it, on one device."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_hybrid.models import families
from jaxrl_hybrid.models import params as params_lib
from jaxrl_hybrid.models.decoder import Decoder
from jaxrl_hybrid.models.hf.load import load_params
from jaxrl_hybrid.models.params import Params
from jaxrl_hybrid.models.spec import ModelSpec
from jaxrl_hybrid.ops import attention
from jaxrl_hybrid.parallel import mesh as mesh_lib
from jaxrl_hybrid.parallel import weights as weights_lib
from jaxrl_hybrid.parallel.experts import sharded_mixture
from jaxrl_hybrid.parallel.hybrid import HybridEngine
from jaxrl_hybrid.parallel.rules import Layout
from jaxrl_hybrid.parallel.weights import WeightLayout

LOGPROB_CHUNK = 128  # tokens


@dataclasses.dataclass(frozen=True)
class LocalModel:
  """Decoder, weights as training computes with them, and their layout."""

  decoder: Decoder
  weights: Params
  layout: WeightLayout

  def logits(self, tokens_BT: np.ndarray) -> np.ndarray:
    """fp32 logits ``[B, T, V]`` of the model's own vocabulary."""

    def run(weights: Params, tokens_BT: jax.Array) -> jax.Array:
      hidden_BTD = self.decoder.hidden(weights, tokens_BT)
      flat = self.decoder.logits(weights, hidden_BTD.reshape(-1, hidden_BTD.shape[-1]))
      return flat.reshape(*tokens_BT.shape, -1)

    logits_BTV = np.asarray(jax.jit(run)(self.weights, tokens_BT))
    return logits_BTV[..., : self.decoder.spec.vocab_size]

  def log_probs(self, tokens_BT: np.ndarray) -> np.ndarray:
    """fp32 ``[B, T]``: log-prob of each token given those before; index 0 is 0."""
    run = lambda weights, tokens_BT: self.decoder.token_log_probs(
      weights, tokens_BT, temperature=1.0, chunk=LOGPROB_CHUNK
    )[0]
    return np.asarray(jax.jit(run)(self.weights, tokens_BT))

  def scores(self, tokens_BT: np.ndarray) -> np.ndarray:
    """fp32 ``[B, T]`` of a model with a score head: at t that of the row up to t."""
    return np.asarray(jax.jit(self.decoder.scores)(self.weights, tokens_BT))

  def greedy(self, prompt_P: np.ndarray, count: int) -> np.ndarray:
    """int32 ``[count]``: the continuation by prefill and cached decode steps."""
    spec = self.decoder.spec.for_length(len(prompt_P) + count)
    mesh = mesh_lib.generation_mesh(self.layout.train.mesh, (1, 1))
    target = weights_lib.generation_layout(spec, mesh)
    decoder = dataclasses.replace(
      _decoder(spec, target, self.decoder.dtype),
      heads=weights_lib.plan_heads(spec, mesh),
    )
    switch = HybridEngine(self.layout, target)
    weights, _ = switch.to_generation(self.weights)
    switch.verify()
    hidden_BPD, caches = jax.jit(decoder.prefill)(weights, prompt_P[None])
    room = lambda x: jnp.pad(x, [(0, count * (i == x.ndim - 3)) for i in range(x.ndim)])
    caches, last_BD = jax.tree.map(room, caches), hidden_BPD[:, -1]
    step, logits = jax.jit(decoder.decode), jax.jit(decoder.logits)
    found: list[int] = []
    for position in range(len(prompt_P), len(prompt_P) + count):
      found.append(int(jnp.argmax(logits(weights, last_BD)[0])))
      token_B, position_B = np.int32([found[-1]]), np.int32([position])
      last_BD, caches = step(weights, token_B, position_B, caches)
    return np.array(found, np.int32)


def open_model(
  path: str | Path, *, dtype: jnp.dtype, head: str = params_lib.LM
) -> LocalModel:
  """Loads a directory onto the first device.

  Args:
    path: HF directory.
    dtype: what the parameters are stored as and products are computed in.
    head: ``LM``, or ``VALUE`` for a sequence classifier's.

  Raises:
    ModelError: the model is not supported or does not match its config.
  """
  spec = families.spec_from_hf(families.load_hf_config(path))
  mesh = mesh_lib.train_mesh((1, 1, 1), jax.devices()[:1])
  train = weights_lib.train_layout(spec, mesh, sequence_parallel=False)
  layout = WeightLayout(spec, train, dtype, head=head)
  decoder = dataclasses.replace(
    _decoder(spec, train, dtype),
    heads=layout.heads,
    use=layout.use,
    stages=layout.stages,
  )
  shardings = jax.tree.map(lambda x: x.sharding, layout.abstract_params())
  params = load_params(
    path,
    spec,
    shardings,
    vocab=layout.vocab,
    head=head,
    fresh_head=False,
    dtype=dtype,
  )
  prepare = jax.jit(layout.prepare, donate_argnums=0)
  return LocalModel(decoder, prepare(params), layout)


def _decoder(spec: ModelSpec, layout: Layout, dtype: jnp.dtype) -> Decoder:
  implementation = attention.choose(
    "auto",
    dtype=dtype,
    head_dim=spec.head_dim,
    softcap=spec.attention_softcap is not None,
    platform=layout.mesh.devices.flat[0].platform,
  )
  return Decoder(
    spec,
    dtype,
    implementation,
    layout.constrain,
    mixture=sharded_mixture(layout, spec),
  )
