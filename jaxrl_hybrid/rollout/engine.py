"""The rollout engine: prompts in, token ids and log-probs out.

Prompts are prefilled once and their keys and values shared by the n samples;
then all rows of a wave decode in one compiled loop until the last is done.
Lengths are bucketed so that the number of compiled programs stays small.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxrl_hybrid.models.decoder import Decoder
from jaxrl_hybrid.models.params import Params
from jaxrl_hybrid.parallel import multihost
from jaxrl_hybrid.parallel.rules import Layout
from jaxrl_hybrid.rollout import sampling as sampling_lib
from jaxrl_hybrid.rollout.sampling import Sampling
from jaxrl_hybrid.shapes import bucket, round_up


@dataclasses.dataclass(frozen=True)
class Completions:
  """What the engine produced, rows ordered prompt by prompt, n each.

  Attributes:
    ids: int32 ``[N, R]``, right-padded with 0.
    lengths: int32 ``[N]``, the EOS included.
    log_probs: float32 ``[N, R]`` at the temperature, full vocabulary.
    stopped: bool ``[N]``, whether an EOS was sampled.
  """

  ids: np.ndarray
  lengths: np.ndarray
  log_probs: np.ndarray
  stopped: np.ndarray


class Engine:
  """Static-wave generation on the generation mesh.

  Args:
    decoder: the model, with ``constrain`` of the generation layout.
    layout: the generation layout.
    eos_ids: ids that end a row.
    max_rows: rows that decode together; more prompts go in several waves.
    seed: of all random numbers.
  """

  def __init__(
    self,
    decoder: Decoder,
    layout: Layout,
    *,
    eos_ids: Sequence[int],
    max_rows: int,
    seed: int,
  ):
    self.decoder = decoder
    self._layout = layout
    self._eos_ids = np.array(sorted(eos_ids), np.int32)
    self._max_rows = max_rows
    self._seed = seed
    self._wave = jax.jit(
      self._generate_wave,
      static_argnames=("n", "max_new", "sampling"),
      out_shardings=layout.replicated,
    )

  def generate(
    self,
    params: Params,
    prompts: Sequence[np.ndarray],
    draw_ids: Sequence[int],
    *,
    n: int,
    max_new: int,
    sampling: Sampling,
  ) -> Completions:
    """Generates n completions of each prompt.

    Args:
      params: generation tree.
      prompts: token ids of each prompt, at least one token.
      draw_ids: one per prompt; with the sample id they key the random numbers.
      n: samples per prompt.
      max_new: most tokens per completion.
      sampling: temperature, top-k, top-p.

    Returns:
      ``Completions`` of ``len(prompts) * n`` rows.
    """
    per_wave = self.prompts_per_wave(len(prompts), n)
    width = bucket(max(len(p) for p in prompts))
    waves = []
    for start in range(0, len(prompts), per_wave):
      chunk = slice(start, start + per_wave)
      tokens, lengths = _pad_prompts(prompts[chunk], per_wave, width)
      draws = np.zeros((per_wave,), np.uint32)
      draws[: len(draw_ids[chunk])] = np.asarray(draw_ids[chunk], np.uint32)
      real = np.arange(per_wave) < len(prompts[chunk])
      host = (tokens, lengths, draws, real)
      rows = [multihost.put(x, self._rows_sharding(x.shape)) for x in host]
      waves.append(self._wave(params, *rows, n=n, max_new=max_new, sampling=sampling))
    ids, lengths, log_probs, stopped = (
      np.concatenate(parts)[: len(prompts) * n]
      for parts in zip(*multihost.fetch(waves), strict=True)
    )
    used = int(lengths.max())
    return Completions(ids[:, :used], lengths, log_probs[:, :used], stopped)

  def _rows_sharding(self, shape: tuple[int, ...]) -> NamedSharding:
    """Of ``[U, ...]``, U split over the batch axes."""
    return self._layout.sharding(("batch", None)[: len(shape)], shape)

  def prompts_per_wave(self, prompts: int, n: int) -> int:
    """How many prompts decode together, a multiple of the batch shards."""
    wanted = max(1, min(self._max_rows // n, prompts))
    return round_up(wanted, self._layout.batch_shards)

  def lower(
    self,
    params: Params,
    prompts: int,
    width: int,
    *,
    n: int,
    max_new: int,
    sampling: Sampling,
  ) -> jax.stages.Lowered:
    """The program of one wave ahead of time; ``params`` may be shapes."""
    rows = self.prompts_per_wave(prompts, n)
    shapes = ((rows, bucket(width)), np.int32), ((rows,), np.int32)
    shapes += ((rows,), np.uint32), ((rows,), bool)
    host = [
      jax.ShapeDtypeStruct(shape, dtype, sharding=self._rows_sharding(shape))
      for shape, dtype in shapes
    ]
    return self._wave.lower(
      params,
      *host,
      n=n,
      max_new=max_new,
      sampling=sampling,
    )

  def _generate_wave(
    self,
    params,
    tokens_UP,
    lengths_U,
    draws_U,
    real_U,
    *,
    n: int,
    max_new: int,
    sampling: Sampling,
  ):
    """U prompts, B = U * n rows, in one program."""
    tokens_UP = self._layout.constrain(tokens_UP, ("batch", None))
    hidden_UPD, caches = self.decoder.prefill(params, tokens_UP)
    hidden_UD = jnp.take_along_axis(hidden_UPD, (lengths_U - 1)[:, None, None], 1)[:, 0]
    share = functools.partial(
      jnp.repeat, repeats=n, axis=0, total_repeat_length=tokens_UP.shape[0] * n
    )
    prompt_lengths_B, hidden_BD = share(lengths_U), share(hidden_UD)
    caches = [tuple(self._cache(x, n, max_new) for x in kv) for kv in caches]
    sample_ids_B = jnp.tile(jnp.arange(n, dtype=jnp.uint32), tokens_UP.shape[0])
    keys_B = sampling_lib.row_keys(
      jax.random.key(self._seed), share(draws_U), sample_ids_B
    )

    def pick(hidden_BD, step):
      logits_BV = self.decoder.logits(params, hidden_BD)
      # The product where the head's shards are, then the logits gathered: XLA would
      # gather the head at every token instead.
      for axes in (("batch", "vocab"), ("batch", None)):
        logits_BV = self._layout.constrain(logits_BV, axes)
      uniform_B = sampling_lib.uniforms(keys_B, step)
      return sampling_lib.sample(logits_BV, uniform_B, sampling)

    return self._decode_loop(
      params, pick, hidden_BD, prompt_lengths_B, caches, ~share(real_U), max_new
    )

  def _decode_loop(
    self, params, pick, hidden_BD, prompt_lengths_B, caches, done_B, max_new
  ):
    rows = hidden_BD.shape[0]
    pin = lambda x: self._layout.constrain(x, ("batch", None)[: x.ndim])
    tokens_B, log_probs_B = pick(hidden_BD, 0)
    state = dict(
      step=jnp.int32(0),
      tokens=tokens_B,
      log_probs=log_probs_B,
      done=pin(done_B),
      stopped=pin(jnp.zeros((rows,), bool)),
      lengths=pin(jnp.zeros((rows,), jnp.int32)),
      caches=caches,
      ids_out=pin(jnp.zeros((rows, max_new), jnp.int32)),
      log_probs_out=pin(jnp.zeros((rows, max_new), jnp.float32)),
    )

    def record(s):
      """Writes the sampled token of the rows that are still running."""
      step, running = s["step"], ~s["done"]
      write = lambda out, x: out.at[:, step].set(jnp.where(running, x, 0))
      stopped = running & jnp.isin(s["tokens"], self._eos_ids)
      return s | dict(
        ids_out=write(s["ids_out"], s["tokens"]),
        log_probs_out=write(s["log_probs_out"], s["log_probs"]),
        lengths=s["lengths"] + running,
        stopped=s["stopped"] | stopped,
        done=s["done"] | stopped,
        step=step + 1,
      )

    def advance(s):
      """Runs the model on the recorded token and samples the next."""
      positions_B = prompt_lengths_B + s["step"] - 1
      hidden_BD, caches = self.decoder.decode(
        params, s["tokens"], positions_B, s["caches"]
      )
      tokens_B, log_probs_B = pick(hidden_BD, s["step"])
      return record(s | dict(tokens=tokens_B, log_probs=log_probs_B, caches=caches))

    s = jax.lax.while_loop(
      lambda s: (s["step"] < max_new) & ~jnp.all(s["done"]), advance, record(state)
    )
    return s["ids_out"], s["lengths"], s["log_probs_out"], s["stopped"]

  def _cache(self, kv_UPKA: jax.Array, n: int, max_new: int) -> jax.Array:
    """Keys or values of the prompts, for n samples each and max_new tokens more."""
    batch = kv_UPKA.ndim - 4  # with generation stages they come first
    shared = jnp.repeat(kv_UPKA, n, axis=batch)
    pads = [(0, max_new) if i == batch + 1 else (0, 0) for i in range(shared.ndim)]
    axes = ("layers",) * batch + ("batch", None, "heads", None)
    return self._layout.constrain(jnp.pad(shared, pads), axes)


def _pad_prompts(
  prompts: Sequence[np.ndarray], rows: int, width: int
) -> tuple[np.ndarray, np.ndarray]:
  """Right-padded int32 ``[rows, width]`` and lengths; filler rows have length 1."""
  tokens = np.zeros((rows, width), np.int32)
  lengths = np.ones((rows,), np.int32)
  for i, ids in enumerate(prompts):
    tokens[i, : len(ids)] = ids
    lengths[i] = len(ids)
  return tokens, lengths
