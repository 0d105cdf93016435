"""GGUF file -> Hugging Face directory, without torch.

A GGUF file holds weights (often quantized), hyper-parameters and the tokenizer.
``convert_gguf`` writes them as the files that every HF loader reads, so the rest
of the package knows one format. Families are rows of ``_FAMILIES``, tokenizers
rows of a table in gguf_tokenizer.py. What is not in a table stops the
conversion: a weight or a hyper-parameter that is silently dropped gives a model
that runs and is wrong.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxrl_hybrid.errors import ModelError
from jaxrl_hybrid.models.hf.gguf_metadata import Metadata
from jaxrl_hybrid.models.hf.gguf_rope import FACTORS, rope_scaling
from jaxrl_hybrid.models.hf.gguf_tokenizer import write_tokenizer

_DTYPES = {
  "bfloat16": np.dtype(ml_dtypes.bfloat16),
  "float16": np.dtype(np.float16),
  "float32": np.dtype(np.float32),
}

_TOP = {
  "token_embd.weight": "model.embed_tokens.weight",
  "output_norm.weight": "model.norm.weight",
  "output.weight": "lm_head.weight",  # absent: tied to the embedding
}
_LAYER = {
  "attn_norm.weight": "input_layernorm.weight",
  "attn_q.weight": "self_attn.q_proj.weight",
  "attn_k.weight": "self_attn.k_proj.weight",
  "attn_v.weight": "self_attn.v_proj.weight",
  "attn_output.weight": "self_attn.o_proj.weight",
  "ffn_norm.weight": "post_attention_layernorm.weight",
  "ffn_gate.weight": "mlp.gate_proj.weight",
  "ffn_up.weight": "mlp.up_proj.weight",
  "ffn_down.weight": "mlp.down_proj.weight",
}
_QKV_BIAS = {
  "attn_q.bias": "self_attn.q_proj.bias",
  "attn_k.bias": "self_attn.k_proj.bias",
  "attn_v.bias": "self_attn.v_proj.bias",
}
_QK_NORM = {
  "attn_q_norm.weight": "self_attn.q_norm.weight",
  "attn_k_norm.weight": "self_attn.k_norm.weight",
}


@dataclasses.dataclass(frozen=True)
class _Family:
  """One GGUF architecture: its HF class, its layer names, its RoPE layout."""

  hf_class: str
  layer: Mapping[str, str]
  # Names of the head counts of the tensors whose rows GGUF stores with the two
  # halves of each head interleaved.
  permuted: Mapping[str, str] = dataclasses.field(default_factory=dict)
  config: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_FAMILIES = {
  "llama": _Family(
    "LlamaForCausalLM",
    _LAYER,
    permuted={
      "attn_q.weight": "num_attention_heads",
      "attn_k.weight": "num_key_value_heads",
    },
    config={"attention_bias": False, "mlp_bias": False},
  ),
  "qwen2": _Family("Qwen2ForCausalLM", {**_LAYER, **_QKV_BIAS}),
  "qwen3": _Family(
    "Qwen3ForCausalLM", {**_LAYER, **_QK_NORM}, config={"attention_bias": False}
  ),
}

# Keys below "<architecture>." that are read, or that say nothing about the maths.
_KNOWN_KEYS = frozenset(
  {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "tensor_data_layout",
    "vocab_size",
  }
)


def convert_gguf(source: Path, out_dir: Path, *, dtype: str = "bfloat16") -> None:
  """Writes the model in a GGUF file as a Hugging Face directory.

  Args:
    source: the ``.gguf`` file; quantized tensors are dequantized.
    out_dir: the directory to make. It appears whole or not at all; a directory
      that holds files is never overwritten.
    dtype: of the written weights: bfloat16, float16 or float32.

  Raises:
    ModelError: if anything in the file is not understood.
  """
  out_dir = Path(out_dir)
  if dtype not in _DTYPES:
    raise ModelError(f"dtype is {dtype!r}; expected one of {', '.join(_DTYPES)}")
  if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
    raise ModelError(f"{out_dir} exists and is not empty: remove it or name another")
  meta = Metadata(Path(source))
  family = _family(meta)
  partial = out_dir.with_name(f".{out_dir.name}.partial-{os.getpid()}")
  partial.mkdir(parents=True)
  try:
    config = _config(meta, family, dtype)
    tensors = _tensors(meta, family, config, _DTYPES[dtype])
    _write_json(partial / "config.json", config)
    weights = partial / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    shutil.copymode(partial / "config.json", weights)  # safetensors writes 0600
    _write_json(partial / "generation_config.json", _generation_config(meta))
    write_tokenizer(meta, partial)
    partial.rename(out_dir)
  finally:
    shutil.rmtree(partial, ignore_errors=True)


def _family(meta: Metadata) -> _Family:
  """Returns the family of a file of which every hyper-parameter is known."""
  if meta.architecture not in _FAMILIES:
    raise ModelError(
      f"GGUF architecture {meta.architecture!r} is not supported; "
      f"expected one of {', '.join(_FAMILIES)}"
    )
  if meta.get("split.count", 1) > 1:
    raise ModelError("this GGUF file is one of several: merge the split files first")
  unknown = meta.arch_keys() - _KNOWN_KEYS
  if unknown:
    raise ModelError(
      f"GGUF key '{meta.architecture}.{min(unknown)}' is not known and may change "
      "what the model computes"
    )
  return _FAMILIES[meta.architecture]


def _config(meta: Metadata, family: _Family, dtype: str) -> dict[str, Any]:
  """Returns the contents of config.json."""
  heads = meta.arch("attention.head_count")
  width = meta.arch("embedding_length")
  names = {t.name for t in meta.tensors}
  head_dim = _head_dim(meta, width // heads)
  return {
    "architectures": [family.hf_class],
    "model_type": meta.architecture,
    "dtype": dtype,
    "hidden_act": "silu",  # of all these families; GGUF does not name it
    "hidden_size": width,
    "intermediate_size": meta.arch("feed_forward_length"),
    "num_hidden_layers": meta.arch("block_count"),
    "num_attention_heads": heads,
    "num_key_value_heads": meta.arch("attention.head_count_kv", heads),
    "head_dim": head_dim,
    "max_position_embeddings": meta.arch("context_length"),
    "rms_norm_eps": meta.arch_float("attention.layer_norm_rms_epsilon"),
    "rope_theta": meta.arch_float("rope.freq_base", 10000.0),
    "rope_scaling": rope_scaling(meta, head_dim),
    "tie_word_embeddings": "output.weight" not in names,
    "vocab_size": len(meta.need("tokenizer.ggml.tokens")),
    **family.config,
    **meta.token_ids("bos", "eos", "pad"),
  }


def _head_dim(meta: Metadata, default: int) -> int:
  head_dim = meta.arch("attention.key_length", default)
  for key in ("attention.value_length", "rope.dimension_count"):
    value = meta.arch(key, head_dim)
    if value != head_dim:
      raise ModelError(
        f"GGUF key '{meta.architecture}.{key}' is {value}, but the width of a "
        f"head is {head_dim}: not supported"
      )
  return head_dim


def _generation_config(meta: Metadata) -> dict[str, Any]:
  """Returns the contents of generation_config.json: all ids that end a turn."""
  config: dict[str, Any] = {**meta.token_ids("bos", "eos", "pad")}
  ends = [meta.token_id(name) for name in ("eos", "eot", "eom")]
  ends = list(dict.fromkeys(i for i in ends if i is not None))
  if len(ends) > 1:
    config["eos_token_id"] = ends
  return config


def _tensors(
  meta: Metadata, family: _Family, config: Mapping[str, Any], dtype: np.dtype
) -> dict[str, np.ndarray]:
  """Returns all weights by their HF names."""
  names = _tensor_names(meta, family, config)
  result = {}
  for tensor in meta.tensors:
    if tensor.name == FACTORS:
      continue  # in the config
    array = _dequantize(tensor)
    heads = family.permuted.get(tensor.name.split(".", 2)[-1])
    if heads is not None:
      array = _unpermute(array, config[heads])
    result[names[tensor.name]] = np.ascontiguousarray(array.astype(dtype))
  rows = len(result["model.embed_tokens.weight"])
  if rows != config["vocab_size"]:
    raise ModelError(
      f"the embedding has {rows} rows, but the tokenizer {config['vocab_size']} tokens"
    )
  return result


def _tensor_names(
  meta: Metadata, family: _Family, config: Mapping[str, Any]
) -> dict[str, str]:
  """Returns GGUF name -> HF name; nothing in the file is left over or missing."""
  names = dict(_TOP)
  if config["tie_word_embeddings"]:
    del names["output.weight"]
  for i in range(config["num_hidden_layers"]):
    for name, hf_name in family.layer.items():
      names[f"blk.{i}.{name}"] = f"model.layers.{i}.{hf_name}"
  found = {t.name for t in meta.tensors} - {FACTORS}
  if found != names.keys():
    what, wrong = "unknown", found - names.keys()
    if not wrong:
      what, wrong = "missing", names.keys() - found
    raise ModelError(
      f"{what} tensor {min(wrong)!r} ({len(wrong)} in all) in a GGUF file of "
      f"architecture {meta.architecture!r}"
    )
  return names


def _dequantize(tensor: gguf.ReaderTensor) -> np.ndarray:
  try:
    return np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type))
  except NotImplementedError as error:
    raise ModelError(
      f"tensor {tensor.name!r}: cannot dequantize {tensor.tensor_type.name}"
    ) from error


def _unpermute(array: np.ndarray, heads: int) -> np.ndarray:
  """Puts the rows of each head from (x0, y0, x1, y1, …) to (x0, x1, …, y0, …)."""
  pairs = array.reshape(heads, -1, 2, array.shape[-1])
  return pairs.swapaxes(1, 2).reshape(array.shape)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
  path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
