"""The policy update against formulas written out here, and against itself."""

import dataclasses

import build_tiny as tiny
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_hybrid.algorithms.correction import Correction
from jaxrl_hybrid.algorithms.presets import Algorithm
from jaxrl_hybrid.models.hf import export, load
from jaxrl_hybrid.models.spec import ExpertSpec
from jaxrl_hybrid.workers.actor import GAP_MAX, GAP_MEAN
from jaxrl_hybrid.workers.reference import Reference

LOG_PROBS = tiny.per_token(1, scale=0.1)  # offsets, for old and reference
KL = dict(use_kl_loss=True, kl_loss_coef=0.01)
CLIPPED = dict(clip_ratio_low=0.02, clip_ratio_high=0.03, clip_ratio_c=1.05)


@pytest.fixture(scope="module")
def scored():
  """A batch with the actor's own log-probs as the old ones, and a reference."""
  batch = tiny.make_actor().compute_log_probs(tiny.make_batch())
  return batch.with_fields(ref_log_probs=batch.old_log_probs - 3 * LOG_PROBS)


@pytest.fixture(scope="module")
def off_policy(scored):
  """The same with old log-probs a little away."""
  return scored.with_fields(old_log_probs=scored.old_log_probs + LOG_PROBS)


@pytest.fixture(scope="module")
def result(off_policy):
  """The update that the split ones must equal."""
  return tiny.update(off_policy)


def on(batch, array):
  """The numbers of ``[N, R]`` that are in the loss, in float64."""
  return np.asarray(array, np.float64)[batch.mask]


@pytest.fixture(scope="module")
def by_formula(off_policy):
  """Loss, gradient, log-probs and entropies, row by row on the dense vocabulary."""
  advantages, old = off_policy.advantages, off_policy.old_log_probs

  def loss(params):
    total, rows, entropies = 0.0, [], []
    for i, (hidden, ids) in enumerate(tiny.each_row_alone(params, off_policy)):
      logits = hidden @ params["lm_head"]["kernel"][: tiny.SPEC.vocab_size].T
      log_probs = jax.nn.log_softmax(logits / 0.7)
      rows.append(log_probs[jnp.arange(len(ids)), ids])
      entropies.append(-(jnp.exp(log_probs) * log_probs).sum(-1))
      ratio = jnp.exp(rows[-1] - old[i, : len(ids)])
      a = advantages[i, : len(ids)]
      total -= jnp.minimum(a * ratio, a * jnp.clip(ratio, 0.8, 1.2)).sum()
    return total / off_policy.mask.sum(), (rows, jnp.concatenate(entropies))

  (value, (rows, entropies)), grad = jax.jit(jax.value_and_grad(loss, has_aux=True))(
    tiny.host_params()
  )
  return value, jax.device_get(grad), rows, entropies


def test_log_probs_equal_a_dense_softmax_of_each_row_alone(scored, by_formula):
  assert scored.old_log_probs.dtype == np.float32
  for got, row in zip(scored.old_log_probs, by_formula[2], strict=True):
    np.testing.assert_allclose(got[: len(row)], row, atol=1e-5)
    assert not got[len(row) :].any()


def test_the_update_is_that_of_the_formula_row_by_row(by_formula, result):
  (value, grad, _, entropies), (metrics, got) = by_formula, result
  assert metrics["actor/loss"] == pytest.approx(float(value), abs=2e-6)
  worst = tiny.largest(jax.tree.map(lambda a, b: a - b, got, grad))
  assert worst < 1e-5 * tiny.largest(grad)
  assert metrics["actor/grad_norm"] == pytest.approx(
    float(optax.tree.norm(grad)), rel=1e-5
  )
  assert metrics["actor/entropy"] == pytest.approx(float(entropies.mean()), rel=1e-5)


def test_padded_vocabulary_rows_do_not_learn(result):
  for leaf in ("lm_head", "embed"):
    assert not result[1][leaf]["kernel"][tiny.SPEC.vocab_size :].any()


