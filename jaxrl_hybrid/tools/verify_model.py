"""python -m jaxrl_hybrid.tools.verify_model PATH [--dtype float32] [--tokens N]

Does a model compute the same here as in transformers? Runs an HF directory through
both on random tokens and prints how far they are apart: logits and log-probs at
ranges of positions, and a greedy continuation by prefill and cached decode; of a
sequence classifier the scores. Exit code 1 if beyond the tolerance: the largest
difference, relative to the largest logit, log-prob or score.

Needs torch, and memory for the model twice over. Choose N past a rope's original
context to see its scaling.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_hybrid import cli
from jaxrl_hybrid.errors import ConfigError
from jaxrl_hybrid.models import families
from jaxrl_hybrid.models import params as params_lib
from jaxrl_hybrid.models.hf import classifier
from jaxrl_hybrid.tools.local_model import LocalModel, open_model
from jaxrl_hybrid.tools.oracle import Oracle

# Of the dtype both compute in. In 16 bits both round everywhere, and differently:
# only a gross error shows.
TOLERANCES = {"float32": 1e-4, "float16": 5e-2, "bfloat16": 3e-1}
FAILED = 1  # exit code
PROMPT, CONTINUED = 16, 8  # tokens of the greedy continuation
COLUMNS = ("max diff", "mean diff", "max/largest", "same argmax")


@dataclasses.dataclass(frozen=True)
class Row:
  """One line of the table.

  Attributes:
    what: was compared, and where.
    largest: difference.
    mean: difference.
    relative: ``largest`` by the largest magnitude of all that transformers gives.
    agreement: share of equal choices; None where there is nothing to choose.
  """

  what: str
  largest: float
  mean: float
  relative: float
  agreement: float | None = None


def main(argv: Sequence[str]) -> None:
  """Verifies one directory."""
  parser = argparse.ArgumentParser(
    prog="jaxrl_hybrid.tools.verify_model",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("path", type=Path, help="HF directory")
  parser.add_argument("--dtype", choices=TOLERANCES, default="float32")
  parser.add_argument("--tokens", type=int, default=256, help="of the row, N")
  parser.add_argument("--tolerance", type=float, help="default: by dtype")
  flags, rest = cli.split_flags(parser, argv)
  if rest[1:]:
    parser.error(f"unexpected arguments {rest[1:]}")
  if flags.dtype == "float32":
    jax.config.update("jax_default_matmul_precision", "highest")
  rows = verify(flags.path, dtype=flags.dtype, tokens=flags.tokens)
  tolerance = flags.tolerance or TOLERANCES[flags.dtype]
  print(f"{flags.path}, {flags.dtype}, {jax.devices()[0].device_kind}")
  print_table(rows)
  worst = max(row.relative for row in rows)
  equal = worst <= tolerance
  print(
    f"{'equal' if equal else 'NOT EQUAL'}: at most {worst:.2e} apart, tolerance "
    f"{tolerance:.0e}"
  )
  if not equal:
    sys.exit(FAILED)


def verify(path: Path, *, dtype: str, tokens: int) -> list[Row]:
  """The lines of the table.

  Args:
    path: HF directory.
    dtype: that both compute in.
    tokens: length of the random row.

  Raises:
    ConfigError: the row is too short, or longer than the model's positions.
    ModelError: torch is missing, or the directory is not supported.
  """
  hf_config = families.load_hf_config(path, key="PATH")
  spec = families.spec_from_hf(hf_config)
  classifier.check_kind(
    hf_config, (classifier.LM, classifier.CLASSIFIER), key="verify_model PATH"
  )
  if not PROMPT <= tokens <= spec.max_positions - CONTINUED:
    raise ConfigError(
      f"--tokens: expected {PROMPT} to max_position_embeddings - {CONTINUED} = "
      f"{spec.max_positions - CONTINUED}, got {tokens}"
    )
  row_T = np.random.default_rng(0).integers(0, spec.vocab_size, tokens, np.int32)
  compare = _scores if classifier.is_classifier(hf_config) else _language
  return compare(path, dtype, row_T)


def position_ranges(length: int) -> list[range]:
  """0 to 15, and on by factors of four: rope errors grow with the position."""
  bounds = [0, PROMPT]
  while bounds[-1] * 4 < length:
    bounds.append(bounds[-1] * 4)
  bounds = [b for b in bounds if b < length] + [length]
  return [range(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]


def _language(path: Path, dtype: str, row_T: np.ndarray) -> list[Row]:
  theirs = Oracle(path, dtype=dtype)
  expected_TV = theirs.logits(row_T[None])[0]
  chosen, choices_CV = theirs.greedy(row_T[:PROMPT], CONTINUED)
  del theirs  # before ours is loaded
  ours = open_model(path, dtype=jnp.dtype(dtype))
  got_TV = ours.logits(row_T[None])[0]
  log_prob = lambda logits_TV: _log_softmax(logits_TV[:-1])[
    np.arange(len(row_T) - 1), row_T[1:]
  ]
  pairs = {
    "logits": (got_TV, expected_TV),
    "log-probs": (ours.log_probs(row_T[None])[0, 1:], log_prob(expected_TV)),
  }
  rows = [
    _row(f"{what} {r.start}-{r.stop - 1}", got, expected, r)
    for what, (got, expected) in pairs.items()
    for r in position_ranges(len(expected))
  ]
  return [*rows, _greedy_row(ours, row_T[:PROMPT], chosen, choices_CV)]


def _row(what: str, got: np.ndarray, expected: np.ndarray, where: range) -> Row:
  at = slice(where.start, where.stop)
  apart = np.abs(got[at].astype(np.float64) - expected[at])
  agreement = None
  if got.ndim > 1:
    agreement = float(np.mean(got[at].argmax(-1) == expected[at].argmax(-1)))
  largest = float(apart.max())
  relative = largest / float(np.abs(expected).max())
  return Row(what, largest, float(apart.mean()), relative, agreement)


def _greedy_row(
  ours: LocalModel, prompt_P: np.ndarray, chosen: np.ndarray, choices_CV: np.ndarray
) -> Row:
  """How much worse, by transformers' logits, our first other choice is."""
  found = ours.greedy(prompt_P, len(chosen))
  other = np.flatnonzero(found != chosen)
  lost = 0.0
  if other.size:  # what follows has another history
    logits_V = choices_CV[other[0]]
    lost = float(logits_V.max() - logits_V[found[other[0]]])
  agreement = (other[0] if other.size else len(chosen)) / len(chosen)
  relative = lost / float(np.abs(choices_CV).max())
  return Row(f"greedy, {len(chosen)} tokens", lost, lost, relative, agreement)


