"""A model as this package builds it, beside transformers'."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_hybrid.models import decoder, families
from jaxrl_hybrid.models.hf import load
from jaxrl_hybrid.parallel import mesh as mesh_lib
from jaxrl_hybrid.parallel import weights as weights_lib
from jaxrl_hybrid.parallel.experts import sharded_mixture

VOCAB = 131


def build(directory, mesh=(1, 1, 1), *, length=None, microbatches=1):
  """(decoder, stored parameters, their layout) of an HF directory, fp32."""
  spec = families.spec_from_hf(families.load_hf_config(directory))
  spec = spec.for_length(length) if length else spec
  train = weights_lib.train_layout(
    spec, mesh_lib.train_mesh(mesh), sequence_parallel=False
  )
  layout = weights_lib.WeightLayout(spec, train, jnp.dtype(jnp.float32))
  model = decoder.Decoder(
    spec,
    jnp.float32,
    "xla",
    train.constrain,
    heads=layout.heads,
    use=layout.use,
    stages=layout.stages,
    microbatches=microbatches,
    mixture=sharded_mixture(train, spec),
  )
  shardings = jax.tree.map(lambda x: x.sharding, layout.abstract_params())
  params = load.load_params(directory, spec, shardings, vocab=layout.vocab)
  return model, params, layout


def logits_of(model, params, layout, tokens):
  """fp32 logits of the un-padded vocabulary."""

  def run(params, tokens):
    weights = layout.prepare(params)
    hidden = model.hidden(weights, tokens)
    flat = model.logits(weights, hidden.reshape(-1, hidden.shape[-1]))
    return flat.reshape(*tokens.shape, -1)[..., : model.spec.vocab_size]

  return np.asarray(jax.jit(run)(params, tokens))


def assert_logits_equal(theirs, built, tokens):
  expected = hf_logits(theirs, tokens)
  got = logits_of(*built, tokens)
  assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max()


def random_tokens(*shape, seed=0):
  return np.random.default_rng(seed).integers(0, VOCAB, shape).astype(np.int32)


def hf_logits(model, tokens):
  import torch

  with torch.no_grad():
    return model(torch.tensor(np.asarray(tokens, np.int64))).logits.numpy()