@pytest.mark.parametrize(
  "options",
  [
    dict(micro_rows=1),
    dict(micro_rows=4),
    dict(micro_rows=3),
    dict(mesh=(1, 1, 2)),
    dict(mesh=(1, 1, 4), micro_rows=4),
    dict(remat="full"),
    dict(remat="products"),
    dict(share_rows=True),
    dict(share_rows=True, micro_rows=1),
    dict(share_rows=True, micro_rows=4, mesh=(1, 1, 2)),
  ],
  ids=str,
)
def test_the_split_of_the_work_does_not_change_the_update(off_policy, result, options):
  tiny.assert_same_update(tiny.update(off_policy, **options), result)


def test_tensor_parallelism_does_not_change_the_update(off_policy, result):
  # The sums over heads and MLP columns are rounded in another order.
  tiny.assert_same_update(tiny.update(off_policy, mesh=(1, 2, 1)), result, rel=5e-6)


def test_losses_of_whole_sequences_have_rows_of_their_own(off_policy):
  """GSPO's ratio is of a sequence; what shares a row must not change it."""
  apart = tiny.update(off_policy, policy_loss="gspo")
  tiny.assert_same_update(
    tiny.update(off_policy, policy_loss="gspo", share_rows=True), apart
  )


@pytest.mark.parametrize("share_rows", [False, True])
def test_a_mean_of_sequence_means_is_one_over_micro_batches(scored, share_rows):
  options = dict(loss_agg_mode="seq-mean-token-mean", micro_rows=1)
  metrics, _ = tiny.update(scored, share_rows=share_rows, **options)
  rows = [a[: len(r)].mean() for a, r in zip(scored.advantages, tiny.RESPONSES)]
  assert metrics["actor/loss"] == pytest.approx(-np.mean(rows), abs=2e-6)


def test_the_constant_length_is_the_divisor_of_the_normed_sum(scored):
  metrics, _ = tiny.update(
    scored, loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=7.0
  )
  expected = -on(scored, scored.advantages).sum() / 4 / 7
  assert metrics["actor/loss"] == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize(
  "options",
  [dict(micro_rows=1), dict(micro_rows=2), dict(micro_rows=4), dict(mesh=(1, 1, 2))],
  ids=str,
)
def test_lengths_one_and_three_with_opposite_advantages_lose_a_half(scored, options):
  # Rows 0 and 2 have 3 tokens and 1; the others are masked.
  batch = scored.with_fields(
    advantages=tiny.constant([-1, 7, 1, 7]),
    loss_mask=np.array([[True], [False], [True], [False]]).repeat(6, 1),
  )
  metrics, grad = tiny.update(batch, **options)
  assert metrics["actor/loss"] == pytest.approx(0.5, abs=1e-6)
  tiny.assert_same_update((metrics, grad), tiny.update(batch))
  assert tiny.largest(grad) > 0.1


def test_the_first_ratio_is_one(scored):
  metrics, _ = tiny.update(scored, **CLIPPED)
  assert abs(metrics["actor/ppo_kl"]) <= 1e-6
  assert metrics["actor/pg_clipfrac"] == 0
  assert metrics["actor/pg_clipfrac_lower"] == 0


def test_without_old_log_probs_the_current_ones_are_taken(scored):
  batch = scored.with_fields(old_log_probs=None)
  own = tiny.update(batch)
  assert own[0]["actor/ppo_kl"] == 0
  tiny.assert_same_update(own, tiny.update(scored), rel=2e-6)


