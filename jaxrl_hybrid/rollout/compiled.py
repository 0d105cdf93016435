"""The engine's compiled programs: one per size, counted and timed."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxrl_hybrid.models.params import Params
from jaxrl_hybrid.parallel import abstract, multihost
from jaxrl_hybrid.rollout.pool import Pool, Programs
from jaxrl_hybrid.rollout.sampling import Sampling

# Decoding multiplies few rows with large weights: cuBLAS is faster than XLA's Triton
# kernels there (measured: docs/performance.md).
_DECODE_ON_GPU = {"xla_gpu_enable_triton_gemm": False}


class CompiledPrograms:
  """``pool.Programs``, each compiled once per size of its arguments.

  Attributes:
    seconds: spent on first calls, compilation for the most part.
  """

  def __init__(self, programs: Programs):
    self.programs = programs
    self.seconds = 0.0
    self._found: dict[Any, Callable[..., Any]] = {}
    platform = programs.layout.mesh.devices.flat[0].platform
    self._decode_options = _DECODE_ON_GPU if platform in ("gpu", "cuda") else None

  @property
  def count(self) -> int:
    """Programs compiled so far."""
    return len(self._found)

  def prefill(self, params: Params, tokens_UP: np.ndarray) -> Any:
    """``Programs.prefill``; U split over the batch shards."""
    key = ("prefill", tokens_UP.shape)
    return self._call(key, self._prefill, params, self.put(tokens_UP))

  def extend(
    self, params: Params, caches: Any, tokens_UC: np.ndarray, start: int
  ) -> Any:
    """``Programs.extend``; the caches are used up."""
    key = ("extend", tokens_UC.shape, _sizes(caches))
    return self._call(
      key, self._extend, params, caches, self.put(tokens_UC), np.int32(start)
    )

  def blank(self, params: Params, rows: int, length: int) -> Any:
    """Empty caches of prompts."""
    make = functools.partial(self.programs.blank, self._kv(params), rows, length)
    shardings = self.programs.cache_shardings(jax.eval_shape(make))
    key = ("empty prompts", rows, length)
    return self._call(key, lambda: jax.jit(make, out_shardings=shardings))

  def new_pool(
    self, params: Params, slots: int, length: int, sampling: Sampling
  ) -> Pool:
    """An empty pool."""
    make, shardings = self._pool(params, slots, length, sampling)
    key = ("empty pool", slots, length, sampling.penalizes)
    return self._call(key, lambda: jax.jit(make, out_shardings=shardings))

  def admit(self, pool: Pool, kv: Any, entries: dict[str, np.ndarray]) -> Pool:
    """``Programs.admit``; the pool is used up."""
    key = ("admit", _sizes(pool), _sizes(kv), entries["slot"].shape)
    entries = {name: self.put(x) for name, x in entries.items()}
    shardings = self.programs.pool_shardings(pool)
    make = lambda: jax.jit(
      self.programs.admit, donate_argnums=0, out_shardings=shardings
    )
    return self._call(key, make, pool, kv, entries)

  def shrink(self, pool: Pool, sources_GN: np.ndarray) -> Pool:
    """``Programs.shrink``."""
    key = ("shrink", _sizes(pool), sources_GN.shape)
    make = lambda: jax.jit(self.programs.shrink)
    return self._call(key, make, pool, self.put(sources_GN))

  def decode(
    self,
    params: Params,
    pool: Pool,
    running_B: np.ndarray,
    limit: int,
    stop_at: int,
    sampling: Sampling,
  ) -> tuple[Pool, dict[str, jax.Array]]:
    """``Programs.decode``; the pool is used up."""
    key = ("decode", _sizes(pool), sampling)
    make = lambda: self._decode(self.programs.pool_shardings(pool), sampling)
    numbers = np.int32(limit), np.int32(stop_at)
    return self._call(key, make, params, pool, self.put(running_B), *numbers)

  def lower_prefill(
    self, params: Params, places: int, width: int
  ) -> jax.stages.Lowered:
    """Ahead of time; ``params`` may be shapes."""
    return self._prefill().lower(params, self._shape((places, width), np.int32))

  def lower_decode(
    self, params: Params, slots: int, length: int, sampling: Sampling
  ) -> jax.stages.Lowered:
    """Ahead of time; ``params`` may be shapes."""
    make, shardings = self._pool(params, slots, length, sampling)
    place = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
    pool = jax.tree.map(place, jax.eval_shape(make), shardings)
    running = self._shape((slots,), np.bool_)
    number = jax.ShapeDtypeStruct((), np.int32)
    return self._decode(shardings, sampling).lower(
      params, pool, running, number, number
    )

  def slot_bytes(self, params: Params, length: int) -> int:
    """Of the cache of one slot, on the device that holds most."""
    shards = self.programs.layout.batch_shards
    make = functools.partial(self.programs.blank, self._kv(params), shards, length)
    shapes = jax.eval_shape(make)
    place = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
    return abstract.device_bytes(
      jax.tree.map(place, shapes, self.programs.cache_shardings(shapes))
    )

  def put(self, x: np.ndarray) -> jax.Array:
    """A host array ``[B, ...]`` or ``[G, ...]`` over the batch shards."""
    axes = ("batch", *(None,) * (x.ndim - 1))
    return multihost.put(x, self.programs.layout.sharding(axes, x.shape))

  def _prefill(self) -> Any:
    return jax.jit(self.programs.prefill)

  def _extend(self) -> Any:
    return jax.jit(self.programs.extend, donate_argnums=1)

  def _decode(self, pool_shardings: Any, sampling: Sampling) -> Any:
    return jax.jit(
      functools.partial(self.programs.decode, sampling=sampling),
      donate_argnums=1,
      out_shardings=(pool_shardings, self.programs.layout.replicated),
      compiler_options=self._decode_options,
    )

  def _pool(
    self, params: Params, slots: int, length: int, sampling: Sampling
  ) -> tuple[Callable[[], Pool], Any]:
    vocab = None
    if sampling.penalizes:
      vocab = self.programs.decoder.head(params).shape[0]
    make = functools.partial(
      self.programs.empty, self._kv(params), slots, length, vocab=vocab
    )
    return make, self.programs.pool_shardings(jax.eval_shape(make))

  def _kv(self, params: Params) -> Any:
    """Shapes of the caches of one token."""
    decoder = self.programs.decoder
    layers = [()] * decoder.spec.dense_layers
    layers += [(decoder.stages,) if decoder.stages > 1 else ()] * len(params["layers"])
    return [
      tuple(
        jax.ShapeDtypeStruct((*stages, 1, 1, *dims), decoder.dtype)
        for dims in decoder.cache_dims()
      )
      for stages in layers
    ]

  def _shape(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    axes = ("batch", *(None,) * (len(shape) - 1))
    sharding = self.programs.layout.sharding(axes, shape)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  def _call(self, key: Any, make: Callable[[], Any], *args: Any) -> Any:
    if key in self._found:
      return self._found[key](*args)
    start = time.perf_counter()
    self._found[key] = make()
    result = self._found[key](*args)
    seconds = time.perf_counter() - start
    self.seconds += seconds
    logging.info("rollout program %d: %s, %.1f s", self.count, _describe(key), seconds)
    return result


def _sizes(tree: Any) -> tuple[int, int, bool]:
  """What tells the programs of pools and caches apart: (rows, length, penalty)."""
  caches = tree["caches"] if isinstance(tree, dict) else tree
  rows, length = jax.tree.leaves(caches)[0].shape[-4:-2]
  return rows, length, isinstance(tree, dict) and "seen" in tree["rows"]


def _describe(key: Any) -> str:
  return " ".join(str(part) for part in key)
