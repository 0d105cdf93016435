"""Values before each token, and their update."""

import build_tiny as tiny
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_hybrid.models import params as params_lib


@pytest.fixture(scope="module")
def valued():
  """A batch with the critic's values, and returns a little away from them."""
  batch = tiny.make_critic().compute_values(tiny.make_batch())
  return batch.with_fields(returns=batch.values + tiny.per_token(5))


def update(batch, **options):
  """(metrics, change of the parameters) from the initial parameters."""
  critic = tiny.make_critic(**options)
  before = jax.device_get(critic.state.store.params)
  metrics = critic.update(batch)
  return metrics, jax.tree.map(
    lambda a, b: b - a, before, jax.device_get(critic.state.store.params)
  )


def test_values_equal_the_head_on_each_row_alone(valued):
  @jax.jit
  def by_row(params):
    head = params["value_head"]["kernel"][0]
    return [hidden @ head for hidden, _ in tiny.each_row_alone(params, valued)]

  assert valued.values.dtype == np.float32
  rows = by_row(tiny.host_params(head=params_lib.VALUE))
  for got, row in zip(valued.values, rows, strict=True):
    np.testing.assert_allclose(got[: len(row)], row, atol=1e-5)
    assert not got[len(row) :].any()


@pytest.mark.parametrize("t", [0, 1, 3])
def test_the_value_at_t_comes_before_token_t(valued, t):
  changed = valued.response_ids.copy()
  changed[:, t:] = (changed[:, t:] + 13) % 37
  poisoned = tiny.make_critic().compute_values(valued.with_fields(response_ids=changed))
  np.testing.assert_array_equal(poisoned.values[:, : t + 1], valued.values[:, : t + 1])
  later = valued.mask[:, t + 1 :]
  assert (np.abs(poisoned.values - valued.values)[:, t + 1 :][later] > 1e-4).all()


def test_the_loss_and_its_metrics_by_numpy(valued):
  moved = valued.with_fields(values=valued.values + tiny.per_token(6))
  metrics, _ = update(moved)
  on = lambda x: x[valued.mask].astype(np.float64)
  new, old, returns = on(valued.values), on(moved.values), on(moved.returns)
  near = old + np.clip(new - old, -0.5, 0.5)
  plain, cut = (new - returns) ** 2, (near - returns) ** 2
  assert 0 < (cut > plain).mean() < 1
  for name, value in {
    "vf_loss": 0.5 * np.maximum(plain, cut).mean(),
    "loss": 0.5 * np.maximum(plain, cut).mean(),
    "vf_clipfrac": (cut > plain).mean(),
    "vpred_mean": new.mean(),
    "lr": 0.01,
  }.items():
    assert metrics[f"critic/{name}"] == pytest.approx(value, rel=1e-4), name


@pytest.mark.parametrize(
  "options",
  [
    dict(micro_rows=1),
    dict(mesh=(1, 2, 2)),
    dict(mesh=(2, 4, 2)),
    dict(share_rows=True),
    dict(share_rows=True, mesh=(2, 2, 1)),
  ],
  ids=str,
)
def test_the_split_of_the_work_does_not_change_the_update(valued, options):
  (metrics, change), (expected, whole) = update(valued, **options), update(valued)
  assert metrics["critic/loss"] == pytest.approx(expected["critic/loss"], rel=2e-6)
  worst = tiny.largest(jax.tree.map(lambda a, b: a - b, change, whole))
  assert worst <= 2e-7 and tiny.largest(whole) > 1e-3  # one rounding of a number < 2


def test_updates_lower_the_value_loss(valued):
  critic = tiny.make_critic()
  losses = [critic.update(valued)["critic/vf_loss"] for _ in range(8)]
  assert losses[-1] == min(losses) and losses[-1] < 0.5 * losses[0]
  assert critic.state.updates == 8


def test_an_all_masked_batch_changes_nothing(valued):
  metrics, change = update(valued.with_fields(loss_mask=np.zeros((4, 6), bool)))
  assert metrics["critic/loss"] == 0 and tiny.largest(change) == 0
  assert np.isfinite(list(metrics.values())).all()


def test_a_fresh_value_head_says_zero_and_can_learn(valued):
  critic = tiny.make_critic()
  fresh = {"value_head": params_lib.init_value_head(tiny.SPEC)}
  critic.state.store.params = critic.state.store.params | fresh
  batch = critic.compute_values(valued)
  assert not batch.values.any()
  critic.update(batch.with_fields(returns=np.ones_like(batch.values)))
  assert np.abs(np.asarray(critic.state.store.params["value_head"]["kernel"])).max() > 0
  after = critic.compute_values(valued).values[valued.mask]
  assert jnp.mean((after - 1) ** 2) < 1


def test_normalised_values_are_told_in_the_units_of_the_returns(valued):
  critic = tiny.make_critic(normalize_values=True)
  head = critic.compute_values(valued).values
  np.testing.assert_array_equal(head, valued.values)  # no return was seen yet
  batch = valued.with_fields(values=head, returns=100 + 20 * valued.returns)
  metrics = critic.update(batch)
  returns = batch.returns[batch.mask].astype(np.float64)
  assert critic.moments.count == returns.size
  assert critic.moments.mean == pytest.approx(returns.mean(), rel=1e-5)
  # The head learns returns at mean 0 and std 1; old values are in those units too.
  norm = lambda x: (x - returns.mean()) / returns.std(ddof=1)
  new, old, target = head[batch.mask], norm(batch.values[batch.mask]), norm(returns)
  near = old + np.clip(new - old, -0.5, 0.5)
  loss = 0.5 * np.maximum((new - target) ** 2, (near - target) ** 2)
  assert metrics["critic/vf_loss"] == pytest.approx(loss.mean(), rel=1e-4)
  values = critic.compute_values(valued).values[batch.mask]
  assert abs(values.mean() - returns.mean()) < returns.std()
