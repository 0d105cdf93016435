"""Writes an HF directory of random bfloat16 weights at a real model's shape.

    python scripts/make_random_model.py --shape 7b --out random-7b

Config and safetensors with an index as HF writes them (files of at most 5 GB), no
tokenizer and no torch. Shapes are those of Qwen2.5; ``--layers`` makes it smaller.
For measuring: the values are noise, drawn once and repeated from other places.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxrl_hybrid.models import families
from jaxrl_hybrid.models import params as params_lib
from jaxrl_hybrid.models.hf import names
from jaxrl_hybrid.models.hf.checkpoint import INDEX_FILE
from jaxrl_hybrid.models.spec import ModelSpec

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
SIZES += ("num_attention_heads", "num_key_value_heads")
SHAPES = {  # four of Qwen2.5, and one for a test
  "7b": (152_064, 3584, 18_944, 28, 28, 4),
  "3b": (151_936, 2048, 11_008, 36, 16, 2),
  "1.5b": (151_936, 1536, 8960, 28, 12, 2),
  "0.5b": (151_936, 896, 4864, 24, 14, 2),
  "tiny": (515, 64, 160, 3, 4, 2),
}
POOL = 1 << 22  # different values
STEP = 104_729  # from where one tensor begins to where the next does
FILE_BYTES = 5 * 10**9


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--shape", choices=SHAPES, default="7b")
  parser.add_argument("--layers", type=int, help="other than the model has")
  parser.add_argument("--out", type=Path, required=True)
  parser.add_argument("--file_bytes", type=int, default=FILE_BYTES)
  flags = parser.parse_args(argv)
  if flags.out.exists():
    sys.exit(f"make_random_model: {flags.out} exists; expected a new directory")
  size = make(flags.out, config_of(flags.shape, flags.layers), flags.file_bytes)
  print(f"{flags.out}: {size / 1e9:.2f} GB")


def config_of(shape: str, layers: int | None = None) -> dict[str, object]:
  """The HF config of a shape."""
  config = dict(zip(SIZES, SHAPES[shape], strict=True))
  return config | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    **({"num_hidden_layers": layers} if layers else {}),
  }


def make(out: Path, config: dict[str, object], file_bytes: int = FILE_BYTES) -> int:
  """Writes the directory; returns the bytes of its tensors."""
  partial = out.with_name(out.name + ".partial")
  shutil.rmtree(partial, ignore_errors=True)
  partial.mkdir(parents=True)
  (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
  noise = np.random.default_rng(0).standard_normal(POOL, np.float32) * 0.02
  pool = noise.astype(ml_dtypes.bfloat16)
  files = list(split(tensor_shapes(families.spec_from_hf(config)), file_bytes))
  weight_map, total = {}, 0
  for i, shapes in enumerate(files):
    file = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
    tensors = {
      name: np.resize(pool[number * STEP % POOL :], shape)
      for number, (name, shape) in enumerate(shapes.items(), start=len(weight_map))
    }
    save_file(tensors, partial / file, metadata={"format": "pt"})
    weight_map |= dict.fromkeys(tensors, file)
    total += sum(x.nbytes for x in tensors.values())
  index = {"metadata": {"total_size": total}, "weight_map": weight_map}
  (partial / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
  partial.rename(out)
  return total


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
  """All tensors of a model by their HF names, layer after layer."""
  abstract = params_lib.abstract_params(spec, vocab=spec.vocab_size)
  found = {
    name: leaf.tensor_shape(names.get(abstract, leaf.path).shape, spec.vocab_size)
    for leaf in names.leaves(spec, abstract)
    for name in leaf.names
  }
  number = lambda name: [int(part) for part in name.split(".") if part.isdigit()]
  return {name: found[name] for name in sorted(found, key=lambda n: (number(n), n))}


def split(
  shapes: dict[str, tuple[int, ...]], file_bytes: int
) -> Iterator[dict[str, tuple[int, ...]]]:
  """The tensors of each file, in order."""
  part, size = {}, 0
  for name, shape in shapes.items():
    nbytes = 2 * math.prod(shape)
    if part and size + nbytes > file_bytes:
      yield part
      part, size = {}, 0
    part[name] = shape
    size += nbytes
  yield part


if __name__ == "__main__":
  main()
