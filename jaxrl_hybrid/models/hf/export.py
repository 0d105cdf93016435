"""Parameters back to an HF directory that transformers loads unchanged."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from jaxrl_hybrid.errors import ModelError
from jaxrl_hybrid.models.hf import names
from jaxrl_hybrid.models.hf.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from jaxrl_hybrid.models.hf.sidecars import (
  TEMPLATES_FOLDER,
  write_config,
  write_tokenizer,
)
from jaxrl_hybrid.models.hf.stored import FLOAT_DTYPES
from jaxrl_hybrid.models.params import Params
from jaxrl_hybrid.models.spec import ModelSpec
from jaxrl_hybrid.parallel import multihost

MAX_SHARD_BYTES = 5 * 10**9


def export_hf(
  params: Params,
  spec: ModelSpec,
  out_dir: str | Path,
  *,
  hf_config: Mapping[str, Any],
  tokenizer: Any | None = None,
  source_dir: str | Path | None = None,
  dtype: jnp.dtype | None = None,
  max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
  """Writes config, weights, tokenizer and chat template; atomic.

  All processes call it, process 0 writes. One tensor at a time is gathered.

  Args:
    params: training tree, any sharding; the vocabulary padding is dropped.
    spec: the model.
    out_dir: replaced only when all files are complete.
    hf_config: the config to write (``load_hf_config`` of the source).
    tokenizer: written beside the weights if given; the files that it was loaded from
      are copied unless it has been changed since.
    source_dir: where the parameters come from. Its generation_config.json is kept,
      and its config.json but for what ``hf_config`` has changed.
    dtype: of the tensors; default: that of each tensor in ``source_dir``, else the
      config's, else fp32.
    max_shard_bytes: weights are split into files of at most this size.

  Returns:
    The directory.

  Raises:
    ModelError: ``out_dir`` holds something else than an exported model, or the
      model itself that the parameters come from.
  """
  out_dir = Path(out_dir).absolute()
  check_replaceable(out_dir, source_dir)
  dtypes = _dtypes(hf_config, source_dir, dtype)
  if not multihost.is_primary():
    for _ in _tensors(params, spec, dtypes):
      pass
    multihost.barrier("export")
    return out_dir
  partial = out_dir.with_name(out_dir.name + ".partial")
  shutil.rmtree(partial, ignore_errors=True)
  partial.mkdir(parents=True)
  write_config(partial, hf_config, source_dir, dtype)
  _write_weights(params, spec, partial, dtypes, max_shard_bytes)
  if tokenizer is not None:
    write_tokenizer(partial, tokenizer)
  if out_dir.exists():
    shutil.rmtree(out_dir)
  os.replace(partial, out_dir)
  multihost.barrier("export")
  return out_dir


def check_replaceable(out_dir: Path, source_dir: str | Path | None = None) -> None:
  """An export replaces an earlier export or an empty directory, nothing else.

  Args:
    out_dir: where it goes.
    source_dir: the model that training began with: a run's reference, the base of
      its adapters and of the next export, so it must stay.

  Raises:
    ModelError: it would replace something else.
  """
  if not out_dir.exists():
    return
  if source_dir is not None and out_dir.resolve() == Path(source_dir).resolve():
    raise ModelError(
      f"{out_dir} is the model that training began with, which reference and adapters "
      "need unchanged; expected another directory"
    )
  earlier = out_dir.is_dir() and (
    (out_dir / "config.json").is_file() or not any(out_dir.iterdir())
  )
  if not earlier or any(
    child.is_dir() and child.name != TEMPLATES_FOLDER for child in out_dir.iterdir()
  ):
    raise ModelError(
      f"{out_dir} is not an exported model and would be replaced; expected a new or "
      "empty directory"
    )


def _dtypes(
  hf_config: Mapping[str, Any],
  source_dir: str | Path | None,
  dtype: jnp.dtype | None,
) -> Callable[[str], jnp.dtype]:
  """The dtype of each tensor, by its name."""
  stored: dict[str, jnp.dtype] = {}
  if dtype is None and source_dir is not None:
    with Checkpoint(source_dir) as checkpoint:
      stored = {
        name: tensor.dtype
        for name, tensor in checkpoint.tensors.items()
        if tensor.kind in FLOAT_DTYPES
      }
  dtype = dtype or hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32"
  default = jnp.dtype(dtype)
  return lambda name: stored.get(name, default)


def _write_weights(params, spec, directory, dtypes, max_shard_bytes) -> None:
  files: list[dict[str, np.ndarray]] = [{}]
  written: list[list[str]] = []
  size = total = 0
  for name, tensor in _tensors(params, spec, dtypes):
    if files[0] and size + tensor.nbytes > max_shard_bytes:
      _flush(files[0], directory, written)
      size = 0
    files[0][name] = tensor
    size += tensor.nbytes
    total += tensor.nbytes
  _flush(files[0], directory, written)
  if len(written) == 1:
    os.replace(directory / _part(0), directory / SINGLE_FILE)
    return
  weight_map = {}
  for i, tensor_names in enumerate(written):
    final = f"model-{i + 1:05d}-of-{len(written):05d}.safetensors"
    os.replace(directory / _part(i), directory / final)
    weight_map |= dict.fromkeys(tensor_names, final)
  (directory / INDEX_FILE).write_text(
    json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    + "\n"
  )


def _flush(tensors: dict[str, np.ndarray], directory: Path, written: list) -> None:
  save_file(tensors, directory / _part(len(written)), metadata={"format": "pt"})
  (directory / _part(len(written))).chmod(0o644)  # the library makes it private
  written.append(list(tensors))
  tensors.clear()


def _part(i: int) -> str:
  return f"part-{i}.safetensors"


def _tensors(
  params: Params, spec: ModelSpec, dtypes: Callable[[str], jnp.dtype]
) -> Iterator[tuple[str, np.ndarray]]:
  """All HF tensors, one at a time; parts of one tensor come one after the other."""
  parts: list[np.ndarray] = []
  by_name = itertools.groupby(
    _rows_of_tensors(params, spec), key=lambda named: named[0]
  )
  for name, found in by_name:
    parts = [part for _, part in found]
    tensor = parts[0] if len(parts) == 1 else np.concatenate(parts)
    yield name, np.ascontiguousarray(tensor.astype(dtypes(name)))


def _rows_of_tensors(
  params: Params, spec: ModelSpec
) -> Iterator[tuple[str, np.ndarray]]:
  leaves = list(names.leaves(spec, params))
  for _, group in itertools.groupby(leaves, key=lambda leaf: leaf.names):
    group = list(group)
    for i, name in enumerate(group[0].names):
      for leaf in group:
        array = names.get(params, leaf.path)
        place = np.unravel_index(i, array.shape[: leaf.lead]) if leaf.lead else ()
        tensor = multihost.gather(array, tuple(map(int, place)))
        tensor = tensor[: spec.vocab_size] if leaf.is_vocab else tensor
        yield name, tensor.T if leaf.transposed else tensor
