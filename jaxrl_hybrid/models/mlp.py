"""What a layer does to each token by itself: an MLP or a mixture of experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_hybrid.models.fused import FusedProjection
from jaxrl_hybrid.models.layers import Context, Projection, stds
from jaxrl_hybrid.models.spec import SIGMOID, ExpertSpec, ModelSpec
from jaxrl_hybrid.ops.experts import Routing

_ACTIVATIONS = {
  "silu": jax.nn.silu,
  "gelu": lambda x: jax.nn.gelu(x, approximate=False),
  "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


class MLP(nnx.Module):
  """Gated MLP (arXiv:2002.05202): ``down(act(gate(x)) * up(x))``."""

  def __init__(
    self, spec: ModelSpec, size: int, *, fused: bool = False, rngs: nnx.Rngs
  ):
    """``fused``: gate and up come from one product."""
    std, out_std = stds(spec)
    self.act = _ACTIVATIONS[spec.activation]

    def projection(kind: str, std: float) -> Projection:
      return Projection(
        size,
        spec.hidden_size,
        "mlp",
        kind=kind,
        bias=spec.mlp_bias,
        std=std,
        rngs=rngs,
      )

    gate, up = (projection("column", std) for _ in range(2))
    if fused:
      self.gate_up = FusedProjection((gate, up))
    else:
      self.gate_up = None
      self.gate, self.up = gate, up
    self.down = projection("row", out_std)

  def __call__(self, x_BTD: jax.Array, ctx: Context) -> tuple[jax.Array, None]:
    gate, up = (x.astype(jnp.float32) for x in self._project(x_BTD, ctx))
    return self.down(self.act(gate) * up, ctx.dtype), None

  def _project(self, x_BTD: jax.Array, ctx: Context) -> tuple[jax.Array, ...]:
    if self.gate_up is None:
      return tuple(part(x_BTD, ctx.dtype, ctx.inner) for part in (self.gate, self.up))
    return self.gate_up(x_BTD, ctx.dtype, first=self.down.kernel.get_value().shape[0])


class Router(nnx.Module):
  """Which experts a token goes to, and with what weights; all in fp32.

  Engine and trainer must choose alike, so nothing here is rounded to 16 bits.
  """

  def __init__(self, spec: ModelSpec, *, rngs: nnx.Rngs):
    self.experts = spec.experts
    shape = (spec.experts.count, spec.hidden_size)
    self.kernel = nnx.Param(
      spec.initializer_range * jax.random.normal(rngs.params(), shape, jnp.float32),
      logical_axes=(None, "embed"),
    )
    if spec.experts.corrected:
      self.correction = nnx.Param(
        jnp.zeros((spec.experts.count,), jnp.float32), logical_axes=(None,)
      )

  def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, Routing]:
    """fp32 weights ``[B, T, K]`` of the chosen experts, and which those are."""
    logits_BTE = jnp.einsum(
      "btd,ed->bte",
      x_BTD.astype(jnp.float32),
      self.kernel[...],
      precision=jax.lax.Precision.HIGHEST,
    )
    correction = self.correction[...] if self.experts.corrected else None
    weights_BTK, chosen_BTK = choose(logits_BTE, correction, self.experts)
    return weights_BTK, Routing(jax.nn.softmax(logits_BTE), chosen_BTK)


def choose(
  logits: jax.Array, correction_E: jax.Array | None, spec: ExpertSpec
) -> tuple[jax.Array, jax.Array]:
  """(weights, indices) ``[..., K]`` of the experts that logits ``[..., E]`` choose.

  ``w_k = scale * s_k / sum_j s_j`` (without the sum if not ``normalize``) with s
  the softmax or sigmoid of the logits. The choice is by s + correction, first
  among groups (DeepSeek-V3, arXiv:2412.19437, §2.1.2), then inside the best.
  """
  logits = logits.astype(jnp.float32)
  score = jax.nn.sigmoid if spec.scores == SIGMOID else jax.nn.softmax
  scores = score(logits)
  ranking = scores if correction_E is None else scores + correction_E
  if spec.groups > 1:
    grouped = ranking.reshape(*ranking.shape[:-1], spec.groups, -1)
    of_group = jnp.sum(jax.lax.top_k(grouped, spec.group_score_of)[0], -1)
    _, best = jax.lax.top_k(of_group, spec.top_groups)
    allowed = jnp.sum(jax.nn.one_hot(best, spec.groups), -2) > 0
    ranking = jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(ranking.shape)
  _, chosen = jax.lax.top_k(jax.lax.stop_gradient(ranking), spec.top_k)
  weights = jnp.take_along_axis(scores, chosen, -1)
  if spec.normalize:
    weights /= jnp.sum(weights, -1, keepdims=True) + 1e-20
  return weights * spec.scale, chosen


class Experts(nnx.Module):
  """Kernels ``[E, I, D]`` of the routed experts."""

  def __init__(self, spec: ModelSpec, *, rngs: nnx.Rngs):
    std, out_std = stds(spec)
    shape = (spec.experts.count, spec.experts.intermediate_size, spec.hidden_size)

    def kernel(std: float) -> nnx.Param:
      return nnx.Param(
        std * jax.random.normal(rngs.params(), shape, jnp.float32),
        logical_axes=("expert", "expert_mlp", "embed"),
      )

    self.gate = Kernels(kernel(std))
    self.up = Kernels(kernel(std))
    self.down = Kernels(kernel(out_std))


class Kernels(nnx.Module):
  """One matrix of every expert."""

  def __init__(self, kernel: nnx.Param):
    self.kernel = kernel


class Mixture(nnx.Module):
  """Routed experts, and a shared MLP that every token goes through."""

  def __init__(self, spec: ModelSpec, *, fused: bool = False, rngs: nnx.Rngs):
    """``fused``: as of the shared MLP."""
    self.act = _ACTIVATIONS[spec.activation]
    self.router = Router(spec, rngs=rngs)
    self.experts = Experts(spec, rngs=rngs)
    size = spec.experts.shared_size
    self.shared = MLP(spec, size, fused=fused, rngs=rngs) if size else None

  def __call__(self, x_BTD: jax.Array, ctx: Context) -> tuple[jax.Array, Routing]:
    weights_BTK, routing = self.router(x_BTD)
    experts = self.experts
    kernels = (
      kind.kernel.get_value() for kind in (experts.gate, experts.up, experts.down)
    )
    out_BTD = ctx.mixture(
      x_BTD,
      weights_BTK,
      routing.chosen,
      tuple(kernels),
      act=self.act,
      dtype=ctx.dtype,
    )
    if self.shared is not None:
      out_BTD += self.shared(x_BTD, ctx)[0]
    return out_BTD, routing
