"""Which experts a token goes to, by hand."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxrl_hybrid.models.mlp import choose
from jaxrl_hybrid.models.spec import SIGMOID, ExpertSpec

# softmax: 0.4, 0.3, 0.2, 0.1
LOGITS = jnp.log(jnp.array([0.4, 0.3, 0.2, 0.1]))
SPEC = ExpertSpec(4, 2, 16)


def test_weights_of_the_chosen_sum_to_one_or_are_their_probabilities():
  weights, chosen = choose(LOGITS, None, SPEC)
  assert chosen.tolist() == [0, 1]
  np.testing.assert_allclose(weights, [4 / 7, 3 / 7], rtol=1e-6)
  plain = dataclasses.replace(SPEC, normalize=False, scale=2.0)
  np.testing.assert_allclose(choose(LOGITS, None, plain)[0], [0.8, 0.6], rtol=1e-6)


def test_a_group_is_chosen_before_its_experts():
  # Best of each group: .4 and .2; the second expert comes from the first group.
  grouped = dataclasses.replace(SPEC, groups=2, top_groups=1, normalize=False)
  logits = LOGITS[jnp.array([0, 3, 1, 2])]  # groups {.4 .1} and {.3 .2}
  weights, chosen = choose(logits, None, grouped)
  assert chosen.tolist() == [0, 1]
  np.testing.assert_allclose(weights, [0.4, 0.1], rtol=1e-6)
  # By the sum of two the groups tie at .5; with .45 and .55 the second one wins.
  by_two = dataclasses.replace(grouped, group_score_of=2)
  logits = jnp.log(jnp.array([0.4, 0.05, 0.3, 0.25]))
  assert choose(logits, None, by_two)[1].tolist() == [2, 3]


def test_a_correction_changes_the_choice_and_not_the_weights():
  spec = dataclasses.replace(SPEC, scores=SIGMOID, corrected=True, normalize=False)
  logits = jnp.array([0.0, -1.0, -2.0, -3.0])
  weights, chosen = choose(logits, jnp.array([0.0, 0.0, 0.0, 1.0]), spec)
  assert chosen.tolist() == [3, 0]
  np.testing.assert_allclose(weights, [1 / (1 + np.exp(3)), 0.5], rtol=1e-6)
