"""The style loss: values by another route, gradients, packing, and what it does."""

import dataclasses

import build_tiny as tiny
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_hybrid.errors import ConfigError
from jaxrl_hybrid.workers.style import StyleTeacher, anchor_of
from jaxrl_hybrid.workers.style_loss import StyleConstraint

STYLE = [9, 3, 11]  # ids of the style's text
DISTILL = StyleConstraint(("be brief",), 0.5)
EMBEDDING = StyleConstraint(("be brief",), 0.5, "embedding")
TEMPERATURE = tiny.ACTOR["temperature"]


def teacher_weights():
  """Another model than the actor: what the loss pulls it to."""
  rng = np.random.default_rng(1)
  host = tiny.host_params()
  noise = lambda x: x + rng.normal(0, 0.05, x.shape).astype(np.float32)
  return tiny.place_params(jax.tree.map(noise, host), tiny.weight_layout())


def make_teacher(constraint, given, longest=64, micro_rows=2):
  ids = lambda prompt: np.concatenate([np.array(STYLE, np.int32), prompt.ids])
  return StyleTeacher(
    constraint, lambda: given, ids, longest=longest, micro_rows=micro_rows
  )


def make_actor(constraint, given, **settings):
  actor = tiny.make_actor(style=constraint, **settings)
  actor.teacher = make_teacher(
    constraint, given, micro_rows=settings.get("micro_rows", 2)
  )
  return actor


def no_advantages(**fields):
  batch = tiny.make_batch(**fields)
  return batch.with_fields(advantages=np.zeros_like(batch.advantages))


def first_outputs():
  actor = make_actor(DISTILL, teacher_weights(), optimizer="adamw")
  return actor.outputs(no_advantages())


def log_softmax(hidden, params):
  logits = hidden @ np.asarray(params["lm_head"]["kernel"], np.float64).T
  logits = logits[:, : tiny.SPEC.vocab_size] / TEMPERATURE
  return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def kl_by_rows(actor_params, teacher_params, batch):
  """Of each row by itself, without packing: the KL of each response token."""
  styled = [[*STYLE, *prompt.ids.tolist()] for prompt in batch.prompts]
  other = tiny.make_batch(prompts=styled)
  found = []
  for (p_hidden, _), (q_hidden, _) in zip(
    tiny.each_row_alone(actor_params, batch),
    tiny.each_row_alone(teacher_params, other),
  ):
    log_p = log_softmax(np.asarray(p_hidden, np.float64), actor_params)
    log_q = log_softmax(np.asarray(q_hidden, np.float64), teacher_params)
    found.append((np.exp(log_p) * (log_p - log_q)).sum(-1))
  return found


def test_the_loss_is_the_mean_kl_to_the_reference_that_reads_the_style():
  given = teacher_weights()
  actor = make_actor(DISTILL, given, optimizer="adamw")
  batch = no_advantages()
  expected = np.concatenate(kl_by_rows(actor.state.store.params, given, batch))
  outputs = actor.outputs(batch)
  loss = DISTILL.compute(outputs)
  assert float(loss) == pytest.approx(0.5 * expected.mean(), rel=1e-4)
  metrics = actor.update_policy(batch)
  assert metrics["actor/style_loss"] == pytest.approx(expected.mean(), rel=1e-4)
  assert metrics["actor/loss"] == pytest.approx(0.5 * expected.mean(), rel=1e-4)
  assert metrics["actor/grad_norm"] > 0


def test_compute_is_differentiable_in_the_actor_alone():
  outputs = make_actor(DISTILL, teacher_weights(), optimizer="adamw").outputs(
    no_advantages()
  )
  grads = jax.grad(DISTILL.compute, allow_int=True)(outputs)
  assert tiny.largest(grads.hidden_BTD) > 0 and tiny.largest(grads.head_VD) > 0
  assert not np.any(grads.teacher_BTD) and not np.any(grads.teacher_head_VD)
  outside = np.where(outputs.mask_BT[..., None], 0, grads.hidden_BTD)
  assert not outside.any()


def test_steps_on_the_loss_reach_the_style():
  actor = make_actor(DISTILL, teacher_weights(), optimizer="adamw")
  batch = no_advantages()
  losses = [actor.update_policy(batch)["actor/style_loss"] for _ in range(12)]
  assert losses[-1] < 0.5 * losses[0]


