"""Gradients and log-probs of every family on a mesh, against torch autograd."""

import jax
import numpy as np
import pytest
from harness import VOCAB, build, random_tokens
from oracle import FAMILIES, torch_model

from jaxrl_hybrid.models.hf import load, names
from jaxrl_hybrid.parallel import multihost

LENGTHS = (40, 31, 17, 40)  # rows are padded to 40; windows are 24
TEMPERATURE = 0.7
# One of each kind of layer on (pp, tp, dp); the others' take a minute, with -m slow.
QUICK = {
  "gemma2": (1, 2, 2),
  "gemma3": (2, 2, 1),
  "olmo2": (1, 8, 1),
  "phi3_longrope": (1, 2, 2),
  "qwen3_moe": (2, 2, 2),
  "deepseek_v2": (1, 2, 2),
  "deepseek_v3": (2, 2, 1),
}
CASES = [pytest.param(name, mesh, id=name) for name, mesh in QUICK.items()] + [
  pytest.param(name, mesh, id=f"{name}-{mesh}", marks=pytest.mark.slow)
  for name in sorted(FAMILIES)
  for mesh in ((1, 2, 2), (2, 2, 1))
  if QUICK.get(name) != mesh
]


def batch():
  tokens = random_tokens(len(LENGTHS), max(LENGTHS))
  tokens = np.maximum(tokens, 2)  # torch gives pad tokens (0 or 1) no gradient
  real = np.arange(tokens.shape[1]) < np.array(LENGTHS)[:, None]
  weights = np.random.default_rng(1).normal(size=tokens.shape) * real
  weights[:, 0] = 0  # nothing predicts the first token
  return np.where(real, tokens, 0), real, weights.astype(np.float32)


def torch_side(model, directory, tokens, real, weights):
  """(log-probs, gradients by HF name) of sum(weights * log-probs)."""
  import torch

  ids = torch.tensor(tokens, dtype=torch.long)
  logits = model(ids, attention_mask=torch.tensor(real)).logits / TEMPERATURE
  log_probs = torch.log_softmax(logits[:, :-1], -1)
  log_probs = log_probs.gather(-1, ids[:, 1:, None])[..., 0]
  (log_probs * torch.tensor(weights[:, 1:])).sum().backward()
  with torch.no_grad():
    for parameter in model.parameters():
      grad = parameter.grad
      parameter.copy_(torch.zeros_like(parameter) if grad is None else grad)
  model.save_pretrained(directory)  # under the names of a checkpoint
  return log_probs.detach().numpy()


def our_side(built, tokens, weights):
  model, params, layout = built

  def loss(params, tokens, weights):
    log_probs, _ = model.token_log_probs(
      params, tokens, temperature=TEMPERATURE, chunk=16
    )
    return (log_probs * weights).sum(), log_probs

  def run(params, tokens, weights):
    prepared = layout.prepare(params)
    (_, log_probs), grads = layout.value_and_grad(
      lambda p: loss(p, tokens, weights), prepared, layout.zeros(prepared)
    )
    return log_probs, layout.strip(grads)

  return jax.jit(run)(params, tokens, weights)


@pytest.mark.parametrize("name,mesh", CASES)
def test_gradients_equal_torch(name, mesh, tmp_path):
  theirs = torch_model(name, tmp_path / "model")
  built = build(tmp_path / "model", mesh, microbatches=2 if mesh[0] > 1 else 1)
  tokens, real, weights = batch()
  expected = torch_side(theirs, tmp_path / "grads", tokens, real, weights)
  got, grads = our_side(built, tokens, weights)
  gap = np.abs(np.asarray(got)[:, 1:] - expected)[real[:, 1:]]
  assert gap.max() <= 1e-4 * np.abs(expected).max()
  with load.Checkpoint(tmp_path / "grads") as checkpoint:
    for leaf in names.leaves(built[0].spec, grads):
      assert_leaf_equal(checkpoint, leaf, names.get(grads, leaf.path))


def assert_leaf_equal(checkpoint, leaf, array):
  for i, tensor_name in enumerate(leaf.names):
    place = np.unravel_index(i, array.shape[: leaf.lead]) if leaf.lead else ()
    got = multihost.gather(array, tuple(map(int, place)))
    got = got[:VOCAB] if leaf.is_vocab else got
    expected = np.asarray(checkpoint.read(tensor_name))[leaf.rows]
    expected = expected.T if leaf.transposed else expected
    scale = max(np.abs(expected).max(), 1e-6)
    assert np.abs(got - expected).max() <= 1e-4 * scale, tensor_name