def test_the_loss_and_its_metrics_by_numpy(scored, off_policy):
  metrics, _ = tiny.update(off_policy, **CLIPPED)
  advantages = on(off_policy, off_policy.advantages)
  gap = on(off_policy, scored.old_log_probs) - on(off_policy, off_policy.old_log_probs)
  ratio = np.exp(gap)
  plain, cut = -advantages * ratio, -advantages * np.clip(ratio, 0.98, 1.03)
  worse = np.maximum(plain, cut)
  bad = advantages < 0
  loss = np.where(bad, np.minimum(worse, -1.05 * advantages), worse)
  expected = {
    "pg_loss": loss.mean(),
    "ppo_kl": -gap.mean(),
    "loss": loss.mean(),
    "pg_clipfrac": (cut > plain).mean(),
    "pg_clipfrac_lower": (bad & (worse > -1.05 * advantages)).mean(),
  }
  # All three knobs bite.
  assert (bad & (ratio < 0.98)).any() and (~bad & (ratio > 1.03)).any()
  assert expected["pg_clipfrac_lower"] > 0
  for name, value in expected.items():
    assert metrics[f"actor/{name}"] == pytest.approx(value, abs=2e-6), name


SELECTING = dict(clip_cov_ratio=0.2, clip_cov_lb=-9.0, clip_cov_ub=9.0, seed=3)


@pytest.fixture(scope="module")
def selecting(off_policy):
  """An update by a loss that selects tokens."""
  return tiny.update(off_policy, policy_loss="clip_cov", **SELECTING)


@pytest.mark.parametrize("options", [dict(micro_rows=1), dict(mesh=(1, 1, 2))], ids=str)
def test_tokens_are_selected_of_the_global_mini_batch(off_policy, selecting, options):
  # 13 tokens, a fifth of them: 2, wherever the micro-batches end.
  assert selecting[0]["actor/selected_fraction"] == pytest.approx(2 / 13)
  split = tiny.update(off_policy, policy_loss="clip_cov", **SELECTING, **options)
  tiny.assert_same_update(split, selecting)


def test_selected_tokens_leave_the_loss(off_policy, selecting, result):
  assert selecting[0]["actor/loss"] != pytest.approx(result[0]["actor/loss"], abs=1e-4)
  other = tiny.update(off_policy, policy_loss="clip_cov", **SELECTING | dict(seed=4))
  assert other[0]["actor/loss"] != selecting[0]["actor/loss"]


def test_the_second_update_selects_by_the_current_log_probs(off_policy):
  actor = tiny.make_actor(policy_loss="kl_cov", kl_cov_ratio=0.2, ppo_epochs=2)
  seen = []
  actor.log_probs, scorer = (
    (lambda *args: seen.append(scorer(*args)) or seen[-1]),
    (actor.log_probs),
  )
  try:
    actor.update_policy(off_policy)
  finally:
    actor.log_probs = scorer
  # The first takes the old ones, with which it is current.
  assert len(seen) == 1
  assert np.abs(seen[0] - off_policy.old_log_probs)[off_policy.mask].max() > 1e-3


def test_importance_weights_are_factors_of_the_policy_loss(off_policy, result):
  doubled = off_policy.with_fields(
    is_weights=np.full(off_policy.advantages.shape, 2.0, np.float32)
  )
  metrics, grad = tiny.update(doubled)
  assert metrics["actor/loss"] == pytest.approx(2 * result[0]["actor/loss"], rel=1e-5)
  half = jax.tree.map(lambda x: x / 2, grad)
  assert tiny.largest(jax.tree.map(lambda a, b: a - b, half, result[1])) < 1e-5


ANSWERS = tiny.make_batch(
  prompts=([4, 8], [6], [1, 1, 3]), responses=([7, 9, tiny.EOS], [3], [5, 5])
)


