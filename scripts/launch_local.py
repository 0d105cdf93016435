#!/usr/bin/env python
"""Starts several processes of one run on this machine.

    python scripts/launch_local.py -n 2 -- -m jaxrl_hybrid.train --config FILE ...

What is behind ``--`` is given to Python, n times, with JAXRL_COORDINATOR,
JAXRL_NUM_PROCESSES and JAXRL_PROCESS_ID set (jaxrl_hybrid/runtime/launch.py).
Standard output is that of process 0. What the others print goes to standard error,
each line with the number of its process in front. With ``--gpus_per_process G``
process i gets the GPUs iG ... iG + G - 1; fake CPU devices need nothing.

The exit code is that of the first process that failed (128 + signal if one
killed it), else 0. When one fails the others have a few seconds to end by
themselves, then they are killed: they would wait for it in vain. Ctrl-C (and
SIGTERM) interrupts all of them; a second one kills them.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

GRACE_S = 5.0  # for the others, once one has failed
INTERRUPT_S = 60.0  # for all, to end the step they are in
POLL_S = 0.1


def main(argv: Sequence[str]) -> int:
  """Runs the processes to their end and returns the exit code."""
  count, gpus, command = _parse(argv)
  signal.signal(signal.SIGTERM, _raise_interrupt)
  port = _free_port()
  processes = [_start(i, count, port, gpus, command) for i in range(count)]
  readers = [_forward(i, process) for i, process in enumerate(processes) if i > 0]
  grace = GRACE_S
  try:
    code = _wait(processes)
  except KeyboardInterrupt:
    code, grace = 128 + signal.SIGINT, INTERRUPT_S
    _say("interrupted; once more to kill")
    for process in processes:
      if process.poll() is None:
        process.send_signal(signal.SIGINT)
  try:
    _let_end(processes, grace)
  except KeyboardInterrupt:
    pass
  _kill(processes)
  for reader in readers:
    reader.join(GRACE_S)
  return code


def _parse(argv: Sequence[str]) -> tuple[int, int, list[str]]:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("-n", type=int, required=True, help="how many processes")
  parser.add_argument("--gpus_per_process", type=int, default=0, metavar="G")
  at = argv.index("--") if "--" in argv else len(argv)
  own, command = list(argv[:at]), list(argv[at + 1 :])
  flags = parser.parse_args(own)
  if flags.n < 1 or flags.gpus_per_process < 0:
    parser.error("expected -n >= 1 and --gpus_per_process >= 0")
  if not command:
    parser.error("expected -- and what Python runs, e.g. -- -m jaxrl_hybrid.train ...")
  return flags.n, flags.gpus_per_process, command


def _start(
  i: int, count: int, port: int, gpus: int, command: list[str]
) -> subprocess.Popen:
  environment = os.environ | {
    "JAXRL_COORDINATOR": f"127.0.0.1:{port}",
    "JAXRL_NUM_PROCESSES": str(count),
    "JAXRL_PROCESS_ID": str(i),
  }
  if gpus:
    own = range(i * gpus, (i + 1) * gpus)
    environment["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, own))
  output = {} if i == 0 else {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
  # In a group of its own: Ctrl-C comes from here, once.
  return subprocess.Popen(
    [sys.executable, *command], env=environment, process_group=0, **output
  )


def _free_port() -> int:
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return probe.getsockname()[1]


def _forward(i: int, process: subprocess.Popen) -> threading.Thread:
  """Copies a process's output to standard error, line by line."""

  def copy() -> None:
    for line in process.stdout:
      sys.stderr.buffer.write(f"[{i}] ".encode() + line)
      sys.stderr.buffer.flush()

  thread = threading.Thread(target=copy, daemon=True)
  thread.start()
  return thread


def _wait(processes: Sequence[subprocess.Popen]) -> int:
  """Until all have ended well or one has not; returns the exit code."""
  while True:
    codes = [process.poll() for process in processes]
    for i, code in enumerate(codes):
      if code:
        _say(f"process {i} of {len(codes)} failed: {_describe(code)}")
        return code if code > 0 else 128 - code
    if all(code == 0 for code in codes):
      return 0
    time.sleep(POLL_S)


def _let_end(processes: Sequence[subprocess.Popen], seconds: float) -> None:
  deadline = time.monotonic() + seconds
  while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
    time.sleep(POLL_S)


def _kill(processes: Sequence[subprocess.Popen]) -> None:
  for i, process in enumerate(processes):
    if process.poll() is None:
      _say(f"process {i} has not ended by itself: killed")
      process.kill()
      process.wait()


def _describe(code: int) -> str:
  return f"exit code {code}" if code > 0 else signal.Signals(-code).name


def _say(text: str) -> None:
  print(f"launch_local: {text}", file=sys.stderr, flush=True)


def _raise_interrupt(*_: object) -> None:
  raise KeyboardInterrupt


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
