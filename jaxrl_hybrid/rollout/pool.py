"""The device's side of continuous batching: a pool of slots and its programs.

A pool is a KV cache ``[B, S, K, A]`` per layer and a few numbers per slot. Its
programs prefill prompts, copy their keys and values into slots, decode all slots
until enough rows have ended, and move the last rows into a smaller pool. A slot
that has no row decodes token 0 at position 0; what it writes there, the next row
overwrites. All of it is local to a batch shard, so no program sends keys or values
from one to another.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxrl_hybrid.models.decoder import Decoder
from jaxrl_hybrid.models.params import Params
from jaxrl_hybrid.parallel.rules import Axes, Layout
from jaxrl_hybrid.rollout import sampling as sampling_lib
from jaxrl_hybrid.rollout.sampling import Sampling

RUNNING, STOPPED, FULL = 0, 1, 2  # how a row stands: going on, EOS, at its limit

# {"caches": ..., "rows": {name: [B, ...]}}
Pool = dict[str, Any]
_PER_ROW = {
  "token": jnp.int32,  # that the next step feeds
  "position": jnp.int32,  # of that token
  "step": jnp.int32,  # response position of the token that it predicts
  "left": jnp.int32,  # tokens that the row may still get; 0: no row
}


@dataclasses.dataclass(frozen=True)
class Programs:
  """What the engine compiles.

  Attributes:
    decoder: the model, with ``constrain`` of the generation layout.
    layout: the generation layout.
    eos_ids: ids that end a row.
    seed: of all random numbers.
    chunk: most tokens per row in one decode call.
  """

  decoder: Decoder
  layout: Layout
  eos_ids: tuple[int, ...]
  seed: int
  chunk: int

  def prefill(self, params: Params, tokens_UP: jax.Array) -> Any:
    """Keys and values ``[U, P, K, A]`` of each layer."""
    tokens_UP = self._pin(tokens_UP)
    _, caches = self.decoder.prefill(params, tokens_UP)
    return self._pin_caches(caches)

  def extend(
    self, params: Params, caches: Any, tokens_UC: jax.Array, start: jax.Array
  ) -> Any:
    """``prefill`` in parts: C tokens more, from position ``start`` on."""
    caches = self.decoder.extend(params, self._pin(tokens_UC), start, caches)
    return self._pin_caches(caches)

  def empty(self, kv: Any, slots: int, length: int, *, vocab: int | None) -> Pool:
    """A pool of B slots of S tokens.

    Args:
      kv: caches of prompts, or their shapes.
      slots: B.
      length: S.
      vocab: V, if tokens that a row has are remembered.
    """
    rows = {name: jnp.zeros((slots,), dtype) for name, dtype in _PER_ROW.items()}
    rows["key"] = jnp.zeros((slots, 2), jnp.uint32)
    if vocab:
      rows["seen"] = jnp.zeros((slots, vocab), bool)
    return self._pin_pool({"caches": self.blank(kv, slots, length), "rows": rows})

  def blank(self, kv: Any, rows: int, length: int) -> Any:
    """Caches as ``kv``, of other sizes, with zeros."""

    def zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
      *stages, _, _, heads, width = x.shape
      return jnp.zeros((*stages, rows, length, heads, width), x.dtype)

    return self._pin_caches(jax.tree.map(zeros, kv))

  def admit(self, pool: Pool, kv: Any, entries: dict[str, jax.Array]) -> Pool:
    """Prompts' keys and values, and rows that start from them, into slots.

    Args:
      pool: to write into.
      kv: caches of prompts, U / G on each of G shards.
      entries: ``[G, E]``, of each shard: ``slot`` and ``place`` there (a slot that
        does not exist: no row), ``draw`` and ``sample`` ids, and the state of the
        row; with a repetition penalty the prompt's tokens ``[G, E, P]``.
    """
    entries = dict(entries)
    draws, samples = (entries.pop(name) for name in ("draw", "sample"))
    fold = jax.vmap(functools.partial(sampling_lib.row_keys, jax.random.key(self.seed)))
    entries["key"] = jax.random.key_data(fold(draws, samples))

    def local(pool: Pool, kv: Any, entries: dict[str, jax.Array]) -> Pool:
      entries = {name: x[0] for name, x in entries.items()}
      slots, places = entries.pop("slot"), entries.pop("place")
      rows = dict(pool["rows"])
      if "seen" in rows:
        seen = _mentioned(entries.pop("prompt"), rows["seen"].shape[1])
        rows["seen"] = rows["seen"].at[slots].set(seen, mode="drop")
      for name, x in entries.items():
        rows[name] = rows[name].at[slots].set(x.astype(rows[name].dtype), mode="drop")
      insert = functools.partial(_insert, slots=slots, places=places)
      return {"caches": jax.tree.map(insert, pool["caches"], kv), "rows": rows}

    specs = self._pool_specs(pool)
    return jax.shard_map(
      local,
      mesh=self.layout.mesh,
      in_specs=(specs, self._cache_specs(kv), self._specs(entries)),
      out_specs=specs,
      check_vma=False,
    )(pool, kv, entries)

  def shrink(self, pool: Pool, sources_GN: jax.Array) -> Pool:
    """A pool of N slots per shard: those of the indices, on the same shard."""

    def local(pool: Pool, sources_1N: jax.Array) -> Pool:
      take = lambda x: jnp.take(x, sources_1N[0], _batch_axis(x))
      rows = {name: x[sources_1N[0]] for name, x in pool["rows"].items()}
      return {"caches": jax.tree.map(take, pool["caches"]), "rows": rows}

    shards, slots = sources_GN.shape
    smaller = jax.eval_shape(lambda: self._resized(pool, shards * slots))
    return jax.shard_map(
      local,
      mesh=self.layout.mesh,
      in_specs=(self._pool_specs(pool), self._specs({"": sources_GN})[""]),
      out_specs=self._pool_specs(smaller),
      check_vma=False,
    )(pool, sources_GN)

  def decode(
    self,
    params: Params,
    pool: Pool,
    running_B: jax.Array,
    limit: jax.Array,
    stop_at: jax.Array,
    *,
    sampling: Sampling,
  ) -> tuple[Pool, dict[str, jax.Array]]:
    """Tokens for all rows, until ``stop_at`` of them end or ``limit`` steps are done.

    Args:
      params: generation tree.
      pool: the slots.
      running_B: which slots have a row; what is in others is forgotten.
      limit: at most C.
      stop_at: rows that end before the call returns.
      sampling: what to draw from.

    Returns:
      (pool, ``ids`` and ``log_probs`` ``[C, B]`` of which row b has the first
      ``count[b]``, and ``finish[b]``: one of RUNNING, STOPPED, FULL).
    """
    slots = running_B.shape[0]
    rows = pool["rows"] | {"left": jnp.where(running_B, pool["rows"]["left"], 0)}
    steps_CB = (self.chunk, slots)
    pin_steps = lambda x: self.layout.constrain(x, (None, "batch"))
    state = dict(
      pool={"caches": pool["caches"], "rows": rows},
      step=jnp.int32(0),
      ids=pin_steps(jnp.zeros(steps_CB, jnp.int32)),
      log_probs=pin_steps(jnp.zeros(steps_CB, jnp.float32)),
      count=self._pin(jnp.zeros((slots,), jnp.int32)),
      finish=self._pin(jnp.zeros((slots,), jnp.int32)),
    )

    def going_on(s: dict[str, Any]) -> jax.Array:
      enough = jnp.sum(s["finish"] > RUNNING) >= stop_at
      return (s["step"] < limit) & ~enough & jnp.any(s["pool"]["rows"]["left"] > 0)

    def advance(s: dict[str, Any]) -> dict[str, Any]:
      rows = s["pool"]["rows"]
      hidden_BD, caches = self.decoder.decode(
        params, rows["token"], rows["position"], s["pool"]["caches"]
      )
      tokens_B, log_probs_B = self._pick(params, hidden_BD, rows, sampling)
      active = rows["left"] > 0
      stopped = active & jnp.isin(tokens_B, np.array(self.eos_ids, np.int32))
      rows, finish = _advance(rows, tokens_B, active, stopped, s["finish"])
      return dict(
        pool={"caches": caches, "rows": jax.tree.map(self._pin, rows)},
        step=s["step"] + 1,
        ids=s["ids"].at[s["step"]].set(tokens_B),
        log_probs=s["log_probs"].at[s["step"]].set(log_probs_B),
        count=s["count"] + active,
        finish=finish,
      )

    s = jax.lax.while_loop(going_on, advance, state)
    told = {name: s[name] for name in ("ids", "log_probs", "count", "finish")}
    return self._pin_pool(s["pool"]), told

  def _pick(
    self,
    params: Params,
    hidden_BD: jax.Array,
    rows: dict[str, jax.Array],
    sampling: Sampling,
  ) -> tuple[jax.Array, jax.Array]:
    logits_BV = self.decoder.logits(params, hidden_BD)
    # The product where the head's shards are, then the logits gathered: XLA would
    # gather the head at every token instead.
    for axes in (("batch", "vocab"), ("batch", None)):
      logits_BV = self.layout.constrain(logits_BV, axes)
    uniform_B = sampling_lib.uniforms(
      jax.random.wrap_key_data(rows["key"]), rows["step"]
    )
    return sampling_lib.sample(logits_BV, uniform_B, sampling, rows.get("seen"))

  def pool_shardings(self, pool: Pool) -> Any:
    """Of a pool or of its shapes."""
    place = lambda spec: jax.sharding.NamedSharding(self.layout.mesh, spec)
    is_spec = lambda x: isinstance(x, PartitionSpec)
    return jax.tree.map(place, self._pool_specs(pool), is_leaf=is_spec)

  def cache_shardings(self, caches: Any) -> Any:
    """Of caches or of their shapes."""
    return jax.tree.map(lambda x: self.layout.sharding(_cache_axes(x), x.shape), caches)

  def _resized(self, pool: Pool, slots: int) -> Pool:
    length = jax.tree.leaves(pool["caches"])[0].shape[-3]
    vocab = pool["rows"]["seen"].shape[1] if "seen" in pool["rows"] else None
    return self.empty(pool["caches"], slots, length, vocab=vocab)

  def _pin(self, x: jax.Array) -> jax.Array:
    return self.layout.constrain(x, _row_axes(x))

  def _pin_caches(self, caches: Any) -> Any:
    return jax.tree.map(lambda x: self.layout.constrain(x, _cache_axes(x)), caches)

  def _pin_pool(self, pool: Pool) -> Pool:
    rows = jax.tree.map(self._pin, pool["rows"])
    return {"caches": self._pin_caches(pool["caches"]), "rows": rows}

  def _specs(self, rows: dict[str, jax.Array]) -> dict[str, PartitionSpec]:
    return {
      name: self.layout.sharding(_row_axes(x), x.shape).spec for name, x in rows.items()
    }

  def _cache_specs(self, caches: Any) -> Any:
    return jax.tree.map(
      lambda x: self.layout.sharding(_cache_axes(x), x.shape).spec, caches
    )

  def _pool_specs(self, pool: Pool) -> Any:
    return {
      "caches": self._cache_specs(pool["caches"]),
      "rows": self._specs(pool["rows"]),
    }


def _advance(
  rows: dict[str, jax.Array],
  tokens_B: jax.Array,
  active: jax.Array,
  stopped: jax.Array,
  finish: jax.Array,
) -> tuple[dict[str, jax.Array], jax.Array]:
  """The rows with one token more, and how they stand."""
  left = jnp.where(stopped, 0, rows["left"] - active)
  ended = active & (left == 0)
  moved = {
    "token": jnp.where(left > 0, tokens_B, 0),
    "position": jnp.where(left > 0, rows["position"] + 1, 0),
    "step": rows["step"] + active,
    "left": left,
  }
  if "seen" in rows:
    index = jnp.arange(tokens_B.shape[0])
    moved["seen"] = rows["seen"].at[index, tokens_B].max(active)
  how = jnp.where(stopped, STOPPED, FULL)
  return rows | moved, jnp.where(ended, how, finish)


def _insert(
  cache: jax.Array, kv: jax.Array, *, slots: jax.Array, places: jax.Array
) -> jax.Array:
  """``kv`` at ``places`` into the first positions of ``slots``, on one shard."""
  axis = _batch_axis(cache)
  index = (slice(None),) * axis + (slots, slice(0, kv.shape[axis + 1]))
  return cache.at[index].set(jnp.take(kv, places, axis, mode="clip"), mode="drop")


def _mentioned(tokens_EP: jax.Array, vocab: int) -> jax.Array:
  """bool ``[E, V]``: the ids of each row; those out of range are not there."""
  blank = jnp.zeros((vocab,), bool)
  return jax.vmap(lambda ids: blank.at[ids].set(True, mode="drop"))(tokens_EP)


def _batch_axis(cache: jax.Array) -> int:
  return cache.ndim - 4  # with generation stages they come first


def _cache_axes(cache: Any) -> Axes:
  return ("layers",) * _batch_axis(cache) + ("batch", None, "heads", None)


def _row_axes(x: Any) -> Axes:
  return ("batch", *(None,) * (x.ndim - 1))