@pytest.mark.parametrize("options", [dict(micro_rows=3), dict(share_rows=True)])
def test_given_answers_are_learned_beside(off_policy, result, options):
  """0.5 of their mean negative log-prob is added, and its gradient."""

  def ptx_loss(params):
    found = []
    for hidden, ids in tiny.each_row_alone(params, ANSWERS):
      logits = hidden @ params["lm_head"]["kernel"][: tiny.SPEC.vocab_size].T
      log_probs = jax.nn.log_softmax(logits / 0.7)
      found.append(-log_probs[jnp.arange(len(ids)), ids])
    return jnp.concatenate(found).mean()

  value, grad = jax.jit(jax.value_and_grad(ptx_loss))(tiny.host_params())
  metrics, got = tiny.update(
    off_policy, answered=lambda: ANSWERS, ptx_coef=0.5, **options
  )
  assert metrics["actor/ptx_loss"] == pytest.approx(float(value), rel=1e-5)
  assert metrics["actor/pg_loss"] == pytest.approx(result[0]["actor/pg_loss"], abs=2e-6)
  assert metrics["actor/entropy"] == pytest.approx(result[0]["actor/entropy"], rel=1e-5)
  expected = jax.tree.map(lambda a, b: a + 0.5 * b, result[1], jax.device_get(grad))
  worst = tiny.largest(jax.tree.map(lambda a, b: a - b, got, expected))
  assert worst < 2e-5 * tiny.largest(expected)


def test_a_policy_mask_leaves_tokens_out_of_the_update(off_policy):
  kept = np.ones((4, 6), bool)
  kept[1, 1:3] = kept[0] = False
  rejected = tiny.update(off_policy.with_fields(policy_mask=kept))
  tiny.assert_same_update(rejected, tiny.update(off_policy.with_fields(loss_mask=kept)))


def make_algorithm(**options):
  return Algorithm(
    adv_estimator="grpo",
    gamma=1.0,
    lam=1.0,
    norm_adv_by_std=True,
    whiten_advantages=False,
    use_kl_in_reward=False,
    kl_penalty="k1",
    correction=Correction(**options),
  )


def test_old_log_probs_are_computed_where_they_are_needed(scored):
  fresh = dataclasses.replace(scored, old_log_probs=None, metrics={})
  once, twice = tiny.make_actor(), tiny.make_actor(ppo_epochs=2)
  assert once.compute_old_log_probs(fresh, make_algorithm()).old_log_probs is None
  found = twice.compute_old_log_probs(fresh, make_algorithm())
  np.testing.assert_array_equal(found.old_log_probs, scored.old_log_probs)
  found = once.compute_old_log_probs(fresh, make_algorithm(rollout_is="token"))
  np.testing.assert_array_equal(found.old_log_probs, scored.old_log_probs)
  assert found.is_weights is not None
  found = twice.compute_old_log_probs(fresh, make_algorithm(bypass=True))
  assert found.old_log_probs is fresh.rollout_log_probs and not found.metrics


def test_in_bypass_mode_the_ratio_is_to_the_engine_and_the_gap_is_told(scored):
  engine = scored.old_log_probs + LOG_PROBS
  fresh = dataclasses.replace(
    scored, old_log_probs=None, rollout_log_probs=engine, metrics={}
  )
  batch = tiny.make_actor().compute_old_log_probs(fresh, make_algorithm(bypass=True))
  metrics, _ = tiny.update(batch)
  gap = on(scored, scored.old_log_probs) - on(scored, engine)
  assert metrics["actor/ppo_kl"] == pytest.approx(-gap.mean(), abs=1e-6)
  assert metrics[GAP_MAX] == pytest.approx(np.abs(gap).max(), abs=1e-5)


def test_the_collision_is_the_sum_of_squared_probabilities(scored):
  found = tiny.make_actor().compute_collision(scored).collision
  params = tiny.host_params()
  for i, (hidden, ids) in enumerate(tiny.each_row_alone(params, scored)):
    logits = hidden @ params["lm_head"]["kernel"][: tiny.SPEC.vocab_size].T
    probs = np.asarray(jax.nn.softmax(logits / 0.7), np.float64)
    np.testing.assert_allclose(found[i, : len(ids)], (probs**2).sum(-1), atol=1e-5)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_the_kl_loss_is_added_with_its_coefficient(scored, off_policy, result, kind):
  metrics, grad = tiny.update(off_policy, **KL, kl_loss_type=kind)
  d = on(off_policy, scored.old_log_probs) - on(off_policy, off_policy.ref_log_probs)
  kl = {"k2": d**2 / 2, "k3": np.exp(-d) + d - 1}[kind].mean()
  assert metrics["actor/kl_loss"] == pytest.approx(kl, rel=1e-4)
  assert metrics["actor/pg_loss"] == result[0]["actor/pg_loss"]
  assert metrics["actor/loss"] == pytest.approx(
    metrics["actor/pg_loss"] + 0.01 * kl, abs=1e-6
  )
  assert 0.01 * kl > 1e-4
  assert tiny.largest(jax.tree.map(lambda a, b: a - b, grad, result[1])) > 1e-3