def _scores(path: Path, dtype: str, row_T: np.ndarray) -> list[Row]:
  lengths = [r.stop for r in position_ranges(len(row_T))]
  theirs = Oracle(path, dtype=dtype, classifier=True)
  expected = np.array([theirs.score(row_T[:length]) for length in lengths])
  del theirs
  ours = open_model(path, dtype=jnp.dtype(dtype), head=params_lib.VALUE)
  got = ours.scores(row_T[None])[0]
  rows = []
  for length, score in zip(lengths, expected, strict=True):
    apart = abs(float(got[length - 1]) - score)
    largest = float(np.abs(expected).max())
    rows.append(Row(f"score of {length} tokens", apart, apart, apart / largest))
  return rows


def _log_softmax(logits_TV: np.ndarray) -> np.ndarray:
  shifted = logits_TV.astype(np.float64) - logits_TV.max(-1, keepdims=True)
  return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def print_table(rows: Sequence[Row]) -> None:
  """One line for each row."""
  width = max(len(row.what) for row in rows)
  print(" " * width + "".join(f"{name:>13}" for name in COLUMNS))
  for row in rows:
    cells = [f"{x:.2e}" for x in (row.largest, row.mean, row.relative)]
    cells.append("-" if row.agreement is None else f"{row.agreement:.1%}")
    print(row.what.ljust(width) + "".join(f"{cell:>13}" for cell in cells))


if __name__ == "__main__":
  cli.run(main)
