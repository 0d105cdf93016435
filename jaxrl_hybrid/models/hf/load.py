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

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
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
  dtype: jnp.dtype = jnp.float32,
) -> Params:
  """Reads a causal LM into ``shardings``, in ``dtype``.

  Args:
    path: HF directory.
    spec: what the directory's config says.
    shardings: tree of the parameters' shardings.
    vocab: padded vocabulary size; padding rows are zeros.
    head: ``VALUE`` leaves out the LM head and adds a fresh value head.
    dtype: of the parameters.

  Raises:
    ModelError: a tensor is missing, left over or of another shape.
  """
  abstract = params_lib.abstract_params(spec, vocab=vocab, head=head)
  wanted = list(names.leaves(spec, abstract, head))
  params: Params = {}
  with Checkpoint(path) as checkpoint:
    _check_names(checkpoint, wanted, spec, head)
    for leaf in wanted:
      shape = names.get(abstract, leaf.path).shape
      _check_shape(checkpoint, leaf, shape, spec.vocab_size)
      for name in leaf.names:
        _check_dtype(checkpoint.path, name, checkpoint.slice(name).get_dtype())
      sharding = names.get(shardings, leaf.path)
      names.put(params, leaf.path, _read(checkpoint, leaf, shape, sharding, dtype))
  if head == params_lib.VALUE:
    fresh = params_lib.init_value_head(spec)
    place = lambda x, sharding: multihost.put(np.asarray(x), sharding)
    params["value_head"] = jax.tree.map(place, fresh, shardings["value_head"])
  return params


def _read(checkpoint, leaf, shape, sharding, dtype) -> jax.Array:
  tensors = [checkpoint.slice(name) for name in leaf.names]

  def read_shard(index: tuple[slice, ...]) -> np.ndarray:
    if not leaf.stacked:
      return _pad_rows(_one(tensors[0], leaf, index), index, shape).astype(dtype)
    layers = range(*index[0].indices(shape[0]))
    return np.stack([_one(tensors[i], leaf, index[1:]) for i in layers]).astype(dtype)

  return jax.make_array_from_callback(shape, sharding, read_shard)


def _one(tensor, leaf: names.Leaf, index: tuple[slice, ...]) -> np.ndarray:
  rows = tensor.get_shape()[0]
  if leaf.transposed:
    return np.asarray(tensor[index[1], index[0]]).T
  start, stop, _ = index[0].indices(max(rows, index[0].stop or rows))
  if start >= rows:  # padding only; safetensors has no empty slices at the end
    return np.asarray(tensor[(slice(0, 1), *index[1:])])[:0]
  return np.asarray(tensor[(slice(start, min(stop, rows)), *index[1:])])


def _pad_rows(shard: np.ndarray, index: tuple[slice, ...], shape) -> np.ndarray:
  rows = len(range(*index[0].indices(shape[0])))
  return np.pad(shard, [(0, rows - shard.shape[0])] + [(0, 0)] * (shard.ndim - 1))


def _check_names(checkpoint, wanted, spec: ModelSpec, head: str) -> None:
  expected = {name for leaf in wanted for name in leaf.names}
  missing = sorted(expected - checkpoint.names())
  extra = {
    name
    for name in checkpoint.names() - expected
    if not name.endswith(names.DERIVED_SUFFIXES)
  }
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


def _check_dtype(path, name: str, dtype: str) -> None:
  if dtype not in FLOAT_DTYPES:
    raise ModelError(
      f"{path}: {name} is stored as {dtype}; expected one of {FLOAT_DTYPES} "
      "(quantized checkpoints are not supported)"
    )


def _check_shape(checkpoint, leaf, shape, vocab_size: int) -> None:
  expected = shape[1:] if leaf.stacked else shape
  expected = expected[::-1] if leaf.transposed else expected
  if leaf.path[0] in ("embed", "lm_head"):
    expected = (vocab_size, *expected[1:])  # the padding is ours alone
  for name in leaf.names:
    got = tuple(checkpoint.slice(name).get_shape())
    if got != expected:
      raise ModelError(
        f"{checkpoint.path}: {name} has shape {got}, the config says {expected}"
      )