def test_the_entropy_is_subtracted_with_its_coefficient(off_policy, result):
  metrics, grad = tiny.update(off_policy, entropy_coeff=0.01)
  assert metrics["actor/pg_loss"] == result[0]["actor/pg_loss"]
  assert metrics["actor/loss"] == pytest.approx(
    metrics["actor/pg_loss"] - 0.01 * metrics["actor/entropy"], abs=1e-6
  )
  assert tiny.largest(jax.tree.map(lambda a, b: a - b, grad, result[1])) > 1e-3


def test_the_entropy_bonus_raises_the_entropy(off_policy):
  batch = off_policy.with_fields(advantages=tiny.constant([0] * 4))
  actor = tiny.make_actor(entropy_coeff=0.01)
  first, second = (actor.update_policy(batch)["actor/entropy"] for _ in range(2))
  assert second > first + 1e-3


def test_the_balance_loss_spreads_tokens_over_experts(off_policy):
  experts = dataclasses.replace(tiny.SPEC, experts=ExpertSpec(4, 1, 24))
  batch = off_policy.with_fields(advantages=tiny.constant([0] * 4))
  actor = tiny.make_actor(spec=experts, router_aux_loss_coef=0.2)
  losses = [actor.update_policy(batch) for _ in range(3)]
  balance = [metrics["actor/router_aux_loss"] for metrics in losses]
  assert losses[0]["actor/loss"] == pytest.approx(0.2 * balance[0], rel=1e-5)
  # 1 where all experts have as much to do
  assert balance[0] > balance[2] + 1e-3 and balance[2] >= 1 - 1e-6


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_the_kl_loss_alone_moves_the_policy_to_the_reference(off_policy, kind):
  batch = off_policy.with_fields(advantages=tiny.constant([0] * 4))
  actor = tiny.make_actor(**KL, kl_loss_type=kind)
  first, second = (actor.update_policy(batch)["actor/kl_loss"] for _ in range(2))
  assert second < 0.95 * first


def test_a_positive_advantage_raises_the_log_probs(scored):
  actor = tiny.make_actor()
  actor.update_policy(
    scored.with_fields(advantages=tiny.constant([0.05, 0.05, -0.05, 0.05]))
  )
  after = actor.compute_log_probs(scored).old_log_probs
  moved = np.where(scored.mask, after - scored.old_log_probs, 0).sum(-1)
  assert (np.sign(moved) == [1, 1, -1, 1]).all()


def test_the_order_of_the_rows_does_not_change_the_update(off_policy, result):
  tiny.assert_same_update(tiny.update(off_policy.select([2, 0, 3, 1])), result)


def test_advantages_outside_of_the_mask_have_no_influence(off_policy):
  loss_mask = np.ones((4, 6), bool)
  loss_mask[1, 1:3] = loss_mask[0] = False
  batch = off_policy.with_fields(loss_mask=loss_mask)
  results = []
  for junk in (0.0, 1e4):
    columns = {
      name: np.where(batch.mask, getattr(batch, name), np.float32(junk))
      for name in ("advantages", "old_log_probs", "ref_log_probs")
    }
    results.append(tiny.update(batch.with_fields(**columns), **KL, kl_loss_type="k3"))
  assert results[0][0] == results[1][0]
  jax.tree.map(np.testing.assert_array_equal, results[0][1], results[1][1])


