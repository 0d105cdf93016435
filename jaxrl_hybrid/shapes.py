"""Static shapes: few of them, so that few programs are compiled."""

from __future__ import annotations


def round_up(n: int, multiple: int) -> int:
  """Smallest multiple that is at least n."""
  return -(-n // multiple) * multiple


def bucket(n: int, smallest: int = 8) -> int:
  """Smallest of ``smallest * {1, 1.5, 2, 3, 4, 6, 8, ...}`` that is at least n.

  Two sizes per octave waste at most a third of the positions.
  """
  size = smallest
  while size < n:
    if size + size // 2 >= n:
      return size + size // 2
    size *= 2
  return size
