"""Mixture of experts: each token through its own experts, and through no other.

Assignments of tokens to experts are sorted by expert; a grouped product then
multiplies each run of rows with its expert's matrix. No token is dropped and no
expert has a capacity, so a token's result does not depend on its neighbours.

Dims: N tokens, K experts of a token, M = N K assignments, E experts, D model
width, I expert width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_hybrid.ops.grouped import grouped_product
from jaxrl_hybrid.ops.matmul import Kernel, Weight, row_scales

# (gate, up, down), each [E, I, D]
Experts = tuple[Weight, Weight, Weight]


def mixture(
  x_ND: jax.Array,
  weights_NK: jax.Array,
  chosen_NK: jax.Array,
  experts: Experts,
  *,
  act: Callable[[jax.Array], jax.Array],
  dtype: jnp.dtype,
  first: jax.Array | int = 0,
) -> jax.Array:
  """``sum_k w_k down_e(act(gate_e(x)) * up_e(x))`` with e the k-th choice; fp32.

  Args:
    x_ND: tokens.
    weights_NK: fp32 weight of each choice.
    chosen_NK: int32 indices of experts.
    experts: kernels of experts ``first, first + 1, ...``; what other experts
      would add is left out.
    act: of the gate.
    dtype: of the operands of products.
    first: index of the first expert that is here.
  """
  choices = chosen_NK.shape[1]
  gate, up, down = experts
  count = _value(gate).shape[0]
  local_M = chosen_NK.reshape(-1) - first
  here_M = (local_M >= 0) & (local_M < count)
  expert_M = jnp.where(here_M, local_M, count)
  order_M = jnp.argsort(expert_M, stable=True)
  inverse_M = jnp.argsort(order_M)
  sizes_E = jnp.bincount(expert_M, length=count + 1)[:count]
  x_MD = _permute(jnp.repeat(x_ND, choices, axis=0), order_M, inverse_M)
  wide = functools.partial(grouped_product, sizes_E=sizes_E, dtype=dtype)
  inner_MI = act(wide(x_MD, gate, down=False)) * wide(x_MD, up, down=False)
  scale_M1 = row_scales(inner_MI, dtype)
  out_MD = wide(inner_MI / scale_M1, down, down=True) * scale_M1
  out_MD = _permute(out_MD, inverse_M, order_M)
  weights_M = jnp.where(here_M, weights_NK.reshape(-1), 0.0)
  out_MD *= weights_M[:, None]
  return jnp.sum(out_MD.reshape(-1, choices, out_MD.shape[-1]), 1)


def batched_mixture(
  x_BTD: jax.Array,
  weights_BTK: jax.Array,
  chosen_BTK: jax.Array,
  experts: Experts,
  **options: Any,
) -> jax.Array:
  """``mixture`` of ``[B, T, D]``."""
  flat = lambda x: x.reshape(-1, x.shape[-1])
  out = mixture(flat(x_BTD), flat(weights_BTK), flat(chosen_BTK), experts, **options)
  return out.reshape(x_BTD.shape)


@jax.custom_vjp
def _permute(x, order, inverse):
  """``x[order]``; its transpose is a gather as well, not a scatter."""
  del inverse
  return x[order]


_permute.defvjp(
  lambda x, order, inverse: (x[order], inverse),
  lambda inverse, ct: (ct[inverse], None, None),
)


def _value(weight: Weight) -> jax.Array:
  return weight.value if isinstance(weight, Kernel) else weight


class Routing(NamedTuple):
  """What a router did: softmax ``[B, T, E]`` and chosen experts ``[B, T, K]``."""

  probs: jax.Array
  chosen: jax.Array


class Load(NamedTuple):
  """Sums over real tokens: choices and probabilities ``[..., E]``, and their number."""

  chosen: jax.Array
  probs: jax.Array
  tokens: jax.Array


def load_of(routing: Routing, real_BT: jax.Array) -> Load:
  """The load of one layer; padding does not count."""
  weight_BT = real_BT.astype(jnp.float32)
  count = routing.probs.shape[-1]
  chosen_BTE = jnp.sum(jax.nn.one_hot(routing.chosen, count, dtype=jnp.float32), 2)
  total = lambda x_BTE: jnp.einsum("bte,bt->e", x_BTE, weight_BT)
  return Load(total(chosen_BTE), total(routing.probs), jnp.sum(weight_BT))


def balance_loss(load_L: Load) -> jax.Array:
  """``E sum_e f_e p_e`` of stacked loads (Switch, arXiv:2101.03961, eq. 4).

  f_e is how often a token chooses expert e, p_e its mean probability, both over
  the real tokens of all layers.
  """
  tokens = jnp.maximum(jnp.sum(load_L.tokens), 1.0)
  f_E, p_E = jnp.sum(load_L.chosen, 0) / tokens, jnp.sum(load_L.probs, 0) / tokens
  return f_E.shape[0] * jnp.sum(f_E * p_E)
