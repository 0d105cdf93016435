"""Attention modules: projections around an attention that the caller supplies."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_hybrid.models import rope
from jaxrl_hybrid.models.fused import FusedProjection
from jaxrl_hybrid.models.layers import Context, Projection, RMSNorm, norm, stds
from jaxrl_hybrid.models.spec import PER_HEAD, WHOLE, ModelSpec
from jaxrl_hybrid.ops import matmul


class Attention(nnx.Module):
  """Grouped-query attention; the caller supplies the attention itself."""

  def __init__(self, spec: ModelSpec, *, fused: bool = False, rngs: nnx.Rngs):
    """``fused``: queries, keys and values come from one product."""
    self.spec = spec
    width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    std, out_std = stds(spec)

    def column(size: int, axis: str) -> Projection:
      return Projection(
        size,
        spec.hidden_size,
        axis,
        kind="column",
        bias=spec.qkv_bias,
        std=std,
        rngs=rngs,
      )

    q = column(width, "heads")
    k, v = (column(kv_width, "kv_heads") for _ in range(2))
    if fused:
      self.qkv = FusedProjection((q, k, v))
    else:
      self.qkv = None
      self.q, self.k, self.v = q, k, v
    self.o = Projection(
      width,
      spec.hidden_size,
      "heads",
      kind="row",
      bias=spec.out_bias,
      std=out_std,
      bounded=True,  # by the values, which are rounded to the same format
      rngs=rngs,
    )
    if spec.qk_norm == PER_HEAD:
      self.q_norm = norm(spec, spec.head_dim, "head_dim")
      self.k_norm = norm(spec, spec.head_dim, "head_dim")
    elif spec.qk_norm == WHOLE:
      self.q_norm = norm(spec, width, "heads")
      self.k_norm = norm(spec, kv_width, "kv_heads")

  def __call__(self, x_BTD: jax.Array, ctx: Context) -> tuple[jax.Array, Any]:
    rows, length, _ = x_BTD.shape
    heads = lambda flat: flat.reshape(rows, length, -1, self.spec.head_dim)
    q, k, v = self._project(x_BTD, ctx)
    if self.spec.qk_norm == WHOLE:
      q, k = self.q_norm(q), self.k_norm(k)
    q_BTHA, k_BTKA, v_BTKA = heads(q), heads(k), heads(v)
    if self.spec.qk_norm == PER_HEAD:
      q_BTHA, k_BTKA = self.q_norm(q_BTHA), self.k_norm(k_BTKA)
    q_BTHA, k_BTKA = (rope.rotate(x, ctx.cos, ctx.sin) for x in (q_BTHA, k_BTKA))
    out_BTHA, kept = ctx.attend(q_BTHA, k_BTKA, v_BTKA)
    return self.o(out_BTHA.reshape(rows, length, -1), ctx.dtype), kept

  def _project(self, x_BTD: jax.Array, ctx: Context) -> tuple[jax.Array, ...]:
    if self.qkv is None:
      parts = self.q, self.k, self.v
      return tuple(part(x_BTD, ctx.dtype, ctx.inner) for part in parts)
    return self.qkv(x_BTD, ctx.dtype, first=self.o.kernel.get_value().shape[0])


class LatentAttention(nnx.Module):
  """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, §2.1).

  Keys and values of all heads are products of one vector per token, of width
  ``kv_rank``, and a rotated key that the heads share. Both together are cached. A
  decode step does not expand them: it takes the expanding product into the
  query, so that all heads attend to one key, and expands the result.
  """

  def __init__(self, spec: ModelSpec, *, rngs: nnx.Rngs):
    self.spec, self.dims = spec, spec.latent
    dims, heads = self.dims, spec.num_heads
    std, out_std = stds(spec)

    def column(size: int, inner: int, axis: str | None, bias: bool) -> Projection:
      return Projection(size, inner, axis, kind="column", bias=bias, std=std, rngs=rngs)

    q_width = heads * (dims.nope_dim + dims.rope_dim)
    if dims.q_rank is None:
      self.q = column(q_width, spec.hidden_size, "heads", False)
    else:
      self.q_down = column(dims.q_rank, spec.hidden_size, None, spec.qkv_bias)
      self.q_norm = RMSNorm(dims.q_rank, 1e-6, None)
      self.q = column(q_width, dims.q_rank, "heads", False)
    width = dims.kv_rank + dims.rope_dim
    self.kv_down = column(width, spec.hidden_size, None, spec.qkv_bias)
    self.kv_norm = RMSNorm(dims.kv_rank, 1e-6, None)
    self.kv = column(heads * (dims.nope_dim + dims.v_dim), dims.kv_rank, "heads", False)
    self.o = Projection(
      heads * dims.v_dim,
      spec.hidden_size,
      "heads",
      kind="row",
      bias=spec.out_bias,
      std=out_std,
      rngs=rngs,
    )

  def __call__(self, x_BTD: jax.Array, ctx: Context) -> tuple[jax.Array, Any]:
    dims = self.dims
    q_BTHA = self._queries(x_BTD, ctx)
    latent_BTR, shared_BTA = jnp.split(
      self.kv_down(x_BTD, ctx.dtype), [dims.kv_rank], axis=-1
    )
    rotate = lambda x: rope.rotate(
      x, ctx.cos, ctx.sin, interleaved=self.spec.rope.interleaved
    )
    nope, rotated = jnp.split(q_BTHA, [dims.nope_dim], axis=-1)
    rotated, shared_BT1A = rotate(rotated), rotate(shared_BTA[:, :, None])
    latent_BTR = self.kv_norm(latent_BTR)
    cached_BT1R = jnp.concatenate([latent_BTR[:, :, None], shared_BT1A], axis=-1)
    if ctx.decoding:
      absorbed = self._absorb(nope, ctx.dtype)
      out, kept = ctx.attend(
        jnp.concatenate([absorbed, rotated], -1), cached_BT1R, None, v_dim=dims.kv_rank
      )
      out = self._expand_values(out, ctx.dtype)
    else:
      k, v = self._expand(latent_BTR, shared_BT1A, ctx.dtype)
      out, kept = ctx.attend(
        jnp.concatenate([nope, rotated], -1), k, v, keep=(cached_BT1R,)
      )
    return self.o(out.reshape(*x_BTD.shape[:2], -1), ctx.dtype), kept

  def _queries(self, x_BTD: jax.Array, ctx: Context) -> jax.Array:
    if self.dims.q_rank is not None:
      x_BTD = self.q_norm(self.q_down(x_BTD, ctx.dtype))
    return self.q(x_BTD, ctx.dtype).reshape(*x_BTD.shape[:2], self.spec.num_heads, -1)

  def _expand(self, latent_BTR, shared_BT1A, dtype) -> tuple[jax.Array, jax.Array]:
    """Keys and values of every head."""
    rows, length, _ = latent_BTR.shape
    both = self.kv(latent_BTR, dtype).reshape(rows, length, self.spec.num_heads, -1)
    nope, v = jnp.split(both, [self.dims.nope_dim], axis=-1)
    shared = jnp.broadcast_to(shared_BT1A, (*nope.shape[:-1], shared_BT1A.shape[-1]))
    return jnp.concatenate([nope, shared], -1), v

  def _absorb(self, nope_BTHA: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Queries of keys -> queries of the latents."""
    kernel_HAR = self._kernel()[:, : self.dims.nope_dim]
    return matmul.product(nope_BTHA, kernel_HAR, "bthn,hnr->bthr", dtype)

  def _expand_values(self, latent_BTHR: jax.Array, dtype: jnp.dtype) -> jax.Array:
    kernel_HAR = self._kernel()[:, self.dims.nope_dim :]
    return matmul.product(latent_BTHR, kernel_HAR, "bthr,hvr->bthv", dtype)

  def _kernel(self) -> jax.Array:
    kernel = self.kv.kernel.get_value()
    return kernel.reshape(self.spec.num_heads, -1, kernel.shape[-1])