def run(constraint, given, batch, **options):
  actor = make_actor(constraint, given, **options)
  before = jax.device_get(actor.state.store.params)
  metrics = actor.update_policy(batch)
  after = jax.device_get(actor.state.store.params)
  return metrics, jax.tree.map(lambda a, b: a - b, before, after)


def test_micro_batches_order_and_tool_tokens():
  constraint, given = DISTILL, teacher_weights()
  mask = np.ones((4, 6), bool)
  mask[1, 1:3] = False  # tokens of a tool
  batch = no_advantages(loss_mask=mask)
  one = run(constraint, given, batch)
  all_at_once = run(constraint, given, batch, micro_rows=4)
  tiny.assert_same_update(one, all_at_once, rel=2e-6)
  turned = run(constraint, given, batch.select([2, 0, 3, 1]), micro_rows=4)
  tiny.assert_same_update(one, turned, rel=2e-6)
  whole = run(constraint, given, no_advantages())
  assert whole[0]["actor/style_loss"] != one[0]["actor/style_loss"]


def test_answers_that_are_given_have_no_style():
  answers = tiny.make_batch(prompts=([4, 8],), responses=([7, 9, tiny.EOS],))
  actor = make_actor(DISTILL, teacher_weights(), ptx_coef=0.5)
  outputs = actor.outputs(no_advantages())
  expected = np.asarray(DISTILL.per_token(outputs))[np.asarray(outputs.mask_BT)]
  metrics = actor.update_policy(no_advantages(), answered=lambda: answers)
  assert metrics["actor/style_loss"] == pytest.approx(expected.mean(), rel=1e-4)
  assert metrics["actor/ptx_loss"] > 0


def test_an_update_toward_an_embedding():
  anchor = jnp.arange(16.0) - 3
  outputs = dataclasses.replace(first_outputs(), anchor_D=anchor)
  mask_BT = np.asarray(outputs.mask_BT)
  expected = np.asarray(EMBEDDING.per_token(outputs))[mask_BT].mean()
  metrics, update = run(EMBEDDING, anchor, no_advantages())
  assert metrics["actor/style_loss"] == pytest.approx(expected, rel=1e-4)
  assert tiny.largest(update) > 0


def test_the_distance_of_embeddings_by_hand():
  outputs = make_actor(DISTILL, teacher_weights(), optimizer="adamw").outputs(
    no_advantages()
  )
  hidden = np.zeros(outputs.hidden_BTD.shape, np.float32)
  hidden[0, :, 0], hidden[1, :, 1], hidden[2:, :, :2] = 3.0, 2.0, 1.0
  by_hand = dataclasses.replace(
    outputs, hidden_BTD=jnp.asarray(hidden), anchor_D=jnp.zeros(16).at[0].set(5.0)
  )
  loss_BT = np.asarray(EMBEDDING.per_token(by_hand))
  expected = [0.0, 1.0, 1 - 0.5**0.5, 1 - 0.5**0.5]
  np.testing.assert_allclose(loss_BT[:, 0], expected, atol=1e-6)
  lengths = np.asarray(outputs.mask_BT).sum(-1)
  mean = (expected * lengths).sum() / lengths.sum()
  assert float(EMBEDDING.compute(by_hand)) == pytest.approx(0.5 * mean, rel=1e-5)


def test_the_anchor_is_the_mean_of_texts():
  params = tiny.place_params(tiny.host_params(), tiny.weight_layout())
  texts = [np.array(x, np.int32) for x in ([5, 6, 7], [8], [1, 2, 3, 4, 9])]
  decoder = tiny.make_decoder()
  found = anchor_of(decoder, params, texts, tiny.weight_layout().train, micro_rows=2)
  means = [np.asarray(decoder.hidden(params, x[None]))[0].mean(0) for x in texts]
  np.testing.assert_allclose(found, np.mean(means, 0), rtol=1e-4, atol=1e-5)


def test_wrong_arguments_are_named():
  for given, words in (
    (dict(reference_texts="be brief"), "a list of texts"),
    (dict(reference_texts=[]), "a list of texts"),
    (dict(reference_texts=["a", " "]), "none of them empty"),
    (dict(reference_texts=["a"], weight=0.0), "weight: expected > 0"),
    (dict(reference_texts=["a"], method="distil"), "distill.*'distil'"),
  ):
    with pytest.raises(ConfigError, match=words):
      StyleConstraint(**given)
  with pytest.raises(ConfigError, match="a row has 14 tokens.*reads 13"):
    make_teacher(DISTILL, None, longest=13).packed(no_advantages())
