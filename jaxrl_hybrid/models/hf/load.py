"""HF safetensors straight into sharded parameters.

Shard after shard is filled on the host by threads and given to its devices; a
process reads the bytes of its own shards only. Beside the parameters the host
holds one shard and the threads' buffers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_hybrid.errors import ModelError
from jaxrl_hybrid.models import params as params_lib
from jaxrl_hybrid.models.hf import names
from jaxrl_hybrid.models.hf.checkpoint import Checkpoint
from jaxrl_hybrid.models.hf.shards import PIECE_BYTES, ShardReader
from jaxrl_hybrid.models.hf.stored import FLOAT_DTYPES
from jaxrl_hybrid.models.params import Params
from jaxrl_hybrid.models.spec import ModelSpec
from jaxrl_hybrid.parallel import multihost


def load_params(
  path: str | Path,
  spec: ModelSpec,
  shardings: Params,
  *,
  vocab: int,
  head: str = params_lib.LM,
  fresh_head: bool = True,
  dtype: jnp.dtype = jnp.float32,
  kernels_only: bool = False,
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
    kernels_only: that is the dtype of what products round; norms, biases, routers
      and score heads are fp32.

  Raises:
    ModelError: a tensor is missing, left over or of another shape; a score head
      with a bias or of several labels.
  """
  abstract = params_lib.abstract_params(spec, vocab=vocab, head=head)
  with Checkpoint(path) as checkpoint:
    wanted = list(names.leaves(spec, abstract))
    has_head = head != params_lib.VALUE or _has_score_head(checkpoint, spec)
    if not has_head and not fresh_head:
      raise ModelError(
        f"{checkpoint.path}: expected a sequence classifier with a score head "
        f"({names.SCORE}), got none: a causal LM gives no rewards"
      )
    wanted = [leaf for leaf in wanted if has_head or leaf.names != (names.SCORE,)]
    _check_names(checkpoint, wanted, spec, head)
    for leaf in wanted:
      shape = names.get(abstract, leaf.path).shape
      _check_tensors(checkpoint, leaf, leaf.tensor_shape(shape, spec.vocab_size))
    dtype_of = lambda leaf: _dtype_of(leaf, jnp.dtype(dtype), kernels_only)
    params = _read(checkpoint, wanted, abstract, shardings, dtype_of)
  if not has_head:
    of_head = jnp.float32 if kernels_only else dtype
    put = lambda x, sharding: multihost.put(np.asarray(x, of_head), sharding)
    fresh = params_lib.init_value_head(spec)
    params["value_head"] = jax.tree.map(put, fresh, shardings["value_head"])
  return params


def _read(
  checkpoint: Checkpoint,
  wanted: list[names.Leaf],
  abstract: Params,
  shardings: Params,
  dtype_of: Callable[[names.Leaf], jnp.dtype],
) -> Params:
  """The wanted leaves, whose names and shapes have been checked."""
  params: Params = {}
  shapes = [names.get(abstract, leaf.path).shape for leaf in wanted]
  placed = [names.get(shardings, leaf.path) for leaf in wanted]
  largest = max(
    math.prod(sharding.shard_shape(shape)) * dtype_of(leaf).itemsize
    for leaf, shape, sharding in zip(wanted, shapes, placed, strict=True)
  )
  with ShardReader(jnp.dtype(jnp.float32), limit=largest) as reader:
    for leaf, shape, sharding in zip(wanted, shapes, placed, strict=True):
      tensors = np.array([checkpoint.tensors[n] for n in leaf.names], object)
      tensors = tensors.reshape(shape[: leaf.lead])
      array = reader.read(leaf, tensors, shape, sharding, dtype_of(leaf))
      names.put(params, leaf.path, array)
  return params


def _dtype_of(leaf: names.Leaf, dtype: jnp.dtype, kernels_only: bool) -> jnp.dtype:
  path = tuple(map(jax.tree_util.DictKey, leaf.path))
  rounded = not kernels_only or params_lib.is_rounded(path)
  return dtype if rounded else jnp.dtype(jnp.float32)


def _has_score_head(checkpoint: Checkpoint, spec: ModelSpec) -> bool:
  """Whether there is a score head; it must be one that the decoder has."""
  shapes = {
    name: checkpoint.tensors[name].shape
    for name in sorted(checkpoint.names())
    if name.startswith(names.SCORE_PREFIX)
  }
  if shapes and shapes != {names.SCORE: (1, spec.hidden_size)}:
    raise ModelError(
      f"{checkpoint.path}: expected a score head {names.SCORE} of shape "
      f"{(1, spec.hidden_size)} (num_labels=1) without a bias, got {shapes}"
    )
  return bool(shapes)


def _check_names(
  checkpoint: Checkpoint, wanted: list[names.Leaf], spec: ModelSpec, head: str
) -> None:
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


def _check_tied_head(checkpoint: Checkpoint) -> None:
  """A tied checkpoint may hold the head a second time, but not another one.

  Each process compares its part of the rows: an error in one ends all.
  """
  head = checkpoint.tensors["lm_head.weight"]
  embed = checkpoint.tensors["model.embed_tokens.weight"]
  equal = (head.kind, head.shape) == (embed.kind, embed.shape)
  step = PIECE_BYTES // head.row_bytes() + 1
  starts = range(0, head.shape[0], step)[jax.process_index() :: jax.process_count()]
  for start in starts if equal else []:
    rows = range(start, min(start + step, head.shape[0]))
    a, b = (np.empty((len(rows), *t.shape[1:]), t.dtype) for t in (head, embed))
    head.read_rows(rows, None, a)
    embed.read_rows(rows, None, b)
    equal = equal and np.array_equal(a, b)
  if not equal:
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


def _check_tensors(
  checkpoint: Checkpoint, leaf: names.Leaf, shape: tuple[int, ...]
) -> None:
  for name in leaf.names:
    tensor = checkpoint.tensors[name]
    if tensor.kind not in FLOAT_DTYPES:
      raise ModelError(
        f"{tensor.file.path}: {name} is stored as {tensor.kind}; expected one of "
        f"{tuple(FLOAT_DTYPES)} (quantized checkpoints are not supported)"
      )
    if tensor.shape != shape:
      raise ModelError(
        f"{tensor.file.path}: {name} has shape {tensor.shape}, the config says {shape}"
      )
