"""What several processes of one run say to each other.

All of them run the same controller on the same host values. What only process 0
does (rewards, files, the clock) reaches the others from here, errors included:
all raise them, and none waits for one that is gone. Every function here must be
called by all processes in the same order.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrl_hybrid import errors
from jaxrl_hybrid.errors import ConfigError, JaxrlError
from jaxrl_hybrid.parallel.multihost import is_primary
from jaxrl_hybrid.shapes import bucket

T = TypeVar("T")
# None, bool, int, float, str, numpy arrays of numbers, and lists and dicts of these.
Value = Any

_ARRAY = "__array__"  # in the JSON: here was array number n
_INTERRUPT = "KeyboardInterrupt"


def say(text: str) -> None:
  """Prints on process 0."""
  if is_primary():
    print(text, flush=True)


def broadcast(value: Value) -> Value:
  """Process 0's value; what the others give is not looked at.

  Tuples arrive as lists, in process 0 too if there are several processes.
  """
  if jax.process_count() == 1:
    return value
  data = encode(value) if is_primary() else b""
  (size,) = multihost_utils.broadcast_one_to_all(np.array([len(data)], np.int32))
  padded = np.zeros(bucket(int(size), 1024), np.uint8)  # few sizes, few programs
  padded[: len(data)] = np.frombuffer(data, np.uint8)
  received = multihost_utils.broadcast_one_to_all(padded)
  return decode(np.asarray(received)[:size].tobytes())


def on_primary(action: Callable[[], T]) -> T | None:
  """Runs an action on process 0 alone; gives its result there, None elsewhere.

  Raises:
    JaxrlError: the one that it raised on process 0, in every process.
    RuntimeError: in the other processes, if it failed with anything else.
  """
  result, error = None, None
  if is_primary():
    try:
      result = action()
    except BaseException as raised:
      error = raised
  if jax.process_count() > 1:
    failure = broadcast(_failure(error))
    if failure and not is_primary():
      _raise(*failure)
  if error is not None:
    raise error
  return result


def from_primary(action: Callable[[], Value]) -> Value:
  """Runs an action on process 0 alone and gives its result to all.

  Raises:
    as ``on_primary``.
  """
  return broadcast(on_primary(action))


def check_same(parts: Mapping[str, bytes]) -> None:
  """Compares what every process has read by itself.

  Args:
    parts: data by name; the names are the same in all processes.

  Raises:
    ConfigError: in all processes, if one has other data than process 0.
  """
  if jax.process_count() == 1:
    return
  sums = np.array([zlib.crc32(data) for data in parts.values()], np.uint32)
  all_sums = np.asarray(multihost_utils.process_allgather(sums))
  for i, name in enumerate(parts):
    others = np.flatnonzero(all_sums[:, i] != all_sums[0, i])
    if others.size:
      raise ConfigError(
        f"{name}: expected the same in every process, got something else in "
        f"process(es) {others.tolist()} than in process 0; start all of them with "
        "the same command, code and files"
      )


def encode(value: Value) -> bytes:
  """JSON with arrays behind it; refuses (TypeError) what has no such form."""
  arrays: list[np.ndarray] = []
  text = json.dumps(_without_arrays(value, arrays)).encode()
  heads = json.dumps([[x.dtype.str, list(x.shape)] for x in arrays]).encode()
  sizes = np.array([len(text), len(heads)], "<i8").tobytes()
  return b"".join([sizes, text, heads, *(x.tobytes() for x in arrays)])


def decode(data: bytes) -> Value:
  """The value that ``encode`` made these bytes of."""
  text_size, heads_size = np.frombuffer(data[:16], "<i8").tolist()
  at = 16 + text_size
  heads = json.loads(data[at : at + heads_size])
  at += heads_size
  arrays = []
  for dtype, shape in heads:
    array = np.frombuffer(data, dtype, int(np.prod(shape, dtype=int)), at)
    arrays.append(array.reshape(shape).copy())
    at += array.nbytes
  return _with_arrays(json.loads(data[16 : 16 + text_size]), arrays)


def _without_arrays(value: Value, arrays: list[np.ndarray]) -> Any:
  if isinstance(value, np.ndarray):
    if value.dtype.kind not in "biuf":
      raise TypeError(f"cannot broadcast an array of {value.dtype}")
    arrays.append(value)
    return {_ARRAY: len(arrays) - 1}
  if isinstance(value, Mapping):
    if _ARRAY in value or not all(isinstance(key, str) for key in value):
      raise TypeError(f"cannot broadcast a dict with the keys {list(value)}")
    return {key: _without_arrays(x, arrays) for key, x in value.items()}
  if isinstance(value, list | tuple):
    return [_without_arrays(x, arrays) for x in value]
  return value


def _with_arrays(value: Any, arrays: list[np.ndarray]) -> Value:
  if isinstance(value, dict):
    if _ARRAY in value:
      return arrays[value[_ARRAY]]
    return {key: _with_arrays(x, arrays) for key, x in value.items()}
  if isinstance(value, list):
    return [_with_arrays(x, arrays) for x in value]
  return value


def _failure(error: BaseException | None) -> list[str] | None:
  return None if error is None else [type(error).__name__, str(error)]


def _raise(kind: str, message: str) -> None:
  """Raises in another process what process 0 has raised."""
  known = getattr(errors, kind, None)
  if isinstance(known, type) and issubclass(known, JaxrlError):
    raise known(message)
  if kind == _INTERRUPT:
    raise KeyboardInterrupt
  raise RuntimeError(f"process 0 failed: {kind}: {message}")