def test_masked_truncated_rows_are_not_in_the_denominator(scored):
  batch = scored.with_fields(
    advantages=tiny.constant([1, 5, 1, 1]),
    loss_mask=np.array([[True], [False], [True], [True]]).repeat(6, 1),
  )
  masked = tiny.update(batch)
  assert masked[0]["actor/loss"] == pytest.approx(-1.0, abs=1e-6)  # 8 / 8, not 8 / 13
  tiny.assert_same_update(masked, tiny.update(batch.select([0, 2, 3])))


def test_if_all_rows_are_truncated_loss_and_gradient_are_zero_and_the_step_counts():
  actor = tiny.make_actor(eos=(), mask_truncated=True, optimizer="adamw", mini_rows=8)
  batch = actor.generate_sequences(tiny.make_batch().prompts)
  assert batch.valid_mask.all() and not batch.mask.any()
  assert set(batch.finish_reasons) == {"length"}
  before = jax.device_get(actor.state.store.params)
  batch = actor.compute_log_probs(batch).with_fields(
    advantages=np.ones(batch.response_ids.shape, np.float32)
  )
  metrics = actor.update_policy(batch)
  assert metrics["actor/loss"] == 0 and metrics["actor/grad_norm"] == 0
  assert np.isfinite(list(metrics.values())).all() and actor.state.updates == 1
  after = jax.device_get(actor.state.store.params)
  jax.tree.map(np.testing.assert_array_equal, before, after)


def test_mini_batches_and_epochs_make_as_many_updates(off_policy):
  actor = tiny.make_actor(mini_rows=3, ppo_epochs=2, optimizer="adamw", micro_rows=3)
  assert actor.updates_per_batch(4) == 4  # 3 + 1 rows, twice
  for expected in (4, 8):
    metrics = actor.update_policy(off_policy)
    counts = {
      int(x)
      for path, x in jax.tree.leaves_with_path(actor.state.store.opt_state)
      if "count" in jax.tree_util.keystr(path)
    }
    assert actor.state.updates == expected and counts == {expected}
  assert np.isfinite(list(metrics.values())).all()


def test_several_updates_of_one_batch_keep_the_old_log_probs_fixed(scored):
  actor = tiny.make_actor()
  batch = scored.with_fields(advantages=0.02 * scored.advantages)
  first, second = (actor.update_policy(batch) for _ in range(2))
  after = tiny.make_actor()
  after.update_policy(batch)
  gap = after.compute_log_probs(batch).old_log_probs - scored.old_log_probs
  assert abs(first["actor/ppo_kl"]) < 1e-6
  assert second["actor/ppo_kl"] == pytest.approx(-on(batch, gap).mean(), abs=2e-6)
  assert abs(second["actor/ppo_kl"]) > 1e-4


def test_several_updates_without_old_log_probs_are_refused(scored):
  with pytest.raises(AssertionError, match="old_log_probs"):
    tiny.make_actor(ppo_epochs=2).update_policy(scored.with_fields(old_log_probs=None))


def test_rollout_and_training_log_probs_agree():
  actor = tiny.make_actor(
    (1, 2, 2), n=4, max_new=8, eos=tuple(range(0, 37, 5)), mini_rows=16, micro_rows=4
  )
  batch = actor.generate_sequences(tiny.make_batch().prompts)
  assert len(batch) == 16 and set(batch.finish_reasons) == {"stop", "length"}
  scored = actor.compute_log_probs(batch)
  assert scored.metrics[GAP_MAX] < 1e-4
  gap = np.abs(scored.old_log_probs - batch.rollout_log_probs)[batch.mask]
  assert scored.metrics[GAP_MEAN] == pytest.approx(gap.mean(), rel=1e-5)
  advantages = np.ones(batch.response_ids.shape, np.float32)
  # Without old log-probs the update itself reports the gap.
  metrics = actor.update_policy(batch.with_fields(advantages=advantages))
  assert metrics[GAP_MAX] == pytest.approx(gap.max(), abs=1e-6)
  assert metrics[GAP_MEAN] == pytest.approx(gap.mean(), abs=1e-6)
  assert metrics["actor/loss"] == pytest.approx(-1.0, abs=1e-6)


