"""How often each row is drawn: by what it is, and by how it was answered so far."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_hybrid.errors import ConfigError, DataError

Row = Mapping[str, Any]


def base_weights(
  rows: Sequence[Row],
  weight_fn: Callable[[Row], float] | None,
  domain_boost: Mapping[str, float],
  *,
  domain_key: str,
  name: str,
) -> np.ndarray:
  """fp64 ``[rows]``: ``weight_fn(row) * domain_boost[row[domain_key]]``.

  Args:
    rows: all columns of each row.
    weight_fn: None: 1 for all rows.
    domain_boost: factors by domain as text; 1 for domains that are not there.
    domain_key: the column that names a row's domain.
    name: what messages call the data.

  Raises:
    DataError: a weight that is no finite number >= 0, or no row has one above 0.
    ConfigError: a boost that is not > 0, or of a domain that no row has.
  """
  weights = np.ones(len(rows))
  if weight_fn is not None:
    weights[:] = [
      _weight(weight_fn, row, f"{name}, row {i}") for i, row in enumerate(rows)
    ]
  if domain_boost:
    _check_boost(domain_boost, rows, domain_key, name)
    weights *= [domain_boost.get(str(row.get(domain_key)), 1.0) for row in rows]
  if not weights.any():
    raise DataError(f"{name}: expected a row of a weight above 0, got none")
  return weights


class PassRates:
  """How often each row's answers were right, the recent ones counting more.

  A row that was answered n more times, k of them right, has

      right <- decay * right + k        tried <- decay * tried + n
      p = (right + 1) / (tried + 2)     factor = floor + (1 - floor) * 4 p (1 - p)

  so a row that was never drawn has factor 1, as has one that is right every other
  time, and one that is always or never right comes near ``floor``: a group of equal
  rewards teaches nothing (Shao et al. 2024, arXiv:2402.03300).
  """

  def __init__(self, count: int, *, pass_score: float, floor: float, decay: float):
    """
    Args:
      count: rows.
      pass_score: the least score of a right answer.
      floor: the least factor, in (0, 1]; 1: all factors are 1.
      decay: in [0, 1]; 1 forgets nothing.

    Raises:
      ConfigError: a value out of its range.
    """
    if not (0 < floor <= 1 and 0 <= decay <= 1 and np.isfinite(pass_score)):
      raise ConfigError(
        "expected a finite pass_score, floor in (0, 1] and decay in [0, 1], got "
        f"{pass_score=}, {floor=}, {decay=}"
      )
    self._pass_score, self._floor, self._decay = pass_score, floor, decay
    self._right, self._tried = np.zeros(count), np.zeros(count)

  @property
  def rates(self) -> np.ndarray:
    """fp64 ``[rows]``: p."""
    return (self._right + 1) / (self._tried + 2)

  @property
  def factors(self) -> np.ndarray:
    """fp64 ``[rows]``."""
    rates = self.rates
    return self._floor + (1 - self._floor) * 4 * rates * (1 - rates)

  def learn(self, rows_N: np.ndarray, scores_N: np.ndarray) -> None:
    """Takes in N scored answers; ``rows_N`` are the indices of their rows."""
    rows, index = np.unique(rows_N, return_inverse=True)
    index = index.reshape(-1)
    right = np.bincount(index, scores_N >= self._pass_score, minlength=len(rows))
    tried = np.bincount(index, minlength=len(rows))
    self._right[rows] = self._decay * self._right[rows] + right
    self._tried[rows] = self._decay * self._tried[rows] + tried

  def state(self) -> dict[str, list]:
    """Of the rows that were drawn, as plain JSON data."""
    rows = np.flatnonzero(self._tried)
    return {
      "rows": rows.tolist(),
      "right": self._right[rows].tolist(),
      "tried": self._tried[rows].tolist(),
    }

  def restore(self, state: Mapping[str, list]) -> None:
    """Continues from a ``state``."""
    rows = np.array(state["rows"], np.int64)
    self._right[:], self._tried[:] = 0, 0
    self._right[rows], self._tried[rows] = state["right"], state["tried"]


class WeightedDraws:
  """Draws rows by base weight times learned factor; the same state, the same rows.

  A draw of k rows is without replacement: the k largest of ``log w + Gumbel``
  (Efraimidis and Spirakis 2006). More rows than there are come in rounds.
  """

  def __init__(self, base: np.ndarray, rates: PassRates, *, seed: int):
    """
    Args:
      base: fp64 ``[rows]``, >= 0, not all 0.
      rates: of the same rows.
      seed: of the random numbers, together with the number of the draw.
    """
    self._base, self._seed = base, seed
    self.rates = rates
    self._draws = 0

  @property
  def weights(self) -> np.ndarray:
    """fp64 ``[rows]``, as the next draw uses them."""
    return self._base * self.rates.factors

  def draw(self, count: int, among: np.ndarray | None = None) -> np.ndarray:
    """Indices of ``count`` rows; ``among``: the indices that are to be had."""
    among = np.arange(len(self._base)) if among is None else among
    weights = self.weights[among]
    among, weights = among[weights > 0], weights[weights > 0]
    found: list[np.ndarray] = []
    while (missing := count - sum(map(len, found))) > 0:
      key = np.random.SeedSequence((self._seed, self._draws, len(found)))
      noise = np.random.Generator(np.random.Philox(key)).gumbel(size=len(weights))
      order = np.argsort(-(np.log(weights) + noise), kind="stable")
      found.append(among[order[:missing]])
    self._draws += 1
    return np.concatenate(found)

  def state(self) -> dict[str, Any]:
    """As plain JSON data."""
    return {
      "draws": self._draws,
      "weights": self._digest(),
      "rates": self.rates.state(),
    }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Continues exactly where ``state`` was taken.

    Raises:
      DataError: the state is of other rows or weights. Nothing is changed then.
    """
    if state.get("weights") != self._digest():
      raise DataError(
        "state of the sampler is of other rows or weights; resume with the same data, "
        "weight function and domain boosts"
      )
    self._draws = int(state["draws"])
    self.rates.restore(state["rates"])

  def _digest(self) -> str:
    return hashlib.sha256(self._base.astype("<f8").tobytes()).hexdigest()[:16]


def _weight(weight_fn: Callable[[Row], float], row: Row, where: str) -> float:
  try:
    weight = float(weight_fn(row))
  except Exception as error:  # whatever the user's function raises
    raise DataError(
      f"{where}: the weight function failed with {type(error).__name__}: {error}; "
      f"columns are {', '.join(map(str, row))}"
    ) from error
  if not 0 <= weight < np.inf:
    raise DataError(f"{where}: expected a finite weight >= 0, got {weight}")
  return weight


def _check_boost(
  boost: Mapping[str, float], rows: Sequence[Row], key: str, name: str
) -> None:
  found = {str(row[key]) for row in rows if key in row}
  for domain, factor in boost.items():
    if not 0 < factor < np.inf:
      raise ConfigError(f"domain_boost: expected {domain!r} > 0, got {factor}")
    if domain not in found:
      raise ConfigError(
        f"domain_boost: no row of {name} has {domain!r} in column {key!r}; there are "
        f"{', '.join(sorted(found)[:20]) or 'no such columns'}"
      )
