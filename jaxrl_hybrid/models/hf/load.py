"""HF safetensors straight into sharded parameters.

Each device's shard is read from the memory-mapped file by itself, so a process
never holds a whole tensor that it does not need.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxrl_hybrid.errors import ModelError
from jaxrl_hybrid.models import params as params_lib
from jaxrl_hybrid.models.hf import names
from jaxrl_hybrid.models.params import Params
from jaxrl_hybrid.models.spec import ModelSpec
from jaxrl_hybrid.parallel import multihost

FLOAT_DTYPES = {
  "F64": jnp.float64,
  "F32": jnp.float32,
  "F16": jnp.float16,
  "BF16": jnp.bfloat16,
}
INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"


class Checkpoint(contextlib.AbstractContextManager):
  """The tensors of an HF directory by name, single file or sharded index."""

  def __init__(self, path: str | Path):
    self.path = Path(path)
    self._stack = contextlib.ExitStack()
    self._handles = {
      name: handle
      for file in self._files()
      for handle in [self._open(file)]
      for name in handle.keys()
    }

  def __exit__(self, *exc: object) -> None:
    self._stack.close()

  def __contains__(self, name: str) -> bool:
    return name in self._handles

  def names(self) -> set[str]:
    """All tensor names."""
    return set(self._handles)

  def slice(self, name: str):
    """A lazily read tensor: index it to read; ``get_shape``, ``get_dtype``."""
    return self._handles[name].get_slice(name)

  def dtype(self, name: str) -> jnp.dtype:
    """Of a float tensor."""
    return jnp.dtype(FLOAT_DTYPES[self.slice(name).get_dtype()])

  def _files(self) -> list[Path]:
    index = self.path / INDEX_FILE
    if index.is_file():
      try:
        mapping = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return [self.path / name for name in sorted(set(mapping.values()))]
      except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: not a readable index: {error!r}") from error
    if (self.path / SINGLE_FILE).is_file():
      return [self.path / SINGLE_FILE]
    found = sorted(p.name for p in self.path.glob("*") if p.is_file())
    raise ModelError(
      f"{self.path}: expected {SINGLE_FILE} or {INDEX_FILE}, found {found}; "
      "pickled weights (.bin, .pt) are never read, save them as safetensors"
    )

  def _open(self, file: Path):
    try:
      return self._stack.enter_context(safe_open(file, framework="np"))
    except (OSError, SafetensorError) as error:
      raise ModelError(f"{file}: not a readable safetensors file: {error}") from error


def load_params(
  path: str | Path,
  spec: ModelSpec,
  shardings: Params,
  *,
  vocab: int,
  head: str = params_lib.LM,
  fresh_head: bool = True,
  dtype: jnp.dtype = jnp.float32,
) -> Params:
  """Reads a model into ``shardings``, in ``dtype``.

  Args:
    path: HF directory.
    spec: what the directory's config says.
    shardings: tree of the parameters' shardings.
    vocab: padded vocabulary size; padding rows are zeros.
    head: ``VALUE`` leaves out the LM head and takes the score head of a sequence
      classifier, or where there is none a fresh one.
    fresh_head: False: it is an error that there is none.
    dtype: of the parameters.

  Raises:
    ModelError: a tensor is missing, left over or of another shape; a score head
      with a bias or of several labels.
  """
  abstract = params_lib.abstract_params(spec, vocab=vocab, head=head)
  params: Params = {}
  with Checkpoint(path) as checkpoint:
    wanted = list(names.leaves(spec, abstract))
    if head == params_lib.VALUE and not _has_score_head(checkpoint, spec):
      if not fresh_head:
        raise ModelError(
          f"{checkpoint.path}: expected a sequence classifier with a score head "
          f"({names.SCORE}), got none: a causal LM gives no rewards"
        )
      wanted = [leaf for leaf in wanted if leaf.names != (names.SCORE,)]
      put = lambda x, sharding: multihost.put(np.asarray(x), sharding)
      fresh = params_lib.init_value_head(spec)
      params["value_head"] = jax.tree.map(put, fresh, shardings["value_head"])
    _check_names(checkpoint, wanted, spec, head)
    for leaf in wanted:
      shape = names.get(abstract, leaf.path).shape
      _check_tensors(checkpoint, leaf, leaf.tensor_shape(shape, spec.vocab_size))
      sharding = names.get(shardings, leaf.path)
      names.put(params, leaf.path, _read(checkpoint, leaf, shape, sharding, dtype))
  return params


def _has_score_head(checkpoint: Checkpoint, spec: ModelSpec) -> bool:
  """Whether there is a score head; it must be one that the decoder has."""
  found = sorted(n for n in checkpoint.names() if n.startswith(names.SCORE_PREFIX))
  shapes = {name: tuple(checkpoint.slice(name).get_shape()) for name in found}
  if found and shapes != {names.SCORE: (1, spec.hidden_size)}:
    raise ModelError(
      f"{checkpoint.path}: expected a score head {names.SCORE} of shape "
      f"{(1, spec.hidden_size)} (num_labels=1) without a bias, got {shapes}"
    )
  return bool(found)


def _read(checkpoint, leaf: names.Leaf, shape, sharding, dtype) -> jax.Array:
  """One leaf, shard by shard: each is filled tensor by tensor."""
  lead = shape[: leaf.lead]
  tensors = np.array([checkpoint.slice(name) for name in leaf.names], object)
  tensors = tensors.reshape(lead)

  def read_shard(index: tuple[slice, ...]) -> np.ndarray:
    ranges = [range(*i.indices(n)) for i, n in zip(index, shape, strict=True)]
    shard = np.zeros([len(r) for r in ranges], dtype)
    for place in np.ndindex(*map(len, ranges[: leaf.lead])):
      which = tuple(r[i] for r, i in zip(ranges, place, strict=False))
      _fill(shard[place], tensors[which], leaf, ranges[leaf.lead :])
    return shard

  return jax.make_array_from_callback(shape, sharding, read_shard)


def _fill(out: np.ndarray, tensor, leaf: names.Leaf, ranges: list[range]) -> None:
  """Copies what ``ranges`` of our tensor are; rows that HF does not have stay 0."""
  if leaf.transposed:
    out, ranges = out.T, ranges[::-1]
  rows = leaf.rows.indices(tensor.get_shape()[0])
  start, stop = (min(rows[0] + i, rows[1]) for i in (ranges[0].start, ranges[0].stop))
  if stop > start:
    rest = tuple(slice(r.start, r.stop) for r in ranges[1:])
    out[: stop - start] = tensor[(slice(start, stop), *rest)]


def _check_names(checkpoint, wanted, spec: ModelSpec, head: str) -> None:
  expected = {name for leaf in wanted for name in leaf.names}
  missing = sorted(expected - checkpoint.names())
  extra = {
    name
    for name in checkpoint.names() - expected
    if not name.endswith(names.DERIVED_SUFFIXES)
  }
  extra -= {name for name in extra if _is_beyond(name, spec)}
  if "lm_head.weight" in extra:
    extra.discard("lm_head.weight")
    if head == params_lib.LM and "model.embed_tokens.weight" in checkpoint:
      _check_tied_head(checkpoint)
  if missing or extra:
    raise ModelError(
      f"{checkpoint.path} does not match its config ({spec.family}, "
      f"{spec.num_layers} layers): missing {missing[:4]}"
      f"{'…' if len(missing) > 4 else ''} ({len(missing)}), left over "
      f"{sorted(extra)[:4]}{'…' if len(extra) > 4 else ''} ({len(extra)})"
    )


def _check_tied_head(checkpoint) -> None:
  """A tied checkpoint may hold the head a second time, but not another one."""
  head = np.asarray(checkpoint.slice("lm_head.weight")[:])
  if not np.array_equal(
    head, np.asarray(checkpoint.slice("model.embed_tokens.weight")[:])
  ):
    raise ModelError(
      f"{checkpoint.path}: tie_word_embeddings is true but lm_head.weight "
      "differs from the embedding; expected equal tensors, or "
      "tie_word_embeddings=false in config.json"
    )


def _is_beyond(name: str, spec: ModelSpec) -> bool:
  """Layers behind the last one predict further tokens; transformers drops them too."""
  parts = name.split(".")
  return spec.family == "deepseek_v3" and (
    parts[:2] == ["model", "layers"]
    and parts[2].isdigit()
    and int(parts[2]) >= spec.num_layers
  )


def _check_tensors(checkpoint, leaf: names.Leaf, shape: tuple[int, ...]) -> None:
  for name in leaf.names:
    tensor = checkpoint.slice(name)
    if tensor.get_dtype() not in FLOAT_DTYPES:
      raise ModelError(
        f"{checkpoint.path}: {name} is stored as {tensor.get_dtype()}; expected one "
        f"of {tuple(FLOAT_DTYPES)} (quantized checkpoints are not supported)"
      )
    if tuple(tensor.get_shape()) != shape:
      raise ModelError(
        f"{checkpoint.path}: {name} has shape {tuple(tensor.get_shape())}, the config "
        f"says {shape}"
      )
