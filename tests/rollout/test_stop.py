"""Stop strings against the plain definition: the shortest prefix with one in it."""

import random

import numpy as np
import pytest

from jaxrl_hybrid.rollout.stop import StopStrings


class Pieces:
  """A tokenizer whose tokens are pieces of text; the last one is special."""

  def __init__(self, pieces):
    self.pieces = [*pieces, ""]

  def decode(self, ids, *, skip_special_tokens):
    assert skip_special_tokens
    return "".join(self.pieces[i] for i in ids)


PIECES = Pieces(["a", "b", "ab", "\n", "User", ":", "Us", "er", "é"])


def plain(ids, strings):
  for count in range(1, len(ids) + 1):
    text = PIECES.decode(ids[:count], skip_special_tokens=True)
    if any(s in text for s in strings):
      return count
  return None


@pytest.mark.parametrize("strings", [("\nUser:",), ("aba", "é\n"), ("User", "bb")])
def test_equals_the_shortest_prefix_with_a_stop_string(strings):
  stop, rng, found = StopStrings(PIECES, strings), random.Random(0), 0
  for _ in range(300):
    ids = [rng.randrange(len(PIECES.pieces)) for _ in range(rng.randint(1, 60))]
    expected = plain(ids, strings)
    got, checked = None, 0
    while got is None and checked < len(ids):  # as tokens arrive, some at a time
      upto = min(len(ids), checked + rng.randint(1, 9))
      got = stop.first(np.array(ids[:upto]), checked)
      checked = upto
    assert got == expected
    found += got is not None
  assert 10 < found < 300
