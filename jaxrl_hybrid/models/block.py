"""One layer of a decoder: attention and MLP around a residual stream."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from jaxrl_hybrid.models.attention import Attention, LatentAttention
from jaxrl_hybrid.models.fused import GATE_UP, QKV
from jaxrl_hybrid.models.layers import Context, norm
from jaxrl_hybrid.models.mlp import MLP, Mixture
from jaxrl_hybrid.models.spec import POST_NORM, PRE_NORM, SANDWICH, ModelSpec
from jaxrl_hybrid.ops.experts import Routing


class DecoderLayer(nnx.Module):
  """Attention and MLP with residuals, normed before, after or both.

  Activations are fp32; products round their operands to ``dtype``. An fp32
  residual stream is not rounded at every layer, which would be by far the
  largest difference between the log-probs of trainer and engine.
  """

  def __init__(
    self,
    spec: ModelSpec,
    *,
    dense: bool = False,
    fused: frozenset[str] = frozenset(),
    rngs: nnx.Rngs,
  ):
    """
    Args:
      spec: sizes and switches.
      dense: an MLP even if the model has experts.
      fused: of ``QKV`` and ``GATE_UP`` the projections that are one product.
      rngs: of the initial parameters.
    """
    self.spec = spec
    width = spec.hidden_size
    if spec.norms in (PRE_NORM, SANDWICH):
      self.attn_norm, self.mlp_norm = norm(spec, width), norm(spec, width)
    if spec.norms in (POST_NORM, SANDWICH):
      self.attn_out_norm, self.mlp_out_norm = norm(spec, width), norm(spec, width)
    if spec.latent:
      self.attn = LatentAttention(spec, rngs=rngs)
    else:
      self.attn = Attention(spec, fused=QKV in fused, rngs=rngs)
    gate_up = GATE_UP in fused
    if spec.experts and not dense:
      self.mlp = Mixture(spec, fused=gate_up, rngs=rngs)
    else:
      self.mlp = MLP(spec, spec.intermediate_size, fused=gate_up, rngs=rngs)

  def __call__(
    self, x_BTD: jax.Array, ctx: Context
  ) -> tuple[jax.Array, Any, Routing | None]:
    """(x, what the attention keeps, the routing where there are experts)."""
    before, after = self.spec.norms != POST_NORM, self.spec.norms != PRE_NORM
    attended, kept = self.attn(
      ctx.gather(self.attn_norm(x_BTD) if before else x_BTD), ctx
    )
    attended = ctx.scatter(attended)
    x_BTD += self.attn_out_norm(attended) if after else attended
    fed, routing = self.mlp(ctx.gather(self.mlp_norm(x_BTD) if before else x_BTD), ctx)
    fed = ctx.scatter(fed)
    return x_BTD + (self.mlp_out_norm(fed) if after else fed), kept, routing
