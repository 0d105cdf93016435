"""Schedules and AdamW by hand."""

import build_tiny as tiny
import jax
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

from jaxrl_hybrid.models import params as params_lib
from jaxrl_hybrid.workers.optimizer import learning_rate


def rates(counts, total, **changes):
  schedule = learning_rate(ConfigDict(tiny.OPTIM | dict(lr=2.0) | changes), total)
  return [float(schedule(count)) for count in counts]


@pytest.mark.parametrize(
  "changes,counts,expected",
  [
    (dict(), (0, 5, 99), (2, 2, 2)),
    (dict(warmup_steps=4), (0, 1, 2, 3, 4, 11), (0.5, 1, 1.5, 2, 2, 2)),
    (dict(schedule="linear"), (0, 3, 6, 12, 20), (2, 1.5, 1, 0, 0)),
    (
      dict(schedule="linear", warmup_steps=4, min_lr_ratio=0.1),
      (0, 2, 4, 8, 12),
      (0.5, 1.5, 2, 1.1, 0.2),
    ),
    (dict(schedule="cosine"), (0, 4, 6, 8, 12), (2, 1.5, 1, 0.5, 0)),
    (
      dict(schedule="cosine", warmup_steps=4, min_lr_ratio=0.1),
      (0, 3, 4, 8, 12, 50),
      (0.5, 2, 2, 1.1, 0.2, 0.2),
    ),
  ],
)
def test_schedules_by_hand(changes, counts, expected):
  np.testing.assert_allclose(rates(counts, 12, **changes), expected, atol=1e-6)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_run_shorter_than_its_warm_up_has_finite_rates(schedule):
  got = rates(range(4), 2, schedule=schedule, warmup_steps=10)
  np.testing.assert_allclose(got, [0.2, 0.4, 0.6, 0.8], atol=1e-6)


def apply(optimizer, params, *grads):
  """(parameters, state) after one update per gradient."""

  @jax.jit
  def step(params, state, grad):
    updates, state = optimizer.update(grad, state, params)
    return optax.apply_updates(params, updates), state

  state = jax.jit(optimizer.init)(params)
  for grad in grads:
    params, state = step(params, state, grad)
  return params, state


def test_adamw_by_numpy():
  rng = np.random.default_rng(0)
  weights, *grads = rng.normal(size=(4, 5)).astype(np.float32)
  got, _ = apply(
    tiny.adamw(lr=0.1, weight_decay=0.2, betas=(0.8, 0.95), eps=1e-3),
    {"a": {"kernel": weights}},
    *({"a": {"kernel": g}} for g in grads),
  )
  mu = nu = 0.0
  for t, g in enumerate(grads, 1):
    mu, nu = 0.8 * mu + 0.2 * g, 0.95 * nu + 0.05 * g**2
    step = (mu / (1 - 0.8**t)) / (np.sqrt(nu / (1 - 0.95**t)) + 1e-3)
    weights = weights - 0.1 * (step + 0.2 * weights)
  np.testing.assert_allclose(got["a"]["kernel"], weights, rtol=1e-5)


@pytest.mark.parametrize("head", [params_lib.LM, params_lib.VALUE])
def test_kernels_decay_and_norms_and_biases_do_not(head):
  params = tiny.host_params(head=head)
  zeros = jax.tree.map(np.zeros_like, params)
  got, _ = apply(tiny.adamw(lr=0.1, weight_decay=0.5), params, zeros)
  seen = set()
  for (path, before), after in zip(
    jax.tree.leaves_with_path(params), jax.tree.leaves(got), strict=True
  ):
    kind = path[-1].key
    seen.add(kind)
    factor = 0.95 if kind == "kernel" else 1.0
    np.testing.assert_allclose(after, factor * before, rtol=1e-6, err_msg=str(path))
  assert seen == {"kernel", "scale", "bias"}