def test_generation_follows_the_update():
  actor = tiny.make_actor(n=1)
  prompts = tiny.make_batch().prompts
  first = actor.generate_sequences(prompts)
  again = actor.generate_sequences(prompts)
  assert first.weight_version == again.weight_version == 1
  actor.update_policy(
    first.with_fields(advantages=np.ones(first.response_ids.shape, np.float32))
  )
  moved = actor.generate_sequences(prompts)
  assert moved.weight_version == 2
  assert actor.compute_log_probs(moved).metrics[GAP_MAX] < 1e-4


def test_the_reference_is_a_copy_that_does_not_follow_the_actor(scored):
  actor = tiny.make_actor()
  reference = Reference(
    tiny.make_decoder(),
    actor.state.weights,
    tiny.weight_layout().train,
    temperature=0.7,
    chunk=5,
    micro_rows=2,
  )
  before = reference.compute_log_probs(scored).ref_log_probs
  np.testing.assert_array_equal(before, scored.old_log_probs)
  actor.update_policy(scored)
  np.testing.assert_array_equal(
    reference.compute_log_probs(scored).ref_log_probs, before
  )
  moved = actor.compute_log_probs(scored).old_log_probs
  assert np.abs(moved - before)[scored.mask].max() > 1e-3


def test_tied_embeddings_have_one_moment_and_stay_tied_after_export(
  off_policy, tmp_path
):
  actor = tiny.make_actor((1, 2, 1), spec=tiny.TIED, optimizer="adamw")
  for _ in range(3):
    actor.update_policy(off_policy)
  params = actor.state.store.params
  assert "lm_head" not in params
  moments = [
    x
    for x in jax.tree.leaves(actor.state.store.opt_state)
    if x.shape == params["embed"]["kernel"].shape
  ]
  assert len(moments) == 2  # Adam's mu and nu, once
  out = export.export_hf(params, tiny.TIED, tmp_path / "out", hf_config=hf_config())
  with load.Checkpoint(out) as checkpoint:
    assert "lm_head.weight" not in checkpoint
  abstract = tiny.weight_layout(spec=tiny.TIED).abstract_params()
  shardings = jax.tree.map(lambda x: x.sharding, abstract)
  again = load.load_params(out, tiny.TIED, shardings, vocab=tiny.SPEC.vocab_size)
  moved = np.asarray(again["embed"]["kernel"])
  np.testing.assert_array_equal(
    moved, np.asarray(params["embed"]["kernel"])[: tiny.SPEC.vocab_size]
  )
  before = tiny.host_params(tiny.TIED)["embed"]["kernel"][:37]
  assert tiny.largest(moved - before) > 0.01


def test_a_tied_export_has_the_logits_of_the_trained_model(off_policy, tmp_path):
  torch = pytest.importorskip("torch", reason="torch is the oracle")
  from transformers import AutoModelForCausalLM

  actor = tiny.make_actor((1, 2, 1), spec=tiny.TIED, optimizer="adamw")
  actor.update_policy(off_policy)
  export.export_hf(
    actor.state.store.params, tiny.TIED, tmp_path / "out", hf_config=hf_config()
  )
  theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
  assert theirs.lm_head.weight is theirs.model.embed_tokens.weight
  with torch.no_grad():
    logits = theirs(torch.tensor([tiny.PROMPTS[1] + tiny.RESPONSES[1]])).logits[0]
  expected = torch.log_softmax(logits / 0.7, -1)[4:-1].gather(
    1, torch.tensor(tiny.RESPONSES[1])[:, None]
  )[:, 0]
  got = actor.compute_log_probs(off_policy).old_log_probs[1, :5]
  np.testing.assert_allclose(got, expected.numpy(), atol=1e-4)


def hf_config():
  """The config of ``TIED`` as HF has it."""
  return dict(
    model_type="qwen2",
    architectures=["Qwen2ForCausalLM"],
    vocab_size=37,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    rope_parameters=dict(rope_type="default", rope_theta=1e4),
  )
