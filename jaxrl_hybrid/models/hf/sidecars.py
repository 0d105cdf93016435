"""What lies beside the weights of an HF directory: configs, tokenizer, template."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxrl_hybrid.models.families import load_hf_config

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
TEMPLATE, TEMPLATES_FOLDER = "chat_template.jinja", "additional_chat_templates"
TOKENIZER_FILES = (
  "tokenizer.json",
  "tokenizer_config.json",
  "tokenizer.model",
  "special_tokens_map.json",
  "added_tokens.json",
  "vocab.json",
  "merges.txt",
  "chat_template.json",
  TEMPLATE,
)


def write_config(
  out_dir: Path,
  hf_config: Mapping[str, Any],
  source_dir: str | Path | None,
  dtype: jnp.dtype | None,
) -> None:
  """Writes config.json, and generation_config.json where the source has one.

  Args:
    out_dir: of the new files.
    hf_config: as ``load_hf_config`` gives it, or changed since.
    source_dir: its files stay as they are but for what has changed.
    dtype: of the weights; None: as the configs say.
  """
  config = dict(hf_config)
  if source_dir is not None:
    source = Path(source_dir)
    known = load_hf_config(source)
    written = json.loads((source / CONFIG).read_text(encoding="utf-8"))
    changed = {k: v for k, v in hf_config.items() if k not in known or known[k] != v}
    config = written | changed
    if (source / GENERATION_CONFIG).is_file():
      shutil.copyfile(source / GENERATION_CONFIG, out_dir / GENERATION_CONFIG)
  config.pop("auto_map", None)  # names code that is not copied
  if dtype is not None or not {"dtype", "torch_dtype"} & config.keys():
    config.pop("torch_dtype", None)
    config["dtype"] = jnp.dtype(dtype or "float32").name
  (out_dir / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_tokenizer(out_dir: Path, tokenizer: Any) -> None:
  """Writes an HF tokenizer's files; they are copies unless it has been changed.

  ``save_pretrained`` would write other names of classes and drop files that
  programs without transformers read.
  """
  source = Path(tokenizer.name_or_path or "")
  if not tokenizer.name_or_path or not source.is_dir():
    tokenizer.save_pretrained(out_dir)
    return
  known = type(tokenizer).from_pretrained(
    str(source), trust_remote_code=False, local_files_only=True
  )
  if not _differs_in_template_only(tokenizer, known):
    tokenizer.save_pretrained(out_dir)
    return
  for name in TOKENIZER_FILES:
    if (source / name).is_file():
      shutil.copyfile(source / name, out_dir / name)
  if tokenizer.chat_template != known.chat_template:
    _write_template(out_dir, tokenizer)
  elif (source / TEMPLATES_FOLDER).is_dir():
    shutil.copytree(source / TEMPLATES_FOLDER, out_dir / TEMPLATES_FOLDER)


def _differs_in_template_only(tokenizer: Any, known: Any) -> bool:
  new_template = tokenizer.chat_template != known.chat_template
  return (
    tokenizer.special_tokens_map == known.special_tokens_map
    and tokenizer.get_vocab() == known.get_vocab()
    and not (new_template and isinstance(tokenizer.chat_template, dict))
  )


def _write_template(out_dir: Path, tokenizer: Any) -> None:
  """Replaces the templates that were copied, in all places that HF reads."""
  (out_dir / "chat_template.json").unlink(missing_ok=True)
  (out_dir / TEMPLATE).unlink(missing_ok=True)
  file = out_dir / "tokenizer_config.json"
  if file.is_file():
    config = json.loads(file.read_text(encoding="utf-8"))
    config.pop("chat_template", None)
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    file.write_text(text, encoding="utf-8")
  if tokenizer.chat_template:
    (out_dir / TEMPLATE).write_text(tokenizer.chat_template, encoding="utf-8")
