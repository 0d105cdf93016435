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
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_hybrid.ops.matmul import (
  Kernel,
  Weight,
  backward_dtype,
  row_scales,
)

BLOCK = 128  # rows of one expert that are multiplied at a time

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


def grouped_product(
  x: jax.Array, kernel: Weight, *, down: bool, sizes_E: jax.Array, dtype: jnp.dtype
) -> jax.Array:
  """Rows of group e times matrix e, operands in ``dtype``; fp32.

  Args:
    x: ``[M, I]`` (``down``) or ``[M, D]``, the rows of group 0 first.
    kernel: ``[E, I, D]``.
    down: contract I instead of D.
    sizes_E: rows of each group; rows beyond their sum give zeros.
    dtype: of the operands; the backward pass has ``backward_dtype``.
  """
  if isinstance(kernel, Kernel):
    return _grouped(x, kernel.value, kernel.slot, sizes_E, down, dtype)
  return _grouped(x, kernel, None, sizes_E, down, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _grouped(x, kernel, slot, sizes_E, down, dtype):
  return _grouped_forward(x, kernel, slot, sizes_E, down, dtype)[0]


def _grouped_forward(x, kernel, slot, sizes_E, down, dtype):
  x = x.astype(dtype)
  out = _times(x, kernel.astype(dtype), sizes_E, contract=0 if down else 1)
  return out, (x, kernel, None if slot is None else (), sizes_E)


def _grouped_backward(down, dtype, residuals, cotangent):
  x, kernel, slot, sizes_E = residuals
  low = backward_dtype(dtype)
  x, cotangent = x.astype(low), cotangent.astype(low)
  dx = _times(cotangent, kernel.astype(low), sizes_E, contract=1 if down else 0)
  of_i, of_d = (x, cotangent) if down else (cotangent, x)
  dkernel = _outer_products(of_i, of_d, sizes_E)
  if slot is None:
    return dx, dkernel.astype(kernel.dtype), None, None
  return dx, None, dkernel, None


_grouped.defvjp(_grouped_forward, _grouped_backward)


def _times(x, kernel_EID, sizes_E, *, contract: int) -> jax.Array:
  """fp32 ``[M, D]`` (contract 0: I) or ``[M, I]`` (contract 1: D)."""
  rows = x.shape[0]
  width = kernel_EID.shape[2 - contract]

  def one(out, group, row, taken):
    matrix = jax.lax.dynamic_index_in_dim(kernel_EID, group, keepdims=False)
    product = jax.lax.dot_general(
      *taken,
      matrix,
      (((1,), (contract,)), ((), ())),
      preferred_element_type=jnp.float32,
    )
    # Rows behind the group's are zeros here; the next block writes theirs.
    return jax.lax.dynamic_update_slice_in_dim(out, product, row, 0)

  size = _block_rows(rows, kernel_EID.shape[0])
  out = jnp.zeros((rows + size, width), jnp.float32)
  return _for_blocks(one, out, (x,), sizes_E, size)[:rows]


def _outer_products(of_i, of_d, sizes_E) -> jax.Array:
  """fp32 ``[E, I, D]``: the sum over each group's rows of their outer products."""
  rows, groups = of_i.shape[0], sizes_E.shape[0]

  def one(out, group, row, taken):
    del row
    product = jax.lax.dot_general(
      *taken, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    return out.at[group].add(product)

  out = jnp.zeros((groups, of_i.shape[1], of_d.shape[1]), jnp.float32)
  return _for_blocks(one, out, (of_i, of_d), sizes_E, _block_rows(rows, groups))


def _for_blocks(
  one: Callable[..., jax.Array],
  out: jax.Array,
  operands: tuple[jax.Array, ...],
  sizes_E: jax.Array,
  size: int,
) -> jax.Array:
  """Folds ``one(out, group, first row, rows of each operand)`` over all blocks.

  A block is at most ``size`` rows of a single group, filled up with zeros. There
  are as many as it takes: groups without rows cost nothing.
  """
  ends_E = jnp.cumsum(sizes_E)
  blocks_E = -(-sizes_E // size)
  last_E = jnp.cumsum(blocks_E)
  padded = [jnp.pad(x, ((0, size), (0, 0))) for x in operands]

  def step(b, out):
    group = jnp.searchsorted(last_E, b, side="right")
    nth = b - (last_E[group] - blocks_E[group])
    row = ends_E[group] - sizes_E[group] + nth * size
    real = jnp.arange(size) < ends_E[group] - row
    taken = [jax.lax.dynamic_slice_in_dim(x, row, size) for x in padded]
    return one(out, group, row, [jnp.where(real[:, None], x, 0) for x in taken])

  return jax.lax.fori_loop(0, last_E[-1], step, out)


def _block_rows(rows: int, groups: int) -> int:
  """Rows of a block: about a group's, a power of two from 8 to BLOCK."""
  share = max(1, rows // max(groups, 1))
  return min(BLOCK, max(8, 1 << (share - 1).bit_length()))


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


def balance_loss(
  probs_LNE: jax.Array, chosen_LNK: jax.Array, real_N: jax.Array
) -> jax.Array:
  """Load balancing loss ``E sum_e f_e p_e`` (Switch, arXiv:2101.03961, eq. 4).

  f_e is how often expert e is chosen per token, p_e its mean probability, both
  over the real tokens of all layers.
  """
  experts = probs_LNE.shape[-1]
  weight_N = real_N.astype(jnp.float32)
  count = probs_LNE.shape[0] * jnp.maximum(jnp.sum(weight_N), 1.0)
  chosen_LNE = jnp.sum(jax.nn.one_hot(chosen_LNK, experts, dtype=jnp.float32), 2)
  f_E = jnp.einsum("lne,n->e", chosen_LNE, weight_N) / count
  p_E = jnp.einsum("lne,n->e", probs_LNE, weight_N) / count
  return experts * jnp.sum(f_E * p_E)
