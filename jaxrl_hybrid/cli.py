"""What the entry points share: arguments, errors, exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from ml_collections import ConfigDict

from jaxrl_hybrid import config as config_lib
from jaxrl_hybrid import config_reader
from jaxrl_hybrid.errors import JaxrlError
from jaxrl_hybrid.runtime import launch

USER_ERROR = 2  # exit code of a JaxrlError


def load_config(argv: Sequence[str]) -> tuple[ConfigDict, str]:
  """Resolved config and its file's name; devices and numerics are set up."""
  config, file = config_reader.from_argv(argv)
  config = config_lib.resolve(config)
  launch.setup(config)
  return config, file


def split_flags(parser: argparse.ArgumentParser, argv: Sequence[str]):
  """(parsed flags of this entry point, argv of the config)."""
  parser.add_argument(
    "--log_level", default="INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR")
  )
  flags, rest = parser.parse_known_args(argv[1:])
  launch.setup_logging(flags.log_level)
  return flags, [argv[0], *rest]


def run(main: Callable[[Sequence[str]], None]) -> None:
  """Runs an entry point; a user error becomes one message and exit code 2."""
  try:
    main(sys.argv)
  except JaxrlError as error:
    sys.stdout.flush()
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    launch.leave_failed(USER_ERROR)
    sys.exit(USER_ERROR)
  except BrokenPipeError:
    os._exit(1)
  except Exception:
    launch.leave_failed(1)
    raise
